"""Which parts of a tree keep their key/value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CACHED_TOKENS = 2048
"""Tokens of key/value cache kept per tree beside its root's (4 KB a token for the shipped model, some 100 KB for a 1 B one)."""


class PrefixStore:
    """Engine prefixes (tokens with their cache) of a tree's nodes: the root's for good, others by last use within a budget."""

    def __init__(self, root: Any, budget: int) -> None:
        self._root, self._budget = root, budget
        self._kept: dict[int, tuple[Any, int]] = {}

    def add(self, node: int, prefix: Any, tokens: int) -> None:
        """Keep a node's prefix of `tokens` tokens; those used longest ago make room."""
        if node == 0:
            self._root = prefix
            return
        self._kept.pop(node, None)
        self._kept[node] = (prefix, tokens)
        while self._kept and sum(size for _, size in self._kept.values()) > self._budget:
            del self._kept[next(iter(self._kept))]

    def nearest(self, path: Sequence[int]) -> tuple[int, Any]:
        """The deepest node of a root-to-node path that has a prefix, as its place in the path, and the prefix; the root's may be
        None."""
        for place in range(len(path) - 1, 0, -1):
            if path[place] in self._kept:
                self._kept[path[place]] = found = self._kept.pop(path[place])
                return place, found[0]
        return 0, self._root
