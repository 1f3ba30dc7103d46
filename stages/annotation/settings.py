"""Section `annotate` of params.yaml: the search, its labels and pairs, and the step-value model. What the settings do says
stages/annotation; here stands what goes together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.annotation.units import (
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
from stages.runtime.validation import Count, NonNegative, Positive, Section, Share, refuse_idle
from stages.values.settings import Progress, QModel, ValueModel
from stages.values.supports import check_support

Whole = Annotated[int, Field(ge=0)]


class OmegaScore(Section):
    """OmegaPRM's score of a state and one of its wrong rollouts."""

    alpha: Share = 0.5
    """Base of alpha^(1 - MC): how much likelier states that often succeed are searched."""
    beta: Share = 0.9
    """Base of beta^(words / length): how much less likely long rollouts are."""
    length: Count = 500
    """Words."""


class Selection(Section):
    rule: Literal["uct", "uct_2ln", "uct_1p", "puct", "random", "flat", "omega"] = "uct"
    """`flat` and `omega` measure states of whole solutions in place of selecting: every one, or those that bisection of wrong
    solutions leads to."""
    c: NonNegative = 1.0
    """Of the rules that score children; like expand_k it may stand there for others too, so that searches can share it."""
    decay: Literal["none", "linear", "exponential"] = "none"
    decay_to: Share = 0.1
    """linear, exponential: share of c that is left at the last iteration."""
    unvisited: Literal["first", "random", "zero", "value", "bonus"] | None = None
    """Score of a child without visits; null: zero under puct, where the prior decides, else first."""
    prior_temperature: Positive = 1.0
    omega: OmegaScore = OmegaScore()

    @model_validator(mode="after")
    def _exploration(self) -> Selection:
        if self.decay != "none" and self.rule in UNSCORED_RULES:
            raise ValueError(f"decay '{self.decay}' lets c fall, which rule '{self.rule}' does not let fall: set it to none")
        if self.unvisited is not None and self.rule in UNSCORED_RULES:
            raise ValueError(f"rule '{self.rule}' does not score children without visits: set unvisited to null")
        needs = {
            "decay_to": (self.decay != "none", "decay: linear or exponential"),
            "omega": (self.rule == "omega", "rule: omega"),
        }
        refuse_idle(self, "selection.", needs)
        return self


class Expansion(Section):
    """How a node gets its children."""

    kind: Literal["lazy", "eager"] = "lazy"
    """`lazy`: one rollout per visit, until expand_k were drawn; `eager`: expand_k actions are drawn at once, each done in a copy
    of the environment."""
    dedupe: Literal["tokens", "text", "state"] = "tokens"
    """When two actions of a node are one: the same tokens, the same text up to case and white space, or the same state after
    them."""
    drop_refused: bool = False
    """eager: actions that the environment does not understand become no children."""


class LeafEvaluation(Section):
    kind: Literal["rollout", "value_model", "mixed"] = "rollout"
    rollouts: Annotated[int, Field(ge=1, le=64)] = 1
    """Per leaf; under selection.rule flat and omega per state that is measured."""
    temperature: Annotated[float, Field(gt=0.0, le=5.0)] | None = None
    """Of a rollout's turns beyond its expansion; null: sampling.temperature."""
    keep_rollouts: bool = True
    """Whether the turns of a rollout become nodes."""
    value_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """mixed: weight of the value model; the rollout's return has the rest."""
    backbone: Literal["policy", "own"] = "policy"
    """What the value model reads: the policy's own states, which the engine computes for its next turn anyway, or those of a
    fine-tuned copy, in passes of their own."""
    head_learning_rate: Positive = 0.01
    """policy: of the head, which is all that is trained then."""
    lookahead: Annotated[int, Field(ge=0, le=16)] = 0
    """value_model: greedy turns beyond the leaf; V <- V/2 + (largest V among them)/2."""
    critic: Literal["none", "prior", "value"] = "none"
    """A child's Q is mixed with 1/rank among its siblings: by the policy's prior, or by the value model."""
    critic_share: Share = 0.5
    """Weight of 1/rank; Q of the search has the rest."""

    @model_validator(mode="after")
    def _together(self) -> LeafEvaluation:
        if self.kind == "value_model" and self.rollouts != 1:
            raise ValueError(f"kind 'value_model' plays no rollouts: set rollouts to 1 (it is {self.rollouts})")
        if self.lookahead and self.kind != "value_model":
            raise ValueError(f"lookahead ({self.lookahead}) looks ahead with the value model; kind is '{self.kind}': set it to 0")
        if self.critic == "value" and not uses_value_model(self):
            raise ValueError("critic 'value' ranks by the value model, which kind 'rollout' has none of: set kind or critic")
        read = (uses_value_model(self), "kind: value_model or mixed")
        needs = {
            "temperature": (self.kind != "value_model", "kind: rollout or mixed"),
            "value_share": (self.kind == "mixed", "kind: mixed"),
            "backbone": read,
            "head_learning_rate": (uses_value_model(self) and self.backbone == "policy", f"{read[1]}, with backbone: policy"),
            "critic_share": (self.critic != "none", "critic: prior or value"),
        }
        refuse_idle(self, "evaluation.", needs)
        return self


class Stop(Section):
    """When a tree is finished before its iterations are over. Budgets are checked before each iteration."""

    on_success: bool = False
    extra_after_success: Whole = 0
    """on_success: iterations after the first success, so that its siblings are visited too."""
    environment_steps: Count | None = None
    """Of one tree, replayed ones among them."""
    policy_tokens: Count | None = None
    """Sampled for one tree."""
    value: Share | None = None
    """The value model's V of any node from which the tree is finished; a model's word, not a verified success."""

    @model_validator(mode="after")
    def _success(self) -> Stop:
        if self.extra_after_success and not self.on_success:
            raise ValueError(f"extra_after_success ({self.extra_after_success}) needs on_success: true")
        return self


class Labels(Section):
    q: Literal["rollout", "hard", "tree", "best", "process"] = "rollout"
    """Which value counts as a step's Q, for advantages, pairs and the value model: see stages/annotation/labels.py."""
    scale: Literal["none", "min_max"] = "none"
    """min_max: to [0, 1] within each tree, for labels and pairs; the value model learns what can be compared between tasks."""
    min_visits: Count = 2
    pool: bool = True
    """rollout: posterior means over the domain's trees where the search chose how many rollouts there are
    (stages/annotation/pooling.py); false: plain means, which are too high among labelled nodes deep down."""

    @model_validator(mode="after")
    def _counts(self) -> Labels:
        refuse_idle(self, "labels.", {"pool": (self.q == "rollout", "q: rollout")})
        return self


class Pairs(Section):
    rule: Literal["top_bottom", "threshold", "best_path"] = "top_bottom"
    """rStar-Math's; Agent Q's: siblings whose Q differs by more than min_margin; step_q's: the best path against the worst
    siblings."""
    top: Count = 2
    bottom: Count = 2
    lone: Count | None = None
    """top_bottom: how many of the other side where one side has a single child; null: as many as ever."""
    min_margin: NonNegative = 0.25
    min_visits: Count = 2
    min_edit_distance: Count = 1
    """Characters to change between the two actions, case and white space aside."""
    outcome_gate: bool = True
    """A winner has a right end below it, a loser a wrong one."""
    continuation: bool = False
    """The mean Q along the best way below the winner must be above that below the loser."""

    @model_validator(mode="after")
    def _counts(self) -> Pairs:
        refuse_idle(self, "pairs.", {"lone": (self.rule == "top_bottom", "rule: top_bottom")})
        return self


class Annotate(Section):
    tasks: Count = 48
    iterations: Count = 16
    """Of a tree; under selection.rule flat and omega solutions."""
    expand_k: Annotated[int, Field(ge=1, le=64)] = 4
    max_depth: Count = 12
    chunk: Count = 128
    """Trees grown together; about as many as resources.slots decode fastest. Each is a checkpoint once it is finished."""
    leaves_per_tree: Annotated[int, Field(ge=1, le=64)] = 1
    """Leaves of one tree that are evaluated at once."""
    virtual: Literal["wu_uct", "loss"] = "wu_uct"
    """What leaves under way count as: visits alone, or visits that brought the worst return."""
    selection: Selection = Selection()
    expansion: Expansion = Expansion()
    evaluation: LeafEvaluation = LeafEvaluation()
    backup: Literal["mean", "max", "discounted_max", "children_mean"] = "mean"
    gamma: Share = 1.0
    returns: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """The smallest and the largest return of an episode, as the environment gives them."""
    reward_range: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """What these count as in the tree; under backup discounted_max returns count as they are."""
    cut_return: float | None = None
    """What an episode that a limit cut counts as, in reward_range; null: the rewards until then."""
    stop: Stop = Stop()
    sampling: SamplingParams = SamplingParams()
    labels: Labels = Labels()
    pairs: Pairs = Pairs()
    value_model: ValueModel = ValueModel()
    q_model: QModel = QModel()
    progress: Progress = Progress()

    @model_validator(mode="after")
    def _values(self) -> Annotate:
        refuse_idle(self, "", {"virtual": (self.leaves_per_tree > 1, "leaves_per_tree of at least 2")})
        if self.gamma != 1.0 and self.backup != "discounted_max" and self.labels.q not in ("rollout", "best"):
            raise ValueError(
                f"gamma ({self.gamma}) discounts backup 'discounted_max' and labels.q 'rollout' and 'best' only; backup is "
                f"'{self.backup}' and labels.q '{self.labels.q}': set gamma to 1"
            )
        for name, given in (("returns", self.returns), ("reward_range", self.reward_range)):
            if given[0] >= given[1]:
                raise ValueError(f"{name} must rise, as [0.0, 1.0] or [-1.0, 1.0] do; it is {given}")
        if self.reward_range != [0.0, 1.0] and (self.backup == "discounted_max" or self.labels.q == "best"):
            raise ValueError(
                "backup 'discounted_max' and labels.q 'best' add up single rewards, which reward_range does not change: set it "
                "to [0.0, 1.0]"
            )
        if self.backup == "discounted_max" and (self.cut_return is not None or self.evaluation.kind == "mixed"):
            raise ValueError(
                "backup 'discounted_max' adds up single rewards, so that cut_return and evaluation.kind 'mixed' would change "
                "nothing: set cut_return to null and evaluation.kind to rollout or value_model"
            )
        if self.cut_return is not None and not lowest_value(self) <= self.cut_return <= highest_value(self):
            raise ValueError(f"cut_return ({self.cut_return}) lies outside reward_range {self.reward_range}")
        lowest, highest = q_range(self)
        if self.pairs.min_margin > highest - lowest:
            raise ValueError(
                f"pairs.min_margin ({self.pairs.min_margin}) is more than the labels' q can differ by: labels.q "
                f"'{self.labels.q}' lies in [{lowest:g}, {highest:g}]"
            )
        return self

    @model_validator(mode="after")
    def _supports(self) -> Annotate:
        returns = (self.returns[0], self.returns[1])
        named = "returns" if q_is_return(self.labels) else "shares of success"
        learnt = [("value_model", value_head(self), value_range(self), named)]
        if uses_value_model(self.evaluation):
            learnt.append(("value_model", value_head(self), returns, "returns"))
        if self.q_model.kind == "regression":
            learnt.append(("q_model", self.q_model.head, q_range(self), "the labels' q"))
        if self.progress.kind != "none":
            learnt.append(("progress", self.progress.head, returns, "returns"))
        for name, head, units, what in learnt:
            try:
                check_support(head, *units, what)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from error
        return self

    @model_validator(mode="after")
    def _expansion(self) -> Annotate:
        evaluation, expansion = self.evaluation, self.expansion
        if expansion.kind == "eager":
            if evaluates_children(self) and not uses_value_model(evaluation):
                raise ValueError(
                    f"selection.unvisited '{unvisited_rule(self)}' scores children by the value model, which evaluation.kind "
                    "'rollout' has none of"
                )
            if evaluation.kind == "value_model" and self.labels.q in ("rollout", "hard"):
                raise ValueError(
                    f"labels.q '{self.labels.q}' counts the policy's rollouts, and evaluation.kind 'value_model' plays none: set "
                    "it to tree, best or process"
                )
            return self
        reasons = {
            "evaluation.kind 'value_model'": (evaluation.kind == "value_model", "it values leaves without rollouts"),
            "evaluation.keep_rollouts false": (not evaluation.keep_rollouts, "rollouts are all that its nodes are made of"),
            f"selection.unvisited '{self.selection.unvisited}'": (
                self.selection.unvisited is not None,
                "every child comes with a visit",
            ),
            "evaluation.critic 'value'": (evaluation.critic == "value", "children are not read when they come into being"),
            "expansion.drop_refused": (expansion.drop_refused, "a rollout goes on from what the environment answered"),
            f"expansion.dedupe '{expansion.dedupe}'": (
                expansion.dedupe != "tokens",
                "a rollout's later turns follow the action as it was written",
            ),
        }
        for what, (given, reason) in reasons.items():
            if given:
                raise ValueError(f"{what} does not go with expansion.kind 'lazy', where {reason}: set that to eager")
        return self

    @model_validator(mode="after")
    def _kept(self) -> Annotate:
        if self.evaluation.keep_rollouts or self.evaluation.kind == "value_model":
            return self
        lost = {
            f"labels.q '{self.labels.q}'": self.labels.q in ("best", "process"),
            "pairs.rule 'best_path'": self.pairs.rule == "best_path",
            "q_model.kind 'trajectory_dpo'": self.q_model.kind == "trajectory_dpo",
        }
        for what, needs_ends in lost.items():
            if needs_ends:
                raise ValueError(
                    f"{what} goes by the ends below a step, of which evaluation.keep_rollouts false leaves those that were drawn "
                    "alone: set that to true"
                )
        return self

    @model_validator(mode="after")
    def _search(self) -> Annotate:
        evaluation = self.evaluation
        if self.stop.value is not None and not uses_value_model(evaluation):
            raise ValueError("stop.value is a value of the value model, which evaluation.kind 'rollout' has none of")
        rule = self.selection.rule
        if rule not in SOLUTION_RULES:
            return self
        lacking = {
            "expansion.kind": (self.expansion.kind, "lazy"),
            "evaluation.kind": (evaluation.kind, "rollout"),
            "evaluation.critic": (evaluation.critic, "none"),
            "backup": (self.backup, "mean"),
            "leaves_per_tree": (self.leaves_per_tree, 1),
        }
        for name, (given, needed) in lacking.items():
            if given != needed:
                raise ValueError(
                    f"selection.rule '{rule}' measures the states of solutions by rollouts and backs up nothing to choose by: "
                    f"set {name} to {needed} (it is {given})"
                )
        if evaluation.rollouts < 2:
            raise ValueError(
                f"selection.rule '{rule}' measures a state by several rollouts: set evaluation.rollouts to at least 2 (the "
                "papers: 8)"
            )
        return self
