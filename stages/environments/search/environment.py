"""Plays one question: any number of searches, then an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stages.environments.base_environment import AnsweringEnvironment, AnswerState
from stages.environments.protocol import Observation, Step
from stages.environments.search.index import SearchIndex
from stages.environments.search.scoring import answer_bleu, exact_match, normalize, token_f1
from stages.environments.search.world import Page
from stages.records.task import Task

USAGE = "Use: search <query> or answer <text>."
CLOSED_USAGE = "Use: answer <name>."
CLOSED_INSTRUCTIONS = "Answer from memory. " + CLOSED_USAGE
NO_HIT = "No page found."


@dataclass(frozen=True)
class SearchState(AnswerState):
    seen: tuple[int, ...] = ()
    """Numbers of the pages shown so far, in order of first appearance."""


class SearchEnvironment(AnsweringEnvironment[SearchState]):
    """One running question. `load_index` returns the index of the world named in task.spec["world"]."""

    name = "search"
    usage = USAGE

    def __init__(
        self,
        load_index: Callable[[str], SearchIndex[Page]],
        results: int,
        reward: str,
        max_turns: int,
        *,
        echo_query: bool = False,
    ) -> None:
        super().__init__(max_turns)
        self._load_index = load_index
        self._results = results
        self._reward = reward
        self._echo_query = echo_query

    def _start(self, task: Task) -> tuple[SearchState, str]:
        self._index = self._load_index(task.spec["world"])
        self._number = {page.title: number for number, page in enumerate(self._index.pages)}
        return SearchState(task.task_id), ""

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        return {"search": self._search}

    def _search(self, query: str) -> Step:
        pages = self._index.search(query, self._results)
        numbers = [self._number[page.title] for page in pages]
        self._state = replace(self._state, seen=tuple(dict.fromkeys((*self._state.seen, *numbers))))
        text = "\n".join(page.text for page in pages) or NO_HIT
        if self._echo_query:
            text += f" query: {query}"
        return Step(Observation(text), 0.0, accepted=True, terminated=False, truncated=False, cost=1.0)

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """Term `evidence`: share of the hops whose page was shown."""
        gold = self.task.spec["answer"]
        evidence = self._evidence()
        terms = {
            "exact_match": exact_match(answer or "", gold),
            "f1": token_f1(answer or "", gold),
            "bleu": answer_bleu(answer or "", gold),
            "evidence": sum(evidence) / len(evidence),
        }
        return terms[self._reward], terms

    def _evidence(self) -> list[bool]:
        """Which of the question's hops were shown."""
        return [self._number[hop["page"]] in self._state.seen for hop in self.task.spec["chain"]]

    def state_key(self) -> str:
        """The titles of the pages shown, sorted, and the normalised answer if one was given."""
        return self._key("|".join(sorted(self.seen_pages())), normalize)

    def seen_pages(self) -> set[str]:
        """Titles of the pages shown so far."""
        return {self._index.pages[number].title for number in self._state.seen}

    def _expert_action(self) -> str:
        """Search for the first hop whose page was not shown yet; when all were, answer."""
        seen = self.seen_pages()
        for hop in self.task.spec["chain"]:
            if hop["page"] not in seen:
                return f"search {hop['name']} {hop['relation']}"
        return f"answer {self.task.spec['answer']}"

    def _actions(self) -> set[str]:
        """A sample of sensible actions: for each name shown so far, search for it, alone or with a relation of the question, or
        answer it."""
        names = {self.task.spec["start"]}
        for number in self._state.seen:
            page = self._index.pages[number]
            names |= {page.name, *(value for _, value in page.facts)}
        actions = {f"answer {name}" for name in names} | {f"search {name}" for name in names}
        return actions | {f"search {name} {relation}" for name in names for relation in self.task.spec["relations"]}


class ClosedBookEnvironment(SearchEnvironment):
    """A SearchEnvironment of one turn without tools: what a policy answers from memory."""

    usage = CLOSED_USAGE

    def _start(self, task: Task) -> tuple[SearchState, str]:
        return super()._start(task)[0], CLOSED_INSTRUCTIONS

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        return {}

    def _expert_action(self) -> str:
        return f"answer {self.task.spec['answer']}"

    def _actions(self) -> set[str]:
        return {f"answer {self.task.spec['start']}", f"answer {self.task.spec['answer']}"}
