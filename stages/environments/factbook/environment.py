"""Plays one question: any number of searches and opened pages, then an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stages.environments.base_environment import AnsweringEnvironment, AnswerState
from stages.environments.factbook.facts import canonical, same_answer
from stages.environments.factbook.index import PageIndex
from stages.environments.factbook.settings import FactbookSettings
from stages.environments.protocol import Observation, Step
from stages.records.task import Task

USAGE = "Use: search <words>, open <number of a result> or answer <text>."
CLOSED_USAGE = "Use: answer <text>."
INSTRUCTIONS = "Find the answer in The World Factbook. Each turn, write one action. " + USAGE
CLOSED_INSTRUCTIONS = "Answer from memory. " + CLOSED_USAGE
NO_HIT = "No page found."


@dataclass(frozen=True)
class FactbookState(AnswerState):
    results: tuple[str, ...] = ()
    """Titles that the last search listed."""
    opened: tuple[str, ...] = ()
    """Titles of the pages opened so far, in order of first opening."""


class FactbookEnvironment(AnsweringEnvironment[FactbookState]):
    """One running question. `load_index` returns the index of the world named in task.spec["world"]."""

    name = "factbook"

    def __init__(self, load_index: Callable[[str], PageIndex], settings: FactbookSettings) -> None:
        super().__init__(1 if settings.closed_book else settings.max_turns)
        self._load_index = load_index
        self._settings = settings
        self.usage = CLOSED_USAGE if settings.closed_book else USAGE  # type: ignore[misc]

    def _start(self, task: Task) -> tuple[FactbookState, str]:
        closed = self._settings.closed_book
        if not closed:
            self._index = self._load_index(task.spec["world"])
        text = CLOSED_INSTRUCTIONS if closed else INSTRUCTIONS if self._settings.instructions else ""
        return FactbookState(task.task_id), text

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        return {} if self._settings.closed_book else {"search": self._search, "open": self._open}

    def _search(self, query: str) -> Step:
        results = tuple(page.title for page in self._index.search(query, self._settings.results))
        self._state = replace(self._state, results=results)
        return _shown("\n".join(f"{number} {title}" for number, title in enumerate(results, start=1)) or NO_HIT)

    def _open(self, number: str) -> Step | None:
        """None if the last search has no such result."""
        results = self._state.results
        if number not in map(str, range(1, len(results) + 1)):
            return None
        title = results[int(number) - 1]
        self._state = replace(self._state, opened=tuple(dict.fromkeys((*self._state.opened, title))))
        return _shown(self.page(title))

    def page(self, title: str) -> str:
        """The beginning of a page, as it is shown."""
        words = self._index.by_title[title].text.split()
        return " ".join(words[: self._settings.page_words]) + (" ..." if len(words) > self._settings.page_words else "")

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """Term `evidence`: share of the pages needed that were opened."""
        pages = [hop["page"] for hop in self.task.spec["chain"]]
        right = float(answer is not None and any(same_answer(answer, gold) for gold in self.task.spec["accepted"]))
        return right, {"exact_match": right, "evidence": sum(page in self._state.opened for page in pages) / len(pages)}

    def state_key(self) -> str:
        """The pages opened, sorted, the results listed, and the canonical answer if one was given."""
        done = "|".join(sorted(self._state.opened)) + "#" + "|".join(self._state.results)
        return self._key(done, canonical)

    def _missing(self) -> dict[str, str] | None:
        """The first hop whose page was not opened yet."""
        return next((hop for hop in self.task.spec["chain"] if hop["page"] not in self._state.opened), None)

    def _expert_action(self) -> str:
        """For each page that answers the question: search for it and open it; then answer."""
        missing = None if self._settings.closed_book else self._missing()
        if missing is None:
            return f"answer {self.task.spec['answer']}"
        if missing["page"] in self._state.results:
            return f"open {self._state.results.index(missing['page']) + 1}"
        return f"search {missing['query']}"

    def _actions(self) -> set[str]:
        """A sample of sensible actions: every result, a search for each page that the question needs, and the answer."""
        actions = {f"answer {self.task.spec['answer']}"}
        if not self._settings.closed_book:
            actions |= {f"open {number}" for number in range(1, len(self._state.results) + 1)}
            actions |= {f"search {hop['query']}" for hop in self.task.spec["chain"]}
        return actions


def _shown(text: str) -> Step:
    return Step(Observation(text), 0.0, accepted=True, terminated=False, truncated=False, cost=1.0)
