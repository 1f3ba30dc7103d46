"""Histories whose values are known, and a tiny backbone, for the tests of step-value models."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stages.values.fitting import TaskSplit
from stages.values.step_value import ValuePath


def backbone(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaModel(LlamaConfig(vocab_size=16, max_position_embeddings=64, **sizes)).eval()


def synthetic_paths(tasks: int, each: int = 8) -> list[ValuePath]:
    """Histories whose value depends on the last token before the turn: 1 fails, 2 succeeds half the time, 3 always."""
    rng = np.random.default_rng(0)
    paths = []
    for task in range(tasks):
        for _ in range(each):
            token_ids, boundaries, successes = [], [], []
            for _ in range(int(rng.integers(1, 4))):
                kind = int(rng.integers(1, 4))
                token_ids += [*rng.integers(4, 16, int(rng.integers(1, 6))).tolist(), kind]
                boundaries.append(len(token_ids) - 1)
                successes.append(float({1: 0, 2: 2, 3: 4}[kind]))
            paths.append(ValuePath(f"t{task:02d}", token_ids, boundaries, successes, [4.0] * len(boundaries)))
    return paths


def split(paths: list[ValuePath], share: float, seed: int) -> tuple[list[ValuePath], list[ValuePath]]:
    return TaskSplit.of((path.task_id for path in paths), share, seed).parts(paths)
