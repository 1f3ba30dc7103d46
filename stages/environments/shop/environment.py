"""Plays one shopping task: a search page, pages of results, and an item's page with its options.

As in WebShop, the agent searches on the search page and clicks everywhere else: names, `next` and `back` on results; option
values, `back` and `buy` on an item. Every page lists what can be clicked, except these three words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stages.environments.base_environment import EpisodeEnvironment, EpisodeState
from stages.environments.protocol import Observation, Step
from stages.environments.search.index import SearchIndex, words
from stages.environments.shop.catalogue import Catalogue, Goal, Item
from stages.environments.shop.scoring import can_match, score
from stages.records.task import Task

SEARCH_PAGE = "search page."
NO_HIT = "no item found."
BOUGHT = "bought."
USAGE = "Use: search <words> on the search page, click <name, option, next, back or buy> elsewhere."


@dataclass(frozen=True)
class Shop:
    """A catalogue with its index."""

    catalogue: Catalogue
    index: SearchIndex[Item]


@dataclass(frozen=True)
class ShopState(EpisodeState):
    """`terminated`: an item was bought. Without a query: the search page; without an item: a page of results."""

    query: tuple[str, ...] = ()
    """Words of the search, sorted, each once."""
    page: int = 0
    item: str | None = None
    picked: tuple[tuple[str, str], ...] = ()
    """(group, value) chosen on the item's page, sorted. Leaving the page resets them. A picked group is no longer listed, which
    keeps pages short for small models."""


class ShopEnvironment(EpisodeEnvironment[ShopState]):
    """One running task. `load_shop` returns the shop named in task.spec["shop"]."""

    name = "shop"

    def __init__(self, load_shop: Callable[[str], Shop], results: int, max_turns: int, *, show_goal: bool = True) -> None:
        super().__init__(max_turns)
        self._load_shop = load_shop
        self._results = results
        self._show_goal = show_goal

    def _start(self, task: Task) -> tuple[ShopState, str]:
        self._shop = self._load_shop(task.spec["shop"])
        self._goal = Goal.from_spec(task.spec["goal"])
        return ShopState(task.task_id), ""

    def step(self, action: str) -> Step:
        state = self._running()
        verb, _, rest = action.strip().partition(" ")
        perform = {"search": self._search, "click": lambda target: self._clicks().get(target)}.get(verb.lower())
        after = perform(" ".join(rest.lower().split())) if perform else None
        now = self._end_turn(after or state)
        terms = self._terms() if now.over else {}
        return Step(
            observation=Observation(self._shown() if after else f"{USAGE} {self._shown()}"),
            reward=terms["reward"] if now.terminated else 0.0,
            accepted=after is not None,
            terminated=now.terminated,
            truncated=now.truncated,
            cost=1.0,
            terms=terms,
        )

    def _search(self, query: str) -> ShopState | None:
        """None if this is not the search page or the query has no word."""
        terms = tuple(sorted(set(words(query))))
        return replace(self._state, query=terms) if terms and not self._state.query else None

    def _clicks(self) -> dict[str, ShopState]:
        """Everything that can be clicked now, in lower case -> the next state."""
        state = self._state
        if not state.query:
            return {}
        if state.item is None:
            found = {item.name.lower(): replace(state, item=item.name) for item in self._listed()}
            found["back"] = replace(state, query=(), page=0)
            if len(self._found()) > (state.page + 1) * self._results:
                found["next"] = replace(state, page=state.page + 1)
            return found
        item, picked = self._item(state.item), dict(state.picked)
        found = {
            value: replace(state, picked=tuple(sorted((picked | {group: value}).items())))
            for group, values in item.options.items()
            if group not in picked
            for value in values
        }
        return found | {"back": replace(state, item=None, picked=()), "buy": replace(state, terminated=True)}

    def _item(self, name: str) -> Item:
        return self._shop.catalogue.by_name[name.lower()]

    def _found(self) -> list[Item]:
        """All items that share a word with the query, best first."""
        return self._shop.index.search(" ".join(self._state.query), len(self._shop.catalogue.items))

    def _listed(self) -> list[Item]:
        """The items on the current page of results."""
        first = self._state.page * self._results
        return self._found()[first : first + self._results]

    def _shown(self) -> str:
        """The current page, with the goal at the end."""
        state = self._state
        if state.terminated:
            return BOUGHT
        if not state.query:
            text = SEARCH_PAGE
        elif state.item is None:
            text = "; ".join(item.text for item in self._listed())
            text = f"{text}." if text else NO_HIT
        else:
            item = self._item(state.item)
            picked = dict(state.picked)
            open_groups = [f"{group} {' '.join(values)}." for group, values in item.options.items() if group not in picked]
            text = " ".join([f"{item.text}.", *open_groups, *([f"picked {' '.join(picked.values())}."] if picked else [])])
        return f"{text} {self._goal.text}" if self._show_goal else text

    def _terms(self) -> dict[str, float]:
        """Reward terms of the episode; all 0 if nothing was bought."""
        item = self._state.item
        terms = score(self._item(item), dict(self._state.picked), self._goal) if item and self._state.terminated else None
        return terms or dict.fromkeys(("reward", "type", "attributes", "options", "price"), 0.0)

    def state_key(self) -> str:
        """The query, number of the page of results, item, picked options, and whether it was bought."""
        state = self._state
        picked = " ".join(value for _, value in state.picked)
        parts = (" ".join(state.query), str(state.page), state.item or "", picked, "bought" if state.terminated else "")
        return f"{self.task.task_id}#{'|'.join(parts)}"

    def _expert_action(self) -> str:
        """Search for the goal, click the first item that matches, pick its options and buy; go back from any other page."""
        state, goal = self._state, self._goal
        wanted = f"{' '.join(goal.attributes)} {goal.kind}"
        if not state.query:
            return f"search {wanted}"
        if state.item is not None:
            if not can_match(self._item(state.item), goal):
                return "click back"
            missing = [value for group, value in goal.options.items() if (group, value) not in state.picked]
            return f"click {missing[0]}" if missing else "click buy"
        listed = [item.name for item in self._listed() if can_match(item, goal)]
        if listed:
            return f"click {listed[0]}"
        first = (state.page + 1) * self._results
        more = any(can_match(item, goal) for item in self._found()[first:])
        return "click next" if more else "click back"

    def _actions(self) -> list[str]:
        """On the search page a sample of sensible searches (kind, attributes, both); elsewhere everything that can be clicked."""
        if not self._state.query:
            attributes = " ".join(self._goal.attributes)
            return [f"search {text}" for text in (self._goal.kind, attributes, f"{attributes} {self._goal.kind}")]
        names = {item.name.lower(): item.name for item in self._shop.catalogue.items}
        return [f"click {names.get(target, target)}" for target in self._clicks()]
