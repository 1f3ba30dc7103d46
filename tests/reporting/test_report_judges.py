"""The chapter on judges, and judgments beside episodes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.judging.contract import Candidate, Cost, Judgment, Question, Status
from stages.judging.table import judgment_row, write_judgments
from stages.params import Params
from stages.records.episode import read_json, read_rows, write_json
from stages.reporting.blocks import Figures, Table, Text
from stages.reporting.episodes import pack
from stages.reporting.inputs import Inputs, by_episode, load_inputs
from stages.reporting.sections.judges import judges_section, sampled


class Judge:
    name, version = "server", "abc"


def row(first: str, second: str, scores: tuple[float, ...], status: Status = Status.OK, step: int = 1) -> dict[str, Any]:
    pair = (Candidate(f"answer of {first}", name=first), Candidate(f"answer of {second}", name=second))
    judgment = Judgment(scores, f"{first} is better", status, Cost(1, 50, 10, 0.5))
    return judgment_row(Judge(), Question("pairwise", "t", "prompt", pair), judgment, step)  # type: ignore[arg-type]


JUDGED = {
    **{"judge": "server", "version": "abc", "scheme": "anchor", "judgments": 4, "calls": 5, "tokens_in": 1200, "tokens_out": 40},
    **{"money": 2.0, "statuses": {"ok": 3, "timeout": 1}, "warned_at": 7, "failures": 0.25, "flip_rate": 0.125, "tie_rate": 0.0},
    **{"position_bias": 0.3, "pairs": 2.0},
}
MODEL = {
    **{"kind": "reward", "labels": "program", "version": "0123", "preferences": 40},
    "held_out": {"pairs": 8.0, "accuracy": 0.875, "kappa": 0.75, "brier": 0.1, "calibration_error": 0.05, "flip_rate": 0.0},
    "labelling": {**{name: JUDGED[name] for name in ("calls", "money", "statuses", "flip_rate", "tie_rate", "position_bias")}},
    "against_gold": {"short": {"pairs": 8.0, "accuracy": 0.8}},
    "principles": {"short": {"pairs": 8.0, "accuracy": 1.0, "negated": 0.125}},
}


@pytest.fixture(scope="module")
def judged(full_run: tuple[Path, Params], tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A run whose search specialist was trained on a server's judgments, and whose annotate fitted a judge model."""
    root, params = full_run
    copy = tmp_path_factory.mktemp("judged") / "run"
    shutil.copytree(root, copy)
    names = [one["episode_id"] for one in read_rows(copy / "data/rl/search/samples.parquet")][:2]
    rows = [row(*names, (8.0, 4.0)), row(*names[::-1], (3.0, 9.0)), row(*names, (), Status.TIMEOUT, step=2)]
    write_judgments(copy / "data/rl/search/judgments.parquet", rows)
    for folder, key, value in (("rl", "judge", JUDGED), ("annotate", "judge_model", MODEL)):
        path = copy / "reports" / folder / "search.json"
        write_json(path, {**read_json(path), key: value})
    history = copy / "reports/rl/search_history.csv"
    header, *lines = history.read_text().splitlines()
    extra = [f"{line},0.6,{number / 10},2.5" for number, line in enumerate(lines)]
    history.write_text("\n".join([f"{header},judge_agreement,judge_gap,judge_gold", *extra]) + "\n")
    return load_inputs(copy, params)


def tables(inputs: Inputs) -> dict[str, Table]:
    section = judges_section(inputs)
    assert section is not None
    return {block.title: block for block in section.blocks if isinstance(block, Table)}


def test_without_judges_there_is_no_chapter(full_run: tuple[Path, Params]) -> None:
    assert judges_section(load_inputs(*full_run)) is None


def test_costs_failures_and_order_of_both_stages(judged: Inputs) -> None:
    rows = tables(judged)["Judgments and what they cost"].rows
    assert [list(one[:4]) for one in rows] == [
        ["search", "annotate", "program", "pairs by both orders"],
        ["search", "rl", "server", "anchor"],
    ]
    assert list(rows[1][4:]) == ["4", "5", "1,200", "2", "1 timeout", "12.5 %", "0.0 %", "0.3"]


def test_judge_models_are_shown_with_what_is_known_of_them(judged: Inputs) -> None:
    (model,) = tables(judged)["Judge models, on held-out tasks"].rows
    assert list(model) == [
        "search",
        "reward",
        "program",
        "0123",
        "40",
        "8",
        "0.875",
        "0.75",
        "–",
        "0.1",
        "0.05",
        "0",
        "–",
        "–",
    ]
    (read,) = tables(judged)["How well they read single principles"].rows
    assert list(read) == ["search", "short", "8", "100.0 %", "12.5 %", "–", "80.0 %"]


def test_agreement_with_labelled_pairs_is_shown(judged: Inputs) -> None:
    """Contract: what was measured of a judge before it was believed is on its page, also where no pair could be compared."""
    assert "Judges on labelled pairs, before training" not in tables(judged)
    none = {"scheme": "anchor", "pairs": 40.0, "failed": 40.0, "compared": 0.0, "position_bias": 0.0}
    some = {**none, "failed": 2.0, "compared": 30.0, "accuracy": 0.8, "kappa": 0.6, "ties": 0.1, "brier": 0.2}
    some |= {"calibration_error": 0.05, "flip_rate": 0.25, "position_bias": 0.5}
    for found, shown in (
        (some, ["40", "30", "2", "0.8", "0.6", "0.2", "0.05", "25.0 %", "10.0 %", "0.5"]),
        (none, ["40", "0", "40", "–", "–", "–", "–", "–", "–", "0"]),
    ):
        search = judged.domains["search"]
        report = {**search.rl, "judge": {**search.rl["judge"], "measured": found}}
        inputs = replace(judged, domains={**judged.domains, "search": replace(search, rl=report)})
        (row,) = tables(inputs)["Judges on labelled pairs, before training"].rows
        assert list(row) == ["search", "server", "anchor", *shown]


def test_stuffing_and_rewards_from_references_are_drawn(full_run: tuple[Path, Params], tmp_path: Path) -> None:
    """A run with rewards from references alone has the chapter, with the share of key words, words, and agreement with the gold
    quality."""
    root, params = full_run
    copy = tmp_path / "run"
    shutil.copytree(root, copy)
    history = copy / "reports/rl/search_history.csv"
    header, *lines = history.read_text().splitlines()
    names = ("references_keyword_share", "references_words", "references_agreement", "references_gold")
    extra = [f"{line},0.9,7.0,0.5,2.5" for line in lines]
    history.write_text("\n".join([",".join((header, *names)), *extra]) + "\n")
    found = load_inputs(copy, params)
    titles = ("Agreement of rewards from references", "Gold quality under rewards from references", "Share of key words")
    ends = tables(found)["First and last five steps"]
    assert tuple(ends.header) == ("domain", *titles, "Words of an answer")
    assert ends.rows[0][3:] == ["0.9 → 0.9", "7 → 7"]
    section = judges_section(found)
    assert section is not None
    (figures,) = [block for block in section.blocks if isinstance(block, Figures)]
    assert len(figures.drawings) == 4


def test_gap_is_drawn_and_its_warning_shown(judged: Inputs) -> None:
    section = judges_section(judged)
    assert section is not None
    texts = [block.text for block in section.blocks if isinstance(block, Text)]
    assert any("by step 7, scores of the judge and gold quality have moved apart" in text for text in texts)
    ends = tables(judged)["First and last five steps"]
    assert tuple(ends.header) == ("domain", "Agreement with the gold quality", "Gap to the gold quality", "Gold quality")
    assert ends.rows[0][1] == "0.6 → 0.6"


def test_samples_of_judgments_begin_with_failures(judged: Inputs) -> None:
    table = tables(judged)["What was said on search: 3 of 3 judgments"]
    assert [one[3] for one in table.rows].count("timeout") == 1
    many = [row("a", "b", (5.0, 5.0), Status.OK if number % 2 else Status.NONSENSE, number) for number in range(60)]
    shown = sampled(many)
    assert len(shown) == 12
    assert sum(one["status"] == "nonsense" for one in shown) == 4


def test_judgments_are_beside_the_episodes_they_are_about(judged: Inputs) -> None:
    rows = [one for found in judged.domains["search"].episodes.values() for one in found if one.get("judgments")]
    assert len(rows) == 2
    one = next(one for one in rows if one["judgments"][0]["place"] == 0 or one["judgments"][1]["place"] == 0)
    packed = pack(one, "rl step 1", "best")["judgments"]
    assert {entry["status"] for entry in packed} == {"ok", "timeout"}
    for entry, given in zip(packed, one["judgments"], strict=True):
        assert entry["first"] == (given["place"] == 0)
        if entry["status"] == "ok":
            assert entry["scores"][0] == given["scores"][given["place"]]
            assert entry["other"] == given["answers"][1 - given["place"]]
    assert "judgments" not in pack({**one, "judgments": []}, "rl step 1", "best")


def test_a_pointwise_judgment_has_one_score() -> None:
    question = Question("pointwise", "t", "prompt", (Candidate("x", name="e"),))
    made = judgment_row(Judge(), question, Judgment((7.0,)), 1)  # type: ignore[arg-type]
    (found,) = by_episode([made])["e"]
    assert found["place"] == 0
