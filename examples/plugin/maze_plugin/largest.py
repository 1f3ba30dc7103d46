"""largest: each entry takes the largest of all models' changes."""

from __future__ import annotations

from stages.plugins import Card, DeltaMethod, Positive, Section


class LargestSettings(Section):
    """merge.settings in params.yaml."""

    scale: Positive = 1.0
    """Factor on the merged delta."""


class Largest(DeltaMethod):
    card = Card(
        slug="largest",
        title="Largest change",
        paper="a template",
        equation="theta = theta_0 + scale * t_k, k = argmax_i |w_i t_i| at each entry",
        assumptions="the model that changed an entry most knows best",
        reduces_to="one model and scale 1: that model",
        tested_by="tests/test_plugin_template.py",
        switch="merge.method: largest",
    )
    Settings = LargestSettings

    def merged_delta(self, deltas, params, rng, totals):
        """deltas [N, *shape] -> [*shape]."""
        import torch

        weights = torch.tensor(params.weights).reshape(-1, *[1] * (deltas.dim() - 1))
        weighted = deltas * weights
        kept = weighted.abs().argmax(0, keepdim=True)
        return params.settings.scale * weighted.gather(0, kept)[0]
