"""The model engine: any causal language model through its own forward pass and cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from architectures import SHAPE, make
from families import tiny_config
from playing import play, random_tokens

from stages.engine import local_engine, model_engine
from stages.engine.engine import Engine, Sampling, Turn
from stages.engine.local_engine import make_engine
from stages.engine.model_engine import ModelEngine
from stages.engine.own_cache import Way
from stages.engine.torch_engine import TorchEngine

MAX_LENGTH = 96
LENGTHS = {0: 3, 1: 60, 2: 31}


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(tiny_config(name)).eval()


@pytest.fixture(scope="module", params=["bloom", "mamba", "recomputed"])
def model(request: pytest.FixtureRequest) -> Any:
    return make("llama") if request.param == "recomputed" else tiny(request.param)


@pytest.fixture
def engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> ModelEngine:
    if model.config.model_type == "llama":
        monkeypatch.setattr(model_engine, "WAYS", (Way(0),))
    return ModelEngine(model, [3], MAX_LENGTH)


def ask(engine: ModelEngine, session: int, key: int = 7, **sampling: Any) -> Turn:
    engine.request(session, key, Sampling(**{"max_tokens": 8, **sampling}))
    (turn,) = engine.advance()
    return turn


def drawn(turn: Turn) -> tuple[Any, ...]:
    return turn.token_ids, turn.logprobs, turn.stop_reason


def test_it_plays_as_the_torch_engine() -> None:
    """Contract: tokens are those of the torch engine, log-probabilities up to rounding."""
    model = make("mistral")
    expected = play(TorchEngine(model, [], slots=4, max_length=MAX_LENGTH), LENGTHS, forked=40)
    found = play(ModelEngine(model, [], MAX_LENGTH), LENGTHS, forked=40)
    assert found.keys() == expected.keys()
    for name, (tokens, mask, logprobs) in found.items():
        assert (tokens, mask) == expected[name][:2]
        assert logprobs == pytest.approx(expected[name][2], abs=1e-5)


def test_ways_are_what_the_models_allow() -> None:
    assert ModelEngine(tiny("bloom"), [], MAX_LENGTH).way == Way(256)
    assert ModelEngine(tiny("mamba"), [], MAX_LENGTH).way == Way(1)


def test_sessions_do_not_depend_on_each_other(engine: ModelEngine) -> None:
    """Contract: the same bits alone and among others."""
    together = play(engine, LENGTHS)
    for name, length in LENGTHS.items():
        assert play(engine, {name: length})[name] == together[name]


def test_forks_and_snapshots_sample_like_the_original(engine: ModelEngine) -> None:
    """Contract: a copy of a session samples what a session samples that was fed all tokens itself, and copies are independent."""
    plain = engine.open(random_tokens(1, 30))
    first = ask(engine, plain)
    engine.extend(plain, random_tokens(2, 5))
    second = ask(engine, plain, 8)
    root = engine.open(random_tokens(1, 30))
    forks = engine.fork(root, 2)
    assert [drawn(ask(engine, session)) for session in (*forks, root)] == [drawn(first)] * 3
    after = engine.snapshot(forks[0])
    for _ in range(2):
        again = ask(engine, engine.open(random_tokens(2, 5), after), 8)
        assert (again.token_ids, again.stop_reason) == (second.token_ids, second.stop_reason)
        assert again.logprobs == second.logprobs
    shorter = engine.snapshot(plain, 30)
    assert shorter.token_ids == tuple(random_tokens(1, 30))
    assert ask(engine, engine.open((), shorter)).token_ids == first.token_ids
    assert isinstance(engine, Engine)


@pytest.mark.parametrize("kind", [ModelEngine, TorchEngine])
def test_forks_of_a_model_in_training_have_no_dropout(kind: Any) -> None:
    """Contract: the engine puts the model in evaluation mode, also where a fork is the first to compute."""
    model = make("gpt2")
    played = []
    for training in (False, True):
        engine = kind(model, [], max_length=64)
        root = engine.open(random_tokens(0, 40))
        model.train(training)
        (session,) = engine.fork(root, 1)
        engine.request(session, 7, Sampling(max_tokens=8))
        (turn,) = engine.advance()
        played.append((turn.token_ids, turn.logprobs))
    assert played[0] == played[1]


def test_fed_tokens_are_counted_wherever_they_are_fed(engine: ModelEngine) -> None:
    """Contract: `fed_tokens` are those of prompts and observations, each once: also of a prompt that is fed for its forks or is
    only read."""
    root = engine.open(random_tokens(1, 30))
    forks = engine.fork(root, 2)
    assert (engine.counters["fed_tokens"], engine.counters["forked_tokens"]) == (30, 60)
    ask(engine, forks[0], max_tokens=4)
    assert engine.counters["fed_tokens"] == 30
    engine.extend(forks[0], random_tokens(2, 5))
    ask(engine, forks[0], 8, max_tokens=4)
    assert engine.counters["fed_tokens"] == 36, "a turn's last token is fed with what follows it"
    engine.read([engine.open(random_tokens(3, 7))])
    assert engine.counters["fed_tokens"] == 43


def test_turns_end_at_stop_token_limit_or_context(model: Any, engine: ModelEngine) -> None:
    greedy = ask(engine, engine.open([5] * 4), temperature=0.0, max_tokens=1).token_ids[0]
    stopping = ModelEngine(model, [greedy], 16)
    turn = ask(stopping, stopping.open([5] * 4), temperature=0.0)
    assert (turn.token_ids, turn.stop_reason) == ((greedy,), "stop")
    plain = ModelEngine(model, [], 16)
    session = plain.open([5] * 4)
    reasons = [(len(turn.token_ids), turn.stop_reason) for turn in (ask(plain, session, max_tokens=6) for _ in range(3))]
    assert reasons == [(6, "length"), (6, "context"), (0, "context")]


def test_pause_interrupts_a_turn_that_goes_on_unchanged(engine: ModelEngine) -> None:
    expected = drawn(ask(engine, engine.open(random_tokens(1, 30)), max_tokens=6))
    session = engine.open(random_tokens(1, 30))
    engine.request(session, 7, Sampling(max_tokens=6))
    interrupted = 0
    while not (turns := engine.advance(lambda: True)):
        interrupted += 1
    assert (drawn(turns[0]), interrupted) == (expected, len(expected[0]) - 1)
    engine.request(session, 8, Sampling())
    with pytest.raises(RuntimeError, match="in the middle of a turn"):
        engine.extend(session, [5])
    engine.close(session)
    assert engine.advance() == []


def test_entropies_kept_tokens_and_states(model: Any, engine: ModelEngine) -> None:
    """Contract: what other parts read from the torch engine, from the model's own logits."""
    tokens = random_tokens(1, 30)
    turn = ask(engine, engine.open(tokens), top_k=3, kept=True, candidates=4, max_tokens=1)
    with torch.no_grad():
        ids = torch.tensor([tokens])
        logits = model(input_ids=ids).logits[0, -1]
        state = model.base_model(input_ids=ids).last_hidden_state[0, -1]
    best = logits.topk(3).indices
    assert turn.kept == (tuple(sorted(best.tolist())),)
    place = best.tolist().index(turn.token_ids[0])
    assert turn.logprobs[0] == pytest.approx(float(logits[best].log_softmax(-1)[place]), abs=1e-5)
    four = logits.log_softmax(-1).topk(4).values
    assert turn.entropies[0] == pytest.approx(float(-(four.exp() * four).sum()), abs=1e-5)
    (found,) = engine.read([engine.open(tokens)])
    assert found == pytest.approx(state.numpy(), abs=1e-5)


def test_a_failing_pass_loses_nothing(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: after an error in the middle of a turn, the next `advance` returns the turn as if there had been none."""
    expected = drawn(ask(engine, engine.open(random_tokens(1, 30)), max_tokens=6))
    session, feed, calls = engine.open(random_tokens(1, 30)), engine._forward.feed, iter(range(100))

    def failing(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise MemoryError
        return feed(*arguments)

    monkeypatch.setattr(engine._forward, "feed", failing)
    engine.request(session, 7, Sampling(max_tokens=6))
    with pytest.raises(MemoryError):
        engine.advance()
    (turn,) = engine.advance()
    assert (turn.token_ids, turn.stop_reason) == (expected[0], expected[2])
    assert turn.logprobs == pytest.approx(expected[1], abs=1e-5)


def test_engine_is_chosen_by_the_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the torch engine where it agrees with the model, else the model engine with a message, else an error by name."""
    assert isinstance(make_engine(make("llama"), [], 4, MAX_LENGTH), TorchEngine)
    assert capsys.readouterr().err == ""
    assert isinstance(make_engine(tiny("bloom"), [], 4, MAX_LENGTH), ModelEngine)
    message = capsys.readouterr().err
    assert "BloomForCausalLM (model_type bloom) runs by its own forward pass" in message
    assert "attention interface" in message

    def disagreeing(*_: Any) -> TorchEngine:
        raise ValueError("the hidden states differ")

    with monkeypatch.context() as patch:
        patch.setattr(local_engine, "TorchEngine", disagreeing)
        assert isinstance(make_engine(make("llama"), [], 4, MAX_LENGTH), ModelEngine)
    assert "the hidden states differ" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"RobertaForCausalLM .* token by token: hidden states differ by 0\.\d+"):
        make_engine(tiny("roberta"), [], 4, MAX_LENGTH)
    with pytest.raises(ValueError, match="max_position_embeddings is 512"):
        make_engine(hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)), [], 4, 600)
