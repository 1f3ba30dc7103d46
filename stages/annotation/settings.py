"""Section `annotate` of params.yaml: the search, its labels and pairs, and the fitted models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.annotation.derived import (
    SOLUTION_RULES,
    UNSCORED_RULES,
    evaluates_children,
    highest_value,
    lowest_value,
    q_is_return,
    q_range,
    unvisited_rule,
    uses_value_model,
    value_head,
    value_range,
)
from stages.engine.settings import SamplingParams
from stages.judging.settings import JudgeModel
from stages.runtime.validation import Count, NonNegative, Positive, Section, Share, refuse_idle
from stages.values.settings import HeadParams, Progress, QModel, StateModel, ValueModel
from stages.values.supports import check_support


class OmegaScore(Section):
    """OmegaPRM's score of a state and one of its failed rollouts."""

    alpha: Share = 0.5
    """Base of alpha^(1 - MC), which prefers states that often succeed."""
    beta: Share = 0.9
    """Base of beta^(words / length), which penalises long rollouts."""
    length: Count = 500
    """Words."""


class Selection(Section):
    """How a tree's next leaf is selected."""

    rule: Literal["uct", "uct_2ln", "uct_1p", "puct", "random", "flat", "omega"] = "uct"
    """`flat` and `omega` sample whole solutions instead of selecting: `flat` measures all their states, `omega` those that
    bisection of failed solutions leads to."""
    c: NonNegative = 1.0
    """Exploration constant of the rules that score children; like expand_k, other rules ignore it."""
    decay: Literal["none", "linear", "exponential"] = "none"
    """How c falls over the iterations."""
    decay_to: Share = 0.1
    """linear, exponential: fraction of c at the last iteration."""
    unvisited: Literal["first", "random", "zero", "value", "bonus"] | None = None
    """Score of a child without visits; null: zero under puct (the prior decides), else first."""
    prior_temperature: Positive = 1.0
    """puct: temperature of the policy's prior over actions."""
    omega: OmegaScore = OmegaScore()

    @model_validator(mode="after")
    def _exploration(self) -> Selection:
        if self.decay != "none" and self.rule in UNSCORED_RULES:
            raise ValueError(f"decay '{self.decay}' decays c, which rule '{self.rule}' does not decay: set it to none")
        if self.unvisited is not None and self.rule in UNSCORED_RULES:
            raise ValueError(f"rule '{self.rule}' does not score children without visits: set unvisited to null")
        needs = {
            "decay_to": (self.decay != "none", "decay: linear or exponential"),
            "omega": (self.rule == "omega", "rule: omega"),
            "prior_temperature": (self.rule == "puct", "rule: puct"),
        }
        refuse_idle(self, "selection.", needs)
        return self


class Expansion(Section):
    """How a node gets its children."""

    kind: Literal["lazy", "eager"] = "lazy"
    """`lazy`: one rollout per visit, until expand_k actions were drawn; `eager`: expand_k actions are drawn at once, each in
    a copied environment."""
    dedupe: Literal["tokens", "text", "state"] = "tokens"
    """When two actions of a node are duplicates: same tokens, same text (ignoring case and white space), or same next state."""
    drop_refused: bool = False
    """eager: whether actions that the environment rejects are dropped."""


class LeafEvaluation(Section):
    """How leaves are evaluated."""

    kind: Literal["rollout", "value_model", "mixed"] = "rollout"
    """value_model: fitted on the episodes of rollout, with expansion.kind eager; mixed: the mean of both, by value_share."""
    rollouts: Annotated[int, Field(ge=1, le=64)] = 1
    """Per leaf; under selection.rule flat and omega per measured state."""
    temperature: Annotated[float, Field(gt=0.0, le=5.0)] | None = None
    """Temperature of a rollout's turns after the expanding one; null: sampling.temperature."""
    keep_rollouts: bool = True
    """Whether the turns of a rollout become nodes."""
    value_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """mixed: weight of the value model; the rollout's return has weight 1 - value_share."""
    backbone: Literal["policy", "own"] = "policy"
    """Backbone of the value model: the policy, whose hidden states the engine computes anyway, or a fine-tuned copy with its own
    forward passes, which needs value_model.trains: all."""
    lookahead: Annotated[int, Field(ge=0, le=16)] = 0
    """value_model: greedy turns beyond the leaf; V <- V/2 + (largest V among them)/2."""
    model_rollouts: StateModel | None = None
    """rollout, mixed: roll out in a learnt model of the environment, fitted to the episodes of rollout, in place of the
    environment; {}: with VaGraM's weights; null: in the environment."""
    critic: Literal["none", "prior", "value"] = "none"
    """Mix a child's Q with 1/rank among its siblings: by the policy's prior, or by the value model."""
    critic_share: Share = 0.5
    """Weight of 1/rank; Q of the search has weight 1 - critic_share."""

    @model_validator(mode="after")
    def _together(self) -> LeafEvaluation:
        if self.kind == "value_model" and self.rollouts != 1:
            raise ValueError(f"kind 'value_model' uses no rollouts: set rollouts to 1 (it is {self.rollouts})")
        if self.lookahead and self.kind != "value_model":
            raise ValueError(f"lookahead ({self.lookahead}) looks ahead with the value model; kind is '{self.kind}': set it to 0")
        uses_model = uses_value_model(self)
        if self.critic == "value" and not uses_model:
            raise ValueError("critic 'value' needs a value model, and kind 'rollout' has none: set kind or critic")
        model_kinds = "kind: value_model or mixed"
        needs = {
            "temperature": (self.kind != "value_model", "kind: rollout or mixed"),
            "value_share": (self.kind == "mixed", "kind: mixed"),
            "model_rollouts": (self.kind != "value_model", "kind: rollout or mixed"),
            "backbone": (uses_model, model_kinds),
            "critic_share": (self.critic != "none", "critic: prior or value"),
        }
        refuse_idle(self, "evaluation.", needs)
        if self.model_rollouts is not None and self.keep_rollouts:
            raise ValueError("model_rollouts never happened, and so must not become nodes: set keep_rollouts to false")
        return self


class Stop(Section):
    """When a tree stops before its last iteration. Budgets are checked before each iteration."""

    on_success: bool = False
    """Stop at the first success."""
    extra_after_success: Annotated[int, Field(ge=0)] = 0
    """on_success: further iterations after the first success, which visit its siblings."""
    environment_steps: Count | None = None
    """Per tree, including replayed steps."""
    policy_tokens: Count | None = None
    """Sampled tokens per tree."""
    value: Share | None = None
    """Stop once the value model's V of any node reaches this; an estimate, not a verified success."""

    @model_validator(mode="after")
    def _success(self) -> Stop:
        if self.extra_after_success and not self.on_success:
            raise ValueError(f"extra_after_success ({self.extra_after_success}) needs on_success: true")
        return self


class Labels(Section):
    """Step labels: Q of the actions in the trees."""

    q: Literal["rollout", "hard", "tree", "best", "process"] = "rollout"
    """Definition of a step's Q, for advantages, pairs and the value model: see stages/annotation/labels.py."""
    scale: Literal["none", "min_max"] = "none"
    """min_max: scale labels and pairs to [0, 1] within each tree; the value model's targets remain comparable between tasks."""
    min_visits: Count = 2
    """Visits a node needs to be labelled."""
    pool: bool = True
    """rollout: posterior means pooled over the domain's trees, since the search decides how many rollouts a node gets
    (stages/annotation/pooling.py); false: plain means, which are biased upwards for labelled nodes deep in the tree."""

    @model_validator(mode="after")
    def _counts(self) -> Labels:
        refuse_idle(self, "labels.", {"pool": (self.q == "rollout", "q: rollout")})
        return self


class Pairs(Section):
    """Preference pairs of sibling actions."""

    rule: Literal["top_bottom", "threshold", "best_path"] = "top_bottom"
    """rStar-Math's; Agent Q's: siblings whose Q differs by more than min_margin; step_q's: the best path against the worst
    siblings."""
    top: Count = 2
    """top_bottom: winners per node, at most."""
    bottom: Count = 2
    """top_bottom: losers per node, at most."""
    lone: Count | None = None
    """top_bottom: number of children on the other side if one side has a single child; null: top or bottom."""
    min_margin: NonNegative = 0.25
    """Smallest difference in Q between winner and loser."""
    min_visits: Count = 2
    """Visits that both actions need."""
    min_edit_distance: Count = 1
    """Smallest edit distance of the two actions in characters, ignoring case and white space."""
    outcome_gate: bool = True
    """Require a success below the winner and a failure below the loser."""
    continuation: bool = False
    """Require a higher mean Q along the best path below the winner than below the loser."""

    @model_validator(mode="after")
    def _counts(self) -> Pairs:
        refuse_idle(self, "pairs.", {"lone": (self.rule == "top_bottom", "rule: top_bottom")})
        return self


class Annotate(Section):
    """Search trees over training tasks, and what is made of them."""

    tasks: Annotated[int, Field(ge=0)] = 0
    """Training tasks that get a search tree; 0: no trees, and no model that is fitted to them."""
    iterations: Count = 16
    """Per tree; under selection.rule flat and omega: solutions."""
    expand_k: Annotated[int, Field(ge=1, le=64)] = 4
    """Actions sampled where a node is expanded."""
    max_depth: Count | None = None
    """Turns below the root; null: as many as an episode has. With fewer, values are not those of episodes."""
    chunk: Count = 128
    """Trees grown together; about as many as resources.slots decode fastest. Each finished tree is a checkpoint."""
    leaves_per_tree: Annotated[int, Field(ge=1, le=64)] = 1
    """Leaves of one tree that are evaluated together."""
    virtual: Literal["wu_uct", "loss"] = "wu_uct"
    """How pending leaves count: as visits only, or as visits with the worst return."""
    selection: Selection = Selection()
    expansion: Expansion = Expansion()
    evaluation: LeafEvaluation = LeafEvaluation()
    backup: Literal["mean", "max", "discounted_max", "children_mean"] = "mean"
    """How values of leaves are backed up to their ancestors."""
    gamma: Share = 1.0
    """Discount per turn."""
    returns: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """Smallest and largest return of an episode of the environment."""
    reward_range: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """The tree's range, to which `returns` are scaled; backup discounted_max does not scale."""
    cut_return: float | None = None
    """Return of a truncated episode, in reward_range; null: its rewards so far."""
    stop: Stop = Stop()
    sampling: SamplingParams = SamplingParams()
    labels: Labels = Labels()
    pairs: Pairs = Pairs()
    value_model: ValueModel = ValueModel()
    q_model: QModel = QModel()
    progress: Progress = Progress()
    judge_model: JudgeModel = JudgeModel()

    @model_validator(mode="after")
    def _values(self) -> Annotate:
        refuse_idle(self, "", {"virtual": (self.leaves_per_tree > 1, "leaves_per_tree of at least 2")})
        refuse_idle(self.value_model, "value_model.", {"rollouts": (self.labels.q == "rollout", "labels.q: rollout")})
        sides = self.pairs.rule == "top_bottom" or self.q_model.kind == "trajectory_dpo"
        needs = dict.fromkeys(("top", "bottom"), (sides, "rule: top_bottom, or q_model.kind: trajectory_dpo"))
        refuse_idle(self.pairs, "pairs.", needs)
        if self.gamma != 1.0 and self.backup != "discounted_max" and self.labels.q not in ("rollout", "best"):
            raise ValueError(
                f"gamma ({self.gamma}) discounts backup 'discounted_max' and labels.q 'rollout' and 'best' only; backup is "
                f"'{self.backup}' and labels.q '{self.labels.q}': set gamma to 1"
            )
        for name, given in (("returns", self.returns), ("reward_range", self.reward_range)):
            if given[0] >= given[1]:
                raise ValueError(f"{name} must be [low, high] with low < high, such as [-1.0, 1.0]; it is {given}")
        if self.reward_range != [0.0, 1.0] and (self.backup == "discounted_max" or self.labels.q == "best"):
            raise ValueError(
                "backup 'discounted_max' and labels.q 'best' sum single rewards, which reward_range does not scale: set it "
                "to [0.0, 1.0]"
            )
        if self.backup == "discounted_max" and (self.cut_return is not None or self.evaluation.kind == "mixed"):
            raise ValueError(
                "backup 'discounted_max' sums single rewards, so cut_return and evaluation.kind 'mixed' have no effect: "
                "set cut_return to null and evaluation.kind to rollout or value_model"
            )
        if self.cut_return is not None and not lowest_value(self) <= self.cut_return <= highest_value(self):
            raise ValueError(f"cut_return ({self.cut_return}) is outside reward_range {self.reward_range}")
        lowest, highest = q_range(self)
        if self.pairs.min_margin > highest - lowest:
            raise ValueError(
                f"pairs.min_margin ({self.pairs.min_margin}) is larger than any difference of labels.q '{self.labels.q}', "
                f"which is in [{lowest:g}, {highest:g}]"
            )
        return self

    @model_validator(mode="after")
    def _trees(self) -> Annotate:
        learnt = {
            "q_model.kind": (self.q_model.kind != "none", "none"),
            "judge_model.labels": (self.judge_model.kind != "none" and self.judge_model.labels == "trees", "program or another"),
        }
        for key, (reads, instead) in learnt.items():
            if reads and not self.tasks:
                raise ValueError(f"{key} needs trees, and tasks is 0: set tasks above 0, or {key} to {instead}")
        return self

    @model_validator(mode="after")
    def _starts(self) -> Annotate:
        if self.q_model.init == "value_model" and self.value_model.trains == "head":
            raise ValueError(
                "q_model.init: value_model starts from the step-value model's backbone, which value_model.trains: head leaves as "
                "the SFT policy's: set value_model.trains to all, or init to sft"
            )
        return self

    @property
    def fitted_head(self) -> HeadParams:
        """The head of the step-value model, its support rescaled to the values (`derived.value_head`)."""
        return value_head(self)

    @model_validator(mode="after")
    def _supports(self) -> Annotate:
        returns = (self.returns[0], self.returns[1])
        targets = "returns" if q_is_return(self.labels) else "success rates"
        heads = [("value_model", value_head(self), value_range(self), targets)]
        if uses_value_model(self.evaluation):
            heads.append(("value_model", value_head(self), returns, "returns"))
        if self.q_model.kind == "regression":
            heads.append(("q_model", self.q_model.head, q_range(self), "the labels' q"))
        if self.progress.kind != "none":
            heads.append(("progress", self.progress.head, returns, "returns"))
        for name, head, bounds, what in heads:
            try:
                check_support(head, *bounds, what)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from error
        return self

    @model_validator(mode="after")
    def _expansion(self) -> Annotate:
        evaluation, expansion = self.evaluation, self.expansion
        if expansion.kind == "eager":
            if evaluates_children(self) and not uses_value_model(evaluation):
                raise ValueError(
                    f"selection.unvisited '{unvisited_rule(self)}' scores children by a value model: set evaluation.kind to "
                    "value_model or mixed"
                )
            if evaluation.kind == "value_model" and self.labels.q in ("rollout", "hard"):
                raise ValueError(
                    f"labels.q '{self.labels.q}' is a statistic of policy rollouts, and evaluation.kind 'value_model' has none: "
                    "set it to tree, best or process"
                )
            return self
        reasons = {
            "evaluation.kind 'value_model'": (evaluation.kind == "value_model", "leaves are evaluated by rollouts"),
            "evaluation.keep_rollouts false": (not evaluation.keep_rollouts, "all nodes come from rollouts"),
            f"selection.unvisited '{self.selection.unvisited}'": (
                self.selection.unvisited is not None,
                "every child has a visit",
            ),
            "evaluation.critic 'value'": (evaluation.critic == "value", "new children are not evaluated"),
            "expansion.drop_refused": (expansion.drop_refused, "a rollout continues from the environment's response"),
            f"expansion.dedupe '{expansion.dedupe}'": (
                expansion.dedupe != "tokens",
                "a rollout's later turns depend on the action's exact tokens",
            ),
        }
        for what, (given, reason) in reasons.items():
            if given:
                raise ValueError(f"{what} cannot be combined with expansion.kind 'lazy', where {reason}: set that to eager")
        return self

    @model_validator(mode="after")
    def _ends(self) -> Annotate:
        if self.evaluation.keep_rollouts or self.evaluation.kind == "value_model":
            return self
        needs_ends = {
            f"labels.q '{self.labels.q}'": self.labels.q in ("best", "process"),
            "backup 'discounted_max'": self.backup == "discounted_max",
            "pairs.rule 'best_path'": self.pairs.rule == "best_path",
            "q_model.kind 'trajectory_dpo'": self.q_model.kind == "trajectory_dpo",
        }
        for what, applies in needs_ends.items():
            if applies:
                raise ValueError(
                    f"{what} needs the ends below a step: set evaluation.keep_rollouts to true, since false keeps only drawn ends"
                )
        return self

    @model_validator(mode="after")
    def _search(self) -> Annotate:
        evaluation = self.evaluation
        if self.stop.value is not None and not uses_value_model(evaluation):
            raise ValueError("stop.value needs a value model: set evaluation.kind to value_model or mixed, or stop.value to null")
        rule = self.selection.rule
        if rule not in SOLUTION_RULES:
            return self
        required = {
            "expansion.kind": (self.expansion.kind, "lazy"),
            "evaluation.kind": (evaluation.kind, "rollout"),
            "evaluation.critic": (evaluation.critic, "none"),
            "backup": (self.backup, "mean"),
            "leaves_per_tree": (self.leaves_per_tree, 1),
        }
        for name, (given, needed) in required.items():
            if given != needed:
                raise ValueError(
                    f"selection.rule '{rule}' measures the states of solutions by rollouts and has no tree policy: "
                    f"set {name} to {needed} (it is {given})"
                )
        if evaluation.rollouts < 2:
            raise ValueError(
                f"selection.rule '{rule}' measures a state by several rollouts: set evaluation.rollouts to at least 2 (8 in the "
                "papers)"
            )
        return self
