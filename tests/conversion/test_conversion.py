"""Conversion of narrow calls to small models: S1 to S6 against numbers computed by hand, and whole rounds on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from narrow_calls import FAMILIES, call_of, logged, small_settings, write_log
from sklearn.metrics import adjusted_rand_score

from stages.control.calls.planted import SHIFTED, calls_of, planted
from stages.control.calls.settings import PlantedCalls
from stages.control.problems import PROBLEMS
from stages.conversion.call_log import CallLog, read_calls, unmasked_lines
from stages.conversion.choice import Scored, Share, calibrated, cost_per_call, lower_bound, promotion, replaceable_share, select
from stages.conversion.clusters import fit_clusters
from stages.conversion.curate_calls import curated, part_of
from stages.conversion.masking import LeakError, Masker, load_key
from stages.conversion.rounds import CONVERTED, NOT_CONVERTIBLE, NOTHING_NEW, convert
from stages.conversion.router import LARGE, CallRouter
from stages.conversion.settings import ClusterCalls, Conversion, CurateCalls, Router, SelectModel
from stages.conversion.specialise import distillation_loss

KEY = bytes(range(32))
KINDS = ("email", "phone", "card", "ip", "name")


# ---- S1 and S2 --------------------------------------------------------------------------------------------------------------


def test_personal_data_is_masked_consistently_and_restored_only_with_the_key():
    masker = Masker(KEY, KINDS, names=["Ada Lovelace"])
    text = "mail a.b@c.de or +49 30 1234567 or 030 7654321, card 4111 1111 1111 1111, host 10.0.0.7, says Ada Lovelace"
    masked = masker.mask(text, "t1")
    assert all(value not in masked for value in ("a.b@c.de", "1234567", "7654321", "4111", "10.0.0.7", "Ada"))
    call = masker.mask_call({"trace": "t1", "prompt": [{"role": "user", "content": text}], "response": '{"to": "a.b@c.de"}'})
    address = json.loads(call["response"])["to"]  # a masked tool call is still JSON
    assert address in call["prompt"][0]["content"]
    assert masker.mask("a.b@c.de", "t2") != address
    assert masker.mask(masked, "t1") == masked
    assert masker.unmask(masked) == text
    other = Masker(bytes(32), KINDS, vault=masker.vault)
    with pytest.raises(ValueError, match="another key"):
        other.unmask(masked)
    assert not any(value in json.dumps(masker.vault) for value in ("a.b@c.de", "4111"))
    for harmless in ("page 12 of 2024", "the ratio 3:4", "v1.2.3", "search 17 4 6"):
        assert masker.mask(harmless, "t1") == harmless


@pytest.mark.parametrize("left", ["a.b@c.de", "4111111111111111"])
def test_a_row_with_unmasked_data_fails(left: str):
    masker = Masker(KEY, KINDS)
    with pytest.raises(LeakError, match=r"trace t.*unmasked personal data: (email|card)") as caught:
        masker.check([call_of("intent", 1, trace="t", response=left)])
    assert left not in str(caught.value)


def test_log_has_no_human_facing_calls_and_no_personal_data(tmp_path: Path):
    log = CallLog(tmp_path / "calls.jsonl", Masker(KEY, KINDS))
    prompt = [{"role": "user", "content": "write to a.b@c.de"}]
    log.call("t1", prompt, "mail a.b@c.de", 3.14, tokens=7)
    log.call("t1", prompt, "hello, dear customer", 3.0, human=True)
    log.call("t1", prompt, "done", 2.0)
    log.outcome("t1", True)
    calls = read_calls(tmp_path / "calls.jsonl")
    assert [(call["call"], call["outcome"]) for call in calls] == [(0, 1), (1, 1)]
    written = (tmp_path / "calls.jsonl").read_text()
    assert "a.b@c.de" not in written
    assert "customer" not in written
    again = CallLog(tmp_path / "calls.jsonl", Masker(KEY, KINDS))  # after a restart
    again.call("t1", [{"role": "user", "content": "x@y.org"}], "done", 2.0)
    *_, newest = read_calls(tmp_path / "calls.jsonl")
    assert newest["call"] == 2
    assert again.masker is not None
    assert again.masker.unmask(newest["prompt"][0]["content"]) == "x@y.org"
    assert again.masker.unmask(calls[0]["response"]) == "mail a.b@c.de"
    (tmp_path / "key").write_text(KEY.hex())
    restored = [json.loads(line) for line in unmasked_lines(tmp_path / "calls.jsonl", tmp_path / "key")]
    assert [row["response"] for row in restored] == ["mail a.b@c.de", "done", "done"]
    with pytest.raises(ValueError, match="none does not exist; personal data is restored with the key"):
        unmasked_lines(tmp_path / "calls.jsonl", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "calls.jsonl").write_text(written + "[]\n")
    with pytest.raises(ValueError, match=r"calls\.jsonl:4 is not a row"):
        read_calls(tmp_path / "calls.jsonl")


def test_log_with_any_text_is_read(tmp_path: Path):
    """Contract: only a line feed ends a row, not the separators of Unicode inside a text; the server restarts on the log."""
    texts = ["one\u2028two", "one\u2029two", "one\x85two", "one\r\n\x0b\x0c\x1ctwo"]
    log = CallLog(tmp_path / "calls.jsonl", None)
    for text in texts:
        log.call("t1", [{"role": "user", "content": text}], text, 1.0)
    CallLog(tmp_path / "calls.jsonl", None).outcome("t1", True)
    calls = read_calls(tmp_path / "calls.jsonl")
    assert [call["response"] for call in calls] == [call["prompt"][0]["content"] for call in calls] == texts


def test_key_is_made_once(tmp_path: Path):
    key = load_key(tmp_path / "own" / "key")
    assert load_key(tmp_path / "own" / "key") == key
    assert (tmp_path / "own" / "key").stat().st_mode & 0o077 == 0


def test_curation_splits_by_trace_and_trains_on_confirmed_calls_only():
    calls = [call_of("intent", number, call=step, trace=f"t{number}") for number in range(200) for step in (0, 1)]
    for number, call in enumerate(calls):
        call["prompt"] = [{"role": "user", "content": f"word{number} and word{number * 7} then word{number * 3}"}]
    calls[0] |= {"outcome": 0}
    bad = {**calls[5], "prompt": [], "trace": "bad"}
    copy = {**calls[7], "trace": "zz"}
    specialist = {**calls[9], "provenance": "specialist 1", "prompt": [{"role": "user", "content": "another one altogether now"}]}
    kept = curated([*calls, bad, copy, specialist], CurateCalls(min_examples=1), Masker(KEY, KINDS), 0)
    assert kept.counts["rejected: malformed"] == 1
    assert kept.counts["rejected: duplicate"] == 1
    traces = {name: {call["trace"] for call in part} for name, part in kept.parts.items()}
    assert not traces["train"] & (traces["valid"] | traces["test"])
    assert not traces["valid"] & traces["test"]
    assert all(call["outcome"] == 1 and call["provenance"] == "llm" for call in kept.parts["train"])
    assert (
        curated(calls[::-1], CurateCalls(), Masker(KEY, KINDS), 0).parts
        == curated(calls, CurateCalls(), Masker(KEY, KINDS), 0).parts
    )


@pytest.mark.parametrize("first", [{"outcome": 0}, {"outcome": None}, {"provenance": "specialist 1"}])
def test_an_unconfirmed_call_does_not_take_a_confirmed_one_like_it_along(first: dict[str, Any]):
    """Contract: outcomes are filtered before duplicates, of which the first is kept."""
    train = [trace for trace in (f"t{number}" for number in range(20)) if part_of(trace, 0) == "train"]
    calls = [call_of("intent", 1, trace=train[0], **first), call_of("intent", 1, trace=train[1])]
    kept = curated(calls, CurateCalls(), Masker(KEY, KINDS), 0)
    assert [call["trace"] for call in kept.parts["train"]] == [train[1]]
    assert kept.counts == {"rejected: unconfirmed": 1, "train": 1, "valid": 0, "test": 0}


# ---- S3 to S6 as functions --------------------------------------------------------------------------------------------------


def test_four_template_families_are_found_whatever_the_order():
    calls = [call_of(family, number) for family in FAMILIES for number in range(500)]
    truth = [place // 500 for place in range(2000)]
    settings = ClusterCalls(k_range=[2, 6], min_cluster=500)
    clusters, labels = fit_clusters(calls, settings)
    assert (clusters.count, clusters.sizes, clusters.served) == (4, [500] * 4, [0, 1, 2, 3])
    assert adjusted_rand_score(truth, labels) == 1.0
    order = list(range(2000))
    Random(1).shuffle(order)
    _, shuffled = fit_clusters([calls[place] for place in order], settings)
    assert [shuffled[order.index(place)] for place in (0, 600, 1200, 1999)] == [labels[place] for place in (0, 600, 1200, 1999)]
    nearest, similarity = clusters.nearest(calls[:3])
    assert nearest.tolist() == labels[:3].tolist()
    assert similarity.min() > 0.3


def test_one_cluster_has_no_silhouette():
    clusters, labels = fit_clusters([call_of("intent", 1)] * 5, ClusterCalls(min_cluster=6))
    assert (clusters.count, clusters.silhouette, clusters.served, labels.tolist()) == (1, None, [], [0] * 5)


def test_cost_and_share():
    served = [Share(0.6, 0.95, 1 / 20)]
    assert cost_per_call(served) == pytest.approx(0.46)
    assert replaceable_share(served) == pytest.approx(0.57)
    assert cost_per_call([Share(0.6, 0.0, 1 / 20)]) == pytest.approx(1.03)  # dearer than the large model alone
    assert cost_per_call([Share(0.6, 1 / 20, 1 / 20)]) == pytest.approx(1.0)  # break-even: a = rho
    assert (cost_per_call([]), replaceable_share([])) == (1.0, 0.0)


def test_selection():
    listed = [Scored("a", 0.80, 1), Scored("b", 0.91, 4), Scored("c", 0.92, 20)]

    def chosen(**settings: Any) -> str | None:
        found = select(listed, SelectModel(**settings))
        return found.name if found else None

    assert chosen(tolerance=0.02) == "b"
    assert chosen(tolerance=0.0) == "c"
    slow = [Scored(one.name, one.score, one.cost, latency_ms=2000) for one in listed]
    assert select(slow, SelectModel()) is None
    assert select([Scored("a", 1.0, 1, licence="other")], SelectModel()) is None


def test_distillation_loss():
    teacher, student = torch.tensor([[0.7, 0.3]]).log(), torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    target = torch.tensor([0])
    cross_entropy = -(teacher.exp() * student.log_softmax(-1)).sum()
    assert cross_entropy.item() == pytest.approx(0.6931, abs=1e-4)
    assert distillation_loss(student, teacher, target, 1.0, 1.0).item() == pytest.approx(0.0823, abs=1e-4)
    assert distillation_loss(student, teacher, target, 0.5, 1.0).item() == pytest.approx((0.6931 + 0.0823) / 2, abs=1e-4)
    assert distillation_loss(student, None, target, 0.5, 1.0).item() == pytest.approx(0.6931, abs=1e-4)
    same = teacher.clone().requires_grad_()
    loss = distillation_loss(same, teacher, target, 1.0, 2.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(0.0, abs=1e-7)
    assert same.grad is not None
    torch.testing.assert_close(same.grad, torch.zeros_like(teacher), atol=1e-6, rtol=0)


def test_promotion_needs_a_lower_bound_within_epsilon():
    router = Router(epsilon=0.02, min_calls=30)
    traces = [f"t{number}" for number in range(200)]
    assert promotion([0] * 200, traces, 200, router, 0) == (0.0, "")
    bound, why = promotion([-1] * 10 + [0] * 190, traces, 200, router, 0)
    assert bound == lower_bound([-1] * 10 + [0] * 190, traces, router, 0)
    assert bound is not None
    assert bound < -0.05
    assert why == "worse than the large model"
    assert promotion([1] * 40 + [-1] * 10 + [0] * 150, traces, 200, router, 0)[1] == ""
    assert promotion([], [], 0, router, 0) == (None, "no test call with a reported outcome is answered with enough confidence")
    assert promotion([0] * 200, traces, 30, router, 0)[1] == ""
    why = "29 confirmed test calls are answered with enough confidence; router.min_calls is 30"
    assert promotion([0] * 200, traces, 29, router, 0) == (0.0, why)


def test_thresholds_are_calibrated():
    confidences, correct = [0.6, 0.75, 0.8, 0.9, 0.95], [False, False, True, True, True]
    assert calibrated(confidences, correct, 1.0, 0.7) == 0.8
    assert calibrated(confidences, correct, 0.75, 0.7) == 0.7
    assert calibrated(confidences, [False] * 5, 0.5, 0.7) == float("inf")


# ---- whole rounds -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Conversion, dict[str, Any]]:
    """A first round on two families, one of which is too small to be served."""
    root = tmp_path_factory.mktemp("conversion")
    calls = [*logged(72, ("intent",)), *logged(12, ("date",), 77)]
    calls[0]["prompt"][0]["content"] += " a.b@c.de"
    write_log(root / "calls.jsonl", calls)
    settings = Conversion.model_validate(small_settings(tiny_policy))
    return root, settings, convert(settings, root)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_round_converts_the_large_cluster_and_leaves_the_small_one(converted: tuple[Path, Conversion, dict[str, Any]]):
    root, _, report = converted
    assert report["status"] == CONVERTED
    assert {row["served_by"] for row in report["clusters"].values()} == {"tiny", LARGE}
    small = next(row for row in report["clusters"].values() if row["served_by"] == LARGE)
    assert "cluster.min_cluster is 30" in small["why"]
    assert report["replaceable_share"] == pytest.approx(8 / 12)  # test calls: 8 intents, 4 dates
    assert b"a.b@c.de" not in b"".join(value for name, value in files(root / "out").items())
    router = CallRouter.load(root / "out")
    intent, date = next(logged(1, ("intent",), 500)), next(logged(1, ("date",), 500))
    routed = router.route([intent, date])
    assert routed[0].by.startswith("specialist")
    assert routed[0].answer is not None
    assert routed[0].answer.text.startswith("wish")
    assert routed[1].by == LARGE
    page = (root / "out" / "dashboard.html").read_text()
    assert f"{100 * report['replaceable_share']:.1f} %" in page


def test_nothing_new_is_a_no_op_and_new_calls_start_a_round(converted: tuple[Path, Conversion, dict[str, Any]]):
    """Contract: without a trigger, no byte changes; the same log and settings give the same bytes."""
    root, settings, report = converted
    before = files(root)
    assert convert(settings, root)["status"] == NOTHING_NEW
    assert files(root) == before
    for name in ("state.json", "report.json"):
        (root / "out" / name).unlink()
    assert convert(settings, root)["status"] == CONVERTED
    assert files(root) == before
    write_log(root / "calls.jsonl", list(logged(40, ("date",), 100)))
    second = convert(settings, root)
    assert (second["round"], second["why_now"]) == (2, "40 new calls")
    assert {row["served_by"] for row in second["clusters"].values()} == {"tiny"}
    assert second["replaceable_share"] > report["replaceable_share"]


def test_too_few_calls_are_not_convertible(tmp_path: Path, tiny_policy: Path):
    write_log(tmp_path / "calls.jsonl", list(logged(4, ("intent",))))
    settings = Conversion(log="calls.jsonl", key="key", teacher=str(tiny_policy), out="out")
    report = convert(settings, tmp_path)
    assert (report["status"], report["cost_per_call"], report["replaceable_share"]) == (NOT_CONVERTIBLE, 1.0, 0.0)
    assert not (tmp_path / "out" / "router.json").exists()


def test_every_cluster_rejected_is_the_original_agent(converted: tuple[Path, Conversion, dict[str, Any]], tmp_path: Path):
    root, _, _ = converted
    router = CallRouter.load(root / "out")
    router.specialists.clear()
    assert {one.by for one in router.route(list(logged(3, ("intent", "date"))))} == {LARGE}
    assert np.isclose(cost_per_call([]), 1.0)


def test_server_logs_chat_completions_and_outcomes(tiny_policy: Path, tmp_path: Path):
    """Contract: answers for people are not logged, and without a log the server keeps nothing."""
    from types import SimpleNamespace
    from typing import cast

    from stages.agent.chat import Chat
    from stages.agent.policy import load_policy
    from stages.engine.engine import Sampling, Turn
    from stages.serving.app import Agent, trace_of
    from stages.serving.schemas import ChatRequest
    from stages.serving.specialists import Decision

    chat = Chat(load_policy(tiny_policy).tokenizer)
    turns = [Turn(0, tuple(chat.assistant_tokens("take a.b@c.de")), (), "stop")]
    messages = [{"role": "user", "content": "who?"}]
    log = CallLog(tmp_path / "calls.jsonl", Masker(KEY, KINDS))
    for logger in (log, None):
        agent = Agent(cast(Any, SimpleNamespace()), chat, {}, "hash", Sampling(), 64, logger)
        for metadata in ({"trace": "t7"}, {"trace": "t7", "human": "true"}, None):
            request = ChatRequest(model="merged", messages=messages, metadata=metadata)
            answered = [(agent.chat_choice(request, 0, turns[0]), turns[0])]
            agent.log_calls(request, cast(Any, messages), trace_of(request), answered, Decision(), 5.0)
    log.outcome("t7", True)
    calls = read_calls(tmp_path / "calls.jsonl")
    assert len(calls) == 2  # the one for a person is not there
    (own,) = [call for call in calls if call["trace"] == "t7"]
    assert (own["outcome"], own["tokens"], own["prompt"]) == (1, len(turns[0].token_ids), messages)
    assert own["response"].startswith("take <EMAIL_")


# ---- the planted log -------------------------------------------------------------------------------------------------------


def test_planted_calls_are_reproducible_and_have_their_answers():
    calls = calls_of(40, 0, "x")
    assert calls == calls_of(40, 0, "x") != calls_of(40, 1, "x")
    for call in calls:
        prompt = call["prompt"][0]["content"]
        if call["kind"] == "date":
            day, later = (int(word) for word in prompt.partition("day ")[2].replace("and ", "").split()[:2])
            assert call["response"] == f"date {day + later}"
        if call["kind"] == "field":
            ((noun, value),) = json.loads(call["response"]).items()
            assert f"{noun} {value}," in prompt
            assert prompt.endswith(f"fields of {noun}")
        if call["kind"] == "intent":
            assert f"wish: {call['response'].removeprefix('intent ')} the" in prompt
    assert any("@mail.org" in call["prompt"][0]["content"] for call in calls)
    assert all("wish" not in call["prompt"][0]["content"] for call in calls_of(8, 0, "x", (SHIFTED,), shifted=True))


def test_a_planted_conversion_measures_without_leaks():
    """Both rounds, on few calls that a small model can't learn: everything falls back, at no saving."""
    found = planted(PlantedCalls(calls=200, shifted=100, epochs=1, k=2))
    assert set(found) == {name.removeprefix("control.") for name in PROBLEMS["calls"].metrics}
    assert found["leaks"] == 0
    assert 0 <= found["kept"] <= 1
    assert found["cost_per_call"] >= 0
