"""Settings of judges (`rl.judge` in params.yaml). Light to import."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, Share


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
    requests: Count = 4
    """Requests in flight."""
    structured: bool = True
    """Send the reply's JSON schema (`response_format`); false for servers that reject it."""
    max_calls: Annotated[int, Field(ge=0)] | None = None
    """Budget of the run in requests, retries included; further judgments are failures. null: none."""
    max_money: NonNegative | None = None
    """Budget of the run in money, by the prices below. null: none."""
    price_in: NonNegative = 0.0
    """Price of a million tokens that the judge reads."""
    price_out: NonNegative = 0.0
    """Price of a million tokens that it writes."""
    cache: str = "data/judgments"
    """Folder of all replies, relative to the repository: a run whose questions are in it needs no server. "" for none."""
    give_up_after: Count = 20
    """Stop the run after this many judgments in a row without an answer; it resumes from its checkpoint and asks them anew."""
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
    """A `save_pretrained` folder, relative to the repository."""
    options: Annotated[list[str], Field(min_length=2, max_length=2)] = ["A", "B"]
    """What it answers for the first and the second candidate; each one token after the prompt. Pointwise: yes and no."""
    batch: Count = 16
    """Questions per forward pass."""
