"""Preference pairs to learn from: those of search trees, as tokens, and imported ones, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.agent.chat import Chat
from stages.annotation.continuations import Continuation, Pair, pair_tokens
from stages.records.episode import Owner, read_rows


def tree_pairs(folder: Path, level: str) -> list[Pair]:
    """The pairs in `folder` (data/annotated/<domain>). Raises ValueError if there are none."""
    pairs = pair_tokens(read_rows(folder / "nodes.parquet"), read_rows(folder / "pairs.parquet"), level)
    if not pairs:
        raise ValueError(
            f"{folder / 'pairs.parquet'} has no pairs with tokens of the policy to learn from; raise annotate.tasks or "
            f"annotate.iterations, or lower annotate.pairs.min_margin"
        )
    return pairs


def _continuation(
    chat: Chat, prompt: Sequence[Mapping[str, str]], answer: Sequence[Mapping[str, str]], value: float
) -> Continuation:
    start = len(chat.encode(prompt).token_ids)
    encoded = chat.encode([*prompt, *answer])
    policy = tuple(owner == int(Owner.POLICY) for owner in encoded.owner[start:])
    return Continuation(tuple(encoded.token_ids[start:]), policy, value)


def imported_pair(row: Mapping[str, Any], chat: Chat) -> Pair:
    """A row of PREFERENCE_SCHEMA, tokenized as a rollout of the same text would be."""
    prompt = row["prompt"]
    win, lose = (_continuation(chat, prompt, row[side], row[f"{side}_value"]) for side in ("chosen", "rejected"))
    return Pair(row["task_id"] or row["pair_id"], tuple(chat.encode(prompt).token_ids), win, lose, row["weight"])


def imported_pairs(folder: Path, chat: Chat, max_length: int) -> list[Pair]:
    """The pairs in `folder` (data/curated/<domain>), in order. Raises ValueError if there are none, and for one of more than
    `max_length` tokens."""
    path = folder / "pairs.parquet"
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: the files in curate.imports have no usable preference pairs for {folder.name}; see "
            f"reports/curate/{folder.name}.json"
        )
    pairs = []
    for row in read_rows(path):
        pair = imported_pair(row, chat)
        length = len(pair.history) + max(len(side.token_ids) for side in (pair.win, pair.lose))
        if length > max_length:
            raise ValueError(
                f"imported pair {row['pair_id']} has {length} tokens, over model.max_length ({max_length}); raise "
                "model.max_length, or remove the record"
            )
        pairs.append(pair)
    return pairs
