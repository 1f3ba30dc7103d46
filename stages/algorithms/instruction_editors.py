"""Who writes new instructions from a parent and its failures: a rule table, random edits, or a chat model behind a server."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.agent.instructions import PHRASES, QUESTION, with_phrase, without_phrase
from stages.agent.prompts import load_prompt, transcript
from stages.algorithms.population import Stored

if TYPE_CHECKING:
    from stages.judging.chat_settings import ChatParams

PROMPT = "editor.txt"
"""Of data/raw/prompts."""


def by_rules(parent: str, failures: Sequence[Stored], rng: random.Random) -> str:
    """The parent with the phrase that most of the failures do not follow and it does not have (ties: by random draw), in place of
    those that contradict it (CONTRADICTS); unchanged if there is none."""
    counts = {phrase: sum(not holds(one.turns) for one in failures) for phrase, holds in PHRASES.items() if phrase not in parent}
    most = max(counts.values(), default=0)
    if not most:
        return parent
    phrase = rng.choice([phrase for phrase, count in counts.items() if count == most])
    for opposite in CONTRADICTS.get(phrase, ()):
        parent = without_phrase(parent, opposite)
    return with_phrase(parent, phrase)


CONTRADICTS: Mapping[str, Sequence[str]] = {
    "Take every step.": ("Be brief.",),
    "Look first.": ("Be brief.",),
    "Be brief.": ("Take every step.", "Look first."),
}
"""Phrase -> those that go when it comes: "Be brief." asks for fewer turns, the other two for more."""


def by_chance(parent: str, failures: Sequence[Stored], rng: random.Random) -> str:
    """The parent with a random phrase added, or removed if it has it; failures are not read."""
    phrase = rng.choice(list(PHRASES))
    return without_phrase(parent, phrase) if phrase in parent else with_phrase(parent, phrase)


def shown(failures: Sequence[Stored]) -> str:
    parts = []
    for number, one in enumerate(failures, start=1):
        parts.append(f"Attempt {number} (reward {one.reward:g}):\n{one.prompt}\n{transcript(one.turns)}")
    return "\n\n".join(parts)


def by_server(
    parents: Sequence[str], failures: Sequence[Sequence[Stored]], params: ChatParams, words: int, root: Path
) -> list[str]:
    """The chat model's instruction for each parent, "" where it refuses. Equal requests differ in nothing but their place: each
    gets the next draw of the model. Replies are stored with their requests (`params.cache`)."""
    from stages.judging.chat_server import ChatServer

    prompt = load_prompt(PROMPT)
    asked = [
        [{"role": "user", "content": prompt.fill(placeholder=QUESTION, words=words, parent=parent, failures=shown(failed))}]
        for parent, failed in zip(parents, failures, strict=True)
    ]
    server = ChatServer(params, "rl.tasks.settings.editor.server", root)
    try:
        return [" ".join((text or "").split()) for text in server.write(asked, range(len(asked)))]
    finally:
        server.close()
