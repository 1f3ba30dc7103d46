import itertools
import math

import numpy as np
import pytest

from stages.evaluation.statistics import (
    StatisticsError,
    chance_of_differing,
    compare,
    distinct_at_k,
    maj_at_k,
    majority,
    mean_interval,
    pass_at_k,
    pass_at_k_by_task,
    sign_flip_p,
    task_means,
    wilson_interval,
)


def test_tasks_have_equal_weight() -> None:
    """Contract: attempts are averaged within their task first, whatever their order and number."""
    names, means = task_means([1.0, 0.0, 1.0, 0.0, 0.0], ["b", "a", "a", "b", "b"])
    assert names == ["a", "b"]
    assert means.tolist() == pytest.approx([1 / 2, 1 / 3])
    assert mean_interval([1.0, 0.0, 1.0, 0.0, 0.0], ["b", "a", "a", "b", "b"]).mean == pytest.approx(5 / 12)


def test_bootstrap_interval_matches_the_exact_distribution() -> None:
    """Contract: the interval holds percentiles of the mean under resampling of tasks, which can be enumerated for three tasks."""
    means = np.array([0.0, 0.5, 1.0])
    draws = np.sort([np.mean(draw) for draw in itertools.product(means, repeat=3)])
    found = mean_interval(np.repeat(means, 2), ["a", "a", "b", "b", "c", "c"], confidence=0.8, resamples=20000)
    assert found.low == pytest.approx(np.quantile(draws, 0.1), abs=1e-9)
    assert found.high == pytest.approx(np.quantile(draws, 0.9), abs=1e-9)
    assert (found.n, found.clusters, found.attempts, found.method) == (3, 3, 6, "bootstrap")


def test_interval_width_equals_standard_error_over_tasks() -> None:
    """Contract: for many tasks the 95 % interval is the mean +- 1.96 standard errors over tasks, not over attempts."""
    rng = np.random.default_rng(0)
    skill = rng.random(400)
    values = (rng.random((400, 4)) < skill[:, None]).astype(float)
    found = mean_interval(values.ravel(), [f"t{i}" for i in range(400) for _ in range(4)], resamples=20000)
    error = values.mean(1).std(ddof=1) / math.sqrt(400)
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)


def test_clusters_are_resampled_whole() -> None:
    """Contract: tasks that always agree with their cluster widen the interval to that of the clusters."""
    tasks = [f"t{i}" for i in range(40)]
    values = [float(i // 10 % 2) for i in range(40)]
    clusters = {task: str(i // 10) for i, task in enumerate(tasks)}
    alone, together = mean_interval(values, tasks), mean_interval(values, tasks, clusters=clusters)
    assert together.clusters == 4
    assert together.mean == alone.mean == 0.5
    assert (together.low, together.high) == (0.0, 1.0)
    assert together.high - together.low > 2 * (alone.high - alone.low)


def test_tasks_of_unequal_clusters_have_equal_weight() -> None:
    """Contract: the mean is over tasks, so a larger cluster weighs more."""
    clusters = {"a": "x", "b": "x", "c": "x", "d": "y"}
    assert mean_interval([1.0, 1.0, 1.0, 0.0], list("abcd"), clusters=clusters).mean == 0.75


def test_intervals_depend_on_the_seed_but_not_on_row_order() -> None:
    rng = np.random.default_rng(1)
    values, tasks = rng.random(60), [f"t{i // 2}" for i in range(60)]
    order = rng.permutation(60)
    first = mean_interval(values, tasks, seed=3)
    again = mean_interval(values[order], [tasks[i] for i in order], seed=3)
    assert (first.low, first.high) == (pytest.approx(again.low), pytest.approx(again.high))
    assert mean_interval(values, tasks, seed=4).low != first.low


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_proportion_has_wilson_interval(value: float) -> None:
    """Contract: without variation the bootstrap would give a point."""
    found = mean_interval([value] * 50, [f"t{i // 2}" for i in range(50)], proportion=True)
    assert found.method == "wilson"
    assert (found.low, found.high) == wilson_interval(int(value) * 25, 25)
    assert found.high - found.low > 0.1


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 12.0])
def test_constant_non_proportion_has_a_point_interval(value: float) -> None:
    """Contract: constant turns, tokens, costs and graded rewards have a point as interval, also at 0 and 1; a proportion outside
    [0, 1] is an error."""
    tasks = [f"t{i // 2}" for i in range(50)]
    found = mean_interval([value] * 50, tasks)
    assert (found.method, found.low, found.mean, found.high) == ("bootstrap", value, value, value)
    if not 0.0 <= value <= 1.0:
        with pytest.raises(StatisticsError, match=r"task t0 has a mean of .*, which is no proportion"):
            mean_interval([value] * 50, tasks, proportion=True)


def test_wilson_interval_by_hand() -> None:
    """Contract: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n) for 7 of 10."""
    z, p, n = 1.959964, 0.7, 10
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    assert wilson_interval(7, 10) == pytest.approx((middle - half, middle + half), abs=1e-6)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 1 - 1 / 6), (4, 0, 3, 0.0), (4, 2, 3, 1.0), (5, 5, 5, 1.0)],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    """Contract: 1 - C(n - c, k) / C(n, k)."""
    assert pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_is_the_mean_over_subsets() -> None:
    """Contract: the estimate is the share of k-subsets of the attempts that contain a success, also for large n."""
    attempts = [True, False, False, True, False, False]
    subsets = list(itertools.combinations(attempts, 3))
    assert pass_at_k(6, 2, 3) == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))
    assert pass_at_k(256, 1, 128) == pytest.approx(0.5)


def test_distinct_at_k_is_the_mean_over_subsets() -> None:
    """Contract: the mean over k-subsets of the number of different solutions; pass@k if there is only one. Six attempts: a a b
    and three failures."""
    attempts = ["a", "a", "b", None, None, None]
    for k in range(1, 7):
        subsets = list(itertools.combinations(attempts, k))
        expected = sum(len(set(subset) - {None}) for subset in subsets) / len(subsets)
        assert distinct_at_k(6, [2, 1], k) == pytest.approx(expected)
        assert distinct_at_k(6, [3], k) == pytest.approx(pass_at_k(6, 3, k))
    assert distinct_at_k(6, [], 3) == 0.0
    with pytest.raises(StatisticsError, match="7 successes in 6 attempts"):
        distinct_at_k(6, [4, 3], 2)


def test_chance_of_differing_is_unbiased_for_any_number_of_successes() -> None:
    """Contract: over all pairs of successes; of a a b two of three pairs differ; None for fewer than two."""
    assert chance_of_differing([2, 1]) == pytest.approx(2 / 3)
    assert chance_of_differing([5]) == 0.0
    assert chance_of_differing([1, 1, 1]) == 1.0
    assert chance_of_differing([1]) is chance_of_differing([]) is None
    # Its mean over 2, 3 or 5 successes of a policy that finds a and b with probability 0.7 and 0.3 is 2 * 0.7 * 0.3.
    for successes in (2, 3, 5):
        mean = 0.0
        for drawn in itertools.product((0, 1), repeat=successes):
            ones = sum(drawn)
            mean += 0.7 ** (successes - ones) * 0.3**ones * chance_of_differing([successes - ones, ones])
        assert mean == pytest.approx(0.42)


def test_majority_by_hand() -> None:
    """The most frequent answer wins, whatever its reward; None is no vote; a tie between right and wrong counts half."""
    assert majority(["a", "a", "b", "b", "b"], [1, 1, 0, 0, 0]) == 0.0
    assert majority(["a", "a", "a", "b", "b"], [1, 1, 1, 0, 0]) == 1.0
    assert majority([None, None, None, "b"], [0, 0, 0, 1]) == 1.0
    assert majority(["a", "b"], [1, 0]) == 0.5
    assert majority([None, None], [0, 0]) == 0.0


def test_maj_at_k_is_the_mean_over_subsets() -> None:
    """For k = 1 the mean, pass@1 and maj@1 are equal. (a a b c), a right: maj@2 over 6 pairs: aa 1, four of one a and another
    answer 1/2, bc 0: 3/6; maj@3: aab, aac 1, abc twice 1/3: 2/3; maj@4: 1."""
    answers, right = ["a", "a", "b", "c"], [True, True, False, False]
    found = [maj_at_k(answers, right, k) for k in (1, 2, 3, 4)]
    assert found == pytest.approx([0.5, 0.5, 2 / 3, 1.0])
    assert maj_at_k(answers, right, 1) == pytest.approx(pass_at_k(4, 2, 1)) == pytest.approx(sum(right) / 4)
    assert all(maj <= pass_at_k(4, 2, k) + 1e-12 for k, maj in enumerate(found, start=1))
    many, outcomes = ["a"] * 9 + ["b"] * 7, [True] * 9 + [False] * 7
    exact = maj_at_k(many, outcomes, 5, subsets=10_000)
    drawn = maj_at_k(many, outcomes, 5, seed=3)
    assert drawn == maj_at_k(many, outcomes, 5, seed=3)
    assert drawn == pytest.approx(exact, abs=0.1)
    with pytest.raises(StatisticsError, match=r"maj@5.*evaluate\.attempts"):
        maj_at_k(answers, right, 5)


def test_pass_at_k_by_task_has_one_value_per_task() -> None:
    """Contract: tasks may have different numbers of attempts; too few attempts are rejected."""
    names, found = pass_at_k_by_task([1, 0, 0, 1, 1], ["b", "b", "a", "a", "a"], 2)
    assert names == ["a", "b"]
    assert found.tolist() == pytest.approx([1.0, 1.0])
    assert mean_interval(found, names).n == 2
    with pytest.raises(StatisticsError, match=r"evaluate\.attempts"):
        pass_at_k_by_task([1, 0, 0], ["a", "b", "b"], 2)


@pytest.mark.parametrize("size", [2, 5, 9])
def test_sign_flip_is_exact_for_few_clusters(size: int) -> None:
    """Contract: p is the share of sign patterns with a sum at least as far from 0 as the observed one."""
    differences = np.round(np.random.default_rng(size).normal(0.3, 1.0, size), 2)
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product([1, -1], repeat=size)]
    expected = np.mean(np.array(sums) >= abs(differences.sum()) - 1e-12)
    assert sign_flip_p(differences, 2000, 0) == pytest.approx(expected)
    assert sign_flip_p(np.concatenate([differences, np.zeros(50)]), 2000, 0) == pytest.approx(expected)


def test_sign_flip_p_is_one_without_evidence() -> None:
    """Contract: no cluster that differs, or only one, is no evidence."""
    assert sign_flip_p(np.zeros(30), 1000, 0) == 1.0
    assert sign_flip_p(np.array([0.0, 2.0]), 1000, 0) == 1.0


def test_comparison_by_hand() -> None:
    """Contract: paired by task, a - b; "better" and "worse" are mirror images; the p of six equal signs is 2 / 2^6."""
    tasks = list("abcdef")
    wins, losses = [1.0] * 6, [0.0] * 6
    found = compare(wins, tasks, losses, tasks)
    assert (found.difference, found.low, found.high, found.verdict, found.n) == (1.0, 1.0, 1.0, "better", 6)
    assert found.p == pytest.approx(2 / 64)
    mirrored = compare(losses, tasks, wins, tasks)
    assert (mirrored.difference, mirrored.verdict, mirrored.p) == (-1.0, "worse", pytest.approx(2 / 64))


def test_pairing_detects_a_small_gain_despite_task_spread() -> None:
    """Contract: a small consistent gain over tasks of very different difficulty is detected; without a gain the verdict is
    undecided."""
    rng = np.random.default_rng(0)
    hard, tasks = rng.random(100), [f"t{i}" for i in range(100)]
    gain = compare(hard + 0.05 + rng.normal(0, 0.02, 100), tasks, hard, tasks)
    assert gain.verdict == "better"
    assert gain.p < 0.01
    none = compare(hard + rng.normal(0, 0.02, 100), tasks, hard, tasks)
    assert none.verdict == "undecided"
    assert none.p > 0.05


def test_equal_scores_are_undecided() -> None:
    """Contract: the interval is [0, 0] and p = 1."""
    found = compare([1.0, 0.0, 1.0], list("abc"), [1.0, 0.0, 1.0], list("abc"))
    assert (found.difference, found.low, found.high, found.p, found.verdict) == (0.0, 0.0, 0.0, 1.0, "undecided")


def test_comparison_by_cluster_is_more_conservative() -> None:
    """Contract: signs flip by cluster: ten tasks of one cluster are one observation."""
    tasks = [f"t{i}" for i in range(30)]
    clusters = {task: str(i // 10) for i, task in enumerate(tasks)}
    ones, zeros = [1.0] * 30, [0.0] * 30
    assert compare(ones, tasks, zeros, tasks).p < 0.01
    assert compare(ones, tasks, zeros, tasks, clusters=clusters).p == pytest.approx(2 / 2**3)


def test_false_positive_rate_is_nominal() -> None:
    """Contract: two equal models differ significantly in about 5 % of panels, by p and by the interval."""
    tasks = [f"t{i // 2}" for i in range(120)]
    positives = np.zeros(2)
    for trial in range(200):
        rng = np.random.default_rng(trial)
        a, b = (rng.random((2, 120)) < 0.5).astype(float)
        found = compare(a, tasks, b, tasks, resamples=400, seed=trial)
        positives += [found.p < 0.05, found.verdict != "undecided"]
    # 200 trials at 5 %: 10 expected, standard deviation 3.
    assert positives.max() <= 20
    assert positives.min() >= 2


@pytest.mark.parametrize(
    ("tasks_a", "tasks_b", "message"),
    [
        (list("abc"), list("abd"), r"1 tasks only the first has \(such as c\); 1 tasks only the second has \(such as d\)"),
        (list("abc"), list("abb"), r"only the first has \(such as c\)"),
    ],
)
def test_comparison_of_different_tasks_is_rejected(tasks_a: list[str], tasks_b: list[str], message: str) -> None:
    """Contract: the message names tasks that are not common."""
    with pytest.raises(StatisticsError, match=message):
        compare([1.0] * 3, tasks_a, [0.0] * 3, tasks_b)


@pytest.mark.parametrize(
    ("values", "tasks", "clusters", "message"),
    [
        ([], [], None, "no attempts"),
        ([1.0], ["a", "b"], None, "1 values were given for 2"),
        ([1.0, math.nan], ["a", "b"], None, "task b has a value that is not finite"),
        ([1.0, 0.0], ["a", "a"], None, "at least two clusters"),
        ([1.0, 0.0], ["a", "b"], {"a": "x"}, "task b belongs to no cluster"),
    ],
)
def test_invalid_samples_are_rejected(
    values: list[float], tasks: list[str], clusters: dict[str, str] | None, message: str
) -> None:
    with pytest.raises(StatisticsError, match=message):
        mean_interval(values, tasks, clusters=clusters)
