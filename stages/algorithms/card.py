"""What a method's module holds: a card that tells what it is, and the composition that its name stands for. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stages.cards import Card as Card
from stages.validation import Section

PIECES = ("reward", "branching", "filling", "advantage", "credit", "loss", "preference")
"""Parts that a method can bring a function of its own for; its name in the parameters is then `own`."""


@dataclass(frozen=True)
class Composition:
    """A named method.

    parts: what its name stands for, by dotted keys of section `rl` (`loss.clip_high`); the user's own values go before.
    pieces: functions of its own, by part (see PIECES); they get the resolved section `rl` last, its `settings` an instance of
    `settings`. reward, filling, advantage, credit: (batch, rl) -> batch; branching: rl -> stages.agent.branching.Plan;
    loss: (logprobs [b, T], batch, rl) -> per-token loss [b, T]; preference: (pairs, rl) -> loss per pair [P].
    settings: the model of the keys in `rl.settings`.
    whole_groups: its own loss compares the episodes of a group, so that no group may be split over micro-batches.
    reference: (rl) -> whether its pieces need the log-probabilities of the frozen start policy.
    check: (rl as given, rl resolved); raises ParamsError for what makes no sense with this method alone.
    data: what it learns from: episodes that the policy plays, recorded episodes (`replay.records`), or the stored pairs.
    """

    card: Card
    parts: Mapping[str, Any]
    pieces: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    settings: type[Section] | None = None
    whole_groups: bool = False
    reference: Callable[[Any], bool] | None = None
    check: Callable[[Any, Any], None] | None = None
    data: Literal["episodes", "records", "pairs"] = "episodes"
