"""Gradients of the RL objective through a real model, and the critic's updates."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch

from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.settings import Rl
from stages.runtime.resources import Resources
from stages.training.common.batches import trajectory_batch, turn_starts
from stages.training.common.ledger import Ledger
from stages.training.common.loop import make_processes
from stages.training.rl.critic import Critic
from stages.training.rl.models import Models, make_learners
from stages.training.rl.policy_updates import PolicyUpdates, agreement, check_agreement, policy_row
from stages.values.settings import HeadParams
from training.toys import make_episode


@pytest.fixture(scope="module")
def model(tiny_policy):
    return load_policy(tiny_policy, attention="sdpa").model


def make_batch() -> TrajectoryBatch:
    shapes = [("a", [3, 2], 1.0), ("a", [1], 0.0), ("b", [4], 0.0), ("b", [2, 2, 1], 1.0)]
    return trajectory_batch(
        [make_episode(f"{index}", group, turns, reward) for index, (group, turns, reward) in enumerate(shapes)]
    )


def gradient_of(model, batch: TrajectoryBatch, rl: Rl, tokens_per_batch: int) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient of the first policy update of a step, without shared prefixes."""
    model = copy.deepcopy(model)
    algorithm = resolve(rl.model_copy(update={"share_prefixes": False}))
    models = Models.make(algorithm, model, None, make_processes(Resources()), tokens_per_batch)
    prepared = algorithm.prepare(models.annotate(batch, algorithm))
    maker = PolicyUpdates(models, algorithm, Ledger())
    update = next(update for update in maker.updates(prepared, 99, ("key",)) if update.learner == "policy")
    total = 0.0
    for micro in update.micro_batches:
        for terms in update.loss(micro):
            terms.loss.backward()
            total += float(terms.loss.detach())
    return total, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    "rl",
    [
        Rl(algorithm="reinforce", group_size=2),
        Rl(algorithm="grpo", group_size=2, loss={"kl_coef": 0.1, "entropy_coef": 0.01}),
        Rl(algorithm="ppo", group_size=2, loss={"aggregation": "constant", "constant_length": 16}),
    ],
    ids=lambda rl: rl.algorithm,
)
def test_loss_and_gradient_are_independent_of_micro_batches(model, rl: Rl):
    """Contract: 1, 2 and 4 micro-batches agree to 1e-6 relative."""
    batch = make_batch()
    whole_loss, whole = gradient_of(model, batch, rl, 4096)
    for tokens_per_batch in (20, 1):
        loss, gradient = gradient_of(model, batch, rl, tokens_per_batch)
        assert loss == pytest.approx(whole_loss, rel=1e-6, abs=1e-7)
        assert float((gradient - whole).norm() / whole.norm()) < 1e-6


def test_tokens_after_the_last_policy_token_are_ignored(model):
    """Contract: other token ids in the padding and after the last policy token give the same gradient, bit for bit."""
    batch = make_batch()
    last = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1)).amax(1)
    after = torch.arange(batch.mask.shape[1])[None, :] >= last[:, None]
    changed = batch.with_(token_ids=torch.where(after, torch.full_like(batch.token_ids, 77), batch.token_ids))
    rl = Rl(algorithm="grpo", group_size=2)
    _, one = gradient_of(model, batch, rl, 1)
    _, other = gradient_of(model, changed, rl, 1)
    assert torch.equal(one, other)


def test_critic_starts_constant_and_learns_without_changing_the_policy(model):
    batch = make_batch()
    critic = Critic(model, HeadParams(loss="hl_gauss"))
    values = critic.values(batch.token_ids, batch.mask)
    assert values[~batch.mask].abs().sum() == 0
    torch.testing.assert_close(values[batch.mask], torch.full((int(batch.mask.sum()),), 0.5), rtol=0, atol=1e-5)
    before = copy.deepcopy(model.state_dict())
    returns = (batch.turn == 0).float()
    optimiser = torch.optim.Adam(critic.parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        critic.loss(batch.token_ids, batch.mask, returns)[0].mean().backward()
        optimiser.step()
    error = (critic.values(batch.token_ids, batch.mask) - returns)[batch.mask].abs().mean()
    assert error < 0.2
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("tokens_per_batch", [4096, 1])
@pytest.mark.parametrize(("level", "count"), [("turn", 7), ("token", 15)])
def test_the_critic_learns_where_advantages_read_it(model, level: str, count: int, tokens_per_batch: int):
    """At level turn at the first token of each of the seven turns, each turn with equal weight; else at all 15 policy tokens."""
    algorithm = resolve(Rl(algorithm="ppo", group_size=2, advantage={"level": level}, critic={"head": {"loss": "mse"}}))
    models = Models.make(algorithm, copy.deepcopy(model), None, make_processes(Resources()), tokens_per_batch)
    assert models.critic is not None
    prepared = algorithm.prepare(models.annotate(make_batch(), algorithm))
    update = next(PolicyUpdates(models, algorithm, Ledger()).updates(prepared, 0, ("key",)))
    assert update.learner == "critic"
    terms = [one for rows in update.micro_batches for one in update.loss(rows)]
    places = turn_starts(prepared) if level == "turn" else prepared.mask
    assert int(places.sum()) == count
    assert sum(float(one.sums["tokens"]) for one in terms) == count
    values = models.critic.values(prepared.token_ids, prepared.mask)
    error = (values - prepared.returns).square()[places].sum() / count
    total = sum(float(one.loss.detach()) for one in terms)
    assert total == pytest.approx(float(error) * algorithm.rl.critic.coef, rel=1e-5)


def test_running_spread_follows_the_whole_minibatch(model):
    """Contract: after each update of a Gaussian critic its running spread moves by the mean spread over all trained tokens,
    however these are split into micro-batches."""
    batch, found = make_batch(), []
    for tokens_per_batch in (4096, 1):
        algorithm = resolve(Rl(algorithm="ppo", group_size=2, critic={"distribution": {"spread_rate": 0.5}}))
        models = Models.make(algorithm, copy.deepcopy(model), None, make_processes(Resources()), tokens_per_batch)
        assert models.critic is not None
        with torch.no_grad():
            models.critic.output.weight.normal_(generator=torch.Generator().manual_seed(1))
        learner = make_learners(models, algorithm.rl)["critic"]
        prepared = algorithm.prepare(models.annotate(batch, algorithm))
        spreads = models.critic.head.spread(models.critic.logits(batch.token_ids, batch.mask).detach())
        (update,) = PolicyUpdates(models, algorithm, Ledger()).updates(prepared, 0, ("key",))
        sums = learner.update(update.micro_batches, update.loss)
        assert update.on_sums is not None
        update.on_sums(sums)
        found.append(float(models.critic.head.running))
        assert found[-1] == pytest.approx(0.5 * math.log(2) + 0.5 * float(spreads.mean()), rel=1e-4)
        assert "head.running" in learner.state_dict()["module"]
        assert policy_row({"critic": sums})["critic_spread"] == pytest.approx(float(spreads.mean()), rel=1e-4)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_critic_warm_up_has_no_policy_updates(model):
    rl = Rl(algorithm="ppo", group_size=2, epochs=2, minibatches=2, critic={"warmup_steps": 3})
    algorithm = resolve(rl)
    models = Models.make(algorithm, copy.deepcopy(model), None, make_processes(Resources()), 4096)
    ledger = Ledger()
    batch = algorithm.prepare(models.annotate(make_batch(), algorithm))
    maker = PolicyUpdates(models, algorithm, ledger)
    assert [update.learner for update in maker.updates(batch, 2, ("key",))] == ["critic"] * 4
    learners = []
    for update in maker.updates(batch, 3, ("key",)):
        learners.append(update.learner)
        for rows in update.micro_batches:
            for terms in update.loss(rows):
                if terms.trained is not None:
                    update.on_tokens_trained(*terms.trained)
    assert learners == ["critic", "policy"] * 4
    assert ledger.policy_tokens == 2 * int(batch.mask.sum())


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_groups_without_weight_take_no_optimiser_step(model, minibatches: int):
    """Contract: minibatches are made of groups with weight. With half of the groups replaced by dynamic sampling, every step
    still has `rl.minibatches` updates, which train the others once."""
    groups = "abcdefgh"
    batch = trajectory_batch(
        [
            make_episode(f"{group}{place}", group, [2 + place], float(place and group in "bdfh"))
            for group in groups
            for place in (0, 1)
        ]
    )
    for seed in range(5):
        algorithm = resolve(Rl(algorithm="dapo", group_size=2, tasks_per_step=4, minibatches=minibatches), 64)
        models = Models.make(algorithm, copy.deepcopy(model), None, make_processes(Resources()), 4096)
        prepared = algorithm.prepare(models.annotate(algorithm.resample(algorithm.shape(batch), seed), algorithm))
        assert prepared.weights.sum() == 8
        ledger, sizes = Ledger(), []
        for update in PolicyUpdates(models, algorithm, ledger).updates(prepared, 0, (seed,)):
            sizes.append(sum(len(rows) for rows in update.micro_batches))
            for rows in update.micro_batches:
                for terms in update.loss(rows):
                    update.on_tokens_trained(*terms.trained)
        assert sizes == [8 // minibatches] * minibatches
        assert ledger.policy_tokens == int(prepared.mask[prepared.weights > 0].sum())


def test_agreement_of_logprobs_is_checked_in_float32():
    sums = {"max_logprob_difference": 9e-5, "logprob_difference": 1e-3, "logprob_tokens": 5000.0, "logprobs_apart": 5.0}
    measured = agreement(sums)
    assert measured == {"max_logprob_difference": 9e-5, "mean_logprob_difference": 2e-7, "logprobs_apart": 1e-3}
    check_agreement(measured, "float32", 0)
    check_agreement({**measured, "max_logprob_difference": 0.2, "logprobs_apart": 1.0}, "bfloat16", 0)
    with pytest.raises(ValueError, match=r"step 1: .* by 2e-05 on average"):
        check_agreement({**measured, "mean_logprob_difference": 2e-5}, "float32", 0)
    with pytest.raises(ValueError, match=r"by 0\.0002 at most"):
        check_agreement({**measured, "max_logprob_difference": 2e-4}, "float32", 0)
    for size, allowed in ((9.0, False), (15.0, False), (25.0, True)):
        with nullcontext() if allowed else pytest.raises(ValueError, match=r"by 0\.0002 at most \(limit 0\.0001"):
            check_agreement({**measured, "max_logprob_difference": 2e-4}, "float32", 0, size)
    assert agreement({}) == {"max_logprob_difference": 0.0, "mean_logprob_difference": 0.0, "logprobs_apart": 0.0}


def test_tokens_with_differing_logprobs_are_counted(model):
    algorithm = resolve(Rl(algorithm="reinforce", share_prefixes=False))
    models = Models.make(algorithm, copy.deepcopy(model), None, make_processes(Resources()), 4096)
    batch = algorithm.prepare(models.annotate(make_batch(), algorithm))
    own = models.logprobs(models.reference, batch, list(range(batch.size)), 1.0)
    rows, columns = batch.mask.nonzero(as_tuple=True)
    own[rows[0], columns[0]] += 3e-5
    maker = PolicyUpdates(models, algorithm, Ledger())
    update = next(maker.updates(batch.with_(logprobs_old=own), 0, ("key",)))
    apart = sum(float(terms.sums["logprobs_apart"]) for rows in update.micro_batches for terms in update.loss(rows))
    assert apart == 1.0
