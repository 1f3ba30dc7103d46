"""Draws the next tokens of rows of the slot table, with what their turns request about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from stages import seeding
from stages.engine.masks import compact, masked
from stages.engine.sampling import candidate_entropy, distribution
from stages.engine.slots import SlotTable


@dataclass(frozen=True)
class Drawn:
    """The next token of each of N rows. What no row requests is None."""

    ids: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray | None
    kept: list[np.ndarray] | None
    """The tokens that each was drawn from."""
    left: np.ndarray | None = None
    """The logarithm of the probability that its mask left each row."""
    forced: np.ndarray | None = None
    """Whether its mask left each row one token alone."""


def joined(parts: Sequence[Drawn]) -> Drawn:
    """One `Drawn` of all rows. Rows for which nothing was requested have entropy 0, no kept tokens and no mask."""
    entropies, kept, left, forced = None, None, None, None
    if any(part.entropies is not None for part in parts):
        entropies = np.concatenate([np.zeros(len(part.ids)) if part.entropies is None else part.entropies for part in parts])
    if any(part.kept is not None for part in parts):
        kept = [tokens for part in parts for tokens in (part.kept or [np.zeros(0, np.int32)] * len(part.ids))]
    if any(part.left is not None for part in parts):
        left = np.concatenate([np.zeros(len(part.ids)) if part.left is None else part.left for part in parts])
        forced = np.concatenate([np.zeros(len(part.ids), bool) if part.forced is None else part.forced for part in parts])
    ids, logprobs = np.concatenate([part.ids for part in parts]), np.concatenate([part.logprobs for part in parts])
    return Drawn(ids, logprobs, entropies, kept, left, forced)


def draw_rows(logits: Tensor, table: SlotTable, rows: np.ndarray, to_device: Callable[[np.ndarray], Tensor]) -> Drawn:
    """Draw the next tokens of the table's rows `rows` [n] from their logits [n, V]."""
    temperature = to_device(table.temperature[rows])
    masks = [table.mask[row] for row in rows]
    left, forced = None, None
    if any(mask is not None for mask in masks):
        logits, shares, forced = masked(logits, masks, temperature)
        left = shares.cpu().numpy()
    drawn_from = distribution(logits, temperature, to_device(table.top_p[rows]), to_device(table.top_k[rows]))
    ids, logprobs = drawn_from.draw(to_device(seeding.uniform(table.key[rows], table.count[rows])))
    entropies = None
    if (candidates := table.candidates[rows]).any():
        entropies = candidate_entropy(logits, temperature, to_device(candidates)).cpu().numpy()
    kept = drawn_from.kept() if table.keep[rows].any() else None
    values = logprobs.cpu().numpy()
    if left is not None:
        plain = np.array([mask is not None and not mask.renormalise for mask in masks])
        values = np.where(plain, values + left, values).astype(np.float32)
        width = logits.shape[-1]
        if kept is not None:
            kept = [tokens if mask is None else compact(tokens, width) for tokens, mask in zip(kept, masks, strict=True)]
    return Drawn(ids.cpu().numpy(), values, entropies, kept, left, forced)
