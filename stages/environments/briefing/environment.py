"""Plays one brief: any text is a brief, and the episode is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stages.environments.base_environment import EpisodeEnvironment, EpisodeState
from stages.environments.briefing.brief import BEST, Asked, demands, perfect, quality, write
from stages.environments.protocol import Observation, Step
from stages.records.task import SUCCESS_TERM, Task


@dataclass(frozen=True)
class BriefingState(EpisodeState):
    text: str = ""


class BriefingEnvironment(EpisodeEnvironment[BriefingState]):
    name = "briefing"

    def _start(self, task: Task) -> tuple[BriefingState, str]:
        self._asked = Asked.of(task.spec)
        return BriefingState(task.task_id), ""

    def step(self, action: str) -> Step:
        """The reward is the share of the demands on form that are met. Terms: these, the quality as a share of the best, and
        success, a perfect brief; none of the latter is part of the reward."""
        text = " ".join(self._running().text.split() + action.split())
        met = demands(self._asked, text)
        terms = {
            SUCCESS_TERM: float(perfect(self._asked, text)),
            "quality": quality(self._asked, text) / BEST,
            **{f"form_{name}": float(held) for name, held in met.items()},
        }
        reward = sum(met.values()) / len(met)
        if not text:
            self._end_turn(self._state)
            return Step(Observation("Write a brief."), reward, accepted=False, terminated=False, truncated=True, terms=terms)
        self._end_turn(replace(self._state, text=text, terminated=True))
        return Step(Observation("Received."), reward, accepted=True, terminated=True, truncated=False, terms=terms)

    def state_key(self) -> str:
        return f"{self.task.task_id}#{self._state.text}"

    def _expert_action(self) -> str:
        return write(self._asked)

    def _actions(self) -> Iterable[str]:
        """A good brief, one in the other form, one in reverse order, and one of all facts."""
        asked = self._asked
        other = "prose" if asked.form == "list" else "list"
        yield write(asked)
        yield write(asked, other)
        yield write(asked, nouns=asked.wanted[::-1])
        yield write(asked, nouns=[noun for noun, _ in asked.facts])
