"""What the tests of evaluation share."""

from __future__ import annotations

from typing import Any


class RecordingScorer:
    """Prefers actions with large token ids and records its queries."""

    def __init__(self) -> None:
        self.queries: list[tuple[int, ...]] = []

    def scores(self, history: Any, actions: Any) -> Any:
        import torch

        self.queries.append(tuple(history))
        return torch.tensor([float(sum(action)) for action in actions])
