"""Section `rl` of params.yaml: the parts of an algorithm (stages/algorithms/parts) and how it is trained. The method chooses keys
that are not set: resolve.py. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.algorithms.parts.advantage import Advantage
from stages.algorithms.parts.branching import Branching
from stages.algorithms.parts.cost import Cost
from stages.algorithms.parts.credit import Credit
from stages.algorithms.parts.critic import Critic
from stages.algorithms.parts.curriculum import Curriculum
from stages.algorithms.parts.external import External
from stages.algorithms.parts.group_resampling import GroupResampling
from stages.algorithms.parts.guidance import Guidance
from stages.algorithms.parts.horizon import Horizon
from stages.algorithms.parts.imitation import Imitation
from stages.algorithms.parts.judge import Judge
from stages.algorithms.parts.loss import Loss
from stages.algorithms.parts.observation import Observation
from stages.algorithms.parts.part import Layered
from stages.algorithms.parts.preference import Preference
from stages.algorithms.parts.reannotate import Reannotate
from stages.algorithms.parts.references import References
from stages.algorithms.parts.replay import Replay
from stages.algorithms.parts.reward import Reward
from stages.algorithms.parts.selection import Selection
from stages.algorithms.parts.sparse import Sparse
from stages.algorithms.parts.tasks import Tasks
from stages.algorithms.parts.team import Team
from stages.algorithms.parts.verifier import Verifier
from stages.engine.settings import SamplingParams
from stages.runtime.unshardable import SPARSE, WARM_START
from stages.runtime.validation import Count, NonNegative, Positive, Section, Share


class Rl(Layered):
    """Reinforcement learning of one specialist per domain: the method, and how it is trained."""

    layered = frozenset({"minibatches"})

    algorithm: str = "grpo"
    """A module of stages/algorithms/methods, or an entry point of the group bellwether.algorithms."""
    settings: Any = {}
    """The algorithm's own keys, where it has any: a mapping, or (resolved) the algorithm's own section."""
    warm_start: dict[str, Any] = {}
    """Training before that of `algorithm`, as keys of this section with an algorithm that learns from annotate's trees or the
    rollout stage's attempts: {algorithm: tree_bc, steps: 20}, {algorithm: step_dpo, steps: 20} or {algorithm: rejection_sft,
    steps: 20}. Absent keys have their defaults, `seed` this section's value. The policy after it is the reference of KL terms and
    preference losses. {}: none. Not set: the method's, which few have."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of rl's random draws; null: the run's seed. Runs that differ only in it share all stages before rl."""
    steps: Count = 20
    """Training steps."""
    environment_steps: Count | None = None
    """Stop after the step that brings the turns played to this number, if `steps` is not reached first."""
    add_tree_steps: bool = False
    """Raise environment_steps by those of annotate's trees, to compare rl without trees at equal cost with rl that learns from
    them. Steps that the search repeated to return to a state count."""
    stop_at_success: Share | None = None
    """Stop after the step that ends five in which this share of the episodes succeeded: to compare methods at equal success."""
    tasks_per_step: Count = 16
    """Groups per step."""
    group_size: Annotated[int, Field(ge=1, le=256)] = 8
    """Episodes per task."""
    epochs: Count = 1
    """Passes over each batch of episodes."""
    minibatches: Count = 1
    """Optimiser steps per pass. Not set: the method's number, but at most one per task."""
    learning_rate: Positive = 3e-4
    """AdamW's, after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    """Steps in which the learning rate rises."""
    weight_decay: NonNegative = 0.0
    """AdamW's."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    checkpoint_every: Count = 5
    """Steps."""
    sampling: SamplingParams = SamplingParams()
    """With top_p or top_k, the engine records the tokens that they leave, over which the training pass then renormalises."""
    dead_groups: Literal["keep", "drop"] = "drop"
    """`drop` leaves groups that add nothing to the gradient out of the forward pass; denominators do not change."""
    share_prefixes: bool = True
    """Read what episodes have in common at their start (prompts, equal first turns) once for all of them; False: read every
    episode whole. The same gradient to float rounding."""
    reward: Reward = Reward()
    cost: Cost = Cost()
    judge: Judge = Judge()
    references: References = References()
    verifier: Verifier = Verifier()
    branching: Branching = Branching()
    group_resampling: GroupResampling = GroupResampling()
    external: External = External()
    horizon: Horizon = Horizon()
    advantage: Advantage = Advantage()
    credit: Credit = Credit()
    loss: Loss = Loss()
    observation: Observation = Observation()
    critic: Critic = Critic()
    replay: Replay = Replay()
    sparse: Sparse = Sparse()
    imitation: Imitation = Imitation()
    reannotate: Reannotate = Reannotate()
    preference: Preference = Preference()
    guidance: Guidance = Guidance()
    curriculum: Curriculum = Curriculum()
    selection: Selection = Selection()
    tasks: Tasks = Tasks()
    team: Team = Team()
    roles: dict[str, dict[str, Any]] = {}
    """Role -> keys of this section with other values for the episodes of that role, such as
    {proposer: {advantage: {mean: none}}}; which roles there are depends on tasks.source. The method chooses for each role what is
    not set. {}: nothing is set."""

    @field_validator("settings")
    @classmethod
    def _keys(cls, value: Any) -> Any:
        if not isinstance(value, (Mapping, Section)):
            raise ValueError("must be a mapping of the algorithm's own keys; {} where it has none")
        return value

    @model_validator(mode="after")
    def _groups(self) -> Rl:
        if self.minibatches > self.tasks_per_step:
            raise ValueError("minibatches are made of whole groups: at most tasks_per_step of them")
        return self

    @property
    def unshardable(self) -> str | None:
        """Why FSDP can't train by these settings, and the remedy; None if it can."""
        if self.warm_start:
            return WARM_START
        return SPARSE if self.sparse.active else self.advantage.unshardable
