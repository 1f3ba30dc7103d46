"""S6: what starts a further round, counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrow_calls import call_of, logged, small_settings, strange, write_log

from stages.conversion.curate_calls import curated
from stages.conversion.masking import Masker
from stages.conversion.rounds import NOT_CONVERTIBLE, NOTHING_NEW, convert
from stages.conversion.router import CONFIDENCE, FORMAT, LARGE, SIMILARITY, Routed
from stages.conversion.settings import Conversion, CurateCalls
from stages.conversion.specialise import Answer
from stages.conversion.triggers import drift, fallback_rate, rights

SETTINGS = Conversion.model_validate(
    {"router": {"min_calls": 20}, "iterate": {"fallback_rate_above": 0.15, "quality_drop_above": 0.02}}
)


def left(why: str = "") -> Routed:
    return Routed(LARGE, 0, None, why)


def taken(text: str) -> Routed:
    return Routed("specialist 0", 0, Answer(text, 1.0))


def test_fallbacks_above_the_share_start_a_round():
    """Contract: the share is compared with the setting alone; calls of a cluster that stays with the large model are none."""
    calls = [call_of("intent", number) for number in range(20)]
    routed = [left(CONFIDENCE), left(FORMAT), left(SIMILARITY), *[left()] * 10, *[taken("wish 0")] * 7]
    assert fallback_rate(routed) == 0.15
    assert drift(calls, routed, None, SETTINGS) == ""
    routed[-1] = left(CONFIDENCE)
    assert drift(calls, routed, None, SETTINGS) == "fallback rate 20% of 20 new calls"
    assert drift(calls[1:], routed[1:], None, SETTINGS) == ""  # 3 of 19, which are too few calls
    assert fallback_rate([]) == 0.0


def test_right_answers_of_specialists_are_those_that_are_known():
    wish = {"response": "wish 1", "outcome": 1}
    calls = [
        call_of("intent", 0, **wish),
        call_of("intent", 1, **wish),
        call_of("intent", 2, **{**wish, "outcome": 0}),
        call_of("intent", 3, **{**wish, "outcome": None}),
        call_of("intent", 4, **wish, provenance="specialist 0"),
        call_of("intent", 5, **{**wish, "outcome": 0}, provenance="specialist 0"),
        call_of("intent", 6, **wish, provenance="specialist 0"),
        call_of("intent", 7, **wish),
    ]
    routed = [taken(text) for text in ("wish  1", "wish 2", "wish 1", "wish 1", "wish 1", "wish 1", "wish 2")]
    # Equal, different, failed; not reported; an earlier specialist's own: succeeded, failed, and another answer: not known.
    assert rights(calls, [*routed, left()]) == [True, False, False, True, False]


def test_quality_below_the_last_rounds_starts_a_round():
    calls = [call_of("intent", number, response="wish 1") for number in range(50)]
    routed = [taken("wish 2"), *[taken("wish 1")] * 49]
    assert drift(calls, routed, 1.0, SETTINGS) == ""  # 98 %: the drop is 2 points, not more
    routed[1] = taken("wish 2")
    assert drift(calls, routed, 1.0, SETTINGS) == "specialists are right in 96% of 50 new calls, 100% in the last round"
    assert drift(calls, routed, 0.98, SETTINGS) == ""
    assert drift(calls, routed, None, SETTINGS) == ""  # no specialist was judged in the last round
    assert drift(calls[:19], routed[:19], 1.0, SETTINGS) == ""


def test_rounds_start_by_fallbacks_and_end_at_the_limit(tiny_policy: Path, tmp_path: Path):
    """Contract: any reason suffices, in the log as it is: calls that have left it (retention) do not hide new ones."""
    iterate = {"every_n_calls": 100, "max_rounds": 2}
    settings = Conversion.model_validate(small_settings(tiny_policy, iterate=iterate))
    log = tmp_path / "calls.jsonl"
    write_log(log, [*logged(72, ("intent",)), *logged(12, ("date",), 77)])
    assert convert(settings, tmp_path)["why_now"] == "first round"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"trace": "date-' not in line))
    write_log(log, strange(2, "train"))
    second: dict[str, Any] = convert(settings, tmp_path)
    assert (second["round"], second["why_now"]) == (2, "fallback rate 100% of 2 new calls")
    write_log(log, strange(2, "train", 400))
    assert convert(settings, tmp_path)["status"] == NOTHING_NEW


def test_rounds_with_too_few_calls_do_not_count(tiny_policy: Path, tmp_path: Path):
    """Contract: a log that grows slowly is converted in the end."""
    iterate = {"every_n_calls": 2, "max_rounds": 1}
    settings = Conversion.model_validate(small_settings(tiny_policy, iterate=iterate))
    for number, count in enumerate((2, 2, 68), start=1):
        write_log(tmp_path / "calls.jsonl", list(logged(count, ("intent",), 1000 * number)))
        report = convert(settings, tmp_path)
        assert (report["round"], report["status"] == NOT_CONVERTIBLE) == (number, number < 3)
    write_log(tmp_path / "calls.jsonl", list(logged(2, ("intent",), 9000)))
    assert convert(settings, tmp_path)["status"] == NOTHING_NEW


def test_an_interrupted_round_is_repeated(tiny_policy: Path, tmp_path: Path):
    """Contract: models of a round that did not finish are not taken for those of the router."""
    settings = Conversion.model_validate(small_settings(tiny_policy, iterate={"every_n_calls": 100}))
    intents = [{**call, "response": "wish 0"} for call in logged(72, ("intent",))]
    write_log(tmp_path / "calls.jsonl", [*intents, *logged(12, ("date",), 77)])
    convert(settings, tmp_path)
    (tmp_path / "out/specialist-0/config.json").write_text((tmp_path / "out/specialist-0/config.json").read_text() + "\n")
    write_log(tmp_path / "calls.jsonl", list(logged(2, ("intent",), 100)))
    assert convert(settings, tmp_path)["why_now"] == "the last round did not finish"


def test_calls_that_fell_back_are_taken_first():
    """Contract: where max_examples cuts, the hard calls stay; the order of rows and what is not cut do not depend on it."""
    calls = [call_of("intent", number, prompt=[{"role": "user", "content": f"w{number} x{number}"}]) for number in range(40)]
    masker = Masker(bytes(32), ())
    whole = curated(calls, CurateCalls(), masker, 0).parts["train"]
    hard = {whole[place]["trace"] for place in (5, 20, 25)}
    marked = [{**call, "fallback": CONFIDENCE if call["trace"] in hard else ""} for call in calls]
    cut = curated(marked, CurateCalls(max_examples=5), masker, 0).parts["train"]
    assert [call["trace"] for call in cut] == [whole[place]["trace"] for place in (0, 1, 5, 20, 25)]
    for part in ("valid", "test"):  # rates are measured on them
        held_out = curated(calls, CurateCalls(), masker, 0).parts[part]
        hard |= {held_out[-1]["trace"]}
        again = [{**call, "fallback": CONFIDENCE if call["trace"] in hard else ""} for call in calls]
        kept = curated(again, CurateCalls(max_examples=2), masker, 0).parts[part]
        assert len(held_out) > 2
        assert [call["trace"] for call in kept] == [call["trace"] for call in held_out[:2]]
    plain = curated(calls, CurateCalls(max_examples=5), masker, 0).parts["train"]
    assert [call["trace"] for call in plain] == [call["trace"] for call in whole[:5]]
    assert [call["trace"] for call in curated(marked, CurateCalls(), masker, 0).parts["train"]] == [c["trace"] for c in whole]
