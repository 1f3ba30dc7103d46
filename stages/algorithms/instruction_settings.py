"""Settings of `rl.tasks.source: instructions`. Light to import."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.agent.instructions import QUESTION, fault
from stages.judging.chat_settings import ChatParams
from stages.runtime.validation import Count, Positive, Section, Share, refuse_idle

SEEDS = [QUESTION, f"Look first. {QUESTION}", f"Be brief. {QUESTION}"]


class Editor(Section):
    """Who writes candidates."""

    kind: Literal["rules", "random", "server"] = "rules"
    """rules: adds the phrase that most failures do not follow (stages/agent/instructions.py); random: adds or removes a random
    phrase; server: a chat model reads the parent and failures and writes freely."""
    failures: Count = 4
    """Failed episodes that it reads for a candidate."""
    server: ChatParams = ChatParams()

    @model_validator(mode="after")
    def _server(self) -> Editor:
        if (self.kind == "server") != bool(self.server.model):
            raise ValueError(
                f"kind is {self.kind}, and server.model is {self.server.model!r}: name a model for kind server, and for no other"
            )
        if self.kind == "server" and not self.server.cache:
            raise ValueError("server.cache is empty, and a run without stored replies can't be repeated: name a folder")
        refuse_idle(self, "", {"failures": (self.kind != "random", "kind rules or server")})
        return self


class Verify(Section):
    """The test that candidates pass before they join."""

    questions: Count = 32
    """Curated questions that the buffer does not hold. While there are fewer, an evolution that is due waits."""
    rollouts: Count = 1
    """Episodes per question."""
    accept_top: Count = 4
    """At most so many join."""


class InstructionSettings(Section):
    """rl.tasks.settings of source `instructions`."""

    seeds: Annotated[list[str], Field(min_length=1)] = SEEDS
    """Instructions to start from; {question} is the task's prompt."""
    population: Count = 8
    """Largest number of instructions."""
    temperature: Positive = 0.1
    """Of the softmax of weights that instructions are drawn by."""
    explore: Share = 0.0
    """Share of draws that are uniform, so that no weight grows stale."""
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Of a step's mean reward in an instruction's weight."""
    first_weight: float = 0.5
    """Weight of the seeds. With `centre`, whose rewards are around 0, it is 0 unless set: from 0.5, every instruction that is
    used would sink, and unused ones would win."""
    centre: bool = False
    """Rewards less the running success of the question: an instruction that met easy questions does not look better."""
    evolve_every: Annotated[int, Field(ge=0)] = 20
    """Steps; 0: the population does not change."""
    keep: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the tried instructions that survive pruning."""
    min_trials: Count = 16
    """Episodes before an instruction can be pruned."""
    buffer: Count = 256
    """Episodes of lowest reward that are kept for the editor."""
    candidates: Count = 8
    """Written each time."""
    max_words: Count = 40
    """Longest instruction, in words."""
    editor: Editor = Editor()
    verify: Verify = Verify()

    @model_validator(mode="before")
    @classmethod
    def _centred(cls, values: Any) -> Any:
        centred = isinstance(values, dict) and values.get("centre") is True and "first_weight" not in values
        return {**values, "first_weight": 0.0} if centred else values

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, value: list[str]) -> list[str]:
        if bad := [text for text in value if fault(text, 10_000)]:
            raise ValueError(f"{bad[0]!r} must have {QUESTION} once, where the task's prompt goes")
        if len(set(value)) < len(value):
            raise ValueError("lists an instruction twice; list each once")
        return value

    @model_validator(mode="after")
    def _fits(self) -> InstructionSettings:
        if len(self.seeds) > self.population:
            raise ValueError(f"population is {self.population}, and there are {len(self.seeds)} seeds: raise it")
        if long := [text for text in self.seeds if fault(text, self.max_words)]:
            raise ValueError(f"max_words is {self.max_words}, and a seed has more: {long[0]!r}; raise it")
        several = self.population > 1, "a population above 1"
        evolving = several[0] and self.evolve_every > 0, "evolve_every above 0 and a population above 1"
        refuse_idle(self, "", dict.fromkeys(("temperature", "explore"), several))
        refuse_idle(self, "", dict.fromkeys(("keep", "min_trials", "buffer", "candidates", "editor", "verify"), evolving))
        return self
