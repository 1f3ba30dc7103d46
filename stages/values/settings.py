"""Settings in params.yaml of scalar heads and of the value models that are fitted to stored data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, refuse_idle


class HeadParams(Section):
    """The loss of a scalar: squared error, or cross-entropy over a support of `bins` values."""

    loss: Literal["mse", "two_hot", "hl_gauss", "c51"] = "hl_gauss"
    """mse: squared error; two_hot, hl_gauss, c51: cross-entropy with a distribution over the bins."""
    v_min: float = -0.2
    """Lowest value of the support."""
    v_max: float = 1.2
    """Highest value of the support."""
    bins: Annotated[int, Field(ge=2, le=1024)] = 51
    """Of the support."""
    sigma_ratio: Positive = 0.75
    """hl_gauss: the Gaussian's standard deviation in bin widths."""

    @model_validator(mode="after")
    def _range(self) -> HeadParams:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min ({self.v_min}) must be below v_max ({self.v_max})")
        return self


class GaussianCritic(Section):
    """A critic of the mean and the spread of the return (stages/values/gaussian.py). With `expected_target` and
    `adjusted` false, and one critic, it is the first DSAC."""

    expected_target: bool = True
    """Regress the mean on the expected next value; false: on a value sampled from the next return's distribution."""
    adjusted: bool = True
    """Clip the sampled target and scale the gradients by the critic's spread; false: clip at `bound`, do not scale."""
    clip: Positive = 3.0
    """With adjusted: most standard deviations between a sampled target and the mean."""
    bound: Positive = 20.0
    """Without adjusted: most distance between a sampled target and the mean, in units of reward."""
    huber: Positive | None = 50.0
    """With adjusted: errors count linearly beyond this; null: never."""
    half: bool = True
    """With adjusted: the spread's squared error has the factor 1/2 of the reference code, so that the spread settles at 0.71 of
    the standard deviation; false: at the standard deviation."""
    spread_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """With adjusted: share of the batch's mean spread in its running mean."""
    std_eps: Positive = 0.1
    """Added to the spread, or its power, where the loss divides by it: in units of the return, and so not free of its scale."""
    ratio_range: Annotated[list[Positive], Field(min_length=2, max_length=2)] = [0.1, 10.0]
    """With adjusted: least and most scale of the gradients."""
    scale_of: Literal["spread", "variance"] = "spread"
    """With adjusted: what the scale's numerator is. spread: the square of the spread's running mean, as in the reference code;
    variance: the running mean of the spread's square, as the paper writes it."""
    scale_eps: NonNegative = 0.0
    """With adjusted: added to the scale's numerator. The paper has such a term; where it stands there is not confirmed."""
    scaled: Literal["both", "mean"] = "both"
    """With adjusted: which gradients are scaled. mean: not the spread's, as in other implementations than the reference code."""

    @model_validator(mode="after")
    def _idle(self) -> GaussianCritic:
        if self.ratio_range[0] > self.ratio_range[1]:
            raise ValueError(f"ratio_range {self.ratio_range}: the first, the least scale, must not be above the second")
        used = {"clip": True, "huber": True, "half": True, "spread_rate": True, "ratio_range": True, "bound": False}
        used |= dict.fromkeys(("scale_of", "scale_eps", "scaled"), True)
        for name, with_adjusted in used.items():
            if name in self.model_fields_set and with_adjusted != self.adjusted:
                raise ValueError(f"{name} has no effect with adjusted: {str(self.adjusted).lower()}; remove it")
        return self


class ReturnDistribution(GaussianCritic):
    """`GaussianCritic` as the critics of rl have it."""

    twins: Literal["min", "own"] = "min"
    """utterance: from which twin's distribution targets come: the one with the smaller mean, or each twin's own."""

    @model_validator(mode="after")
    def _keeps_one_mean(self) -> ReturnDistribution:
        if self.scale_of != "spread":
            raise ValueError(
                f"scale_of: {self.scale_of} needs the running mean of the spread's square, which the critics of rl do not keep; "
                "use spread"
            )
        return self


class Lipschitz(Section):
    """What keeps the critics' values from changing fast between near states (stages/values/lipschitz.py)."""

    kind: Literal["none", "spectral", "robust"] = "none"
    """spectral: bound the norm of every layer; robust: penalise what an adversarial change of the state changes."""
    beta: Positive = 1.0
    """Of spectral: most norm of a layer. The product over layers bounds the slope."""
    power_iterations: Count = 1
    """Of spectral: per update."""
    weight: NonNegative = 0.1
    """Of robust."""
    epsilon: NonNegative = 0.1
    """Of robust: largest change of the state, in `units`."""
    units: Literal["normalised", "raw"] = "normalised"
    """Of robust. normalised: standard deviations of each dimension in the replay buffer."""
    norm: Literal["linf", "l2"] = "linf"
    """Of robust."""
    steps: Count = 1
    """Of robust: of gradient ascent, from a random start."""
    stop_clean: bool = False
    """Of robust: no gradient through the value of the unchanged state, which biases values away from the origin."""

    @model_validator(mode="after")
    def _idle(self) -> Lipschitz:
        spectral, robust = (self.kind == "spectral", "kind: spectral"), (self.kind == "robust", "kind: robust")
        needs = dict.fromkeys(("beta", "power_iterations"), spectral)
        needs |= dict.fromkeys(("weight", "epsilon", "units", "norm", "steps", "stop_clean"), robust)
        refuse_idle(self, "lipschitz.", needs)
        return self


class ValueAware(Section):
    """How the model's errors are weighted by the value's gradient (stages/values/vagram.py)."""

    heads: Literal["all", "target"] = "all"
    """Critics whose gradients count: the online and the target networks, or the target networks."""
    clip_quantile: Annotated[float, Field(gt=0.0, le=1.0)] | None = 0.95
    """Longer gradients than this quantile of the data are shortened to it; null: never, as in effect in the reference code."""
    warm_up: Literal["none", "first_fit", "always"] = "first_fit"
    """Fits that add the plain squared error; at first the critics are random."""
    per_head: Literal["exact", "cumulative"] = "exact"
    """cumulative: the k-th critic's gradient is the sum of the first k, as in the reference code, to compare with."""
    unit_gradients: bool = False
    """Ours, not the paper's: divide gradients by their root mean square, so that the reward's weight does not depend on them."""


class StateModel(Section):
    """A learnt model of a domain's dynamics (stages/values/state_model.py). Its value, whose gradients weight errors, is fitted
    to the returns of the same episodes."""

    loss: Literal["mse", "vaml", "vagram"] = "vagram"
    """vagram: errors weighted, dimension by dimension, by the value's gradient (arXiv 2204.01464); vaml: the loss that it is
    derived from; mse: none."""
    plain: bool = True
    """vaml, vagram: add the squared error, as the paper's first fit does; the model is fitted once."""
    clip_quantile: Annotated[float, Field(gt=0.0, le=1.0)] | None = 0.95
    """vaml, vagram: longer gradients than this quantile of the data are shortened to it; null: never."""
    unit_gradients: bool = True
    """vaml, vagram, ours: divide gradients by their root mean square, so that their weight is that of the plain error."""
    lipschitz: Lipschitz = Lipschitz()
    """vaml, vagram: keeps the value's slopes, and so the weights, within bounds (arXiv 2302.01244)."""
    members: Count = 3
    """Of the ensemble, whose mean predicts."""
    critics: Count = 2
    """Values, whose gradients all count."""
    layers: Count = 2
    """Hidden layers of the model."""
    width: Annotated[int, Field(ge=4)] = 64
    """Of the hidden layers of model and value."""
    learning_rate: Positive = 2e-3
    """Adam's."""
    batch: Count = 128
    """Steps in one optimiser step."""
    updates: Count = 1500
    """Optimiser steps of the value and of the model, each."""

    @model_validator(mode="after")
    def _idle(self) -> StateModel:
        aware = (self.loss != "mse", "loss: vagram or vaml")
        names = ("plain", "clip_quantile", "unit_gradients", "lipschitz", "critics")
        refuse_idle(self, "model_rollouts.", dict.fromkeys(names, aware))
        return self


ValidShare = Annotated[float, Field(gt=0.0, lt=0.9)]


class Fitting(Section):
    epochs: Positive = 2.0
    """Passes over the data."""
    learning_rate: Positive = 5e-4
    """AdamW's."""
    batch_tokens: Annotated[int, Field(ge=256)] = 4096
    """Tokens in one optimiser step, about."""


def _fitting_needs(kind: str) -> dict[str, tuple[bool, str]]:
    """For `refuse_idle`: fitting settings apply if there is a model."""
    return dict.fromkeys(Fitting.model_fields, (kind != "none", "a kind other than none"))


class ValueModel(Fitting):
    """The step-value model: the SFT policy's expected return after a history."""

    valid_share: ValidShare = 0.15
    """Fraction of the tasks held out for the evaluation of this model, the Q-model and the progress estimator."""
    head: HeadParams = HeadParams()
    trains: Literal["head", "all"] = "head"
    """head: the backbone keeps the SFT policy's weights, and the head is solved for (stages/values/head_fitting.py), which costs
    one forward pass and with few tasks predicts others better; all: AdamW trains both."""
    hidden: Annotated[int, Field(ge=0, le=4096)] = 0
    """trains head: units of a layer between the states and the head, such as 256, fitted by steps for as many epochs as predict
    other tasks best (stages/values/hidden_head.py); 0: a linear head, which is solved for."""
    l2: Positive | None = None
    """trains head, without a hidden layer: weight of the squared weights of the head; null: chosen by cross-validation over
    tasks."""
    rollouts: bool = True
    """Learn from the episodes of rollout, too, whose returns sample the same values; with labels.q rollout."""

    @model_validator(mode="after")
    def _counts(self) -> ValueModel:
        whole = dict.fromkeys(Fitting.model_fields, (self.trains == "all", "trains: all"))
        of_head = {"hidden": (self.trains == "head", "trains: head")}
        linear = {"l2": (self.trains == "head" and not self.hidden, "trains: head and hidden: 0")}
        refuse_idle(self, "value_model.", whole | of_head | linear)
        return self


class QEnsemble(Section):
    """Pessimism of RAVL (arXiv 2402.12527) in the ranking of actions: stages/values/pessimism.py."""

    members: Annotated[int, Field(ge=2, le=64)] = 10
    """Heads on one backbone, each with random initial weights of its own."""
    aggregate: Literal["min", "mean"] = "min"
    """An action's score: its smallest value, or the members' mean, which is not pessimistic."""
    spread: Positive = 1.0
    """Standard deviation of the members' first outputs, about: values with head.loss mse, logits of bins with others."""
    diversity: NonNegative = 0.0
    """Weight of the similarity of the members' gradients by the action's hidden state (EDAC)."""


class QModel(Fitting):
    """Ranks candidate actions: stages/values/q_model.py."""

    kind: Literal["none", "step_dpo", "trajectory_dpo", "regression"] = "none"
    """step_dpo: a copy of the SFT policy learns the preference pairs, Q = beta (log pi - log pi_ref) of the action;
    trajectory_dpo: it learns pairs of successful and failed episodes; regression: a scalar head learns the labels' Q."""
    learning_rate: Positive = 1e-4
    """AdamW's."""
    init: Literal["sft", "value_model"] = "sft"
    """regression: the initial backbone."""
    beta: Positive = 0.1
    """step_dpo, trajectory_dpo."""
    length_normalise: bool = False
    """step_dpo, trajectory_dpo: log-ratios per token instead of sums, in training and when acting."""
    head: HeadParams = HeadParams()
    """regression."""
    conservative: NonNegative = 0.0
    """regression: weight of the CQL regulariser logsumexp_a Q - E_policy Q over the sampled actions of a history."""
    ensemble: QEnsemble | None = None
    """regression: several heads, of which the most pessimistic one ranks an action; {}: as in the paper; null: one head."""

    @model_validator(mode="after")
    def _counts(self) -> QModel:
        preference = (self.kind in ("step_dpo", "trajectory_dpo"), "kind: step_dpo or trajectory_dpo")
        regression = (self.kind == "regression", "kind: regression")
        needs = {"beta": preference, "length_normalise": preference, "init": regression, "head": regression}
        refuse_idle(self, "q_model.", _fitting_needs(self.kind) | needs | {"conservative": regression, "ensemble": regression})
        return self


class Progress(Fitting):
    """The progress estimator: splits an episode's return into contributions of its turns (stages/values/progress.py)."""

    kind: Literal["none", "spa"] = "none"
    """spa: the sum of the contributions is trained on the rollouts' returns."""
    head: HeadParams = HeadParams(loss="mse")
    """Head of the sum."""

    @model_validator(mode="after")
    def _counts(self) -> Progress:
        refuse_idle(self, "progress.", _fitting_needs(self.kind) | {"head": (self.kind != "none", "kind: spa")})
        return self
