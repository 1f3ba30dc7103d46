"""What a method's module holds: a card that tells what it is, and the composition that its name stands for. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stages.records.card import Card as Card
from stages.runtime.validation import Section

PIECES = ("reward", "branching", "group_resampling", "advantage", "credit", "loss", "preference")
"""Parts that a method can bring a function of its own for; its name in the parameters is then `own`."""


@dataclass(frozen=True)
class Stored:
    """Losses on stored episodes: (stages.algorithms.parts.offline.Scores, StoredBatch, rl) -> LossTerms, a micro-batch's share.

    policy: of the policy. value: of a value network that learns first, while the policy stands still; None: there is none.
    """

    policy: Callable[..., Any]
    value: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Composition:
    """A named method.

    parts: what its name stands for, by dotted keys of section `rl` (`loss.clip_high`); the user's own values go before.
    pieces: functions of its own, by part (see PIECES); they get the resolved section `rl` last, its `settings` an instance of
    `settings`. reward, group_resampling, advantage, credit: (batch, rl) -> batch; branching: rl -> stages.agent.branching.Plan;
    loss: (logprobs [b, T], batch, rl) -> per-token loss [b, T]; preference: (pairs, rl) -> loss per pair [P].
    vocabulary: (rl) -> whether its loss gets a `stages.agent.policy.Vocabulary` of the current policy after `batch`.
    rescored: (rl) -> whether the training pass computes `logprobs_old` anew, and `mean_logprobs_old` with them.
    settings: the model of the keys in `rl.settings`.
    whole_groups: its own loss compares the episodes of a group, so that no group may be split over micro-batches.
    reference: (rl) -> whether its pieces need the log-probabilities of the frozen start policy.
    check: (rl as given, rl resolved); raises ParamsError for what makes no sense with this method alone.
    data: what it learns from: episodes that the policy plays; recorded episodes (`replay.records`) by the same pieces; the stored
        pairs; or stored episodes by the losses in `stored`.
    stored: its losses on stored episodes.
    """

    card: Card
    parts: Mapping[str, Any]
    pieces: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    settings: type[Section] | None = None
    whole_groups: bool = False
    reference: Callable[[Any], bool] | None = None
    vocabulary: Callable[[Any], bool] | None = None
    rescored: Callable[[Any], bool] | None = None
    check: Callable[[Any, Any], None] | None = None
    data: Literal["episodes", "records", "pairs", "stored"] = "episodes"
    stored: Stored | None = None
