"""A frozen output layer's gradients are computed with the logits, chunk by chunk."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.agent.frozen_head import frozen_head
from stages.agent.logprobs import score_tokens, through_head

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def make_model(trained: bool) -> Any:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(trained)
    return SimpleNamespace(get_output_embeddings=lambda: head, config=SimpleNamespace(final_logit_softcapping=3.0))


def total(values: list[Tensor]) -> Tensor:
    """A sum in which each value of each token has its own weight."""
    weights = torch.arange(1.0, 1 + len(values) * TOKENS).view(len(values), TOKENS)
    return sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))


def read(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    logs = logits.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return logs.gather(-1, targets[:, None])[:, 0], logs.detach().mean(-1), entropy


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_values_and_gradients_are_those_of_autograd(chunk: int) -> None:
    targets, found = torch.arange(TOKENS), {}
    for trained in (False, True):
        hidden = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        values = through_head(make_model(trained), hidden, read, targets, temperature=0.7, chunk=chunk)
        assert [value.requires_grad for value in values] == [True, False, True]
        total(values).backward()
        found[trained] = [*(value.detach() for value in values), hidden.grad]
    torch.testing.assert_close(found[False], found[True], atol=1e-5, rtol=1e-5)


def test_gradient_is_that_of_finite_differences() -> None:
    weight, targets = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64), torch.arange(TOKENS)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)

    def values(hidden: Tensor) -> tuple[Tensor, ...]:
        logprobs, _, entropy = frozen_head(lambda piece, *along: read(piece @ weight.T, *along), 2, hidden, targets)
        return logprobs, entropy

    assert torch.autograd.gradcheck(values, (hidden,))


def test_backward_pass_keeps_no_logits() -> None:
    """Contract: what is kept for it has the size of the hidden states, one for each value with a gradient."""
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        values = through_head(make_model(False), hidden, read, torch.arange(TOKENS), chunk=3)
    del values
    # Within a chunk autograd keeps its logits, as usual; the last two are what outlives the chunks.
    assert kept[-2:] == [(TOKENS, WIDTH)] * 2
    assert (TOKENS, VOCABULARY) not in kept


def test_logits_of_a_chunk_are_dropped_before_the_next() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def watched(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        assert not [one for one in alive if one() is not None]
        alive.append(weakref.ref(logits))
        return read(logits, targets)

    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    values = through_head(make_model(False), hidden, watched, torch.arange(TOKENS), chunk=3)
    assert len(alive) == 3
    total(values).backward()


def test_gradient_of_another_tensor_is_refused_not_lost() -> None:
    hidden, weights = (torch.randn(TOKENS, WIDTH, requires_grad=True) for _ in range(2))
    with pytest.raises(ValueError, match="only the hidden states get a gradient"):
        frozen_head(lambda piece, along: ((piece * along).sum(-1),), 3, hidden, weights)


def test_states_in_bfloat16_get_the_gradient_of_float32() -> None:
    """Contract: it is rounded once."""
    model, targets, found = make_model(False), torch.arange(TOKENS), []
    states = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    for precision in (torch.float32, torch.bfloat16):
        hidden = states.to(precision).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = through_head(model, hidden, read, targets, chunk=3)
        total(values).backward()
        found.append(hidden.grad)
    assert torch.equal(found[0].bfloat16(), found[1])


def test_rows_without_masked_tokens_have_no_gradient(tiny_policy: Any) -> None:
    from stages.agent.policy import load_policy

    model = load_policy(tiny_policy).model
    model.get_output_embeddings().weight.requires_grad_(False)  # tied: the embeddings, too
    ids = torch.randint(5, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    scores = score_tokens(model, ids, torch.zeros(2, 6, dtype=torch.bool), entropy=True)
    scores.logprobs.sum().backward()
    assert float(scores.logprobs.detach().abs().sum()) == 0.0
    assert all(p.grad is None or not bool(p.grad.any()) for p in model.parameters())
