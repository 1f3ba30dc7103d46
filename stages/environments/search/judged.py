"""Search where the agent judges each result before it goes on (ReSeek, arXiv 2510.00568).

After `search <query>` comes `judge yes` or `judge no`; after a rejection, another search. With context hard the rejected result
is then hidden from the policy (stages/agent/forgetting.py), and it is as if the page had not been shown. Whether a result was
useful is known from the question's chain: a page is as useful as the largest share of the words of one of its gold facts that the
page has. The paper scores pages by a reranker against the answer, which the pages of a question's first hops do not contain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from stages.environments.protocol import Observation, Step
from stages.environments.search.environment import SearchEnvironment, SearchState
from stages.environments.search.index import words
from stages.environments.search.world import Page
from stages.records.task import JUDGMENT_TERMS, Task
from stages.runtime.validation import Checked
from stages.seeding import stream

JUDGE_FIRST = "Judge the result first: judge yes or judge no."
SEARCH_AGAIN = "You rejected the result: search again."
GO_ON = {True: "Search again or answer.", False: SEARCH_AGAIN}


class JudgeSettings(Checked):
    """Keys of `per_domain.search.environment.judge`."""

    threshold: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.7
    """A result is useful if its score is above it."""
    context: Annotated[Literal["soft", "hard"], Field(exclude_if=lambda context: context == "soft")] = "soft"
    """What becomes of a rejected result. soft: it stays in the context, with its judgment; hard: later turns do not see it."""


@dataclass(frozen=True)
class JudgedState(SearchState):
    pending: bool = False
    """The last search has to be judged."""
    rejected: bool = False
    """The last search was rejected, and no other followed."""
    score: float = 0.0
    """How useful the last search's result was, in [0, 1]; the agent does not see it."""
    queries: int = 0
    searched: int = 0
    """Turns up to and with the last search."""
    before: tuple[int, ...] = ()
    """`seen` before the last search."""


def usefulness(pages: list[Page], facts: list[tuple[str, str, str]]) -> float:
    """The largest share, in [0, 1], of a gold fact's words (name, relation, value) that a page has; 0 without pages."""
    found = [set(words(page.text)) for page in pages]
    return max((len(page & fact) / len(fact) for page in found for fact in map(_words, facts)), default=0.0)


def _words(fact: tuple[str, str, str]) -> set[str]:
    return set(words(" ".join(fact)))


class JudgedSearchEnvironment(SearchEnvironment):
    """A SearchEnvironment with `judge yes` and `judge no`. Each judgment has one of JUDGMENT_TERMS, which rl can reward."""

    usage = "Use: search <query>, judge yes, judge no or answer <text>."
    _state: JudgedState

    def __init__(self, *arguments: Any, judge: JudgeSettings, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._judge = judge

    def _start(self, task: Task) -> tuple[SearchState, str]:
        super()._start(task)
        return JudgedState(task.task_id), ""

    def step(self, action: str) -> Step:
        state, verb = self._running(), action.strip().partition(" ")[0].lower()
        assert isinstance(state, JudgedState)
        if state.pending and verb != "judge":
            return self._refused(JUDGE_FIRST)
        if state.rejected and verb == "answer":
            return self._refused(SEARCH_AGAIN)
        return super().step(action)

    def _refused(self, text: str) -> Step:
        """An invalid action: it takes a turn, and changes nothing else."""
        return replace(super().step(""), observation=Observation(text))

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        return {**super()._tools(), "judge": self._judged}

    def _search(self, query: str) -> Step:
        before = self._state.seen
        step = super()._search(query)
        pages = self._index.search(query, self._results)
        facts = [(hop["name"], hop["relation"], hop["value"]) for hop in self.task.spec["chain"]]
        score, turns = usefulness(pages, facts), self._state.turns
        searched = replace(self._state, pending=True, rejected=False, score=score, searched=turns, before=before)
        self._state = replace(searched, queries=searched.queries + 1)
        return step

    def _judged(self, answer: str) -> Step | None:
        if not self._state.pending or answer.lower() not in ("yes", "no"):
            return None
        state, accepted = self._state, answer.lower() == "yes"
        useful, forgets = state.score > self._judge.threshold, 0
        self._state = replace(state, pending=False, rejected=not accepted)
        if self._judge.context == "hard" and not accepted:
            self._state, forgets = replace(self._state, seen=state.before), state.turns - state.searched
        name = f"judge_{'true' if accepted == useful else 'false'}_{'accept' if accepted else 'reject'}"
        step = Step(Observation(GO_ON[accepted]), 0.0, accepted=True, terminated=False, truncated=False, terms={name: 1.0})
        return replace(step, forgets=forgets)

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        """The terms of judgments, with 0 here, so that episodes without any have them, too."""
        reward, terms = super()._graded(answer)
        return reward, {**terms, **dict.fromkeys(JUDGMENT_TERMS, 0.0)}

    def state_key(self) -> str:
        """As a SearchEnvironment's, with what is allowed next."""
        return f"{super().state_key()}#{'judge' if self._state.pending else 'search' if self._state.rejected else 'any'}"

    def _expert_action(self) -> str:
        """Judge by the facts. Some hops are first looked for by name alone, which may find another page of that name, so that
        demonstrations have rejections."""
        if self._state.pending:
            return "judge yes" if self._state.score > self._judge.threshold else "judge no"
        seen = self.seen_pages()
        for number, hop in enumerate(self.task.spec["chain"]):
            if hop["page"] in seen:
                continue
            vague = not self._state.rejected and stream("search.vague", self.task.task_id, number).random() < 0.5
            return f"search {hop['name']}" if vague else f"search {hop['name']} {hop['relation']}"
        return f"answer {self.task.spec['answer']}"

    def _actions(self) -> set[str]:
        if self._state.pending:
            return {"judge yes", "judge no"}
        actions = super()._actions()
        return {action for action in actions if not action.startswith("answer ")} if self._state.rejected else actions
