"""The viewer of all episodes: its files hold what the tables hold, and nothing in them can break out of its place."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from role_episodes import spoken, team_rows

from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.evaluation.stored_episodes import packed, played_groups, write_played
from stages.records.episode import read_rows, write_table
from stages.report import run
from stages.reporting.inputs import load_inputs
from stages.reporting.kept import episodes_path
from stages.reporting.viewer.folder import render_viewer, write_viewer
from stages.reporting.viewer.groups import Group, file_name, group_count, groups_of
from stages.reporting.viewer.index import index_group, index_json
from stages.reporting.viewer.pack import pack_group, runs, spans_of
from stages.reporting.viewer.patterns import SHIPPED
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker


def loaded(text: str) -> Any:
    """The value that a file of the viewer passes on."""
    found = re.fullmatch(r'viewer\.arrived\("[^"]+", (.*)\);\n', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def unpack(data: Any, place: int) -> dict[str, Any]:
    """An episode of a file, as the page's script reads it."""
    messages, turns, spans, logprobs, advantages, *credit = data["episodes"][place]
    text, tokens = data["texts"].__getitem__, [(data["spans"][ids], owner, turn) for ids, owner, turn in spans]
    said = zip(messages[::2], messages[1::2], strict=True)
    return {
        "messages": [{"role": text(role), "content": text(content)} for role, content in said],
        "turns": [(text(turn[0]), text(turn[1]), bool(turn[3]), turn[4]) for turn in turns],
        "token_ids": [token for ids, _, _ in tokens for token in ids],
        "owner": [owner for ids, owner, _ in tokens for _ in ids],
        "turn": [turn for ids, _, turn in tokens for _ in ids],
        "logprob": [value / 1000 for value in logprobs],
        "advantages": None if advantages is None else [value for value, count in advantages for _ in range(count)],
        "credit": credit[0] if credit else None,
    }


def test_files_hold_every_episode_token_for_token(full_run) -> None:
    """Contract: a group's file has all that its table has; log-probabilities to three digits."""
    root, params = full_run
    groups = list(groups_of(root, load_inputs(root, params)))
    assert [(group.domain, group.source) for group in groups][:4] == [
        ("textworld", "sft rollout"),
        ("textworld", "rl step 1"),
        ("textworld", "rl step 20"),
        ("textworld", "base"),
    ]
    assert {group.source: len(group.rows) for group in groups if group.domain == "search"} == {
        "sft rollout": 96, "rl step 1": 6, "rl step 20": 6, "base": 80, "sft": 80, "rl@textworld": 80, "rl@search": 80,
        "merged": 80, "merged_linear": 80,
    }  # fmt: skip
    for group in groups:
        data = loaded(pack_group(group))
        for place, row in enumerate(group.rows):
            episode = unpack(data, place)
            for column in ("messages", "token_ids", "owner", "turn"):
                assert episode[column] == row[column]
            keys = ("action", "observation", "accepted", "reward")
            assert episode["turns"] == [tuple(turn[key] for key in keys) for turn in row["turns"]]
            policy = [number for number, owner in enumerate(row["owner"]) if owner == 1]
            assert episode["logprob"] == pytest.approx([row["logprob"][number] for number in policy], abs=6e-4)
            if "advantages" in row:
                assert episode["advantages"] == pytest.approx([row["advantages"][number] for number in policy], abs=6e-4)
            else:
                assert episode["advantages"] is None
            assert episode["credit"] == pytest.approx(row["credit"]) if "credit" in row else episode["credit"] is None


def test_runs_and_spans_by_hand() -> None:
    assert runs([0.5, 0.5, None, 0.5]) == [[0.5, 2], [None, 1], [0.5, 1]]
    row = {"token_ids": [7, 8, 9, 9, 5], "owner": [0, 0, 1, 1, 2], "turn": [-1, -1, 0, 1, 1]}
    assert spans_of(row) == [((7, 8), 0, -1), ((9,), 1, 0), ((9,), 1, 1), ((5,), 2, 1)]
    assert spans_of({"token_ids": [], "owner": [], "turn": []}) == []


def test_file_names_are_safe_and_distinct() -> None:
    names = ["rl@search", "rl step 1", "rl-step-1", "rl step 11", "../up", "sft+q", "é"]
    made = [file_name(name) for name in names]
    assert made[0] == "rl-40search"
    assert len(set(made)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in made)


def test_index_has_a_value_per_episode_and_leads_back_to_it(full_run) -> None:
    root, params = full_run
    groups = list(groups_of(root, load_inputs(root, params)))
    index = index_json([index_group(group, SHIPPED) for group in groups])
    for group, packed_group in zip(groups, index["groups"], strict=True):
        tasks = [index["tasks"][group.domain][place] for place in packed_group["task"]]
        assert tasks == [row["task_id"] for row in group.rows]
        ids = [name[1:] if name[0] == "=" else task + name for task, name in zip(tasks, packed_group["id"], strict=True)]
        assert ids == [row["episode_id"] for row in group.rows]
        assert packed_group["refused"] == [sum(not turn["accepted"] for turn in row["turns"]) for row in group.rows]
        assert [packed_group["stops"][place] for place in packed_group["stop"]] == [row["stop_reason"] for row in group.rows]
        assert packed_group["terms"]["exact_match"] == [row["reward"] for row in group.rows]


def test_roles_and_plays_are_in_the_index_and_moves_in_the_file(full_run) -> None:
    """Contract: only groups with roles have these columns and parts."""
    rows = [*team_rows("t/0"), {**spoken("else", "", ["x"], 0.0), "task_id": "t"}]
    group = Group("search", "rl step 1", "training", rows)
    (columns,) = index_json([index_group(group, [])])["groups"]
    assert columns["roles"] == ["", "planner", "solver"]
    assert (columns["role"], columns["id"], columns["play"]) == ([2, 1, 0], ["/0", "/0/planner", "=else"], ["/0", "/0", ""])
    episodes = loaded(pack_group(group))["episodes"]
    assert [episode[5:] for episode in episodes] == [[None, [1, 3]], [None, [0, 2]], []]
    root, params = full_run
    for other in groups_of(root, load_inputs(root, params)):
        assert not {"roles", "role", "play"} & set(index_group(other, []).columns)
        assert all(len(episode) <= 6 for episode in loaded(pack_group(other))["episodes"])


def test_hostile_text_stays_text(full_run, tmp_path: Path) -> None:
    """Contract: what a model or an environment writes can't break out of the page or of a file."""
    root, params = full_run
    hostile = "</script><script>alert('x')</script><!-- \u2028 ');alert(1);// "
    row = dict(read_rows(root / "data" / "rollouts" / "search" / "episodes.parquet")[0])
    turns = [{**turn, "action": hostile} for turn in row["turns"]]
    row |= {"episode_id": hostile, "task_id": hostile, "turns": turns, "stop_reason": hostile}
    group = Group("search", hostile, "rollout", [row])
    with write_viewer(tmp_path / "episodes", load_inputs(root, params), [group], SHIPPED):
        pass
    page = (tmp_path / "episodes" / "index.html").read_text(encoding="utf-8")
    assert hostile not in page
    found = re.search(r'id="index">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["groups"][0]["source"] == hostile
    (file,) = (tmp_path / "episodes").glob("search.*.js")
    assert hostile in loaded(file.read_text(encoding="utf-8"))["texts"]
    assert "\u2028" not in file.read_text(encoding="utf-8")


def test_viewer_says_on_which_tasks_models_were_evaluated(full_run, tmp_path: Path) -> None:
    """Contract: shares of a run on validation tasks are not labelled as those of the frozen panel."""
    root, params = full_run
    inputs = load_inputs(root, params)
    for split, said in (("test", "the frozen panel"), ("valid", "validation tasks")):
        page = render_viewer(replace(inputs, evaluation={**inputs.evaluation, "split": split}), [], SHIPPED, [], {})
        found = re.search(r'id="index">(.*?)</script>', page, re.DOTALL)
        assert found is not None
        assert json.loads(found[1])["evaluated_on"] == said


def test_without_stored_episodes_of_the_evaluation_the_viewer_has_the_others(full_run, tmp_path: Path) -> None:
    root, params = full_run
    inputs = load_inputs(root, params)
    assert {group.kind for group in groups_of(tmp_path, inputs)} == {"rollout", "training"}
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "evaluation.json").write_bytes((root / "reports" / "evaluation.json").read_bytes())
    run(StageContext("report", None, params, tmp_path, Tracker()))
    assert "episodes/index.html" not in (tmp_path / "reports" / "report.html").read_text(encoding="utf-8")


def test_evaluations_episodes_are_stored_by_model(full_run, tmp_path: Path) -> None:
    """Contract: the same parts give the same bytes; a model's rows come back in their order, those of other domains apart."""
    table = read_rows(full_run[0] / "data" / "rollouts" / "search" / "episodes.parquet")
    rows = [{"attempt": number, **row} for number, row in enumerate(table[:5])]
    other = [{**row, "domain": "textworld"} for row in rows[:2]]
    parts = [("a", packed(rows[:3])), ("b", packed(rows)), ("a", packed(rows[3:])), ("a", packed(other))]
    for name in ("one", "two"):
        write_played(tmp_path / name, parts)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    found = dict(played_groups(tmp_path / "one", "search", ["b", "none", "a"]))
    assert found == {"b": [{"model": "b", **row} for row in rows], "a": [{"model": "a", **row} for row in rows]}
    assert [len(held) for _, held in played_groups(tmp_path / "one", "textworld", ["a", "b"])] == [2]
    assert list(played_groups(tmp_path / "absent", "search", ["a"])) == []
    (tmp_path / "one").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"not a readable Parquet file .* run evaluate again"):
        list(played_groups(tmp_path / "one", "search", ["a"]))


def test_kept_run_is_beside_this_one(full_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: `make keep` keeps the episodes; a later run on the same panels shows both, linked from the chapter on changes."""
    from stages.reporting import keep as keeping
    from stages.reporting.kept import read_kept
    from stages.reporting.sections.changes import changes_section

    full, params = full_run
    root = tmp_path / "run"
    shutil.copytree(full, root, ignore=shutil.ignore_patterns("episodes"))
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    monkeypatch.setattr(keeping, "out_of_date", lambda root: [])
    number = keeping.keep(root, "first")
    # The next run: another seed of the merged model's panel.
    evaluation = json.loads((root / "reports" / "evaluation.json").read_text())
    evaluation["models"]["merged"]["search"]["success"]["mean"] = 0.5
    (root / "reports" / "evaluation.json").write_text(json.dumps(evaluation))
    rows = read_rows(root / "data" / "evaluation" / "rows.parquet")
    for row in rows:
        row["success"] = row["success"] and row["attempt"] == 0
    write_table(root / "data" / "evaluation" / "rows.parquet", EVALUATION_SCHEMA, rows)
    inputs = load_inputs(root, params)
    groups = list(groups_of(root, inputs))
    assert group_count(root, inputs) == len(groups)
    assert [group.source for group in groups if group.domain == "search" and group.kind == "kept"] == [
        f"{model}, run {number}" for model in ("base", "sft", "rl@textworld", "rl@search", "merged", "merged_linear")
    ]
    by_name = {(one.domain, one.source): one for one in groups}
    kept, now = by_name["search", f"merged, run {number}"], by_name["search", "merged"]
    assert [row["token_ids"] for row in kept.rows] == [row["token_ids"] for row in now.rows]
    (table,) = (one for one in changes_section(inputs).blocks if one.kind == "table" and one.header[-1] == "episodes")
    links = [row[-1].href for row in table.rows if row[:2] == ["search", "merged"]]
    assert links == [f"episodes/index.html#tab=compare&domain=search&a=merged%2C+run+{number}&b=merged"]
    # On another panel they would not be comparable.
    (path,) = (root / "data" / "kept").glob("*.parquet")
    assert path.name == episodes_path(root, read_kept(root)[-1]).name
    path.unlink()
    assert not [group for group in groups_of(root, load_inputs(root, params)) if group.kind == "kept"]
