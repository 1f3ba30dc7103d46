"""Diagnostics of a merge's task vectors (sparsity, overlap, agreement) and the distance between two merges.

One pass over the tensors, integers and sums only. "Changed" means |t_i| > eps_i with t_i = model i - base in float32. In bfloat16
the spacing of weights above 2**-9 exceeds 1e-5, so there "changed" means that any bit differs; `changed_by_eps` shows the
sensitivity to eps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.merging.contract import blocks
from stages.merging.deltas import task_vectors
from stages.merging.streaming import Inputs, ProgressFactory, silent

EPS_LADDER = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
PIECE = 1 << 22
"""Entries of a tensor that are measured at once: with their temporaries, about 100 MB for three models."""
_LAYER_GROUP = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+)\.([^.]+)")


def layer_group(name: str) -> str:
    """Group of a tensor in the per-layer table, e.g. `layers.0.self_attn`; outside the layers its module, e.g. `embed_tokens`."""
    found = _LAYER_GROUP.search(name)
    if found:
        part = "norm" if "norm" in found.group(2) or found.group(2).startswith("ln") else found.group(2)
        return f"{found.group(1)}.{part}"
    parts = name.split(".")
    return parts[-2] if len(parts) > 1 else parts[0]


class _Sums:
    """Sums over tensors, for N models; pairs in the order of `combinations(range(N), 2)`."""

    def __init__(self, models: int) -> None:
        self.models, self.entries = models, 0
        pairs = models * (models - 1) // 2
        self.zeros = torch.zeros(models, dtype=torch.int64)
        self.unique = torch.zeros(models, dtype=torch.int64)
        self.squares = torch.zeros(models, dtype=torch.float64)
        self.largest = torch.zeros(models)
        self.ladder = torch.zeros(models, len(EPS_LADDER), dtype=torch.int64)
        self.histogram = torch.zeros(models + 1, dtype=torch.int64)
        self.both = torch.zeros(pairs, dtype=torch.int64)
        self.agree = torch.zeros(pairs, dtype=torch.int64)
        self.dots = torch.zeros(pairs, dtype=torch.float64)

    def add(self, deltas: Tensor, changed: Tensor) -> Tensor:
        """Add one tensor: deltas [N, n], changed [N, n] bool. Returns how many models change each entry, [n]."""
        count = changed.sum(dim=0)
        magnitude = deltas.abs()
        self.entries += deltas.shape[1]
        self.zeros += (deltas == 0).sum(dim=1)
        self.unique += (changed & (count == 1)).sum(dim=1)
        self.squares += deltas.square().sum(dim=1, dtype=torch.float64)
        if deltas.shape[1]:
            self.largest = torch.maximum(self.largest, magnitude.amax(dim=1))
        self.ladder += torch.stack([(magnitude > eps).sum(dim=1) for eps in EPS_LADDER], dim=1)
        self.histogram += torch.bincount(count, minlength=self.models + 1)
        for pair, (a, b) in enumerate(combinations(range(self.models), 2)):
            both = changed[a] & changed[b]
            self.both[pair] += both.sum()
            self.agree[pair] += (both & (deltas[a].sign() == deltas[b].sign())).sum()
            self.dots[pair] += (deltas[a] * deltas[b]).sum(dtype=torch.float64)
        return count


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _describe_models(names: Sequence[str], sums: _Sums, changed: Tensor) -> dict[str, Any]:
    return {
        name: {
            "changed": int(changed[i]),
            "changed_fraction": _share(int(changed[i]), sums.entries),
            "unique_fraction": _share(int(sums.unique[i]), int(changed[i])),
            "sparsity": _share(int(sums.zeros[i]), sums.entries),
            "norm": float(sums.squares[i]) ** 0.5,
            "largest": float(sums.largest[i]),
            "changed_by_eps": {f"{eps:g}": _share(int(sums.ladder[i, k]), sums.entries) for k, eps in enumerate(EPS_LADDER)},
        }
        for i, name in enumerate(names)
    }


def _describe_pairs(names: Sequence[str], sums: _Sums, changed: Tensor) -> list[dict[str, Any]]:
    described = []
    for pair, (a, b) in enumerate(combinations(range(len(names)), 2)):
        both = int(sums.both[pair])
        described.append(
            {
                "a": names[a],
                "b": names[b],
                "overlap": both,
                "jaccard": _share(both, int(changed[a] + changed[b]) - both),
                "sign_agreement": _share(int(sums.agree[pair]), both),
                "cosine": _share(float(sums.dots[pair]), float(sums.squares[a] * sums.squares[b]) ** 0.5),
            }
        )
    return described


def _pieces(inputs: Inputs, name: str) -> Iterator[Tensor]:
    """The task vectors of one tensor, [N, n] float32, n entries at a time."""
    base, models = inputs.load(name)
    for _, origin, parts in blocks(base, models, PIECE):
        yield task_vectors(name, origin, parts)


def measure(
    names: Sequence[str], models: Sequence[Path], base: Path, eps: Sequence[float], progress: ProgressFactory = silent
) -> dict[str, Any]:
    """Diagnostics of the task vectors model - base, ready for JSON; `names`, `eps`: of the models.

    models: per model the changed fraction, the fraction of its changes that no other model made, sparsity (exact zeros), norm,
    largest entry; pairs: Jaccard index of the changed sets, sign agreement on their overlap, cosine of the task vectors (null
    if the denominator is 0); histogram[c]: entries that exactly c models changed; groups: changed fractions by layer and module.
    """
    inputs = Inputs.open(models, base)
    sums, limits = _Sums(len(models)), torch.tensor(list(eps))[:, None]
    changed_total = torch.zeros(len(models), dtype=torch.int64)
    groups: dict[str, dict[str, Any]] = {}
    mergeable = inputs.mergeable()
    with progress("diagnostics", len(mergeable), "tensor") as bar:
        for name in mergeable:
            row = groups.setdefault(layer_group(name), {"entries": 0, "changed": [0] * len(models), "shared": 0})
            for deltas in _pieces(inputs, name):
                changed = deltas.abs() > limits
                count = sums.add(deltas, changed)
                changed_total += changed.sum(dim=1)
                row["entries"] += deltas.shape[1]
                row["changed"] = [total + int(new) for total, new in zip(row["changed"], changed.sum(dim=1), strict=True)]
                row["shared"] += int((count >= 2).sum())
            bar.advance()
    inputs.close()
    return {
        "eps": eps[0] if len(set(eps)) == 1 else list(eps),
        "entries": sums.entries,
        "models": _describe_models(names, sums, changed_total),
        "pairs": _describe_pairs(names, sums, changed_total),
        "histogram": sums.histogram.tolist(),
        "groups": [
            {
                "group": group,
                "entries": row["entries"],
                "changed_fraction": {
                    name: _share(part, row["entries"]) for name, part in zip(names, row["changed"], strict=True)
                },
                "shared_fraction": _share(row["shared"], row["entries"]),
            }
            for group, row in groups.items()
        ],
    }


def relative_distance(a: Path, b: Path, base: Path) -> float | None:
    """|theta_a - theta_b| / |theta_b - theta_0| over all tensors; None if b is the base."""
    inputs = Inputs.open([a, b], base)
    distance = norm = 0.0
    for name in inputs.mergeable():
        for deltas in _pieces(inputs, name):
            distance += float((deltas[0] - deltas[1]).square().sum(dtype=torch.float64))
            norm += float(deltas[1].square().sum(dtype=torch.float64))
    inputs.close()
    return _share(distance**0.5, norm**0.5)
