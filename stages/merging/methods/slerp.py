"""slerp: spherical interpolation between two models, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.merging.contract import MergeError, MergeParams, Merger
from stages.merging.layers import layer_index
from stages.records.card import Card
from stages.runtime.validation import Section, Share

if TYPE_CHECKING:
    from torch import Generator, Tensor


def at_depth(values: Sequence[float], depth: float) -> float:
    """Linear interpolation of evenly spaced `values` at `depth` in [0, 1]."""
    if len(values) == 1:
        return values[0]
    position = depth * (len(values) - 1)
    lower = min(int(position), len(values) - 2)
    share = position - lower
    return values[lower] * (1.0 - share) + values[lower + 1] * share


class SlerpOptions(Section):
    """slerp."""

    t: Share = 0.5
    """0: the first model; 1: the second."""
    gradient: list[Share] = []
    """Values of t over depth, first layer to last, evenly spaced and interpolated. Empty: t everywhere."""
    dot_threshold: Share = 0.9995
    """Above this cosine, weights are interpolated linearly."""


class Settings(Section):
    slerp: SlerpOptions = SlerpOptions()


class Slerp(Merger):
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
    Settings = Settings
    weighted = False

    def check(self, params: MergeParams) -> None:
        if (models := len(params.weights)) != 2:
            raise MergeError(f"merge.method slerp merges exactly two models, and `domains` lists {models}; choose another method")

    def merge_tensor(
        self,
        name: str,
        base: Tensor | None,
        models: Sequence[Tensor],
        params: MergeParams,
        rng: Generator,
        totals: Mapping[str, Any] | None,
    ) -> Tensor:
        t = params.settings.slerp.t
        if params.settings.slerp.gradient:
            t = at_depth(params.settings.slerp.gradient, (layer_index(name) or 0) / max(params.layers - 1, 1))
        first, second = models[0].float(), models[1].float()
        norms = float(first.norm()) * float(second.norm())
        cosine = max(-1.0, min(1.0, float((first * second).sum()) / norms)) if norms > 0 else 1.0
        if abs(cosine) >= params.settings.slerp.dot_threshold:
            return (1.0 - t) * first + t * second
        angle = math.acos(cosine)
        return (math.sin((1.0 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle)


MERGER = Slerp()
