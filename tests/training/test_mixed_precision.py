"""resources.precision: bfloat16. A loss compares log-probabilities of the same kind of pass: ratios before the first update are
1, the KL from the start policy is 0, and the difference between sampling and training is reported and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import rl
from stages.agent.logprobs import score_tokens
from stages.agent.policy import load_policy
from stages.training.rl.policy_updates import PolicyUpdates, agreement, check_agreement
from training.toys import read_history, store_pairs

RL: dict[str, Any] = {
    "algorithm": "gspo",
    "steps": 2,
    "tasks_per_step": 4,
    "group_size": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "sampling": {"max_tokens": 6},
}
RESOURCES = {"slots": 16, "threads": 1, "tokens_per_batch": 256, "precision": "bfloat16"}

pytestmark = pytest.mark.usefixtures("other_precision")


def trained(make_context, tiny_policy: Path, model: dict[str, Any] | None = None, name: str = "run", **section: Any) -> Path:
    """The folder of a run in bfloat16."""
    settings = {"path": str(tiny_policy), "max_length": 128, **(model or {})}
    context = make_context("rl", name, rl={**RL, **section}, model=settings, resources=RESOURCES)
    if section.get("algorithm") in ("dpo", "kto"):
        store_pairs(context)
    rl.run(context)
    return context.root


def report_of(root: Path) -> dict[str, Any]:
    return json.loads((root / "reports/rl/toy.json").read_text())


def run(make_context, tiny_policy: Path, model: dict[str, Any] | None = None, **section: Any):
    """The history and the report of a run in bfloat16."""
    root = trained(make_context, tiny_policy, model, **section)
    return read_history(root), report_of(root)


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ({}, {}),
        ({"share_prefixes": False}, {}),
        ({"algorithm": "grpo_scr"}, {"gradient_checkpointing": True}),
        ({}, {"lora": {"rank": 4}}),
        ({"algorithm": "pacs"}, {}),
        ({"algorithm": "grpo", "loss": {"kl_coef": 0.1}, "reward": {"kl_coef": 0.1}}, {}),
        ({"algorithm": "rl_plus", "group_size": 5}, {}),
    ],
    ids=["shared", "whole", "recomputed", "lora", "pacs", "kl", "external"],
)
def test_ratios_before_the_first_update_are_one(make_context, tiny_policy, section, model):
    """Contract: with one update per step nothing is off-policy, so no token is clipped and every ratio is 1, in any precision;
    and the start policy has no KL from itself."""
    history, report = run(make_context, tiny_policy, model, **section)
    for row in history:
        assert row["clip_fraction"] == 0.0
        assert row["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert "mean_rescored_difference" not in report, "the update itself finds the old log-probabilities"
    assert 1e-5 < report["mean_logprob_difference"] < 0.1


@pytest.mark.parametrize(
    "section", [{}, {"algorithm": "grpo", "loss": {"kl_coef": 0.1}}, {"algorithm": "rl_plus", "group_size": 5}]
)
def test_old_log_probs_are_the_same_read_before_or_in_passing(make_context, tiny_policy, monkeypatch, section):
    """Contract: a batch's only update finds the log-probabilities that a pass of their own would have found, to the bit."""
    in_passing = trained(make_context, tiny_policy, name="in_passing", **section)
    made = PolicyUpdates.__init__
    monkeypatch.setattr(PolicyUpdates, "__init__", lambda *given, **_: made(*given))
    before = trained(make_context, tiny_policy, name="before", **section)
    assert "mean_rescored_difference" in report_of(before)
    one, other = (load_file(root / "data/models/rl/toy/model.safetensors") for root in (in_passing, before))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_each_minibatch_is_scored_as_it_is_trained(make_context, tiny_policy):
    """Contract: with two minibatches, ROVER's log ratio and its mean over the vocabulary start at 0."""
    history, report = run(make_context, tiny_policy, algorithm="rover", minibatches=2, learning_rate=1e-12)
    assert all(row["ratio_max"] == pytest.approx(1.0, abs=1e-4) for row in history)
    assert report["max_rescored_difference"] <= 1e-4
    assert report["mean_logprob_difference"] > 1e-5


def test_pair_margins_start_at_zero(make_context, tiny_policy):
    """Contract: policy and reference are scored by the same kind of pass, so that margins are 0 before the first update."""
    history, _ = run(make_context, tiny_policy, algorithm="dpo", preference={"pairs_per_step": 4})
    assert history[0]["margin"] == pytest.approx(0.0, abs=1e-4)


def test_output_layer_computes_in_float32(tiny_policy):
    """Contract: logits are not rounded, neither under autocast nor with bfloat16 weights; only the layers below are bfloat16."""
    policy = load_policy(tiny_policy, attention="sdpa")
    ids = torch.arange(5, 25).reshape(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)
    hidden = 20 * torch.randn(18, policy.model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def states(*_: Any) -> torch.Tensor:
        return hidden

    plain = score_tokens(policy.model, ids, mask, 0.7, states=states, entropy=True, vocabulary=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = score_tokens(policy.model, ids, mask, 0.7, states=states, entropy=True, vocabulary=True)
    assert torch.equal(mixed.logprobs, plain.logprobs)
    assert torch.equal(mixed.entropy, plain.entropy)
    assert torch.equal(mixed.vocabulary.mean, plain.vocabulary.mean)
    stored = policy.model.bfloat16()
    rounded = score_tokens(stored, ids, mask, 0.7, states=states)
    exact = (hidden.double() @ stored.get_output_embeddings().weight.double().T / 0.7).log_softmax(-1)
    torch.testing.assert_close(rounded.logprobs[mask].double(), exact.gather(1, ids[mask][:, None])[:, 0], rtol=1e-5, atol=1e-5)


def test_agreement_is_bounded_in_bfloat16():
    sums = {"max_logprob_difference": 0.2, "logprob_difference": 20.0, "logprob_tokens": 1000.0, "logprobs_apart": 3.0}
    sums |= {"max_rescored_difference": 1e-3, "rescored_difference": 0.05}
    measured = agreement(sums)
    assert measured["mean_rescored_difference"] == 5e-5
    check_agreement(measured, "bfloat16", 0)
    with pytest.raises(ValueError, match=r"step 1: sampling and training log-probs differ by 0\.15 on average \(limit 0\.1\)"):
        check_agreement({**measured, "mean_logprob_difference": 0.15}, "bfloat16", 0)
    with pytest.raises(ValueError, match=r"by 3 at most \(limit 2\)"):
        check_agreement({**measured, "max_logprob_difference": 3.0}, "bfloat16", 0)
    with pytest.raises(ValueError, match="differ by nan on average"):
        check_agreement({**measured, "mean_logprob_difference": float("nan")}, "bfloat16", 0)
    with pytest.raises(ValueError, match=r"step 2: log-probs recomputed by the training pass differ by 0\.0002 on average"):
        check_agreement({**measured, "mean_rescored_difference": 2e-4}, "bfloat16", 1)
