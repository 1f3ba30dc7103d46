"""S3: clusters of calls by the words of their prompts, their tool and the shape of their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stages.conversion.settings import ClusterCalls

SAMPLE = 4000
"""Calls of which the silhouette is computed."""


def answer_shape(response: str) -> str:
    """The keys of a JSON answer, else its first word: the tool that it calls."""
    try:
        value = json.loads(response)
    except ValueError:
        return "tool_" + (response.split() or [""])[0].lower()
    return "json_" + "_".join(sorted(value)) if isinstance(value, dict) else "json"


def features_text(call: dict[str, Any], answered: bool = True) -> str:
    """What a call is clustered by; answered=False: what is known before the answer, for the router."""
    words = call["prompt"][-1]["content"]
    return f"{words} {answer_shape(call['response'])}" if answered else words


def _order(call: dict[str, Any]) -> str:
    text = json.dumps([call["prompt"], call["response"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Clusters:
    """Fitted clusters. `centroids` [K, V] of unit length over `vectorizer`'s words; `served`: those with enough calls."""

    vectorizer: Any
    centroids: np.ndarray
    sizes: list[int]
    silhouette: float | None
    served: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.sizes)

    def nearest(self, calls: Sequence[dict[str, Any]], answered: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Cluster [N] and cosine similarity to its centroid [N] of each call."""
        vectors = self.vectorizer.transform([features_text(call, answered) for call in calls])
        similarity = np.asarray(vectors @ self.centroids.T)
        return similarity.argmax(1), similarity.max(1)

    def resembled(self, calls: Sequence[dict[str, Any]], min_similarity: float) -> np.ndarray:
        """The cluster [N] whose centroid each call's prompt is nearest to; -1: it is less similar than `min_similarity`."""
        if not calls:
            return np.zeros(0, dtype=int)
        nearest, similarity = self.nearest(calls)
        return np.where(similarity >= min_similarity, nearest, -1)


def fit_clusters(calls: Sequence[dict[str, Any]], settings: ClusterCalls) -> tuple[Clusters, np.ndarray]:
    """The clusters, and the cluster of each call [N] in the order given. The result does not depend on that order.

    k-means with 10 restarts on tf-idf; K maximises the mean silhouette s(i) = (b - a) / max(a, b). With fewer calls than K, or
    one distinct call, there is one cluster, whose silhouette is not defined.
    """
    from sklearn.cluster import KMeans
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.metrics import silhouette_score

    order = sorted(range(len(calls)), key=lambda place: (_order(calls[place]), place))
    vectorizer = TfidfVectorizer(token_pattern=r"[^\s]+", sublinear_tf=True)
    vectors = vectorizer.fit_transform([features_text(calls[place]) for place in order])
    distinct = len({features_text(call) for call in calls})
    low, high = (settings.k, settings.k) if settings.k else settings.k_range
    best: tuple[float, Any] | None = None
    for k in range(low, min(high, distinct - 1) + 1) if distinct > 2 else ():
        if k < 2:
            continue
        fitted = KMeans(n_clusters=k, n_init=10, random_state=settings.seed).fit(vectors)
        score = float(silhouette_score(vectors, fitted.labels_, sample_size=min(SAMPLE, len(order)), random_state=settings.seed))
        if best is None or score > best[0] + 1e-9:
            best = score, fitted
    if best is None:
        labels, silhouette = np.zeros(len(order), dtype=int), None
        means = np.asarray(vectors.mean(0))
    else:
        silhouette, labels, means = best[0], best[1].labels_, best[1].cluster_centers_
    # Numbered by size, then by first member, so that numbers do not depend on the restarts.
    first = {int(label): int(np.flatnonzero(labels == label)[0]) for label in set(labels.tolist())}
    ranked = sorted(first, key=lambda label: (-int((labels == label).sum()), first[label]))
    number = {label: place for place, label in enumerate(ranked)}
    found = np.zeros(len(calls), dtype=int)
    for place, label in zip(order, labels.tolist(), strict=True):
        found[place] = number[label]
    centroids = means[ranked] / np.maximum(np.linalg.norm(means[ranked], axis=1, keepdims=True), 1e-12)
    sizes = np.bincount(found, minlength=len(ranked)).tolist()
    served = [cluster for cluster, size in enumerate(sizes) if size >= settings.min_cluster]
    return Clusters(vectorizer, centroids, sizes, silhouette, served), found
