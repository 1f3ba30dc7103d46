"""Shared prefixes: encoding them once gives the states, loss and gradients of separate passes."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device import DEVICE
from engine.architectures import MAKERS, SHAPE, make, randomised
from training.toys import make_episode
from transformers import AutoConfig, AutoModelForCausalLM

from stages.agent.logprobs import predicting_states, token_logprobs
from stages.agent.policy import load_policy
from stages.agent.prefix_attention import _Read, _Taken, by_products, make_readers
from stages.agent.recompute import recompute_layers
from stages.agent.shared_prefixes import (
    can_share,
    fastest_states,
    in_order,
    make_layout,
    plan_shared,
    shares,
    sharing_states,
)
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.settings import Rl
from stages.engine.decoder import FAMILIES
from stages.records.episode import Owner
from stages.runtime.resources import Resources
from stages.training.common.batches import take, trajectory_batch
from stages.training.common.ledger import Ledger
from stages.training.common.loop import make_processes
from stages.training.rl.models import Models
from stages.training.rl.policy_updates import PolicyUpdates

PROMPTS = {"a": 30, "b": 45, "c": 12}
TURNS = {"a": [[3, 2], [1], [5, 2, 1], [2]], "b": [[4], [2, 2, 1], [1, 1]], "c": [[6], [3]]}


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request, tiny_policy):
    return load_policy(tiny_policy, device=DEVICE, attention=request.param).model


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


def with_equal_turns(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch, with the first 1 and 5 tokens after the prompt of group a's next two episodes equal to those of its first."""
    token_ids = batch.token_ids.clone()
    token_ids[1, 30:31] = token_ids[0, 30:31]
    token_ids[2, 30:35] = token_ids[0, 30:35]
    return batch.with_(token_ids=token_ids)


def test_readers_of_each_token_are_found():
    """Hand-counted: token 5 is read by three places, 7 and 8 by two, 9 and 0 by one; the zeros past the end by none."""
    nodes = np.array([[5, 7, 8, 9], [5, 7, 8, 0], [5, 0, 0, 0]])
    found = make_readers(nodes, [4, 3, 2], 10, torch.device("cpu"))
    assert [places.tolist() for places in found.places] == [[[9], [3]], [[1, 5], [2, 6]], [[0, 4, 8]]]
    assert found.order.tolist() == [0, 5, 5, 5, 5, 4, 5, 2, 3, 1]


def test_gradients_of_gathers_on_a_gpu_are_those_of_autograd():
    """Contract: of tokens that several places read, one, or none; also with states past the tokens, as products fill them up."""
    nodes, lengths = np.array([[5, 7, 8, 9], [5, 7, 8, 0], [5, 0, 0, 0]]), [4, 3, 2]
    read = make_readers(nodes, lengths, 10, torch.device("cpu"))
    real = torch.from_numpy(np.arange(4) < np.array(lengths)[:, None]).flatten()[:, None]
    states, weights = torch.randn(13, 2, requires_grad=True), torch.randn(12, 2) * real
    places, inverse = torch.tensor([4, 1, 2]), torch.tensor([3, 1, 2, 3, 0, 3])
    found = []
    for gathered in (_Read.apply(states, torch.from_numpy(nodes).flatten(), read), states[torch.from_numpy(nodes).flatten()]):
        found.append((gathered, *torch.autograd.grad((gathered * weights).sum(), states)))
    for taken in (_Taken.apply(states[:6], places, inverse), states[:6][places]):
        found.append((taken, *torch.autograd.grad((taken * weights[:3]).sum(), states)))
    for ours, autograds in (found[:2], found[2:]):
        torch.testing.assert_close(ours, autograds)
        assert float(ours[1].abs().sum()) > 0


def test_rows_are_sorted_with_the_length_of_their_shared_prefix():
    rows = [np.array(row) for row in ([7, 1, 2], [5, 1], [5, 1, 9, 9], [5, 2], [5, 1, 9], [5, 1, 9])]
    assert in_order(rows) == [(1, 0), (4, 2), (5, 3), (2, 3), (3, 1), (0, 0)]


def test_plan_holds_every_row_once_within_the_budget(model):
    batch = make_batch(model.config.vocab_size)
    rows = list(range(batch.size))
    whole = plan_shared(batch.token_ids, batch.mask, rows, 4096)
    assert [sorted(part) for part in whole] == [rows]
    parts = plan_shared(batch.token_ids, batch.mask, rows[::-1], 70)
    assert sorted(row for part in parts for row in part) == rows
    assert parts == plan_shared(batch.token_ids, batch.mask, rows, 70)
    for part in parts:
        layout = make_layout(*(getattr(take(batch, part), name) for name in ("token_ids", "mask")))
        assert len(part) == 1 or len(layout.ids) <= 70


@pytest.mark.parametrize("least", [2, 3, 4, 99])
def test_plan_divides_rows_evenly_into_the_requested_parts(model, least: int):
    batch = make_batch(model.config.vocab_size)
    rows = list(range(batch.size))
    parts = plan_shared(batch.token_ids, batch.mask, rows, 4096, least)
    assert sorted(row for part in parts for row in part) == rows
    assert len(parts) >= min(least, batch.size)
    micros = [take(batch, part) for part in parts]
    sizes = [len(make_layout(micro.token_ids, micro.mask).ids) for micro in micros]
    longest = int(batch.lengths.max())
    assert max(sizes) <= sum(sizes) / len(sizes) + longest
    assert plan_shared(batch.token_ids, batch.mask, [], 4096, least) == []


def test_layout_holds_each_distinct_prefix_once(model):
    batch = with_equal_turns(make_batch(model.config.vocab_size))
    micro = take(batch, range(batch.size))
    layout = make_layout(micro.token_ids, micro.mask)
    ends = [int(row.nonzero().max()) for row in micro.mask]
    prefixes = {tuple(row[: place + 1]) for row, end in zip(micro.token_ids.tolist(), ends, strict=True) for place in range(end)}
    assert len(layout.ids) == len(prefixes) < sum(ends)
    for row, end in enumerate(ends):
        assert layout.ids[layout.nodes[row, :end]].tolist() == micro.token_ids[row, :end].tolist()
        assert layout.positions[layout.nodes[row, :end]].tolist() == list(range(end))


@pytest.mark.parametrize("families", [FAMILIES, ()], ids=["layers", "model"])
def test_states_are_those_of_the_dense_pass(model, families, monkeypatch):
    """Contract: both by the layers' modules and by the forward pass of a model of an unknown family."""
    monkeypatch.setattr("stages.agent.shared_prefixes.FAMILIES", families)
    batch = with_equal_turns(make_batch(model.config.vocab_size))
    for rows in plan_shared(batch.token_ids, batch.mask, range(batch.size), 90):
        micro = take(batch, rows, DEVICE)
        with torch.no_grad():
            expected = predicting_states(model, micro.token_ids, micro.mask)
            found = sharing_states(model, micro.token_ids, micro.mask)
        torch.testing.assert_close(found, expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("gathering", [{"cuda"}, {"cpu", "cuda"}], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("families", [FAMILIES, ()], ids=["layers", "model"])
def test_recomputed_layers_give_the_same_gradient_and_keep_less(model, families, gathering, monkeypatch):
    monkeypatch.setattr("stages.agent.shared_prefixes.FAMILIES", families)
    monkeypatch.setattr("stages.agent.shared_prefixes.GATHERING", gathering)
    batch = make_batch(model.config.vocab_size)
    micro = take(batch, range(batch.size), DEVICE)
    gradients, kept = [], []
    for recompute in (False, True):
        twin = copy.deepcopy(model)
        if recompute:
            recompute_layers(twin)
        assert shares(twin)
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logprobs = token_logprobs(twin, micro.token_ids, micro.mask, states=sharing_states)
        logprobs.sum().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in twin.parameters()]))
        kept.append(sum(sizes.values()))
    assert float(gradients[0].norm()) > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    assert kept[1] < 0.7 * kept[0]


WINDOWED = ["mistral", "qwen2", "qwen3", "smollm3", "gemma3"]


WAYS = [(name, way) for name in ("gemma3", "qwen3") for way in ("products", "as on a GPU")]


@pytest.mark.parametrize(("name", "way"), [*((name, "") for name in WINDOWED), *WAYS])
def test_windows_give_states_and_gradients_of_the_dense_pass(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: for every model of the decoder, prompts of 30 and 45 tokens being longer than its windows of 24; also by
    products, as in bfloat16 on a CPU, and as on a GPU."""
    if way == "products":
        monkeypatch.setattr("stages.agent.prefix_attention._in_products", lambda *_: True)
    if way == "as on a GPU":
        monkeypatch.setattr("stages.agent.shared_prefixes.GATHERING", {"cpu", "cuda"})
    model = make(name).to(DEVICE)
    assert can_share(model)
    found = {}
    for states in (predicting_states, sharing_states):
        batch = with_equal_turns(make_batch(model.config.vocab_size))
        model.zero_grad()
        logprobs = []
        for rows in plan_shared(batch.token_ids, batch.mask, range(batch.size), 120):
            micro = take(batch, rows, DEVICE)
            logprobs.append(token_logprobs(model, micro.token_ids, micro.mask, states=states))
        torch.cat(logprobs).sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        found[states] = torch.cat(logprobs).detach(), gradient
    torch.testing.assert_close(found[sharing_states][0], found[predicting_states][0], atol=2e-5, rtol=1e-5)
    difference = found[sharing_states][1] - found[predicting_states][1]
    assert float(difference.norm() / found[predicting_states][1].norm()) < 1e-5


def test_windows_matter_in_these_batches() -> None:
    """The test above would find a window that is left out, or one token too long."""
    for name in WINDOWED:
        model = make(name).to(DEVICE)
        batch = make_batch(model.config.vocab_size)
        micro = take(batch, range(batch.size), DEVICE)
        with torch.no_grad():
            expected = predicting_states(model, micro.token_ids, micro.mask)
            for module in model.modules():
                if getattr(module, "sliding_window", None):
                    module.sliding_window += 1
            model.config.sliding_window += 1
            found = sharing_states(model, micro.token_ids, micro.mask)
        assert float((found - expected).abs().max()) > 1e-3, name


@pytest.mark.parametrize("name", sorted(set(MAKERS) - set(WINDOWED) - {"llama", "gpt2", "gpt_neox"}))
def test_other_models_with_windows_do_not_share(name: str) -> None:
    assert not can_share(make(name))


@pytest.mark.parametrize("tokens_per_batch", [4096, 60])
@pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "ppo"])
def test_loss_and_gradient_are_those_of_the_dense_pass(model, algorithm, tokens_per_batch):
    """Contract: loss to 1e-6, gradients to 1e-5 relative, whatever the micro-batches; the ledger sees every policy token once."""
    found = {}
    for share in (False, True):
        twin = copy.deepcopy(model)
        method = resolve(Rl(algorithm=algorithm, share_prefixes=share, loss={"entropy_coef": 0.01}))
        models = Models.make(method, twin, None, make_processes(Resources(device=DEVICE)), tokens_per_batch)
        assert models.sharing == share
        if models.critic is not None:
            models.critic.to(DEVICE)
        batch = method.prepare(models.annotate(with_equal_turns(make_batch(model.config.vocab_size)), method))
        ledger, total = Ledger(), 0.0
        for update in PolicyUpdates(models, method, ledger).updates(batch, 9, ("key",)):  # past the critic's warm-up
            for micro in update.micro_batches:
                for terms in update.loss(micro):
                    terms.loss.backward()
                    total += float(terms.loss.detach())
                    if terms.trained is not None:
                        update.on_tokens_trained(*terms.trained)
        assert ledger.policy_tokens == int(batch.mask.sum())
        found[share] = total, torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])
    assert found[True][0] == pytest.approx(found[False][0], abs=1e-6)
    dense, shared = found[False][1], found[True][1]
    assert float(dense.norm()) > 1e-3
    assert float((shared - dense).norm() / dense.norm()) < 1e-5
    torch.testing.assert_close(shared, dense, atol=1e-5, rtol=1e-4)


def test_shared_prompt_gets_its_gradient_from_every_episode(model):
    """By finite differences of an embedding that only the shared prompt uses."""
    twin = copy.deepcopy(model).double()
    micro = take(make_batch(model.config.vocab_size), [0, 1, 2, 3], DEVICE)

    def total() -> torch.Tensor:
        loss = token_logprobs(twin, micro.token_ids, micro.mask, states=sharing_states).sum()
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    total()
    weight = twin.get_input_embeddings().weight
    token = int(micro.token_ids[0, 10])
    assert token not in micro.token_ids[:, 30:].tolist()
    gradient = float(weight.grad[token, 2])
    with torch.no_grad():
        step = 1e-4
        weight[token, 2] += step
        above = total()
        weight[token, 2] -= 2 * step
        below = total()
    assert gradient == pytest.approx(float((above - below) / (2 * step)), rel=2e-2, abs=1e-4)
    assert abs(gradient) > 1e-3


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_products_compute_what_the_fused_kernel_does(kv_heads: int, causal: bool) -> None:
    """Contract: attention's two ways are equal to float32 rounding; in bfloat16 on a CPU the products are used."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 4, 6, 8, generator=generator)
    keys, values = torch.randn(2, 2, kv_heads, 6 if causal else 9, 8, generator=generator)
    visible = None if causal else torch.rand(2, 1, 6, 9, generator=generator) > 0.4
    if visible is not None:
        visible[..., 0] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible, is_causal=causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(by_products(queries, keys, values, visible, 0.3), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("gathering", [{"cuda"}, {"cpu", "cuda"}], ids=["as on a CPU", "as on a GPU"])
def test_states_in_bfloat16_are_those_of_the_dense_pass(
    gathering: set[str], name: str, weights: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: under autocast and with bfloat16 weights, by products on a CPU."""
    monkeypatch.setattr("stages.agent.shared_prefixes.GATHERING", gathering)
    called: list[torch.dtype] = []

    def products(queries: torch.Tensor, *others: Any) -> torch.Tensor:
        called.append(queries.dtype)
        return by_products(queries, *others)

    monkeypatch.setattr("stages.agent.prefix_attention.by_products", products)
    model = make(name).to(DEVICE)
    micro = take(with_equal_turns(make_batch(model.config.vocab_size)), range(9), DEVICE)
    with torch.no_grad():
        exact = predicting_states(model, micro.token_ids, micro.mask)
        model.to(weights)
        with torch.autocast(DEVICE.split(":")[0], dtype=torch.bfloat16):
            dense = predicting_states(model, micro.token_ids, micro.mask)
            found = sharing_states(model, micro.token_ids, micro.mask)
    error, usual = ((states.float() - exact).norm() / exact.norm() for states in (found, dense))
    assert 1e-3 < float(error) < 1.5 * float(usual)
    assert set(called) == (set() if DEVICE.split(":")[0] in gathering else {torch.bfloat16})


def test_prefixes_are_shared_only_with_attention_known_here():
    def fake(**config):
        return SimpleNamespace(config=SimpleNamespace(**config))

    assert can_share(fake())
    assert can_share(fake(layer_types=["full_attention"] * 2))
    assert not can_share(fake(layer_types=["full_attention", "linear_attention"]))
    assert not can_share(fake(sliding_window=128))
    assert not can_share(fake(sliding_window=128, model_type="llama")), "which ignores it"
    assert can_share(fake(sliding_window=128, model_type="mistral"))
    assert not can_share(fake(sliding_window=128, model_type="gemma3_text", use_bidirectional_attention=True))
    assert not can_share(fake(kv_lora_rank=16))
    own_attention = fake()
    own_attention._supports_attention_backend = False
    assert not can_share(own_attention), "like GPT-Neo, whose configuration has its windows under another name"


@pytest.mark.parametrize(("family", "shared"), [("doge", False), ("nemotron", False), ("olmo2", True), ("llama", True)])
def test_an_attention_that_differs_from_its_configuration_is_found(family: str, shared: bool) -> None:
    """Contract: training computes the model's own states: Doge masks positions by what they hold, and Nemotron does not pass the
    layout on, which their configurations do not say."""
    torch.manual_seed(0)
    model = randomised(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE)))
    model.set_attn_implementation("sdpa")
    assert can_share(model)
    assert shares(model) is shared
    states = fastest_states(model)
    assert states is (sharing_states if shared else predicting_states)
    micro = take(with_equal_turns(make_batch(model.config.vocab_size)), range(9))
    with torch.no_grad():
        expected = predicting_states(model, micro.token_ids, micro.mask)
        torch.testing.assert_close(states(model, micro.token_ids, micro.mask), expected, atol=2e-5, rtol=1e-5)
