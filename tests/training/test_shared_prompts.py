"""Prompts read once for several episodes: the same states, loss and gradients as reading every episode whole."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from stages.agent.episode import Owner
from stages.agent.policy import load_policy, predicting_states, token_logprobs
from stages.algorithms.compose import resolve
from stages.algorithms.contract import TrajectoryBatch
from stages.params import Resources, Rl
from stages.training.batches import take, trajectory_batch
from stages.training.ledger import Ledger
from stages.training.loop import make_accelerator
from stages.training.models import Models
from stages.training.policy_updates import PolicyUpdates
from stages.training.shared_prompts import SharedPrompts, can_share, plan_blocks, worth_sharing
from training.toys import make_episode

PROMPTS = {"a": 30, "b": 45, "c": 12}
TURNS = {"a": [[3, 2], [1], [5, 2, 1], [2]], "b": [[4], [2, 2, 1], [1, 1]], "c": [[6], [3]]}


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request, tiny_policy):
    return load_policy(tiny_policy, attention=request.param).model


def make_batch(vocabulary: int) -> TrajectoryBatch:
    """Three groups with prompts of 30, 45 and 12 tokens, episodes of one to three turns, rewards that differ inside groups."""
    generator = torch.Generator().manual_seed(3)
    episodes = []
    for group, shapes in TURNS.items():
        prompt = torch.randint(5, vocabulary, (PROMPTS[group],), generator=generator).tolist()
        for index, turns in enumerate(shapes):
            episode = make_episode(f"{group}{index}", group, turns, float(index % 2))
            start = episode.owner.index(int(Owner.POLICY))
            for name, filler in (("owner", int(Owner.PROMPT)), ("logprob", 0.0), ("turn", -1)):
                values = getattr(episode, name)
                values[:start] = [filler] * len(prompt)
            episode.token_ids[:start] = prompt
            episodes.append(episode)
    return trajectory_batch(episodes)


def test_blocks_hold_every_row_once_and_respect_the_budget(model):
    batch = make_batch(model.config.vocab_size)
    rows = list(range(batch.size))
    (whole,) = plan_blocks(batch, rows, 4096)
    assert sorted(row for part in whole.micro_batches for row in part) == rows
    assert [whole.prompt_of[row] for row in rows] == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert whole.prompts == [0, 4, 7]
    blocks = plan_blocks(batch, rows[::-1], 60)
    assert [block.prompts for block in blocks] == [[8], [6], [3]]
    assert [sorted(block.prompt_of) for block in blocks] == [[7, 8], [4, 5, 6], [0, 1, 2, 3]]
    assert len(plan_blocks(batch, rows, 4096, at_least=2)) == 2
    assert worth_sharing(batch, [whole])
    alone = plan_blocks(batch, [0, 4, 7], 4096)
    assert not worth_sharing(batch, alone)


def test_states_are_those_of_the_dense_pass(model):
    batch = make_batch(model.config.vocab_size)
    for block in plan_blocks(batch, range(batch.size), 90):
        with torch.no_grad():
            prompts = SharedPrompts(model, batch, block)
            for rows in block.micro_batches:
                micro = take(batch, rows)
                expected = predicting_states(model, micro.token_ids, micro.mask)
                found = prompts.states_of(rows)(model, micro.token_ids, micro.mask)
                torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("tokens_per_batch", [4096, 60])
@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
def test_loss_and_gradient_are_those_of_the_dense_pass(model, algorithm, tokens_per_batch):
    """Contract: loss to 1e-6, gradients to 1e-5 relative, whatever the micro-batches; the ledger sees every policy token once."""
    found = {}
    for share in (False, True):
        twin = copy.deepcopy(model)
        method = resolve(Rl(algorithm=algorithm, share_prompts=share, loss={"entropy_coef": 0.01}))
        models = Models.make(method, twin, None, make_accelerator(Resources()), tokens_per_batch)
        batch = method.prepare(models.annotate(make_batch(model.config.vocab_size), method))
        assert (models.share(batch, range(batch.size)) is not None) == share
        ledger, total = Ledger(), 0.0
        for update in PolicyUpdates(models, method, ledger, constant_length=64).updates(batch, 0, ("key",)):
            for micro in update.micro_batches:
                for terms in update.loss(micro):
                    terms.loss.backward()
                    total += float(terms.loss.detach())
        assert ledger.policy_tokens == int(batch.mask.sum())
        found[share] = total, torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])
    assert found[True][0] == pytest.approx(found[False][0], abs=1e-6)
    dense, shared = found[False][1], found[True][1]
    assert float(dense.norm()) > 1e-3
    assert float((shared - dense).norm() / dense.norm()) < 1e-5
    torch.testing.assert_close(shared, dense, atol=1e-5, rtol=1e-4)


def test_the_prompts_get_their_gradient_from_every_episode(model):
    """By finite differences: move one embedding that only the shared prompt holds; loss of all its rows answers."""
    twin = copy.deepcopy(model).double()
    batch = make_batch(model.config.vocab_size)
    block = plan_blocks(batch, [0, 1, 2, 3], 4096)[0]

    def total() -> torch.Tensor:
        prompts = SharedPrompts(twin, batch, block)
        losses = []
        for rows in block.micro_batches:
            micro = take(batch, rows)
            losses.append(token_logprobs(twin, micro.token_ids, micro.mask, states=prompts.states_of(rows))[0].sum())
            if torch.is_grad_enabled():
                losses[-1].backward()
        if torch.is_grad_enabled():
            prompts.carry().backward()
        return torch.stack(losses).sum().detach()

    total()
    weight = twin.get_input_embeddings().weight
    token = int(batch.token_ids[0, 10])
    assert token not in batch.token_ids[:4, 30:].tolist()
    gradient = float(weight.grad[token, 2])
    with torch.no_grad():
        step = 1e-4
        weight[token, 2] += step
        above = total()
        weight[token, 2] -= 2 * step
        below = total()
    assert gradient == pytest.approx(float((above - below) / (2 * step)), rel=2e-2, abs=1e-4)
    assert abs(gradient) > 1e-3


def test_models_that_do_not_attend_to_everything_are_read_whole():
    def fake(recomputed=False, **config):
        layers = [SimpleNamespace(gradient_checkpointing=recomputed)]
        return SimpleNamespace(config=SimpleNamespace(**config), modules=lambda: layers)

    assert can_share(fake())
    assert can_share(fake(layer_types=["full_attention"] * 2))
    assert not can_share(fake(layer_types=["full_attention", "linear_attention"]))
    assert not can_share(fake(sliding_window=128))
    assert not can_share(fake(recomputed=True))
