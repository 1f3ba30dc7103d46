"""A curated search domain with rollouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from curated_imports import curated
from tiny import make_tiny_tokenizer

from stages.agent.chat import Chat
from stages.environments.search import SearchDomain
from stages.records.episode import Owner, read_episodes, write_episodes


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tiny_tokenizer())


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [json.dumps(record) for record in SearchDomain().recipes(120, 0)]


@pytest.fixture(scope="module")
def source(lines: list[str], chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curated domain whose demonstrations, with their tokens, serve as rollouts, and two failures."""
    root = tmp_path_factory.mktemp("source")
    folder = curated(root, lines)
    episodes = []
    for number, shown in enumerate(read_episodes(folder / "demonstrations.parquet")):
        encoded = chat.encode_demonstration(shown.messages)
        played = replace(
            shown, episode_id=f"{shown.task_id}/{number:04d}", token_ids=encoded.token_ids, owner=encoded.owner, turn=encoded.turn
        )
        played.logprob = [-0.5 if owner == Owner.POLICY else 0.0 for owner in encoded.owner]
        episodes.append(played)
    for episode in episodes[:2]:
        failure = replace(episode, episode_id=f"{episode.episode_id}-failed", turns=[*episode.turns[:-1]], reward=0.0)
        failure.turns.append(replace(episode.turns[-1], action="answer nobody", observation="Answered.", reward=0.0))
        failure.messages = [*episode.messages[:-1], {**episode.messages[-1], "content": "answer nobody"}]
        failure.reward_terms = {}
        episodes.append(failure)
    write_episodes(root / "data/rollouts/search/episodes.parquet", episodes)
    return root
