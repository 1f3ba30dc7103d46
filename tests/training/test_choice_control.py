"""Utility control: soft fine-tuning to an assembly, by hand and on a tiny model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages.agent.logprobs import token_logprobs
from stages.agent.policy import Policy, load_policy
from stages.judging.chooser import Chooser
from stages.judging.settings import JudgeModel
from stages.judging.utility_settings import Control
from stages.records.sections import params_hash
from stages.training.common.documents import Documents
from stages.training.sft.control import Choice, assembly_shares, control, rehearsed, soft_losses, target
from stages.training.sft.settings import Sft

OUTCOMES = {"key": 2.0, "lamp": 1.0, "box": 0.0, "door": -1.0, "room": -2.0, "barn": -3.0}


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Policy:
    return load_policy(tiny_policy, attention="sdpa")


def test_soft_loss_and_its_gradient() -> None:
    """a = 0.7: at pi = 0.5 the loss is 0.6931 and the gradient of A's logit -0.2; the minimum is 0.6109 at pi = 0.7."""
    logits = torch.zeros(1, 2, requires_grad=True)
    loss = soft_losses(logits, torch.tensor([0.7])).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.6931, abs=1e-4)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.2, 0.2])
    best = torch.tensor([[0.7, 0.3]]).log().requires_grad_()
    loss = soft_losses(best, torch.tensor([0.7])).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.6109, abs=1e-4)
    assert best.grad is not None
    assert best.grad.abs().max() < 1e-6


def test_switched_off_it_survives_a_dump_and_changes_no_hash() -> None:
    """Contract: a resolved params.yaml that is written out and read again is valid, and the key leaves hashes as they were."""
    assert Control.model_validate(Control().model_dump()) == Control()
    with_it = {"sft": {"epochs": 4.0, "control": Control().model_dump()}, "annotate": {"judge_model": JudgeModel().model_dump()}}
    assert params_hash(with_it) == params_hash({"sft": {"epochs": 4.0}, "annotate": {}})


def test_assembly_and_targets() -> None:
    shares = assembly_shares(Control(kind="soft", outcomes=OUTCOMES, spread=0.0), 0)
    assert set(shares.values()) == {1.0}, "outcomes are listed in order of utility, and all members agree"
    mixed = assembly_shares(Control(kind="soft", outcomes=OUTCOMES, spread=3.0), 0)
    assert {round(share * 6, 6) % 1 for share in mixed.values()} == {0.0}
    assert mixed == assembly_shares(Control(kind="soft", outcomes=OUTCOMES, spread=3.0), 0)
    assert [target(0.7, kind, 0) for kind in ("soft", "majority")] == [0.7, 1.0]
    assert target(0.5, "majority", 0) == 0.5
    drawn = [target(0.7, "sampled", 0, number) for number in range(500)]
    assert sum(drawn) / 500 == pytest.approx(0.7, abs=0.06)


def test_choices_are_the_options_probabilities(policy: Policy) -> None:
    chooser = Chooser(policy, "which?", ["a", "b"], 128, "sft.control")
    pairs = [("key", "a lamp and a box"), ("door", "room")]
    found = chooser.probabilities(pairs)
    for pair, (first, second) in zip(pairs, found, strict=True):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([chooser.prompt_tokens(*pair)])).logits[0, -1].softmax(-1)
        assert (first, second) == pytest.approx(tuple(logits[chooser.option_tokens].tolist()), abs=1e-5)
    with pytest.raises(ValueError, match=r"sft\.control\.options"):
        Chooser(policy, "which?", ["a", "a"], 128, "sft.control")


@pytest.mark.parametrize("kind", ["soft", "sampled", "majority"])
def test_it_raises_agreement_on_held_out_pairs(policy: Policy, kind: str) -> None:
    params = Control(
        kind=kind, outcomes=OUTCOMES, spread=0.0, options=["a", "b"], epochs=24, learning_rate=0.01, batch_tokens=1024
    )
    trained = replace(policy, model=copy.deepcopy(policy.model))
    found = control(trained, params, None, 128, 0, 4096)
    assert found["loss_after"] < found["loss_before"]
    assert found["agreement_after"] >= max(found["agreement_before"], 0.6)
    assert (found["questions"], found["held_out"]) == (12, 3)
    assert not torch.equal(next(trained.model.parameters()), next(policy.model.parameters()))


def log_likelihoods(policy: Policy, demonstrations: Documents) -> torch.Tensor:
    with torch.no_grad():
        logprobs = token_logprobs(policy.model, demonstrations.token_ids, demonstrations.mask)
    return logprobs.sum(1) / demonstrations.mask.sum(1)


def test_rehearsal_keeps_the_demonstrations(policy: Policy) -> None:
    """Contract: beside the questions the policy's demonstrations become no less likely; without rehearsal they do. Micro-batches
    change nothing."""
    rows = [[5, 6, 7, 20 + place, 30 + place] for place in range(6)]
    demonstrations = Documents(torch.tensor(rows), torch.tensor([[False] * 3 + [True] * 2] * 6), [5] * 6)
    settings = {"outcomes": OUTCOMES, "options": ["a", "b"], "epochs": 12, "learning_rate": 0.01, "batch_tokens": 1024}
    before, found = log_likelihoods(policy, demonstrations), {}
    for name, weight, micro in (("kept", 1.0, 4096), ("kept in parts", 1.0, 64), ("forgotten", 0.0, 4096)):
        trained = replace(policy, model=copy.deepcopy(policy.model))
        control(trained, Control(kind="soft", rehearsal=weight, **settings), demonstrations, 128, 0, micro)
        found[name] = log_likelihoods(trained, demonstrations)
    assert found["kept"].min() > before.min()
    assert found["kept"].mean() > before.mean() + 1.0 > found["forgotten"].mean() + 1.0
    torch.testing.assert_close(found["kept in parts"], found["kept"], atol=1e-2, rtol=1e-2)


def test_demonstrations_are_rehearsed_in_turn() -> None:
    choices = [Choice("0-1", [1, 2], 0.5)] * 5
    demonstrations = Documents(torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool), [3, 4])
    numbers = [one.demonstration[0] for one in rehearsed(choices, demonstrations, 0) if one.demonstration]
    assert sorted(numbers[:2]) == [0, 1]
    assert numbers[2:] == [*numbers[:2], numbers[0]]
    assert {one.width for one in rehearsed(choices, demonstrations, 0)} == {5, 6}


def test_rehearsal_without_demonstrations_is_refused() -> None:
    with pytest.raises(ValueError, match=r"control\.rehearsal needs demonstrations"):
        Sft(demonstrations=0, control={"kind": "soft", "outcomes": OUTCOMES})
    assert Sft(demonstrations=0, control={"kind": "soft", "outcomes": OUTCOMES, "rehearsal": 0.0}).control.rehearsal == 0.0
