"""Questions about an encyclopaedia that the policy may know: one or a few worlds for all splits, whose pages its demonstrations
show, so that it can answer without a tool. Splits share pages and names; their questions differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from stages.environments.base_domain import Mix, hashed_split, splits_in_turn
from stages.environments.search.world import Hop, World, draw_chain, make_world
from stages.records.task import SPLITS, Split
from stages.runtime.validation import Checked, Count, Share
from stages.seeding import stream

PREFIX = "search-known-"
SHARES: dict[Split, int] = {"train": 27, "valid": 8, "test": 17}
"""Questions of each split in every 52, so that two encyclopaedias with a fifth of the pages withheld have enough for 384 training
tasks, for the 96 validation tasks that experiments choose settings by, and for 200 of the panel."""
TRIES = 400
"""Draws of a question that is new, of its split and about the right pages, before there are no more."""


class Known(Checked):
    """Keys of `per_domain.search.environment.known`."""

    worlds: Count = 1
    """Encyclopaedias, of about 50 pages each."""
    withheld: Share = 0.2
    """Share of the pages that no training or validation task needs."""
    test: Literal["any", "known", "withheld"] = "any"
    """Test questions about any pages, about known ones alone, or about at least one that is withheld."""

    def withholds(self, title: str) -> bool:
        """Whether a page is withheld; the same in all worlds."""
        return stream("search.withheld", title).random() < self.withheld

    def suits(self, chain: list[Hop], split: Split) -> bool:
        """Whether a question may be asked in this split."""
        hidden = any(self.withholds(hop.page) for hop in chain)
        return not hidden if split != "test" or self.test == "known" else hidden or self.test == "any"


def known_world(number: int) -> World:
    return make_world("train", number)


def split_of_question(world: int, start: str, relations: list[str]) -> Split:
    """The split whose tasks may ask this question."""
    return hashed_split(SHARES, "search.known", world, start, *relations)


def known_recipes(known: Known, weights: Mapping[int, float], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Raw records of `count` tasks, or fewer if the worlds have no further questions; hops in proportion to `weights`."""
    hops = [number for number, weight in sorted(weights.items()) if weight > 0]
    mixes = {split: Mix([weights[number] for number in hops]) for split in SPLITS}
    worlds = [known_world(number) for number in range(known.worlds)]
    asked: set[tuple[Any, ...]] = set()
    spent: set[Split] = set()
    for split, index in splits_in_turn(count):
        if split in spent:
            continue
        wanted, rng = hops[mixes[split].next()], stream("search.known", seed, split, index)
        for _ in range(TRIES):
            number = rng.randrange(known.worlds)
            chain = draw_chain(worlds[number], wanted, rng)
            key = (number, chain[0].name, *(hop.relation for hop in chain))
            if key not in asked and split_of_question(number, key[1], list(key[2:])) == split and known.suits(chain, split):
                break
        else:
            spent.add(split)
            continue
        asked.add(key)
        yield {
            "task_id": f"{PREFIX}{split}-{seed}-{index:05d}",
            "split": split,
            "world": number,
            "hops": wanted,
            "start": key[1],
            "relations": list(key[2:]),
        }


def check_known(known: Known, record: Mapping[str, Any]) -> None:
    """Raise ValueError for a record that is no question about the known worlds, or one of another split."""
    if not record["task_id"].startswith(PREFIX):
        raise ValueError(
            "'task_id' names no question about the known worlds; with per_domain.search.environment.known draw all tasks anew: "
            "curate: {seeds: {train: 1, valid: 1, test: 1}}"
        )
    if record["world"] >= known.worlds:
        raise ValueError(f"'world' is {record['world']}, and there are {known.worlds} known worlds")
    if split_of_question(record["world"], record["start"], record["relations"]) != record["split"]:
        raise ValueError(f"'split' is {record['split']}, and this question belongs to another")
