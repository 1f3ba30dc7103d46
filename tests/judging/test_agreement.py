"""A judge beside known labels: numbers by hand, files of people's labels, and the command that measures a judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.judging.__main__ import judge_of, main, measured
from stages.judging.agreement import against, read_labels
from stages.judging.contract import Question
from stages.judging.local import LocalJudge
from stages.judging.program import ProgramJudge
from stages.judging.settings import ProgramFaults
from stages.params import parse_params
from stages.records.episode import read_rows
from stages.runtime.validation import ParamsError


def test_figures_by_hand() -> None:
    """Of six pairs one failed and one has no majority. Right, right, a tie between two orders, wrong: 2.5 of 4."""
    margins = [(1.0, 2.0), (-1.0, -1.0), (1.0, -1.0), (2.0, 1.0), None, (1.0, 1.0)]
    found = against(margins, [[1], [-1], [1], [-1], [1], [0]])
    assert (found["pairs"], found["failed"], found["compared"]) == (6, 1, 4)
    assert found["accuracy"] == pytest.approx(2.5 / 4)
    assert found["ties"] == found["flip_rate"] == 0.25
    assert found["brier"] == pytest.approx((0 + 0 + 0.25 + 1) / 4)
    assert found["kappa"] == pytest.approx((2 / 4 - 6 / 16) / (1 - 6 / 16)), "said 1, -1, 0, 1; labels 1, -1, 1, -1"
    assert against([None], [[1]]) == {"pairs": 1.0, "failed": 1.0, "compared": 0.0}


def test_alpha_of_people_and_judge() -> None:
    pytest.importorskip("krippendorff")
    labels = [[1, 1], [-1, -1], [1, -1], [-1, None]]
    same = against([(1.0, 1.0), (-1.0, -1.0), (1.0, 1.0), (-1.0, -1.0)], labels, alpha=True)
    other = against([(-1.0, -1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], labels, alpha=True)
    assert other["alpha"] < 0 < same["alpha_people"] < same["alpha"]


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_files_of_labels(tmp_path: Path) -> None:
    chosen = [{"prompt": "p", "chosen": f"good {n}", "rejected": [{"role": "assistant", "content": "bad"}]} for n in range(20)]
    questions, labels = read_labels(write(tmp_path / "pairs.jsonl", *chosen))
    assert {label for (label,) in labels} == {1, -1}, "the order is by chance, so that always saying first is no agreement"
    for question, (label,) in zip(questions, labels, strict=True):
        assert question.candidates[0 if label == 1 else 1].answer.startswith("good")
    _, labels = read_labels(
        write(tmp_path / "people.jsonl", {"prompt": "p", "first": "a", "second": "b", "labels": ["second", "tie", None]})
    )
    assert labels == [[-1, 0, None]]
    pair = {"prompt": "one\u2028two\u2029three\x85four", "chosen": "a", "rejected": "b"}
    (tmp_path / "lines.jsonl").write_text(json.dumps(pair, ensure_ascii=False) + "\n", encoding="utf-8")
    ((question,), _) = read_labels(tmp_path / "lines.jsonl")
    assert question.prompt == pair["prompt"], "only a line feed ends a line of JSON"


TWO_RATERS = (
    '{"prompt": "p", "first": "a", "second": "b", "labels": ["tie", "tie"]}\n{"prompt": "p", "chosen": "a", "rejected": "b"}'
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no pairs"),
        ("{", "line 1: a pair has prompt"),
        ("[1]", "line 1"),
        ('{"prompt": "p", "chosen": "a"}', "rejected"),
        ('{"prompt": "p", "first": "a", "second": "b", "labels": ["third"]}', "third"),
        ('{"prompt": "p", "chosen": 5, "rejected": "b"}', "line 1"),
        (TWO_RATERS, "each rater"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_labels(path)


def test_a_judge_is_measured_in_both_orders(tmp_path: Path) -> None:
    """A judge that follows position alone is right half of the time after averaging, and flips on every pair."""
    pytest.importorskip("krippendorff")
    path = write(tmp_path / "l.jsonl", *({"prompt": "p", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(12)))

    def quality(question: Question, one: Any) -> float:
        return float(one.answer.startswith("good"))

    out = tmp_path / "judgments.parquet"
    good = measured(ProgramJudge(ProgramFaults(noise=0.0), quality, 0), path, 10, out)
    assert (good["pairs"], good["accuracy"], good["kappa"], good["alpha"], good["flip_rate"]) == (10, 1.0, 1.0, 1.0, 0.0)
    assert (good["calls"], good["statuses"], good["money"]) == (20, {"ok": 20}, 0.0)
    assert good["calls_per_second"] > 0
    assert len(read_rows(out)) == 20
    biased = measured(ProgramJudge(ProgramFaults(noise=0.0, gain=0.0, position=2.0), quality, 0), path, None, None)
    assert (biased["accuracy"], biased["flip_rate"], biased["ties"], biased["position_bias"]) == (0.5, 1.0, 1.0, 2.0)


def test_the_command_refuses_judges_that_read_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    values = {"domains": ["briefing"], "per_domain": {"briefing": {"rl": {"algorithm": "arena_rl"}}}}
    with pytest.raises(ParamsError, match="set it to server or local"):
        judge_of(parse_params(values), "briefing", tmp_path)
    (tmp_path / "params.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "labels.jsonl"]) == 2
    assert "rl.judge.kind: program reads a domain's hidden quality" in capsys.readouterr().err


def test_the_measured_judge_is_the_one_that_rl_asks(tiny_policy: Path, tmp_path: Path) -> None:
    """Contract: the same scale, too: `raw` gives differences of logits instead of scores from 0 to 10."""
    local = {"path": str(tiny_policy), "options": ["a", "b"]}
    for raw in (True, False):
        rl = {
            "algorithm": "salmon",
            "critic": {"init": "policy"},
            "judge": {"kind": "local", "scheme": "pointwise", "raw": raw, "local": local},
        }
        judge = judge_of(parse_params({"domains": ["briefing"], "per_domain": {"briefing": {"rl": rl}}}), "briefing", tmp_path)
        assert isinstance(judge, LocalJudge)
        assert judge.logits is raw
