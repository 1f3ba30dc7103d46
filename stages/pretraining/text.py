"""Assembles the pre-training text: look-ups in curriculum order, mixed with transcripts of random play."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from stages.environments.registry import load_domain
from stages.pretraining.corpus import Chat, lookups, random_play
from stages.pretraining.settings import Settings
from stages.seeding import permutation, stream

WORLD_SEED = 900
"""Seed of the worlds for random play; curation uses other seeds."""
DOMAINS = ("search", "textworld")


def transcripts(settings: Settings, folder: Path, workers: int) -> list[Chat]:
    """Random play in training worlds of each environment, which are built below `folder` and removed afterwards."""
    chats: list[Chat] = []
    for name in DOMAINS:
        domain = load_domain(name)
        records = [record for record in domain.recipes(settings.transcript_tasks * 3, WORLD_SEED) if record["split"] == "train"][
            : settings.transcript_tasks
        ]
        shutil.rmtree(folder / name, ignore_errors=True)
        tasks = domain.build(records, folder / name, workers)
        chats += random_play(domain, tasks, folder / name, settings.seed, settings.transcript_plays)
    shutil.rmtree(folder, ignore_errors=True)
    return chats


def make_corpus(settings: Settings, folder: Path, workers: int) -> list[Chat]:
    """The `steps * batch` samples in training order."""
    needed = any(phase.transcripts for phase in settings.phases) and settings.transcript_tasks
    played = transcripts(settings, folder, workers) if needed else []
    chats: list[Chat] = []
    for number, phase in enumerate(settings.phases):
        total = phase.steps * settings.batch
        rng = stream("pretrain.transcripts", settings.seed, number)
        drawn = [rng.choice(played) for _ in range(round(total * phase.transcripts) if played else 0)]
        asked = lookups(total - len(drawn), settings.seed + number, phase.families, phase.restate, phase.ahead, phase.led)
        chats += permutation(asked + drawn, "pretrain.order", settings.seed, number)
    return chats


def held_out(settings: Settings, count: int = 256) -> list[Chat]:
    """Look-ups like the last phase's that training did not see, without restated keys."""
    last = settings.phases[-1]
    return lookups(count, settings.seed + 1_000_000, last.families, 0.0, last.ahead, last.led)


def tokenizer_texts(chats: Sequence[Chat], every: int = 4) -> Iterator[str]:
    return (text for chat in chats[::every] for _, text in chat.messages)


def word_list(chats: Sequence[Chat]) -> list[str]:
    """Every distinct word of the text, sorted; the leakage test reads this list, which is small since the text is procedural."""
    words: set[str] = set()
    for chat in chats:
        for _, text in chat.messages:
            words.update(re.findall(r"[A-Za-z]+-?[A-Za-z]*\d*", text))
    return sorted(words)
