"""Plays one customer's request: searches and opened documents, then an answer. What counts are the documents opened."""

from __future__ import annotations

from collections.abc import Callable

from stages.environments.bank.settings import BankSettings
from stages.environments.pages.environment import USAGE, PagesEnvironment, PagesState
from stages.environments.pages.index import PageIndex
from stages.records.task import SUCCESS_TERM, Task

INSTRUCTIONS = "Find the bank's documents that answer this customer. Each turn, write one action. " + USAGE
DONE = "done"
"""The expert's answer, since no answer is graded."""


class BankEnvironment(PagesEnvironment):
    """One running request."""

    name = "bank"

    def __init__(self, load_index: Callable[[str], PageIndex], settings: BankSettings) -> None:
        super().__init__(load_index, settings)
        self._settings = settings

    def _start(self, task: Task) -> tuple[PagesState, str]:
        self._open_world(task)
        return PagesState(task.task_id), INSTRUCTIONS if self._settings.instructions else ""

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """The share of the required documents that were opened; nothing without an answer."""
        required = self.task.spec["required"]
        share = sum(title in self._state.opened for title in required) / len(required)
        enough = share > 0 if self._settings.needed == "any" else share == 1.0
        return (share if answer is not None else 0.0), {"evidence": share, SUCCESS_TERM: float(enough and answer is not None)}

    def state_key(self) -> str:
        """What was read, and whether an answer was given."""
        return self._key(self._read(), lambda answer: DONE)

    def _expert_action(self) -> str:
        """Search for each required document by its title and open it, as far as the turns allow; then answer."""
        missing = next((title for title in self.task.spec["required"] if title not in self._state.opened), None)
        if missing is None or self._state.turns + 1 >= self._max_turns:
            return f"answer {DONE}"
        return self._towards(missing, missing)

    def _actions(self) -> set[str]:
        """A sample of sensible actions: every result, a search for each required document, and an answer."""
        opening = {f"open {number}" for number in range(1, len(self._state.results) + 1)}
        return {f"answer {DONE}", *opening, *(f"search {title}" for title in self.task.spec["required"])}
