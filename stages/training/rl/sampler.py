"""Which items of a fixed pool, such as preference pairs or offline episodes, each step uses."""

from __future__ import annotations

from stages.seeding import permutation


class EpochSampler:
    """Batches of `count` indices into a pool of `size`: each index once per epoch, in an order drawn anew for each epoch."""

    def __init__(self, size: int, count: int, *key: object) -> None:
        self.size, self.count, self.key = size, count, key
        self._orders: dict[int, list[int]] = {}

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: permutation(range(self.size), *self.key, epoch)}
        return self._orders[epoch]

    def batch(self, step: int) -> list[int]:
        """The indices of a step, independent of earlier calls."""
        if not self.count:
            return []
        return [self._order(place // self.size)[place % self.size] for place in range(step * self.count, (step + 1) * self.count)]
