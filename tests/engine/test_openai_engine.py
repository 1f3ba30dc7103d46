"""stages.engine.openai_engine: episodes through an OpenAI-compatible server, and rejected servers.

A stub with vLLM's responses returns token ids and log-probs (completions_server.py); `transformers serve`, with the shipped
model, is real and returns text only."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from completions_server import serving
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.environment_pool import EnvironmentPool
from stages.agent.player import open_player, served_name
from stages.agent.policy import load_policy
from stages.agent.rollout import Labels, attempts, collect
from stages.engine.completion_engine import TurnRequest
from stages.engine.engine import Engine, EngineError, EngineSettings, Sampling
from stages.engine.openai_engine import parse_choice, request_fields, seed_of
from stages.engine.torch_engine import TorchEngine
from stages.records.episode import Episode
from stages.runtime.resources import EngineParams, Resources
from stages.seeding import key64

pytest.importorskip("openai", reason="needs the extra `openai`: pip install 'bellwether[openai]'")
ROOT = Path(__file__).resolve().parents[2]
STOP = 3
SAMPLING = Sampling(0.8, 0.9, 20, 8)


def settings(base_url: str = "http://127.0.0.1:9/v1", max_length: int = 160, **engine: object) -> EngineSettings:
    params = EngineParams.model_validate({"kind": "openai", "base_url": base_url, **engine})
    return EngineSettings.of(Resources(slots=8, engine=params), max_length)


@pytest.fixture
def torch_engine(tiny_policy: Path) -> TorchEngine:
    return TorchEngine(load_policy(tiny_policy).model, [STOP], slots=8, max_length=160)


def play(player) -> list[Episode]:
    with EnvironmentPool(CountingEnvironment) as pool:
        requests = attempts(toy_tasks(4), 2)
        return collect(player.engine, player.chat, pool, requests, SAMPLING, Labels(7), max_length=160, width=8)


def test_episodes_record_the_servers_tokens_and_logprobs(tiny_policy: Path, torch_engine: TorchEngine) -> None:
    """Contract: an episode records the token ids and log-probs that the server drew, turn by turn, for any number of requests in
    flight."""
    with serving(torch_engine) as server:
        player = open_player(tiny_policy, settings(server.base_url))
        assert isinstance(player.engine, Engine)
        episodes = play(player)
        counters = player.engine.counters
        player.close()
        one_by_one = open_player(tiny_policy, settings(server.base_url, requests=1, check_turns=0))
        assert play(one_by_one) == episodes
        one_by_one.close()
    assert counters["requests"] == sum(len(episode.turns) for episode in episodes)
    assert counters["sampled_tokens"] == sum(episode.policy_tokens for episode in episodes)
    body = next(body for body in server.bodies if body["prompt"] == episodes[0].token_ids[: episodes[0].turns[0].start])
    assert body["model"] == served_name(tiny_policy)
    assert {body["top_k"], body["top_p"], body["temperature"]} == {20, 0.9, 0.8}

    # The engine behind the server draws the same tokens from the seeds that were sent.
    for episode in episodes:
        for turn, record in enumerate(episode.turns):
            session = torch_engine.open(episode.token_ids[: record.start])
            attempt = int(episode.episode_id[-4:])
            torch_engine.request(session, seed_of(key64(7, "rollout", episode.task_id, attempt, turn)), SAMPLING)
            (drawn,) = torch_engine.advance()
            assert list(drawn.token_ids) == episode.token_ids[record.start : record.end]
            assert list(drawn.logprobs) == episode.logprob[record.start : record.end]
            torch_engine.close(session)


def test_closing_mid_turn_drops_unsent_request_and_late_reply(tiny_policy: Path, torch_engine: TorchEngine) -> None:
    held, begun = threading.Event(), threading.Event()

    def hold(choice: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        held.wait(60)
        return choice

    with serving(torch_engine, hold) as server:
        player = open_player(tiny_policy, settings(server.base_url, requests=1, check_turns=2))
        sessions = [player.engine.open(range(10, 14 + place)) for place in range(3)]
        for session in sessions:
            player.engine.request(session, 5, Sampling(max_tokens=4))
        assert player.engine.advance(begun.is_set) == []
        for session in sessions[:2]:
            player.engine.close(session)
        held.set()
        (turn,) = player.engine.advance()
        assert turn.session == sessions[2]
        assert [len(body["prompt"]) for body in server.bodies] == [4, 6]
        player.engine.close(sessions[2])
        assert player.engine.advance() == []
        player.close()


def test_length_limit_and_forks_match_torch_engine(tiny_policy: Path, torch_engine: TorchEngine) -> None:
    with serving(torch_engine) as server:
        player = open_player(tiny_policy, settings(server.base_url, max_length=20, check_turns=0))
        engine = player.engine
        first = engine.open(range(10, 24))
        (fork,) = engine.fork(first, 1)
        for session in (first, fork):
            engine.request(session, 5, Sampling(max_tokens=8))
        turns = []
        while len(turns) < 2:
            turns += engine.advance()
        assert turns[0].token_ids == turns[1].token_ids
        assert all(len(turn.token_ids) <= 6 and turn.stop_reason in ("stop", "context") for turn in turns)
        assert engine.snapshot(fork) == (*range(10, 24), *turns[0].token_ids)
        full = engine.open([5] * 20)
        engine.request(full, 1, Sampling())
        with pytest.raises(RuntimeError, match="middle of a turn"):
            engine.extend(full, [1])
        assert [(turn.session, turn.stop_reason) for turn in engine.advance()] == [(full, "context")]
        with pytest.raises(ValueError, match="at most max_length = 20"):
            engine.open([5] * 21)
        engine.close(full)
        with pytest.raises(KeyError):
            engine.extend(full, [1])
        player.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda choice: {**choice, "logprobs": None}, "returned no log-probabilities"),
        (lambda choice: {key: choice[key] for key in choice if key != "token_ids"}, "tokens as text, without their ids"),
        (lambda choice: {**choice, "finish_reason": "stop", "token_ids": [9] * len(choice["token_ids"])}, "end-of-turn token 3"),
        (
            lambda choice: {**choice, "logprobs": {**choice["logprobs"], "token_logprobs": [-9.0] * len(choice["token_ids"])}},
            "log-probabilities differ from the policy's by .* nats",
        ),
    ],
)
def test_server_without_ids_or_matching_logprobs_is_rejected(
    tiny_policy: Path, torch_engine: TorchEngine, change, message: str
) -> None:
    """Contract: no episode is recorded with made-up ids or log-probs."""
    with serving(torch_engine, change) as server:
        player = open_player(tiny_policy, settings(server.base_url, check_turns=2))
        with pytest.raises(EngineError, match=message):
            play(player)
        player.close()


def test_token_ids_are_parsed_from_every_response_format() -> None:
    spelt = SimpleNamespace(tokens=["token_id:5", "token_id:3"], token_logprobs=[-0.5, -0.25])
    assert parse_choice(SimpleNamespace(logprobs=spelt)) == ((5, 3), (-0.5, -0.25))
    content = SimpleNamespace(content=[{"id": 5, "logprob": -0.5}, {"id": 3, "logprob": -0.25}])
    assert parse_choice(SimpleNamespace(logprobs=content)) == ((5, 3), (-0.5, -0.25))
    with pytest.raises(EngineError, match="1 token ids but 2"):
        parse_choice(SimpleNamespace(logprobs=spelt, token_ids=[5]))


def test_top_k_is_rejected_for_dialects_without_it() -> None:
    request = TurnRequest(0, (1,), 2**40 + 5, Sampling(top_k=4))
    with pytest.raises(EngineError, match="top_k is 4"):
        request_fields(request, "openai", STOP, 0)
    assert request_fields(request, "vllm", STOP, 0)["seed"] == 5


def test_unreachable_server_error_names_the_address(tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.engine.openai_engine.RETRIES", 0)
    player = open_player(tiny_policy, settings())
    with pytest.raises(ConnectionError, match=r"no server answers at resources\.engine\.base_url http://127\.0\.0\.1:9/v1"):
        play(player)
    player.close()
    with pytest.raises(EngineError, match=r"resources\.engine\.text is for evaluate alone"):
        open_player(tiny_policy, settings(text=True))


@pytest.fixture(scope="module")
def transformers_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`transformers serve` in the repository's root, where `data/base` names the shipped model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1", "--port", str(port)]
    log = tmp_path_factory.mktemp("serve") / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as handle:
        server = subprocess.Popen([*command, "--device", "cpu"], cwd=ROOT, env=environment, stdout=handle, stderr=handle)
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.mark.slow
def test_transformers_serve_supports_only_evaluation_by_text(transformers_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns neither token ids nor log-probs, and is rejected where they are needed. With one request at a time, seeds make
    an evaluation repeatable."""
    monkeypatch.chdir(ROOT)
    base = ROOT / "data" / "base"
    assert served_name(base) == "data/base"
    strict = open_player(base, settings(transformers_server, dialect="transformers"))
    with pytest.raises(EngineError, match=r"no log-probabilities .*resources\.engine\.text: true"):
        play(strict)
    strict.close()
    foreign = open_player(base, settings(transformers_server, dialect="vllm"))
    with pytest.raises(EngineError, match=r"rejected a completion by model 'data/base' with status 4\d\d"):
        play(foreign)
    foreign.close()

    runs = []
    for _ in range(2):
        player = open_player(base, settings(transformers_server, dialect="transformers", text=True, requests=1), text=True)
        runs.append(play(player))
        player.close()
    assert [episode.messages for episode in runs[0]] == [episode.messages for episode in runs[1]]
    assert len({str(episode.messages) for episode in runs[0]}) > 4, "each episode has its own seeds"
    assert all(len(episode.turns) >= 1 for episode in runs[0])
    drawn = [value for episode in runs[0] for value, owner in zip(episode.logprob, episode.owner, strict=True) if owner == 1]
    assert all(math.isnan(value) for value in drawn)
