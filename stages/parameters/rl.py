"""Section `rl` of params.yaml. In the parts of an algorithm null means what `rl.algorithm` stands for; which value that is, and
which combinations make sense, says stages/algorithms/resolve.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.parameters.shared import SamplingParams
from stages.rewards.settings import PrsStage
from stages.validation import Count, NonNegative, Positive, Section, Share
from stages.values.settings import HeadParams

AboveOne = Annotated[float, Field(gt=1.0)]
BelowHalf = Annotated[float, Field(ge=0.0, lt=0.5)]


class Reward(Section):
    """Reward shaping. What counts as success, for reports and the curriculum, is always the environment's own return."""

    kind: Literal["environment", "prs", "hierarchical", "own"] | None = None
    """`hierarchical`: format_penalty for an episode with an action that was not understood, or without room for its end; else the
    return, and multi_tool_bonus if it is above 0 and two tools were used."""
    prs: Annotated[list[PrsStage], Field(min_length=1)] | None = None
    """Stages in order; their weights sum to the largest reward."""
    density: Literal["environment", "single", "dense"] | None = None
    """`single`: success alone, on the last turn; `dense`: the environment's increments over a common divisor."""
    divisor: Literal["max_total", "reference"] | None = None
    """dense: `max_total` for all; `reference`: the number of positive increments of a success, max_total of a failure."""
    max_total: Positive | None = None
    """dense: the largest return that the environment's increments sum to."""
    correct: float | None = None
    """Return of a success in place of the environment's."""
    wrong: float | None = None
    """Return of a failure in place of the environment's."""
    format_penalty: float | None = None
    """hierarchical: return of an episode of bad format."""
    multi_tool_bonus: NonNegative | None = None
    """hierarchical: added where an episode of some success called two different tools."""
    tool_bonus: NonNegative | None = None
    """Added per tool call."""
    tool_bonus_on: Literal["wrong", "both"] | None = None
    tool_bonus_cap: float | None = None
    """Largest reward of a failure with its bonus."""
    overlong_penalty: NonNegative | None = None
    """Largest subtraction for length, environment's tokens included; 0: none."""
    overlong_max: Count | None = None
    """Tokens after the prompt from which the whole penalty applies."""
    overlong_cache: Count | None = None
    """The penalty grows over this many tokens before overlong_max."""
    kl_coef: NonNegative | None = None
    """Subtracted per token: kl_coef times the estimate of the sampling policy's KL from the reference."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None


class Filling(Section):
    """Batch filling: what takes the place of groups whose rewards are all equal."""

    kind: Literal["none", "exclude", "resample", "random", "value", "own"] | None = None
    rounds: Annotated[int, Field(ge=1, le=100)] | None = None
    """resample: times that further tasks are played at the most."""
    replace: Literal["zero_advantage", "low_value"] | None = None
    """random, value: what makes room: groups of equal rewards; or of a value V of at most min_value."""
    min_value: NonNegative | None = None
    spread: Literal["std", "variance"] | None = None
    """value: sigma in V = (r_max - mean) * sigma."""
    value_of: Literal["reward", "last_stage"] | None = None
    """value: what V is computed from; last_stage: the last stage of reward.prs."""
    r_max: Positive | None = None
    """value: the largest attainable reward."""
    temperature: Positive | None = None
    """value: groups are drawn with probability proportional to V^(1/temperature)."""
    zero_tol: NonNegative | None = None
    """sigma up to which a group's rewards count as equal."""
    smooth: Literal["none", "cap", "sqrt", "log"] | None = None
    """random, value: what the advantages of a group that counts c times are multiplied by: 1, min(1, c_max/c), 1/sqrt(c),
    (1 + ln c)/c."""
    c_max: Positive | None = None
    overlong: Literal["keep", "mask"] | None = None
    """mask: episodes that ran out of tokens are not trained on; their rewards still count in the baselines."""


class Branching(Section):
    """How a group is played: its episodes one beside the other, or some of them as branches of others."""

    kind: Literal["none", "random", "entropy", "own"] | None = None
    """`entropy`: episodes branch after an answer of the environment, the likelier the more entropy has risen; `random`: with the
    same chance everywhere."""
    initial: Count | None = None
    """Episodes of a group that start from the task; the places up to group_size are for branches."""
    beam: Count | None = None
    """An episode that branches becomes at most this many; 1: none branches."""
    base: Share | None = None
    """Chance of a branch where entropy has not risen."""
    entropy_weight: NonNegative | None = None
    """What a rise of the normalised entropy by 1 adds to that chance."""
    tokens: Count | None = None
    """Tokens at the start of a turn that entropy is taken over."""
    candidates: Annotated[int, Field(ge=2)] | None = None
    """Most likely tokens that entropy is taken over."""
    aggregate: Literal["sum", "mean"] | None = None
    """Of the tokens' entropies, each over the log of the vocabulary size."""
    probe: Literal["call", "answer"] | None = None
    """Which turn's entropy decides on a branch behind an answer: of the turn that called for it, or of the one that follows."""
    inherit: bool | None = None
    """A branch's rise counts from its parent's first turn; False: from its own."""


class External(Section):
    """Episodes of somebody else in the policy's groups: curated demonstrations of the group's task."""

    per_group: Annotated[int, Field(ge=0)] | None = None
    """How many episodes of a group are demonstrations in place of the policy's own; fewer where the task has fewer."""
    source: Literal["expert", "all"] | None = None
    """Which demonstrations: the expert's straight ones, or the noisy ones too."""
    loss: Literal["mis", "pi", "old", "sft"] | None = None
    """Of external tokens: -A C r with the ratio r = 2 p / (p_w + p_old) (mis), p (pi: the behaviour's probability taken as 1) or
    p / p_old (old); sft: -coef log p, whatever the reward."""
    mix: Share | None = None
    """mis: the unknown behaviour policy is p_w = mix * p_old + (1 - mix) * U."""
    u: Positive | Literal["vocabulary"] | None = None
    """mis: U, a number, or one over the size of the vocabulary."""
    ratio_max: Positive | None = None
    """mis, pi, old: the ratio is cut there, and has no gradient beyond."""
    gamma: NonNegative | None = None
    """mis, pi, old: exploration-based advantage, C = (1 - p)^gamma; 0: C = 1."""
    coef: NonNegative | None = None
    """sft: weight of the negative log-probability."""


class Horizon(Section):
    """How many turns an episode may take while training. Evaluation always plays to the environment's own limit."""

    kind: Literal["environment", "fixed", "scaling_inter"] | None = None
    """`environment`: its own limit; `fixed`: `turns`; `scaling_inter`: in stages, by `rounds`."""
    turns: Count | None = None
    """fixed: the limit."""
    rounds: Annotated[list[Count], Field(min_length=1)] | None = None
    """scaling_inter: the stages' limits, rising; null: a third, two thirds and the whole of the environment's own limit."""
    steps_per_stage: Count | None = None
    """scaling_inter: steps before the next stage; the last one stays. null: rl.steps shared out evenly."""
    order: Literal["rising", "falling"] | None = None
    """scaling_inter: `falling` takes the stages from the last to the first, as a control."""


class Advantage(Section):
    """Each axis on its own."""

    estimator: Literal["group", "gae", "utterance", "own"] | None = None
    """utterance: min Q - min V of a turn under a critic that learns off-policy from replayed episodes, see `replay`."""
    level: Literal["trajectory", "turn", "token"] | None = None
    """What is credited as one: group knows all three, gae turns and tokens."""
    mean: Literal["none", "group", "batch", "leave_one_out", "greedy", "length_weighted"] | None = None
    std: Literal["none", "group", "batch"] | None = None
    ddof: Annotated[int, Field(ge=0, le=1)] | None = None
    """Of the standard deviation: 1 for n - 1, 0 for n."""
    gamma: Share | None = None
    """Discount per turn or token, as `level` says."""
    lam: Share | None = None
    whiten: bool | None = None
    """Zero mean, unit standard deviation over the batch's policy tokens."""
    clip: Positive | None = None
    """Advantages are cut to [-clip, clip], last of all."""
    token_baseline: bool | None = None
    """utterance: subtract from a turn's advantage what a critic of its own expects of it before each token."""


class Credit(Section):
    """Step credit: how an episode's advantage is spread over its turns."""

    kind: Literal["outcome", "annotated", "graph", "branches", "progress", "own"] | None = None
    """graph: equal steps of a group get the mean advantage of the episodes that took them; branches: so do the turns that
    branches have in common; progress: the return is spread over turns by the annotated progress estimator."""
    weight: NonNegative | None = None
    """annotated: weight of V(after) - V(before) of the annotated value model, added to the outcome's advantage; progress: of a
    turn's contribution."""
    step_reward: Literal["spa", "rloo_broadcast"] | None = None
    """progress: a turn's contribution: the estimator's, or, as the authors' code has it, the return minus the mean of the group's
    others, for every turn."""
    residual: Literal["none", "last_step", "spread"] | None = None
    """progress: where what the contributions lack of the return goes."""
    step_weight: Literal["one", "steps_to_go"] | None = None
    """progress: steps_to_go multiplies the reward of turn i of N (from 0) by N - 1 - i, as the authors' code does."""
    grounding: Literal["penalty", "share", "bonus"] | None = None
    """progress: for actions that the environment did not understand -grounding_coef; or for those it did grounding_coef over the
    number of turns; or grounding_coef."""
    grounding_coef: NonNegative | None = None
    key: Literal["transition", "state_action"] | None = None
    """graph: steps are equal if state, action and next state are, or state and action."""
    history: Annotated[int, Field(ge=0, le=100)] | None = None
    """graph: so many steps before must be equal too."""
    match: Literal["exact", "cosine", "scrambled"] | None = None
    """graph: when state keys are equal: exactly, or if their word counts have a cosine of `threshold`; scrambled, the control:
    never."""
    threshold: Share | None = None
    repeats: Literal["once", "each"] | None = None
    """graph: votes of an episode that takes a step several times: one, or one each time."""
    renormalise: Literal["none", "group_std"] | None = None
    """graph: group_std scales a group's merged advantages back to the spread that they had."""


class Loss(Section):
    kind: Literal["policy_gradient", "importance", "ppo_clip", "gspo", "cispo", "own"] | None = None
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    clip_high: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    dual_clip: AboveOne | None = None
    """ppo_clip: the loss of a token with A < 0 is at most dual_clip * |A|."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] | None = None
    constant_length: Count | None = None
    """constant: what token sums are divided by, times the number of episodes. null: model.max_length."""
    kl_coef: NonNegative | None = None
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    entropy_coef: NonNegative | None = None
    entropy_aggregation: Literal["loss", "token_mean"] | None = None
    """What the entropy bonus is taken over: as the rest of the loss, or as a mean over tokens whatever the loss does."""


class Critic(Section):
    learning_rate: Positive | None = None
    coef: NonNegative | None = None
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps in which only the critic learns."""
    head: HeadParams | None = None
    init: Literal["policy", "value_model"] | None = None
    """What it starts from: the policy's backbone with an untrained head, or annotate's step-value model, head and all."""


class Replay(Section):
    """Learning off-policy, with advantage.estimator utterance: whole episodes are kept, and critic and policy learn from draws
    of them."""

    records: list[Literal["rollouts", "demonstrations", "games"]] | None = None
    """Recorded episodes of the training tasks that can be drawn from the start: those of the stage rollout, demonstrations of
    expert and noisy expert, game records. What a domain does not have is left out."""
    capacity: Count | None = None
    """Turns of played episodes that are kept; the oldest episodes make room."""
    episodes: Count | None = None
    """Drawn for each optimiser step, with replacement; it learns from all their turns."""
    critic_updates: Count | None = None
    """Optimiser steps of the critic per step."""
    policy_updates: Count | None = None
    """Batches per step that the policy learns from, after the critic. actions: played: the same one each time; null is then 1."""
    tau: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Polyak rate of the target network, which follows each update of the critic; 1: a copy."""
    value_target: Literal["policy", "expectile"] | None = None
    """What V learns. policy: Q of actions that the policy draws anew; expectile: of the recorded action, by expectile regression
    (implicit Q-learning), so that no action is valued that the records lack."""
    samples: Count | None = None
    """policy: actions drawn per turn."""
    expectile: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """expectile: 0.5 is the mean; towards 1 V becomes the best recorded action's Q."""
    bootstrap_truncated: bool | None = None
    """Where a limit cut the episode, the last turn's target goes on with V; False: the limit is the end."""
    actions: Literal["fresh", "played", "recorded"] | None = None
    """What the policy learns from. fresh: actions that it draws anew after histories of drawn episodes; played: the step's own
    episodes; recorded: the actions of drawn episodes."""


class Preference(Section):
    """Offline optimisation on stored pairs; for the algorithms that learn from them."""

    source: Literal["trees", "imported", "all"] | None = None
    """Pairs of data/annotated/<domain>, those that curate imported (curate.imports), or both."""
    loss: Literal["dpo", "cdpo", "robust_dpo", "slic", "ipo", "kto", "orpo", "simpo", "cpo", "sppo", "own"] | None = None
    level: Literal["step", "trajectory"] | None = None
    """What a pair of trees compares: the two actions, or each with what followed it to the nearest right and wrong end."""
    pairs_per_step: Count | None = None
    beta: Positive | None = None
    gamma: NonNegative | None = None
    """simpo: target margin, outside beta."""
    smoothing: BelowHalf | None = None
    """cdpo, robust_dpo: assumed share of pairs with the labels swapped."""
    length_normalise: bool | None = None
    """ipo: log-probabilities per token in place of sums."""
    desirable: Positive | None = None
    undesirable: Positive | None = None
    """kto: weights of the two kinds."""
    nll_coef: NonNegative | None = None
    """cpo, orpo: weight of the winner's negative log-probability."""


class Curriculum(Section):
    kind: Literal["uniform", "difficulty", "value"] = "difficulty"
    """`difficulty`: tasks are drawn with weight p(1-p) + floor, p the success measured by rollout and updated while training;
    `value`: p starts at what annotate's step-value model gives the task's first observation, so that all tasks have one."""
    floor: Share = 0.05


class Histogram(Section):
    """Shares of easy, medium and hard tasks; only their proportions matter."""

    easy: NonNegative = 1.0
    medium: NonNegative = 1.0
    hard: NonNegative = 1.0

    @model_validator(mode="after")
    def _some(self) -> Histogram:
        if self.easy + self.medium + self.hard == 0:
            raise ValueError("easy, medium and hard are all 0: no task would be left")
        return self


class Selection(Section):
    """Which training tasks RL may draw."""

    kind: Literal["all", "model_aware"] = "all"
    """`model_aware`: only tasks that rollout measured and that the SFT policy solves sometimes, weighted by `target`."""
    easy_min: Share = 0.75
    hard_max: Share = 0.25
    target: Histogram = Histogram()

    @model_validator(mode="after")
    def _order(self) -> Selection:
        if self.hard_max >= self.easy_min:
            raise ValueError(f"hard_max ({self.hard_max}) must be below easy_min ({self.easy_min})")
        return self


class Rl(Section):
    algorithm: str = "grpo"
    """A module of stages/algorithms/methods, or an entry point of the group bellwether.algorithms."""
    settings: Any = {}
    """The algorithm's own keys, where it has any: a mapping, or (resolved) the algorithm's own section."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Of what rl draws and samples; null: the run's seed. Runs that differ in it share all that comes before rl."""
    steps: Count = 20
    environment_steps: Count | None = None
    """Stop after the step in which the episodes played have come to this many turns, if `steps` is not reached before."""
    stop_at_success: Share | None = None
    """Stop after the step that ends five in which this share of the episodes succeeded: to compare methods at equal success."""
    tasks_per_step: Count = 16
    group_size: Annotated[int, Field(ge=1, le=256)] = 8
    epochs: Count = 1
    """Passes over each batch of episodes."""
    minibatches: Count | None = None
    """Optimiser steps per pass; null: as many as the method takes, or one per task where there are fewer."""
    learning_rate: Positive = 3e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    checkpoint_every: Count = 5
    sampling: SamplingParams = SamplingParams()
    dead_groups: Literal["keep", "drop"] = "drop"
    """`drop` leaves groups that add nothing to the gradient out of the forward pass; denominators do not change."""
    share_prefixes: bool = True
    """Read what episodes have in common at their start (prompts, equal first turns) once for all of them; False: read every
    episode whole. The same gradient to float rounding."""
    reward: Reward = Reward()
    branching: Branching = Branching()
    filling: Filling = Filling()
    external: External = External()
    horizon: Horizon = Horizon()
    advantage: Advantage = Advantage()
    credit: Credit = Credit()
    loss: Loss = Loss()
    critic: Critic = Critic()
    replay: Replay = Replay()
    preference: Preference = Preference()
    curriculum: Curriculum = Curriculum()
    selection: Selection = Selection()

    @field_validator("settings")
    @classmethod
    def _keys(cls, value: Any) -> Any:
        if not isinstance(value, (Mapping, Section)):
            raise ValueError("must be a mapping of the algorithm's own keys; {} where it has none")
        return value

    @model_validator(mode="after")
    def _groups(self) -> Rl:
        if (self.minibatches or 1) > self.tasks_per_step:
            raise ValueError("minibatches are made of whole groups: at most tasks_per_step of them")
        return self
