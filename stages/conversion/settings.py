"""Settings of a conversion, a YAML file of its own: docs/conversion.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from stages.runtime.validation import Count, NonNegative, ParamsError, Positive, Section, Share, explain, parse_yaml

Kind = Literal["email", "phone", "card", "ip", "name"]
Kept = Literal["prompt", "response", "latency_ms", "outcome"]


class Collect(Section):
    """S1: what the server logs. Answers for people never are, and texts are always masked."""

    fields: list[Kept] = ["prompt", "response", "latency_ms", "outcome"]
    """What a call's row holds beside its names; prompt and response, which has the tool calls, are needed."""
    retention_days: Count | None = 30
    """Older rows are deleted from the log, with the values of their placeholders; null: never."""

    @model_validator(mode="after")
    def _complete(self) -> Collect:
        if missing := [name for name in ("prompt", "response") if name not in self.fields]:
            raise ValueError(f"fields lacks {' and '.join(missing)}, without which nothing can be learned from a call")
        return self


class CurateCalls(Section):
    """S2: which calls of the log are kept."""

    min_examples: Count = 10_000
    """Fewer rows are not converted; the paper's rule of thumb is 10,000 to 100,000."""
    max_examples: Count = 100_000
    pii: list[Kind] = ["email", "phone", "card", "ip", "name"]
    """Personal data that is masked; a row that still has some makes the run fail."""
    names: list[str] = []
    """Names of people to mask: there is no recognition of names."""
    dedup_jaccard: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Prompts and answers with this similarity of 5-word shingles are duplicates; the first is kept."""
    keep_outcome: Literal["success", "all"] = "success"
    """success: failures are not trained on; they stay in the validation and test parts."""


class ClusterCalls(Section):
    """S3: unsupervised clusters of calls."""

    k: Count | None = None
    """null: the number in k_range with the highest mean silhouette."""
    k_range: Annotated[list[Count], Field(min_length=2, max_length=2)] = [2, 20]
    min_cluster: Count = 500
    """Smaller clusters stay with the large model."""
    seed: Annotated[int, Field(ge=0)] = 42

    @model_validator(mode="after")
    def _ordered(self) -> ClusterCalls:
        if not 2 <= self.k_range[0] <= self.k_range[1]:
            raise ValueError(f"k_range {self.k_range} must be [from, to] with 2 <= from <= to")
        return self


class Candidate(Section):
    """A small model that may serve a cluster."""

    path: str
    """A `save_pretrained` folder."""
    licence: str = "apache-2.0"


class SelectModel(Section):
    """S4: the cheapest model that is good enough."""

    candidates: dict[str, Candidate] = {}
    max_params: Positive = 10e9
    max_latency_ms: Positive = 1000.0
    """Mean time of a call on this machine."""
    licence_allow: list[str] = ["mit", "apache-2.0"]
    tolerance: NonNegative = 0.02
    """Behind the best candidate's score on validation calls."""


class Specialise(Section):
    """S5: training of a cluster's specialist."""

    epochs: Count = 4
    learning_rate: Positive = 1e-3
    batch_tokens: Count = 2048
    kd_weight: Share = 0.5
    """lambda: weight of the large model's distribution; 0: its answers alone. Needs the same tokenizer."""
    kd_temperature: Positive = 1.0
    lora_rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: all weights."""


class Router(Section):
    """S6: when a specialist answers."""

    min_similarity: Share = 0.3
    """To the nearest cluster's centroid."""
    min_confidence: Share = 0.7
    """Mean probability of the answer's tokens; raised for a cluster until its accepted validation calls are as good as asked."""
    epsilon: Share = 0.02
    """How much worse than the large model a specialist may be, by the lower bound of a paired comparison."""
    min_calls: Count = 30
    """Fewer calls decide nothing: confirmed test calls that a specialist answers, for its promotion; calls since the last round,
    for the rates of `iterate`."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    resamples: Count = 1000


class Iterate(Section):
    """S6: when a further round starts: for any of these reasons."""

    every_n_calls: Count = 5000
    fallback_rate_above: Share = 0.15
    """Of the calls since the last round: those that resemble no cluster, or whose specialist was not sure or answered in another
    shape than it learned."""
    quality_drop_above: Share = 0.02
    """How far the share of right answers among the specialists' is below that of the last round's test calls."""
    max_rounds: Count = 5
    """Rounds that convert; those with too few calls do not count."""


class Conversion(Section):
    """A conversion."""

    log: str = "data/serving/calls.jsonl"
    """The serving log (`python -m stages.serving --conversion SETTINGS`)."""
    key: str = ".bellwether/conversion.key"
    """File of the key with which personal data is masked; made if it does not exist."""
    teacher: str = "data/models/merged"
    """The large model."""
    out: str = "data/conversion"
    max_length: Count = 640
    max_tokens: Count = 24
    """Of an answer."""
    seed: Annotated[int, Field(ge=0)] = 0
    collect: Collect = Collect()
    curate: CurateCalls = CurateCalls()
    cluster: ClusterCalls = ClusterCalls()
    select: SelectModel = SelectModel()
    specialise: Specialise = Specialise()
    router: Router = Router()
    iterate: Iterate = Iterate()


def load_settings(path: Path) -> Conversion:
    """Raises ParamsError for a file that is missing or has invalid values."""
    try:
        return Conversion.model_validate(parse_yaml(path.read_bytes(), path))
    except FileNotFoundError as error:
        raise ParamsError(f"{path} does not exist; copy examples/conversion.yaml") from error
    except ValidationError as error:
        raise ParamsError(explain(error, Conversion, path.name)) from error
