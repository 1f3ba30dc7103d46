"""annotate.judge_model: a judge fitted to preferences between rollouts, or to annotate's pairs, as a stage's output."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from stages.agent.policy import load_policy
from stages.annotation import judge_model
from stages.annotation.judge_model import FOLDER, fit_judge_model
from stages.judging.contract import Candidate, Rubric
from stages.judging.preferences import margins_of, pairs_of
from stages.judging.server import ServerJudge
from stages.judging.settings import JudgeModel, ServerParams
from stages.params import parse_params
from stages.records.episode import Episode, Owner, TurnRecord, read_rows, write_episodes
from stages.records.task import Task
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker

ANSWERS = ("the key", "the lamp here", "excellent answer box", "take door and lamp")
FITTED = {"kind": "reward", "options": ["a", "b"], "epochs": 1.0, "batch_tokens": 2048, "program": {"noise": 0.0}}


def episode(task: int, place: int, answer: str) -> Episode:
    made = Episode(f"t{task}/{place}", f"t{task}", "toy", f"t{task}", 0, "", "", 1.0, 1.0, 0, terminated=True)
    made.append([5, 6], Owner.PROMPT, -1)
    made.append([10, 11], Owner.POLICY, 0, [-0.5] * 2)
    made.turns.append(TurnRecord(answer, "", True, float(place == 0), 0.0, "", answer, 2, 4))
    made.reward = float(place == 0)
    return made


class Toy(SimpleNamespace):
    """A domain whose gold quality is the return."""


@pytest.fixture
def make(tmp_path: Path, tiny_policy: Path):
    """make(name, **settings of the judge model) -> (what fit_judge_model reports, the folder that it wrote)."""
    policy = load_policy(tiny_policy)
    tasks = [Task(f"t{number}", "toy", "train", number, "open", {}, 1.0) for number in range(6)]
    params = parse_params({"domains": ["toy"], "per_domain": {"toy": {}}, "model": {"max_length": 200}})

    def fitted(name: str, rows=(), pairs=(), **settings: Any) -> tuple[dict[str, Any], Path]:
        root = tmp_path / name
        episodes = [episode(task, place, answer) for task in range(6) for place, answer in enumerate(ANSWERS)]
        write_episodes(root / "data/rollouts/toy/episodes.parquet", episodes)
        context = StageContext("annotate", "toy", params, root, Tracker())
        section = JudgeModel.model_validate({**FITTED, **settings})
        out = root / "data/annotated/toy"
        return fit_judge_model(context, policy, Toy(), tasks, rows, pairs, section, out), out

    fitted.root = tmp_path  # type: ignore[attr-defined]
    return fitted


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_model_preferences_and_judgments_are_written_reproducibly(make) -> None:
    report, out = make("first")
    assert (report["kind"], report["labels"], report["preferences"]) == ("reward", "program", 18)
    assert report["held_out"]["pairs"] == 3
    assert report["version"]
    assert report["labelling"]["statuses"] == {"ok": 72}
    assert report["labelling"]["undecided"] == 0.5, "of six pairs three have equal quality"
    gold = report["labelling"]["against_gold"]
    assert (gold["pairs"], gold["compared"], gold["accuracy"], gold["kappa"]) == (36, 18, 1.0, 1.0)
    assert report["against_gold"]["compared"] == 3, "of the held-out task"
    rows = read_rows(out / "preferences.parquet")
    assert len(rows) == 18
    assert all("the key" in row["answers"][0 if row["prefers_first"] else 1] for row in rows)
    assert len(read_rows(out / "judgments.parquet")) == 72
    again, other = make("second")
    assert contents(out) == contents(other)
    assert report == again
    assert load_policy(out / FOLDER).hash


def test_principles_are_measured_alone_and_negated(make) -> None:
    report, out = make("principles", principles={}, program={"noise": 0.0})
    assert set(report["principles"]) == {"correct", "short", "modest"}
    for found in report["principles"].values():
        assert 0 <= found["accuracy"] <= 1
    shown = {text for row in read_rows(out / "preferences.parquet") for text in row["principles"]}
    assert {"right", "wrong", "short", "long"} <= shown
    assert 0 < report["labelling"]["undecided"] < 1


def test_by_principles_labels_and_model_are_measured_against_what_is_known(make) -> None:
    """Labels of a program without noise are right by each attribute; the model's figures are of held-out tasks."""
    report, _ = make("gold", principles={}, program={"noise": 0.0})
    labels, model = report["labelling"]["against_gold"], report["against_gold"]
    assert set(labels) == set(model) == {"correct", "short", "modest"}
    assert {(found["pairs"], found["accuracy"], found["kappa"]) for found in labels.values()} == {(36, 1.0, 1.0)}
    assert (labels["correct"]["compared"], labels["modest"]["compared"]) == (18, 18), "three of six pairs differ"
    assert labels["short"]["compared"] == 30, "two answers have three words"
    for name, found in model.items():
        assert (found["pairs"], found["compared"]) == (6, labels[name]["compared"] / 6)
        assert found["accuracy"] == report["principles"][name]["accuracy"]


def test_the_tasks_that_measure_a_model_do_not_depend_on_how_labels_are_made(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: models fitted to other labels of the same pairs are measured on the same ones. A position bias leaves some tasks
    without a pair on which both orders agree."""
    seen: list[tuple[int, set[str]]] = []

    def record(params: Any, labelled: Any, judge: Any, held: Any, tasks: set[str]) -> dict[str, Any]:
        seen.append((len({one.task_id for one in labelled.preferences}), tasks))
        return {"held_out": {}}

    monkeypatch.setattr(judge_model, "_report", record)
    for agreement in (True, False):
        principles = {"sign_agreement": agreement, "stock_phrases": []}
        make(f"agreement {agreement}", principles=principles, valid_share=0.4, program={"noise": 1.0, "position": 3.0})
    (filtered, measuring), (unfiltered, others) = seen
    assert 0 < filtered < unfiltered == 6
    assert measuring == others
    assert len(measuring) == 2


def test_a_model_that_agrees_too_little_fails_the_stage(make) -> None:
    with pytest.raises(ValueError, match=r"kappa -?0\.\d\d over \d pairs, and least_kappa is 1\.0"):
        make("weak", least_kappa=1.0, learning_rate=1e-9, program={"noise": 9.0})
    make("enough", least_kappa=0.0, epochs=8.0, learning_rate=0.01)


class Equal(BaseHTTPRequestHandler):
    """Prefers the first; writes ten tokens."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        scores = [dict.fromkeys(Rubric().answer, score) for score in (8, 4)]
        text = json.dumps({"reason": "r", "first": scores[0], "second": scores[1]})
        reply = {"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}
        encoded = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *args: Any) -> None: ...


def test_a_server_s_costs_are_those_of_its_requests(make) -> None:
    """Contract: all six tasks have the same prompt and answers, so that their pairs are the same questions, paid once."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Equal) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        settings = {"model": "m", "base_url": f"http://127.0.0.1:{server.server_port}/v1", "price_in": 1.0}
        with pytest.raises(ValueError, match="finds 0 preferences"):
            make("server", labels="server", server=settings, program={"noise": 0.5})
        judge = ServerJudge(ServerParams(**settings), make.root / "server")
        prompts = {f"t{task}": "open" for task in range(6)}
        answers = {name: [Candidate(text, name=f"{name}/{place}") for place, text in enumerate(ANSWERS)] for name in prompts}
        pairs = pairs_of(prompts, answers, JudgeModel.model_validate(FITTED), 0)
        _, asked = margins_of(judge, pairs, None)
        judge.close()
        server.shutdown()
    assert len(asked) == 6 * 6 * 2
    assert sum(judgment.cost.calls for _, judgment in asked) == judge.spent.calls == 12
    assert judge.sent == 0, "the stage has asked them all"


def test_the_policy_labels_by_its_options(make) -> None:
    report, out = make("policy", labels="policy", kind="comparison", program={"noise": 0.5})
    rows = read_rows(out / "judgments.parquet")
    assert {row["judge"] for row in rows} == {"local"}
    assert report["labelling"]["calls"] == len(rows) == 2 * 36, "a pass in each order"
    assert report["labelling"]["pairs"] == 36
    shown = {tuple(row["candidates"]) for row in rows}
    assert {pair[::-1] for pair in shown} == shown


def test_pairs_of_trees_are_preferences(make) -> None:
    rows, pairs = [], []
    for number in range(4):
        for node, (parent, action) in enumerate(((-1, ""), (0, "open"), (1, "take"), (1, "drop"))):
            rows.append({"task_id": f"t{number}", "node": node, "parent": parent, "action": action})
        pairs.append({"task_id": f"t{number}", "parent": 1, "win": 2, "lose": 3})
    report, out = make("trees", rows=rows, pairs=pairs, labels="trees", program={"noise": 0.5})
    assert report["preferences"] == 4
    assert "labelling" not in report
    assert not (out / "judgments.parquet").exists()
    for row in read_rows(out / "preferences.parquet"):
        assert row["answers"][0 if row["prefers_first"] else 1] == "take"


def test_unknown_attributes_and_too_few_preferences_are_refused(make) -> None:
    unknown = {"items": [{"name": "polite", "text": "polite", "negative": "rude"}]}
    with pytest.raises(ValueError, match=r"judge_model\.principles names 'polite'.*known: correct, modest, short"):
        make("unknown", principles=unknown)
    with pytest.raises(ValueError, match=r"finds 0 preferences.*raise rollout\.tasks"):
        make("few", shortest=1000)
