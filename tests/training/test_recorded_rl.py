"""rl on what an outside agent, in another process, played against the serving endpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from served import WAIT_S
from source_imports import ROOT

from stages import rl
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy, policy_hash
from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.records.episode import Episode, Owner, conversations, joined, read_episodes, write_episodes
from stages.runtime.validation import ParamsError
from stages.serving.episodes import main as make_table
from training.toys import SHORT_RUN, KilledError, kill_at_step, outputs, run

pytest.importorskip("openai", reason="needs the extra `openai`: pip install 'bellwether[openai]'")
pytestmark = [pytest.mark.timeout(WAIT_S), pytest.mark.long(60)]
TASKS, ATTEMPTS = 4, 8
FILE = "data/raw/recorded/rooms.parquet"
AGENT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI

client = OpenAI(max_retries=0)
def play(task, attempt):
    names = {"trace": f"run {task}-{attempt}", "task": f"room {task}"}
    def ask(*messages):
        roles = [("user", "assistant")[place % 2] for place in range(len(messages))]
        said = [{"role": role, "content": text} for role, text in zip(roles, messages)]
        return client.chat.completions.create(model="sft", messages=said, max_tokens=3, metadata=names).choices[0].message.content
    first = ask(f"you are in room {task}")
    ask("what is a key")
    second = ask(f"you are in room {task}", first, "you see a key")
    reward = float("a" <= second[:1].lower() < "n")
    client.post("/outcomes", body={"trace": names["trace"], "reward": reward}, cast_to=object)

with ThreadPoolExecutor(4) as threads:
    jobs = [threads.submit(play, task, attempt) for task in range(TASKS) for attempt in range(ATTEMPTS)]
    [job.result() for job in jobs]
client.chat.completions.create(model="sft", messages=[{"role": "user", "content": "no trace"}], max_tokens=3)
""".replace("TASKS", str(TASKS)).replace("ATTEMPTS", str(ATTEMPTS))
RL: dict[str, Any] = {
    **SHORT_RUN,
    "algorithm": "grpo",
    "steps": 6,
    "tasks_per_step": 2,
    "dead_groups": "keep",
    "tasks": {"source": "recorded", "settings": {"files": [FILE]}},
}


@pytest.fixture(scope="module")
def recording(make_contexts: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the agent's runs left, recorded by the server as a user starts it."""
    root = make_contexts(tmp_path_factory.mktemp("served"))("rl").root
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "stages.serving", "--model", "sft", "--port", "0", "--record", "recorded.jsonl"]
    server = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        printed = [server.stdout.readline() for _ in range(4)]
        address = re.search(r"http://127\.0\.0\.1:\d+/v1", printed[0])
        assert address is not None, [*printed, server.stdout.read()]
        assert printed[2] == "serve: records calls in recorded.jsonl, drawn as rl.sampling says\n"
        given = {**os.environ, "OPENAI_BASE_URL": address.group(), "OPENAI_API_KEY": "none"}
        subprocess.run([sys.executable, "-I", "-c", AGENT], env=given, check=True, timeout=WAIT_S)
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=WAIT_S)
    finally:
        server.kill()
        server.wait()
    return root / "recorded.jsonl"


@pytest.fixture
def recorded(recording: Path, make_context: Any, capsys: pytest.CaptureFixture) -> Callable[..., Any]:
    """recorded(name, **changes): a context of rl whose data/raw has the recorded episodes. precision: resources.precision."""

    def context(name: str, precision: str = "float32", **changes: Any) -> Any:
        resources = {"slots": 16, "threads": 1, "tokens_per_batch": 512, "precision": precision}
        made = make_context("rl", name, rl={**RL, **changes}, resources=resources)
        sft = made.root / "data/models/sft"
        assert make_table([str(recording), "--out", str(made.root / FILE), "--policy", str(sft)]) == 0
        return made

    return context


def mean_logprob(folder: Path, episodes: list[Episode], reward: float) -> float:
    """Mean log-probability under the policy in `folder` of a token that it was given in a play with this reward."""
    model, values = load_policy(folder).model, list[float]()
    for episode in conversations(one for one in episodes if one.reward == reward):
        mask = torch.tensor([[owner == Owner.POLICY for owner in episode.owner]])
        with torch.no_grad():
            found = token_logprobs(model, torch.tensor([episode.token_ids]), mask)[0]
        values += found[mask[0]].tolist()
    return sum(values) / len(values)


def test_an_agent_of_another_process_trains_the_policy(recorded: Callable[..., Any], capsys: pytest.CaptureFixture) -> None:
    """Contract: calls of an agent that is written with the OpenAI client become episodes with the tokens and log-probabilities of
    the policy, and rl makes rewarded answers more likely and others less; its ratios are to the recorded log-probabilities."""
    context = recorded("plain")
    counts = json.loads(capsys.readouterr().out)
    assert (counts["plays"], counts["tasks"], counts["left_out"]) == (TASKS * ATTEMPTS, TASKS, {"unrewarded": 1})
    assert counts["conversations"] >= 2 * TASKS * ATTEMPTS
    episodes, sft = joined(read_episodes(context.root / FILE)), context.root / "data/models/sft"
    assert {episode.policy_hash for episode in episodes} == {policy_hash(sft)}
    model = load_policy(sft).model
    for episode in conversations(episodes):
        mask = torch.tensor([[owner == Owner.POLICY for owner in episode.owner]])
        expected = token_logprobs(model, torch.tensor([episode.token_ids]), mask)[0]
        assert torch.allclose(torch.tensor(episode.logprob), expected, atol=1e-5)

    history = run(context)
    assert [row["episodes"] for row in history] == [2.0 * ATTEMPTS] * 6
    assert history[0]["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert all(row["ratio_max"] > 1.01 for row in history[1:])
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["max_logprob_difference"] <= 1e-5
    assert report["ledger/environment_tokens_trained"] == 0
    assert (report["recorded"]["plays"], report["recorded"]["passes"]) == (TASKS * ATTEMPTS, 3)
    drawn = sum(one.policy_tokens for one in conversations(episodes))
    assert report["ledger/policy_tokens_trained"] == 3 * drawn
    trained = context.root / "data/models/rl/toy"
    assert mean_logprob(trained, episodes, 1.0) > mean_logprob(sft, episodes, 1.0) + 0.1
    assert mean_logprob(trained, episodes, 0.0) < mean_logprob(sft, episodes, 0.0) - 0.1


def test_ratios_are_to_the_recording_in_mixed_precision(recorded: Callable[..., Any], other_precision: None) -> None:
    """Contract: where the training pass recomputes log-probabilities of episodes that rl plays, those of a recording stay."""
    history = run(recorded("mixed", "bfloat16", steps=2))
    assert history[0]["ratio_max"] != 1.0
    assert history[1]["ratio_max"] > history[0]["ratio_max"]


@pytest.mark.slow
def test_killed_runs_end_with_the_same_bytes(recorded: Callable[..., Any]) -> None:
    plain, killed = recorded("plain", steps=4), recorded("killed", steps=4)
    run(plain)
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    run(recorded("killed", steps=4))
    assert outputs(killed.root) == outputs(plain.root)


def test_episodes_of_another_policy_or_sampling_are_refused_by_name(recorded: Callable[..., Any]) -> None:
    context = recorded("refused", sampling={"temperature": 0.5})
    with pytest.raises(
        ValueError, match=r"rooms\.parquet: episode .* was drawn with temperature, top_p, top_k \(1\.0, 1\.0, 0\)"
    ):
        rl.run(context)
    context = recorded("refused", tasks_per_step=5)
    with pytest.raises(ValueError, match=r"rl\.tasks_per_step is 5, but .* have only 4 tasks with 2 recorded plays or more"):
        rl.run(context)
    twice = {"tasks": {"source": "recorded", "settings": {"files": [FILE, FILE]}}}
    with pytest.raises(ValueError, match=r"episode .* is in two files; make one table of all recordings"):
        rl.run(recorded("refused", **twice))
    context = recorded("refused")
    episodes = read_episodes(context.root / FILE)
    for episode in episodes:
        episode.policy_hash = "0123456789abcdef"
    write_episodes(context.root / FILE, episodes)
    own = policy_hash(context.root / "data/models/sft")
    with pytest.raises(ValueError, match=rf"drawn by policy 0123456789abcdef, and the policy to be trained is {own}"):
        rl.run(context)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"advantage": {"mean": "greedy"}}, "advantage.mean: greedy plays episodes in its own way"),
        (
            {"loss": {"kind": "policy_gradient"}},
            "rl.loss.kind policy_gradient of grpo has no ratio to recorded log-probabilities",
        ),
        ({"algorithm": "arpo"}, "branching.kind: entropy plays episodes"),
        ({"imitation": {"ratio": 0.5}}, "imitation.ratio is about tasks that curate wrote"),
        ({"warm_start": {"algorithm": "rejection_sft"}}, "rl.warm_start changes the policy"),
        ({"tasks": {"source": "recorded", "settings": {"files": ["/tmp/a.parquet"]}}}, "put the table below data/raw"),
        ({"tasks": {"source": "recorded"}}, "files"),
    ],
)
def test_settings_that_need_plays_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ParamsError, match=re.escape(problem)):
        resolve(Rl.model_validate({**RL, **changes}), 128)
