"""Demonstrations as training documents, and their split into optimiser steps.

A step uses whole documents, about a given number of tokens, in micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stages.agent.chat import Chat
from stages.agent.forgetting import hidden_spans, views
from stages.agent.shared_prefixes import plan_shared
from stages.records.episode import Episode, Owner
from stages.seeding import permutation
from stages.training.common.batches import padded, plan_micro_batches


@dataclass(frozen=True)
class Documents:
    """D documents, each cut after its last policy token and padded on the right to T tokens."""

    token_ids: Tensor
    """[D, T] int64."""
    mask: Tensor
    """[D, T] bool: policy tokens, which are trained."""
    lengths: list[int]

    @property
    def size(self) -> int:
        return len(self.lengths)

    def take(self, rows: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Token ids and mask of some rows, cut to the longest: [b, t] each."""
        width = max(self.lengths[row] for row in rows)
        index = torch.tensor(rows)
        return self.token_ids[index, :width].to(device), self.mask[index, :width].to(device)


def encode(
    chat: Chat, demonstrations: Sequence[Episode], max_length: int, hints: Sequence[str] = (), before: Sequence[str] = ()
) -> Documents:
    """Demonstrations as documents, in order; turns taken over from another episode (`inherited`) are not trained. One that
    forgets observations is a document for each stretch of turns that saw the same (stages/agent/forgetting.py). hints, before:
    one for each, at the end of its first message and before it, "" for none; left out where they leave too little room.

    Raises ValueError if there are none, and for one of more than `max_length` tokens.
    """
    if not demonstrations:
        raise ValueError("there are no demonstrations to train on; see reports/curate/<domain>.json for why they were rejected")
    ids, owners = [], []
    for place, episode in enumerate(demonstrations):
        messages = list(episode.messages)
        if before and messages:
            messages[0] = {**messages[0], "content": before[place] + messages[0]["content"]}
        encoded = chat.encode_demonstration(messages, hints[place] if hints else "")
        if (hints or before) and len(encoded.token_ids) > max_length:
            encoded = chat.encode_demonstration(episode.messages)
        if len(encoded.token_ids) > max_length:
            raise ValueError(
                f"demonstration {episode.episode_id} has {len(encoded.token_ids)} tokens, over model.max_length ({max_length}); "
                f"raise model.max_length or make tasks shorter"
            )
        first, last = encoded.spans[episode.inherited][0], encoded.spans[-1][1]
        for view in views(last, hidden_spans(chat, encoded.token_ids, encoded.spans, episode.forgotten)):
            owner = [encoded.owner[place] if place >= max(first, view.start) else int(Owner.PROMPT) for place in view.columns]
            if int(Owner.POLICY) in owner:
                ids.append([encoded.token_ids[place] for place in view.columns])
                owners.append(owner)
    mask = padded(owners, int(Owner.PROMPT), torch.int64) == int(Owner.POLICY)
    return Documents(padded(ids, 0, torch.int64), mask, [len(row) for row in ids])


def epoch_batches(documents: Documents, batch_tokens: int, *key: object) -> list[list[int]]:
    """The documents of each step of an epoch: all once, in an order drawn from `key`, in `steps_per_epoch` batches whose sizes
    differ by at most one document."""
    order = permutation(range(documents.size), *key)
    count = steps_per_epoch(documents, batch_tokens)
    bounds = [documents.size * place // count for place in range(count + 1)]
    return [order[start:end] for start, end in pairwise(bounds)]


def steps_per_epoch(documents: Documents, batch_tokens: int) -> int:
    return min(documents.size, math.ceil(sum(documents.lengths) / batch_tokens))


def micro_batches(
    documents: Documents, rows: Sequence[int], tokens_per_batch: int, *, sharing: bool = False, least: int = 1
) -> list[list[int]]:
    """A step's documents in micro-batches of at most `tokens_per_batch` tokens. sharing: for
    `stages.agent.shared_prefixes.sharing_states`, at least `least`; otherwise of similar length, padded."""
    if sharing:
        return plan_shared(documents.token_ids, documents.mask, rows, tokens_per_batch, least)
    plan = plan_micro_batches([documents.lengths[row] for row in rows], tokens_per_batch)
    return [[rows[place] for place in group] for group in plan]
