"""Panels are played alike by every model, whatever is played beside, before or after a restart."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages import evaluate
from stages.agent.player import EngineSettings
from stages.agent.scaffold import THINKING, Scaffold
from stages.curation.panel import PanelMismatchError, make_panel, write_panel
from stages.engine.engine import Sampling
from stages.environments.registry import load_domain
from stages.environments.search import SearchDomain
from stages.evaluation import panels as panels_module
from stages.evaluation.panels import Settings, jobs_of, load_panels, play, row_of, solution_of
from stages.evaluation.statistics import wilson_interval
from stages.evaluation.summary import compare_models, csv_lines, headline, pairs_to_compare, report, summarise
from stages.params import parse_params
from stages.records.episode import Episode, TurnRecord, read_json, read_rows, write_json, write_tasks
from stages.records.task import Task
from stages.runtime.resources import Resources
from stages.runtime.shards import Shard
from stages.runtime.stage import StageContext, _run_in_forks
from stages.runtime.tracker import Tracker
from stages.runtime.validation import ParamsError

PARAMS: dict[str, Any] = {
    "domains": ["search"],
    "resources": {"threads": 1, "workers": 1, "slots": 8},
    "model": {"max_length": 512},
    "evaluate": {"attempts": 2, "resamples": 100, "chunk": 8, "sampling": {"max_tokens": 6}},
    "per_domain": {"search": {}},
}
SETTINGS = Settings(0, Sampling(max_tokens=6), EngineSettings.of(Resources(slots=8), 512))


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curated search domain with a panel of 8 tasks in 2 worlds or more."""
    folder = tmp_path_factory.mktemp("curated")
    domain = SearchDomain()
    records = [record for record in domain.recipes(64, 0) if record["split"] == "test"]
    tasks = domain.build(records[:4] + records[-4:], folder / "search" / "worlds", 1)
    write_tasks(folder / "search" / "tasks.parquet", tasks)
    write_panel(folder / "search" / "panel.json", make_panel(domain, tasks, folder / "search" / "worlds"))
    return folder


def rows_of(curated: Path, folder: Path, policy_hash: str, chunk: int = 100, **changes: Any) -> list[dict[str, Any]]:
    jobs = jobs_of(folder, policy_hash, load_panels(curated, ["search"]), curated, 2, chunk)
    return [row for job in jobs for row in play(job, replace(SETTINGS, **changes)).rows]


def test_one_row_per_task_and_attempt_whatever_is_played_together(curated: Path, tiny_policy: Path) -> None:
    """A row does not depend on what else is in its job, nor on the engine's slots."""
    whole = rows_of(curated, tiny_policy, "h")
    assert len({(row["task_id"], row["attempt"]) for row in whole}) == 16
    assert rows_of(curated, tiny_policy, "h", chunk=4) == whole
    assert rows_of(curated, tiny_policy, "h", engine=replace(SETTINGS.engine, slots=4)) == whole


def test_random_keys_depend_on_task_and_attempt_and_not_on_the_model(curated: Path, tiny_policy: Path) -> None:
    """Models are compared on common random numbers: the same weights under another name play the same episodes."""
    first, second = rows_of(curated, tiny_policy, "one"), rows_of(curated, tiny_policy, "other")
    assert [{**row, "policy_hash": ""} for row in first] == [{**row, "policy_hash": ""} for row in second]
    reseeded = rows_of(curated, tiny_policy, "one", seed=1)
    assert [row["tokens"] for row in reseeded] != [row["tokens"] for row in first]


class Counting:
    """Prefers actions of large tokens, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def scores(self, history: Any, actions: Any) -> Any:
        import torch

        self.asked.append(tuple(history))
        return torch.tensor([float(sum(action)) for action in actions])


def test_a_model_may_choose_among_its_actions(curated: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: with +q the scorer of the panel's domain chooses, with +logprob the model itself; neither depends on slots."""
    from stages.values import q_model

    scorer, asked = Counting(), []
    monkeypatch.setattr(q_model, "load_q_model", lambda *folders: asked.append(folders) or scorer)
    panels = load_panels(curated, ["search"])

    def rows(by: str, slots: int = 8) -> list[dict[str, Any]]:
        settings = replace(SETTINGS, engine=replace(SETTINGS.engine, slots=slots))
        jobs = jobs_of(tiny_policy, "h", panels, curated, 1, 100, panels_module.BestOf(by, 4, Path("q"), Path("sft")))
        return [row for job in jobs for row in play(job, settings).rows]

    chosen = rows("q")
    assert asked == [(Path("q/search"), Path("sft"), "cpu")]
    histories = sorted(scorer.asked)
    assert 0 < len(histories) <= sum(row["turns"] for row in chosen)
    scorer.asked.clear()
    assert rows("q", slots=4) == chosen
    assert sorted(scorer.asked) == histories
    scorer.asked.clear()
    assert len(rows("logprob")) == len(chosen)
    assert scorer.asked == []


def test_a_model_may_choose_by_the_values_of_tokens(curated: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: with +value the panel's domain's policy and its values judge; per token where that is asked for."""
    from stages.agent import best_of_n
    from stages.values import token_q

    scorer, asked, scaled = Counting(), [], []
    monkeypatch.setattr(token_q, "load_token_q", lambda *folders: asked.append(folders) or scorer)
    monkeypatch.setattr(best_of_n, "per_token", lambda rank: scaled.append(rank) or rank)

    def rows(by: str, per_token: bool = False) -> list[dict[str, Any]]:
        best = panels_module.BestOf(by, 4, Path("rl"), Path("sft"), per_token)
        jobs = jobs_of(tiny_policy, "h", load_panels(curated, ["search"]), curated, 1, 100, best)
        return [row for job in jobs for row in play(job, SETTINGS).rows]

    plain = rows("value")
    assert asked == [(Path("rl/search"), "cpu")]
    assert scorer.asked
    assert not scaled
    assert rows("value", per_token=True) == plain
    rows("logprob", per_token=True)
    assert len(scaled) == 2


def test_how_a_model_chooses_is_part_of_its_name(tmp_path: Path) -> None:
    """Contract: the same weights with another choice, another n or another Q-model are played apart; by log-probability the
    Q-models have no say."""
    (tmp_path / "q/search").mkdir(parents=True)
    (tmp_path / "q/search/q_model.json").write_text("{}")
    best = panels_module.BestOf("q", 5, tmp_path / "q", tmp_path)
    names = {best.hash("h", ["search"]), best.hash("g", ["search"]), replace(best, n=3).hash("h", ["search"])}
    own = replace(best, by="logprob").hash("h", ["search"])
    (tmp_path / "q/search/q_model.json").write_text("[]")
    assert len({*names, own, best.hash("h", ["search"]), "h"}) == 6
    assert replace(best, by="logprob").hash("h", ["search"]) == own
    vote = replace(best, by="vote").hash("h", ["search"])
    (tmp_path / "q/search/q_model.json").write_text("{ }")
    assert replace(best, by="vote").hash("h", ["search"]) == vote, "a Q-model has no say there"
    scaled = replace(best, by="logprob", per_token=True).hash("h", ["search"])
    assert len({own, scaled, replace(best, by="value").hash("h", ["search"]), best.hash("h", ["search"])}) == 4


def test_a_panel_that_was_changed_is_refused(curated: Path, tmp_path: Path) -> None:
    """Panels are frozen and hashed."""
    shutil.copytree(curated, tmp_path / "curated")
    path = tmp_path / "curated" / "search" / "panel.json"
    write_json(path, {**read_json(path), "hash": "0" * 16})
    with pytest.raises(PanelMismatchError, match="frozen with 0000000000000000"):
        load_panels(tmp_path / "curated", ["search"])
    shutil.copy(curated / "search" / "panel.json", path)
    world = next((tmp_path / "curated" / "search" / "worlds").iterdir())
    world.write_text(world.read_text() + " ")
    with pytest.raises(PanelMismatchError, match=f"{world.name} missing or changed since panel.json was frozen"):
        load_panels(tmp_path / "curated", ["search"])
    with pytest.raises(FileNotFoundError, match="curate@chess"):
        load_panels(tmp_path / "curated", ["chess"])


def made_rows(
    model: str, successes: list[int], panel: str = "p", answers: list[str | None] | None = None, solutions: str = ""
) -> list[dict[str, Any]]:
    """Two attempts at each task, tasks in pairs of one cluster."""
    return [
        {
            "model": model,
            "domain": "search",
            "task_id": f"t{index // 2}",
            "attempt": index % 2,
            "cluster": f"c{index // 4}",
            "panel": panel,
            "policy_hash": model,
            "success": bool(success),
            "reward": float(success),
            "turns": 2,
            "tokens": 5,
            "accepted": 1.0,
            "cost": 0.0,
            "difficulty": float(index // 4),
            "stop_reason": "terminated",
            "answer": None if answers is None else answers[index],
            "solution": (solutions or "x" * len(successes))[index] if success else None,
        }
        for index, success in enumerate(successes)
    ]


def test_numbers_of_a_panel_worked_out_by_hand() -> None:
    rows = {
        "base": {"search": made_rows("base", [0, 0, 0, 0, 0, 0, 0, 0])},
        "sft": {"search": made_rows("sft", [1, 0, 0, 0, 1, 1, 0, 0])},
        "rl@search": {"search": made_rows("rl@search", [1, 1, 1, 0, 1, 1, 1, 0])},
        "merged": {"search": made_rows("merged", [1, 1, 0, 0, 1, 1, 1, 0])},
        "merged_linear": {"search": made_rows("merged_linear", [1, 1, 0, 0, 1, 1, 1, 0])},
    }
    found = report(rows, {"search": "p"}, attempts=2, confidence=0.95, resamples=200, seed=0)
    json.dumps(found, allow_nan=False)
    sft = found["models"]["sft"]["search"]
    assert (sft["success"]["mean"], sft["success"]["n"]) == (0.375, 4)
    assert sft["success"]["low"] <= 0.375 <= sft["success"]["high"]
    # Tasks solved in at least one of two attempts: t0 and t2 of t0..t3.
    assert sft["pass_at_k"] == {"1": 0.375, "2": 0.5}
    assert sft["by_difficulty"] == {"0": {"success": 0.25, "attempts": 4}, "1": {"success": 0.5, "attempts": 4}}
    by_pair = {(item["a"], item["b"]): item for item in found["comparisons"]}
    assert by_pair["rl@search", "sft"]["difference"] == 0.375
    assert by_pair["sft", "base"]["difference"] == 0.375
    assert by_pair["merged", "merged_linear"]["difference"] == 0.0
    assert by_pair["merged", "merged_linear"]["verdict"] == "undecided"
    assert headline(found) == {"search": {"sft": 0.375, "rl": 0.75, "merged": 0.625}}
    lines = list(csv_lines(found))
    assert lines[0] == "model,domain,success,low,high,n"
    assert lines[2].startswith("sft,search,0.375,")


def test_only_proportions_have_a_proportions_interval() -> None:
    """Contract: where every episode has one turn or costs nothing, turns and cost have no Wilson interval; the reward has one
    only where it is success and nothing else in the episodes of every model of the panel."""

    def estimates(reward: float) -> dict[str, Any]:
        base = [{**row, "turns": 1} for row in made_rows("base", [0] * 8)]
        sft = [{**row, "reward": reward} if row["success"] else row for row in made_rows("sft", [1, 0] * 4)]
        rows = {"base": {"search": base}, "sft": {"search": sft}}
        return report(rows, {"search": "p"}, attempts=2, confidence=0.95, resamples=200, seed=0)["models"]["base"]["search"]

    for reward in (1.0, 0.5):
        found = estimates(reward)
        assert found["turns"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 4}
        assert found["cost"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 4}
        assert found["success"]["high"] == round(wilson_interval(0, 2)[1], 6)
        assert found["accepted"]["low"] == round(wilson_interval(2, 2)[0], 6)
        assert found["reward"] == (found["success"] if reward == 1.0 else {**found["cost"]})


def test_a_comparison_is_made_where_both_models_were_played() -> None:
    """Six of eight attempts against two of eight on the panel that both played, and nothing on the other."""
    elsewhere = [{**row, "domain": "chess", "panel": "c"} for row in made_rows("sft", [1, 1, 0, 0, 1, 1, 0, 0])]
    rows = {
        "sft": {"search": made_rows("sft", [1, 0, 0, 0, 1, 0, 0, 0]), "chess": elsewhere},
        "sft+q": {"search": made_rows("sft+q", [1, 1, 1, 0, 1, 1, 1, 0])},
    }
    found = report(rows, {"search": "p", "chess": "c"}, attempts=2, confidence=0.95, resamples=200, seed=0)
    assert [(item["a"], item["domain"], item["difference"], item["n"]) for item in found["comparisons"]] == [
        ("sft+q", "search", 0.5, 4)
    ]
    assert {name: list(of) for name, of in found["models"].items()} == {"sft": ["search", "chess"], "sft+q": ["search"]}
    assert headline(found) == {"search": {"sft": 0.25}, "chess": {"sft": 0.5}}


def test_majorities_of_answers_are_counted_where_there_are_answers() -> None:
    """Four tasks with two attempts: (x x right), (x y one right), (none, y right), (none none): 1 + 1/2 + 1 + 0 of 4."""
    answers = ["x", "x", "x", "y", None, "y", None, None]
    rows = made_rows("sft", [1, 1, 1, 0, 0, 1, 0, 0], answers=answers)
    found = summarise(rows, attempts=2, confidence=0.95, resamples=100, seed=0)
    assert found["maj_at_k"] == {"1": found["success"]["mean"], "2": 0.625}
    silent = summarise(made_rows("sft", [1, 1, 1, 0, 0, 1, 0, 0]), attempts=2, confidence=0.95, resamples=100, seed=0)
    assert "maj_at_k" not in silent


def test_different_solutions_of_a_panel_by_hand() -> None:
    """Four tasks with two attempts: solutions (a b), (a a), (a, none), none: 2 + 1 + 1 + 0 of 4 in two attempts, and of the two
    tasks with two successes those of one differ. A single attempt says nothing."""
    rows = made_rows("sft", [1, 1, 1, 1, 1, 0, 0, 0], solutions="abaaaxxx")
    found = summarise(rows, attempts=2, confidence=0.95, resamples=100, seed=0)
    assert found["distinct_at_k"] == {"1": found["success"]["mean"], "2": 1.0}
    assert found["solutions_differ"] == {"mean": 0.5, "n": 2}
    assert found["pass_at_k"]["2"] == 0.75
    once = summarise(rows[::2], attempts=1, confidence=0.95, resamples=100, seed=0)
    assert "distinct_at_k" not in once
    none = summarise(made_rows("sft", [0] * 8), attempts=2, confidence=0.95, resamples=100, seed=0)
    assert (none["distinct_at_k"]["2"], none["solutions_differ"]) == (0.0, {"mean": 0.0, "n": 0})


def test_what_makes_two_solutions_the_same() -> None:
    """Contract: the actions taken, but for case and spaces; in `code` the last program, but for names, constants and layout."""
    task = Task("t", "code", "test", 0, "", {"entry": "f", "parameters": ["a"]}, 1.0)
    plain, code = load_domain("search", {}), load_domain("code", {})

    def named(domain: Any, *actions: str, reward: float = 1.0) -> str | None:
        turns = [TurnRecord(one, "", True, 0.0, 1.0, "", " ".join(one.lower().split()), 0, 0) for one in actions]
        episode = Episode("e", "t", "d", "t", 0, "", "", 1.0, 1.0, 0, turns=turns, reward=reward)
        return solution_of(episode, task, domain, turns)

    assert named(plain, "search A", "answer b") == named(plain, "search  a", "Answer b") != named(plain, "answer b")
    assert named(plain, "answer b", reward=0.5) is None
    body, expression = "c = a*2\nreturn c", "a*2"
    for other in ("  d = a * 2  # twice\n  return d", "def f(n):\n    'Twice.'\n    x = n*2\n    return x", f"```\n{body}\n```"):
        assert named(code, "a*3", other) == named(code, body)
    for other in ("return a * 2", "import math\ndef f(x: int) -> int:\n    return x*2", "\t(a*2)\n"):
        assert named(code, other) == named(code, expression)
    assert len({named(code, one) for one in (body, expression, "a*3", "2*a", "a+a", "def g(a): return a*2")}) == 6


def test_thoughts_are_turns_and_no_actions() -> None:
    """Contract: a plan before an action makes it neither better understood nor another solution; its turn counts."""
    task, domain = Task("t", "search", "test", 0, "", {}, 1.0), load_domain("search", {})

    def row(plan: str, key: str = THINKING, think: Any = "plan") -> dict[str, Any]:
        said = ((plan, True, f"start{key}"), ("look", False, "start"), ("answer b", True, "start"))
        turns = [TurnRecord(one, "", accepted, 0.0, 0.0, state, one, 0, 0) for one, accepted, state in said]
        episode = Episode("e", "t", "search", "t", 0, "", "", 1.0, 1.0, 0, turns=turns, reward=1.0)
        return row_of(episode, task, 0, "p", domain, Scaffold(think=think))

    one, other = row("first look"), row("think hard")
    assert (one["turns"], one["accepted"]) == (3, 0.5)
    assert one["solution"] == other["solution"]
    plain = row("first look", key="")
    assert plain["accepted"] == pytest.approx(2 / 3)
    assert plain["solution"] != one["solution"]
    assert row("first look", think="none")["accepted"] == pytest.approx(2 / 3), "without a scaffold no turn is a thought"


def test_an_attempts_answer_is_its_last_actions() -> None:
    for domain in (load_domain("search", {}), load_domain("calculator", {})):
        said = [domain.answer(action) for action in ("answer The  Paris!", "ANSWER 12", "answer", "search paris", "")]
        assert said == ["paris", "12", None, None, None]


def test_who_is_compared_with_whom() -> None:
    assert pairs_to_compare(["base", "sft", "rl@a", "rl@b", "merged", "merged_linear"]) == [
        ("rl@a", "sft"),
        ("rl@b", "sft"),
        ("merged", "sft"),
        ("merged_linear", "sft"),
        ("rl@a", "merged"),
        ("rl@b", "merged"),
        ("merged", "merged_linear"),
        ("sft", "base"),
    ]
    assert pairs_to_compare(["rl@a", "rl@a+value", "rl@a+logprob"]) == [
        ("rl@a+value", "rl@a"),
        ("rl@a+logprob", "rl@a"),
        ("rl@a+value", "rl@a+logprob"),
    ]
    assert pairs_to_compare(["sft", "sft+q", "sft+logprob", "rl@a", "rl@a+q"]) == [
        ("rl@a", "sft"),
        ("sft+q", "sft"),
        ("sft+logprob", "sft"),
        ("rl@a+q", "rl@a"),
        ("sft+q", "sft+logprob"),
    ]


def test_results_of_different_panels_are_not_compared() -> None:
    """A comparison across different panels is refused."""
    with pytest.raises(PanelMismatchError, match="different panels"):
        compare_models(made_rows("a", [0, 1, 0, 1, 1, 1]), made_rows("b", [0, 1, 0, 1, 1, 1], "q"), 0.95, 100, 0)


@pytest.fixture
def context(curated: Path, tiny_policy: Path, tmp_path: Path) -> StageContext:
    from safetensors.torch import load_file, save_file

    for scale, name in enumerate(("data/base", "data/models/sft", "data/models/rl/search"), start=1):
        shutil.copytree(tiny_policy, tmp_path / name)
        weights = {key: tensor * scale for key, tensor in load_file(tiny_policy / "model.safetensors").items()}
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    for name in ("merged", "merged_linear"):
        shutil.copytree(tmp_path / "data/models/rl/search", tmp_path / "data/models" / name)
    shutil.copytree(curated, tmp_path / "data/curated")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(PARAMS))
    return StageContext("evaluate", None, parse_params(PARAMS), tmp_path, Tracker())


def outputs(context: StageContext) -> dict[str, bytes]:
    paths = [context.data / "evaluation" / "rows.parquet", *sorted(context.reports.glob("*"))]
    return {path.name: path.read_bytes() for path in paths}


def test_models_can_be_chosen(context: StageContext) -> None:
    """evaluate.models plays some of the models alone; a name that there is not is refused."""
    chosen = parse_params({**PARAMS, "evaluate": {**PARAMS["evaluate"], "models": ["rl@search", "sft"]}})
    evaluate.run(StageContext("evaluate", None, chosen, context.root, Tracker()))
    evaluation = json.loads((context.reports / "evaluation.json").read_text())
    assert list(evaluation["models"]) == ["rl@search", "sft"]
    assert [(item["a"], item["b"]) for item in evaluation["comparisons"]] == [("rl@search", "sft")]
    with pytest.raises(ParamsError, match=r"rl@chess.*there are base, sft, rl@search, merged"):
        parse_params({**PARAMS, "evaluate": {"models": ["rl@chess"]}})


@pytest.mark.parametrize("judge", ["q", "value"])
def test_a_model_plays_the_panels_that_have_a_judge(context: StageContext, monkeypatch: pytest.MonkeyPatch, judge: str) -> None:
    """Contract: one that chooses by what a domain has learnt plays that domain's panel alone and is compared there alone."""
    from stages.values import q_model, token_q

    asked: list[Path] = []
    monkeypatch.setattr(q_model, "load_q_model", lambda folder, *_: asked.append(folder) or Counting())
    monkeypatch.setattr(token_q, "load_token_q", lambda folder, *_: asked.append(folder) or Counting())
    domain, folder = load_domain("calculator", {}), context.data / "curated" / "calculator"
    records = [record for record in domain.recipes(64, 0) if record["split"] == "test"][:5]
    tasks = domain.build(records, folder / "worlds", 1)
    write_tasks(folder / "tasks.parquet", tasks)
    write_panel(folder / "panel.json", make_panel(domain, tasks, folder / "worlds"))
    shutil.copytree(context.data / "models/rl/search", context.data / "models/rl/calculator")
    left = {"q": ("q/calculator", q_model.SETTINGS), "value": ("rl/calculator/value", "value.json")}[judge]
    made = context.data / "models" / left[0] / left[1]
    made.parent.mkdir(parents=True)
    made.write_text(json.dumps({"params": {"kind": "step_dpo"}}))
    learns = {"q": {"annotate": {"q_model": {"kind": "step_dpo"}}}, "value": {"rl": {"algorithm": "b_coder"}}}[judge]
    values = {
        **PARAMS,
        "domains": ["search", "calculator"],
        "per_domain": {"search": {}, "calculator": learns},
        "evaluate": {**PARAMS["evaluate"], "models": ["sft", f"sft+{judge}", "sft+vote"], "best_of": {"n": 2}},
    }
    evaluate.run(StageContext("evaluate", None, parse_params(values), context.root, Tracker()))
    assert set(asked) == {context.data / "models" / {"q": "q", "value": "rl"}[judge] / "calculator"}
    rows = read_rows(context.data / "evaluation" / "rows.parquet")
    both = {"search": 16, "calculator": 2 * len(tasks)}
    counts: dict[str, dict[str, int]] = {}
    for row in rows:
        of_model = counts.setdefault(row["model"], {})
        of_model[row["domain"]] = of_model.get(row["domain"], 0) + 1
    assert counts == {"sft": both, f"sft+{judge}": {"calculator": 2 * len(tasks)}, "sft+vote": both}
    evaluation = json.loads((context.reports / "evaluation.json").read_text())
    assert {name: set(found) for name, found in evaluation["models"].items()} == {name: set(of) for name, of in counts.items()}
    assert [(item["a"], item["b"], item["domain"], item["n"]) for item in evaluation["comparisons"]] == [
        (f"sft+{judge}", "sft", "calculator", len(tasks)),
        ("sft+vote", "sft", "search", 8),
        ("sft+vote", "sft", "calculator", len(tasks)),
    ]
    metrics = json.loads((context.reports / "metrics.json").read_text())
    assert {name: list(found) for name, found in metrics.items()} == {"search": ["sft"], "calculator": ["sft"]}
    plotted = [line.split(",")[:2] for line in (context.reports / "evaluation.csv").read_text().splitlines()[1:]]
    assert [one for one in plotted if one[0] == f"sft+{judge}"] == [[f"sft+{judge}", "calculator"]]
    nobody = {**values, "per_domain": {"search": {}, "calculator": {}}}
    with pytest.raises(ParamsError, match=rf"evaluate\.models: sft\+{judge} needs"):
        parse_params(nobody)


@pytest.mark.parametrize("horizon", [{"kind": "fixed", "turns": 1}, {"kind": "scaling_inter", "rounds": [1, 2]}])
def test_evaluation_plays_to_the_environments_limit(context: StageContext, horizon: dict[str, Any]) -> None:
    """Must hold 7 of ScalingInter-RL: the same weights have the same score whatever limit training has or had."""
    evaluate_section, found = {**PARAMS["evaluate"], "models": ["sft"]}, []
    for rl in ({}, {"horizon": horizon}):
        params = parse_params({**PARAMS, "evaluate": evaluate_section, "rl": {**PARAMS.get("rl", {}), **rl}})
        shutil.rmtree(context.data / "evaluation", ignore_errors=True)
        evaluate.run(StageContext("evaluate", None, params, context.root, Tracker()))
        found.append(outputs(context))
    assert found[0] == found[1]
    limit = load_domain("search", PARAMS["per_domain"]["search"].get("environment", {})).settings.max_turns
    assert max(row["turns"] for row in read_rows(context.data / "evaluation" / "rows.parquet")) == limit > 2


def test_the_stage_resumes_exactly_and_plays_equal_models_once(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed and started again, or after its shards, the stage ends with the same bytes and plays only what is missing."""
    played: list[str] = []

    def counting(job: Any, settings: Settings) -> Any:
        if len(played) == stop_after:
            raise KeyboardInterrupt
        played.append(job.name)
        return play(job, settings)

    monkeypatch.setattr(evaluate, "play", counting)
    stop_after = 100
    evaluate.run(context)
    # Three different models (the merges are the specialist), 16 episodes each, in jobs of 8.
    assert len(played) == 6
    assert len(read_rows(context.data / "evaluation" / "rows.parquet")) == 5 * 16
    undisturbed = outputs(context)
    assert set(undisturbed) == {"rows.parquet", "evaluation.json", "evaluation.csv", "metrics.json"}
    assert not (context.root / ".bellwether" / "checkpoints" / "evaluate").exists()

    shutil.rmtree(context.data / "evaluation")
    shutil.rmtree(context.reports)
    played, stop_after = [], 2
    with pytest.raises(KeyboardInterrupt):
        evaluate.run(context)
    first, played, stop_after = played, [], 100
    panels_module.unload()
    evaluate.run(context)
    assert len(first) == 2
    assert len(played) == 4
    assert not set(first) & set(played)
    assert outputs(context) == undisturbed

    # Divided over four shards of six jobs, in any order; the stage then plays nothing.
    shutil.rmtree(context.data / "evaluation")
    shutil.rmtree(context.reports)
    by_shard = []
    for index in (3, 1, 4, 2):
        played = []
        evaluate.run(replace(context, shard=Shard(index, 4)))
        by_shard.append(len(played))
        assert not (context.data / "evaluation").exists()
    played = []
    evaluate.run(context)
    assert (by_shard, played) == ([1, 2, 1, 2], [])
    assert outputs(context) == undisturbed


def test_any_number_of_workers_gives_the_same_bytes(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: forks play all jobs, each once, and the stage writes what one process alone writes."""
    log = context.root / "played"

    def logging(job: Any, settings: Settings) -> Any:
        with log.open("a") as file:
            file.write(f"{job.name}\n")
        return play(job, settings)

    monkeypatch.setattr(evaluate, "play", logging)
    found, names = [], []
    for workers in (1, 2, 3):
        params = parse_params({**PARAMS, "resources": {**PARAMS["resources"], "workers": workers}})
        if workers > 1:
            _run_in_forks(replace(context, params=params), evaluate.run)
        evaluate.run(replace(context, params=params))
        found.append(outputs(context))
        names.append(sorted(log.read_text().splitlines()))
        log.unlink()
    assert found[0] == found[1] == found[2]
    assert names[0] == names[1] == names[2] == sorted(set(names[0]))
