"""S6: the router. A specialist answers calls that resemble its cluster, if it is sure and its answer has a known shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.agent.policy import Policy, load_policy
from stages.conversion.clusters import Clusters, answer_shape
from stages.conversion.masking import PLACEHOLDER
from stages.conversion.specialise import Answer, answers
from stages.records.episode import read_json, write_json

LARGE = "llm"
SIMILARITY, CONFIDENCE, FORMAT = "similarity", "confidence", "format"
"""Why a call falls back to the large model: it resembles no cluster, or its specialist was not sure or answered in a form that it
did not learn. The calls of a cluster that stays with the large model do not fall back."""


class RouterError(ValueError):
    """A folder holds no finished round."""


@dataclass(frozen=True)
class Specialist:
    """Of one cluster. `threshold`: least confidence; `shapes`: of the answers that it learned from; `rho`: cost(S) / cost(T);
    `policy_hash`: of its model."""

    cluster: int
    candidate: str
    threshold: float
    shapes: tuple[str, ...]
    rho: float
    policy_hash: str = ""

    @property
    def name(self) -> str:
        return f"specialist {self.cluster}"

    def refusal(self, call: dict[str, Any], answer: Answer) -> str:
        """Why its answer to a call is not taken: CONFIDENCE, or FORMAT, of another shape or with a placeholder that the call
        does not have; "": it is."""
        if answer.confidence < self.threshold:
            return CONFIDENCE
        given = {found.group() for message in call["prompt"] for found in PLACEHOLDER.finditer(message["content"])}
        known = answer_shape(answer.text) in self.shapes
        return "" if known and {found.group() for found in PLACEHOLDER.finditer(answer.text)} <= given else FORMAT


@dataclass(frozen=True)
class Routed:
    """A call's answer, and who gave it: LARGE, or a cluster's specialist. `cluster`: that it resembles, or -1; `fallback`: why a
    specialist did not answer, "" if none was to."""

    by: str
    cluster: int
    answer: Answer | None
    fallback: str = ""


class CallRouter:
    """Saved in `folder` with its specialists, one model folder each. `max_length`: of prompt and answer; `max_tokens`: of an
    answer."""

    def __init__(
        self,
        folder: Path,
        clusters: Clusters,
        specialists: Sequence[Specialist],
        min_similarity: float,
        max_length: int,
        max_tokens: int,
    ) -> None:
        self.folder, self.clusters, self.min_similarity = folder, clusters, min_similarity
        self.max_length, self.max_tokens = max_length, max_tokens
        self.specialists = {one.cluster: one for one in specialists}
        self._loaded: dict[int, Policy] = {}

    def clusters_of(self, calls: Sequence[dict[str, Any]]) -> np.ndarray:
        """The cluster [N] that each call resembles, by its prompt alone; -1: none."""
        return self.clusters.resembled(calls, self.min_similarity)

    def route(self, calls: Sequence[dict[str, Any]]) -> list[Routed]:
        """Who answers each call. The large model's answers are not drawn here. Raises RouterError as `policy` does."""
        clusters = self.clusters_of(calls)
        found = [Routed(LARGE, int(cluster), None, SIMILARITY if cluster < 0 else "") for cluster in clusters]
        for number, specialist in self.specialists.items():
            places = np.flatnonzero(clusters == number).tolist()
            if not places:
                continue
            drawn = answers(self.policy(number), [calls[place] for place in places], self.max_length, self.max_tokens)
            for place, answer in zip(places, drawn, strict=True):
                why = specialist.refusal(calls[place], answer)
                found[place] = Routed(LARGE, number, None, why) if why else Routed(specialist.name, number, answer)
        return found

    def policy(self, cluster: int) -> Policy:
        """A cluster's model. Raises RouterError if it is not the one that the router was saved with."""
        if cluster not in self._loaded:
            folder = self.folder / f"specialist-{cluster}"
            policy = load_policy(folder) if folder.is_dir() else None
            if policy is None or policy.hash != self.specialists[cluster].policy_hash:
                message = f"{folder} is not the model of {self.folder}/router.json"
                raise RouterError(f"{message}: a round did not finish; run `python -m stages.conversion SETTINGS` again")
            self._loaded[cluster] = policy
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
                "max_length": self.max_length,
                "max_tokens": self.max_tokens,
                "specialists": [{**vars(one), "shapes": list(one.shapes)} for _, one in sorted(self.specialists.items())],
            },
        )

    @classmethod
    def load(cls, folder: Path) -> CallRouter:
        """Raises RouterError for a folder without a finished round."""
        if not (folder / "router.json").is_file():
            message = f"{folder} holds no finished round of a conversion (it has no router.json)"
            raise RouterError(f"{message}; run `python -m stages.conversion SETTINGS`, and name the settings' `out`")
        try:
            return cls._of(folder, read_json(folder / "router.json"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"{folder}/router.json is not a router ({error!r}); delete {folder} and run a round again"
            raise RouterError(message) from error

    @classmethod
    def _of(cls, folder: Path, saved: dict[str, Any]) -> CallRouter:
        from sklearn.feature_extraction.text import TfidfVectorizer

        place = {word: number for number, word in enumerate(saved["words"])}
        vectorizer = TfidfVectorizer(token_pattern=r"[^\s]+", sublinear_tf=True, vocabulary=place)
        vectorizer.idf_ = np.array(saved["idf"])
        centroids = np.zeros((len(saved["centroids"]), len(place)))
        for row, words in zip(centroids, saved["centroids"], strict=True):
            for word, value in words.items():
                row[place[word]] = value
        clusters = Clusters(vectorizer, centroids, saved["sizes"], None, saved["served"])
        made = [Specialist(**{**one, "shapes": tuple(one["shapes"])}) for one in saved["specialists"]]
        return cls(folder, clusters, made, saved["min_similarity"], saved["max_length"], saved["max_tokens"])
