"""Counts trained tokens: each token of the batch's mask exactly once per epoch, and no other token, unless observations are
trained as a stream of their own. Tokens of an optimiser step that was skipped are accounted for, but not trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stages.records.episode import Owner

UNTRAINED = {"forced": Owner.FORCED, "evidence": Owner.EVIDENCE, "guidance": Owner.GUIDANCE}
"""Metric -> the owner of tokens that are never trained, and counted where there are some."""

COUNTS = ("policy_tokens", "environment_tokens", "external_tokens", "observation_tokens", "dropped_tokens", "skipped_tokens")


class Ledger:
    """Opened with the mask of an epoch's tokens to train, informed of every row that is trained or skipped, closed at the epoch's
    end."""

    def __init__(self) -> None:
        self.policy_tokens = 0
        """Policy tokens trained so far, repeats in later epochs included."""
        self.environment_tokens = 0
        """Other tokens trained so far; anything but 0 is an error."""
        self.external_tokens = 0
        """Tokens of external episodes trained so far."""
        self.observation_tokens = 0
        """Tokens of the environment trained so far on purpose (rl.observation)."""
        self.dropped_tokens = 0
        """Policy tokens left out on purpose: those of dropped groups."""
        self.skipped_tokens = 0
        """Policy tokens of optimiser steps that the KL stop skipped (rl.loss.kl_stop)."""
        self.untrained_tokens: dict[str, int] = {}
        """Tokens so far of each owner in UNTRAINED, in every epoch."""
        self._expected: Tensor | None = None
        self._external: Tensor | None = None
        self._observed: Tensor | None = None
        self._counts: Tensor | None = None
        self._skipped: Tensor | None = None

    @property
    def is_open(self) -> bool:
        return self._counts is not None

    def open(
        self,
        mask: Tensor,
        dropped: Tensor | None = None,
        external: Tensor | None = None,
        observed: Tensor | None = None,
        owner: Tensor | None = None,
    ) -> None:
        """Begin an epoch over the tokens in `mask` [B, T] bool.

        dropped: [B] bool, rows skipped on purpose. external: [B, T] bool, tokens of the mask that the policy did not write.
        observed: [B, T] bool, tokens beside the mask that are trained, too: the environment's. owner: [B, T] int64, who wrote
        each token, where some have an owner in UNTRAINED. Raises RuntimeError if one of these is among the trained tokens.
        """
        trained = mask if observed is None else mask | observed
        self._expected = trained if dropped is None else trained & ~dropped[:, None]
        self._counts, self._skipped = (torch.zeros(mask.shape, dtype=torch.uint8) for _ in range(2))
        self._external, self._observed = external, observed
        self.dropped_tokens += int((mask & ~self._expected).sum())
        for name, one in UNTRAINED.items() if owner is not None else ():
            written = owner == int(one)
            if wrong := int((written & trained).sum()):
                raise RuntimeError(f"{wrong} {name} tokens are among those to train; this is a bug in the batch's mask")
            if count := int(written.sum()):
                self.untrained_tokens[name] = self.untrained_tokens.get(name, 0) + count

    def record(self, rows: Tensor, mask: Tensor) -> None:
        """Count the tokens in mask [b, t] bool of rows [b] int64 as trained; t are the first of the T tokens."""
        self._add(self._counts, rows, mask)

    def skip(self, rows: Tensor, mask: Tensor) -> None:
        """Count these tokens, as in `record`, as those of an optimiser step that was skipped."""
        self._add(self._skipped, rows, mask)

    @staticmethod
    def _add(counts: Tensor | None, rows: Tensor, mask: Tensor) -> None:
        if counts is None:
            raise RuntimeError("the ledger is not open: open() it with the epoch's policy tokens first")
        rows, mask = rows.cpu(), mask.cpu()
        counts[rows, : mask.shape[1]] += mask.to(torch.uint8)

    def close(self, complete: bool = True) -> None:
        """End the epoch. complete=False: it was cut short, so tokens may be missing, but none may be repeated.

        Raises RuntimeError if a policy token was not trained or skipped exactly once, or another token was.
        """
        if self._counts is None or self._skipped is None or self._expected is None:
            raise RuntimeError("the ledger is not open")
        used = self._counts + self._skipped
        unexpected = int(used[~self._expected].sum())
        missing = int((used[self._expected] == 0).sum()) if complete else 0
        repeated = int((used > 1).sum())
        beside = torch.zeros_like(self._expected)
        for name, stream in (("external_tokens", self._external), ("observation_tokens", self._observed)):
            if stream is not None:
                own = self._expected & stream
                setattr(self, name, getattr(self, name) + int(self._counts[own].sum()))
                beside |= own
        self.policy_tokens += int(self._counts[self._expected & ~beside].sum())
        self.skipped_tokens += int(self._skipped[self._expected & ~beside].sum())
        self.environment_tokens += unexpected
        self._counts = self._skipped = self._expected = self._external = self._observed = None
        if unexpected or missing or repeated:
            raise RuntimeError(
                f"training must use every policy token once per epoch and no other token: {missing} missing, {repeated} used "
                f"more than once, {unexpected} tokens of prompt or environment trained; this is a bug in the training loop"
            )

    def absorb(self, other: Ledger) -> None:
        """Add what `other` has counted, and set its counts to 0. Raises RuntimeError while it is open."""
        if other.is_open:
            raise RuntimeError("the other ledger is open: close() it first")
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
            setattr(other, name, 0)
        for name, count in other.untrained_tokens.items():
            self.untrained_tokens[name] = self.untrained_tokens.get(name, 0) + count
        other.untrained_tokens = {}

    def metrics(self) -> dict[str, float]:
        streams = {"external": self.external_tokens, "observation": self.observation_tokens}
        return {
            "ledger/policy_tokens_trained": self.policy_tokens,
            "ledger/environment_tokens_trained": self.environment_tokens,
            "ledger/policy_tokens_dropped": self.dropped_tokens,
            **({"ledger/policy_tokens_skipped": self.skipped_tokens} if self.skipped_tokens else {}),
            **{f"ledger/{name}_tokens_trained": count for name, count in streams.items() if count},
            **{f"ledger/{name}_tokens_untrained": count for name, count in self.untrained_tokens.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
