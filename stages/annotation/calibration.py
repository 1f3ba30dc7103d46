"""Calibration of the step-value model."""

from __future__ import annotations

from typing import Any

import numpy as np

BINS = 10
"""Bins of the reliability table."""


def calibration(
    predicted: np.ndarray, shares: np.ndarray, counts: np.ndarray, baseline: float, within: tuple[float, float] = (0.0, 1.0)
) -> dict[str, Any]:
    """Calibration of predictions [M] against success shares [M] of `counts` [M] rollouts; every rollout has the same weight.
    Values are first rescaled from the bounds `within` to [0, 1].

    brier: mean squared error to single outcomes; mse: to the shares; baseline_mse: of the constant `baseline`, the training mean;
    explained_variance: 1 - Var(share - prediction) / Var(share), 0 if all shares are equal; explainable: what that would be with
    the true values, since shares of few rollouts vary anyway (of histories with at least 2; exact if returns are 0 or 1, else too
    low); ece: expected calibration error over `bins`, weighted by rollouts; correlation: Pearson's, 0 if either is constant.
    """
    low, width = within[0], within[1] - within[0]
    predicted, shares, baseline = (predicted - low) / width, (shares - low) / width, (baseline - low) / width
    weight = counts / counts.sum()
    clipped = predicted.clip(0.0, 1.0)

    def variance(values: np.ndarray) -> float:
        return float((weight * (values - (weight * values).sum()) ** 2).sum())

    spread, spread_predicted = variance(shares), variance(predicted)
    covariance = float((weight * (shares - (weight * shares).sum()) * (predicted - (weight * predicted).sum())).sum())
    bins = []
    bin_of = np.minimum((clipped * BINS).astype(int), BINS - 1)
    for number in range(BINS):
        members = bin_of == number
        total = float(counts[members].sum())
        if total:
            share = weight[members] / weight[members].sum()
            mean_predicted, mean_share = float((share * clipped[members]).sum()), float((share * shares[members]).sum())
            bins.append({"low": number / BINS, "predicted": mean_predicted, "observed": mean_share, "count": total})
    defined = spread > 1e-12 and spread_predicted > 1e-12
    several = counts >= 2
    of_several = counts[several] / max(float(counts[several].sum()), 1.0)
    mean = float((of_several * shares[several]).sum())
    spread_of_several = float((of_several * (shares[several] - mean) ** 2).sum())
    noise = float((of_several * shares[several] * (1 - shares[several]) / (counts[several] - 1)).sum())
    return {
        "nodes": len(predicted),
        "rollouts": float(counts.sum()),
        "mean_predicted": float((weight * predicted).sum()),
        "mean_observed": float((weight * shares).sum()),
        "brier": float((weight * (shares * (1 - clipped) ** 2 + (1 - shares) * clipped**2)).sum()),
        "mse": float((weight * (shares - predicted) ** 2).sum()),
        "baseline_mse": float((weight * (shares - baseline) ** 2).sum()),
        "explained_variance": 1.0 - variance(shares - predicted) / spread if spread > 1e-12 else 0.0,
        "explainable": max(0.0, 1.0 - noise / spread_of_several) if spread_of_several > 1e-12 else 0.0,
        "correlation": covariance / (spread * spread_predicted) ** 0.5 if defined else 0.0,
        "ece": sum(item["count"] * abs(item["observed"] - item["predicted"]) for item in bins) / float(counts.sum()),
        "bins": bins,
    }
