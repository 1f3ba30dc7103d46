"""Learning curves of Stable-Baselines3's agents and of ours at the same steps, and whether several of each agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import t

from stages.control.rounds import Rounds

SEEDS, POINTS = 5, 5
"""Runs of each side, and evaluations of each run, after equal numbers of steps."""
SURE = 0.99


def our_curve(training: Rounds, evaluate: Callable[[Any], float]) -> list[float]:
    """What `evaluate` says of the greedy policy after each round of the run."""
    found = []
    while not training.done:
        training.round()
        found.append(evaluate(training.agent.greedy))
    return found


def baseline_curve(model: Any, steps: int, evaluate: Callable[[], float]) -> list[float]:
    """What `evaluate` says of a Stable-Baselines3 model after each of POINTS equal parts of `steps`, once the updates due by then
    are done."""
    from stable_baselines3.common.callbacks import BaseCallback

    found: list[float] = []

    class Evaluations(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps >= (len(found) + 1) * steps // POINTS:
                found.append(evaluate())

        def _on_training_end(self) -> None:
            self._on_rollout_start()

    model.learn(steps, callback=Evaluations())
    assert len(found) == POINTS
    return found


def differences(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Of curves [R, E] of equally many runs: mean difference and half its SURE interval (Student's t), for the area under the
    curve (the mean over evaluations) and for the end."""
    found = {}
    for name, part in (("area", slice(None)), ("end", slice(-1, None))):
        one, other = (np.array(curves)[:, part].mean(1) for curves in (ours, theirs))
        count = len(one)
        error = np.sqrt((one.var(ddof=1) + other.var(ddof=1)) / count)
        found[name] = float(one.mean() - other.mean()), float(t.ppf(0.5 + SURE / 2, 2 * count - 2) * error)
    return found


def assert_curves_agree(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], slack: float, learnt: float) -> None:
    """Areas and ends differ by no more than their intervals and `slack`, and both sides end above `learnt`."""
    found = differences(ours, theirs)
    for name, (difference, half) in found.items():
        assert abs(difference) <= half + slack, (name, found, ours, theirs)
    ends = [float(np.array(curves)[:, -1].mean()) for curves in (ours, theirs)]
    assert min(ends) > learnt, (ends, ours, theirs)
