"""Plays one question: any number of searches and opened pages, then an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from stages.environments.base_environment import AnsweringEnvironment, AnswerState
from stages.environments.pages.index import PageIndex
from stages.environments.protocol import Observation, Step
from stages.records.task import Task

USAGE = "Use: search <words>, open <number of a result> or answer <text>."
NO_HIT = "No page found."


class PagesSettings(Protocol):
    """Settings of a domain whose environment is a PagesEnvironment."""

    @property
    def max_turns(self) -> int: ...
    @property
    def results(self) -> int:
        """Titles that a search lists."""
        ...

    @property
    def page_words(self) -> int:
        """Words of a page that are shown."""
        ...


@dataclass(frozen=True)
class PagesState(AnswerState):
    results: tuple[str, ...] = ()
    """Titles that the last search listed."""
    opened: tuple[str, ...] = ()
    """Titles of the pages opened so far, in order of first opening."""


class PagesEnvironment(AnsweringEnvironment[PagesState]):
    """One running question. `load_index` returns the index of the world named in task.spec["world"]. A subclass writes `_start`,
    which may call `_open_world`, `_graded`, `state_key`, `_actions` and `_expert_action`."""

    usage = USAGE

    def __init__(self, load_index: Callable[[str], PageIndex], settings: PagesSettings, max_turns: int | None = None) -> None:
        super().__init__(settings.max_turns if max_turns is None else max_turns)
        self._load_index = load_index
        self._shown = settings

    def _open_world(self, task: Task) -> None:
        self._index = self._load_index(task.spec["world"])

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        return {"search": self._search, "open": self._open}

    def _search(self, query: str) -> Step:
        results = tuple(page.title for page in self._index.search(query, self._shown.results))
        self._state = replace(self._state, results=results)
        return _observed("\n".join(f"{number} {title}" for number, title in enumerate(results, start=1)) or NO_HIT)

    def _open(self, number: str) -> Step | None:
        """None if the last search has no such result."""
        results = self._state.results
        if number not in map(str, range(1, len(results) + 1)):
            return None
        title = results[int(number) - 1]
        self._state = replace(self._state, opened=tuple(dict.fromkeys((*self._state.opened, title))))
        return _observed(self.page(title))

    def page(self, title: str) -> str:
        """The beginning of a page, as it is shown."""
        words = self._index.by_title[title].text.split()
        return " ".join(words[: self._shown.page_words]) + (" ..." if len(words) > self._shown.page_words else "")

    def _read(self) -> str:
        """What the episode has read, for state keys: the pages opened, sorted, and the results listed."""
        return "|".join(sorted(self._state.opened)) + "#" + "|".join(self._state.results)

    def _towards(self, title: str, query: str) -> str:
        """The expert's way to a page: search for it, then open it."""
        if title in self._state.results:
            return f"open {self._state.results.index(title) + 1}"
        return f"search {query}"


def _observed(text: str) -> Step:
    return Step(Observation(text), 0.0, accepted=True, terminated=False, truncated=False, cost=1.0)
