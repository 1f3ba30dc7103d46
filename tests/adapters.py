"""Builders of small LoRA adapters for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from stages.agent.policy import Policy, load_policy
from stages.agent.settings import Lora
from stages.training.common.adapters import adapted, add_adapters, save_adapters


def adapted_policy(folder: Path, seed: int = 0, rank: int = 4, scale: float = 0.3, **loading) -> Policy:
    """The policy in `folder` with adapters whose B is random, too, so that they have an effect."""
    policy = load_policy(folder, **loading)
    add_adapters(policy.model, Lora(rank=rank, alpha=8), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in adapted(policy.model):
            weight = layer.lora_B["default"].weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return policy


def make_adapter(folder: Path, base: Path, base_name: str, seed: int = 0, rank: int = 4) -> Path:
    """Save an adapter of `base`, recorded as `base_name`, in `folder`."""
    policy = adapted_policy(base, seed, rank)
    save_adapters(policy.model, policy.tokenizer, folder, base_name)
    return folder
