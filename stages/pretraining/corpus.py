"""What the shipped base model reads: procedurally generated text in the environments' formats, and no solved task.

Every sample is a chat. Families: `words`, `pairs` and `recall` (associative recall of words, names and coined items), `codes`
(the same in sentences), `pages` (encyclopaedia pages, then many look-ups), `rooms` (descriptions, then look-ups), `copy`, and
`transcript` (what aimless policies did in the environments).
Dense look-ups, many per sequence, are what makes the circuits form that find the right document.
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
"""Items of `codes` and `copy`: nouns that no environment uses, so that any number may follow them."""
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
"""Common short words, one token each, for the barest recall. Some are the environments' own: attention learns to match the tokens
that it is trained on, and takes hundreds of steps to take up others later."""
KINDS_OF_PAIR = ("word", "name", "item", "code", "fact")
"""Words; names; items whose nouns are nearly unique in a text; items whose nouns repeat, so that both tokens are needed; names
under relations, as on pages. All but words have two tokens."""
TRAINING_NAMES = names_of("train")
HOLDERS = ("box", "stand")


@dataclass(frozen=True)
class Chat:
    """One sample: (role, text) in order. Assistant texts of look-up families are answers; those of transcripts are aimless."""

    family: str
    messages: tuple[tuple[str, str], ...]
    answers: tuple[bool, ...] | None = None
    """Per word of the assistant's texts, whether it is an answer; None: all of them are."""


@dataclass(frozen=True)
class Lookup:
    """A question, the key it asks for, the answer that follows the key in the text, and the line of the text where both stand."""

    question: str
    key: str
    answer: str
    line: int = 0


@dataclass(frozen=True)
class Manner:
    """How a sample asks and answers."""

    restate: bool = False
    """Answers repeat the key first. A key right before its answer is what attention learns to follow within a few hundred steps;
    answering without it is then learned in a few dozen, and takes thousands on its own."""
    ahead: bool = False
    """Questions stand before the text that answers them (`pages` and `rooms`), as what is wanted does in the environments."""
    led: bool = False
    """One or two words that nothing foretells stand before each answer, as a command's verb will: an answer is to be found from
    wherever it is said, not only from the first place of a message."""


def _answered(rng: Random, family: str, asked: Sequence[tuple[str, str]], lead: bool) -> Chat:
    """A chat of (user message, answer) pairs."""
    messages: list[tuple[str, str]] = []
    counted: list[bool] = []
    for message, answer in asked:
        before = rng.sample(WORDS, rng.choice((1, 1, 2))) if lead else []
        messages += [("user", message), ("assistant", " ".join([*before, answer]))]
        counted += [False] * len(before) + [True] * len(answer.split(" "))
    return Chat(family, tuple(messages), tuple(counted) if lead else None)


def _asked_ahead(rng: Random, lines: Sequence[str], lookups: Sequence[Lookup], family: str, manner: Manner) -> Chat:
    """Each message is a question, then one to three lines of text, one of which answers it."""
    asked = []
    for item in lookups:
        others = [line for index, line in enumerate(lines) if index != item.line]
        shown = [lines[item.line], *rng.sample(others, min(len(others), rng.choice((0, 0, 1, 2))))]
        asked.append((" ".join([item.question, *rng.sample(shown, len(shown))]), item.answer))
    return _answered(rng, family, asked, manner.led)


def _interleave(rng: Random, context: str, lookups: Sequence[Lookup], family: str, manner: Manner) -> Chat:
    """A chat whose first message is the context with the first question; the other questions follow."""
    asked = []
    for index, item in enumerate(lookups):
        question = f"{context} {item.question}" if index == 0 else item.question
        asked.append((question, f"{item.key} {item.answer}" if manner.restate else item.answer))
    return _answered(rng, family, asked, manner.led and not manner.restate)


def pages(rng: Random, manner: Manner) -> Chat:
    """A few short articles, then about ten single look-ups: "founder of Kelmar?" or "Kelmar founder?" "Dorvin"."""
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
    if manner.ahead:
        return _asked_ahead(rng, lines, asked, "pages", manner)
    return _interleave(rng, " ".join(rng.sample(lines, len(lines))), asked, "pages", manner)


def _items(rng: Random, kind: str, count: int) -> list[str]:
    """Different items of one kind."""
    if kind == "word":
        return rng.sample(WORDS, count)
    if kind == "name":
        return rng.sample(TRAINING_NAMES, count)
    nouns = WORDS if kind == "item" else NOUNS
    return [f"{rng.choice(nouns)}{number}" for number in rng.sample(range(10, 100), count)]


def _drawn_pairs(rng: Random, kind: str) -> list[tuple[str, str]]:
    """Four to ten pairs of a kind, all items different."""
    if kind == "fact":
        keys = rng.sample(RELATIONS, rng.randint(4, 10))
        return list(zip(keys, _items(rng, "name", len(keys)), strict=True))
    drawn = _items(rng, kind, 2 * rng.randint(4, 10))
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def _listed(rng: Random, family: str, kind: str) -> Chat:
    """Pairs, then the same pairs in another order. Only the right items are answers, and each follows its key at once."""
    listed = [f"{left} {right}" for left, right in _drawn_pairs(rng, kind)]
    again = rng.sample(listed, len(listed))
    return Chat(family, (("user", ", ".join(listed)), ("assistant", ", ".join(again))), (False, True) * len(again))


def words(rng: Random, manner: Manner) -> Chat:
    """Associative recall at its barest: single words. There is nothing to restate."""
    return _listed(rng, "words", "word")


def pairs(rng: Random, manner: Manner) -> Chat:
    """The same with every kind of pair: the second token of an answer is to be found after the first."""
    return _listed(rng, "pairs", rng.choice(KINDS_OF_PAIR))


def recall(rng: Random, manner: Manner) -> Chat:
    """Pairs, then every left item asked for once."""
    drawn = _drawn_pairs(rng, rng.choice(KINDS_OF_PAIR))
    mark, asking = rng.choice((",", ";")), rng.choice(("", "?"))
    context = " ".join(f"{left} {right}{mark}" for left, right in drawn)
    asked = [Lookup(left + asking, left, right) for left, right in rng.sample(drawn, len(drawn))]
    return _interleave(rng, context, asked, "recall", manner)


def codes(rng: Random, manner: Manner) -> Chat:
    """Pairs of coined items, then look-ups of what each one has."""
    drawn = _drawn_pairs(rng, "code")
    context = ". ".join(f"{left} has {right}" for left, right in drawn) + "."
    asked = [Lookup(f"what has {left}?", f"{left} has", right) for left, right in drawn]
    return _interleave(rng, context, rng.sample(asked, len(asked)), "codes", manner)


def rooms(rng: Random, manner: Manner) -> Chat:
    """Descriptions of rooms in the wording of TextWorld, then look-ups of what is where. Numbers are those of training games."""
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
    if manner.ahead:
        return _asked_ahead(rng, lines, asked, "rooms", manner)
    return _interleave(rng, " ".join(lines), asked, "rooms", manner)


def copy(rng: Random, manner: Manner) -> Chat:
    """Repeat what was said: runs of coined items, names and words, so that nearly every answer token can be looked up.

    There is no key to restate; `restate` picks shorter runs, since it marks the easy phase.
    """
    plain = (*RELATIONS, *KINDS, *NOUNS, *DIRECTIONS, *HOLDERS)
    messages: list[tuple[str, str]] = []
    for _ in range(rng.randint(2, 4)):
        numbers = rng.sample(range(10, 100), 8)
        pool = [f"{rng.choice(NOUNS)}{number}" for number in numbers] + rng.sample(TRAINING_NAMES, 10) + rng.sample(plain, 8)
        line = " ".join(rng.sample(pool, rng.randint(2, 8 if manner.restate else 14)))
        messages += [("user", line), ("assistant", line)]
    return Chat("copy", tuple(messages))


FAMILIES: dict[str, Callable[[Random, Manner], Chat]] = {
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
    """`count` samples of the families in `weights`, each from a stream of its own; the others are shares (see `Manner`)."""
    names = sorted(weights)
    chats = []
    for index in range(count):
        rng = stream("pretrain", seed, index)
        family = rng.choices(names, [weights[name] for name in names])[0]
        manner = Manner(rng.random() < restate, rng.random() < ahead, rng.random() < led)
        chats.append(FAMILIES[family](rng, manner))
    return chats


def aimless(domain: Domain, tasks: Sequence[Task], folder: Path, seed: int, plays: int) -> list[Chat]:
    """Transcripts of a policy that picks admissible actions at random (and sometimes repeats itself or talks nonsense).

    Episodes that reach a reward are left out: the base model never sees a solved task.
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
