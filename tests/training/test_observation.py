"""The loss on observation tokens (ECHO): its value and gradient, its stream in the ledger, the method by its name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import rl
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import Observed
from stages.algorithms.settings import Rl
from stages.records.episode import Episode, Owner, read_rows
from stages.runtime.resources import Resources
from stages.runtime.validation import ParamsError
from stages.training.common.batches import trajectory_batch
from stages.training.common.ledger import Ledger
from stages.training.common.loop import make_processes
from stages.training.rl.models import Models
from stages.training.rl.observation import observed_tokens
from stages.training.rl.policy_updates import PolicyUpdates
from training.toys import KilledError, kill_at_step, make_episode, outputs, run

SECTION: dict[str, Any] = {
    "algorithm": "echo",
    "steps": 3,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}


def episodes() -> list[Episode]:
    """A living group, and a dead one of two successes."""
    found = [make_episode("a0", "a", [2, 1, 2], 1.0), make_episode("a1", "a", [1, 2], 0.0)]
    return [*found, make_episode("b0", "b", [1, 1], 1.0), make_episode("b1", "b", [3], 1.0)]


def gradient(folder: Path, tokens_per_batch: int = 4096, **section: Any) -> tuple[dict[str, torch.Tensor], Ledger]:
    """The policy's gradient of one update over `episodes`, and its ledger."""
    model = load_policy(folder, attention="sdpa").model
    method, ledger = resolve(Rl(**{"algorithm": "echo", **section})), Ledger()
    models = Models.make(method, model, None, make_processes(Resources()), tokens_per_batch)
    batch = method.prepare(models.annotate(method.shape(trajectory_batch(episodes())), method))
    for update in PolicyUpdates(models, method, ledger).updates(batch, 0, ("key",)):
        for micro in update.micro_batches:
            for terms in update.loss(micro):
                terms.loss.backward()
                update.on_tokens_trained(*terms.trained)
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}, ledger


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name in found:
        assert torch.allclose(found[name], expected[name], atol=2e-6), name


def cross_entropy_gradient(folder: Path, rows: Sequence[Episode]) -> dict[str, torch.Tensor]:
    """Brute force: the mean of -log pi over all tokens of the environment, one episode at a time."""
    model = load_policy(folder, attention="sdpa").model
    losses = []
    for episode in rows:
        logs = model(torch.tensor([episode.token_ids])).logits[0].log_softmax(-1)
        places = [place for place, owner in enumerate(episode.owner) if owner == Owner.ENVIRONMENT]
        losses += [-logs[place - 1, episode.token_ids[place]] for place in places]
    torch.stack(losses).mean().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def test_gradient_is_that_of_grpo_and_of_the_observations(tiny_policy: Path) -> None:
    """Contract: L = L_GRPO + coef * mean over the environment's tokens of -log pi, those of the dead group included."""
    found, ledger = gradient(tiny_policy, observation={"coef": 0.03})
    own, without = gradient(tiny_policy, observation={"coef": 0.0})
    observed = cross_entropy_gradient(tiny_policy, episodes())
    assert_equal(found, {name: own[name] + 0.03 * observed[name] for name in own})
    assert ledger.metrics()["ledger/observation_tokens_trained"] == 4
    assert ledger.environment_tokens == 0
    assert "ledger/observation_tokens_trained" not in without.metrics()


@pytest.mark.parametrize("section", [{"tokens_per_batch": 8}, {"share_prefixes": False}], ids=["micro_batches", "dense"])
def test_gradient_does_not_depend_on_the_split(tiny_policy: Path, section: dict[str, Any]) -> None:
    assert_equal(gradient(tiny_policy, **section)[0], gradient(tiny_policy)[0])


def test_only_tokens_that_a_pass_reads_are_observations() -> None:
    """Contract: prompts are none, nor is what follows a row's last trained token (an observation that nothing answers)."""
    batch = trajectory_batch(episodes())
    assert observed_tokens(batch).sum(1).tolist() == [2, 1, 1, 0]
    assert not bool((batch.get(Observed).mask & batch.mask).any())
    cut = batch.with_(mask=batch.mask & (batch.turn < 2))
    assert observed_tokens(cut).sum(1).tolist() == [1, 1, 1, 0]
    with pytest.raises(ValueError, match="no record of the environment's tokens"):
        observed_tokens(batch.with_(extra={}))


def test_policy_learns_to_predict_and_resumes_to_the_same_bytes(make_context) -> None:
    """Contract: every token of the environment is trained once, as a stream of its own, and its loss falls."""
    section = {**SECTION, "steps": 12, "observation": {"coef": 1.0}}
    plain = make_context("rl", "plain", rl=section)
    history = run(plain)
    assert history[-1]["observation_loss"] < history[0]["observation_loss"] - 1.0
    report = json.loads((plain.root / "reports/rl/toy.json").read_text())
    assert report["ledger/environment_tokens_trained"] == 0
    first = [row for row in read_rows(plain.root / "data/rl/toy/samples.parquet") if row["step"] == 1]
    observed = sum(row["owner"].count(int(Owner.ENVIRONMENT)) for row in first)
    one = make_context("rl", "one", rl={**section, "steps": 1})
    run(one)
    report = json.loads((one.root / "reports/rl/toy.json").read_text())
    assert report["ledger/observation_tokens_trained"] == observed > 0
    killed = make_context("rl", "killed", rl=section)
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", rl=section))
    assert outputs(killed.root) == outputs(plain.root)


def test_without_weight_it_is_grpo(make_context) -> None:
    """Contract: the reduction in the card, to the last bit of the policy."""
    files = []
    for name, section in (("echo", {"observation": {"coef": 0.0}}), ("grpo", {"algorithm": "grpo"})):
        context = make_context("rl", name, rl={**SECTION, **section})
        run(context)
        files.append((context.root / "data/models/rl/toy/model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_it_joins_a_method_with_a_critic(make_context) -> None:
    section = {**SECTION, "algorithm": "ppo", "observation": {"coef": 0.05}, "critic": {"warmup_steps": 0}}
    history = run(make_context("rl", rl=section))
    assert history[0]["observation_loss"] > 0


def test_methods_that_do_not_play_refuse_it() -> None:
    with pytest.raises(ParamsError, match=r"rl\.observation\.coef has no effect: algorithm dpo learns from"):
        resolve(Rl(algorithm="dpo", observation={"coef": 0.05}))
