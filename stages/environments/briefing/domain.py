"""The briefing domain: recipes, tasks, hidden quality and references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from stages.environments.base_domain import GradedDomain, check_fields, levels_in_turn
from stages.environments.briefing.brief import (
    PADDING,
    Asked,
    checklist,
    demands,
    mistakes,
    paraphrases,
    quality,
    read,
    words_of,
    write,
)
from stages.environments.briefing.environment import BriefingEnvironment
from stages.environments.briefing.settings import MAX_POINTS, BriefingSettings
from stages.environments.factbook.book import REGIONS
from stages.environments.factbook.facts import COUNT, FACTS, value
from stages.environments.factbook.profiles import Profile, read_profiles
from stages.environments.search.world import KINDS, RELATIONS, names_of
from stages.records.reward_chain import RewardChain, Style
from stages.records.task import SPLITS, SUCCESS_TERM, Split, Task
from stages.seeding import stream

REPOSITORY = Path(__file__).resolve().parents[3]
INSTRUCTIONS = (
    "Write a brief that states the facts named after the colon, in that order, as noun and value, and nothing else. A list reads "
    '"Name: noun value; noun value." and prose reads "Name has noun value, noun value and noun value."\n'
)
_FIELDS: dict[str, type] = {
    "task_id": str, "split": str, "entity": str, "title": str, "facts": list, "wanted": list, "form": str, "words": int,
}  # fmt: skip
_DRAWS = 200
"""Attempts to draw a brief that is new before `recipes` gives up."""
_WEIGHTS = {"entity": 0.3, "form": 0.4, "words": 0.3}
"""Of the demands on form, as styles of a reward chain."""
_LONGEST = 40
"""Characters of a factbook value that a brief may have to repeat."""


class BriefingDomain(GradedDomain[BriefingSettings]):
    name = "briefing"
    Settings = BriefingSettings
    levels_key = "points"
    hidden = frozenset({"quality", SUCCESS_TERM})
    """Terms that no reward may read: stages/algorithms/hidden.py."""

    def level(self, record: Mapping[str, Any]) -> int:
        return len(record["wanted"])

    @cached_property
    def _profiles(self) -> dict[Split, list[Profile]]:
        profiles = read_profiles(REPOSITORY / self.settings.folder)
        return {split: [one for one in profiles if one.region in REGIONS[split]] for split in SPLITS}

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records. Raises ValueError if the source has fewer different briefs."""
        levels, rng, seen = list(self.levels()), stream("briefing.recipes", self.settings.source, seed), set()
        for split, index, place in levels_in_turn(count, {split: [self.weights[level] for level in levels] for split in SPLITS}):
            for _ in range(_DRAWS):
                record = self._draw(split, levels[place], rng)
                key = (record["entity"], *record["wanted"], record["form"]) if record else None
                if record and key not in seen:
                    seen.add(key)
                    yield {"task_id": f"briefing-{split}-{index:06d}", "split": split, **record}
                    break
            else:
                raise ValueError(f"briefing: no further {split} brief of {levels[place]} points; ask for fewer records")

    def _draw(self, split: Split, points: int, rng: Random) -> dict[str, Any] | None:
        """The fields of a record; None if the entity drawn has too few facts."""
        if self.settings.source == "invented":
            name, *values = rng.sample(names_of(split), 1 + points + self.settings.unwanted)
            title = f"{name} {rng.choice(KINDS)}"
            facts = [[noun, value] for noun, value in zip(rng.sample(RELATIONS, len(values)), values, strict=True)]
        else:
            profile = rng.choice(self._profiles[split])
            known = _known(profile)
            if len(known) < points + self.settings.unwanted:
                return None
            name = title = profile.name
            facts = [list(fact) for fact in rng.sample(known, points + self.settings.unwanted)]
        wanted = [noun for noun, _ in rng.sample(facts, points)]
        form = rng.choice(("list", "prose"))
        asked = Asked(name, tuple((noun, value) for noun, value in facts), tuple(wanted), form, 1)
        words = len(write(asked).split()) + self.settings.slack
        return {"entity": name, "title": title, "facts": sorted(facts), "wanted": wanted, "form": form, "words": words}

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, _FIELDS)
        facts = record["facts"]
        if not all(
            isinstance(fact, list) and len(fact) == 2 and all(isinstance(part, str) and part for part in fact) for fact in facts
        ):
            raise ValueError(f"'facts' must be pairs of noun and value, not {facts!r}")
        nouns = [noun for noun, _ in facts]
        if len({noun.lower() for noun in nouns}) < len(nouns):
            raise ValueError(f"'facts' names a noun twice: {nouns}")
        wanted = record["wanted"]
        if not 1 <= len(wanted) <= MAX_POINTS or len(set(wanted)) < len(wanted) or not set(wanted) <= set(nouns):
            raise ValueError(f"'wanted' must be 1 to {MAX_POINTS} different nouns of 'facts', not {wanted!r}")
        if record["form"] not in ("list", "prose"):
            raise ValueError(f"'form' must be list or prose, not {record['form']!r}")
        if not words_of(record["entity"]):
            raise ValueError("'entity' has no words")
        needed = len(write(Asked.of(record)).split())
        if record["words"] < needed:
            raise ValueError(f"'words' must be at least the {needed} that a perfect brief has, not {record['words']}")

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        spec = {key: record[key] for key in ("entity", "facts", "wanted", "form", "words")}
        shown = "; ".join(f"{noun} {value}" for noun, value in record["facts"])
        prompt = (
            f"{record['title']}: {shown}. brief on {record['entity']}: {', '.join(record['wanted'])}. "
            f"{record['form']}, at most {record['words']} words."
        )
        return Task(
            task_id=record["task_id"],
            domain=self.name,
            split=record["split"],
            seed=0,
            prompt=INSTRUCTIONS + prompt if self.settings.instructions else prompt,
            spec=spec,
            difficulty=float(self.level(record)),
            cluster=f"briefing-{record['entity']}",
        )

    def make(self, folder: Path) -> BriefingEnvironment:
        return BriefingEnvironment(self.settings.max_turns)

    def entities(self, task: Task) -> set[str]:
        return {task.spec["entity"]}

    def quality(self, task: Task, actions: Sequence[str]) -> float:
        """The hidden quality of an episode's brief; see stages/environments/briefing/brief.py."""
        return quality(Asked.of(task.spec), " ".join(" ".join(actions).split()))

    def attributes(self, task: Task, actions: Sequence[str]) -> dict[str, float]:
        """For judges by principles: `form`, the share of the demands on form that are met, and `plain`, minus words beside the
        facts; see stages/environments/briefing/brief.py."""
        text, asked = " ".join(" ".join(actions).split()), Asked.of(task.spec)
        met = list(demands(asked, text).values())
        return {"form": sum(met) / len(met), "plain": -min(read(asked, text).padding, PADDING) / 4}

    def checklist(self, task: Task, actions: Sequence[str]) -> dict[str, bool]:
        """What a perfect brief meets: each demand on form, each fact, their order, and no more."""
        return checklist(Asked.of(task.spec), " ".join(" ".join(actions).split()))

    def thought(self, task: Task, actions: Sequence[str]) -> str:
        """What an expert thinks before a brief: the values to state, in order, looked up before the form is chosen."""
        asked = Asked.of(task.spec)
        return f"{asked.form}: " + ", ".join(f"{noun} {asked.values[noun]}" for noun in asked.wanted)

    def references(self, task: Task) -> list[str]:
        """Good briefs: a perfect one and paraphrases of it."""
        return paraphrases(Asked.of(task.spec))

    def mistakes(self, task: Task) -> list[str]:
        """Briefs that read like references and are wrong, for verifiers to learn from."""
        return mistakes(Asked.of(task.spec))

    def reward_chain(self, task: Task) -> RewardChain:
        """The values in order, then noun and value of each fact; the demands on form as styles."""
        asked = Asked.of(task.spec)
        references = tuple(paraphrases(asked))
        lists = [tuple(asked.values[noun] for noun in asked.wanted), *((noun, asked.values[noun]) for noun in asked.wanted)]
        styles = tuple(Style(name, weight, _demands_named(asked, name)) for name, weight in _WEIGHTS.items())
        return RewardChain(references, tuple((words,) * len(references) for words in lists), styles)


def _demands_named(asked: Asked, name: str) -> Callable[[str], bool]:
    return lambda text: demands(asked, text)[name]


def _known(profile: Profile) -> list[tuple[str, str]]:
    """Noun and value of a profile's facts, short ones, sorted; of nouns that contain each other only the first."""
    found: dict[str, str] = {}
    for _, fact in sorted(FACTS.items()):
        try:
            text = value(profile, fact)
        except ValueError:
            continue
        if fact.unit not in ("", COUNT) and "$" not in text:
            text = f"{text} {fact.unit}"
        if len(text) <= _LONGEST and not any(fact.noun in noun or noun in fact.noun for noun in found):
            found[fact.noun] = text
    return sorted(found.items())
