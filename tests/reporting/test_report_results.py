"""Results as sentences and tables."""

from __future__ import annotations

from typing import Any

import pytest

from stages.reporting.results import (
    check_evaluation,
    comparison_line,
    comparisons_list,
    find_comparison,
    model_order,
    retention,
    signed,
    success_table,
    verdicts,
)


def make_evaluation() -> dict[str, Any]:
    def row(mean: float) -> dict[str, Any]:
        return {"success": {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "n": 200}}

    def compared(b: str, difference: float, half: float, p: float, verdict: str) -> dict[str, Any]:
        ends = {"low": difference - half, "high": difference + half}
        return {"a": "rl@search", "b": b, "domain": "search", "difference": difference, **ends, "p": p, "verdict": verdict}

    successes = {"merged": 0.54, "sft": 0.4, "rl@search": 0.6, "base": 0.1}
    return {
        "panels": {"search": "abc"},
        "models": {name: {"search": row(mean)} for name, mean in successes.items()},
        "comparisons": [compared("sft", 0.2, 0.0625, 0.0001, "better"), compared("merged", 0.06, 0.07, 0.08, "undecided")],
    }


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


def test_models_are_in_pipeline_order():
    given = ["zeta", "merged_linear", "rl@b", "merged", "sft", "rl@a", "base"]
    assert model_order(given, ["b", "a"]) == ["base", "sft", "rl@b", "rl@a", "merged", "merged_linear", "zeta"]


def test_significant_difference_has_interval_and_p_value():
    line = plain(comparison_line(make_evaluation()["comparisons"][0], 0.95))
    for part in ("Specialist vs. fine-tuned model", "+20.0 points", "95 % CI +13.8 to +26.2", "p < 0.001"):
        assert part in line
    assert "not significant" not in line


def test_undecided_difference_is_called_not_significant():
    """Contract: "better" is a paired test; an interval that contains zero is marked as not significant."""
    line = plain(comparison_line(make_evaluation()["comparisons"][1], 0.95))
    assert "better" not in line
    for part in ("Specialist vs. merged model", "+6.0 points", "95 % CI −1.0 to +13.0", "p = 0.080", "not significant"):
        assert part in line


def test_comparison_can_be_reversed():
    turned = find_comparison(make_evaluation(), "sft", "rl@search", "search")
    assert turned is not None
    assert (turned["difference"], turned["low"], turned["high"], turned["verdict"]) == (-0.2, -0.2625, -0.1375, "worse")
    assert find_comparison(make_evaluation(), "base", "merged", "search") is None


def test_retention_is_relative_to_the_specialist():
    assert retention(make_evaluation(), "search") == pytest.approx(0.9)
    assert "relative to the specialist: 90 %" in plain(verdicts(make_evaluation(), "search", 0.95)[-1])


def test_markdown_table_has_every_model_with_interval_and_n():
    table = plain(success_table(make_evaluation(), ["search"], 0.95))
    assert "| `rl@search` | 60.0 % (55.0 to 65.0) |" in table
    assert "n = 200" in table
    assert "`abc`" in table
    assert table.index("`base`") < table.index("`sft`") < table.index("`merged`")
    listed = plain(comparisons_list(make_evaluation(), ["search"], 0.95))
    assert "- search: Specialist vs. fine-tuned model: +20.0 points" in listed


@pytest.mark.parametrize("key", ["panels", "models", "comparisons"])
def test_evaluation_with_missing_key_is_rejected(key):
    """Contract: the error states file, key and what to do."""
    evaluation = make_evaluation()
    del evaluation[key]
    with pytest.raises(ValueError, match=rf"reports/evaluation.json lacks \['{key}'\]; run"):
        check_evaluation(evaluation, "reports/evaluation.json")


def test_success_without_interval_is_rejected():
    evaluation = make_evaluation()
    del evaluation["models"]["sft"]["search"]["success"]["low"]
    with pytest.raises(ValueError, match=r"models\.sft\.search\.success lacks \['low'\]"):
        check_evaluation(evaluation, "reports/evaluation.json")


def test_differences_have_a_sign_and_zero_has_no_minus() -> None:
    assert [signed(points) for points in (2.26, -2.26, 0.0, -0.0, -0.04)] == ["+2.3", "−2.3", "+0.0", "+0.0", "+0.0"]
