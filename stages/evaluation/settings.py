"""Section `evaluate` of params.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from stages.agent.scaffold import Scaffold
from stages.engine.settings import SamplingParams
from stages.judging.utility_settings import Utilities
from stages.runtime.validation import Count, NonNegative, Section


class BestOf(Section):
    """Models such as sft+q choose the best of several actions, and with +reward of several episodes."""

    n: Annotated[int, Field(ge=2, le=64)] = 5
    """Actions sampled per turn; +reward: episodes per attempt."""
    per_token: bool = False
    """+value, +logprob: mean scores per token instead of sums, which favour short actions."""


class TreeSearch(Section):
    """Models such as sft+search look ahead in the environment: they see the rewards of episodes that they simulate, so they are
    the upper end of what choosing among the policy's actions can give, not policies to deploy."""

    iterations: Count = 16
    """Simulated episodes before each turn; fewer once one with the highest possible return is known."""
    expand_k: Annotated[int, Field(ge=1, le=64)] = 4
    """Actions drawn in a state before the search goes on below one of them."""
    c: NonNegative = 1.0
    """UCT's exploration constant, as annotate.selection.c."""
    returns: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """Smallest and largest return of an episode of the environment."""
    sampling: SamplingParams = SamplingParams()
    """Of simulated episodes, whose actions are then played."""

    @model_validator(mode="after")
    def _range(self) -> TreeSearch:
        if self.returns[0] >= self.returns[1]:
            raise ValueError(f"returns must be [low, high] with low < high, such as [-1.0, 1.0]; it is {self.returns}")
        if self.sampling.temperature == 0 or self.sampling.top_k == 1:
            raise ValueError("sampling would draw the same action each time: set temperature above 0 and top_k other than 1")
        return self


class Evaluate(Section):
    """Models that play the frozen panels."""

    models: Annotated[list[str], Field(min_length=1)] | None = None
    """Which of base, sft, rl@<domain>, merged and merged_linear play the panels; null: all of them. `<model>+q`, `<model>+value`,
    `<model>+logprob` and `<model>+vote` play the best of `best_of.n` actions that the model draws at each turn; the
    first two on the panels of those domains that have a Q-model or values. `<model>+reward` plays the best of `best_of.n`
    episodes per attempt, by the reward model of a domain that has one. `<model>+closed_book` plays without tools, in domains
    whose settings have `closed_book`; `<model>+self_search`, `+real_search` and `+gated_search` with that tool_mode.
    `<model>+few_shot` sees demonstrations first. `<model>+search` looks ahead in the environment."""
    examples: Annotated[int, Field(ge=1, le=16)] = 2
    """+few_shot: conversations before the task, the shortest demonstrations of training tasks."""
    examples_as: Literal["chat", "text"] = "chat"
    """+few_shot: how demonstrations and the task are written. text: as plain text, with roles as words and an empty line after
    each message, for base models, which may never have seen the tokens of their chat template."""
    best_of: BestOf = BestOf()
    search: TreeSearch = TreeSearch()
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
