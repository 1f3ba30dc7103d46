"""VSPO and progressive reward shaping against the papers' worked examples."""

from __future__ import annotations

import math

import pytest
import torch

from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.advantage import Smoothing
from stages.algorithms.parts.group_resampling import draw_counts, smoothing, task_values
from stages.algorithms.parts.loss import denominators
from stages.algorithms.parts.reward import Reward, shape_rewards
from stages.algorithms.parts.shaping import PrsStage, staged
from stages.algorithms.settings import Rl
from stages.environments.search.scoring import answer_bleu

NO_KL = {"kl_coef": 0.0}


def value(rewards: list[float], spread: str = "std") -> float:
    return float(task_values(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), spread, 1.0)[0][0])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0, 0], 0.32),
        ([1, 1, 0, 0, 0], 0.2939),
        ([1, 1, 1, 0, 0], 0.196),
        ([1, 1, 1, 1, 0], 0.08),
        ([1, 1, 1, 1, 1], 0.0),
    ],
)
def test_task_value_by_success_count(rewards: list[float], expected: float) -> None:
    """Population standard deviation, G = 5."""
    assert value(rewards) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("spread", "best", "peak"), [("std", 0.25, 0.3248), ("variance", 1 / 3, 0.1481)])
def test_success_rate_of_the_highest_task_value(spread: str, best: float, peak: float) -> None:
    """V = sqrt(p) (1 - p)^1.5 peaks at p = 0.25, p (1 - p)^2 at 1/3."""
    values = {count / 600: value([1.0] * count + [0.0] * (600 - count), spread) for count in range(0, 601, 10)}
    assert max(values, key=lambda share: values[share]) == pytest.approx(best, abs=1e-9)
    assert max(values.values()) == pytest.approx(peak, abs=1e-4)


@pytest.mark.parametrize(("scores", "expected"), [((0, 1, 1), 0.0), ((1, 0, 1), 0.1), ((1, 1, 0.5), 0.6), ((1, 1, 1), 1.0)])
def test_staged_reward(scores: tuple[float, ...], expected: float) -> None:
    """w = (.1, .1, .8), tau = (1, 1, 0)."""
    result = staged(torch.tensor([scores], dtype=torch.float32), (0.1, 0.1, 0.8), (1.0, 1.0, 0.0))
    assert result.item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("paris", "paris", 1.0),
        ("new york", "new york city", math.exp(-0.5)),
        ("city of paris", "paris", 1 / 3),
        ("", "paris", 0.0),
        ("The Paris!", "paris", 1.0),
        ("london", "paris", 0.0),
    ],
)
def test_length_aware_bleu_reward(answer: str, gold: str, expected: float) -> None:
    """The search domain's reward term `bleu`."""
    assert answer_bleu(answer, gold) == pytest.approx(expected, abs=1e-4)


def prepared(batch: TrajectoryBatch, **section) -> tuple[Algorithm, TrajectoryBatch]:
    algorithm = resolve(Rl.model_validate({"algorithm": "vspo", "group_size": 2, "loss": NO_KL, **section}), 100)
    return algorithm, algorithm.prepare(algorithm.resample(algorithm.shape(batch), 0, "stream", 7))


def gradient(algorithm: Algorithm, batch: TrajectoryBatch) -> torch.Tensor:
    logprobs = batch.logprobs_old.clone().requires_grad_()
    kept = algorithm.forward_rows(batch)
    micro = batch.rows(kept)
    terms = algorithm.loss(logprobs[kept], torch.zeros(micro.mask.shape), micro, denominators(batch, 8.0))
    return torch.autograd.grad(terms.loss, logprobs)[0]


ONE_OF_FOUR = [[1, 0], [1, 1], [0, 0], [1, 1]]
LENGTHS = [2, 5, 3, 1, 4, 2, 2, 6]


def test_one_informative_group_with_cap_equals_grpo(make_batch) -> None:
    """N = 4, one informative group: it counts 4 times with weight 1/4, which is GRPO's gradient exactly; without smoothing 4
    times that."""
    algorithm, batch = prepared(make_batch(ONE_OF_FOUR, lengths=LENGTHS))
    assert batch.weights.tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    smoothing = batch.get(Smoothing)
    assert smoothing is not None
    assert smoothing.factor[:2].tolist() == [0.25, 0.25]
    grpo = resolve(Rl(algorithm="grpo", group_size=2))
    plain = gradient(grpo, grpo.prepare(make_batch(ONE_OF_FOUR, lengths=LENGTHS)))
    assert torch.equal(gradient(algorithm, batch), plain)
    rough = prepared(make_batch(ONE_OF_FOUR, lengths=LENGTHS), group_resampling={"smooth": "none"})
    assert torch.equal(gradient(*rough), 4 * plain)


def test_draw_frequencies_follow_the_values() -> None:
    """V = (0.32, 0.08): frequencies tend to (0.8, 0.2); infinite temperature equals random."""
    drawn = draw_counts([0.32, 0.08], 20000, "key")
    assert drawn[0] / 20000 == pytest.approx(0.8, abs=0.01)
    flat = draw_counts([0.32**1e-9, 0.08**1e-9], 1000, "key")
    assert flat == draw_counts([1.0, 1.0], 1000, "key")
    assert draw_counts([1.0, 1.0], 5, "one") == draw_counts([1.0, 1.0], 5, "one")


def test_rarely_solved_task_gets_more_draws(make_batch) -> None:
    """Tasks that are solved more rarely are worth more and get more of the free places."""
    rewards = [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], *([[1, 1, 1, 1, 1]] * 38)]
    counts = {}
    for kind in ("value", "random"):
        _, batch = prepared(make_batch(rewards), group_size=5, group_resampling={"kind": kind})
        counts[kind] = batch.weights[::5].tolist()
        assert sum(counts[kind]) == 40
        assert counts[kind][2:] == [0.0] * 38
    assert counts["value"][0] > 24
    assert 10 < counts["random"][0] < 30
    _, hot = prepared(make_batch(rewards), group_size=5, group_resampling={"temperature": 1e9})
    assert hot.weights[::5].tolist() == counts["random"]


def test_without_dead_groups_equals_grpo(make_batch) -> None:
    rewards = [[1, 0], [0, 1]]
    algorithm, batch = prepared(make_batch(rewards))
    grpo = resolve(Rl(algorithm="grpo", group_size=2))
    assert torch.equal(gradient(algorithm, batch), gradient(grpo, grpo.prepare(make_batch(rewards))))


def test_single_outcome_stage_equals_the_outcome_reward(make_batch) -> None:
    batch = make_batch([[1, 0], [0, 1]])
    shaped = shape_rewards(batch, Reward(kind="prs", prs=[PrsStage(name="outcome", weight=1.0)]))
    assert torch.equal(shaped.rewards, batch.rewards)
    assert torch.equal(shaped.turn_rewards, batch.turn_rewards)


def test_step_with_only_dead_groups_is_skipped(make_batch) -> None:
    """No forward pass, and the metrics say so. tests/training checks that weights do not change."""
    algorithm, batch = prepared(make_batch([[1, 1], [0, 0]]), dead_groups="keep")
    assert batch.metrics["skipped"] == 1.0
    assert algorithm.forward_rows(batch).tolist() == []


@pytest.mark.parametrize(("kind", "expected"), [("none", 1.0), ("cap", 0.25), ("sqrt", 0.5), ("log", (1 + math.log(4)) / 4)])
def test_smoothing_factor(kind: str, expected: float) -> None:
    assert smoothing(4, kind, 1.0) == pytest.approx(expected)
    assert smoothing(1, kind, 1.0) == 1.0
    assert smoothing(4, "cap", 2.0) == 0.5


def test_low_value_groups_are_replaced(make_batch) -> None:
    """V of (1, 1, 1, 1, 0) is 0.08: replaced at min_value 0.1, kept otherwise."""
    rewards = [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
    _, kept = prepared(make_batch(rewards), group_size=5)
    assert kept.weights.tolist() == [1.0] * 10
    _, gone = prepared(make_batch(rewards), group_size=5, group_resampling={"replace": "low_value", "min_value": 0.1})
    assert gone.weights.tolist() == [0.0] * 5 + [2.0] * 5


def test_last_stage_value_ignores_format(make_batch) -> None:
    """Groups that differ only in format have V > 0 by the reward and 0 by the last stage."""
    rewards = [[0, 0], [1, 0]]
    batch = make_batch(rewards, turns=[[1], [1], [1], [1]])
    accepted = batch.accepted.clone()
    accepted[0, 0] = False
    batch = batch.with_(accepted=accepted)
    weights = {}
    for value_of in ("reward", "last_stage"):
        algorithm = resolve(
            Rl.model_validate(
                {"algorithm": "vspo_prs", "group_size": 2, "loss": NO_KL, "group_resampling": {"value_of": value_of}}
            ),
            100,
        )
        resampled = algorithm.resample(algorithm.shape(batch), 0)
        weights[value_of] = resampled.metrics["task_value"]
    # Rewards (0, 0.2) and (1, 0.2): V is 0.9 * 0.1 and 0.4 * 0.4. By the last stage (0, 0) and (0.8, 0): 0 and 0.4 * 0.4.
    assert weights["reward"] == pytest.approx((0.9 * 0.1 + 0.4 * 0.4) / 2, abs=1e-4)
    assert weights["last_stage"] == pytest.approx(0.4 * 0.4 / 2, abs=1e-4)


@pytest.mark.parametrize("kind", ["value", "random"])
def test_groups_of_low_value_by_the_last_stage_are_replaced(make_batch, kind: str) -> None:
    """Group 0 reaches the last stage in no episode: its value is 0, whatever its rewards."""
    batch = make_batch([[0, 0], [1, 0]], turns=[[1]] * 4)
    accepted = batch.accepted.clone()
    accepted[0, 0] = False
    for value_of, expected in (("reward", [1.0, 1.0, 1.0, 1.0]), ("last_stage", [0.0, 0.0, 2.0, 2.0])):
        rule = {"kind": kind, "replace": "low_value", "min_value": 0.05, "value_of": value_of}
        section = {"algorithm": "vspo_prs", "group_size": 2, "loss": NO_KL, "group_resampling": rule}
        algorithm = resolve(Rl.model_validate(section), 100)
        found = algorithm.resample(algorithm.shape(batch.with_(accepted=accepted)), 0, "stream", 7)
        assert found.weights.tolist() == expected
