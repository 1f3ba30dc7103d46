"""S6: the router. A specialist answers calls that resemble its cluster, if it is sure and its answer has a known shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.agent.policy import Policy, load_policy
from stages.conversion.clusters import Clusters, answer_shape
from stages.conversion.specialise import Answer, answers
from stages.records.episode import read_json, write_json

LARGE = "llm"


@dataclass(frozen=True)
class Specialist:
    """Of one cluster. `threshold`: least confidence; `shapes`: of the answers that it learned from; `rho`: cost(S) / cost(T)."""

    cluster: int
    candidate: str
    threshold: float
    shapes: tuple[str, ...]
    rho: float


@dataclass(frozen=True)
class Routed:
    """A call's answer, and who gave it: LARGE, or a cluster's specialist. `cluster`: the nearest."""

    by: str
    cluster: int
    answer: Answer | None


class CallRouter:
    """Saved in `folder` with its specialists, one model folder each."""

    def __init__(self, folder: Path, clusters: Clusters, specialists: Sequence[Specialist], min_similarity: float) -> None:
        self.folder, self.clusters, self.min_similarity = folder, clusters, min_similarity
        self.specialists = {one.cluster: one for one in specialists}
        self._loaded: dict[int, Policy] = {}

    def accepts(self, specialist: Specialist, answer: Answer) -> bool:
        return answer.confidence >= specialist.threshold and answer_shape(answer.text) in specialist.shapes

    def route(self, calls: Sequence[dict[str, Any]], max_length: int, max_tokens: int) -> list[Routed]:
        """Who answers each call. The large model's answers are not drawn here."""
        if not calls:
            return []
        nearest, similarity = self.clusters.nearest(calls)
        found = [Routed(LARGE, int(cluster), None) for cluster in nearest]
        for number, specialist in self.specialists.items():
            places = np.flatnonzero((nearest == number) & (similarity >= self.min_similarity)).tolist()
            if not places:
                continue
            drawn = answers(self.policy(number), [calls[place] for place in places], max_length, max_tokens)
            for place, answer in zip(places, drawn, strict=True):
                if self.accepts(specialist, answer):
                    found[place] = Routed(f"specialist {number}", number, answer)
        return found

    def policy(self, cluster: int) -> Policy:
        if cluster not in self._loaded:
            self._loaded[cluster] = load_policy(self.folder / f"specialist-{cluster}")
        return self._loaded[cluster]

    def save(self) -> None:
        vectorizer = self.clusters.vectorizer
        words = sorted(vectorizer.vocabulary_, key=vectorizer.vocabulary_.__getitem__)
        write_json(
            self.folder / "router.json",
            {
                "words": words,
                "idf": [round(float(value), 9) for value in vectorizer.idf_],
                "centroids": [
                    {words[place]: round(float(row[place]), 9) for place in np.flatnonzero(row)}
                    for row in self.clusters.centroids
                ],
                "sizes": self.clusters.sizes,
                "served": self.clusters.served,
                "min_similarity": self.min_similarity,
                "specialists": [{**vars(one), "shapes": list(one.shapes)} for _, one in sorted(self.specialists.items())],
            },
        )

    @classmethod
    def load(cls, folder: Path) -> CallRouter:
        """Raises FileNotFoundError without a finished conversion."""
        from sklearn.feature_extraction.text import TfidfVectorizer

        saved = read_json(folder / "router.json")
        place = {word: number for number, word in enumerate(saved["words"])}
        vectorizer = TfidfVectorizer(token_pattern=r"[^\s]+", sublinear_tf=True, vocabulary=place)
        vectorizer.idf_ = np.array(saved["idf"])
        centroids = np.zeros((len(saved["centroids"]), len(place)))
        for row, words in zip(centroids, saved["centroids"], strict=True):
            for word, value in words.items():
                row[place[word]] = value
        clusters = Clusters(vectorizer, centroids, saved["sizes"], None, saved["served"])
        made = [Specialist(**{**one, "shapes": tuple(one["shapes"])}) for one in saved["specialists"]]
        return cls(folder, clusters, made, saved["min_similarity"])


def queued(calls: Sequence[dict[str, Any]], routed: Sequence[Routed]) -> str:
    """The calls that fell back, as lines of JSON: hard examples for the next round."""
    lines = (json.dumps(call, sort_keys=True) for call, one in zip(calls, routed, strict=True) if one.by == LARGE)
    return "".join(f"{line}\n" for line in lines)
