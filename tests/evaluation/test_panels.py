"""Evaluation on panels: rows are independent of batching, model names and restarts; summaries by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slow import slow_except

from stages.agent.scaffold import THINKING, Scaffold
from stages.curation.panel import PanelMismatchError
from stages.engine.engine import EngineSettings, Sampling
from stages.environments.registry import load_domain
from stages.evaluation import panels as panels_module
from stages.evaluation.panels import Settings, jobs_of, load_panels, play, row_of, solution_of
from stages.evaluation.statistics import wilson_interval
from stages.evaluation.summary import compare_models, csv_lines, headline, pairs_to_compare, report, summarise
from stages.records.episode import Episode, Owner, TurnRecord, read_json, write_json
from stages.records.task import Task
from stages.runtime.resources import Resources

from .helpers import RecordingScorer

SETTINGS = Settings(0, Sampling(max_tokens=6), EngineSettings.of(Resources(slots=8), 512))


def rows_of(curated: Path, folder: Path, policy_hash: str, chunk: int = 100, **changes: Any) -> list[dict[str, Any]]:
    jobs = jobs_of(folder, policy_hash, load_panels(curated, ["search"]), curated, 2, chunk)
    return [row for job in jobs for row in play(job, replace(SETTINGS, **changes)).rows]


def test_rows_do_not_depend_on_chunks_or_slots(curated: Path, tiny_policy: Path) -> None:
    """There is one row per task and attempt."""
    whole = rows_of(curated, tiny_policy, "h")
    assert len({(row["task_id"], row["attempt"]) for row in whole}) == 16
    assert rows_of(curated, tiny_policy, "h", chunk=4) == whole
    assert rows_of(curated, tiny_policy, "h", engine=replace(SETTINGS.engine, slots=4)) == whole


def test_random_keys_do_not_depend_on_the_model(curated: Path, tiny_policy: Path) -> None:
    """Models are compared on common random numbers: the same weights under another name play the same episodes."""
    first, second = rows_of(curated, tiny_policy, "one"), rows_of(curated, tiny_policy, "other")
    assert [{**row, "policy_hash": ""} for row in first] == [{**row, "policy_hash": ""} for row in second]
    reseeded = rows_of(curated, tiny_policy, "one", seed=1)
    assert [row["tokens"] for row in reseeded] != [row["tokens"] for row in first]


def test_best_of_n_chooses_by_q_model_or_logprob(curated: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: with +q the Q-model of the panel's domain chooses, with +logprob the policy itself; neither depends on slots."""
    from stages.values import q_model

    scorer, loaded = RecordingScorer(), []
    monkeypatch.setattr(q_model, "load_q_model", lambda *folders: loaded.append(folders) or scorer)
    panels = load_panels(curated, ["search"])

    def rows(by: str, slots: int = 8) -> list[dict[str, Any]]:
        settings = replace(SETTINGS, engine=replace(SETTINGS.engine, slots=slots))
        jobs = jobs_of(tiny_policy, "h", panels, curated, 1, 100, panels_module.BestOf(by, 4, Path("q"), Path("sft")))
        return [row for job in jobs for row in play(job, settings).rows]

    chosen = rows("q")
    assert loaded == [(Path("q/search"), Path("sft"), "cpu")]
    histories = sorted(scorer.queries)
    assert 0 < len(histories) <= sum(row["turns"] for row in chosen)
    scorer.queries.clear()
    assert rows("q", slots=4) == chosen
    assert sorted(scorer.queries) == histories
    scorer.queries.clear()
    assert len(rows("logprob")) == len(chosen)
    assert scorer.queries == []


def test_best_of_n_chooses_by_token_values(curated: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: with +value the domain's policy and its values choose, per token if requested."""
    from stages.agent import best_of_n
    from stages.values import token_q

    scorer, loaded, scaled = RecordingScorer(), [], []
    monkeypatch.setattr(token_q, "load_token_q", lambda *folders: loaded.append(folders) or scorer)
    monkeypatch.setattr(best_of_n, "per_token", lambda rank: scaled.append(rank) or rank)

    def rows(by: str, per_token: bool = False) -> list[dict[str, Any]]:
        best = panels_module.BestOf(by, 4, Path("rl"), Path("sft"), per_token)
        jobs = jobs_of(tiny_policy, "h", load_panels(curated, ["search"]), curated, 1, 100, best)
        return [row for job in jobs for row in play(job, SETTINGS).rows]

    plain = rows("value")
    assert loaded == [(Path("rl/search"), "cpu")]
    assert scorer.queries
    assert not scaled
    assert rows("value", per_token=True) == plain
    rows("logprob", per_token=True)
    assert len(scaled) == 2


def test_best_of_n_episodes_by_a_reward_model(curated: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: best of 1, and of any number by a model that scores all episodes equally, is the plain model's own first draws;
    otherwise the best-scored draw of each attempt, by its tokens up to the policy's last."""
    from stages.values import reward_model

    panels = load_panels(curated, ["search"])

    def rows(n: int, score: Any) -> list[dict[str, Any]]:
        model = SimpleNamespace(scores=lambda episodes: [score(tokens) for tokens in episodes])
        monkeypatch.setattr(reward_model, "load_reward_model", lambda folder, device: model)
        best = panels_module.BestOf("reward", n, Path("rl"), Path("sft"))
        jobs = jobs_of(tiny_policy, "h", panels, curated, 2, 100, best)
        return [row for job in jobs for row in play(job, SETTINGS).rows]

    plain = rows_of(curated, tiny_policy, "h")
    assert rows(1, len) == plain
    of_three = rows(3, lambda tokens: 0.5)
    assert [{**row, "tokens": 0} for row in of_three] == [{**row, "tokens": 0} for row in plain]
    assert all(row["tokens"] >= one["tokens"] for row, one in zip(of_three, plain, strict=True)), "the other draws' count, too"
    best = panels_module.BestOf("reward", 2, Path("rl"), Path("sft"))
    (job,) = jobs_of(tiny_policy, "h", panels, curated, 2, 100, best)
    drawn = [Episode(f"t/{number}", "t", "search", "t", 0, "h", "", 1.0, 1.0, 0) for number in range(4)]
    for number, episode in enumerate(drawn):  # scores 1, 2, 3, 1: draws 0 and 2 are of the first attempt
        episode.append([5], Owner.PROMPT, -1)
        episode.append([6] * (1, 2, 3, 1)[number], Owner.POLICY, 0)
        episode.append([7] * 9, Owner.ENVIRONMENT, 0)
    monkeypatch.setattr(
        reward_model, "load_reward_model", lambda *_: SimpleNamespace(scores=lambda given: [len(one) for one in given])
    )
    chosen = panels_module.best_episodes(
        job, drawn, {episode.episode_id: place for place, episode in enumerate(drawn)}, SETTINGS.engine
    )
    assert chosen == [(drawn[2], 1), (drawn[1], 1)], "and the tokens that the policy sampled in the others"


@pytest.mark.parametrize("by", slow_except(("vote", "logprob"), "vote"))
def test_tokens_of_draws_that_are_not_played_count(curated: Path, tiny_policy: Path, by: str) -> None:
    best = panels_module.BestOf(by, 3, Path("q"), Path("sft"))
    panels_module.unload()
    (job,) = jobs_of(tiny_policy, "h", load_panels(curated, ["search"]), curated, 2, 100, best)
    rows = play(job, SETTINGS).rows
    (player,) = panels_module._loaded.values()
    assert sum(row["tokens"] for row in rows) == player.engine.counters["sampled_tokens"]


def test_best_of_n_settings_change_the_policy_hash(tmp_path: Path) -> None:
    """Contract: another way to choose, another n or another Q-model gives another hash; by log-probability or vote, the
    Q-model does not matter."""
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
    assert replace(best, by="vote").hash("h", ["search"]) == vote, "voting does not use the Q-model"
    scaled = replace(best, by="logprob", per_token=True).hash("h", ["search"])
    assert len({own, scaled, replace(best, by="value").hash("h", ["search"]), best.hash("h", ["search"])}) == 4


def test_changed_panel_is_rejected(curated: Path, tmp_path: Path) -> None:
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


def make_rows(
    model: str, successes: list[int], panel: str = "p", answers: list[str | None] | None = None, solutions: str = ""
) -> list[dict[str, Any]]:
    """Two attempts per task, two tasks per cluster."""
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


def test_report_by_hand() -> None:
    rows = {
        "base": {"search": make_rows("base", [0, 0, 0, 0, 0, 0, 0, 0])},
        "sft": {"search": make_rows("sft", [1, 0, 0, 0, 1, 1, 0, 0])},
        "rl@search": {"search": make_rows("rl@search", [1, 1, 1, 0, 1, 1, 1, 0])},
        "merged": {"search": make_rows("merged", [1, 1, 0, 0, 1, 1, 1, 0])},
        "merged_linear": {"search": make_rows("merged_linear", [1, 1, 0, 0, 1, 1, 1, 0])},
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


def test_only_other_splits_are_named() -> None:
    """Contract: results on validation tasks say so; those on the frozen panels keep their bytes."""
    rows = make_rows("sft", [1, 0] * 4)
    options: dict[str, Any] = {"attempts": 2, "confidence": 0.95, "resamples": 100, "seed": 0}
    plain = report({"sft": {"search": rows}}, {"search": "p"}, **options)
    valid = report({"sft": {"search": rows}}, {"search": "p"}, **options, split="valid")
    assert "split" not in plain
    assert valid == {**plain, "split": "valid"}


def test_only_proportions_have_wilson_intervals() -> None:
    """Contract: turns and cost have none, even where every episode has one turn or costs nothing; the reward has one only if it
    equals success in every episode of every model of the panel."""

    def estimates(reward: float) -> dict[str, Any]:
        base = [{**row, "turns": 1} for row in make_rows("base", [0] * 8)]
        sft = [{**row, "reward": reward} if row["success"] else row for row in make_rows("sft", [1, 0] * 4)]
        rows = {"base": {"search": base}, "sft": {"search": sft}}
        return report(rows, {"search": "p"}, attempts=2, confidence=0.95, resamples=200, seed=0)["models"]["base"]["search"]

    for reward in (1.0, 0.5):
        found = estimates(reward)
        assert found["turns"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 4}
        assert found["cost"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 4}
        assert found["success"]["high"] == round(wilson_interval(0, 2)[1], 6)
        assert found["accepted"]["low"] == round(wilson_interval(2, 2)[0], 6)
        assert found["reward"] == (found["success"] if reward == 1.0 else {**found["cost"]})


def test_models_are_compared_only_on_common_panels() -> None:
    """Six of eight successes against two of eight on the common panel; no comparison on the other one."""
    elsewhere = [{**row, "domain": "chess", "panel": "c"} for row in make_rows("sft", [1, 1, 0, 0, 1, 1, 0, 0])]
    rows = {
        "sft": {"search": make_rows("sft", [1, 0, 0, 0, 1, 0, 0, 0]), "chess": elsewhere},
        "sft+q": {"search": make_rows("sft+q", [1, 1, 1, 0, 1, 1, 1, 0])},
    }
    found = report(rows, {"search": "p", "chess": "c"}, attempts=2, confidence=0.95, resamples=200, seed=0)
    assert [(item["a"], item["domain"], item["difference"], item["n"]) for item in found["comparisons"]] == [
        ("sft+q", "search", 0.5, 4)
    ]
    assert {name: list(of) for name, of in found["models"].items()} == {"sft": ["search", "chess"], "sft+q": ["search"]}
    assert headline(found) == {"search": {"sft": 0.25}, "chess": {"sft": 0.5}}


def test_maj_at_k_is_reported_if_there_are_answers() -> None:
    """Four tasks with two attempts: (x x right), (x y one right), (none, y right), (none none): 1 + 1/2 + 1 + 0 of 4."""
    answers = ["x", "x", "x", "y", None, "y", None, None]
    rows = make_rows("sft", [1, 1, 1, 0, 0, 1, 0, 0], answers=answers)
    found = summarise(rows, attempts=2, confidence=0.95, resamples=100, seed=0)
    assert found["maj_at_k"] == {"1": found["success"]["mean"], "2": 0.625}
    silent = summarise(make_rows("sft", [1, 1, 1, 0, 0, 1, 0, 0]), attempts=2, confidence=0.95, resamples=100, seed=0)
    assert "maj_at_k" not in silent


def test_distinct_solutions_by_hand() -> None:
    """Four tasks with two attempts: solutions (a b), (a a), (a, none), none: 2 + 1 + 1 + 0 of 4 in two attempts; of the two tasks
    with two successes, one has different solutions. There is no number for a single attempt."""
    rows = make_rows("sft", [1, 1, 1, 1, 1, 0, 0, 0], solutions="abaaaxxx")
    found = summarise(rows, attempts=2, confidence=0.95, resamples=100, seed=0)
    assert found["distinct_at_k"] == {"1": found["success"]["mean"], "2": 1.0}
    assert found["solutions_differ"] == {"mean": 0.5, "n": 2}
    assert found["pass_at_k"]["2"] == 0.75
    once = summarise(rows[::2], attempts=1, confidence=0.95, resamples=100, seed=0)
    assert "distinct_at_k" not in once
    none = summarise(make_rows("sft", [0] * 8), attempts=2, confidence=0.95, resamples=100, seed=0)
    assert (none["distinct_at_k"]["2"], none["solutions_differ"]) == (0.0, {"mean": 0.0, "n": 0})


def test_solution_ignores_superficial_differences() -> None:
    """Contract: a solution is the actions without case and spaces; in `code`, the last program without names, constants and
    layout."""
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


def test_thoughts_count_as_turns_but_not_as_actions() -> None:
    """Contract: a plan before an action changes neither the share of accepted actions nor the solution."""
    task, domain = Task("t", "search", "test", 0, "", {}, 1.0), load_domain("search", {})

    def row(plan: str, key: str = THINKING, think: Any = "plan") -> dict[str, Any]:
        script = ((plan, True, f"start{key}"), ("look", False, "start"), ("answer b", True, "start"))
        turns = [TurnRecord(one, "", accepted, 0.0, 0.0, state, one, 0, 0) for one, accepted, state in script]
        episode = Episode("e", "t", "search", "t", 0, "", "", 1.0, 1.0, 0, turns=turns, reward=1.0)
        return row_of(episode, task, 0, "p", domain, Scaffold(think=think))

    one, other = row("first look"), row("think hard")
    assert (one["turns"], one["accepted"]) == (3, 0.5)
    assert one["solution"] == other["solution"]
    plain = row("first look", key="")
    assert plain["accepted"] == pytest.approx(2 / 3)
    assert plain["solution"] != one["solution"]
    assert row("first look", think="none")["accepted"] == pytest.approx(2 / 3), "without a scaffold no turn is a thought"


def test_answer_is_parsed_from_answer_actions() -> None:
    for domain, stated in ((load_domain("search", {}), "paris"), (load_domain("calculator", {}), "the  paris!")):
        answers = [domain.answer(action) for action in ("answer The  Paris!", "ANSWER 12", "answer", "search paris", "")]
        assert answers == [stated, "12", None, None, None]


def test_pairs_to_compare() -> None:
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


def test_comparison_across_panels_is_rejected() -> None:
    with pytest.raises(PanelMismatchError, match="different panels"):
        compare_models(make_rows("a", [0, 1, 0, 1, 1, 1]), make_rows("b", [0, 1, 0, 1, 1, 1], "q"), 0.95, 100, 0)
