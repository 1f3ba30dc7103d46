"""slerp: spherical interpolation between two models, tensor by tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Generator, Tensor

from stages.algorithms.card import Card
from stages.merging.settings import MergeError, MergeSettings

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def layer_index(name: str) -> int | None:
    """Layer a tensor belongs to, from the first number in its dotted name; None outside the layers."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def at_depth(values: Sequence[float], depth: float) -> float:
    """Linear interpolation of evenly spaced `values` at `depth` in [0, 1]."""
    if len(values) == 1:
        return values[0]
    position = depth * (len(values) - 1)
    lower = min(int(position), len(values) - 2)
    share = position - lower
    return values[lower] * (1.0 - share) + values[lower + 1] * share


class Slerp:
    """theta = sin((1-t) O)/sin(O) theta_1 + sin(t O)/sin(O) theta_2, O the angle between the flattened tensors.

    Nearly parallel or opposite tensors (|cos O| above dot_threshold) and all-zero ones are interpolated linearly instead.
    With `slerp.gradient`, t depends on depth: the list is interpolated at layer/(layers - 1), 0 for tensors outside the layers.
    """

    card = Card(
        slug="slerp",
        title="Spherical linear interpolation",
        paper="Shoemake 1985; as used by mergekit (arXiv 2403.13257)",
        equation="theta = [sin((1-t)O) theta_1 + sin(tO) theta_2] / sin O, cos O = theta_1.theta_2 / (|theta_1||theta_2|)",
        assumptions="Exactly two models.",
        reduces_to="t = 0 or 1: the first or second model. Nearly parallel tensors: linear interpolation.",
        tested_by="tests/merging/test_slerp.py",
        switch="merge.method: slerp",
    )
    needs_base = False
    parameters: tuple[str, ...] = ("slerp",)

    def scan(self, name: str, base: Tensor | None, models: Sequence[Tensor], params: MergeSettings) -> Mapping[str, Any] | None:
        return None

    def merge_tensor(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeSettings,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Tensor:
        if len(models) != 2:
            raise MergeError(f"merge.method slerp joins exactly two models, and {len(models)} were given")
        t = params.slerp.t
        if params.slerp.gradient:
            t = at_depth(params.slerp.gradient, (layer_index(name) or 0) / max(params.layers - 1, 1))
        first, second = models[0].float(), models[1].float()
        norms = float(first.norm()) * float(second.norm())
        cosine = max(-1.0, min(1.0, float((first * second).sum()) / norms)) if norms > 0 else 1.0
        if abs(cosine) > params.slerp.dot_threshold:
            return (1.0 - t) * first + t * second
        angle = math.acos(cosine)
        return (math.sin((1.0 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle)
