"""stages.engine.torch_engine: batch-invariant sampling; the cache across turns, forks and evictions."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import make_tiny_model

from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy
from stages.engine import torch_engine
from stages.engine.engine import Engine, Sampling
from stages.engine.torch_engine import TorchEngine
from stages.seeding import key64, stream

TURNS = 3
STOP = 3


@pytest.fixture(scope="module")
def model(tiny_policy):
    return load_policy(tiny_policy).model


def prompt(name: int) -> list[int]:
    rng = stream("prompt", name)
    return [rng.randrange(4, 370) for _ in range(1 + rng.randrange(120))]


def observation(name: int, turn: int) -> list[int]:
    rng = stream("observation", name, turn)
    return [rng.randrange(4, 370) for _ in range(rng.randrange(40))]


def settings(name: int) -> Sampling:
    return [Sampling(max_tokens=9), Sampling(0.6, 0.8, 0, 5), Sampling(1.3, 1.0, 20, 12), Sampling(0.0, max_tokens=4)][name % 4]


def play(engine: TorchEngine, names, turns: int = TURNS):
    """{(name, turn): the turn without its session} for sessions that each take `turns` turns with observations in between."""
    out, sessions = {}, {}
    for name in names:
        sessions[engine.open(prompt(name))] = [name, 0]
    for session, (name, _) in sessions.items():
        engine.request(session, key64(name, 0), settings(name))
    while finished := engine.advance():
        assert [turn.session for turn in finished] == sorted(turn.session for turn in finished)
        for turn in finished:
            name, index = sessions[turn.session]
            out[name, index] = (turn.token_ids, turn.logprobs, turn.stop_reason)
            sessions[turn.session][1] += 1
            if index + 1 == turns:
                engine.close(turn.session)
            else:
                engine.extend(turn.session, observation(name, index))
                engine.request(turn.session, key64(name, index + 1), settings(name))
    return out


def engine_of(model, slots=64, max_length=320, **kwargs) -> TorchEngine:
    return TorchEngine(model, [STOP], slots=slots, max_length=max_length, **kwargs)


@pytest.fixture(scope="module")
def batched(model):
    torch.set_num_threads(1)
    return play(engine_of(model), range(64))


def test_implements_engine_protocol(model):
    assert isinstance(engine_of(model, slots=4), Engine)


@pytest.mark.parametrize("threads", [1, 2])
def test_sampling_is_batch_invariant(model, batched, threads):
    """Contract: token ids and log-probabilities are the same bits alone, among 64, in another order and in another slot."""
    torch.set_num_threads(threads)
    try:
        for name in (0, 1, 2, 3, 17, 41)[: 6 // threads]:
            alone = play(engine_of(model, slots=4), [name])
            assert alone == {key: value for key, value in batched.items() if key[0] == name}
        assert play(engine_of(model), reversed(range(64))) == batched
        some = [5, 60, 33, 2, 19, 48, 50]
        expected = {key: value for key, value in batched.items() if key[0] in some}
        assert play(engine_of(model, slots=5, batch_share=1.0), some) == expected
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kv_heads", [5, 1])
def test_sampling_is_batch_invariant_at_shipped_model_size(kv_heads):
    """Contract: batch invariance also holds at the shipped base model's widths and beyond 192 tokens, the longest
    sum that one matrix product computes in a single block: attending over the longest neighbour's length changes no bit."""
    model = make_tiny_model(
        768, kv_heads=kv_heads, hidden_size=160, intermediate_size=512, num_attention_heads=5, num_hidden_layers=2,
        initializer_range=0.05, seed=3,
    )  # fmt: skip
    batched = play(engine_of(model, max_length=512), range(64))
    for name in (0, 20, 30):
        alone = play(engine_of(model, slots=4, max_length=512), [name])
        assert alone == {key: value for key, value in batched.items() if key[0] == name}


def test_sampling_logprobs_equal_training_logprobs(model):
    """Contract: log-probabilities of sampled tokens equal those computed in training to 1e-5, in every turn."""
    for name, sampling in ((0, Sampling(1.0, max_tokens=9)), (5, Sampling(0.7, max_tokens=20)), (9, Sampling(0.0, max_tokens=5))):
        engine = engine_of(model, slots=4)
        session = engine.open(prompt(name))
        tokens, positions, logprobs = list(prompt(name)), [], []
        for turn in range(3):
            engine.request(session, key64(name, turn), sampling)
            (done,) = engine.advance()
            positions += range(len(tokens), len(tokens) + len(done.token_ids))
            logprobs += done.logprobs
            tokens += [*done.token_ids, *observation(name, turn)]
            engine.extend(session, observation(name, turn))
        mask = torch.zeros(1, len(tokens), dtype=torch.bool)
        mask[0, positions] = True
        with torch.no_grad():
            trained = token_logprobs(model, torch.tensor([tokens]), mask, sampling.temperature)
        torch.testing.assert_close(trained[mask], torch.tensor(logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_logprobs_equal_the_models_for_any_number_of_kv_heads(kv_heads):
    model = make_tiny_model(200, kv_heads=kv_heads)
    before = model.config._attn_implementation
    engine = TorchEngine(model, [STOP], slots=4, max_length=64)
    session = engine.open([5, 6, 7, 8, 9])
    engine.request(session, 1, Sampling(max_tokens=6))
    (turn,) = engine.advance()
    assert model.config._attn_implementation == before
    ids = torch.tensor([[5, 6, 7, 8, 9, *turn.token_ids]])
    logs = model(ids).logits[0, 4:-1].log_softmax(-1).gather(-1, ids[0, 5:, None])[:, 0]
    torch.testing.assert_close(logs.detach(), torch.tensor(turn.logprobs), atol=1e-5, rtol=0)


def test_forks_and_snapshots_sample_like_the_original(model):
    """Contract: a copy of a session samples the same bits as a session that was fed all tokens itself."""

    def ask(engine, session, key=7):
        engine.request(session, key, Sampling(max_tokens=8))
        found = {}
        while session not in found:
            found.update({turn.session: (turn.token_ids, turn.logprobs) for turn in engine.advance()})
        return found[session]

    engine = engine_of(model, slots=8)
    plain = engine.open(prompt(1))
    first = ask(engine, plain)
    engine.extend(plain, observation(1, 0))
    second = ask(engine, plain, 8)

    root = engine.open(prompt(1))
    forks = engine.fork(root, 3)
    fed = engine.counters["fed_tokens"]
    for session in (*forks, root):
        assert ask(engine, session) == first
    assert engine.counters["fed_tokens"] - fed == 4
    after = engine.snapshot(forks[0])
    assert after.cache.shape == (2, 2, 2, len(after.token_ids) - 1, 8)
    for session in forks:
        engine.close(session)
    for _ in range(2):
        again = engine.open(observation(1, 0), after)
        assert ask(engine, again, 8) == second
    # A snapshot of a session that never ran and of one between observation and turn.
    assert ask(engine, engine.open((), engine.snapshot(engine.open(prompt(1))))) == first
    engine.extend(root, observation(1, 0))
    assert ask(engine, engine.open((), engine.snapshot(root)), 8) == second


def test_evicted_session_resumes_unchanged(model, batched):
    """Contract: there may be more idle sessions than slots; moving their caches out and in changes no bit."""
    engine = engine_of(model, slots=4)
    sessions = {name: engine.open(prompt(name)) for name in range(12)}
    for turn in range(TURNS):
        for name, session in sessions.items():
            engine.request(session, key64(name, turn), settings(name))
            (done,) = engine.advance()
            assert (done.token_ids, done.logprobs, done.stop_reason) == batched[name, turn]
            engine.extend(session, observation(name, turn))
    assert engine.counters["evictions"] == 12 * TURNS - 4


def test_pause_returns_after_the_current_step(model):
    """Contract: during a pause a session may be closed in the middle of its turn; the others' turns do not change."""
    engine = TorchEngine(model, [3], slots=4, max_length=160)
    sampling = Sampling(max_tokens=30)

    def request_turns(*names):
        sessions = [engine.open(prompt(name)) for name in names]
        for name, session in zip(names, sessions, strict=True):
            engine.request(session, key64(name, 0), sampling)
        return sessions

    def finish(first, sessions):
        turns = list(first)
        while len(turns) < len(sessions):
            turns += engine.advance()
        found = {turn.session: (turn.token_ids, turn.logprobs) for turn in turns}
        for session in sessions:
            engine.close(session)
        return [found[session] for session in sessions]

    expected = finish([], request_turns(*range(3)))
    sessions = request_turns(*range(4))
    before = engine.counters["forward_passes"]
    first = engine.advance(lambda: True)
    one = engine.counters["forward_passes"]
    first += engine.advance(lambda: engine.counters["forward_passes"] > one)
    assert engine.counters["forward_passes"] == one + 1
    assert one > before
    engine.close(sessions.pop())
    assert finish(first, sessions) == expected
    assert engine.advance() == []


@pytest.mark.parametrize(
    "values",
    [{"temperature": 1e-320}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": 2**63}, {"top_p": math.nan}],
)
def test_invalid_sampling_parameters_are_rejected(values):
    """Contract: values that would break the engine for all its sessions are rejected when `Sampling` is made."""
    with pytest.raises(ValueError, match=r"bad sampling .*temperature 0 or at least 0\.001"):
        Sampling(**values)


def test_turn_ends_at_stop_token_limit_or_context(model):
    always = copy.deepcopy(model)
    with torch.no_grad():
        always.model.norm.weight.zero_()
    # All logits are 0, so greedy sampling takes token 0.
    engine = TorchEngine(always, [0], slots=4, max_length=16)
    session = engine.open([5] * 4)
    engine.request(session, 1, Sampling(0.0, max_tokens=6))
    (turn,) = engine.advance()
    assert (turn.token_ids, turn.stop_reason) == ((0,), "stop")
    assert turn.logprobs == pytest.approx([-math.log(always.config.vocab_size)], abs=1e-5)

    engine = TorchEngine(always, [1], slots=4, max_length=16)
    session = engine.open([5] * 4)
    reasons = []
    for _ in range(4):
        engine.request(session, 1, Sampling(0.0, max_tokens=6))
        (turn,) = engine.advance()
        reasons.append((len(turn.token_ids), turn.stop_reason))
    assert reasons == [(6, "length"), (6, "context"), (0, "context"), (0, "context")]


def test_misuse_is_rejected_with_the_reason(model):
    engine = engine_of(model, slots=4, max_length=32)
    with pytest.raises(ValueError, match="at most max_length = 32"):
        engine.open([5] * 33)
    with pytest.raises(ValueError, match="at least 1"):
        engine.open([])
    session = engine.open([5] * 30)
    with pytest.raises(ValueError, match="exceed max_length = 32"):
        engine.extend(session, [5] * 3)
    engine.request(session, 1, Sampling())
    for misuse in (lambda: engine.extend(session, [5]), lambda: engine.snapshot(session), lambda: engine.fork(session, 1)):
        with pytest.raises(RuntimeError, match="middle of a turn"):
            misuse()
    engine.close(session)
    assert engine.advance() == []
    for misuse in (
        lambda: engine.close(session),
        lambda: engine.extend(session, [5]),
        lambda: engine.request(session, 1, Sampling()),
    ):
        with pytest.raises(KeyError):
            misuse()
    with pytest.raises(ValueError, match="max_position_embeddings is 1024"):
        engine_of(model, max_length=2048)
    changed = copy.deepcopy(model)
    changed.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .* torch engine: it has layers of type linear_attention"):
        engine_of(changed)


def test_closing_a_running_session_frees_its_slot(model, batched):
    engine = engine_of(model, slots=8, batch_share=0.01)
    sessions = {engine.open(prompt(name)): name for name in range(8)}
    for session, name in sessions.items():
        engine.request(session, key64(name, 0), settings(name))
    found = {turn.session: turn for turn in engine.advance()}
    left = [session for session in sessions if session not in found]
    engine.close(left[0])
    late = engine.open(prompt(20))
    sessions[late] = 20
    engine.request(late, key64(20, 0), settings(20))
    while turns := engine.advance():
        found.update({turn.session: turn for turn in turns})
    assert set(found) == set(sessions) - {left[0]}
    for session, turn in found.items():
        assert (turn.token_ids, turn.logprobs, turn.stop_reason) == batched[sessions[session], 0]


def test_counters_count_tokens(model):
    engine = engine_of(model, slots=4)
    session = engine.open([5] * 10)
    engine.request(session, 1, Sampling(max_tokens=4))
    (turn,) = engine.advance()
    engine.extend(session, [6] * 5)
    engine.request(session, 2, Sampling(max_tokens=4))
    (again,) = engine.advance()
    counters = engine.counters
    assert counters["sampled_tokens"] == len(turn.token_ids) + len(again.token_ids)
    # The last token of a turn is fed with what follows it.
    assert counters["fed_tokens"] == 10 + 1 + 5
    assert counters["forward_passes"] == len(turn.token_ids) + len(again.token_ids)
    engine.reset()
    with pytest.raises(KeyError):
        engine.snapshot(session)


def test_read_returns_the_models_hidden_states(model):
    """Contract: `read` returns the hidden state after each session's last token: the model's to 1e-5, and the same bits alone and
    among more sessions than slots."""
    batched = TorchEngine(model, [STOP], slots=4, max_length=300)
    sessions = [batched.open(prompt(name)) for name in range(11)]
    states = batched.read(sessions)
    for name in (0, 4, 10):
        alone = TorchEngine(model, [STOP], slots=4, max_length=300)
        (state,) = alone.read([alone.open(prompt(name))])
        assert (state == states[name]).all()
        with torch.no_grad():
            own = model.base_model(input_ids=torch.tensor([prompt(name)])).last_hidden_state[0, -1]
        assert state == pytest.approx(own.numpy(), abs=1e-5)
    fed = batched.counters["fed_tokens"]
    assert all((first == again).all() for first, again in zip(states, batched.read(sessions), strict=True))
    assert batched.counters["fed_tokens"] == fed, "a repeated read feeds nothing"


def test_turn_after_read_needs_no_further_pass(model):
    """Contract: turns requested after `read`, of the session or of its copies, are unchanged and start without a forward pass; a
    session that was extended in between is read anew."""
    plain = TorchEngine(model, [STOP], slots=4, max_length=300)
    expected = []
    for key in range(3):
        plain.request(plain.open(prompt(3)), key, Sampling(max_tokens=1))
        expected += [(turn.token_ids, pytest.approx(turn.logprobs, abs=1e-6)) for turn in plain.advance()]
    engine = TorchEngine(model, [STOP], slots=4, max_length=300)
    session = engine.open(prompt(3))
    engine.read([session])
    prefix = engine.snapshot(session)
    passes, fed = engine.counters["forward_passes"], engine.counters["fed_tokens"]
    copies = [session, engine.open((), prefix), *engine.fork(session, 1)]
    for key, copy_ in enumerate(copies):
        engine.request(copy_, key, Sampling(max_tokens=1))
    turns = []
    while finished := engine.advance():
        turns += finished
    assert [(turn.token_ids, turn.logprobs) for turn in sorted(turns, key=lambda turn: turn.session)] == expected
    assert (engine.counters["forward_passes"], engine.counters["fed_tokens"]) == (passes, fed)
    (before,) = engine.read([engine.open((), prefix)])
    (after,) = engine.read([engine.open([7], prefix)])
    assert (before != after).any()


def test_read_does_not_change_running_turns(model):
    """Contract: with all slots but one in the middle of a turn, several sessions are read through that one, and the turns do not
    change."""

    def turns(reading: bool) -> dict[int, tuple[int, ...]]:
        engine = TorchEngine(model, [], slots=4, max_length=300, batch_share=0.01)
        for name in range(4):
            engine.request(engine.open(prompt(name)), key64(name), Sampling(max_tokens=40 if name else 4))
        others = [engine.open(prompt(5 + name)) for name in range(3)]
        finished = engine.advance()
        assert [turn.session for turn in finished] == [0]
        if reading:
            assert len(engine.read(others)) == 3
        while more := engine.advance():
            finished += more
        return {turn.session: turn.token_ids for turn in finished}

    assert turns(reading=True) == turns(reading=False)


def test_drawing_a_large_vocabulary_in_parts_changes_no_bit(model, monkeypatch):
    """Contract: turns, entropies and kept tokens are the same whatever number of rows is drawn at once."""
    found = []
    for most in (1 << 24, 3 * model.config.vocab_size, 1):
        monkeypatch.setitem(torch_engine.DRAWN_LOGITS, "cpu", most)
        engine = engine_of(model, slots=8)
        for name in range(7):
            settings = {"candidates": 5} if name % 3 == 0 else {"top_k": 4, "kept": True} if name % 3 == 1 else {}
            engine.request(engine.open(prompt(name)), name, Sampling(max_tokens=6, **settings))
        turns = []
        while len(turns) < 7:
            turns += engine.advance()
        found.append(sorted(turns, key=lambda turn: turn.session))
    assert found[0] == found[1] == found[2]
    assert found[0][0].entropies
    assert found[0][1].kept
