"""Pre-training text of the shipped base model: procedurally generated, in the environments' formats, without solved tasks.

Every sample is a chat. Families: `words`, `pairs` and `recall` (associative recall of words, names and invented items), `codes`
(the same in sentences), `pages` (encyclopaedia pages, then many look-ups), `rooms` (descriptions, then look-ups), `copy`, and
`transcript` (random policies in the environments).
Many look-ups per sequence make the circuits form that find the right document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from stages.environments.protocol import Domain
from stages.environments.search.world import KINDS, RELATIONS, names_of
from stages.environments.textworld.settings import NAME_NUMBERS
from stages.records.task import Task, opening
from stages.seeding import stream

NOUNS = ("lamp", "cup", "jar", "coin", "ring", "book", "rope", "bell", "drum", "vase")
"""Nouns of `codes` and `copy`; no environment uses them, so that any number may follow."""
_WORDS = """
    air ant arm ash bag bar bay bee bird boat bone bread brick bridge bush cake cap car cart cat chain chalk clay cloud
    coal coat corn cow crab crow deer desk dog door dust ear egg eye farm fern fig fish flag foot fork fox frog gate
    glass goat gold grain grape hand hat hay hen hill horn horse iron ivy jug kite lake leaf lime lion mast milk mill
    mint moon moss moth mouse nail nest net nut oak oat oil owl pan path pea pear pen pig pine pipe plum pond rain rat
    reed rice river road rock roof root rose sail salt sand seed ship shoe silk snow soap soil spoon star stone sun swan
    tent tin toad tree wall wax well wheat wing wolf
    closed contains empty exit exits floor holds opened
"""
DIRECTIONS = ("north", "south", "east", "west")
WORDS = (*_WORDS.split(), *RELATIONS, *DIRECTIONS)
"""Common short words, one token each, for the simplest recall. Some come from the environments: attention learns to match the
tokens it is trained on, and needs hundreds of steps to learn others later."""
KINDS_OF_PAIR = ("word", "name", "item", "code", "fact")
"""Words; names; items whose nouns are nearly unique in a text; items whose nouns repeat, so that both tokens matter; names
keyed by relations, as on pages. All except words have two tokens."""
TRAINING_NAMES = names_of("train")
HOLDERS = ("box", "stand")


@dataclass(frozen=True)
class Chat:
    """One sample: (role, text) in order. Assistant messages are answers in look-up families and random actions in transcripts."""

    family: str
    messages: tuple[tuple[str, str], ...]
    answers: tuple[bool, ...] | None = None
    """For each word of the assistant messages, whether it is part of an answer; None: all are."""


@dataclass(frozen=True)
class Lookup:
    """A question, its key, the answer that follows the key in the text, and the number of the line that contains both."""

    question: str
    key: str
    answer: str
    line: int = 0


@dataclass(frozen=True)
class Style:
    """Format of a sample's questions and answers."""

    restate: bool = False
    """Answers repeat the key first. Attention learns to continue a repeated key within a few hundred steps. Answering without the
    key then takes a few dozen more; learned directly, it takes thousands."""
    ahead: bool = False
    """Questions precede the text that answers them (`pages` and `rooms`), as goals do in the environments."""
    led: bool = False
    """One or two unpredictable words precede each answer, as a command's verb does: the model must find an answer from any
    position in a message, not only the first."""


def _chat(rng: Random, family: str, asked: Sequence[tuple[str, str]], lead: bool) -> Chat:
    """A chat of (user message, answer) pairs; `lead`: see `Style.led`."""
    messages: list[tuple[str, str]] = []
    counted: list[bool] = []
    for message, answer in asked:
        before = rng.sample(WORDS, rng.choice((1, 1, 2))) if lead else []
        messages += [("user", message), ("assistant", " ".join([*before, answer]))]
        counted += [False] * len(before) + [True] * len(answer.split(" "))
    return Chat(family, tuple(messages), tuple(counted) if lead else None)


def _asked_ahead(rng: Random, lines: Sequence[str], lookups: Sequence[Lookup], family: str, style: Style) -> Chat:
    """Each message is a question, then one to three lines of text, one of which answers it."""
    asked = []
    for item in lookups:
        others = [line for index, line in enumerate(lines) if index != item.line]
        shown = [lines[item.line], *rng.sample(others, min(len(others), rng.choice((0, 0, 1, 2))))]
        asked.append((" ".join([item.question, *rng.sample(shown, len(shown))]), item.answer))
    return _chat(rng, family, asked, style.led)


def _interleave(rng: Random, context: str, lookups: Sequence[Lookup], family: str, style: Style) -> Chat:
    """A chat that starts with the context and the first question in one message; the other questions follow."""
    asked = []
    for index, item in enumerate(lookups):
        question = f"{context} {item.question}" if index == 0 else item.question
        asked.append((question, f"{item.key} {item.answer}" if style.restate else item.answer))
    return _chat(rng, family, asked, style.led and not style.restate)


def pages(rng: Random, style: Style) -> Chat:
    """A few short articles, then up to ten look-ups: "founder of Kelmar?" or "Kelmar founder?", "Dorvin"."""
    names = rng.sample(TRAINING_NAMES, 20)
    form = rng.choice(("{name} {relation}?", "{relation} of {name}?"))
    lines, facts = [], []
    for name in names[: rng.choice((1, 1, 2, 2, 3, 4, 5))]:
        relations = rng.sample(RELATIONS, 8)
        for kind in rng.sample(KINDS, 2 if rng.random() < 0.2 else 1):
            page = [(relations.pop(), rng.choice(names)) for _ in range(rng.choice((3, 3, 4)))]
            facts += [Lookup(form.format(name=name, relation=relation), relation, value, len(lines)) for relation, value in page]
            lines.append(f"{name} {kind}: " + "; ".join(f"{relation} {value}" for relation, value in page) + ".")
    asked = rng.sample(facts, min(10, len(facts)))
    if style.ahead:
        return _asked_ahead(rng, lines, asked, "pages", style)
    return _interleave(rng, " ".join(rng.sample(lines, len(lines))), asked, "pages", style)


def _items(rng: Random, kind: str, count: int) -> list[str]:
    """`count` distinct items of one kind."""
    if kind == "word":
        return rng.sample(WORDS, count)
    if kind == "name":
        return rng.sample(TRAINING_NAMES, count)
    nouns = WORDS if kind == "item" else NOUNS
    return [f"{rng.choice(nouns)}{number}" for number in rng.sample(range(10, 100), count)]


def _drawn_pairs(rng: Random, kind: str) -> list[tuple[str, str]]:
    """Four to ten pairs of a kind; all items are distinct."""
    if kind == "fact":
        keys = rng.sample(RELATIONS, rng.randint(4, 10))
        return list(zip(keys, _items(rng, "name", len(keys)), strict=True))
    drawn = _items(rng, kind, 2 * rng.randint(4, 10))
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def _listed(rng: Random, family: str, kind: str) -> Chat:
    """Pairs, then the same pairs in another order. Only second items are answers; each directly follows its key."""
    listed = [f"{left} {right}" for left, right in _drawn_pairs(rng, kind)]
    again = rng.sample(listed, len(listed))
    return Chat(family, (("user", ", ".join(listed)), ("assistant", ", ".join(again))), (False, True) * len(again))


def words(rng: Random, style: Style) -> Chat:
    """The simplest associative recall: single words; `restate` does not apply."""
    return _listed(rng, "words", "word")


def pairs(rng: Random, style: Style) -> Chat:
    """The same with every kind of pair: the model must also find an answer's second token, given the first."""
    return _listed(rng, "pairs", rng.choice(KINDS_OF_PAIR))


def recall(rng: Random, style: Style) -> Chat:
    """Pairs, then one question per first item."""
    drawn = _drawn_pairs(rng, rng.choice(KINDS_OF_PAIR))
    mark, asking = rng.choice((",", ";")), rng.choice(("", "?"))
    context = " ".join(f"{left} {right}{mark}" for left, right in drawn)
    asked = [Lookup(left + asking, left, right) for left, right in rng.sample(drawn, len(drawn))]
    return _interleave(rng, context, asked, "recall", style)


def codes(rng: Random, style: Style) -> Chat:
    """Pairs of invented items, then look-ups of what each one has."""
    drawn = _drawn_pairs(rng, "code")
    context = ". ".join(f"{left} has {right}" for left, right in drawn) + "."
    asked = [Lookup(f"what has {left}?", f"{left} has", right) for left, right in drawn]
    return _interleave(rng, context, rng.sample(asked, len(asked)), "codes", style)


def rooms(rng: Random, style: Style) -> Chat:
    """Descriptions of rooms in TextWorld's wording, then look-ups of locations. Numbers are those of training games."""
    numbers = rng.sample(NAME_NUMBERS["train"], 16)
    lines, facts = [], []
    for _ in range(rng.randint(2, 4)):
        room = f"room{numbers.pop()}"
        line = f"you are in the {room}."
        holder = f"{rng.choice(HOLDERS)}{numbers.pop()}"
        if holder.startswith("box"):
            line += f" there is a {rng.choice(('closed', 'empty', 'opened'))} {holder} here."
        else:
            thing = f"thing{numbers.pop()}"
            line += f" there is a {holder} here. the {holder} holds a {thing}."
            facts.append(Lookup(f"what does the {holder} hold?", f"{holder} holds a", thing, len(lines)))
        exits = sorted(rng.sample(DIRECTIONS, rng.randint(1, 2)))
        plural = len(exits) > 1
        line += f" there {'are exits' if plural else 'is an exit'} to the {' and '.join(exits)}."
        if rng.random() < 0.5:
            thing = f"thing{numbers.pop()}"
            line += f" there is a {thing} on the floor."
            facts.append(Lookup(f"where is the {thing}?", thing, room, len(lines)))
        facts += [
            Lookup(f"where is the {holder}?", holder, room, len(lines)),
            Lookup(f"exits of the {room}?", room, " and ".join(exits), len(lines)),
        ]
        lines.append(line)
    asked = rng.sample(facts, min(9, len(facts)))
    if style.ahead:
        return _asked_ahead(rng, lines, asked, "rooms", style)
    return _interleave(rng, " ".join(lines), asked, "rooms", style)


def copy(rng: Random, style: Style) -> Chat:
    """Repeat a message of invented items, names and words, so that nearly every answer token can be looked up.

    There is no key to restate; `restate` selects shorter messages instead, since it marks the easy phase.
    """
    plain = (*RELATIONS, *KINDS, *NOUNS, *DIRECTIONS, *HOLDERS)
    messages: list[tuple[str, str]] = []
    for _ in range(rng.randint(2, 4)):
        numbers = rng.sample(range(10, 100), 8)
        pool = [f"{rng.choice(NOUNS)}{number}" for number in numbers] + rng.sample(TRAINING_NAMES, 10) + rng.sample(plain, 8)
        line = " ".join(rng.sample(pool, rng.randint(2, 8 if style.restate else 14)))
        messages += [("user", line), ("assistant", line)]
    return Chat("copy", tuple(messages))


FAMILIES: dict[str, Callable[[Random, Style], Chat]] = {
    "pages": pages,
    "words": words,
    "pairs": pairs,
    "recall": recall,
    "codes": codes,
    "rooms": rooms,
    "copy": copy,
}


def lookups(
    count: int, seed: int, weights: Mapping[str, float], restate: float = 0.0, ahead: float = 0.0, led: float = 0.0
) -> list[Chat]:
    """`count` samples of the families in `weights`, each from its own random stream. The other arguments are shares of samples
    (see `Style`)."""
    names = sorted(weights)
    chats = []
    for index in range(count):
        rng = stream("pretrain", seed, index)
        family = rng.choices(names, [weights[name] for name in names])[0]
        style = Style(rng.random() < restate, rng.random() < ahead, rng.random() < led)
        chats.append(FAMILIES[family](rng, style))
    return chats


def random_play(domain: Domain, tasks: Sequence[Task], folder: Path, seed: int, plays: int) -> list[Chat]:
    """Transcripts of a policy that picks admissible actions at random, `plays` episodes per task.

    Episodes with a positive return are left out: the base model never sees a solved task.
    """
    environment = domain.make(folder)
    chats = []
    for task in tasks:
        for play in range(plays):
            rng = stream("aimless", seed, task.task_id, play)
            observation = environment.reset(task).text
            messages = [("user", opening(task.prompt, observation))]
            total = 0.0
            for _ in range(domain.settings.max_turns):
                admissible = environment.admissible()
                if not admissible:
                    break
                action = rng.choice(list(admissible))
                step = environment.step(action)
                total += step.reward
                messages += [("assistant", action), ("user", step.observation.text)]
                if step.done:
                    break
            if total <= 0.0:
                chats.append(Chat("transcript", tuple(messages)))
    environment.close()
    return chats
