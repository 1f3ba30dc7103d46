"""Gradient checkpointing: the same gradient, and no effect on passes without gradients."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from adapters import adapted_policy
from torch import nn

from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy
from stages.agent.recompute import recompute_layers
from stages.agent.shared_prefixes import can_share
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.training.rl.critic import Critic
from stages.values.settings import HeadParams

IDS = torch.arange(5, 29).reshape(2, 12)
MASK = torch.ones(2, 12, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)


def loss_and_gradient(model) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = -token_logprobs(model, IDS, MASK).mean()
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad]
    return float(loss.detach()), torch.cat(gradients).clone()


@pytest.mark.parametrize("lora", [False, True])
def test_loss_and_gradient_are_unchanged(tiny_policy: Path, lora: bool) -> None:
    load = adapted_policy if lora else load_policy
    plain, model = (load(tiny_policy, attention="sdpa").model for _ in range(2))
    recompute_layers(model)
    passes = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    expected, found = loss_and_gradient(plain), loss_and_gradient(model)
    assert len(passes) == 2
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-8)
    assert float(found[1].norm()) > 1e-3


def test_fewer_activations_are_kept_for_the_backward_pass(tiny_policy: Path) -> None:
    def kept(model) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            token_logprobs(model, IDS, MASK).mean()
        return sum(sizes.values())

    plain, model = (adapted_policy(tiny_policy, attention="sdpa").model for _ in range(2))
    recompute_layers(model)
    assert kept(model) < 0.6 * kept(plain)


def test_copy_recomputes_its_own_layers(tiny_policy: Path) -> None:
    """Contract: the critic, a copy of a policy with gradient checkpointing, uses its own weights."""
    model = load_policy(tiny_policy, attention="sdpa").model
    recompute_layers(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    plain = load_policy(tiny_policy, attention="sdpa").model
    expected = loss_and_gradient(plain)[0]
    assert loss_and_gradient(model)[0] == pytest.approx(expected, rel=1e-6)
    assert loss_and_gradient(other)[0] != pytest.approx(expected, rel=1e-2)
    critic = Critic(model, HeadParams())
    nn.init.normal_(critic.output.weight)
    critic.loss(IDS, MASK, torch.ones(2, 12))[0].mean().backward()
    assert float(critic.backbone.layers[0].mlp.up_proj.weight.grad.norm()) > 0
    model.zero_grad()
    assert model.model.layers[0].mlp.up_proj.weight.grad is None


def test_sampling_is_unchanged_and_prefixes_are_still_shared(tiny_policy: Path) -> None:
    model = load_policy(tiny_policy).model
    assert can_share(model)

    def play() -> tuple:
        engine = TorchEngine(model, [3], slots=4, max_length=64)
        engine.request(engine.open([5, 6, 7]), 11, Sampling(max_tokens=12))
        (turn,) = engine.advance()
        return turn.token_ids, turn.logprobs

    before = play()
    recompute_layers(model)
    assert play() == before
    assert can_share(model)


def test_model_without_checkpointing_layers_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"model\.gradient_checkpointing"):
        recompute_layers(nn.Linear(2, 2))
