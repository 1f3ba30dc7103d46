"""What offline methods read from the policy and the value network: log-probabilities, and a residual to the value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stages.values.token_q import target_and_best


class Dueling(nn.Module):
    """The policy, with a linear head on its last hidden states (zero at first) that adds to the value network's output."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy, self.residual = policy, nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.residual.weight)
        nn.init.zeros_(self.residual.bias)


def read_reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities of the targets and of the likeliest tokens, and the likeliest tokens (the lowest id among equals)."""
    return *target_and_best(logits, targets), (logits == logits.amax(-1, keepdim=True)).int().argmax(-1).float()


def read_policy(logits: Tensor, targets: Tensor, greedy: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities of the targets, of the likeliest tokens, and of `greedy`."""
    logs = logits.log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], logs.amax(-1), logs.gather(-1, greedy[:, None])[:, 0]


def scattered(numbers: Tensor, mask: Tensor) -> Tensor:
    """[d, T]: numbers [n] at the n places of the mask [d, T], in order, and 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=numbers.dtype, device=numbers.device).masked_scatter(mask, numbers)
