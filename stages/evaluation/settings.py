"""Section `evaluate` of params.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from stages.agent.scaffold import Scaffold
from stages.engine.settings import SamplingParams
from stages.judging.utility_settings import Utilities
from stages.runtime.validation import Count, NonNegative, ParamsError, Section

Replacement = Literal["noop", "random", "random_player"]
MOST_PLAYERS = 8
"""Of a team: 2^8 coalitions play the panel."""


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


class Attribution(Section):
    """What each member of a team (rl.team) contributes to its success (shapley_marl, arXiv 2110.01307): the team plays its panel
    with every subset of the players active and the others replaced, all on the same random draws. The rows of these 2^n - 1
    further models are in data/evaluation/rows.parquet, as rl@search[planner]."""

    method: Literal["shapley", "banzhaf"] = "shapley"
    """shapley: contributions sum to what the team gains over nobody; banzhaf: mean gain over all subsets of the others."""
    replacement: Replacement = "noop"
    """What takes a replaced member's place. noop: nothing, so that its message is dropped; where it is the one that acts, nothing
    is done. random: what it said in another task. random_player: what another member says in its place."""
    players: list[str] = []
    """Roles whose contributions are computed; the others always play. Empty: all of a team."""

    @field_validator("players")
    @classmethod
    def _once(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value):
            raise ValueError(f"names a role twice: {value}")
        return value

    def players_of(self, roles: Sequence[str]) -> list[str]:
        """Those of a team's roles that are players."""
        return [role for role in roles if not self.players or role in self.players]

    def problem(self, teams: Mapping[str, Sequence[str]]) -> str | None:
        """Why this finds nothing to do, with the remedy; None if it does. teams: domain -> roles of its team, if it has one."""
        together = {domain: roles for domain, roles in teams.items() if len(roles) > 1}
        if not together:
            return "has no effect without a team of at least two: list rl.team.members, or set it to null"
        known = list(dict.fromkeys(role for roles in together.values() for role in roles))
        if unknown := [role for role in self.players if role not in known]:
            return f"players names {unknown[0]}, which is no role of rl.team: {', '.join(known)}"
        if large := next((roles for roles in together.values() if len(self.players_of(roles)) > MOST_PLAYERS), None):
            return f"plays 2^n coalitions, too many of {len(large)} players: name at most {MOST_PLAYERS} in players"
        if any(len(self.players_of(roles)) == 1 for roles in together.values()):
            return "has one player in a team, whose contribution is all of the gain: name two or more in players, or none"
        return None


def check_attribution(attribution: Attribution | None, teams: Mapping[str, Sequence[str]], source: str) -> None:
    """Raise ParamsError if `attribution` finds nothing to do (`Attribution.problem`)."""
    if attribution is not None and (problem := attribution.problem(teams)):
        raise ParamsError(f"{source}: evaluate.attribution {problem}")


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
    attribution: Annotated[Attribution | None, Field(exclude_if=lambda one: one is None)] = None
    """What each member of a team contributes. null: not computed."""
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


def reader_of_histories(evaluate: Evaluate, text: bool) -> str | None:
    """What of these settings does not work in a domain that hides earlier observations (`Step.forgets`); None if all do. text:
    `resources.engine.text`."""
    scaffold = evaluate.scaffold
    found = {
        "evaluate.scaffold.window counts exchanges": scaffold.window is not None,
        f"evaluate.scaffold.think: {scaffold.think} puts turns between steps": scaffold.think in ("reflect", "both"),
        "resources.engine.text: true sends conversations as text": text,
    }
    return next((reader for reader, holds in found.items() if holds), None)
