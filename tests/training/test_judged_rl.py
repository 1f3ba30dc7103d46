"""`rl.reward.kind: judge`: groups are judged while rl trains; the run resumes and repeats to the same bytes."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from stages import rl
from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.judging.contract import NO_REPLY, JudgeError
from stages.records.episode import read_rows
from stages.records.task import Task
from stages.runtime.validation import ParamsError
from stages.training.rl import scorers
from training.toys import SHORT_RUN, FirstLetterEnvironment, KilledError, kill_at_step, outputs, read_history

RL: dict[str, Any] = {
    **SHORT_RUN,
}
ARENA = {**RL, "algorithm": "arena_rl"}


def report(context) -> dict[str, Any]:
    return json.loads((context.root / "reports/rl/toy.json").read_text())


def judgments(context) -> list[dict[str, Any]]:
    return read_rows(context.root / "data/rl/toy/judgments.parquet")


def test_tournaments_are_played_counted_and_kept(make_context) -> None:
    """Groups of 4 and a greedy anchor: 8 matches in both orders."""
    context = make_context("rl", rl=ARENA)
    rl.run(context)
    rows = judgments(context)
    assert len(rows) == 3 * 3 * 16
    assert {len(row["candidates"]) for row in rows} == {2}
    assert {row["status"] for row in rows} == {"ok"}
    found = report(context)["judge"]
    assert found["calls"] == len(rows) == found["judgments"]
    assert found["scheme"] == "seeded_single_elimination"
    for row in read_history(context.root):
        assert row["judge_calls"] == 3 * 16
        assert row["judge_failures"] == 0
        assert -1 <= row["judge_agreement"] <= 1


def test_anchor_of_the_group_takes_fewer_calls_and_trains(make_context) -> None:
    context = make_context("rl", rl={**ARENA, "steps": 1, "judge": {"anchor": "first"}})
    rl.run(context)
    assert len(judgments(context)) == 3 * 12


@pytest.mark.parametrize("scheme", ["pointwise", "anchor", "round_robin", "swiss", "double_elimination"])
def test_every_scheme_trains(make_context, scheme: str) -> None:
    context = make_context("rl", rl={**RL, "steps": 1, "reward": {"kind": "judge"}, "judge": {"scheme": scheme}})
    rl.run(context)
    assert report(context)["judge"]["scheme"] == scheme


def test_judged_run_resumes_to_the_same_bytes(make_context) -> None:
    whole = make_context("rl", "whole", rl=ARENA)
    rl.run(whole)
    cut = make_context("rl", "cut", rl=ARENA)
    kill_at_step(cut, 2)
    with pytest.raises(KilledError):
        rl.run(cut)
    cut = make_context("rl", "cut", rl=ARENA)
    rl.run(cut)
    assert outputs(cut.root) == outputs(whole.root)


class Server(BaseHTTPRequestHandler):
    """Prefers the text that comes first in the alphabet; of seven requests it answers one with nonsense, one with a refusal, one
    with a rate limit and one with a time-out."""

    asked: int
    failing: bool

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).asked += 1
        content = body["messages"][1]["content"]
        first, second = content.partition("# First")[2].partition("# Verdict")[0].split("# Second")
        scores = [_scored(body, 8 if one < other else 4) for one, other in ((first, second), (second, first))]
        text = json.dumps({"reason": "alphabet", "first": scores[0], "second": scores[1]})
        fault = len(content) % 7
        message = {0: {"content": "I like both."}, 1: {"content": "", "refusal": "No."}}.get(fault, {"content": text})
        reply = {"choices": [{"message": message}], "usage": {"prompt_tokens": 50, "completion_tokens": 10}}
        encoded = json.dumps(reply).encode()
        self.send_response({2: 429, 3: 408}.get(fault, 200))
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *args: Any) -> None: ...


def _scored(body: dict[str, Any], score: int) -> dict[str, Any]:
    """The same score by every criterion, in the form that is asked for: of episodes with steps, process and answer."""
    properties = body["response_format"]["json_schema"]["schema"]["properties"]["first"]["properties"]
    assert list(properties) == ["process", "answer"]
    return {part: dict.fromkeys(held["properties"], score) for part, held in properties.items()}


def test_server_judged_run_repeats_without_the_server(make_context) -> None:
    """Contract: with the replies in the cache, the same run ends in the same bytes and nothing is asked; failures are counted."""
    Server.asked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        judge = {
            "kind": "server",
            "server": {
                "model": "m",
                "base_url": f"http://127.0.0.1:{server.server_port}/v1",
                "attempts": 2,
                "wait_s": 0.0,
                "price_in": 1.0,
            },
        }
        settings = {**ARENA, "steps": 2, "judge": judge}
        context = make_context("rl", "first", rl=settings)
        rl.run(context)
        server.shutdown()
    asked = Server.asked
    again = make_context("rl", "second", rl=settings)
    (again.root / "data/judgments").symlink_to(context.root / "data/judgments")
    rl.run(again)
    assert Server.asked == asked > 0
    assert "judge/calls_per_second" in context.tracker.metrics
    assert "judge/calls_per_second" not in again.tracker.metrics, "stored replies are no calls"
    assert outputs(again.root) == outputs(context.root)
    found = report(context)["judge"]
    assert found["calls"] == report(again)["judge"]["calls"] >= found["judgments"]
    assert set(found["statuses"]) == {"ok", "nonsense", "refusal", "rate_limit", "timeout"}
    for step, row in enumerate(read_history(context.root), start=1):
        failed = [one["status"] != "ok" for one in judgments(context) if one["step"] == step]
        assert row["judge_failures"] == pytest.approx(sum(failed) / len(failed))
    assert found["money"] == pytest.approx(found["tokens_in"] / 1e6)


def test_local_judge(make_context, tiny_policy: Path) -> None:
    local = {"path": str(tiny_policy), "options": ["a", "b"]}
    context = make_context("rl", rl={**ARENA, "steps": 1, "judge": {"kind": "local", "local": local}})
    rl.run(context)
    assert report(context)["judge"]["judge"] == "local"
    rows = judgments(context)
    assert all(sum(row["scores"]) == pytest.approx(10) for row in rows)
    assert report(context)["judge"]["calls"] <= len(rows) == 3 * 16, "8 matches per group in both orders, equal ones once"
    assert report(context)["judge"]["pairs"] == len(rows) / 2


def test_gap_warns_and_ends_the_run(make_context, capsys, monkeypatch) -> None:
    from stages.judging import gap

    monkeypatch.setattr(gap, "RECENT", 1)
    monkeypatch.setattr(gap.GapMonitor, "recent", lambda self: 5.0)
    context = make_context("rl", rl={**ARENA, "judge": {"stop_gap": 2.0}})
    rl.run(context)
    assert len(read_history(context.root)) == 1
    assert report(context)["judge"]["warned_at"] == 1
    said = capsys.readouterr().err
    assert "the scores of rl.judge and the gold quality have moved apart" in said
    assert "the training ends at step 1: the scores of rl.judge" in said


def test_unfinished_episode_has_no_answer(make_context) -> None:
    context = make_context("rl", rl={**ARENA, "steps": 1, "horizon": {"kind": "fixed", "turns": 1}})
    rl.run(context)
    assert {answer for row in judgments(context) for answer in row["answers"]} == {""}
    assert NO_REPLY


def toy_domain(**methods: Any) -> SimpleNamespace:
    """The toy domain with optional methods."""
    return SimpleNamespace(make=FirstLetterEnvironment.in_folder, settings=SimpleNamespace(max_turns=2), **methods)


def length(task: Task, actions: Sequence[str]) -> float:
    """Longer is better."""
    return float(len(actions[-1]))


EXACT = {"noise": 0.0, "gain": 1.0}


def test_the_greedy_anchor_is_an_episode_of_its_own(make_context, monkeypatch) -> None:
    """Contract: the anchor is judged by its own quality, also in the first step, where its id is that of the group's first."""
    monkeypatch.setattr(rl, "open_domain", lambda *_: toy_domain(quality=length))
    context = make_context("rl", rl={**ARENA, "steps": 1})
    rl.run(context)
    rows = judgments(context)
    assert {name.endswith("/greedy") for row in rows for name in row["candidates"]} == {True, False}
    for row in rows:
        assert len(set(row["candidates"])) == 2
        assert row["reason"] == ", ".join(f"quality {len(answer):.3g}" for answer in row["answers"])


def test_metrics_are_those_of_the_played_episodes_beside_demonstrations(make_context, monkeypatch) -> None:
    """Contract: demonstrations that join a judged group shift nobody's score: an exact judge agrees fully with the gold."""
    monkeypatch.setattr(rl, "open_domain", lambda *_: toy_domain(quality=length))
    judge = {"scheme": "round_robin", "program": EXACT}
    section = {**RL, "steps": 2, "reward": {"kind": "judge"}, "judge": judge, "external": {"per_group": 1}}
    context = make_context("rl", rl=section)
    rl.run(context)
    for step, row in enumerate(read_history(context.root), start=1):
        assert row["judge_agreement"] == 1.0
        shown = {
            name: (answer, task["task_id"])
            for task in judgments(context)
            if task["step"] == step
            for name, answer in zip(task["candidates"], task["answers"], strict=True)
        }
        assert {name for name in shown if "expert" in name}, "demonstrations are judged"
        played = {name: len(answer) for name, (answer, _) in shown.items() if "expert" not in name}
        assert row["judge_gold"] == pytest.approx(statistics.mean(played.values()))


def test_agreement_is_left_out_where_it_is_undefined(make_context, monkeypatch) -> None:
    monkeypatch.setattr(rl, "open_domain", lambda *_: toy_domain(quality=lambda task, actions: 1.0))
    context = make_context("rl", rl={**ARENA, "steps": 1})
    rl.run(context)
    (row,) = read_history(context.root)
    assert "judge_agreement" not in row
    assert row["judge_gold"] == 1.0


def test_strengths_have_their_mean_error_in_the_history(make_context) -> None:
    judge = {"scheme": "round_robin", "reward": "thurstone", "ridge": 1.0}
    context = make_context("rl", rl={**RL, "steps": 1, "reward": {"kind": "judge"}, "judge": judge})
    rl.run(context)
    (row,) = read_history(context.root)
    assert 0 < row["judge_strength_error"] < 1


def checklist(task: Task, actions: Sequence[str]) -> dict[str, bool]:
    return {"has two words": len(actions[-1].split()) == 2, "has an e": "e" in actions[-1]}


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_a_program_checks_the_domain_s_own_checklist(make_context, monkeypatch, flip: float) -> None:
    """Contract: a checklist has a known truth and planted faults, as other judgments have."""
    monkeypatch.setattr(rl, "open_domain", lambda *_: toy_domain(checklist=checklist))
    judge = {"scheme": "checklist", "program": {"flip": flip}}
    context = make_context("rl", rl={**RL, "steps": 1, "reward": {"kind": "judge"}, "judge": judge})
    rl.run(context)
    rows = judgments(context)
    assert len(rows) == 12
    for row in rows:
        truth = [float(met) for met in checklist(None, row["answers"]).values()]  # type: ignore[arg-type]
        assert row["scores"] == [abs(flip - met) for met in truth]
    assert {score for row in rows for score in row["scores"]} == {0.0, 1.0}


def test_a_domain_without_a_checklist_needs_items(make_context) -> None:
    with pytest.raises(ValueError, match=r"needs rl\.judge\.items, since toy has no checklist"):
        rl.run(make_context("rl", rl={**RL, "reward": {"kind": "judge"}, "judge": {"scheme": "checklist"}}))


class Constant(Server):
    """Gives every answer alone a five."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).asked += 1
        scores = dict.fromkeys(("relevance", "feasibility", "details", "clarity"), 5)
        message = {"content": json.dumps({"reason": "", "first": scores})}
        reply = {"choices": [{"message": message}], "usage": {"prompt_tokens": 50}}
        encoded = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)


def test_a_resumed_run_has_the_budget_that_was_left(make_context) -> None:
    """Contract: equal answers are one request, and what a budget has left is the same after a kill. Every answer here is missing,
    so that each step asks one question, and two calls last for two steps."""
    Constant.asked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Constant) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = {"model": "m", "base_url": f"http://127.0.0.1:{server.server_port}/v1", "max_calls": 2, "price_in": 1.0}
        judge = {"kind": "server", "server": address, "extract": {"marker": "<never>"}}
        settings = {**RL, "reward": {"kind": "judge"}, "judge": judge, "horizon": {"kind": "fixed", "turns": 1}}
        whole = make_context("rl", "whole", rl=settings)
        rl.run(whole)
        cut = make_context("rl", "cut", rl=settings)
        kill_at_step(cut, 2)
        with pytest.raises(KilledError):
            rl.run(cut)
        cut = make_context("rl", "cut", rl=settings)
        rl.run(cut)
        server.shutdown()
    assert outputs(cut.root) == outputs(whole.root)
    assert Constant.asked == 2, "one request for each of the two folders"
    found = report(whole)["judge"]
    assert found["statuses"] == {"budget": 12, "ok": 24}
    assert (found["calls"], found["tokens_in"]) == (2, 100)
    assert found["money"] == pytest.approx(100e-6)
    assert [row["judge_calls"] for row in read_history(whole.root)] == [1, 1, 0]


def test_a_replaced_judge_begins_anew_or_is_refused(make_context, tiny_policy: Path, monkeypatch) -> None:
    """Contract: rewards of two judges never mix: a checkpoint belongs to the weights in rl.judge.local.path."""

    def killed(name: str, other: Path | None) -> Any:
        """A run that stopped after a step, whose judge was then replaced."""
        judge = {"kind": "local", "local": {"path": "data/judge", "options": ["a", "b"]}}
        section = {**RL, "reward": {"kind": "judge"}, "judge": judge}
        context = make_context("rl", name, rl=section)
        shutil.copytree(tiny_policy, context.root / "data/judge")
        if other is not None:
            kill_at_step(context, 2)
            with pytest.raises(KilledError):
                rl.run(context)
            context = make_context("rl", name, rl=section)
        weights = load_file(context.root / "data/judge/model.safetensors")
        changed = {tensor: value + 0.1 if "norm" in tensor else value for tensor, value in weights.items()}
        save_file(changed, context.root / "data/judge/model.safetensors", metadata={"format": "pt"})
        return context

    fresh, replaced = killed("fresh", None), killed("replaced", tiny_policy)
    rl.run(fresh)
    rl.run(replaced)
    assert outputs(replaced.root) == outputs(fresh.root)
    monkeypatch.setattr(scorers, "named_files", lambda section, root: {})
    with pytest.raises(JudgeError, match=r"its model or settings were replaced.*delete \.bellwether/checkpoints/rl@toy"):
        rl.run(killed("refused", tiny_policy))


def test_judgments_are_an_artifact_of_the_run(make_context) -> None:
    context = make_context("rl", rl={**ARENA, "steps": 1})
    kept: list[Path] = []
    context.tracker.artifact = kept.append
    rl.run(context)
    assert context.root / "data/rl/toy/judgments.parquet" in kept


def test_a_judge_is_measured_before_it_trains(make_context, tiny_policy: Path) -> None:
    """Contract: with labelled pairs, the run has the judge's agreement in its report, or ends before it trains."""
    pairs = [{"prompt": f"p {n}", "chosen": f"take {n}", "rejected": f"put {n} and wait"} for n in range(12)]

    def judged(name: str, least: float | None) -> Any:
        demanded = {"path": "labels.jsonl", "least_kappa": least, "limit": 10}
        judge = {"kind": "local", "local": {"path": str(tiny_policy), "options": ["a", "b"]}, "labelled_pairs": demanded}
        context = make_context("rl", name, rl={**ARENA, "steps": 1, "judge": judge})
        (context.root / "labels.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        return context

    context = judged("any", None)
    rl.run(context)
    found = report(context)["judge"]["measured"]
    assert (found["pairs"], found["scheme"], found["calls"]) == (10, "seeded_single_elimination", 20)
    with pytest.raises(JudgeError, match=r"agrees with the labels in labels\.jsonl.*over 10 pairs"):
        rl.run(judged("all", 1.0))


UNLISTED = {"kind": "server", "server": {"model": "m"}, "scheme": "checklist"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"judge": {"scheme": "anchor"}}, "needs reward.kind: judge"),
        ({"reward": {"kind": "judge"}, "judge": {"kind": "server"}}, "rl.judge.server.model"),
        ({"reward": {"kind": "judge"}, "judge": {"scheme": "checklist", "items": ["short"]}}, "rl.judge.items are words"),
        ({"algorithm": "arena_rl", "judge": {"criteria": ["depth", "depth"]}}, "'depth' twice"),
        ({"algorithm": "arena_rl", "judge": {"kind": "local", "criteria": ["depth"]}}, "judge.criteria has no effect.*reads"),
        ({"algorithm": "salmon", "judge": {"criteria": ["depth"]}}, "judge.criteria has no effect.*without judge.principles"),
        ({"algorithm": "arena_rl", "judge": {"kind": "local", "process_weight": 0.5}}, "judge.process_weight has no effect"),
        ({"algorithm": "arena_rl", "judge": {"kind": "local", "process": ["depth"]}}, "judge.process has no effect"),
        ({"algorithm": "arena_rl", "judge": {"labelled_pairs": {"path": "l.jsonl"}}}, "labelled_pairs is for judges that read"),
        ({"reward": {"kind": "judge"}, "judge": {**UNLISTED, "labelled_pairs": {"path": "l.jsonl"}}}, "set items in words"),
        ({"algorithm": "arena_rl", "judge": {"references": True}}, "judge.references has no effect.*reads text"),
        ({"algorithm": "arena_rl", "judge": {"kind": "local", "calls_per_group": 99}}, "judge.calls_per_group has no effect"),
        ({"reward": {"kind": "judge"}, "judge": {"swiss_rounds": 2}}, "swiss"),
        ({"reward": {"kind": "judge", "density": "single"}}, "density"),
        ({"algorithm": "remax", "reward": {"kind": "judge"}}, "greedy"),
        ({"algorithm": "arena_rl", "judge": {"calls_per_group": 10}}, "calls_per_group is 10"),
        ({"algorithm": "arena_rl", "judge": {"server": {"model": "m"}}}, "judge.kind: server"),
        ({"algorithm": "archer_offline", "reward": {"kind": "judge"}}, "plays none"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ParamsError, match=says):
        resolve(Rl.model_validate(settings))
