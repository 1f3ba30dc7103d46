"""`python -m stages.serving` with a tiny policy and a Q-model, used by the real `openai` client and by rollouts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import WAIT_S
from serving.conftest import MAX_LENGTH

from stages.agent.best_of_n import BestOfEngine, by_logprob, by_scorer, choose
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.player import open_player
from stages.agent.policy import load_policy
from stages.agent.rollout import Labels, attempts, collect
from stages.engine.engine import EngineSettings, Sampling, Turn
from stages.engine.openai_engine import seed_of
from stages.engine.torch_engine import TorchEngine
from stages.environments.protocol import Observation, Step
from stages.records.actions import action_key
from stages.records.episode import Episode
from stages.records.task import Task
from stages.runtime.resources import EngineParams, Resources
from stages.seeding import key64
from stages.serving import __main__ as serve
from stages.values.q_model import load_q_model

openai = pytest.importorskip("openai", reason="needs the extra `openai`: pip install 'bellwether[openai]'")
pytestmark = pytest.mark.timeout(WAIT_S)
ROOT = Path(__file__).resolve().parents[2]

SAMPLING = Sampling(0.8, 0.9, 20, 8)
MESSAGES = [{"role": "user", "content": "take the key"}]


@pytest.fixture(scope="module")
def server(project: Path) -> Iterator[SimpleNamespace]:
    """The server as a user starts it, and ends it with the printed `kill` command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "stages.serving", "--model", "merged", "--port", "0"]
    process = subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        printed = [process.stdout.readline() for _ in range(3)]
        address = re.search(r"http://127\.0\.0\.1:\d+/v1", printed[0])
        assert address is not None, [*printed, process.stdout.read()]
        assert f"kill {process.pid}" in printed[2]
        client = openai.OpenAI(base_url=address.group(), api_key="none", max_retries=0)
        yield SimpleNamespace(base_url=address.group(), client=client, printed=printed)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=WAIT_S)
        assert (process.returncode, rest) == (0, "serve: ended\n")
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def local(project: Path) -> SimpleNamespace:
    """The same models in this process."""
    policy = load_policy(project / "data/models/merged")
    chat = Chat(policy.tokenizer)
    engine = TorchEngine(policy.model, [chat.end_of_turn], slots=16, max_length=MAX_LENGTH)
    q_model = by_scorer(load_q_model(project / "data/models/q/toy", project / "data/models/sft"))
    same = lambda tokens: action_key(chat.action_text(tokens))  # noqa: E731

    def draw(token_ids: Sequence[int], key: int, sampling: Sampling, n: int = 1, rank: Any = by_logprob) -> Turn:
        selecting = BestOfEngine(engine, n, rank, same)
        session = selecting.open(token_ids)
        selecting.request(session, key, sampling)
        (turn,) = selecting.advance()
        selecting.close(session)
        return turn

    return SimpleNamespace(chat=chat, draw=draw, q_model=q_model)


def complete(server: SimpleNamespace, model: str, token_ids: Sequence[int], seed: int, **more: Any) -> Any:
    fields = {"temperature": SAMPLING.temperature, "top_p": SAMPLING.top_p, "max_tokens": SAMPLING.max_tokens, "seed": seed}
    extra = {"top_k": SAMPLING.top_k, "return_token_ids": True}
    return server.client.completions.create(
        model=model, prompt=list(token_ids), logprobs=1, **{**fields, **more}, extra_body=extra
    )


def test_listed_models_are_those_available(server: SimpleNamespace) -> None:
    """Contract: +q@DOMAIN is listed for domains with a Q-model, and +q alone if there is one such domain."""
    names = [model.id for model in server.client.models.list()]
    assert names == ["merged", "data/models/merged", "merged+logprob", "merged+vote", "merged+q", "merged+q@toy"]
    assert server.printed[1] == f"serve: models {', '.join(names)}\n"
    assert server.client.models.retrieve("data/models/merged").id == "data/models/merged"


def test_completion_has_the_engines_tokens_and_logprobs(server: SimpleNamespace, local: SimpleNamespace) -> None:
    prompt = local.chat.prompt_tokens("open the door")
    turns = [local.draw(prompt, key, SAMPLING) for key in (7, key64(7, "answer", 0, 1))]
    reply = complete(server, "merged", prompt, 7, n=2)
    assert [tuple(choice.token_ids) for choice in reply.choices] == [turn.token_ids for turn in turns]
    assert [tuple(choice.logprobs.token_logprobs) for choice in reply.choices] == [turn.logprobs for turn in turns]
    assert [choice.finish_reason == "stop" for choice in reply.choices] == [turn.stop_reason == "stop" for turn in turns]
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == sum(len(turn.token_ids) for turn in turns)
    text = local.chat.tokenizer.decode(prompt)
    assert (
        complete(server, "merged", prompt, 7).choices[0].text
        == server.client.completions.create(
            model="merged", prompt=text, seed=7, temperature=0.8, top_p=0.9, max_tokens=8, extra_body={"top_k": 20}
        )
        .choices[0]
        .text
    )


def test_best_of_n_is_selected_as_in_evaluate(server: SimpleNamespace, local: SimpleNamespace) -> None:
    """Contract: `+q@toy`, `+logprob` and `+vote` select what `evaluate.models` selects under those names, from the same key;
    requests under different names may run concurrently."""
    from concurrent.futures import ThreadPoolExecutor

    prompt = local.chat.prompt_tokens("open the box")
    ranks = {
        "merged": (1, by_logprob),
        "merged+logprob": (3, by_logprob),
        "merged+vote": (3, None),
        "merged+q@toy": (3, local.q_model),
    }
    wanted = {(name, seed): local.draw(prompt, seed, SAMPLING, *how) for name, how in ranks.items() for seed in range(6)}
    with ThreadPoolExecutor(8) as pool:
        replies = dict(zip(wanted, pool.map(lambda key: complete(server, key[0], prompt, key[1]), wanted), strict=True))
    assert {key: tuple(reply.choices[0].token_ids) for key, reply in replies.items()} == {
        key: turn.token_ids for key, turn in wanted.items()
    }
    assert len({turn.token_ids for (name, seed), turn in wanted.items() if seed == 1}) > 1, "selection changes nothing"


def test_chat_is_tokenised_as_in_rollouts(server: SimpleNamespace, local: SimpleNamespace) -> None:
    """Contract: a conversation has the tokens of a rollout of it; omitted settings are those of evaluate.sampling."""
    messages = [*MESSAGES, {"role": "assistant", "content": "go north"}, {"role": "user", "content": "you see a box"}]
    tokens = [
        *local.chat.prompt_tokens("take the key"),
        *local.chat.assistant_tokens("go north"),
        *local.chat.observation_tokens("you see a box"),
    ]
    reply = server.client.chat.completions.create(model="merged", messages=messages, logprobs=True)
    turn = local.draw(tokens, 0, Sampling(0.0, 1.0, 0, 6))  # greedy, as in params.yaml
    (choice,) = reply.choices
    assert choice.message.content == local.chat.action_text(turn.token_ids)
    assert tuple(item.logprob for item in choice.logprobs.content) == turn.logprobs
    assert reply.usage.prompt_tokens == len(tokens)
    chunks = list(
        server.client.chat.completions.create(
            model="merged", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    assert chunks[-1].usage == reply.usage
    separate = [{"role": "system", "content": "take"}, {"role": "user", "content": [{"type": "text", "text": "the key"}]}]
    folded = [{"role": "user", "content": "take\nthe key"}]
    one, other = (server.client.chat.completions.create(model="merged", messages=item) for item in (separate, folded))
    assert one.choices[0].message.content == other.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "error", "code", "words"),
    [
        ({"model": "merged+qq@toy"}, "NotFoundError", "model_not_found", r"did you mean 'merged\+q@toy'\?"),
        (
            {"max_tokens": 500},
            "BadRequestError",
            "context_length_exceeded",
            "context is 160 tokens .*, and max_tokens is 500",
        ),
        (
            {"messages": [{"role": "user", "content": "take the key " * 60}]},
            *("BadRequestError", "context_length_exceeded", "which leaves no room for an answer"),
        ),
        ({"stop": ["."]}, "BadRequestError", None, "stop is not supported"),
        ({"extra_body": {"ignore_eos": True}}, "BadRequestError", None, "add it to stop_token_ids, or omit ignore_eos"),
        ({"extra_body": {"skip_special_tokens": False}}, "BadRequestError", None, "skip_special_tokens: unknown field"),
        ({"extra_body": {"temprature": 1}}, "BadRequestError", None, "temprature: unknown field"),
        ({"temperature": -1}, "BadRequestError", None, "temperature: Input should be greater than or equal to 0"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "go"}]},
            "BadRequestError",
            None,
            "must end with a user message",
        ),
        ({"messages": [{"role": "tool", "content": "go", "tool_call_id": "1"}]}, "BadRequestError", None, "the role 'tool'"),
    ],
)
def test_unanswerable_requests_give_errors_that_say_why(
    server: SimpleNamespace, fields: dict[str, Any], error: str, code: str | None, words: str
) -> None:
    with pytest.raises(getattr(openai, error), match=words) as refused:
        server.client.chat.completions.create(**{"model": "merged", "messages": MESSAGES, **fields})
    assert refused.value.code == code


class Rooms:
    """Ends after two actions; its observation depends on the action."""

    def reset(self, task: Task) -> Observation:
        self.task, self.actions = task, []
        return Observation(f"you are in room {task.seed}")

    def step(self, action: str) -> Step:
        self.actions.append(action)
        over = len(self.actions) == 2
        return Step(Observation("" if over else "you see " + "key " * (key64(action) % 4)), float(over), True, over, False)

    def state_key(self) -> str:
        return "|".join(self.actions)

    def close(self) -> None:
        self.actions = []


def play(project: Path, base_url: str, requests: int) -> list[Episode]:
    """Episodes that rollout would record with `resources.engine: {kind: openai, base_url: ...}`."""
    engine = EngineParams(kind="openai", base_url=base_url, requests=requests, check_turns=4)
    player = open_player(project / "data/models/merged", EngineSettings.of(Resources(slots=8, engine=engine), MAX_LENGTH))
    tasks = [Task(f"toy-{index}", "toy", "train", index, "take the key", {}, 1.0) for index in range(4)]
    with EnvironmentPool(Rooms) as pool:  # type: ignore[arg-type]
        episodes = collect(
            *(player.engine, player.chat, pool, attempts(tasks, 2), SAMPLING, Labels(7)), max_length=MAX_LENGTH, width=8
        )
    player.close()
    return episodes


def test_rollouts_through_the_server_equal_local_ones(
    server: SimpleNamespace, local: SimpleNamespace, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: as the `openai` back end it draws what the torch engine draws from the same seeds, however many requests are
    concurrent, and its log-probabilities pass the check against the policy's own."""
    monkeypatch.chdir(project)
    episodes = play(project, server.base_url, 8)
    assert play(project, server.base_url, 1) == episodes
    assert len({str(episode.messages) for episode in episodes}) > 4
    for episode in episodes:
        for turn, record in enumerate(episode.turns):
            key = seed_of(key64(7, "rollout", episode.task_id, int(episode.episode_id[-4:]), turn))
            drawn = local.draw(episode.token_ids[: record.start], key, SAMPLING)
            assert list(drawn.token_ids) == episode.token_ids[record.start : record.end]
            assert list(drawn.logprobs) == episode.logprob[record.start : record.end]


def test_selection_with_another_server_as_engine(
    server: SimpleNamespace, local: SimpleNamespace, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: with `--engine openai` another server draws, and this one selects among its draws."""
    from stages.params import load_params

    monkeypatch.chdir(project)
    params = load_params(project / "params.yaml")
    resources = params.resources.model_copy(update={"engine": EngineParams(base_url=server.base_url, check_turns=2)})
    settings = serve.engine_settings(params.model_copy(update={"resources": resources}), "openai", 8001)
    player = open_player(project / "data/models/merged", settings)
    selecting = BestOfEngine(player.engine, 3, local.q_model, lambda tokens: action_key(player.chat.action_text(tokens)))
    prompt = local.chat.prompt_tokens("open the box")
    for seed in range(3):
        session = selecting.open(prompt)
        selecting.request(session, seed, SAMPLING)
        (turn,) = selecting.advance()
        draws = [
            local.draw(prompt, seed_of(key), SAMPLING) for key in (seed, key64(seed, "best_of", 1), key64(seed, "best_of", 2))
        ]
        same = lambda tokens: action_key(local.chat.action_text(tokens))  # noqa: E731
        assert turn.token_ids == draws[choose(prompt, draws, local.q_model, same)].token_ids
    player.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "mergd"], "unknown model 'mergd'; did you mean 'merged'?"),
        (["--model", "merged_linear"], "data/models/merged_linear does not exist"),
        (["--model", "models/mine"], "models/mine does not exist"),
        (
            ["--model", "merged+q@other"],
            "unknown model 'merged+q@other'. Available: merged, merged+logprob, merged+vote, merged+q, merged+q@toy",
        ),
        (["--model", "merged+value@toy"], "No domain has token values: rl learns them with rl.algorithm b_coder"),
        (["--port", "TAKEN"], "is not available (Address already in use); choose another with --port"),
    ],
)
def test_invalid_arguments_are_reported_at_start(
    arguments: list[str],
    words: str,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(serve, "quiet_environment", lambda *settings: None)  # it affects the whole process
    handler = signal.getsignal(signal.SIGTERM)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["serve", *(taken if item == "TAKEN" else item for item in arguments)])
        try:
            assert serve.main() == 2
        finally:
            signal.signal(signal.SIGTERM, handler)
    assert words in capsys.readouterr().err


def test_unsupported_scaffold_is_warned_about_at_start(project: Path) -> None:
    from stages.params import load_params

    params = load_params(project / "params.yaml")
    assert serve.warnings(params) == []
    scaffold = params.evaluate.scaffold.model_copy(update={"recall": "task"})
    changed = params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"scaffold": scaffold})})
    assert serve.warnings(changed) != []


def test_own_address_as_engine_is_rejected(project: Path) -> None:
    from stages.params import load_params

    params = load_params(project / "params.yaml")
    with pytest.raises(ValueError, match="this server's own address"):
        serve.engine_settings(params, "openai", 8000)
    assert serve.engine_settings(params, "openai", 8001).kind == "openai"
