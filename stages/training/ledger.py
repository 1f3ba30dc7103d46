"""Counts, token by token, what training has used: every token of the batch's mask exactly once per epoch, every other never. The
policy's own tokens and those of external episodes are counted apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Ledger:
    """Opened with the policy tokens of an epoch, told of every row trained, closed at the epoch's end."""

    def __init__(self) -> None:
        self.policy_tokens = 0
        """Policy tokens trained so far, repeats in later epochs included."""
        self.environment_tokens = 0
        """Tokens of anybody else that were trained; anything but 0 is an error."""
        self.external_tokens = 0
        """Tokens of external episodes trained so far."""
        self.dropped_tokens = 0
        """Policy tokens left out on purpose: those of dropped dead groups."""
        self._expected: Tensor | None = None
        self._external: Tensor | None = None
        self._counts: Tensor | None = None

    @property
    def is_open(self) -> bool:
        return self._counts is not None

    def open(self, mask: Tensor, dropped: Tensor | None = None, external: Tensor | None = None) -> None:
        """Begin an epoch over tokens `mask` [B, T] bool; `dropped` [B] bool: rows left out on purpose; `external` [B, T] bool:
        which of the tokens are not the policy's own."""
        self._expected = mask if dropped is None else mask & ~dropped[:, None]
        self._counts = torch.zeros(mask.shape, dtype=torch.uint8)
        self._external = external
        self.dropped_tokens += int((mask & ~self._expected).sum())

    def saw(self, rows: Tensor, mask: Tensor) -> None:
        """Rows [b] int64 were trained where mask [b, t] bool, t being the first t of the T tokens."""
        if self._counts is None:
            raise RuntimeError("the ledger is not open: open() it with the epoch's policy tokens first")
        rows, mask = rows.cpu(), mask.cpu()
        self._counts[rows, : mask.shape[1]] += mask.to(torch.uint8)

    def close(self, whole: bool = True) -> None:
        """End the epoch. `whole` False: it was cut short, so tokens may be missing, but none may be there twice.

        Raises RuntimeError if a policy token was not trained exactly once, or another token was trained.
        """
        if self._counts is None or self._expected is None:
            raise RuntimeError("the ledger is not open")
        strangers = int(self._counts[~self._expected].sum())
        missing = int((self._counts[self._expected] == 0).sum()) if whole else 0
        repeated = int((self._counts > 1).sum())
        external = 0 if self._external is None else int(self._counts[self._expected & self._external].sum())
        self.policy_tokens += int(self._counts[self._expected].sum()) - external
        self.external_tokens += external
        self.environment_tokens += strangers
        self._counts = self._expected = self._external = None
        if strangers or missing or repeated:
            raise RuntimeError(
                f"training must use every policy token once per epoch and no other: {missing} were left out, {repeated} used "
                f"more than once, {strangers} tokens of the prompt or the environment trained; this is a fault of the loop"
            )

    def metrics(self) -> dict[str, float]:
        """What MLflow gets."""
        external = {"ledger/external_tokens_trained": self.external_tokens} if self.external_tokens else {}
        return {
            "ledger/policy_tokens_trained": self.policy_tokens,
            "ledger/environment_tokens_trained": self.environment_tokens,
            "ledger/policy_tokens_dropped": self.dropped_tokens,
            **external,
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
