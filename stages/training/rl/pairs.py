"""Preference pairs to learn from: of search trees, token for token, and imported ones, which are text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.agent.chat import Chat
from stages.annotation.continuations import Continuation, Pair, pair_tokens
from stages.records.episode import Owner, read_rows


def tree_pairs(folder: Path, level: str) -> list[Pair]:
    """Those of `folder` (data/annotated/<domain>). Raises ValueError if there are none."""
    stored = read_rows(folder / "pairs.parquet")
    if not stored:
        raise ValueError(
            f"{folder / 'pairs.parquet'} holds no pairs to learn from; raise annotate.tasks or iterations, or lower "
            f"annotate.pairs.min_margin"
        )
    return pair_tokens(read_rows(folder / "nodes.parquet"), stored, level)


def _continuation(
    chat: Chat, prompt: Sequence[Mapping[str, str]], said: Sequence[Mapping[str, str]], value: float
) -> Continuation:
    start = len(chat.encode(prompt).token_ids)
    encoded = chat.encode([*prompt, *said])
    policy = tuple(owner == int(Owner.POLICY) for owner in encoded.owner[start:])
    return Continuation(tuple(encoded.token_ids[start:]), policy, value)


def imported_pair(row: Mapping[str, Any], chat: Chat) -> Pair:
    """A row of PREFERENCE_SCHEMA as tokens, laid out as a rollout of the same text."""
    prompt = row["prompt"]
    win, lose = (_continuation(chat, prompt, row[side], row[f"{side}_value"]) for side in ("chosen", "rejected"))
    return Pair(row["task_id"] or row["pair_id"], tuple(chat.encode(prompt).token_ids), win, lose, row["weight"])


def imported_pairs(folder: Path, chat: Chat, max_length: int) -> list[Pair]:
    """Those of `folder` (data/curated/<domain>), in the order of their records. Raises ValueError if there are none, and naming
    one of more than `max_length` tokens."""
    path = folder / "pairs.parquet"
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: the files of curate.imports held no preference pairs for {folder.name} that could stay"
        )
    pairs = []
    for row in read_rows(path):
        pair = imported_pair(row, chat)
        length = len(pair.history) + max(len(side.token_ids) for side in (pair.win, pair.lose))
        if length > max_length:
            raise ValueError(
                f"imported pair {row['pair_id']} has {length} tokens, over model.max_length ({max_length}); raise that, or take "
                "the record out"
            )
        pairs.append(pair)
    return pairs
