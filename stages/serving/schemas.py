"""Request schemas of OpenAI's API with vLLM's extensions. Fields that would change the answer are never ignored."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from stages.engine.engine import MAX_COUNT, MIN_TEMPERATURE

MAX_PROMPTS = 64
MAX_TURNS = 256
"""Prompts of a request times `n`."""


def _valid_temperature(value: float) -> float:
    if 0 < value < MIN_TEMPERATURE:
        raise ValueError(f"Input should be 0 or at least {MIN_TEMPERATURE:g}")
    return value


Draws = Annotated[int, Field(ge=1, le=64)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Temperature = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False), AfterValidator(_valid_temperature)]
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "min_tokens": (0,),
}
"""Fields accepted only with these values (and null), which have no effect."""
IGNORED = ("user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id")
"""Fields that are accepted and ignored, since no answer depends on them."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """Fields of both endpoints; null: the value of evaluate.sampling."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=1024)]
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    """0 and -1: all tokens."""
    max_tokens: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """The same request with the same seed has the same answer; null: random."""
    n: Draws = 1
    metadata: dict[str, Any] | None = None
    """For the log and the recording: `trace` names the agent's run, `task` (in a recording) its task; calls with `human` "true"
    are neither logged nor recorded, nor answered by a specialist of `--router`. No other answer depends on it."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    """Accepted only if `stop_token_ids` holds the policy's end-of-turn token, where turns always end."""

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("a request must be a JSON object")
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(f"a text contains the unpaired surrogate {half}; fix or remove it") from error
        for key, allowed in NEUTRAL.items():
            value = values.get(key)
            if value is not None and value not in allowed:
                raise ValueError(f"{key} is not supported (given: {value!r}); leave it out")
        return {key: value for key, value in values.items() if key not in NEUTRAL and key not in IGNORED}


def _kind(value: Any) -> str:
    """The tag of a `prompt`'s form, by its first item, so that errors are reported for that form only."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    return "lists" if isinstance(first, list) else "texts" if isinstance(first, str) else "ids"


Many = Field(max_length=MAX_PROMPTS)
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[int], Tag("ids")]
    | Annotated[list[str], Many, Tag("texts")]
    | Annotated[list[list[int]], Many, Tag("lists")],
    Discriminator(_kind),
]


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: one or several prompts, as text or token ids."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 and 1 alike: of the sampled tokens only."""
    skip_special_tokens: bool = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if self.prompt and isinstance(self.prompt[0], int) else self.prompt  # type: ignore[return-value, list-item]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions: a conversation that ends with a user message."""

    messages: list[Any]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None


class OutcomeReport(BaseModel):
    """POST /v1/outcomes: whether the task of a trace was solved, or its reward, or both."""

    model_config = ConfigDict(extra="forbid")

    trace: Annotated[str, Field(min_length=1, max_length=1024)]
    success: bool | None = None
    reward: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    """For a recording; by default 1 or 0, as `success` says."""

    @model_validator(mode="after")
    def _reported(self) -> OutcomeReport:
        if self.success is None and self.reward is None:
            raise ValueError("give success (true or false) or reward (0 to 1)")
        return self

    @property
    def solved(self) -> bool:
        """By default, whether the reward is 1."""
        return self.reward == 1.0 if self.success is None else self.success

    @property
    def earned(self) -> float:
        return float(bool(self.success)) if self.reward is None else self.reward
