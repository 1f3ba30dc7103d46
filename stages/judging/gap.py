"""Watches, while a policy trains on a judge, whether the judge's opinion and the gold quality move apart (reward hacking).

    gap_t = (s_t - s_0) / sd(s_0) - (g_t - g_0) / sd(g_0)

s, g: means over a step's episodes of the judge's score and of the gold quality; index 0: the first step, whose standard
deviations are the units. A judge that compares within groups has a constant s, so its gap widens as the gold falls.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from stages.judging.measures import rank_correlation

RECENT = 5
"""Last steps over which a gap is averaged before it warns or stops."""


class GapMonitor:
    """`warn`, `stop`: gaps that warn and end the run; None for never."""

    def __init__(self, warn: float | None, stop: float | None) -> None:
        self.warn, self.stop = warn, stop
        self.start: list[float] = []
        """s_0, sd(s_0), g_0, sd(g_0)."""
        self.gaps: list[float] = []
        self.warned_at: int | None = None

    def observe(self, scores: Sequence[float], gold: Sequence[float]) -> dict[str, float]:
        """Add a step's scores and gold qualities, one of each per episode; returns the step's metrics."""
        mean, truth = statistics.fmean(scores), statistics.fmean(gold)
        if not self.start:
            self.start = [mean, statistics.pstdev(scores) or 1.0, truth, statistics.pstdev(gold) or 1.0]
        gap = (mean - self.start[0]) / self.start[1] - (truth - self.start[2]) / self.start[3]
        self.gaps.append(gap)
        if self.warned_at is None and self.warn is not None and self.recent() > self.warn:
            self.warned_at = len(self.gaps)
        return {"judge_score": mean, "judge_gold": truth, "judge_gap": gap}

    def recent(self) -> float:
        """The mean gap of the last steps; 0 before there are RECENT of them."""
        return statistics.fmean(self.gaps[-RECENT:]) if len(self.gaps) >= RECENT else 0.0

    def warning(self, section: str) -> str | None:
        """What to tell the user after `observe` if this step was the first to exceed `warn`; `section`: of the setting."""
        if self.warned_at != len(self.gaps) or self.warn is None:
            return None
        return (
            f"at step {self.warned_at} the scores of {section} and the gold quality have moved apart by {self.recent():.2f} "
            f"standard deviations ({section}.warn_gap {self.warn}): the policy may be learning its errors"
        )

    def ending(self, section: str) -> str | None:
        """What to tell the user after `observe` if the training ends now."""
        if not self.stops:
            return None
        return (
            f"the training ends at step {len(self.gaps)}: the scores of {section} and the gold quality are {self.recent():.2f} "
            f"standard deviations apart, more than {section}.stop_gap {self.stop}"
        )

    @property
    def stops(self) -> bool:
        return self.stop is not None and self.recent() > self.stop

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "gaps": self.gaps, "warned_at": self.warned_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.gaps, self.warned_at = state["start"], state["gaps"], state["warned_at"]


def group_agreement(rewards: Sequence[Sequence[float]], gold: Sequence[Sequence[float]]) -> float | None:
    """Mean over groups of the rank correlation of rewards with the gold quality; None if no group has differences in both."""
    found = [rank_correlation(one, other) for one, other in zip(rewards, gold, strict=True)]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known else None
