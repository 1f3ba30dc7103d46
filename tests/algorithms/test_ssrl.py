"""SSRL: right answers and a graded format are rewarded, and results that the policy wrote are left out of the loss by record."""

from __future__ import annotations

from typing import Any

import pytest

from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.settings import Rl
from stages.evaluation.statistics import pass_at_k
from stages.params import check_domains, parse_params
from stages.records.episode import Episode, Owner, TurnRecord
from stages.runtime.validation import ParamsError
from stages.training.common.batches import trajectory_batch


def episode(number: int, right: float, form: float | None, evidence: Owner = Owner.EVIDENCE) -> Episode:
    """a b, then a result "x, line break, y" between tokens of the environment, then c: the order of the published masks."""
    made = Episode(f"e/{number}", "task", "d", "task", 0, "", "", 1.0, 1.0, 0)
    logprobs = [-0.5, -0.25]
    made.append([10, 11], Owner.POLICY, 0, logprobs)
    made.append([2], Owner.ENVIRONMENT, 0)
    made.append([20, 30, 21], evidence, 1, [-0.1, -0.2, -0.3] if evidence == Owner.EVIDENCE else None)
    made.append([3], Owner.ENVIRONMENT, 1)
    made.append([12], Owner.POLICY, 2, [-1.0])
    spans = [("search q", 0, 2), ("x y", 3, 6), ("answer c", 7, 8)]
    made.turns = [TurnRecord(action, "", True, 0.0, 0.0, "", action, start, end) for action, start, end in spans]
    made.turns[-1].reward = made.reward = right
    if form is not None:
        made.reward_terms = {"exact_match": right, "format_graded": form}
    return made


def algorithm(**changes: Any) -> Algorithm:
    return resolve(Rl.model_validate({"algorithm": "ssrl", "group_size": 5, **changes}))


@pytest.mark.parametrize(
    ("right", "form", "expected"), [(1.0, 1.0, 1.0), (1.0, 0.25, 0.925), (0.0, 1.0, 0.1), (0.0, 0.0, 0.0), (1.0, 0.0, 0.9)]
)
def test_reward(right: float, form: float, expected: float) -> None:
    shaped = algorithm().shape(trajectory_batch([episode(0, right, form)]))
    assert shaped.rewards.item() == pytest.approx(expected)
    assert shaped.success is not None
    assert bool(shaped.success) == (right == 1.0)


def test_results_that_the_policy_wrote_are_masked_by_record() -> None:
    """Contract: owners decide, so a line break, or the same result twice, is no exception."""
    made = episode(0, 1.0, 1.0)
    assert trajectory_batch([made]).mask[0].int().tolist() == [1, 1, 0, 0, 0, 0, 0, 1]
    for name in ("token_ids", "owner", "logprob"):
        setattr(made, name, [*getattr(made, name), *getattr(made, name)[2:]])
    made.turn = [*made.turn, *(turn + 2 for turn in made.turn[2:])]
    assert trajectory_batch([made]).mask[0].int().tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_results_of_the_tool_are_never_trained_on_and_own_ones_may_be() -> None:
    own, tool = episode(0, 1.0, 1.0), episode(1, 1.0, 1.0, Owner.ENVIRONMENT)
    batch = trajectory_batch([own, tool], evidence=True)
    assert batch.mask.int().tolist() == [[1, 1, 0, 1, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0, 0, 1]]
    assert batch.logprobs_old[0, 3:6].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert own.owner[3] == Owner.EVIDENCE, "the record stays"
    assert algorithm(loss={"evidence": "include"}).rl.loss.evidence == "include"


def test_masked_results_do_not_bear_on_the_gradient() -> None:
    ours = algorithm()
    given = trajectory_batch([episode(0, 1.0, 1.0), episode(1, 0.0, 1.0)])
    prepared = ours.prepare(ours.shape(given.with_(logprobs_ref=given.logprobs_old)))
    assert prepared.advantages is not None
    assert not prepared.advantages[:, 2:7].any()
    assert prepared.advantages[0, 7] > 0 > prepared.advantages[1, 7]


def test_five_equal_rewards_give_no_advantage() -> None:
    given = trajectory_batch([episode(number, 1.0, 0.25) for number in range(5)])
    ours = algorithm()
    prepared = ours.prepare(ours.shape(given.with_(logprobs_ref=given.logprobs_old)))
    assert prepared.advantages is not None
    assert not prepared.advantages.any()


def test_without_a_format_weight_it_is_grpo_on_exact_match() -> None:
    given = trajectory_batch([episode(0, 1.0, 0.25), episode(1, 0.0, 1.0), episode(2, 0.0, 0.5)])
    given = given.with_(logprobs_ref=given.logprobs_old)
    plain = resolve(Rl.model_validate({"algorithm": "grpo", "group_size": 5}))
    ours = algorithm(settings={"answer": 1.0, "format": 0.0})
    prepared = [one.prepare(one.shape(given)) for one in (ours, plain)]
    assert prepared[0].rewards.equal(prepared[1].rewards)
    assert prepared[0].advantages is not None
    assert prepared[1].advantages is not None
    assert prepared[0].advantages.equal(prepared[1].advantages)


@pytest.mark.parametrize(("n", "c", "k", "expected"), [(4, 1, 2, 0.5), (4, 0, 2, 0.0), (4, 1, 4, 1.0), (16, 3, 16, 1.0)])
def test_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_environments_without_a_graded_format_are_refused() -> None:
    with pytest.raises(ValueError, match=r"set per_domain\.search\.environment\.tool_mode"):
        algorithm().shape(trajectory_batch([episode(0, 1.0, None)]))


@pytest.mark.parametrize(
    ("environment", "rl", "message"),
    [
        ({}, {"algorithm": "ssrl"}, "ssrl needs an environment with tool modes, and domain search has none"),
        ({"tool_mode": "self", "closed_book": True}, {"algorithm": "ssrl"}, "closed_book to false"),
        ({"tool_mode": "self"}, {"advantage": {"level": "turn"}}, "rl.loss.evidence: exclude leaves turns of search"),
        ({"tool_mode": "entropy_gated"}, {"algorithm": "archer"}, "rl.loss.evidence: exclude leaves turns of search"),
    ],
)
def test_bad_settings_are_refused(environment: dict[str, Any], rl: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        check(environment, rl)


def check(environment: dict[str, Any], rl: dict[str, Any], **sections: Any) -> None:
    values = {"domains": ["search"], "per_domain": {"search": {"environment": environment}}, "rl": rl, **sections}
    check_domains(parse_params(values))


def test_one_policy_is_evaluated_in_every_mode() -> None:
    modes = ["sft", "sft+self_search", "rl@search+real_search", "rl@search+gated_search"]
    check({"tool_mode": "self"}, {"algorithm": "ssrl"}, evaluate={"models": modes})
    check({"tool_mode": "self"}, {"algorithm": "grpo", "advantage": {"level": "turn"}, "loss": {"evidence": "include"}})
    keydoor = {"domains": ["keydoor"], "per_domain": {"keydoor": {}}, "evaluate": {"models": ["sft+real_search"]}}
    with pytest.raises(ParamsError, match="plays with tool_mode: real, and none of keydoor has"):
        parse_params(keydoor)
