"""Steps shared by all delta methods: task vectors, sparsify, weight, elect a sign, sum, divide, scale, add the base.

t_i = theta_i - theta_0 in float32. With sign election g = +1 where sum_i w_i t_i >= 0, else -1; only entries of sign g are kept
(exact zeros drop out) and the divisor is the sum of the kept weights per entry (0 counts as 1); without it, sum_i w_i.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.merging.contract import MergeError, MergeParams, Merger

if TYPE_CHECKING:
    from torch import Generator, Tensor


class DeltaMethod(Merger):
    """Base of merge methods that add a combination of task vectors to the base model."""

    needs_base = True
    weighted = True

    def merge_tensor(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Tensor:
        """The base plus `merged_delta`. Raises MergeError without a base."""
        deltas = task_vectors(name, base, models)
        assert base is not None
        return self.merged_delta(deltas, params, rng, totals).add_(base.float())

    @abstractmethod
    def merged_delta(self, deltas: Tensor, params: MergeParams, rng: Generator, totals: Mapping[str, Any] | None) -> Tensor:
        """deltas [N, *shape] -> [*shape], added to the base; `totals`: sums of the first pass, if any."""


def task_vectors(name: str, base: Tensor | None, models: Sequence[Tensor]) -> Tensor:
    """t: [N, *shape] float32, model i minus base. Raises MergeError without a base."""
    import torch

    if base is None:
        raise MergeError(f"tensor {name}: this merge method needs a base model to take deltas against (merge.base)")
    origin = base.float()
    deltas = origin.new_empty(len(models), *origin.shape)
    for delta, model in zip(deltas, models, strict=True):
        torch.sub(model.float(), origin, out=delta)
    return deltas


def weight_column(weights: Sequence[float], like: Tensor) -> Tensor:
    """Weights as [N, 1, ..., 1], to broadcast over `like`: [N, *shape]."""
    import torch

    return torch.tensor(weights, dtype=torch.float32).reshape(-1, *[1] * (like.dim() - 1))


def combine(deltas: Tensor, weights: Sequence[float], *, elect: bool, normalize: bool, lam: float) -> Tensor:
    """lam * sum_i w_i t_i (/ divisor): deltas [N, *shape] -> [*shape]; `elect` keeps only entries of the elected sign."""
    import torch

    # Masks are 0 and 1 in float32: PyTorch compares and selects several times faster so than with bool.
    weighted = deltas * weight_column(weights, deltas)
    if elect:
        sign = weighted.sum(dim=0).ge_(0).mul_(2).sub_(1)
        divisor = torch.zeros_like(sign)
        for part, weight in zip(weighted, weights, strict=True):
            kept = torch.mul(part, sign).gt_(0)
            part.mul_(kept)
            divisor.add_(kept.mul_(weight))
        divisor.add_(torch.eq(divisor, 0, out=sign))
    else:
        divisor = torch.tensor(weights, dtype=torch.float32).sum()
    total = weighted.sum(dim=0)
    return (total.div_(divisor) if normalize else total).mul_(lam)


def kept_count(density: float, entries: int) -> int:
    """int(density * entries), robust to rounding (0.29 * 100), and at least 1 so that no tensor loses its whole delta."""
    return min(entries, max(1, int(density * entries + 1e-9)))
