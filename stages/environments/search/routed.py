"""Search that routes sub-questions to a pool of priced tools (Router-R1, arXiv 2506.09033): `search <name>: <question>`.

A call costs the member's price times the tokens of its reply. The pool stands in the prompt, so a member that only test tasks
have can be used without training. Members are found by their exact names, where the paper's code accepts parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field, field_validator

from stages.environments.pool.pool import Pool
from stages.environments.pool.reply import NONE, Reply, cost
from stages.environments.pool.settings import Member, check_names
from stages.environments.protocol import Observation, Step
from stages.environments.search.environment import SearchState
from stages.environments.search.formats import Span, route_format, routed_query
from stages.environments.search.index import SearchIndex, words
from stages.environments.search.spans import SpanSearchEnvironment, SpanState
from stages.environments.search.world import RELATIONS, Page
from stages.records.task import Task
from stages.records.tools import call_terms
from stages.runtime.validation import Checked, Count
from stages.seeding import permutation, stream

WELL_FORMED = "well_formed"
"""Reward term: 1 in the last step of an episode whose format score is 0."""
DIRECTIONS = "Each turn, write one action: {think}search <source>: <question> or answer <name>.\n"


class RouteSettings(Checked):
    """Keys of `per_domain.search.environment.route`."""

    pool: Annotated[list[Member], Field(min_length=1)]
    max_reply_tokens: Count = 512
    """Longest reply of a member."""
    think: bool = True
    """`think <why>` is an action, which the format asks for; false for reasoning models, whose thoughts are part of a turn."""
    describe: bool = True
    """Begin the prompt with the members and what they know."""

    @field_validator("pool")
    @classmethod
    def _names(cls, pool: list[Member]) -> list[Member]:
        for member in pool:
            unknown = sorted(set((member.knows and member.knows.relations) or ()) - set(RELATIONS))
            if unknown:
                raise ValueError(f"member {member.name} knows the relations {unknown}; there are {', '.join(RELATIONS)}")
        return check_names(pool)

    def text(self, split: str) -> str:
        """The members in tasks of this split, a line each, as the prompt shows them."""
        if not self.describe:
            return ""
        shown = [member for member in self.pool if split == "test" or not member.new]
        return "".join(f"{member.name}: {member.descriptor}.\n" for member in shown)

    @property
    def directions(self) -> str:
        return DIRECTIONS.format(think="think <why>, " if self.think else "")


@dataclass(frozen=True)
class RoutedState(SpanState):
    shown: tuple[str, ...] = ()
    """Replies, in order."""
    known: tuple[int, ...] = ()
    """Hops of the question's chain that a reply has stated."""


def shard(pages: Sequence[Page], member: Member, world: str) -> SearchIndex[Page]:
    """What a retriever knows of a world: its share of the facts, some of them wrong. The same in every episode."""
    knows = member.knows
    assert knows is not None
    names = sorted({page.name for page in pages})
    found = []
    for page in pages:
        facts = []
        for relation, value in page.facts:
            draw = stream("search.pool", member.name, world, page.name, relation)
            has, errs = draw.random() < knows.reach, draw.random() < knows.wrong
            if not has or (knows.relations is not None and relation not in knows.relations):
                continue
            others = [name for name in names if name not in (value, page.name)]
            facts.append((relation, draw.choice(others) if errs else value))
        if facts:
            found.append(replace(page, facts=tuple(facts)))
    return SearchIndex(found or [Page(world, "", ())])


class RoutedSearchEnvironment(SpanSearchEnvironment):
    """A SearchEnvironment whose searches go to members of a pool. Steps have the terms of `stages.records.tools`, and
    WELL_FORMED."""

    usage = "Use: search <source>: <question> or answer <text>."
    _state: RoutedState

    def __init__(self, *arguments: Any, route: RouteSettings, pool: Pool, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._pool, self._think = pool, route.think
        self._shards: dict[tuple[str, str], SearchIndex[Page]] = {}

    def _start(self, task: Task) -> tuple[SearchState, str]:
        super()._start(task)
        self._members = self._pool.offered(task.split)
        return RoutedState(task.task_id), ""

    def step(self, action: str) -> Step:
        step = super().step(action)
        none = {**call_terms(self._members), WELL_FORMED: 0.0}
        return replace(step, terms={**none, **step.terms})

    def _search(self, query: str) -> Step | None:
        read = routed_query(query)
        if read is None:
            return None
        name, question = read
        if self._last_turn:
            self._add(Span("search", query))
            return Step(Observation(""), 0.0, accepted=True, terminated=False, truncated=False)
        member = self._members.get(name)
        reply = Reply(NONE, 0) if member is None else self._reply(member, question)
        self._add(Span("search", query), Span("information", reply.text))
        self._state = replace(self._state, shown=(*self._state.shown, reply.text), known=self._stated(reply.text))
        paid = 0.0 if member is None else cost(reply, member)
        shown = Observation(reply.text + (f" query: {query}" if self._echo_query else ""))
        return Step(shown, 0.0, True, False, False, paid, call_terms(self._members, name))

    def _reply(self, member: Member, question: str) -> Reply:
        knows = member.knows
        if knows is None:
            return self._pool.ask(member, question)
        key = member.name, self.task.spec["world"]
        if key not in self._shards:
            self._shards[key] = shard(self._index.pages, member, key[1])
        pages = self._shards[key].search(question, knows.results)
        return self._pool.cut(" ".join(page.text for page in pages))

    def _stated(self, text: str) -> tuple[int, ...]:
        """The hops known so far and those that a reply states: it names the thing and the value."""
        found = set(words(text))
        new = (place for place, hop in enumerate(self.task.spec["chain"]) if {*words(hop["name"]), *words(hop["value"])} <= found)
        return tuple(sorted({*self._state.known, *new}))

    def _evidence(self) -> list[bool]:
        return [place in self._state.known for place in range(len(self.task.spec["chain"]))]

    def _graded(self, answer: str | None) -> tuple[float, dict[str, float]]:
        reward, terms = super()._graded(answer)
        form = route_format(self._written(answer), self._members, self._think)
        return reward, {**terms, WELL_FORMED: 1.0 + form}

    def state_key(self) -> str:
        """The replies so far, sorted, whether a thought was the last thing written, and the answer if one was given."""
        return self._key("|".join([*sorted(set(self._state.shown)), *(["think"] if self._thinking else [])]), str.lower)

    @property
    def _thinking(self) -> bool:
        return bool(self._state.spans) and self._state.spans[-1].kind == "think"

    def _expert_action(self) -> str | None:
        """For each hop ask members in a random order until one states the fact; no action if none does. A thought before each
        search and before the answer."""
        for place, hop in enumerate(self.task.spec["chain"]):
            if place in self._state.known:
                continue
            question = f"{hop['name']} {hop['relation']}"
            order = permutation(list(self._members), "search.route", self.task.task_id, place)
            asked = sum(span.kind == "search" and span.text.endswith(f": {question}") for span in self._state.spans)
            if asked >= len(order):
                return None
            return f"search {order[asked]}: {question}" if self._has_thought else f"think {hop['relation']} {hop['name']}"
        answer = self.task.spec["answer"]
        return f"answer {answer}" if self._has_thought else f"think {answer}"

    def _actions(self) -> set[str]:
        """A sample: think of, ask every member about, or answer each name of the chain so far."""
        chain = self.task.spec["chain"]
        names = {self.task.spec["start"], *(chain[place]["value"] for place in self._state.known)}
        thoughts = {f"think {name}" for name in names} if self._think else set()
        asked = {
            f"search {member}: {name} {relation}"
            for member in self._members
            for name in names
            for relation in self.task.spec["relations"]
        }
        return thoughts | asked | {f"answer {name}" for name in names}
