"""What a step takes of a pool that is there from the start, such as stored pairs or episodes."""

from __future__ import annotations

from stages.seeding import permutation


class Dealer:
    """Deals places of a pool of `size`, `count` in each step, every one of them once a pass, in an order drawn for each pass."""

    def __init__(self, size: int, count: int, *key: object) -> None:
        self.size, self.count, self.key = size, count, key
        self._orders: dict[int, list[int]] = {}

    def _order(self, number: int) -> list[int]:
        if number not in self._orders:
            self._orders = {**dict(list(self._orders.items())[-1:]), number: permutation(range(self.size), *self.key, number)}
        return self._orders[number]

    def dealt(self, step: int) -> list[int]:
        """Places of a step, whatever was dealt before."""
        if not self.count:
            return []
        return [self._order(place // self.size)[place % self.size] for place in range(step * self.count, (step + 1) * self.count)]
