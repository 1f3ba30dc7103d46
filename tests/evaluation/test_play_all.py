"""stages.evaluate.play_all: which jobs it plays, and its progress lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from stages import evaluate
from stages.evaluation.panels import Outcome


def test_progress_names_model_and_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a specialist on its own domain is `rl@maze`, not `maze`; a job that models share is played once."""
    notes: list[str] = []

    @contextmanager
    def progress(label: str, total: int, unit: str) -> Iterator[Any]:
        assert total == 4
        yield SimpleNamespace(advance=lambda count, note: notes.append(note))

    checkpoints = SimpleNamespace(load=lambda name: None, save=lambda name, outcome: None)
    monkeypatch.setattr(evaluate, "Checkpoints", lambda context, classes: checkpoints)
    monkeypatch.setattr(evaluate, "play", lambda job, settings: Outcome([{"success": True}, {"success": False}], []))
    context: Any = SimpleNamespace(progress=progress, share=lambda items: items)
    sft, specialist = (SimpleNamespace(name=name, domain="maze", episodes=2) for name in ("sft-maze", "rl-maze"))
    jobs: Any = {"sft": [sft], "rl@maze": [specialist], "merged": [specialist]}
    assert list(evaluate.play_all(context, jobs, settings=SimpleNamespace())) == ["sft-maze", "rl-maze"]  # type: ignore[arg-type]
    assert notes == ["model sft, domain maze: 50% success", "model rl@maze, domain maze: 50% success"]
