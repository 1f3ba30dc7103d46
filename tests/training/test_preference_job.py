"""stages.rl with the algorithms that learn from preference pairs, on trees of the toy domain."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from stages import rl
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.registry import composition, names
from stages.algorithms.settings import Rl
from stages.annotation.pairs import PAIR_SCHEMA
from stages.records.episode import read_rows, write_table
from stages.training.common.loop import make_processes
from stages.training.rl.preference import PreferenceJob
from training.toys import PAIRS, KilledError, kill_at_step, outputs, read_history, store_pairs

RL: dict[str, Any] = {"steps": 8, "learning_rate": 0.003, "warmup_steps": 0, "checkpoint_every": 3}


def preference_context(make_context, name: str = "run", **section: Any):
    context = make_context("rl", name, rl={**RL, **section})
    store_pairs(context)
    return context


@pytest.mark.parametrize("name", [name for name in names() if composition(name).data == "pairs" and name != "agent_rlvr"])
def test_every_algorithm_learns_to_rank_the_pairs(make_context, name: str):
    """Contract: only `rl.algorithm` is set; the ledger counts each continuation's tokens once a step, and no others.
    tests/training/test_agent_rlvr.py has the method that makes its own pairs."""
    context = preference_context(make_context, algorithm=name, preference={"pairs_per_step": 4})
    rl.run(context)
    history = read_history(context.root)
    assert len(history) == 8
    assert history[-1]["margin"] > history[0]["margin"] + 0.5
    assert history[-1]["pair_accuracy"] == 1.0
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert (report["algorithm"], report["pairs"]) == (name, PAIRS)
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["ledger/policy_tokens_trained"] > 0
    assert read_rows(context.root / "data/rl/toy/samples.parquet") == []
    if name in ("dpo", "step_dpo"):
        assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
        assert history[0]["margin"] == pytest.approx(0.0, abs=1e-4)


def job_of(make_context, name: str, tokens_per_batch: int = 512, seed: int | None = None, **preference: Any) -> PreferenceJob:
    context = preference_context(make_context, algorithm=name, preference=preference)
    resources = context.params.resources.model_copy(update={"tokens_per_batch": tokens_per_batch})
    context.params = context.params.model_copy(update={"resources": resources})
    policy = load_policy(context.root / "data/models/sft", attention="sdpa")
    algorithm = resolve(Rl(**{**RL, "algorithm": name, "seed": seed, "preference": preference}))
    return PreferenceJob(context, algorithm, policy, make_processes(resources), None)


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo"])
def test_loss_and_gradient_are_independent_of_micro_batches(make_context, name: str):
    """Contract: whatever resources.tokens_per_batch is, loss and gradient are the same to float rounding."""
    found = []
    for tokens in (4096, 60):
        job = job_of(make_context, name, tokens, pairs_per_step=5)
        update = next(job.updates(0))
        total = 0.0
        for rows in update.micro_batches:
            for terms in update.loss(rows):
                terms.loss.backward()
                total += float(terms.loss.detach())
        gradient = torch.cat([parameter.grad.flatten() for parameter in job.models.policy.parameters()])
        found.append((len(update.micro_batches), total, gradient))
    (parts, whole, one), (more, split, other) = found
    assert more > parts
    assert split == pytest.approx(whole, rel=1e-5)
    assert float((one - other).norm() / one.norm()) < 1e-4


def test_every_pair_is_used_once_per_epoch(make_context):
    job = job_of(make_context, "dpo", pairs_per_step=4)
    drawn = [pair for step in range(3) for pair in job.sampler.batch(step)]
    assert sorted(drawn[:PAIRS]) == list(range(PAIRS))
    assert sorted(drawn[PAIRS:]) == list(range(PAIRS))
    assert job.sampler.batch(1) == job.sampler.batch(1)


def test_rl_seed_determines_the_order_of_the_pairs(make_context):
    """Seeds of claims are seeds of rl only."""
    orders = [job_of(make_context, "dpo", seed=seed, pairs_per_step=PAIRS).sampler.batch(0) for seed in (None, 0, 1)]
    assert orders[1] != orders[2]
    assert orders[0] == job_of(make_context, "dpo", seed=3, pairs_per_step=PAIRS).sampler.batch(0), "null is not the run's seed"


def test_kto_reference_point_uses_mismatched_continuations(make_context):
    """Before training policy and reference are equal, so z0 is 0; a policy that raises all log-probabilities raises z0."""
    job = job_of(make_context, "kto", pairs_per_step=4)
    assert job.mismatched([0, 1, 2]) == pytest.approx(0.0, abs=1e-4)
    with torch.no_grad():
        for parameter in job.models.policy.parameters():
            parameter.mul_(0.2)  # flatter logits: every continuation is more likely than under the reference
    assert job.mismatched([0, 1, 2]) > 0.0


def test_kto_reference_point_never_uses_a_pairs_own_continuations(make_context):
    """Contract: a pair drawn twice in a step, and two pairs of one node, are no mismatch: z0 then uses other pairs, if need be
    from outside the step."""
    job = job_of(make_context, "kto", pairs_per_step=4)
    assert job.mismatches([0, 1, 2]) == [1, 2, 0]
    assert job.mismatches([2, 2, 4]) == [4, 4, 2]
    assert job.mismatches([1]) == [2]
    assert job.mismatches([PAIRS - 1]) == [0]
    job.pairs[1] = replace(job.pairs[1], history=job.pairs[0].history)
    assert job.mismatches([0, 1, 3]) == [3, 3, 0]
    assert job.mismatches([0, 1]) == [2, 2]


def test_kto_rejects_pairs_of_a_single_history(make_context):
    """Contract: without mismatches z0 would be the pair's own reward; the error names the remedy."""
    context = preference_context(make_context, algorithm="kto")
    path = context.root / "data/annotated/toy/pairs.parquet"
    write_table(path, PAIR_SCHEMA, read_rows(path)[:1])
    with pytest.raises(ValueError, match=r"1 preference pairs of toy share one history.*raise annotate\.tasks"):
        rl.run(context)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_resume_after_kill_writes_the_same_bytes(make_context, name: str):
    plain = preference_context(make_context, "plain", algorithm=name, steps=5)
    rl.run(plain)
    killed = preference_context(make_context, "killed", algorithm=name, steps=5)
    kill_at_step(killed, 4)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(preference_context(make_context, "killed", algorithm=name, steps=5))
    assert outputs(killed.root) == outputs(plain.root)


def test_missing_pairs_error_says_what_to_do(make_context):
    context = preference_context(make_context, algorithm="dpo")
    write_table(context.root / "data/annotated/toy/pairs.parquet", PAIR_SCHEMA, [])
    with pytest.raises(ValueError, match="min_margin"):
        rl.run(context)
