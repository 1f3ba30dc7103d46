"""Search self-play against the paper's worked examples: rewards, advantages, the gate and the pool."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.loss import denominators
from stages.algorithms.parts.self_play import (
    Completion,
    Gate,
    ProblemPool,
    Proposal,
    Proposer,
    failed_rule,
    mixed_evidence,
    proposal_of,
    proposer_reward,
    target,
    without_kl_of_failures,
)
from stages.algorithms.settings import Rl
from stages.environments.self_play import MARKS_TERM
from stages.params import check_domains, parse_params
from stages.records.episode import Episode, Owner, TurnRecord
from stages.runtime.validation import ParamsError
from stages.training.common.batches import trajectory_batch


def episode(number: int, group: str, reward: float, marks: float = 1.0) -> Episode:
    """A search of two tokens, its result of one, an answer of one."""
    made = Episode(f"e{number}", group, "search", group, 0, "", "", 1.0, 1.0, 0)
    made.append([1], Owner.PROMPT, -1)
    made.append([2, 3], Owner.POLICY, 0, [-1.0, -1.0])
    made.append([4], Owner.ENVIRONMENT, 0)
    made.append([5], Owner.POLICY, 1, [-1.0])
    made.turns = [TurnRecord("search x", "y", True, 0.0, 1.0, "", "search x", 1, 3)]
    made.turns.append(TurnRecord("answer y", "", True, reward, 0.0, "", "answer y", 4, 5))
    made.reward, made.reward_terms = reward, {MARKS_TERM: marks}
    return made


def ssp(role: str = "", **values: Any) -> Algorithm:
    made = resolve(Rl.model_validate({"algorithm": "ssp", **values}), 640)
    return made.of_role(role) if role else made


def prepared(algorithm: Algorithm, *episodes: Episode, reference: float = 0.0) -> TrajectoryBatch:
    """reference: by how much the reference's log-probabilities are below the policy's."""
    batch = trajectory_batch(episodes)
    return algorithm.prepare(algorithm.shape(batch.with_(logprobs_ref=batch.logprobs_old - reference * batch.mask)))


def proposal(number: int, reward: float, valid: bool) -> Episode:
    made = episode(number, f"g{number}", reward)
    made.reward_terms = {"valid": float(valid)}
    return made


def gradient(algorithm: Algorithm, batch: TrajectoryBatch, logprobs: Tensor) -> Tensor:
    logprobs = logprobs.clone().requires_grad_()
    algorithm.loss(logprobs, torch.zeros_like(logprobs), batch, denominators(batch, None)).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize(
    ("rewards", "rate", "expected"),
    [
        ([1, 0, 0, 0, 0], 0.2, {"one_minus_acc": 0.8, "intermediate": 0.64, "format_only": 1.0}),
        ([1] * 5, 1.0, {"one_minus_acc": 0.0, "intermediate": 0.0, "format_only": 1.0}),
        ([0] * 5, 0.0, {"one_minus_acc": 1.0, "intermediate": 0.0, "format_only": 1.0}),
    ],
)
def test_rewards_of_the_proposer(rewards: list[int], rate: float, expected: dict[str, float]) -> None:
    assert sum(rewards) / len(rewards) == rate
    for kind, value in expected.items():
        assert proposer_reward(rate, Proposer.model_validate({"reward": kind})) == pytest.approx(value)


def test_advantages_of_the_solver_are_grpos() -> None:
    """[1, 0, 0, 0, 0]: sample standard deviation 0.4472; equal rewards: 0."""
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0]
    batch = prepared(ssp(group_size=5), *(episode(number, "g", reward) for number, reward in enumerate(rewards)))
    assert batch.advantages is not None
    assert batch.advantages[:, 1].tolist() == pytest.approx([1.789, -0.447, -0.447, -0.447, -0.447], abs=1e-3)
    equal = prepared(ssp(group_size=5), *(episode(number, "g", 1.0) for number in range(5)))
    assert equal.advantages is not None
    assert not equal.advantages.any()


def test_a_proposers_group_of_one_is_reinforce_and_failures_change_nothing() -> None:
    """R 0.8: A = 0.8. A failure with reward 0 has no gradient, also where the policy has left the reference; a question that
    everybody solved has no advantage either, and its KL term. By hand: with d = log pi - log ref = 0.5, the KL term of one of
    nine tokens has the gradient 0.01 (1 - exp(-d)) / 9."""
    algorithm = ssp("proposer")
    batch = prepared(algorithm, proposal(0, 0.8, True), proposal(1, 0.0, False), proposal(2, 0.0, True), reference=0.5)
    assert batch.advantages is not None
    assert batch.advantages[0].tolist() == pytest.approx([0.0, 0.8, 0.8, 0.0, 0.8])
    assert not batch.advantages[1:].any()
    found = gradient(algorithm, without_kl_of_failures(batch), batch.logprobs_old)
    kl = 0.01 * (1 - math.exp(-0.5)) / 9
    assert found[0].tolist() == pytest.approx([0.0, *[kl - 0.8 / 9] * 2, 0.0, kl - 0.8 / 9])
    assert not found[1].any()
    assert found[2].tolist() == pytest.approx([0.0, kl, kl, 0.0, kl])
    penalised = ssp("proposer", tasks={"settings": {"proposer": {"fail_reward": -0.1}}})
    batch = prepared(penalised, proposal(1, -0.1, False), reference=0.5)
    found = gradient(penalised, without_kl_of_failures(batch), batch.logprobs_old)
    assert found[0, 1].item() == pytest.approx((0.1 + 0.01 * (1 - math.exp(-0.5))) / 3), "with a penalty they are kept near it"


def test_defaults_are_the_papers() -> None:
    """Five solver's episodes per question, proposers at temperature 0.8, solvers at 1; what the user sets counts more."""
    assert (ssp().rl.group_size, ssp().rl.sampling.temperature, ssp("proposer").rl.sampling.temperature) == (5, 1.0, 0.8)
    mine = {"group_size": 3, "sampling": {"temperature": 0.7}, "roles": {"proposer": {"sampling": {"temperature": 0.9}}}}
    assert (ssp(**mine).rl.group_size, ssp("proposer", **mine).rl.sampling.temperature) == (3, 0.9)
    assert resolve(Rl.model_validate({"algorithm": "grpo"})).rl.group_size == 8


def check(domain: str, **gate: Any) -> None:
    rl = {"algorithm": "ssp", "tasks": {"settings": {"gate": gate}}}
    check_domains(parse_params({"domains": [domain], "per_domain": {domain: {}}, "rl": rl}))


def test_domains_without_answers_or_a_reader_are_refused_before_anything_runs() -> None:
    with pytest.raises(ParamsError, match="episodes of domain textworld do not end with one"):
        check("textworld")
    with pytest.raises(ParamsError, match=r"gate\.reader: rules needs a domain that reads evidence by rules"):
        check("factbook", reader="rules")
    check("factbook")
    check("search", reader="rules")
    source = {"algorithm": "grpo", "tasks": {"source": "self_play"}}
    with pytest.raises(ParamsError, match="domain keydoor do not end with one"):
        check_domains(parse_params({"domains": ["keydoor"], "per_domain": {"keydoor": {}}, "rl": source}))


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({"closed_book": True}, "closed_book leaves proposers no tool"),
        ({"tool_mode": "self"}, "tool_mode: self leaves proposers without results"),
        ({"tool_mode": "none"}, "tool_mode: none leaves"),
        ({"constraint": {"spec": "search_then_answer"}}, "constraint has no state for their"),
    ],
)
def test_environments_in_which_no_question_can_pass_the_gate_are_refused(environment: dict[str, Any], key: str) -> None:
    """Contract: such a run would train on prompts that say the answer, without an error; without proposals all are played."""
    section = {"domains": ["search"], "per_domain": {"search": {"environment": environment}}}
    with pytest.raises(ParamsError, match=rf"per_domain\.search\.environment\.{key}"):
        check_domains(parse_params({**section, "rl": {"algorithm": "ssp"}}))
    check_domains(parse_params({**section, "rl": {"algorithm": "ssp", "tasks": {"settings": {"proposer": {"n": 0}}}}}))


def test_without_proposals_the_curriculum_draws_the_questions() -> None:
    assert ssp(curriculum={"floor": 0.1}, tasks={"settings": {"proposer": {"n": 0}}}).rl.curriculum.floor == 0.1


def test_searches_with_free_tools_are_evidence() -> None:
    """Contract: what a search showed counts, whatever it cost."""

    def turn(action: str, terms: dict[str, float]) -> TurnRecord:
        return TurnRecord(action, "a page", True, 0.0, 0.0, "", action, 0, 1, terms)

    turns = [turn("search free: Ann ally", {"calls/free": 1.0}), turn("think more", {"calls/free": 0.0})]
    found = proposal_of("Bo", [*turns, turn("question Who?", {"calls/free": 0.0})])
    assert (found.queries, found.evidence, found.question) == (["free: ann ally"], ["a page"], "Who?")


def test_eleven_marks_divide_the_reward_by_four_and_still_count_as_solved() -> None:
    right = episode(0, "g", 1.0, marks=11.0)
    batch = ssp().shape(trajectory_batch([right, episode(1, "g", 1.0, marks=10.0)]))
    assert batch.rewards.tolist() == [0.25, 1.0]
    assert right.reward > 0, "what the proposer's solve rate counts"
    assert ssp(settings={"max_marks": 20}).shape(trajectory_batch([right])).rewards.tolist() == [1.0]


QUESTION = "who is the founder of the house that the mentor of Kelmar keeps?"


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({}, {}, ""),
        ({"queries": ["a"]}, {}, "few_queries"),
        ({"queries": ["a", "a"]}, {}, "repeated_query"),
        ({"question": f"{QUESTION} in PARIS?"}, {}, "answer_in_question"),
        ({"question": ""}, {}, "no_question"),
        ({"question": "who is it?"}, {}, "words"),
        ({"question": "who?"}, {"min_words": 1}, "length"),
        ({"question": f"{QUESTION} " * 20}, {}, "length"),
        ({"evidence": []}, {}, "no_evidence"),
        ({"queries": ["a", "in paris"]}, {}, ""),
        ({"queries": ["a", "in paris"]}, {"forbid_answer_in_queries": True}, "answer_in_query"),
        ({"queries": ["a"], "evidence": []}, {"rules": False}, ""),
        ({"question": ""}, {"rules": False}, "no_question"),
    ],
)
def test_rule_gate(changes: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    given = {"answer": "Paris", "question": QUESTION, "queries": ["a", "b"], "evidence": ["x"], **changes}
    assert failed_rule(Proposal(**given), Gate(**settings)) == reason


def test_answers_may_be_lists_and_distractors_are_as_many_as_there_are() -> None:
    assert target(["Paris"]) == target("Paris") == "Paris"
    lines = mixed_evidence(["own 1", "own 2"], [["a"], ["b"], ["c"]], 2, Random(1)).split("\n")
    assert len(lines) == 4
    assert lines.index("own 2") == lines.index("own 1") + 1
    assert sorted(mixed_evidence(["own"], [["a"], ["b"]], 4, Random(1)).split("\n")) == ["a", "b", "own"]
    orders = {mixed_evidence(["own"], [["a"]], 1, Random(seed)) for seed in range(8)}
    assert len(orders) == 2


def test_observation_tokens_have_no_gradient() -> None:
    algorithm = ssp(group_size=2)
    batch = prepared(algorithm, episode(0, "g", 1.0), episode(1, "g", 0.0))
    changed = batch.logprobs_old.clone()
    changed[:, 3] -= 2.0
    assert torch.equal(gradient(algorithm, batch, batch.logprobs_old), gradient(algorithm, batch, changed))
    assert not gradient(algorithm, batch, changed)[:, 3].any()


def pool(*rates: float, **settings: Any) -> ProblemPool:
    made = ProblemPool(Completion(**settings))
    made.add([{"task_id": f"t{number}", "rate": rate} for number, rate in enumerate(rates)])
    return made


def test_pool_draws_unsolved_problems_first() -> None:
    """rates 0.2 and 1: threshold 0.5 returns the first; with only 1 left, that; threshold 1: either."""
    draws = [pool(0.2, 1.0, max_success=0.5).draw(1, Random(seed)) for seed in range(8)]
    assert {one["rate"] for (one,) in draws} == {0.2}
    assert [one["rate"] for one in pool(1.0, max_success=0.5).draw(1, Random(0))] == [1.0]
    assert [one["rate"] for one in pool(1.0, 0.2, max_success=0.5).draw(3, Random(0))] == [0.2, 1.0]
    draws = [pool(0.2, 1.0).draw(1, Random(seed)) for seed in range(16)]
    assert {one["rate"] for (one,) in draws} == {0.2, 1.0}


def test_pool_is_cleared_and_keeps_the_newest() -> None:
    made = pool(0.1, 0.2, 0.3, 0.4, clear_every=3)
    made.end_step(0), made.end_step(1)
    assert len(made.problems) == 4
    made.end_step(2)
    assert made.problems == []
    kept = pool(0.1, 0.2, 0.3, 0.4, clear_every=1, keep_ratio=0.5)
    kept.add([{"task_id": "t0", "rate": 0.9}])
    kept.end_step(0)
    assert [(one["task_id"], one["rate"]) for one in kept.problems] == [("t3", 0.4), ("t0", 0.9)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": {"source": "static"}}, r"rl\.tasks\.source is static; set it to null"),
        ({"tasks": {"settings": {"proposer": {"n": 3}}}}, r"rl\.tasks_per_step is 16.*make it a multiple"),
        ({"tasks": {"settings": {"updates": {"proposer": False, "solver": False}}}}, "trains nothing"),
        (
            {"tasks": {"settings": {"updates": {"solver": False}, "proposer": {"n": 0}}}},
            "no proposals, and updates.solver is false",
        ),
        (
            {"tasks": {"settings": {"updates": {"proposer": False}, "proposer": {"warmup_steps": 3}}}},
            r"proposer\.warmup_steps has no effect with updates\.proposer: false",
        ),
        ({"tasks": {"settings": {"gate": {"prompt": "dummy.txt"}}}}, r"which lacks \{evidence\}"),
        ({"tasks": {"settings": {"proposer": {"prompt": "mine.txt"}}}}, "no text file in data/raw/prompts"),
        ({"tasks": {"settings": {"gate": {"reader": "judge"}}}}, r"rl\.tasks\.settings\.gate\.reader"),
        ({"tasks": {"settings": {"proposer": {"left": 0.5}}}}, "left has no effect: it needs reward intermediate"),
        ({"tasks": {"settings": {"gate": {"rules": False, "min_words": 6}}}}, "min_words has no effect: it needs rules true"),
        ({"tasks": {"settings": {"gate": {"reader": "rules", "reader_tokens": 9}}}}, "reader_tokens has no effect"),
        ({"tasks": {"settings": {"gate": {"reader": "none", "noisy_blobs": 1}}}}, "noisy_blobs has no effect"),
        ({"tasks": {"settings": {"completion": {"strategy": "dummy", "keep_ratio": 1.0}}}}, "it needs strategy reuse"),
        ({"curriculum": {"floor": 0.1}}, r"rl\.curriculum\.floor has no effect here: it needs a task source that draws by it"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        ssp(**values)
