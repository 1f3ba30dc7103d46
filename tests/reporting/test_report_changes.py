"""Kept runs: what is stored, when, and how a later report compares with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stages.params import Params
from stages.reporting import keep as keeping
from stages.reporting.blocks import Section, Table
from stages.reporting.changes import code_changes, parameter_changes, success_changes
from stages.reporting.inputs import load_inputs
from stages.reporting.kept import FILE, Measured, Run, Success, Work, append, newest, read_kept
from stages.reporting.sections.changes import FEW, changes_section, parameter_tables
from stages.reporting.sections.cost import cost_section, model_table, stages_of
from stages.reporting.sections.speed import speed_section
from stages.reporting.template import template
from stages.reporting.this_run import this_run


def make(success: list[int], **changes) -> Run:
    """A run of one model on one domain: `success[i]` of two attempts at task i succeed."""
    params = {"domains": ["search"], "seed": 0, "evaluate": {"confidence": 0.95, "resamples": 500}, "rl": {"steps": 20}}
    mean = sum(success) / (2 * len(success))
    values = {
        "params": params,
        "code": {"stages/rl.py": "aa", "stages/agent": "bb"},
        "panels": {"search": "p1"},
        "success": {"merged": {"search": {"mean": mean, "low": 0.0, "high": 1.0, "n": len(success)}}},
        "solved": {"merged": {"search": success}},
        "work": {},
        "attempts": 2,
    }
    return Run(**{**values, **changes})


def outcomes(count: int) -> list[dict]:
    return [
        {"model": "merged", "domain": "search", "task_id": f"t{i:02d}", "cluster": f"c{i}", "success": True} for i in range(count)
    ]


def test_changed_parameters_and_code_are_listed() -> None:
    before = make([1, 1])
    now = make(
        [1, 1],
        params={**before.params, "rl": {"steps": 40, "epochs": 2, "minibatches": None}},
        code={"stages/rl.py": "ab", "stages/new": "cc"},
    )
    assert parameter_changes(before, now) == [("rl.steps", "20", "40"), ("rl.epochs", "–", "2")]
    assert parameter_changes(now, before) == [("rl.steps", "40", "20"), ("rl.epochs", "2", "–")]
    newer = make([1, 1], params={**before.params, "rl": {"steps": 20, "epochs": 1, "group_size": 9}})
    assert parameter_changes(before, newer) == [("rl.group_size", "–", "9")], "a new parameter at its default changes nothing"
    assert code_changes(before, now) == [("stages/agent", "removed"), ("stages/new", "new"), ("stages/rl.py", "changed")]


def test_edits_of_parameters_without_a_default_are_listed() -> None:
    """Contract: a value where there was null, and null where there was a value, are edits, also if null is the default."""
    null = make([1, 1], params={**make([1]).params, "rl": {"loss": {"clip_high": None}}})
    given = make([1, 1], params={**null.params, "rl": {"loss": {"clip_high": 0.3}}})
    assert parameter_changes(null, given) == [("rl.loss.clip_high", "–", "0.3")]
    assert parameter_changes(given, null) == [("rl.loss.clip_high", "0.3", "–")]
    unknown = make([1, 1], params={**null.params, "rl": {}})
    assert parameter_changes(unknown, given) == [("rl.loss.clip_high", "–", "0.3")]
    assert parameter_changes(unknown, null) == []


def test_an_edit_is_not_lost_among_an_earlier_versions_parameters() -> None:
    """Contract: what has a value now, and what was removed from per_domain, stays in sight; a long rest is folded, with its
    number, and needs no script to be opened."""
    earlier = {"design": {f"key{place}": place for place in range(FEW + 1)}, "per_domain": {"search": {"rl": {"steps": 9}}}}
    before = make([1, 1])
    now = make([1, 1], params={**before.params, "rl": {"steps": 40}, "per_domain": {"search": {"rl": {}}}})
    old = before.model_copy(update={"params": {**before.params, **earlier}})
    edits, rest = (table for table in parameter_tables(parameter_changes(old, now)) if isinstance(table, Table))
    assert edits.rows == [["rl.steps", "20", "40"], ["per_domain.search.rl.steps", "9", "–"]]
    assert (edits.title, edits.folded) == ("Parameters", False)
    assert rest.rows == [[f"design.key{place}", str(place)] for place in range(FEW + 1)]
    assert (rest.title, rest.folded) == (f"Parameters with a value in the earlier run alone ({FEW + 1})", True)
    page = template("blocks.html.j2").module
    html = page.chapter(Section("changes", "Changes", "", [edits, rest]))
    assert f"<details><summary>{rest.title}</summary>" in html
    assert html.index("rl.steps") < html.index("<details>") < html.index("design.key0")
    (few,) = parameter_tables([("design.key0", "1", "–")])
    assert isinstance(few, Table)
    assert not few.folded, "a single removed value is in sight"
    assert parameter_tables([]) == []


def test_success_comparison_is_paired_by_task() -> None:
    """Contract: "better" than an earlier run means the same paired test as within a run. Twelve tasks, each solved once more:
    +50 points, and a sign-flip test with p = 2 / 2^12."""
    (change,) = success_changes(make([0, 1] * 6), make([1, 2] * 6), outcomes(12))
    assert change.test is not None
    assert (change.test.difference, change.test.low, change.test.high) == (0.5, 0.5, 0.5)
    assert change.test.p <= 0.01
    assert change.test.verdict == "better"
    assert not change.equal
    (same,) = success_changes(make([0, 1] * 6), make([0, 1] * 6), outcomes(12))
    assert same.equal


def test_runs_on_different_panels_are_not_compared() -> None:
    """Contract: a comparison across different panels is rejected."""
    (change,) = success_changes(make([0] * 6, panels={"search": "p0"}), make([2] * 6), outcomes(6))
    assert change.test is None
    assert change.why == "panels differ"


def test_a_transfer_domain_of_one_run_alone_is_listed() -> None:
    """Contract: every domain of either run; those trained on come first."""
    row = Success(mean=0.5, low=0.0, high=1.0, n=2)
    panels, found = {"bank": "b1", "search": "p1"}, {"merged": {"bank": row, "search": row}}
    wider, narrow = make([1, 1]).model_copy(update={"panels": panels, "success": found}), make([1, 1])
    changes = {(one.domain, one.why) for one in success_changes(narrow, wider, [])}
    assert changes == {("search", "no outcomes per task"), ("bank", "only now")}
    assert [one.domain for one in success_changes(narrow, wider, [])] == ["search", "bank"]
    assert [(one.domain, one.why) for one in success_changes(wider, narrow, [])][1] == ("bank", "only before")


def test_run_is_compared_with_newest_different_kept_run() -> None:
    first, second = make([0, 1]), make([1, 1])
    assert newest(second, [], identical=False) is None
    assert newest(second, [first], identical=False) == (1, first)
    assert newest(second, [first, second], identical=False) == (1, first)
    found = newest(second, [first, second.model_copy(update={"note": "kept"})], identical=True)
    assert found is not None
    assert found[0] == 2
    assert newest(second, [first], identical=True) is None


def test_kept_run_is_read_back(tmp_path: Path) -> None:
    run = make([0, 1, 2], note="a note", commit="abc+")
    append(tmp_path, run)
    append(tmp_path, make([1, 1, 1]))
    assert read_kept(tmp_path)[0] == run
    assert len(read_kept(tmp_path)) == 2


def test_a_missing_final_newline_is_added_first(tmp_path: Path) -> None:
    """Contract: a file that an editor left without one stays readable, and its lines stay as they are."""
    append(tmp_path, make([0, 1]))
    line = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(line.rstrip("\n"))
    append(tmp_path, make([1, 1]))
    assert (tmp_path / FILE).read_text().startswith(line)
    assert [run.solved["merged"]["search"] for run in read_kept(tmp_path)] == [[0, 1], [1, 1]]


def test_damaged_line_is_rejected_with_its_number(tmp_path: Path) -> None:
    append(tmp_path, make([0, 1]))
    values = json.loads((tmp_path / FILE).read_text())
    del values["panels"]
    with (tmp_path / FILE).open("a") as handle:
        handle.write(json.dumps(values) + "\n")
    with pytest.raises(ValueError, match=r"reports/runs\.jsonl, line 2: 'panels' Field required(.|\n)*Remove the line"):
        read_kept(tmp_path)


@pytest.fixture
def root(full_run: tuple[Path, Params], tmp_path: Path) -> Path:
    """A copy of the full run with a small dvc.yaml."""
    shutil.copytree(full_run[0], tmp_path / "run")
    (tmp_path / "run" / "dvc.yaml").write_text(
        "stages:\n  sft: {cmd: sft, deps: [params.yaml]}\n  rl: {matrix: {domain: [search]}, cmd: rl, deps: [params.yaml]}\n"
    )
    return tmp_path / "run"


def test_keep_adds_a_line_once(root: Path, full_run: tuple[Path, Params], monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs measured with the current inputs are kept with the run and shown on its page; keeping it again changes nothing."""
    from stages.runtime.costs import measured
    from stages.runtime.lineage import identity, input_hashes

    monkeypatch.setattr(keeping, "out_of_date", lambda root: [])
    with measured(root, "rl@search", identity(input_hashes(root, "rl", "search"))):
        pass
    with measured(root, "sft", "other inputs"):
        pass
    assert keeping.keep(root, "second") == 2
    before = (root / FILE).read_bytes()
    assert keeping.keep(root, "again") == 2
    assert (root / FILE).read_bytes() == before
    kept = read_kept(root)[-1]
    assert kept.note == "second"
    assert list(kept.measured) == ["rl@search"]
    inputs = load_inputs(root, full_run[1])
    assert "Kept as run 2 (“second”). Compared with run 1 (“PPO first”" in changes_section(inputs).blocks[0].text
    text = cost_section(inputs).blocks[-1].text
    assert "Time and memory of this run" in text
    assert "(restored from DVC's cache): curate@textworld" in text


def test_a_model_costs_what_the_stages_before_it_took(full_run: tuple[Path, Params]) -> None:
    assert stages_of("base+few_shot", ["a", "b"], "ram_plus") == []
    assert stages_of("sft+search", ["a", "b"], "ram_plus") == ["curate@a", "curate@b", "sft"]
    assert stages_of("sft+q", ["a"], "ram_plus") == ["curate@a", "sft", "rollout@a", "annotate@a"]
    assert stages_of("rl@b", ["a", "b"], "ram_plus") == ["curate@a", "curate@b", "sft", "rollout@b", "annotate@b", "rl@b"]
    assert stages_of("merged", ["a"], "joint_rl") == ["curate@a", "sft", "rollout@a", "annotate@a", "merge"]
    assert stages_of("merged_linear", ["a"], "joint_rl") == stages_of("rl@a", ["a"], "joint_rl")
    assert stages_of("merged_linear", ["a"], "ram_plus") == ["curate@a", "sft", "rollout@a", "annotate@a", "rl@a", "merge"]
    inputs = load_inputs(*full_run)
    now = this_run(inputs)
    measured = {
        stage: Measured(seconds=60.0, cpu_seconds=60.0, peak_bytes=1, peak_gpu_bytes=0, machine="m", runs=1)
        for stage in stages_of("merged", inputs.params.domains, "ram_plus")
    }
    table = model_table(now, measured, inputs.params.domains, "ram_plus")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["base"][1:] == ["–"] * 5
    assert (rows["sft"][-1], rows["rl@search"][-1], rows["merged"][-1]) == ("3 min 00 s", "6 min 00 s", "10 min 00 s")
    sampled = [now.work[stage].sampled_tokens or 0 for stage in ("rollout@search", "rl@search")]
    assert rows["rl@search"][table.header.index("tokens sampled") - 1] == f"{sum(sampled):,}"


def test_work_of_a_merge_that_trains(full_run: tuple[Path, Params]) -> None:
    """Sums over the domains; tokens of joint_rl are those of one pass over its episodes. A merge of weights has none."""
    inputs = load_inputs(*full_run)
    assert "merge" not in this_run(inputs).work
    rl = {
        "steps": 4,
        "episodes": 32,
        "environment_steps": 90,
        "ledger/policy_tokens_trained": 500,
        "ledger/policy_tokens_dropped": 20,
    }
    joint = {"joint_rl": {"steps": 8, "domains": {"textworld": rl, "search": rl}}}
    expected = Work(steps=8, episodes=64, environment_steps=180, sampled_tokens=1040, trained_tokens=1000)
    assert this_run(replace(inputs, merge={**inputs.merge, **joint})).work["merge"] == expected
    joint["joint_rl"]["domains"]["search"] = {**rl, "ledger/policy_tokens_skipped": 30}  # by the KL stop
    found = this_run(replace(inputs, merge={**inputs.merge, **joint})).work["merge"]
    assert found == expected.model_copy(update={"sampled_tokens": 1070})
    played = {"episodes": 10, "successes": 3, "learnt": 2, "environment_steps": 25, "sampled_tokens": 80}
    distil = {"distil": {"steps": 5, "trained_tokens": 70, "train_loss": 0.1, "domains": {"search": played}}}
    expected = Work(steps=5, episodes=10, environment_steps=25, sampled_tokens=80, trained_tokens=70)
    assert this_run(replace(inputs, merge={**inputs.merge, **distil})).work["merge"] == expected


def test_work_of_rl_includes_its_warm_start(full_run: tuple[Path, Params]) -> None:
    """Contract: 20 steps on 900 tokens before RL are in the cost of rl, as its own steps and tokens are."""
    inputs = load_inputs(*full_run)
    given = inputs.domains["search"]
    assert given.rl is not None
    first = {"algorithm": "tree_bc", "steps": 20, "ledger/policy_tokens_trained": 900}
    warmed = {**inputs.domains, "search": replace(given, rl={**given.rl, "warm_start": first})}
    before, after = (this_run(each).work["rl@search"] for each in (inputs, replace(inputs, domains=warmed)))
    more = {"steps": (before.steps or 0) + 20, "trained_tokens": (before.trained_tokens or 0) + 900}
    assert after == before.model_copy(update=more)


def test_outdated_run_is_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "out_of_date", lambda root: ["merge"])
    before = (root / FILE).read_bytes()
    with pytest.raises(
        keeping.KeepError, match=r"not up to date with params\.yaml, data and code: merge\. Run 'dvc repro' first"
    ):
        keeping.keep(root)
    assert (root / FILE).read_bytes() == before


def test_results_on_validation_tasks_are_not_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "out_of_date", lambda root: [])
    evaluation = json.loads((root / "reports/evaluation.json").read_text())
    (root / "reports/evaluation.json").write_text(json.dumps({**evaluation, "split": "valid"}))
    before = (root / FILE).read_bytes()
    with pytest.raises(keeping.KeepError, match=r"validation tasks; set evaluate\.split"):
        keeping.keep(root)
    assert (root / FILE).read_bytes() == before


def test_page_lists_changes_since_kept_run(full_run: tuple[Path, Params]) -> None:
    root, params = full_run
    blocks = changes_section(load_inputs(root, params)).blocks
    tables = {block.title: block for block in blocks if block.kind == "table"}
    assert list(tables["Parameters"].rows) == [["rl.algorithm", "ppo", "grpo"]]
    (row,) = tables["Success, before and now"].rows
    assert row[:4] == ["search", "merged", "31.0 %", "62.0 %"]
    assert row[-2:] == ["▲ better", ""]
    texts = [block.text for block in blocks if block.kind == "text"]
    assert any(text.startswith("Identical on every task: base on textworld") for text in texts)


def test_page_without_kept_runs_says_how_to_keep_one(full_run: tuple[Path, Params], tmp_path: Path) -> None:
    full, params = full_run
    (tmp_path / "reports").mkdir()
    shutil.copy(full / "reports" / "evaluation.json", tmp_path / "reports")
    inputs = load_inputs(tmp_path, params)
    assert "Run 'make keep'" in changes_section(inputs).blocks[0].text
    assert cost_section(inputs).blocks[-1].tone == "note"


def test_work_is_counted_from_stage_reports(full_run: tuple[Path, Params]) -> None:
    """96 rollouts and 2,560 episodes of RL per domain; six models of two panels of 200 tasks, two attempts each."""
    work = this_run(load_inputs(*full_run)).work
    assert work["rollout@search"].episodes == 96
    assert work["rl@textworld"].episodes == 2560
    assert work["evaluate"].episodes == 6 * 2 * 200 * 2
    assert work["curate@search"].episodes == 216 + 203


def test_speed_section_shows_measured_spans(full_run: tuple[Path, Params], tmp_path: Path) -> None:
    """A row and a bar per stage, in pipeline order, with rates and shares; without measured spans, no section."""
    root, params = full_run
    section = speed_section(load_inputs(root, params))
    assert section is not None
    figures, rates, shares, text = section.blocks
    assert [line[0] for line in rates.rows] == [line[0] for line in shares.rows]
    assert [line[0] for line in rates.rows[:3]] == ["curate@textworld", "curate@search", "sft"]
    by_stage = {line[0]: line[1:] for line in rates.rows}
    assert by_stage["sft"][:3] == ["1 min 23 s", "90 %", "971"]
    assert dict(zip(shares.header, shares.rows[0], strict=True))["environment"] == "62 %"
    assert "Speed of run 1" in text.text
    assert len(figures.legend) == len(shares.header) - 1
    (tmp_path / "reports").mkdir()
    shutil.copy(root / "reports" / "evaluation.json", tmp_path / "reports")
    assert speed_section(load_inputs(tmp_path, params)) is None
