"""Plays one question over The World Factbook."""

from __future__ import annotations

from collections.abc import Callable

from stages.environments.factbook.facts import canonical, same_answer
from stages.environments.factbook.settings import FactbookSettings
from stages.environments.pages.environment import USAGE, PagesEnvironment, PagesState
from stages.environments.pages.index import PageIndex
from stages.environments.protocol import Step
from stages.records.task import Task

CLOSED_USAGE = "Use: answer <text>."
INSTRUCTIONS = "Find the answer in The World Factbook. Each turn, write one action. " + USAGE
CLOSED_INSTRUCTIONS = "Answer from memory. " + CLOSED_USAGE


class FactbookEnvironment(PagesEnvironment):
    """One running question."""

    name = "factbook"

    def __init__(self, load_index: Callable[[str], PageIndex], settings: FactbookSettings) -> None:
        super().__init__(load_index, settings, 1 if settings.closed_book else None)
        self._settings = settings
        self.usage = CLOSED_USAGE if settings.closed_book else USAGE  # type: ignore[misc]

    def _start(self, task: Task) -> tuple[PagesState, str]:
        closed = self._settings.closed_book
        if not closed:
            self._open_world(task)
        text = CLOSED_INSTRUCTIONS if closed else INSTRUCTIONS if self._settings.instructions else ""
        return PagesState(task.task_id), text

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        return {} if self._settings.closed_book else super()._tools()

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """Term `evidence`: share of the pages needed that were opened."""
        pages = [hop["page"] for hop in self.task.spec["chain"]]
        right = float(answer is not None and any(same_answer(answer, gold) for gold in self.task.spec["accepted"]))
        return right, {"exact_match": right, "evidence": sum(page in self._state.opened for page in pages) / len(pages)}

    def state_key(self) -> str:
        """What was read, and the canonical answer if one was given."""
        return self._key(self._read(), canonical)

    def _missing(self) -> dict[str, str] | None:
        """The first hop whose page was not opened yet."""
        return next((hop for hop in self.task.spec["chain"] if hop["page"] not in self._state.opened), None)

    def _expert_action(self) -> str:
        """For each page that answers the question: search for it and open it; then answer."""
        missing = None if self._settings.closed_book else self._missing()
        return f"answer {self.task.spec['answer']}" if missing is None else self._towards(missing["page"], missing["query"])

    def _actions(self) -> set[str]:
        """A sample of sensible actions: every result, a search for each page that the question needs, and the answer."""
        actions = {f"answer {self.task.spec['answer']}"}
        if not self._settings.closed_book:
            actions |= {f"open {number}" for number in range(1, len(self._state.results) + 1)}
            actions |= {f"search {hop['query']}" for hop in self.task.spec["chain"]}
        return actions
