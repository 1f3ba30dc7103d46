"""Per-token estimators of KL(policy || frozen reference) on the policy's own samples (Schulman, "Approximating KL divergence").

With d = log pi - log pi_ref: k1 = d (unbiased value; in a loss its expected gradient is zero, so it only adds noise there),
k2 = d^2 / 2 (its gradient is the gradient of the KL), k3 = exp(-d) - 1 + d (unbiased, never negative; biased gradient).
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, logprobs_ref: Tensor, kind: str) -> Tensor:
    """The estimator `kind` at each token, shape of the inputs."""
    d = logprobs - logprobs_ref
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * d * d
    if kind == "k3":
        return torch.exp(-d) - 1 + d
    raise ValueError(f"unknown rl.loss.kl_estimator '{kind}'; known: k1, k2, k3")
