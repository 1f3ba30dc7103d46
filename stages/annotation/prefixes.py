"""Key/value caches of a tree's nodes, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CACHED_TOKENS = 2048
"""Cached tokens per tree besides the root's (4 KB per token for the shipped model, about 100 KB for a 1B model)."""


class PrefixStore:
    """LRU cache of engine prefixes (tokens with their key/value cache) by node; the root's is never evicted."""

    def __init__(self, root: Any, budget: int) -> None:
        self._root, self._budget = root, budget
        self._cached: dict[int, tuple[Any, int]] = {}

    def add(self, node: int, prefix: Any, tokens: int) -> None:
        """Cache a node's prefix of `tokens` tokens; the least recently used are evicted."""
        if node == 0:
            self._root = prefix
            return
        self._cached.pop(node, None)
        self._cached[node] = (prefix, tokens)
        while self._cached and sum(size for _, size in self._cached.values()) > self._budget:
            del self._cached[next(iter(self._cached))]

    def nearest(self, path: Sequence[int]) -> tuple[int, Any]:
        """Position in a root-to-node path of the deepest node with a prefix, and the prefix (the root's may be None)."""
        for place in range(len(path) - 1, 0, -1):
            if path[place] in self._cached:
                self._cached[path[place]] = found = self._cached.pop(path[place])
                return place, found[0]
        return 0, self._root
