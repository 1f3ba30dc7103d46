"""Section `evaluate` of params.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from stages.agent.scaffold import Scaffold
from stages.engine.settings import SamplingParams
from stages.judging.utility_settings import Utilities
from stages.runtime.validation import Count, Section


class BestOf(Section):
    """Models such as sft+q choose the best of several actions, and with +reward of several episodes."""

    n: Annotated[int, Field(ge=2, le=64)] = 5
    """Actions sampled per turn; +reward: episodes per attempt."""
    per_token: bool = False
    """+value, +logprob: mean scores per token instead of sums, which favour short actions."""


class Evaluate(Section):
    """Models that play the frozen panels."""

    models: Annotated[list[str], Field(min_length=1)] | None = None
    """Which of base, sft, rl@<domain>, merged and merged_linear play the panels; null: all of them. `<model>+q`, `<model>+value`,
    `<model>+logprob` and `<model>+vote` play the best of `best_of.n` actions that the model draws at each turn; the
    first two on the panels of those domains that have a Q-model or values. `<model>+reward` plays the best of `best_of.n`
    episodes per attempt, by the reward model of a domain that has one. `<model>+closed_book` plays without tools, in domains
    whose settings have `closed_book`; `<model>+self_search`, `+real_search` and `+gated_search` with that tool_mode.
    `<model>+few_shot` sees demonstrations first."""
    examples: Annotated[int, Field(ge=1, le=16)] = 2
    """+few_shot: conversations before the task, the shortest demonstrations of training tasks."""
    examples_as: Literal["chat", "text"] = "chat"
    """+few_shot: how demonstrations and the task are written. text: as plain text, with roles as words and an empty line after
    each message, for base models, which may never have seen the tokens of their chat template."""
    best_of: BestOf = BestOf()
    attempts: Annotated[int, Field(ge=1, le=256)] = 2
    """Per panel task; success is their mean, and pass@k is computed for k up to this."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Level of the intervals."""
    resamples: Annotated[int, Field(ge=100, le=1_000_000)] = 2000
    """Of the bootstrap."""
    chunk: Count = 400
    """Episodes between checkpoints."""
    sampling: SamplingParams = SamplingParams(temperature=0.5, top_p=0.95)
    scaffold: Scaffold = Scaffold()
    utilities: Utilities | None = None
    """What the models prefer among outcomes, and how coherently. null: not asked."""
    transfer: list[str] = []
    """Domains that nothing is trained on, and whose frozen panels all models play, too; each needs an entry in `per_domain`, of
    which `environment` and `curate.test` count."""
    split: Literal["test", "valid"] = "test"
    """valid: the validation tasks instead of the frozen panels, for choosing settings."""

    @field_validator("transfer")
    @classmethod
    def _once(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value):
            raise ValueError(f"lists a domain twice: {value}")
        return value
