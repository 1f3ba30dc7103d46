"""Settings of judges (`rl.judge` and `annotate.judge_model` in params.yaml). Light to import."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.judging.extraction import MISSING
from stages.records.thinking import Occurrence
from stages.runtime.validation import Count, NonNegative, Positive, Section, Share, refuse_idle
from stages.values.settings import Fitting, ValidShare

LONGEST_ASKED_S = 300.0
"""Longest Retry-After that is waited for: of a judge's server unless `longest_wait_s` is set, of a chat server always."""


class ProgramFaults(Section):
    """Planted sensitivity and errors of a program judge; scores are on the rubric's scale, 0 to 10."""

    gain: NonNegative = 0.5
    """Pairwise: points per unit of the difference in quality, for each of the two."""
    centre: float = 6.0
    """Pairwise: score of both if their qualities are equal."""
    pointwise_gain: NonNegative = 0.25
    """Pointwise: points per unit of quality. Absolute scores of similar answers bunch together."""
    pointwise_centre: float = 7.0
    """Pointwise: score of quality 0."""
    noise: NonNegative = 0.5
    """Standard deviation of each score's error."""
    position: float = 0.0
    """Added to the first of two."""
    length: float = 0.0
    """Added per word of the answer."""
    praise: float = 0.0
    """Added to an answer that praises itself."""
    flip: Share = 0.0
    """Checklist: probability that an item is judged wrongly."""
    step: NonNegative = 0.0
    """Scores are rounded to multiples of this. 0: not rounded."""
    clip: bool = False
    """Keep scores on the rubric's scale."""


Options = Annotated[list[str], Field(min_length=2, max_length=2)]


class ServerParams(Section):
    """A judge behind an OpenAI-compatible server."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Address of the server. The key is read from the environment variable OPENAI_API_KEY, if it is set."""
    model: str = ""
    """The judge's name at the server."""
    temperature: NonNegative = 0.0
    """Of the judge's sampling."""
    max_tokens: Count = 512
    """Of a reply, reason included."""
    timeout_s: Positive = 60.0
    """Per attempt."""
    attempts: Count = 10
    """Attempts per judgment, failed ones included."""
    wait_s: NonNegative = 1.0
    """Pause before the second attempt; doubled each time, at most 30 s. A server's Retry-After goes first."""
    longest_wait_s: NonNegative = LONGEST_ASKED_S
    """Longest Retry-After that is waited for; a judgment for which the server asks for more fails at once, as its reason says."""
    requests: Count = 4
    """Requests in flight."""
    structured: bool = True
    """Send the reply's JSON schema (`response_format`); false for servers that reject it."""
    max_calls: Annotated[int, Field(ge=0)] | None = None
    """Budget of the run in requests, retries included; further judgments are failures. null: none."""
    max_money: NonNegative | None = None
    """Budget of the run in money, by the prices below. A request is sent only if it fits at its dearest: max_tokens written, and
    a token read per character of the request. null: none."""
    price_in: NonNegative = 0.0
    """Price of a million tokens that the judge reads."""
    price_out: NonNegative = 0.0
    """Price of a million tokens that it writes."""
    cache: str = "data/judgments"
    """Folder of all replies, relative to the repository: a run whose questions are in it needs no server. "" for none."""
    give_up_after: Count = 20
    """Stop the run after this many judgments in a row without an answer. It resumes from its checkpoint, and asks anew what
    failed since then."""
    ask_failed_again: bool = False
    """Ask anew what failed when it was stored; false: a repetition ends in the same bytes, failures included."""

    @model_validator(mode="after")
    def _affordable(self) -> ServerParams:
        if self.max_money is not None and not (self.price_in or self.price_out):
            raise ValueError("max_money has no effect while price_in and price_out are 0; set the prices, or max_money to null")
        return self


class LocalParams(Section):
    """A local judge model, which answers by the probabilities of its options."""

    path: str = ""
    """A `save_pretrained` folder, relative to the repository; DVC notices changes of one below data/raw. "": the model that
    annotate fits (annotate.judge_model)."""
    options: Options = ["A", "B"]
    """What it answers for the first and the second candidate; each one token after the prompt. Pointwise: yes and no."""
    batch: Count = 1
    """Questions per forward pass. 1: a question's scores do not depend on those asked beside it; more is faster on a GPU, and may
    change the last digits."""


class Principle(Section):
    """What is preferred, in words."""

    name: Annotated[str, Field(min_length=1)]
    """Identifies it. A program judge knows `correct` (the hidden quality), `short`, `modest` (no self-praise) and the domain's
    own attributes by their names."""
    text: Annotated[str, Field(min_length=1)]
    """What judges read."""
    negative: Annotated[str, Field(min_length=1)]
    """What they read of the negated principle."""
    weight: NonNegative = 1.0
    """rl: weight with which a task draws it."""
    always: bool = False
    """rl: every task has it, beside those that it draws."""
    from_step: Annotated[int, Field(ge=1)] = 1
    """rl: it is used from this training step on."""


PRINCIPLES = [
    Principle(name="correct", text="right", negative="wrong"),
    Principle(name="short", text="short", negative="long"),
    Principle(name="modest", text="no praise of itself", negative="praise of itself"),
]


def _named_once(items: list[Principle]) -> None:
    names = [one.name for one in items]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"principles name {twice[0]!r} twice; give each a name of its own")


class PrincipleSampling(Section):
    """Preferences by principles: stages/judging/principles.py."""

    items: Annotated[list[Principle], Field(min_length=1)] = PRINCIPLES
    """The principles that the judge model learns to read."""
    most: Count = 8
    """Principles shown with a preference, at most."""
    geometric: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Their number is geometric with this probability."""
    negate: Share = 0.5
    """Probability that a principle is negated."""
    normaliser: Literal["variance", "std", "none"] = "variance"
    """What a principle's margins are divided by. The authors' code divides by the variance."""
    sign_agreement: bool = True
    """Pairs on which the two orders disagree are undecided."""
    label_noise: Share = 0.1
    """Probability that a label is flipped."""
    rule_label_noise: Share = 0.25
    """The same for labels of the rules on phrases and languages."""
    stock_phrases: list[str] = ["As an AI language model"]
    """If one of two answers alone has such a phrase, it loses."""
    stock_probability: Share = 0.5
    """Probability that this rule is applied."""
    languages: bool = False
    """An answer in another language than the prompt's loses, and pairs of two such answers are left out (extra `judging`)."""
    replicas: Count = 4
    """Passes over the pairs, each with other draws."""

    @model_validator(mode="after")
    def _names(self) -> PrincipleSampling:
        _named_once(self.items)
        if self.languages and importlib.util.find_spec("py3langid") is None:
            raise ValueError(
                "languages needs py3langid, which is not installed: pip install 'bellwether[judging]', or set it false"
            )
        return self


class SampledPrinciples(Section):
    """Principles that a judge reads while rl trains (rl.judge.principles)."""

    items: Annotated[list[Principle], Field(min_length=1)] = PRINCIPLES
    """They may differ from those of annotate.judge_model, if its model is large enough to read what it was not fitted with."""
    per_task: Annotated[int, Field(ge=0)] = 3
    """Principles that a group's task draws at each step, by their weights."""
    bonus: dict[str, NonNegative] = {}
    """Added to weights, by name: for domains that some principles are about. The paper adds 128."""

    @model_validator(mode="after")
    def _names(self) -> SampledPrinciples:
        _named_once(self.items)
        if unknown := set(self.bonus) - {one.name for one in self.items}:
            raise ValueError(f"bonus names {sorted(unknown)[0]!r}, which is no principle of items")
        if not self.per_task and not any(one.always for one in self.items):
            raise ValueError("per_task is 0 and no principle holds always, so none would be read; raise per_task")
        return self


class Extraction(Section):
    """What judges read of a policy's last message (stages/judging/extraction.py)."""

    marker: str | None = None
    """The response begins after this marker. null: it is what the environment receives by model.thinking's markers; "": the whole
    message."""
    end: str = ""
    """It ends before this marker. "": at the end of the message."""
    occurrence: Occurrence | None = None
    """Which `marker`, if there are several. null: as model.thinking.occurrence, or without thoughts the first."""
    strict: bool = True
    """Without a marker judges read `missing`; false: the whole message, thoughts included, which a policy can exploit."""
    missing: Annotated[str, Field(min_length=1)] = MISSING
    """What they read of a response without its markers."""

    @model_validator(mode="after")
    def _one_reading(self) -> Extraction:
        if not self.marker and self.occurrence is not None:
            raise ValueError(
                "occurrence is that of `marker`, which is not set; by the markers of model.thinking the judge reads what the "
                "environment receives: set model.thinking.occurrence for both"
            )
        return self


class LabelledPairs(Section):
    """A judge is measured before it is believed: rl asks it about labelled pairs before it trains (docs/judges.md)."""

    path: Annotated[str, Field(min_length=1)]
    """The file of pairs, relative to the repository; DVC notices changes of one below data/raw."""
    least_kappa: Share | None = None
    """The run ends before it trains if Cohen's kappa with the majority of the labels is below this. null: it does not."""
    limit: Count | None = None
    """Pairs at most. null: all."""


class LengthBonus(Section):
    """R = r + scale min(cap, rate tokens / longest)."""

    scale: Positive = 5.0
    """Largest bonus over cap."""
    cap: Share = 0.8
    """Of the share of `longest`."""
    rate: float = 1.0
    """Factor on an answer's length; the paper has -0.4 for reasoning."""
    longest: Count = 1024
    """Tokens of the longest answer."""


class JudgeModel(Fitting):
    """A judge that annotate fits to preferences, a copy of the SFT policy: stages/judging/fit_judge.py."""

    kind: Literal["none", "reward", "comparison"] = "none"
    """reward: scores one answer (Bradley-Terry), for judge.scheme pointwise; comparison: compares two, in both orders, for
    tournaments."""
    labels: Literal["program", "policy", "server", "trees"] = "program"
    """Who prefers. program: the hidden quality, or the attributes that principles name, with planted errors; policy: the SFT
    policy itself; server: a model behind a server; these compare the rollouts of a task. trees: annotate's pairs."""
    principles: PrincipleSampling | None = None
    """Preferences by principles, which the model then reads ({}: with defaults). null: by quality alone."""
    pairs: Count = 6
    """Pairs of different answers per task, at most."""
    shortest: Annotated[int, Field(ge=0)] = 0
    """Pairs with an answer of fewer characters are left out. The paper has 16."""
    valid_share: ValidShare = 0.2
    """Share of the tasks that only measure the model."""
    options: Options = ["A", "B"]
    """As rl.judge.local.options."""
    program: ProgramFaults = ProgramFaults()
    server: ServerParams = ServerParams()
    alpha: bool = False
    """Also report Krippendorff's alpha (extra `judging`)."""
    least_kappa: Share | None = None
    """The stage fails if the model's kappa with held-out labels is below this. null: it does not."""

    @model_validator(mode="after")
    def _counts(self) -> JudgeModel:
        fitted = dict.fromkeys(
            [*Fitting.model_fields, "valid_share", "options", "labels", "alpha", "least_kappa"],
            (self.kind != "none", "a kind other than none"),
        )
        compared = self.kind != "none" and self.labels != "trees"
        needs = {
            "principles": (compared, "labels: program, policy or server"),
            "pairs": (compared, "labels: program, policy or server"),
            "shortest": (compared, "labels: program, policy or server"),
            "program": (self.labels == "program", "labels: program"),
            "server": (self.labels == "server", "labels: server"),
        }
        refuse_idle(self, "judge_model.", fitted | needs)
        if self.kind != "none" and self.labels == "server" and not self.server.model:
            raise ValueError("judge_model.labels: server needs the judge's name at the server: set judge_model.server.model")
        return self
