"""profiles: breakdown of our time in the end-to-end scenarios, as shares of wall time.

One warm-up, then one run under Python's profiler, which attributes the main thread's time to calls into torch (with its threads).
Environments act in another thread; the time the main thread waits for them is a part.
"""

from __future__ import annotations

import cProfile
import pstats
import re
from collections.abc import Callable, Mapping

from benchmarks import mcts, rl_iteration, rollout_multi_turn, search_domain, train_step
from benchmarks.measure import Options, Side, rounded
from benchmarks.models import sizes

REST = "python"
PARTS = {
    "backward pass": r"run_backward",
    "weight products": r"_nn\.linear>|addmm|torch\.mm>",
    "attention": r"matmul|bmm|softmax|scaled_dot_product",
    "norms, activations": r"rms_norm|silu|rsqrt|'(add_?|mul_?|pow|mean|neg|exp)' of 'torch",
    "moving tensors": r"index_copy_|index_select|torch\.(cat|stack|where|from_numpy|tensor|gather|embedding)>"
    r"|'(copy_|clone|contiguous|reshape|to|float|masked_fill_?|scatter_?|gather|repeat)' of 'torch",
    "waiting for environments": r"'acquire' of '_thread",
}
"""Part -> pattern of function names, first match first; the rest is Python, including token sampling by numpy."""


def shares(times: Mapping[str, float]) -> dict[str, float]:
    """Part -> share of the total time. times: seconds in each function itself, by name."""
    found = dict.fromkeys([*PARTS, REST], 0.0)
    for name, seconds in times.items():
        found[next((part for part, pattern in PARTS.items() if re.search(pattern, name)), REST)] += seconds
    return {part: rounded(seconds / sum(found.values()), 3) for part, seconds in found.items()}


def profiled(side: Side) -> dict[str, float]:
    side.run()
    side.before()
    profile = cProfile.Profile()
    profile.enable()
    side.run()
    profile.disable()
    statistics: Mapping[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    times: dict[str, float] = {}
    for (_, _, name), (_, _, own, *_) in statistics.items():
        times[name] = times.get(name, 0.0) + own
    return shares(times)


def sides(options: Options) -> dict[str, Callable[[], Side]]:
    """Scenario -> factory of the side to profile."""
    tasks = search_domain.search_tasks(options, search_domain.weights(options))
    work = rollout_multi_turn.work(options)
    prompt, tasks_per_step, group = options.size(192, 16), options.size(4, 2), options.size(8, 2)
    made: dict[str, Callable[[], Side]] = {}
    for size in sizes(options):
        made[f"rollout_multi_turn@{size}"] = lambda size=size: rollout_multi_turn.ours(options, size, work)  # type: ignore[misc]
    made["mcts"] = lambda: mcts.ours(options, tasks, options.size(128, 2))
    made["rl_iteration"] = lambda: rl_iteration.ours(options, tasks)
    for size in sizes(options):
        made[f"train_step_p{prompt}@{size}"] = lambda size=size: Side(  # type: ignore[misc]
            "bellwether", train_step.Ours(options, size, prompt, options.size(train_step.ANSWER, 8), tasks_per_step, group).run
        )
    return made


def measure(options: Options) -> list[dict[str, float | str]]:
    """A row per scenario: the share of each part."""
    return [{"scenario": name, **profiled(make())} for name, make in sides(options).items()]
