"""Settings of auto-regressive soft Q-learning; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.control.off_policy.settings import Loop
from stages.runtime.validation import Count, NonNegative, Positive, Section, Share, refuse_idle

Learner = Literal["arsq", "sac", "bc"]


class DemoTerm(Section):
    """What holds the policy near the data's actions (stages/control/soft_q/arsq.py)."""

    kind: Literal["none", "logsumexp", "margin"] = "none"
    """logsumexp: the other bins' soft maximum against the data's bin; margin: their mean against it."""
    weight: NonNegative = 1.0
    temperature: Positive = 1.0
    """Of logsumexp."""
    least: float = -1.0
    """The term of a position stops falling here."""
    reduce: Literal["demonstrations", "batch_sum"] = "demonstrations"
    """demonstrations: their mean; batch_sum: the sum over all rows, as the reference code's margin has it in effect."""

    @model_validator(mode="after")
    def _idle(self) -> DemoTerm:
        every = {"weight", "temperature", "least", "reduce"}
        idle = {"none": every, "margin": {"temperature"}, "logsumexp": set()}[self.kind]
        if named := sorted(idle & self.model_fields_set):
            raise ValueError(f"{named[0]} has no effect with kind: {self.kind}; remove it")
        return self


class Discretised(Section):
    """Soft Q-values of discretised actions."""

    levels: Annotated[int, Field(ge=1, le=4)] = 1
    """Each zooms into the chosen bin of the one before."""
    bins: Annotated[int, Field(ge=2, le=64)] = 8
    """Per dimension and level."""
    condition: Literal["prefix", "none"] = "prefix"
    """prefix: a dimension's values depend on the bins chosen before; none: dimensions are independent."""
    alpha: Positive = 0.05
    """Temperature of the soft values, in units of reward."""
    order: Literal["level_major", "dimension_major"] = "level_major"
    """Of the choices. level_major: all dimensions of a level, then the next level, as in the paper; dimension_major, ours: all
    levels of a dimension, then the next one."""
    first_dimension: Literal["first", "last"] = "first"
    """Ours: whether the action's first or its last dimension is chosen first. It matters for finite networks."""
    demo: DemoTerm = DemoTerm()
    bellman_weight: NonNegative = 1.0
    """Of the squared error of Q, beside the term of the demonstrations; the reference code has 0.1 on RLBench."""
    weight_decay: NonNegative = 0.0
    """AdamW's; the reference code has 0.1 on RLBench."""
    first_weights: Literal["uniform", "orthogonal"] = "uniform"
    """orthogonal: with gain sqrt(2), biases of 0 and last layers of gain 0.01, as in the reference code."""
    activation: Literal["relu", "silu", "tanh", "gelu"] = "relu"
    """The reference code has tanh, three layers of width 512."""
    width: Count = 64
    layers: Count = 2

    @model_validator(mode="after")
    def _order(self) -> Discretised:
        refuse_idle(self, "", {"order": (self.levels > 1, "two levels or more")})
        return self


class SoftQLearning(Loop, Discretised):
    """ARSQ in the off-policy loop (stages/control/soft_q/agent.py)."""

    target_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """Share of the networks in their slow copies per update."""
    updates_per_step: Count = 1
    """Of each environment."""
    act_network: Literal["online", "target"] = "online"
    """Which networks act: those that learn, as in the reference code on D4RL, or their slow copies, as on RLBench."""


class SoftQTask(SoftQLearning):
    """ARSQ on a task of Gymnasium, with or without a data set of demonstrations (stages/control/soft_q/online.py)."""

    folder: str = "data/control"
    """Where data sets are, as in Minari's MINARI_DATASETS_PATH."""
    dataset: str | None = None
    """Demonstrations in Minari's format, such as pendulum/medium-v0, which the replay buffer begins with; null: none."""
    demonstration_share: Share = 0.5
    """With a data set: of each batch."""

    @model_validator(mode="after")
    def _needs_data(self) -> SoftQTask:
        given = (self.dataset is not None, "a dataset")
        refuse_idle(self, "", {"folder": given, "demonstration_share": given})
        if self.demo.kind != "none" and not (self.dataset and self.demonstration_share):
            raise ValueError("demo: there are no demonstrations in a batch; remove demo, or name a dataset")
        if self.dataset and self.distractors:
            raise ValueError(f"distractors {self.distractors}: observations of a dataset have none; remove one of them")
        return self


ARSQ_ONLY = (
    *("levels", "bins", "condition", "order", "first_dimension", "demo"),
    *("bellman_weight", "weight_decay", "first_weights", "activation"),
)


class JointActions(Discretised):
    """Offline Q-learning over actions of two parts that depend on each other (stages/control/soft_q/joint_actions.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    learner: Learner = "arsq"
    """sac: soft actor-critic on the same data, with the temperature `alpha`; bc: behaviour cloning."""
    rewards: Literal["signs", "ring"] = "signs"
    """signs: by the signs of both parts; ring: 1 between the radii 0.5 and 0.9 and -1 elsewhere. Half of a ring's data are on it,
    in all directions, and their mean is in its centre."""
    data: Count = 2000
    noise: NonNegative = 0.5
    """Standard deviation of the rewards' noise."""
    updates: Count = 800
    batch: Count = 128
    learning_rate: Positive = 3e-3

    @model_validator(mode="after")
    def _idle(self) -> JointActions:
        needs = dict.fromkeys(ARSQ_ONLY, (self.learner == "arsq", "learner: arsq"))
        refuse_idle(self, "", needs | dict.fromkeys(("alpha", "noise"), (self.learner != "bc", "learner: arsq or sac")))
        return self


class DetourTask(Discretised):
    """Learning to go around an obstacle from demonstrations of mixed quality and own steps (stages/control/soft_q/detour.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    learner: Learner = "arsq"
    """sac: soft actor-critic from the same demonstrations; bc: behaviour cloning of them, without own steps."""
    bins: Annotated[int, Field(ge=2, le=64)] = 3
    alpha: Positive = 0.01
    """arsq: temperature of the soft values, in units of reward; sac: the weight of the entropy at the start."""
    episodes: Count = 150
    """Demonstrations: their ways around the obstacle are divided evenly between both sides."""
    careless: Share = 0.5
    """Of the demonstrations: random actions, or the straight way into the obstacle."""
    noise: NonNegative = 0.2
    """Standard deviation of the demonstrations' actions."""
    demonstration_share: Share = 0.5
    """arsq, sac: of each batch."""
    use_demonstrations: bool = True
    """false: learn from own steps alone."""
    steps: Count = 3000
    """Own steps, with `updates_per_step` updates each from the second on, with and without demonstrations; bc: updates."""
    evaluate_every: Count = 500
    evaluate_episodes: Count = 20
    batch: Count = 128
    learning_rate: Positive = 1e-3
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    target_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.02
    """Share of the networks in their slow copies per update."""
    updates_per_step: Count = 1
    act_network: Literal["online", "target"] = "online"
    """arsq: which networks act, those that learn or their slow copies."""
    checkpoint: str | None = None
    """File that the run is saved to after each evaluation, and from which it goes on; removed at the end."""

    @property
    def task(self) -> str:
        """As Gymnasium names it."""
        return "bellwether/Detour-v0"

    @model_validator(mode="after")
    def _fits(self) -> DetourTask:
        if self.steps % self.evaluate_every:
            raise ValueError(f"steps {self.steps} must be a multiple of evaluate_every {self.evaluate_every}")
        values = self.learner != "bc"
        needs = dict.fromkeys((*ARSQ_ONLY, "act_network"), (self.learner == "arsq", "learner: arsq"))
        online = ("alpha", "use_demonstrations", "gamma", "target_rate", "updates_per_step")
        needs |= dict.fromkeys(online, (values, "learner: arsq or sac"))
        recorded = ("episodes", "careless", "noise")
        needs |= dict.fromkeys(recorded, (self.use_demonstrations, "use_demonstrations: true"))
        needs |= {
            "demonstration_share": (values and self.use_demonstrations, "learner: arsq or sac, and use_demonstrations: true")
        }
        refuse_idle(self, "", needs)
        if self.demo.kind != "none" and not (self.use_demonstrations and self.demonstration_share):
            raise ValueError("demo: there are no demonstrations in a batch; remove demo, or set use_demonstrations: true")
        return self
