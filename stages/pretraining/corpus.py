"""What the shipped base model reads: procedurally generated text in the environments' formats, and no solved task.

Every sample is a chat. Families: `pages` (encyclopaedia pages, then many look-ups), `codes` (associative recall of coined items),
`rooms` (room descriptions, then look-ups), `copy`, and `transcript` (what aimless policies did in the environments).
Dense look-ups, many per sequence, are what makes the circuits form that find the right document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from stages.environments.protocol import Domain, Task, opening
from stages.environments.search.world import KINDS, RELATIONS, names_of
from stages.environments.textworld.settings import NAME_NUMBERS
from stages.seeding import stream

NOUNS = ("lamp", "cup", "jar", "coin", "ring", "book", "rope", "bell", "drum", "vase")
"""Items of `codes` and `copy`: nouns that no environment uses, so that any number may follow them."""
HOLDERS = ("box", "stand")
DIRECTIONS = ("north", "south", "east", "west")


@dataclass(frozen=True)
class Chat:
    """One sample: (role, text) in order. Assistant texts of look-up families are answers; those of transcripts are aimless."""

    family: str
    messages: tuple[tuple[str, str], ...]


def _interleave(context: str, questions: Sequence[tuple[str, str]], family: str) -> Chat:
    """A chat whose first message is the context with the first question; the other questions follow."""
    messages: list[tuple[str, str]] = []
    for index, (question, answer) in enumerate(questions):
        messages += [("user", f"{context} {question}" if index == 0 else question), ("assistant", answer)]
    return Chat(family, tuple(messages))


def pages(rng: Random) -> Chat:
    """Ten short articles, then about ten single look-ups: "founder of Kelmar?" "Dorvin"."""
    names = rng.sample(names_of("train"), 24)
    lines, facts = [], []
    for name in names[: rng.randint(5, 9)]:
        relations = rng.sample(RELATIONS, 8)
        for kind in rng.sample(KINDS, 2 if rng.random() < 0.3 else 1):
            page = [(relations.pop(), rng.choice(names)) for _ in range(rng.choice((2, 3, 3)))]
            lines.append(f"{name} {kind}: " + "; ".join(f"{relation} {value}" for relation, value in page) + ".")
            facts += [(f"{relation} of {name}?", value) for relation, value in page]
    rng.shuffle(lines)
    return _interleave(" ".join(lines), rng.sample(facts, min(10, len(facts))), "pages")


def recall(rng: Random) -> Chat:
    """Associative recall at its barest: pairs of single words or numbers, then every left one asked for once."""
    words = (*RELATIONS, *KINDS, *NOUNS, *DIRECTIONS, *HOLDERS, *(str(number) for number in range(10, 100)))
    drawn = rng.sample(words, 2 * rng.randint(6, 14))
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    context = " ".join(f"{left} {right}," for left, right in pairs)
    return _interleave(context, [(left, right) for left, right in rng.sample(pairs, len(pairs))], "recall")


def codes(rng: Random) -> Chat:
    """Pairs of coined items, then look-ups in both directions."""
    items = [f"{rng.choice(NOUNS)}{number}" for number in rng.sample(range(10, 100), 24)]
    pairs = list(zip(items[:12], items[12:], strict=True))[: rng.randint(6, 12)]
    context = ". ".join(f"{left} has {right}" for left, right in pairs) + "."
    asked = [(f"what has {left}?", right) if rng.random() < 0.7 else (f"who has {right}?", left) for left, right in pairs]
    return _interleave(context, rng.sample(asked, len(asked)), "codes")


def rooms(rng: Random) -> Chat:
    """Descriptions of rooms in the wording of TextWorld, then look-ups of what is where. Numbers are those of training games."""
    numbers = rng.sample(NAME_NUMBERS["train"], 20)
    lines, facts = [], []
    for _ in range(rng.randint(3, 5)):
        room = f"room{numbers.pop()}"
        line = f"you are in the {room}."
        holder = f"{rng.choice(HOLDERS)}{numbers.pop()}"
        if holder.startswith("box"):
            state = rng.choice(("closed", "empty", "opened"))
            line += f" there is a {state} {holder} here."
        else:
            thing = f"thing{numbers.pop()}"
            line += f" there is a {holder} here. the {holder} holds a {thing}."
            facts.append((f"what holds the {thing}?", holder))
        exits = sorted(rng.sample(DIRECTIONS, rng.randint(1, 2)))
        line += "".join(f" there is an exit to the {exit_}." for exit_ in exits)
        if rng.random() < 0.5:
            thing = f"thing{numbers.pop()}"
            line += f" there is a {thing} on the floor."
            facts.append((f"where is the {thing}?", room))
        facts += [(f"where is the {holder}?", room), (f"exits of the {room}?", ", ".join(exits))]
        lines.append(line)
    return _interleave(" ".join(lines), rng.sample(facts, min(9, len(facts))), "rooms")


def copy(rng: Random) -> Chat:
    """Repeat what was said: long runs of coined items, names and words, so that nearly every answer token can be looked up."""
    words = (*RELATIONS, *KINDS, *NOUNS, *DIRECTIONS, *HOLDERS)
    messages: list[tuple[str, str]] = []
    for _ in range(rng.randint(2, 4)):
        numbers = rng.sample(range(10, 100), 8)
        pool = [f"{rng.choice(NOUNS)}{number}" for number in numbers] + rng.sample(names_of("train"), 10) + list(rng.sample(words, 8))
        line = " ".join(rng.sample(pool, rng.randint(4, 16)))
        messages += [("user", line), ("assistant", line)]
    return Chat("copy", tuple(messages))


FAMILIES: dict[str, Callable[[Random], Chat]] = {"pages": pages, "recall": recall, "codes": codes, "rooms": rooms, "copy": copy}


def lookups(count: int, seed: int, weights: dict[str, float]) -> list[Chat]:
    """`count` samples of the families in `weights`, each from a random stream of its own."""
    names = sorted(weights)
    chats = []
    for index in range(count):
        rng = stream("pretrain", seed, index)
        family = rng.choices(names, [weights[name] for name in names])[0]
        chats.append(FAMILIES[family](rng))
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
