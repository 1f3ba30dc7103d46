"""stages.engine.adapter_view: sessions of several adapters in one engine are those of an engine for each, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import adapted_policy

from stages.agent.policy import load_policy
from stages.engine import cuda_graphs
from stages.engine.adapter_view import AdapterView, share_base
from stages.engine.engine import Engine, Sampling
from stages.engine.torch_engine import TorchEngine
from stages.seeding import key64, stream
from stages.training.common.adapters import adapted, twin

STOP, LENGTH = 3, 160
NAMES = range(20)
Played = dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]]


def factors(model: Any, seed: int) -> None:
    """Give the model's adapters random factors B."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in adapted(model):
            weight = layer.lora_B["default"].weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)


@pytest.fixture
def models(tiny_policy: Path) -> list[Any]:
    """Three with one base and adapters of their own."""
    first = adapted_policy(tiny_policy).model
    others = [twin(first), twin(first)]
    for seed, model in enumerate(others, start=1):
        factors(model, seed)
    return [first, *others]


def engine_of(model: Any, slots: int = 32) -> TorchEngine:
    return TorchEngine(model, [STOP], slots=slots, max_length=LENGTH)


def words(name: int, turn: int) -> list[int]:
    rng = stream("words", name, turn)
    return [rng.randrange(4, 370) for _ in range(1 + rng.randrange(30))]


def play(engines: Mapping[int, Engine], by_turns: bool = False) -> Played:
    """(name, turn) -> tokens and log-probabilities of three turns with observations between them; `engines` by name. Sessions 0
    to 3 are forks. by_turns: as a team, each engine's sessions after the other's; False: all at once."""
    sessions: dict[int, int] = {}
    for name, engine in engines.items():
        root = engine.open(words(name, 0))
        sessions[engine.fork(root, 1)[0] if name < 4 else root] = name
        if name < 4:
            engine.close(root)
    played = Played()
    for turn in range(3):
        for group in dict.fromkeys(engines.values()) if by_turns else [None]:
            own = {session: name for session, name in sessions.items() if group in (None, engines[name])}
            for session, name in own.items():
                if turn:
                    engines[name].extend(session, words(name, turn))
                engines[name].request(session, key64(name, turn), Sampling(max_tokens=4 + name % 5))
            for engine in dict.fromkeys(engines[name] for name in own.values()):
                while found := engine.advance():
                    played |= {(own[done.session], turn): (done.token_ids, done.logprobs) for done in found}
    for session, name in sessions.items():
        engines[name].close(session)
    return played


def recorded(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
    """A recording whose replay runs the function again, into the same tensor."""
    result = function().clone()
    return (lambda: result.copy_(function())), result


@pytest.mark.parametrize("slots", [32, 6])
@pytest.mark.parametrize("kind", ["lean", "stock", "graphed"])
def test_sessions_of_several_adapters_are_those_of_an_engine_for_each(
    models: list[Any], monkeypatch: pytest.MonkeyPatch, slots: int, kind: str
) -> None:
    """Contract: the same tokens and log-probabilities, to the bit, though all run at once, also where they compete for slots, in
    the specialised pass, in the model's own layers, and in passes recorded as CUDA graphs are."""
    if kind == "stock":
        monkeypatch.setattr(cuda_graphs, "serves", lambda _: False)
    expected = Played()
    for place, model in enumerate(models):
        engine = engine_of(model)
        expected |= play({name: engine for name in NAMES if name % 3 == place})
    one = engine_of(models[0], slots)
    if kind == "graphed":
        one._layers = cuda_graphs.GraphedForward(one._layers, recorded)
    views: list[Engine] = [one, one.beside(models[1]), one.beside(models[2])]
    mixed = {name: views[name % 3] for name in NAMES}
    assert play(mixed) == play(mixed, by_turns=True) == expected
    assert bool(one.counters["evictions"]) == (slots < len(NAMES))
    other = play(dict.fromkeys(NAMES, one))
    assert any(other[key] != expected[key] for key in expected if key[0] % 3), "the adapters matter"


def test_changed_adapters_are_read_at_the_next_opening(models: list[Any]) -> None:
    """A training step changes both adapters; neither engine is made again, and the base's joint copies are held once."""
    one = engine_of(models[0])
    view = one.beside(models[1])
    before = play(dict.fromkeys(NAMES, view))
    for seed, model in enumerate(models[:2], start=7):
        factors(model, seed)
    after = play(dict.fromkeys(NAMES, view))
    assert after == play(dict.fromkeys(NAMES, engine_of(models[1]))) != before
    assert isinstance(view, AdapterView)
    assert isinstance(view, Engine)
    copies = [layers._projections for layers in (one._layers, one._beside[0][1])]  # type: ignore[attr-defined]
    assert copies[0] is copies[1]


def test_other_models_and_other_models_prefixes_are_refused(models: list[Any], tiny_policy: Path) -> None:
    one = engine_of(models[0])
    view = one.beside(models[1])
    prefix = one.snapshot(one.open(words(1, 0)))
    with pytest.raises(ValueError, match="adapter 0; it can't be continued with 1"):
        view.open([5], prefix)
    plain = load_policy(tiny_policy).model
    assert share_base(plain, plain)
    assert not share_base(plain, load_policy(tiny_policy).model)
    for other in (plain, adapted_policy(tiny_policy).model, twin(plain)):
        with pytest.raises(ValueError, match="differ in more than their adapters"):
            one.beside(other)
