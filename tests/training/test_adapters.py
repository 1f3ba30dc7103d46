"""LoRA adapters: trained and shared parameters, checkpoints, sampling."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from adapters import adapted_policy
from agent.test_shared_prefixes import make_batch

from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy
from stages.agent.settings import Lora
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import LossTerms
from stages.algorithms.settings import Rl
from stages.engine.adapters import AdapterError
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.params import parse_params
from stages.runtime.resources import Resources
from stages.runtime.validation import ParamsError
from stages.training.common.adapters import add_adapters, deltas, load_trained_state, reference_of, trained_state, twin
from stages.training.common.ledger import Ledger
from stages.training.common.loop import Learner, make_processes
from stages.training.common.optimiser import make_optimiser, warmup_constant
from stages.training.rl.critic import Critic
from stages.training.rl.models import Models
from stages.training.rl.policy_updates import PolicyUpdates
from stages.values.settings import HeadParams

IDS = torch.arange(5, 29).reshape(2, 12)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def with_adapters(folder: Path, **settings):
    model = load_policy(folder, attention="sdpa").model
    add_adapters(model, Lora(**{"rank": 4, **settings}), 0)
    return model


def test_adapters_start_at_zero_and_are_the_only_trained_parameters(tiny_policy: Path) -> None:
    plain, model = load_policy(tiny_policy, attention="sdpa").model, with_adapters(tiny_policy)
    assert torch.equal(logits(model), logits(plain))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name for name in trained)
    assert "lora" not in type(model.get_output_embeddings()).__module__
    again, other = with_adapters(tiny_policy), load_policy(tiny_policy).model
    add_adapters(other, Lora(rank=4), 1)
    name = trained[0]
    assert torch.equal(again.get_parameter(name), model.get_parameter(name))
    assert not torch.equal(other.get_parameter(name), model.get_parameter(name))
    assert not model.training


def test_targets_are_names_of_linear_layers(tiny_policy: Path) -> None:
    model = with_adapters(tiny_policy, targets=["q_proj", "v_proj"])
    assert {name.split(".")[-2] for name, _ in deltas(model)} == {"q_proj", "v_proj"}
    for targets in (["nowhere"], ["lm_head"], ["embed_tokens"]):
        with pytest.raises(AdapterError, match=r"model\.lora\.targets"):
            with_adapters(tiny_policy, targets=targets)


def test_factors_are_float32_with_frozen_bfloat16_weights(tiny_policy: Path) -> None:
    policy = adapted_policy(tiny_policy, precision="bfloat16")
    kinds = {parameter.dtype for parameter in policy.model.parameters() if parameter.requires_grad}
    assert kinds == {torch.float32}
    assert policy.model.dtype == torch.bfloat16
    exact = adapted_policy(tiny_policy)
    error = (logits(policy.model).float() - logits(exact.model)).abs().mean() / logits(exact.model).abs().mean()
    assert error < 0.05


def test_critic_and_reference_share_the_frozen_weights(tiny_policy: Path) -> None:
    """Contract: under LoRA neither reference nor critic copies the frozen weights; the reference stays the start policy."""
    model = with_adapters(tiny_policy)
    start = logits(model)
    reference, critic = reference_of(model), Critic(model, HeadParams())
    owned = {parameter.data_ptr() for parameter in model.parameters() if not parameter.requires_grad}
    assert {parameter.data_ptr() for parameter in reference.parameters()} == owned
    shared = {parameter.data_ptr() for parameter in critic.parameters() if not parameter.requires_grad}
    assert shared <= owned
    factors = {parameter.data_ptr() for parameter in model.parameters() if parameter.requires_grad}
    assert not factors & {parameter.data_ptr() for parameter in critic.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    assert not torch.allclose(logits(model), start, atol=1e-2)
    assert torch.equal(logits(reference), start)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    whole = load_policy(tiny_policy).model
    copied = {parameter.data_ptr() for parameter in twin(whole).parameters()}
    assert not copied & {parameter.data_ptr() for parameter in whole.parameters()}


def test_reference_of_a_trained_policy_has_its_adapters(tiny_policy: Path) -> None:
    """Contract: after a warm start under LoRA, the reference is the policy that the warm start trained."""
    model = with_adapters(tiny_policy)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.add_(0.1)
    trained, reference = logits(model), reference_of(model)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.add_(0.1)
    assert torch.equal(logits(reference), trained)
    assert not torch.allclose(logits(model), trained, atol=1e-2)
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_reference_logprobs_are_those_without_the_adapter(tiny_policy: Path) -> None:
    model = with_adapters(tiny_policy)
    models = Models.make(resolve(Rl()), model, None, make_processes(Resources()), 4096)
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.add_(0.1)
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[:, 0] = False
    with torch.no_grad():
        found = token_logprobs(models.reference, IDS, mask)
        expected = token_logprobs(load_policy(tiny_policy, attention="sdpa").model, IDS, mask)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("targets", ["all-linear", ["down_proj"]])
def test_shared_prefixes_give_the_gradient_of_the_dense_pass(tiny_policy: Path, targets) -> None:
    """Contract: reading prompts once gives the adapters the same gradient, even if a layer's keys do not depend on them."""
    found = {}
    for share in (False, True):
        model = with_adapters(tiny_policy, targets=targets)
        method = resolve(Rl(share_prefixes=share))
        models = Models.make(method, model, None, make_processes(Resources()), 60)
        batch = method.prepare(models.annotate(make_batch(model.config.vocab_size), method))
        for update in PolicyUpdates(models, method, Ledger()).updates(batch, 0, ("key",)):
            for micro in update.micro_batches:
                for terms in update.loss(micro):
                    terms.loss.backward()
                    if terms.trained is not None:
                        update.on_tokens_trained(*terms.trained)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found[share] = torch.cat([parameter.grad.flatten() for parameter in trained])
    assert float(found[False].norm()) > 1e-3
    assert float((found[True] - found[False]).norm() / found[False].norm()) < 1e-5


def test_learner_checkpoint_holds_only_trained_parameters(tiny_policy: Path) -> None:
    """Contract: frozen weights are in no checkpoint, and a restored learner continues bit for bit."""

    def learner() -> Learner:
        model = with_adapters(tiny_policy)
        return Learner(model, make_optimiser(model, 1e-2, 0.0), warmup_constant(1e-2, 0), 1.0, make_processes(Resources()))

    def step(one: Learner) -> None:
        def loss(micro):
            value = one.module(IDS).logits.float().logsumexp(-1).mean()
            yield LossTerms(value, {"loss": value.detach()})

        one.update([0], loss)

    first, second = learner(), learner()
    step(first)
    state = copy.deepcopy(first.state_dict())
    assert all("lora_" in name for name in state["module"])
    step(first)
    second.load_state_dict(state)
    step(second)
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other)
    whole = load_policy(tiny_policy).model
    assert set(trained_state(whole)) == set(whole.state_dict())
    with pytest.raises(ValueError, match="different trained parameters"):
        load_trained_state(whole, state["module"])


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_sampling_with_adapters_is_independent_of_other_sessions(tiny_policy: Path, rank: int) -> None:
    """Contract: token ids and log-probabilities are bit-identical alone and among other sessions."""
    model = adapted_policy(tiny_policy, rank=rank).model

    def play(names: list[int]) -> dict[int, tuple]:
        engine = TorchEngine(model, [3], slots=32, max_length=128)
        sessions = {engine.open(list(range(5, 8 + 3 * name))): name for name in names}
        for session, name in sessions.items():
            engine.request(session, name, Sampling(max_tokens=10))
        found = {}
        while turns := engine.advance():
            found |= {sessions[turn.session]: (turn.token_ids, turn.logprobs) for turn in turns}
        return found

    torch.set_num_threads(1)
    together = play(list(range(24)))
    for name in (0, 7, 23):
        assert play([name]) == {name: together[name]}


def test_missing_peft_is_reported_when_params_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"domains": ["search"], "per_domain": {"search": {}}, "model": {"lora": {"rank": 8}}}
    assert parse_params(values).model.lora.alpha == 32
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ParamsError, match=r"model\.lora.*pip install 'bellwether\[lora\]'"):
        parse_params(values)
    parse_params({**values, "model": {"lora": {"rank": 0}}})
