"""`python -m stages.serving --router`: specialists of a conversion answer through the real `openai` client, or fall back."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from narrow_calls import call_of, logged, small_settings, strange, write_log
from served import WAIT_S

from stages.agent.chat import Chat
from stages.agent.policy import load_policy, policy_hash, save_policy
from stages.conversion.call_log import read_calls
from stages.conversion.clusters import Clusters, fit_clusters
from stages.conversion.masking import Masker
from stages.conversion.rounds import convert
from stages.conversion.router import LARGE, CallRouter, RouterError, Specialist
from stages.conversion.settings import ClusterCalls, Conversion, Specialise
from stages.conversion.specialise import train
from stages.engine.engine import Turn
from stages.serving import __main__ as serve
from stages.serving.engine_thread import EngineThread, GenerationJob
from stages.serving.specialists import Decision, Specialists

openai = pytest.importorskip("openai", reason="needs the extra `openai`: pip install 'bellwether[openai]'")
pytestmark = pytest.mark.timeout(WAIT_S)
ROOT = Path(__file__).resolve().parents[2]
KEY = bytes(range(32))
KINDS = ("email",)
ADDRESS = "a.b@c.de"


@pytest.fixture(scope="module")
def project(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the tiny policy as merged model, and a finished round in which cluster 0, the intents, has a specialist."""
    root = tmp_path_factory.mktemp("project")
    values = {
        "domains": ["toy", "other"],
        "resources": {"slots": 16, "threads": 1},
        "model": {"path": str(tiny_policy), "max_length": 96},
        "evaluate": {"sampling": {"temperature": 0.0, "max_tokens": 6}},
        "per_domain": {"toy": {}, "other": {}},
    }
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    policy = load_policy(tiny_policy)
    save_policy(policy.model, policy.tokenizer, root / "data/models/merged")
    intents = [{**call, "response": "wish 0"} for call in logged(72, ("intent",))]
    write_log(root / "calls.jsonl", [*intents, *logged(12, ("date",), 77)])
    settings = small_settings(tiny_policy)
    (root / "conversion.yaml").write_text(yaml.safe_dump({**settings, "log": "served.jsonl"}))
    report = convert(Conversion.model_validate(settings), root)
    assert [row["served_by"] for row in report["clusters"].values()] == ["tiny", LARGE]
    return root


@pytest.fixture(scope="module")
def server(project: Path) -> Iterator[SimpleNamespace]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "stages.serving", "--model", "merged", "--port", "0"]
    command += ["--router", "out", "--conversion", "conversion.yaml"]
    process = subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        printed = [process.stdout.readline() for _ in range(4)]
        address = re.search(r"http://127\.0\.0\.1:\d+/v1", printed[0])
        assert address is not None, [*printed, process.stdout.read()]
        assert printed[2] == "serve: router out: specialist 0 (tiny)\n"
        client = openai.OpenAI(base_url=address.group(), api_key="none", max_retries=0)

        def stop() -> str:
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0
            return str(rest)

        yield SimpleNamespace(client=client, stop=stop)
    finally:
        process.kill()
        process.wait()


def test_the_server_answers_through_the_router(server: SimpleNamespace, project: Path) -> None:
    """Contract: a specialist answers what `CallRouter.route` gives it, with that answer; the log says who answered and why a call
    fell back. Calls for people, other selections and draws are the large model's."""
    router = CallRouter.load(project / "out")
    intent, date, odd = next(logged(1, ("intent",), 600)), next(logged(1, ("date",), 600)), strange(1, "test")[0]

    def ask(call: dict[str, Any], trace: str, **more: Any) -> Any:
        metadata = {"trace": trace, **more.pop("metadata", {})}
        return server.client.chat.completions.create(
            **{"model": "merged", "messages": call["prompt"], "metadata": metadata, **more}
        )

    with ThreadPoolExecutor(4) as pool:
        own, unserved, other, person = pool.map(
            lambda asked: ask(asked[0], asked[1], metadata=asked[2]),
            [(intent, "own", {}), (date, "unserved", {}), (odd, "odd", {}), (intent, "person", {"human": "true"})],
        )
    (routed,) = router.route([intent])
    assert (routed.by, routed.answer.text if routed.answer else None) == ("specialist 0", "wish 0")
    assert own.choices[0].message.content == "wish 0"
    assert own.choices[0].finish_reason == "stop"
    chat = Chat(load_policy(project / "out/specialist-0").tokenizer)
    assert own.usage.prompt_tokens == len(chat.encode(intent["prompt"]).token_ids)
    assert own.usage.completion_tokens == len(chat.assistant_tokens("wish 0"))
    assert own.system_fingerprint == policy_hash(project / "out/specialist-0")
    large = policy_hash(project / "data/models/merged")
    for reply in (unserved, other, person):
        assert reply.system_fingerprint == large
    for more in ({"temperature": 0.8}, {"n": 2}, {"logprobs": True}, {"top_p": 0.5}, {"model": "merged+vote"}):
        assert ask(intent, "draws", **more).system_fingerprint == large
    greedy = ask(intent, "own", temperature=0, model="data/models/merged", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in greedy) == "wish 0"
    with pytest.raises(openai.BadRequestError, match=r"context is 96 tokens .*, and max_tokens is 500"):
        ask(intent, "refused", max_tokens=500)
    rows = [(row["trace"], row["provenance"], row["fallback"]) for row in read_calls(project / "served.jsonl")]
    assert rows == [
        *[("draws", LARGE, "")] * 6,  # two answers of n = 2
        ("odd", LARGE, "similarity"),
        *[("own", "specialist 0", "")] * 2,
        ("unserved", LARGE, ""),
    ]
    assert server.stop() == "serve: routed 4 calls: 1 by llm, 1 by llm (similarity), 2 by specialist 0\nserve: ended\n"


@pytest.fixture(scope="module")
def mailer(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> CallRouter:
    """A specialist that learned to answer with the placeholder of an address in the prompt."""
    folder = tmp_path_factory.mktemp("mailer")
    masker = Masker(KEY, KINDS)
    call = masker.mask_call(call_of("intent", 1, trace="t", prompt=[say(f"forward to {ADDRESS}")], response=f"mail {ADDRESS}"))
    policy = load_policy(tiny_policy)
    train(policy, None, [call] * 16, Specialise(epochs=40, learning_rate=0.01, kd_weight=0.0), 96, "mailer")
    save_policy(policy.model, policy.tokenizer, folder / "specialist-0")
    clusters: Clusters = fit_clusters([call] * 3, ClusterCalls(min_cluster=1))[0]
    made = Specialist(0, "tiny", 0.5, ("tool_mail",), 1.0, policy_hash(folder / "specialist-0"))
    return CallRouter(folder, clusters, [made], 0.3, 96, 40)


def say(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def decided(router: CallRouter, text: str, trace: str = "t", max_tokens: int | None = None) -> tuple[Decision, Specialists]:
    async def run(jobs: Any, engine: EngineThread) -> list[list[Turn]]:
        jobs = list[GenerationJob](jobs)
        return [await asyncio.wrap_future(engine.submit(job)) for job in jobs]

    specialists = Specialists(router, lambda: Masker(KEY, KINDS), ["merged"])
    try:
        return asyncio.run(specialists.decide([say(text)], trace, max_tokens, run)), specialists
    finally:
        specialists.close()


def changed(router: CallRouter, **changes: Any) -> CallRouter:
    made = replace(router.specialists[0], **changes)
    return CallRouter(router.folder, router.clusters, [made], router.min_similarity, router.max_length, router.max_tokens)


def test_specialists_read_masked_prompts_and_their_answers_are_unmasked(mailer: CallRouter) -> None:
    """Contract: a specialist sees what it learned from, and the client gets the values."""
    decision, specialists = decided(mailer, f"forward to {ADDRESS}")
    assert (decision.by, decision.fallback, decision.text) == ("specialist 0", "", f"mail {ADDRESS}")
    assert dict(specialists.counts) == {"specialist 0": 1}
    masked = Masker(KEY, KINDS).mask(f"forward to {ADDRESS}", "t")
    assert decision.prompt == tuple(specialists._chats[0].encode([say(masked)]).token_ids)


@pytest.mark.parametrize(
    ("changes", "text", "why"),
    [
        ({"threshold": 2.0}, f"forward to {ADDRESS}", "confidence"),
        ({"shapes": ("tool_wish",)}, f"forward to {ADDRESS}", "format"),
        ({}, "forward to nobody", "format"),  # it answers with a placeholder that the prompt does not have
        ({}, "zebra", "similarity"),
        ({}, f"forward to {ADDRESS} " + "a.b " * 60, "confidence"),  # no room for an answer
    ],
)
def test_what_a_specialist_can_not_answer_falls_back_and_is_counted(
    mailer: CallRouter, changes: dict[str, Any], text: str, why: str
) -> None:
    router = changed(mailer, **changes)
    decision, specialists = decided(router, text)
    assert decision == Decision(LARGE, why)
    assert dict(specialists.counts) == {f"llm ({why})": 1}
    (routed,) = router.route([Masker(KEY, KINDS).mask_call({"trace": "t", "prompt": [say(text)], "response": ""})])
    assert (routed.by, routed.fallback) == (LARGE, why)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("none", "none holds no finished round of a conversion (it has no router.json)"),
        ("broken", "broken/router.json is not a router"),
        ("torn", "torn/specialist-0 is not the model of torn/router.json: a round did not finish"),
    ],
)
def test_folders_without_a_finished_round_are_refused(
    folder: str, words: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "broken").mkdir(exist_ok=True)
    (project / "broken/router.json").write_text("{}")
    (project / "torn").mkdir(exist_ok=True)
    (project / "torn/router.json").write_bytes((project / "out/router.json").read_bytes())
    monkeypatch.chdir(project)
    monkeypatch.setattr(serve, "quiet_environment", lambda *settings: None)  # it affects the whole process
    monkeypatch.setattr(sys, "argv", ["serve", "--port", "0", "--router", folder])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert serve.main() == 2
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert f"serve: {words}" in capsys.readouterr().err
    with pytest.raises(RouterError):
        Specialists(CallRouter.load(Path(folder)), lambda: Masker(KEY, KINDS), ["merged"])
