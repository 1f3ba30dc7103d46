"""stages.engine.vllm_engine: requests to vLLM and parsing of its replies, with a stub of vLLM; where vLLM and a CUDA device are
available, also episodes of the shipped model, whose log-probabilities equal those of its weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.environment_pool import EnvironmentPool
from stages.agent.player import open_player
from stages.agent.rollout import Labels, attempts, collect
from stages.engine.engine import EngineError, EngineSettings, Sampling
from stages.runtime.resources import EngineParams, Resources

ROOT = Path(__file__).resolve().parents[2]
AVAILABLE = importlib.util.find_spec("vllm") is not None and torch.cuda.is_available()
SAMPLING = Sampling(0.8, 0.9, 20, 8)
STOP = 3


def settings(device: str = "cpu", **engine: Any) -> EngineSettings:
    params = EngineParams.model_validate({"kind": "vllm", **engine})
    return EngineSettings.of(Resources(slots=8, device=device, engine=params), 160)


class StubEngine:
    """vllm.LLMEngine's methods that the back end calls: each request draws two tokens and the end of the turn, one request per
    step."""

    def __init__(self, arguments: Any) -> None:
        self.arguments, self.omit_logprobs = arguments, False
        self.waiting: list[tuple[str, Any, Any]] = []
        self.requested: list[Any] = []

    def add_request(self, request_id: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        self.waiting.append((request_id, prompt, params))
        self.requested.append(params)

    def abort_request(self, request_ids: list[str]) -> None:
        self.waiting = [request for request in self.waiting if request[0] not in request_ids]

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        name, prompt, params = self.waiting.pop(0)
        ids = [prompt["prompt_token_ids"][-1], 9, *params.stop_token_ids]
        logprobs = (
            None if self.omit_logprobs else [{token: SimpleNamespace(logprob=-0.5 * place)} for place, token in enumerate(ids)]
        )
        completion = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop")
        return [SimpleNamespace(request_id=name, finished=True, outputs=[completion])]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[StubEngine]:
    """The stub engines made so far."""
    made: list[StubEngine] = []

    def from_engine_args(arguments: Any) -> StubEngine:
        made.append(StubEngine(arguments))
        return made[-1]

    def keep(**values: Any) -> Any:
        return SimpleNamespace(**values)

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"EngineArgs": keep, "LLMEngine": SimpleNamespace(from_engine_args=from_engine_args), "SamplingParams": keep},
        "vllm.lora.request": {"LoRARequest": lambda *values: values},
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
        "vllm.distributed.parallel_state": {"cleanup_dist_env_and_memory": lambda: None},
        "vllm.lora": {},
        "vllm.distributed": {},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_each_turn_has_its_own_seed_and_logprobs(engine: list[StubEngine], tiny_policy: Path) -> None:
    player = open_player(tiny_policy, settings(check_turns=0))
    (made,) = engine
    assert (made.arguments.model, made.arguments.logprobs_mode) == (str(tiny_policy), "processed_logprobs")
    assert (made.arguments.max_model_len, made.arguments.max_num_seqs) == (160, 8)
    sessions = [player.engine.open([5, 6, last]) for last in (7, 8)]
    for key, session in enumerate(sessions):
        player.engine.request(session, key, SAMPLING)
    turns = {turn.session: turn for turn in [*player.engine.advance(), *player.engine.advance()]}
    assert len({params.seed for params in made.requested}) == 2
    for requested in made.requested:
        assert (requested.temperature, requested.top_p, requested.top_k, requested.max_tokens) == (0.8, 0.9, 20, 8)
        assert requested.stop_token_ids == [player.chat.end_of_turn]
    for last, session in zip((7, 8), sessions, strict=True):
        assert turns[session].token_ids == (last, 9, player.chat.end_of_turn)
        assert turns[session].logprobs == (0.0, -0.5, -1.0)
        assert turns[session].stop_reason == "stop"
    player.close()


def test_closing_mid_turn_aborts_the_request(engine: list[StubEngine], tiny_policy: Path) -> None:
    player = open_player(tiny_policy, settings(check_turns=0))
    sessions = [player.engine.open([5, last]) for last in (6, 7)]
    for session in sessions:
        player.engine.request(session, 1, SAMPLING)
    assert player.engine.advance(lambda: bool(engine[0].waiting)) == []
    assert len(engine[0].waiting) == 2
    player.engine.close(sessions[0])
    assert [name for name, _, _ in engine[0].waiting] == [str(sessions[1])]
    (turn,) = player.engine.advance()
    assert turn.session == sessions[1]
    player.close()


def test_tokens_omit_logprobs_are_rejected(engine: list[StubEngine], tiny_policy: Path) -> None:
    player = open_player(tiny_policy, settings(check_turns=0))
    engine[0].omit_logprobs = True
    player.engine.request(player.engine.open([5, 6]), 1, SAMPLING)
    with pytest.raises(EngineError, match="3 tokens but no log-probability"):
        player.engine.advance()


@pytest.mark.skipif(AVAILABLE, reason="vLLM is installed")
def test_missing_vllm_error_says_how_to_install_it(tiny_policy: Path) -> None:
    with pytest.raises(EngineError, match=r"pip install 'bellwether\[vllm\]'"):
        open_player(tiny_policy, settings())


@pytest.mark.skipif(not AVAILABLE, reason="needs a CUDA device and the extra `vllm`, in an environment of its own")
def test_vllm_logprobs_equal_those_of_the_weights() -> None:
    """`check_turns` compares all turns with the weights; draws depend on the seeds and repeat."""
    runs = []
    for _ in range(2):
        player = open_player(ROOT / "data" / "base", settings("cuda", check_turns=64, gpu_memory=0.3))
        with EnvironmentPool(CountingEnvironment) as pool:
            runs.append(
                collect(
                    *(player.engine, player.chat, pool, attempts(toy_tasks(4), 2), SAMPLING, Labels(7)), max_length=160, width=8
                )
            )
        player.close()
    assert [episode.token_ids for episode in runs[0]] == [episode.token_ids for episode in runs[1]]
    assert len({str(episode.token_ids) for episode in runs[0]}) > 4
