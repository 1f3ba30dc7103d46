"""ReSeek's rewards against the paper's worked examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.methods.reseek import Settings, judgment_rewards
from stages.algorithms.parts.advantage import rewards_to_go
from stages.algorithms.settings import Rl
from stages.params import check_domains, parse_params
from stages.records.episode import Episode, Owner, TurnRecord
from stages.runtime.validation import ParamsError
from stages.training.common.batches import trajectory_batch

V1 = {"preset": "v1_symmetric"}
NAMES = {
    ("yes", "yes"): "judge_true_accept",
    ("no", "no"): "judge_true_reject",
    ("yes", "no"): "judge_false_accept",
    ("no", "yes"): "judge_false_reject",
}
"""(judgment, what it should be) -> the environment's term."""


def episode(number: int, judgments: Sequence[tuple[str, str]], answer: float) -> Episode:
    """A search and a judgment for each of `judgments`, then an answer, each action one token."""
    made = Episode(f"e{number}", "task", "search", "group", 0, "", "", 1.0, 1.0, 0)
    made.append([1], Owner.PROMPT, -1)
    steps = [step for pair in judgments for step in (("search", {}), (f"judge {pair[0]}", {NAMES[pair]: 1.0}))]
    steps.append(("answer", dict.fromkeys(NAMES.values(), 0.0)))
    for turn, (action, terms) in enumerate(steps):
        start, last = len(made.token_ids), turn == len(steps) - 1
        reward = answer if last else 0.0
        made.append([2], Owner.POLICY, turn, [-1.0])
        made.turns.append(TurnRecord(action, "", True, reward, 0.0, "", action, start, start + 1, terms))
        made.append([3, 4] if not last else [], Owner.ENVIRONMENT, turn)
    made.reward = answer
    made.reward_terms = {name: float(sum(turn.terms.get(name, 0.0) for turn in made.turns)) for name in NAMES.values()}
    return made


def batch(*episodes: tuple[Sequence[tuple[str, str]], float]) -> TrajectoryBatch:
    return trajectory_batch([episode(number, *one) for number, one in enumerate(episodes)])


def algorithm(**settings: Any) -> Algorithm:
    return resolve(Rl.model_validate({"algorithm": "reseek", "group_size": 2, "settings": settings}))


@pytest.mark.parametrize(
    ("pair", "settings", "expected"),
    [
        (("yes", "yes"), {}, 0.3),
        (("no", "no"), {}, 0.3),
        (("yes", "no"), {}, -0.6),
        (("yes", "no"), V1, -0.3),
        (("no", "yes"), {}, -0.3),
        (("no", "yes"), V1, -0.3),
    ],
)
def test_reward_of_a_judgment(pair: tuple[str, str], settings: dict[str, float], expected: float) -> None:
    paid = judgment_rewards(batch(([pair], 0.0)), Settings(**settings))
    assert paid.tolist() == [pytest.approx([0.0, expected, 0.0])]


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, 1.6), (0.9, 1.38)])
def test_return_of_a_trajectory(gamma: float, expected: float) -> None:
    """A right rejection, a right acceptance and a right answer: 0.3 + 0.3 gamma + gamma^2."""
    shaped = algorithm(gamma=gamma).shape(batch(([("no", "no"), ("yes", "yes")], 1.0)))
    assert shaped.rewards.item() == pytest.approx(expected)
    assert shaped.turn_rewards.sum().item() == pytest.approx(expected)
    assert bool(shaped.success.all()), "success is the environment's, whatever the judgments earn"


@pytest.mark.parametrize(("cap", "expected"), [(0.6, 0.6), (None, 1.2)])
def test_cap_bounds_what_useless_searches_earn(cap: float | None, expected: float) -> None:
    shaped = algorithm(cap=cap).shape(batch(([("no", "no")] * 4, 0.0)))
    assert shaped.rewards.item() == pytest.approx(expected)


def test_cap_bounds_the_sum_so_far_and_penalties_still_count() -> None:
    shaped = algorithm().shape(batch(([*[("no", "no")] * 3, ("yes", "no")], 0.0)))
    assert shaped.rewards.item() == pytest.approx(0.0)


def test_without_judgment_rewards_it_is_grpo() -> None:
    given = batch(([("no", "no")], 1.0), ([("yes", "no")], 0.0))
    ours = algorithm(match=0.0, false_accept=0.0, false_reject=0.0)
    plain = resolve(Rl.model_validate({"algorithm": "grpo", "group_size": 2}))
    assert ours.shape(given).rewards.equal(given.rewards)
    assert ours.prepare(ours.shape(given)).advantages.equal(plain.prepare(plain.shape(given)).advantages)


def test_equal_judgments_of_a_group_give_no_advantage() -> None:
    ours = algorithm()
    prepared = ours.prepare(ours.shape(batch(*[([("no", "no")], 0.0)] * 3)))
    assert not prepared.advantages.any()


def test_judgments_are_trained_and_observations_are_not() -> None:
    """Contract: the mask follows who wrote a token, so whatever observations say leaves it as it is."""
    given = batch(([("no", "no")], 1.0))
    assert given.mask.sum() == 3
    assert given.mask[0, 4], "the judgment's token"
    assert not given.mask[0, 5:7].any(), "the environment's answer to it"


def test_metrics_tell_accuracy_balanced_over_useful_and_useless_results() -> None:
    """Always no, with three useless results and one useful: 1/2, not 3/4."""
    metrics = algorithm().shape(batch(([*[("no", "no")] * 3, ("no", "yes")], 0.0))).metrics
    assert metrics["judge_balanced_accuracy"] == 0.5
    assert metrics["judgments"] == 4
    assert metrics["judge_reward"] == pytest.approx(0.3)


def test_environment_without_judgments_is_refused() -> None:
    made = episode(0, [], 1.0)
    made.reward_terms, made.turns[0].terms = {"exact_match": 1.0}, {}
    with pytest.raises(ValueError, match=r"set per_domain.search.environment.judge"):
        algorithm().shape(trajectory_batch([made]))


@pytest.mark.parametrize(("judgments", "reward"), [([("yes", "yes")], 0.3), ([("yes", "no")], -0.6), ([], 0.0)])
@pytest.mark.parametrize("settings", [{}, {"match": 0.0, "false_accept": 0.0, "false_reject": 0.0}])
def test_episodes_that_were_all_cut_have_the_judgments_so_far(
    judgments: list[tuple[str, str]], reward: float, settings: dict[str, float]
) -> None:
    """Contract: under rl.horizon, or out of tokens, no episode of a step may have come to an end, where the environment names all
    terms; what was judged counts, and nothing is refused."""
    made = episode(0, judgments, 0.0)
    made.truncated, made.turns[-1].terms = True, {}
    made.reward_terms = {NAMES[pair]: 1.0 for pair in judgments}
    shaped = algorithm(**settings).shape(trajectory_batch([made]))
    assert shaped.rewards.item() == pytest.approx(0.0 if settings else reward)
    assert shaped.metrics.get("judgments", 0.0) == len(judgments)


def test_step_returns_are_a_level_of_advantages() -> None:
    """advantage.level turn: tokens after a judgment are not credited for it."""
    ours = resolve(Rl.model_validate({"algorithm": "reseek", "group_size": 2, "advantage": {"level": "turn", "std": "none"}}))
    prepared = ours.prepare(ours.shape(batch(([("no", "no")], 0.0), ([("yes", "no")], 0.0))))
    taken = prepared.advantages[0][prepared.mask[0]]
    assert taken.tolist() == pytest.approx([0.45, 0.45, 0.0])
    assert torch.isfinite(prepared.advantages).all()


def test_step_returns_are_discounted_from_their_own_search_on() -> None:
    """A right rejection, a right acceptance and a right answer with gamma 0.5. Dossier: G = 0.3 + 0.5 (0.3 + 0.5) = 0.7 at the
    first search, 0.3 + 0.5 = 0.8 at the second, 1 at the answer. A search and its judgment are turns of their own here."""
    ours = algorithm(gamma=0.5)
    shaped = ours.shape(batch(([("no", "no"), ("yes", "yes")], 1.0)))
    assert rewards_to_go(shaped.turn_rewards, 1.0)[0].tolist() == pytest.approx([0.7, 0.7, 0.8, 0.8, 1.0])
    assert shaped.rewards.item() == pytest.approx(0.7)
    level = {"level": "turn", "mean": "none", "std": "none"}
    rl = {"algorithm": "reseek", "group_size": 2, "settings": {"gamma": 0.5}, "advantage": level}
    ours = resolve(Rl.model_validate(rl))
    given = batch(([("no", "no"), ("yes", "yes")], 1.0), ([("no", "yes")], 0.0))
    prepared = ours.prepare(ours.shape(given.with_(logprobs_ref=given.logprobs_old)))
    assert prepared.advantages is not None
    assert prepared.advantages[0][prepared.mask[0]].tolist() == pytest.approx([0.7, 0.7, 0.8, 0.8, 1.0])
    assert prepared.advantages[1][prepared.mask[1]].tolist() == pytest.approx([-0.3, -0.3, 0.0])


def test_presets_are_the_versions_of_the_paper() -> None:
    assert Settings().false_accept == Settings(preset="v3_asymmetric").false_accept == -0.6
    assert Settings(preset="v1_symmetric").false_accept == -0.3
    assert Settings(preset="v1_symmetric", false_accept=-1.0).false_accept == -1.0


FREE = {"match": 0.0, "false_accept": 0.0, "false_reject": 0.0}


def check(domain: str, environment: dict[str, Any], **rl: Any) -> None:
    values = {"domains": [domain], "per_domain": {domain: {"environment": environment}}}
    check_domains(parse_params({**values, "rl": {"algorithm": "reseek", **rl}}))


@pytest.mark.parametrize("domain", ["search", "textworld"])
def test_domains_without_judgments_are_refused_before_anything_runs(domain: str) -> None:
    """Contract: not in rl's first step, after the stages before it; without rewards for judgments there is nothing to refuse."""
    with pytest.raises(ParamsError, match=rf"domain {domain} asks for none; set per_domain\.search\.environment\.judge"):
        check(domain, {})
    check(domain, {}, settings=FREE)
    check("search", {"judge": {}})
    with pytest.raises(ParamsError, match="closed_book to false"):
        check("search", {"judge": {}, "closed_book": True})


def test_a_cap_or_discount_of_no_rewards_is_refused() -> None:
    for more in ({"cap": None}, {"gamma": 0.9}):
        with pytest.raises(ParamsError, match=f"{next(iter(more))} has no effect: it needs a reward of judgments"):
            algorithm(**FREE, **more)


def test_two_discounts_are_refused() -> None:
    with pytest.raises(ParamsError, match=r"rl\.advantage\.gamma 0\.9 would again, per turn; set one of them to 1"):
        resolve(
            Rl.model_validate({"algorithm": "reseek", "settings": {"gamma": 0.5}, "advantage": {"level": "turn", "gamma": 0.9}})
        )
