"""What a method's module contains: a card that describes it, and the composition that its name selects. Light to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stages.records.card import Card as Card
from stages.runtime.validation import Section

PIECES = ("reward", "branching", "group_resampling", "advantage", "credit", "loss", "preference")
"""Parts that a method can replace by a function of its own; the part's switch is then `own`."""


@dataclass(frozen=True)
class OfflineLosses:
    """Losses on an offline dataset: (stages.algorithms.parts.offline.Scores, OfflineBatch, rl) -> LossTerms, a micro-batch's
    share.

    policy: of the policy. value: of a value network that learns first, while the policy stays fixed; None: there is none.
    """

    policy: Callable[..., Any]
    value: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Composition:
    """A named method.

    parts: its choices, by dotted keys of section `rl` (`loss.clip_high`); the user's own values override them.
    pieces: functions of its own, by part (see PIECES); `rl` is the resolved section, `rl.settings` an instance of `settings`.
        reward, group_resampling, advantage, credit: (batch, rl) -> batch; branching: rl -> stages.agent.branching.Plan;
        loss: (logprobs [b, T], batch, rl) -> per-token loss [b, T]; preference: (pairs, rl) -> loss per pair [P].
    roles: its choices for the episodes of single roles, by role and dotted key; `rl.roles` overrides them.
    settings: the model of the keys in `rl.settings`.
    derive: (settings, values of section `rl`) -> settings, with its keys that follow from others.
    state: () -> a new dictionary for what the method remembers between steps, of tensors and JSON values. The pieces
        group_resampling, advantage and credit, which run once a step, get it as their last argument and change it in place;
        checkpoints save it.
    vocabulary: (rl) -> whether its loss gets a `stages.agent.policy.Vocabulary` of the current policy as its last argument.
    rescored: (rl) -> whether the training pass recomputes `logprobs_old`, and adds MeanLogprobs (parts/loss.py) to the batch.
    reference: (rl) -> whether its pieces need the log-probabilities of the frozen start policy.
    teacher: (rl) -> whether its pieces need the log-probabilities of a teacher that sees a solution (parts/teacher.py).
    whole_groups: its own loss compares the episodes of a group, so that no group may be split over micro-batches.
    check: (rl as given, rl resolved); raises ParamsError for combinations that are invalid with this method.
    fits: (domain, rl resolved); raises ParamsError for a domain that the method can't be trained on.
    data: what it learns from. episodes: what the policy plays; offline_replay: the offline dataset (`replay.records`), by the
        same pieces; pairs: preference pairs, by the piece `preference`; paths: correct paths of search trees, by cloning them;
        attempts: successes among attempts that were made before training, by cloning them; offline: the offline dataset, by the
        losses in `offline`.
    offline: its losses, for data offline.
    """

    card: Card
    parts: Mapping[str, Any]
    pieces: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    roles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: type[Section] | None = None
    derive: Callable[[Any, Mapping[str, Any]], Section] | None = None
    state: Callable[[], dict[str, Any]] | None = None
    vocabulary: Callable[[Any], bool] | None = None
    rescored: Callable[[Any], bool] | None = None
    reference: Callable[[Any], bool] | None = None
    teacher: Callable[[Any], bool] | None = None
    whole_groups: bool = False
    check: Callable[[Any, Any], None] | None = None
    fits: Callable[[Any, Any], None] | None = None
    data: Literal["episodes", "offline_replay", "pairs", "paths", "attempts", "offline"] = "episodes"
    offline: OfflineLosses | None = None
