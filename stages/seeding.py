"""Counter-based random numbers: an episode's draws depend only on its own key, never on other episodes or on order.

A key is a tuple such as (seed, task_id, episode, turn); the n-th draw of a key is a pure function of key and n.
`Stream` serves Python code, `uniform` many rows at once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def key64(*parts: object) -> int:
    """A 64-bit key of `parts`, the same on every machine and in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Draw number `counters[i]` of stream `keys[i]`: float64 in [0, 1), shape of the inputs (SplitMix64 finaliser)."""
    with np.errstate(over="ignore"):
        z = keys.astype(np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def stream(*parts: object) -> random.Random:
    """A separate `random.Random` for each `parts`."""
    return random.Random(key64(*parts))


def permutation(items: Iterable, *parts: object) -> list:
    """`items` in a random order that depends only on `parts`."""
    shuffled = list(items)
    stream(*parts).shuffle(shuffled)
    return shuffled


def seed_torch(*parts: object) -> None:
    """Seed torch's global generator from a key; for model initialisation and dropout, not for sampling."""
    import torch

    torch.manual_seed(key64(*parts) % 2**63)
