"""Settings that several sections of params.yaml have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from stages.validation import Section


class SamplingParams(Section):
    temperature: Annotated[float, Field(ge=0.0, le=5.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: Annotated[int, Field(ge=1, le=32768)] = 24
    """Tokens per turn."""


class Thinking(Section):
    """What encloses the thoughts of a reasoning model in its turns; the action is what follows. See docs/thinking.md."""

    start: str = "<think>"
    end: str = "</think>"

    @model_validator(mode="after")
    def _apart(self) -> Thinking:
        for name, mark in (("start", self.start), ("end", self.end)):
            if not mark or mark != mark.strip():
                raise ValueError(f"{name} must be a mark without white space around it, such as <think>, not {mark!r}")
        if self.start in self.end or self.end in self.start:
            raise ValueError(f"start and end must be told apart, and they are {self.start!r} and {self.end!r}")
        return self
