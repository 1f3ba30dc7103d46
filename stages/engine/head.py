"""From hidden states to logits: the model's output layer, with what some families do to its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Keys of a configuration that the output layer's logits are multiplied by (Cohere, Falcon-H1)."""
MULTIPLIED = ("hyperclovax",)
"""Model types that multiply by `logits_scaling`; the others that have it divide by it (Granite)."""
CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of the soft cap c, logits = c tanh(logits / c) (Gemma 2, RecurrentGemma)."""


def scale_and_cap(config: Any) -> tuple[float, float | None]:
    """What the output layer's logits are multiplied by, and the soft cap after that, if there is one."""
    scale = 1.0
    for name in FACTORS:
        if (factor := getattr(config, name, None)) is not None:
            scale *= factor
    if divisor := getattr(config, "logits_scaling", None):
        scale *= divisor if config.model_type in MULTIPLIED else 1 / divisor
    return scale, next((cap for name in CAPS if (cap := getattr(config, name, None))), None)


def finished_logits(model: Any, raw: Tensor) -> Tensor:
    """The model's logits, given the output layer's, [..., V]. Loading a policy checks them against the model's own
    (`stages.agent.policy.load_policy`)."""
    scale, cap = scale_and_cap(getattr(model, "config", None))
    if scale != 1.0:
        raw = raw * scale
    return raw if cap is None else cap * torch.tanh(raw / cap)


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Logits [..., V] for hidden states [..., D] after the final norm."""
    return finished_logits(model, model.get_output_embeddings()(hidden))
