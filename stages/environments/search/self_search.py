"""Search whose results the policy writes itself (SSRL, arXiv 2508.10874), or whose tool answers only where it is unsure.

`tool_mode: real` searches. `self`: after `search <query>` the policy's next action stands for the result, and is then shown in
the place and layout of a tool's result, so that the modes differ in nothing else. The step marks such an action as evidence; it
is never found from text. `entropy_gated`: the first search is real, a later one if its query is less certain than the one before.
`none`: no searches, the baseline of answering directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stages.environments.protocol import Observation, Step
from stages.environments.search.environment import SearchState
from stages.environments.search.formats import MAX_THINKS, TARGET_THINKS, Span, graded_format
from stages.environments.search.known import Known
from stages.environments.search.spans import SpanSearchEnvironment, SpanState
from stages.records.task import Task

ToolMode = Literal["none", "self", "real", "entropy_gated"]
ASK = "Write the result."
FORMAT = "format_graded"
"""Reward term: SSRL's format score f, in the last step."""
WRITTEN, FALSE, REAL = "self_written", "false_evidence", "real_search"
"""Reward terms of steps: a result that the policy wrote, one that is no page of the encyclopaedia, a result of the tool."""


def uncertainty(logprobs: Sequence[float]) -> float:
    """u = mean over a query's drawn tokens of -p log2 p, p the probability of the token that was drawn; 0 without tokens. Not an
    entropy of the whole distribution: the paper's code has only the drawn tokens' probabilities."""
    return sum(-math.exp(one) * one / math.log(2) for one in logprobs) / len(logprobs) if logprobs else 0.0


@dataclass(frozen=True)
class SelfSearchState(SpanState):
    pending: str = ""
    """The query whose result the policy has to write next; "" if there is none."""
    unsure: float | None = None
    """Uncertainty of the last query; None before the first."""


class SelfSearchEnvironment(SpanSearchEnvironment):
    """A SearchEnvironment with a tool mode. known: what the policy may know, for experts' results; thinks: the format score's
    `target_thinks` and `max_thinks`; first_real: under the gate, whether the tool answers the first search."""

    usage = "Use: search <query> or answer <text>."
    _state: SelfSearchState

    def __init__(
        self,
        *arguments: Any,
        mode: ToolMode,
        think: bool,
        known: Known | None,
        thinks: tuple[int, int] = (TARGET_THINKS, MAX_THINKS),
        first_real: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self._mode, self._think, self._known = mode, think, known
        self._thinks, self._first_real = thinks, first_real
        self._drawn: tuple[float, ...] = ()

    def _start(self, task: Task) -> tuple[SearchState, str]:
        super()._start(task)
        self._drawn = ()
        return SelfSearchState(task.task_id), ""

    def drawn(self, logprobs: Sequence[float]) -> None:
        """See stages.environments.protocol.tell_logprobs."""
        self._drawn = tuple(logprobs)

    def step(self, action: str) -> Step:
        pending = self._running().pending  # type: ignore[attr-defined]
        step = self._written_result(pending, action) if pending else super().step(action)
        self._drawn = ()
        return replace(step, terms={**dict.fromkeys((WRITTEN, FALSE, REAL, FORMAT), 0.0), **step.terms})

    def _tools(self) -> dict[str, Callable[[str], Step | None]]:
        tools = super()._tools()
        return {verb: tool for verb, tool in tools.items() if verb != "search" or self._mode != "none"}

    def _search(self, query: str) -> Step:
        if self._last_turn:
            self._add(Span("search", query))
            return Step(Observation(""), 0.0, accepted=True, terminated=False, truncated=False)
        before, unsure = self._state.unsure, uncertainty(self._drawn)
        asks = self._first_real if before is None else unsure > before
        real = self._mode == "real" or (self._mode == "entropy_gated" and asks)
        self._state = replace(self._state, unsure=unsure)
        if not real:
            self._add(Span("search", query))
            self._state = replace(self._state, pending=query)
            return Step(Observation(ASK), 0.0, accepted=True, terminated=False, truncated=False)
        step = super()._search(query)
        self._add(Span("search", query), Span("information", step.observation.text))
        return replace(step, terms={REAL: 1.0})

    def _written_result(self, query: str, text: str) -> Step:
        """The policy's own result of a query."""
        text, turns = " ".join(text.split()), self._state.turns + 1
        page = next((number for number, page in enumerate(self._index.pages) if page.text == text), None)
        seen = self._state.seen if page is None else tuple(dict.fromkeys((*self._state.seen, page)))
        self._state = replace(self._state, turns=turns, pending="", seen=seen)
        self._add(Span("information", text))
        terms = {WRITTEN: 1.0, FALSE: float(page is None)}
        shown = Observation(text + (f" query: {query}" if self._echo_query else ""))
        step = Step(shown, 0.0, True, False, False, terms=terms, evidence=True)
        if turns < self._max_turns:
            return step
        self._state = replace(self._state, truncated=True)
        return replace(step, truncated=True, terms={**self._graded(None)[1], **terms})

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        reward, terms = super()._graded(answer)
        return reward, {**terms, FORMAT: graded_format(self._written(answer), *self._thinks, think=self._think)}

    def state_key(self) -> str:
        """As a SearchEnvironment's, with the results and the last thought, and what comes next."""
        told = "|".join(sorted({span.text for span in self._state.spans if span.kind == "information"}))
        following = f"write {self._state.pending}" if self._state.pending else "act" if self._has_thought else "any"
        return f"{super().state_key()}#{told}#{following}"

    def _expert_action(self) -> str | None:
        """A thought before each search and before the answer; what the tool would find as the result, and no action if that is
        withheld from the policy."""
        if self._state.pending:
            page = next(iter(self._index.search(self._state.pending, 1)), None)
            return None if page is None or (self._known is not None and self._known.withholds(page.title)) else page.text
        chain, seen = self.task.spec["chain"], self.seen_pages()
        if self._mode == "none" and self._known is not None and any(self._known.withholds(hop["page"]) for hop in chain):
            return None
        for hop in chain if self._mode != "none" else ():
            if hop["page"] not in seen:
                query = f"{hop['name']} {hop['relation']}"
                return f"search {query}" if self._has_thought else f"think {query}"
        answer = self.task.spec["answer"]
        return f"answer {answer}" if self._has_thought else f"think {answer}"

    def _actions(self) -> set[str]:
        if self._state.pending:
            return {page.text for page in self._index.search(self._state.pending, 3)} or {"nothing"}
        thoughts = {f"think {self.task.spec['start']}"} if self._think else set()
        searches = self._mode != "none"
        return thoughts | {action for action in super()._actions() if searches or not action.startswith("search ")}
