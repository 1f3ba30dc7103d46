"""`rl.reward.kind: judge`: groups are judged while rl trains; the run resumes and repeats to the same bytes."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from stages import rl
from stages.algorithms.algorithm import resolve
from stages.algorithms.settings import Rl
from stages.judging.contract import NO_REPLY
from stages.records.episode import read_rows
from stages.runtime.validation import ParamsError
from training.toys import SHORT_RUN, KilledError, kill_at_step, outputs, read_history

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
    """Prefers the text that comes first in the alphabet; answers nonsense to one request in seven."""

    asked: int
    failing: bool

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).asked += 1
        content = body["messages"][1]["content"]
        first, second = content.partition("# First")[2].partition("# Verdict")[0].split("# Second")
        scores = [dict.fromkeys(_criteria(body), 8 if one < other else 4) for one, other in ((first, second), (second, first))]
        text = json.dumps({"reason": "alphabet", "first": scores[0], "second": scores[1]})
        if len(content) % 7 == 0:
            text = "I like both."
        reply = {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 50, "completion_tokens": 10}}
        encoded = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *args: Any) -> None: ...


def _criteria(body: dict[str, Any]) -> list[str]:
    return list(body["response_format"]["json_schema"]["schema"]["properties"]["first"]["properties"])


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
    assert outputs(again.root) == outputs(context.root)
    found = report(context)["judge"]
    assert found["calls"] == report(again)["judge"]["calls"] >= found["judgments"]
    assert set(found["statuses"]) == {"ok", "nonsense"}
    assert found["money"] == pytest.approx(found["tokens_in"] / 1e6)


def test_local_judge(make_context, tiny_policy: Path) -> None:
    local = {"path": str(tiny_policy), "options": ["a", "b"]}
    context = make_context("rl", rl={**ARENA, "steps": 1, "judge": {"kind": "local", "local": local}})
    rl.run(context)
    assert report(context)["judge"]["judge"] == "local"
    assert all(sum(row["scores"]) == pytest.approx(10) for row in judgments(context))


def test_gap_warns_and_ends_the_run(make_context, capsys, monkeypatch) -> None:
    from stages.judging import gap

    monkeypatch.setattr(gap, "RECENT", 1)
    monkeypatch.setattr(gap.GapMonitor, "recent", lambda self: 5.0)
    context = make_context("rl", rl={**ARENA, "judge": {"stop_gap": 2.0}})
    rl.run(context)
    assert len(read_history(context.root)) == 1
    assert report(context)["judge"]["warned_at"] == 1
    assert "the scores of rl.judge and the gold quality have moved apart" in capsys.readouterr().err


def test_unfinished_episode_has_no_answer(make_context) -> None:
    context = make_context("rl", rl={**ARENA, "steps": 1, "horizon": {"kind": "fixed", "turns": 1}})
    rl.run(context)
    assert {answer for row in judgments(context) for answer in row["answers"]} == {""}
    assert NO_REPLY


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"judge": {"scheme": "anchor"}}, "needs reward.kind: judge"),
        ({"reward": {"kind": "judge"}, "judge": {"kind": "server"}}, "rl.judge.server.model"),
        ({"reward": {"kind": "judge"}, "judge": {"scheme": "checklist"}}, "rl.judge.items"),
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
