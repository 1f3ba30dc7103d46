"""A judge beside known labels: numbers by hand, files of people's labels, and the command that measures a judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.algorithms.parts.judge import Judge
from stages.judging.__main__ import judge_of, judge_section, main
from stages.judging.agreement import against, read_labels
from stages.judging.contract import JudgeError, Judgment, Question
from stages.judging.local import LocalJudge
from stages.judging.measuring import believed, measured
from stages.judging.program import ProgramJudge
from stages.judging.settings import LabelledPairs, ProgramFaults, SampledPrinciples
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
    ((question,), _) = read_labels(write(tmp_path / "half.jsonl", {"prompt": "p\ud800", "chosen": "a", "rejected": "b"}))
    assert question.prompt == "p?", "half a character, which no request can hold"


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

    section = Judge(scheme="anchor")
    good, rows = measured(ProgramJudge(ProgramFaults(noise=0.0), quality, 0), section, 0, path, 10, alpha=True)
    assert (good["pairs"], good["accuracy"], good["kappa"], good["alpha"], good["flip_rate"]) == (10, 1.0, 1.0, 1.0, 0.0)
    assert (good["calls"], good["statuses"], good["money"]) == (20, {"ok": 20}, 0.0)
    assert len(rows) == 20
    biased, _ = measured(ProgramJudge(ProgramFaults(noise=0.0, gain=0.0, position=2.0), quality, 0), section, 0, path)
    assert (biased["accuracy"], biased["flip_rate"], biased["ties"], biased["position_bias"]) == (0.5, 1.0, 1.0, 2.0)


def test_the_command_refuses_judges_that_read_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    values = {"domains": ["briefing"], "per_domain": {"briefing": {"rl": {"algorithm": "arena_rl"}}}}
    with pytest.raises(ParamsError, match="set it to server or local"):
        judge_of(parse_params(values), "briefing", tmp_path)
    (tmp_path / "params.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    assert main(["measure", "labels.jsonl"]) == 2
    assert "rl.judge.kind: program reads a domain's hidden quality" in capsys.readouterr().err
    with pytest.raises(ParamsError, match=r"rl\.reward\.kind is environment on briefing"):
        judge_section(parse_params({**values, "per_domain": {"briefing": {"rl": {"algorithm": "grpo"}}}}), "briefing")


class Asked:
    """Scores the longer answer higher; notes what it is asked."""

    name = version = "asked"
    sent = 0

    def __init__(self) -> None:
        self.questions: list[Question] = []

    def judge(self, questions) -> list[Judgment]:
        self.questions += questions
        return [
            Judgment((1.0, 0.0) if one.kind == "checklist" else tuple(float(len(item.answer)) for item in one.candidates))
            for one in questions
        ]

    def keep(self) -> None: ...

    def close(self) -> None: ...


PAIRS = [{"prompt": "p", "chosen": "long answer", "rejected": "short", "reference": "right"}] * 4
ITEMS = [{"name": "short", "text": "a short answer", "negative": "a long one"}]


@pytest.mark.parametrize(("scheme", "kind", "shown"), [("pointwise", "pointwise", 1), ("swiss", "pairwise", 2)])
def test_the_questions_are_those_of_rl(tmp_path: Path, scheme, kind: str, shown: int) -> None:
    """Contract: what is measured is the judge that rl asks: by its scheme, criteria, principles and references."""
    path, judge = write(tmp_path / "l.jsonl", *PAIRS), Asked()
    section = Judge(scheme=scheme, criteria=["depth"], process_weight=0.6, references=True)
    found, _ = measured(judge, section, 0, path)
    assert (found["scheme"], found["accuracy"], found["flip_rate"], found["calls"]) == (scheme, 1.0, 0.0, 8)
    for question in judge.questions:
        assert (question.kind, len(question.candidates), question.reference) == (kind, shown, "right")
        assert (question.rubric.answer, question.rubric.process_weight) == (("depth",), 0.0), "answers have no steps"
    judge = Asked()
    measured(judge, Judge(scheme=scheme, principles=SampledPrinciples(items=ITEMS)), 0, path)  # type: ignore[arg-type]
    assert {(one.rubric.principles, one.reference) for one in judge.questions} == {(("a short answer",), "")}


def test_checklists_compare_shares(tmp_path: Path) -> None:
    """One of two items is met by every answer: all are ties."""
    judge = Asked()
    found, _ = measured(judge, Judge(scheme="checklist", items=["a", "b"]), 0, write(tmp_path / "l.jsonl", *PAIRS))
    assert (found["accuracy"], found["ties"]) == (0.5, 1.0)
    assert {question.rubric.items for question in judge.questions} == {("a", "b")}


def test_a_judge_that_agrees_too_little_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path / "good.jsonl", *PAIRS)
    write(tmp_path / "bad.jsonl", *({**pair, "chosen": "short", "rejected": "long answer"} for pair in PAIRS))
    demands = LabelledPairs(path="good.jsonl", least_kappa=0.5)
    assert believed(Asked(), Judge(), 0, demands, tmp_path)["kappa"] == 1.0
    with pytest.raises(JudgeError, match=r"bad\.jsonl with kappa 0.00 over 4 pairs.*least_kappa is 0\.5"):
        believed(Asked(), Judge(), 0, LabelledPairs(path="bad.jsonl", least_kappa=0.5), tmp_path)


def test_the_command_measures_the_resolved_section_and_can_demand(tmp_path: Path, tiny_policy: Path, monkeypatch, capsys) -> None:
    """Contract: a method's own choices hold: salmon's judge scores single answers by its principles, with raw log-odds."""
    pytest.importorskip("krippendorff")
    rl = {
        "algorithm": "salmon",
        "critic": {"init": "policy"},
        "judge": {"local": {"path": str(tiny_policy), "options": ["a", "b"]}},
    }
    values = {"domains": ["briefing"], "per_domain": {"briefing": {"rl": rl}}}
    section, _ = judge_section(parse_params(values), "briefing")
    assert (section.kind, section.scheme, section.raw, section.principles is not None) == ("local", "pointwise", True, True)
    (tmp_path / "params.yaml").write_text(json.dumps(values))
    path = write(tmp_path / "l.jsonl", *({"prompt": f"p {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)))
    monkeypatch.chdir(tmp_path)
    assert main(["measure", str(path), "--out", "table.parquet"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = read_rows(tmp_path / "table.parquet")
    assert (found["scheme"], found["pairs"], len(rows)) == ("pointwise", 6, 12)
    assert {row["kind"] for row in rows} == {"pointwise"}
    assert found["calls_per_second"] > 0
    assert main(["measure", str(path), "--least-kappa", "1.1"]) == 1
    assert "below 1.1" in capsys.readouterr().err


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
