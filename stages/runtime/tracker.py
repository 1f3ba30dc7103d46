"""The tracking interface of stages; stages/tracking implements it with MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Tracker:
    """Ignores everything, as with BELLWETHER_TRACKING=off; subclasses record it."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters of the run; nested mappings are flattened to dotted names."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Tags of the run; a later value replaces an earlier one."""

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        """One point of a curve."""

    def headline(self, values: Mapping[str, float]) -> None:
        """Metrics of the parent run, so that lifecycles can be compared in one table."""

    def inputs(self, hashes: Mapping[str, str]) -> None:
        """Path -> hash of the stage's inputs: tags `in:...`, and datasets for paths below data/ that are not models."""

    def outputs(self, hashes: Mapping[str, str]) -> None:
        """Path -> hash of the stage's outputs: tags `out:...`."""

    def artifact(self, path: Path) -> None:
        """Attach a file or folder."""

    def episodes(self, rows: Sequence[Mapping[str, Any]], label: str, count: int = 4) -> None:
        """Attach at most `count` episodes (rows of EPISODE_SCHEMA, optionally with `advantages`) as traces."""

    def register_model(self, folder: Path, rows: Path, settings: Mapping[str, Any]) -> None:
        """Register `folder` as the model's newest version, by its DVC hash, and compare it with the champion.

        `rows`: evaluation rows of it and of `sft`; `settings`: model (its name in the rows), confidence, resamples, seed.
        """

    def close(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED."""
