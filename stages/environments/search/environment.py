"""Playing one question: search pages, then answer. All state is a handful of Python values, so snapshots are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stages.environments.protocol import Observation, Step, Task
from stages.environments.search.index import SearchIndex
from stages.environments.search.scoring import answer_bleu, exact_match, normalize, token_f1
from stages.environments.search.world import Page

USAGE = "Use: search <query> or answer <text>."
NO_HIT = "No page found."
ANSWERED = "Answered."


@dataclass(frozen=True)
class SearchState:
    """Everything that changes while a question is played."""

    task_id: str
    turns: int = 0
    seen: tuple[int, ...] = ()
    """Numbers of the pages shown so far, in the order they were first shown."""
    answer: str | None = None
    truncated: bool = False


class SearchEnvironment:
    """One running question. `load_index` gives the index of a world by the name in task.spec["world"]."""

    def __init__(
        self,
        load_index: Callable[[str], SearchIndex[Page]],
        results: int,
        reward: str,
        max_turns: int,
        *,
        echo_query: bool = False,
    ) -> None:
        self._load_index = load_index
        self._results = results
        self._reward = reward
        self._max_turns = max_turns
        self._echo_query = echo_query
        self._task: Task | None = None
        self._verbs: dict[str, Callable[[str], Step | None]] = {"search": self._search, "answer": self._answer}

    @property
    def task(self) -> Task:
        """The task being played. Raises RuntimeError before the first reset."""
        if self._task is None:
            raise RuntimeError("the search environment was never reset; call reset(task) first")
        return self._task

    def reset(self, task: Task) -> Observation:
        self._index = self._load_index(task.spec["world"])
        self._number = {page.title: number for number, page in enumerate(self._index.pages)}
        self._task = task
        self._state = SearchState(task.task_id)
        return Observation("")

    def step(self, action: str) -> Step:
        state = self._state if self._task is not None else None
        if state is None or state.answer is not None or state.truncated:
            raise RuntimeError("the search episode is over or was never reset; call reset(task) or restore(state) before step()")
        self._state = replace(state, turns=state.turns + 1)
        verb, _, argument = action.strip().partition(" ")
        perform = self._verbs.get(verb.lower())
        step = perform(argument.strip()) if perform and argument.strip() else None
        if step is None:
            step = Step(Observation(USAGE), 0.0, accepted=False, terminated=False, truncated=False)
        if step.terminated:
            return step
        if self._state.turns >= self._max_turns:
            self._state = replace(self._state, truncated=True)
            return replace(step, truncated=True, terms=self._terms(None))
        return step

    def _search(self, query: str) -> Step:
        pages = self._index.search(query, self._results)
        numbers = [self._number[page.title] for page in pages]
        self._state = replace(self._state, seen=tuple(dict.fromkeys((*self._state.seen, *numbers))))
        text = "\n".join(page.text for page in pages) or NO_HIT
        if self._echo_query:
            text += f" query: {query}"
        return Step(Observation(text), 0.0, accepted=True, terminated=False, truncated=False, cost=1.0)

    def _answer(self, text: str) -> Step:
        self._state = replace(self._state, answer=text)
        terms = self._terms(text)
        reward = terms["f1" if self._reward == "f1" else "exact_match"]
        return Step(Observation(ANSWERED), reward, accepted=True, terminated=True, truncated=False, terms=terms)

    def _terms(self, answer: str | None) -> dict[str, float]:
        """Reward terms at the end of an episode; `evidence` is the share of the hops whose page was seen."""
        gold = self.task.spec["answer"]
        evidence = [self._number[hop["page"]] in self._state.seen for hop in self.task.spec["chain"]]
        return {
            "exact_match": exact_match(answer or "", gold),
            "f1": token_f1(answer or "", gold),
            "bleu": answer_bleu(answer or "", gold),
            "evidence": sum(evidence) / len(evidence),
        }

    def snapshot(self) -> SearchState:
        if self._task is None:
            raise RuntimeError("the search environment was never reset; call reset(task) before snapshot()")
        return self._state

    def restore(self, state: SearchState) -> None:
        """Raises ValueError for a snapshot of another task."""
        if state.task_id != self.task.task_id:
            raise ValueError(f"snapshot of task {state.task_id} can't be restored into task {self.task.task_id}; reset first")
        self._state = state

    def state_key(self) -> str:
        """The titles of the pages seen, sorted, and the normalised answer if one was given."""
        task = self.task
        seen = "|".join(sorted(self._index.pages[number].title for number in self._state.seen))
        return f"{task.task_id}#{seen}" + ("" if self._state.answer is None else f"#{normalize(self._state.answer)}")

    def seen_pages(self) -> set[str]:
        """Titles of the pages shown so far."""
        return {self._index.pages[number].title for number in self._state.seen}

    def admissible(self) -> Sequence[str]:
        """A sample of sensible actions: for each name read so far, to search it, alone or with a relation of the question, or
        to answer it. Empty once the episode is over."""
        if self._state.answer is not None or self._state.truncated:
            return []
        names = {self.task.spec["start"]}
        for number in self._state.seen:
            page = self._index.pages[number]
            names |= {page.name, *(value for _, value in page.facts)}
        actions = {f"answer {name}" for name in names} | {f"search {name}" for name in names}
        actions |= {f"search {name} {relation}" for name in names for relation in self.task.spec["relations"]}
        return sorted(actions)

    def close(self) -> None:
        self._task = None
