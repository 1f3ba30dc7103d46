"""The tracking interface that stages log to; stages/tracking implements it for MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Tracker:
    """Logs parameters, metrics and artifacts of a stage. This base class logs nothing (BELLWETHER_TRACKING=off)."""

    def params(self, values: Mapping[str, Any]) -> None:
        """Log parameters; nested mappings are flattened to dotted names."""

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the run; later values replace earlier ones."""

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        """Log one value of a metric."""

    def headline(self, values: Mapping[str, float]) -> None:
        """Log metrics of the whole lifecycle to the parent run, so that lifecycles can be compared in one table."""

    def inputs(self, hashes: Mapping[str, str]) -> None:
        """Log input hashes by path: as tags `in:...`, and as datasets for files under data/ that are not models."""

    def outputs(self, hashes: Mapping[str, str]) -> None:
        """Log output hashes by path, as tags `out:...`."""

    def artifact(self, path: Path) -> None:
        """Log a copy of a file or folder."""

    def episodes(self, rows: Sequence[Mapping[str, Any]], label: str, source: str, count: int = 4) -> None:
        """Log at most `count` episodes (rows of EPISODE_SCHEMA, optionally with `advantages`) as traces. `source`: who played, as
        the episode viewer names it."""

    def register_model(self, folder: Path, rows: Path, settings: Mapping[str, Any]) -> None:
        """Register `folder` as the model's newest version, by its DVC hash, and compare it with the champion.

        `rows`: evaluation rows of the model and of `sft`; `settings`: model (its name in the rows), confidence, resamples, seed.
        """

    def close(self, status: str) -> None:
        """End the run: FINISHED, FAILED or KILLED."""
