"""VSPO and progressive reward shaping against their dossier's numbers."""

from __future__ import annotations

import math

import pytest
import torch

from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.batch import TrajectoryBatch
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
def test_task_values(rewards: list[float], expected: float) -> None:
    """1: population standard deviation, G = 5."""
    assert value(rewards) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("spread", "best", "peak"), [("std", 0.25, 0.3248), ("variance", 1 / 3, 0.1481)])
def test_the_most_valued_success_rate(spread: str, best: float, peak: float) -> None:
    """2: V = sqrt(p) (1 - p)^1.5 peaks at p = 0.25, p (1 - p)^2 at 1/3."""
    values = {count / 600: value([1.0] * count + [0.0] * (600 - count), spread) for count in range(0, 601, 10)}
    assert max(values, key=lambda share: values[share]) == pytest.approx(best, abs=1e-9)
    assert max(values.values()) == pytest.approx(peak, abs=1e-4)


@pytest.mark.parametrize(("scores", "expected"), [((0, 1, 1), 0.0), ((1, 0, 1), 0.1), ((1, 1, 0.5), 0.6), ((1, 1, 1), 1.0)])
def test_stages(scores: tuple[float, ...], expected: float) -> None:
    """3: w = (.1, .1, .8), tau = (1, 1, 0)."""
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
def test_length_aware_bleu(answer: str, gold: str, expected: float) -> None:
    """4, the search domain's reward term `bleu`."""
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


def test_one_informative_group_with_cap_is_plain_grpo(make_batch) -> None:
    """5: N = 4, one informative group: it counts 4 times with weight 1/4, so the gradient is GRPO's exactly; 4 times that
    without smoothing."""
    algorithm, batch = prepared(make_batch(ONE_OF_FOUR, lengths=LENGTHS))
    assert batch.weights.tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    assert batch.smoothing is not None
    assert batch.smoothing[:2].tolist() == [0.25, 0.25]
    grpo = resolve(Rl(algorithm="grpo", group_size=2))
    plain = gradient(grpo, grpo.prepare(make_batch(ONE_OF_FOUR, lengths=LENGTHS)))
    assert torch.equal(gradient(algorithm, batch), plain)
    rough = prepared(make_batch(ONE_OF_FOUR, lengths=LENGTHS), group_resampling={"smooth": "none"})
    assert torch.equal(gradient(*rough), 4 * plain)


def test_draws_follow_the_values() -> None:
    """6: V = (0.32, 0.08): frequencies tend to (0.8, 0.2); temperature to infinity equals random."""
    drawn = draw_counts([0.32, 0.08], 20000, "key")
    assert drawn[0] / 20000 == pytest.approx(0.8, abs=0.01)
    flat = draw_counts([0.32**1e-9, 0.08**1e-9], 1000, "key")
    assert flat == draw_counts([1.0, 1.0], 1000, "key")
    assert draw_counts([1.0, 1.0], 5, "one") == draw_counts([1.0, 1.0], 5, "one")


def test_draws_through_the_method(make_batch) -> None:
    """The task that is solved more rarely is worth more, and gets more of the free places."""
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


def test_without_dead_groups_it_is_grpo_bit_for_bit(make_batch) -> None:
    """7."""
    rewards = [[1, 0], [0, 1]]
    algorithm, batch = prepared(make_batch(rewards))
    grpo = resolve(Rl(algorithm="grpo", group_size=2))
    assert torch.equal(gradient(algorithm, batch), gradient(grpo, grpo.prepare(make_batch(rewards))))


def test_one_stage_of_weight_one_is_the_outcome(make_batch) -> None:
    """7."""
    batch = make_batch([[1, 0], [0, 1]])
    shaped = shape_rewards(batch, Reward(kind="prs", prs=[PrsStage(name="outcome", weight=1.0)]))
    assert torch.equal(shaped.rewards, batch.rewards)
    assert torch.equal(shaped.turn_rewards, batch.turn_rewards)


def test_all_groups_dead_skips_the_step(make_batch) -> None:
    """8: nothing goes through the model, and the history says so. (That the weights stay is in tests/training.)"""
    algorithm, batch = prepared(make_batch([[1, 1], [0, 0]]), dead_groups="keep")
    assert batch.metrics["skipped"] == 1.0
    assert algorithm.forward_rows(batch).tolist() == []


@pytest.mark.parametrize(("kind", "expected"), [("none", 1.0), ("cap", 0.25), ("sqrt", 0.5), ("log", (1 + math.log(4)) / 4)])
def test_smoothing(kind: str, expected: float) -> None:
    assert smoothing(4, kind, 1.0) == pytest.approx(expected)
    assert smoothing(1, kind, 1.0) == 1.0
    assert smoothing(4, "cap", 2.0) == 0.5


def test_low_value_groups_can_make_room_too(make_batch) -> None:
    """V of (1, 1, 1, 1, 0) is 0.08: replaced at min_value 0.1, kept otherwise."""
    rewards = [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]
    _, kept = prepared(make_batch(rewards), group_size=5)
    assert kept.weights.tolist() == [1.0] * 10
    _, gone = prepared(make_batch(rewards), group_size=5, group_resampling={"replace": "low_value", "min_value": 0.1})
    assert gone.weights.tolist() == [0.0] * 5 + [2.0] * 5


def test_value_of_the_last_stage_ignores_format(make_batch) -> None:
    """Groups that differ in format alone have V > 0 by the reward and 0 by the last stage."""
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
        filled = algorithm.resample(algorithm.shape(batch), 0)
        weights[value_of] = filled.metrics["task_value"]
    # Rewards (0, 0.2) and (1, 0.2): V is 0.9 * 0.1 and 0.4 * 0.4. By the last stage (0, 0) and (0.8, 0): 0 and 0.4 * 0.4.
    assert weights["reward"] == pytest.approx((0.9 * 0.1 + 0.4 * 0.4) / 2, abs=1e-4)
    assert weights["last_stage"] == pytest.approx(0.4 * 0.4 / 2, abs=1e-4)
