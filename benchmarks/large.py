"""`python -m benchmarks.large`: a model with the layers of Qwen2.5-0.5B on a CUDA device, in bfloat16, compared with TRL.

Multi-turn rollouts and training steps (full or LoRA, with or without gradient checkpointing) with peak device memory, written
to reports/benchmarks/large.json. Random weights; no inference server on either side. Without a device nothing is written;
`--device cpu --quick` is a smoke test on tiny sizes.

On both sides, rollouts use bfloat16 weights, full training float32 weights with bfloat16 compute, LoRA frozen bfloat16 weights
and float32 factors. TRL's rollouts run at one setting: sdpa with a dynamic cache. Ours also holds the frozen reference model, as
in the rl stage.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import rollout_multi_turn, train_step, trl_side
from benchmarks.measure import Options, Result, Side, alternate, fastest, rounded, timed
from benchmarks.models import SHAPES, load, make_model
from benchmarks.processes import ALONE
from benchmarks.rollout_multi_turn import Work
from benchmarks.suite import machine, write_json
from benchmarks.train_step import Gradient, Method, Ours, Theirs

OUT = Path("reports/benchmarks/large.json")
WORK = Work(tasks=16, group=8, turns=4, prompt=256, action=64, observation=64)
PROMPTS, ANSWER = (256, 1024), 256
"""Tokens in a training step's prompts and answers."""
RANK = 32
TOKENS_PER_BATCH = 16384
"""Our micro-batch size."""
METHODS = {
    "full": Method(0, False, TOKENS_PER_BATCH),
    "full_checkpointing": Method(0, True, TOKENS_PER_BATCH),
    f"lora{RANK}": Method(RANK, False, TOKENS_PER_BATCH),
    f"lora{RANK}_checkpointing": Method(RANK, True, TOKENS_PER_BATCH),
}
ROLLOUTS = "rollout_multi_turn"
TOLERANCE = 0.1
"""Largest relative difference of losses and gradients; both sides round to bfloat16 in every layer."""


class Device:
    """The device. Peak memory is None on a CPU."""

    def __init__(self, name: str) -> None:
        self.on = name != "cpu"

    def wait(self) -> None:
        """Synchronise."""
        import torch

        if self.on:
            torch.cuda.synchronize()

    def held(self) -> int:
        """Bytes allocated now, after garbage collection."""
        import torch

        gc.collect()
        if not self.on:
            return 0
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_allocated())

    def peak(self, side: Side, rest: int, once: bool) -> int | None:
        """Peak bytes allocated while `side` runs, minus `rest`, allocated before.

        once: one run is enough. An optimiser makes its state in the first of two.
        """
        import torch

        self.held()
        if self.on:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(1 if once else 2):
            side.run()
        return int(torch.cuda.max_memory_allocated()) - rest if self.on else None

    def waiting(self, side: Side) -> Side:
        """`side` with runs that end with a synchronisation."""

        def run() -> float:
            amount = side.run()
            self.wait()
            return amount

        return replace(side, run=run)

    def facts(self) -> dict[str, Any]:
        """Name and memory of the device, and torch's CUDA version."""
        import torch

        if not self.on:
            return {"device": "cpu"}
        properties = torch.cuda.get_device_properties(0)
        return {"device": properties.name, "device_bytes": properties.total_memory, "cuda": torch.version.cuda}


def compared(
    side: Side, candidates: Sequence[Callable[[], Side]], options: Options, before: int, kind: str, unit: str, against: str
) -> dict[str, Any]:
    """Times and peak memory of `side` and of the fastest candidate.

    before: bytes allocated before either side existed. Memory that ours holds between runs is not counted as theirs.
    """
    device = Device(options.device)
    mine = device.waiting(side)
    peaks = {"ours": device.peak(mine, before, kind == "rate")}
    own = device.held()
    tell(f"{mine.label}: {timed(mine).rate:.4g} per second")
    other, trials = fastest([lambda make=make: device.waiting(make()) for make in candidates], options, tell)
    peaks["theirs"] = device.peak(other, own, kind == "rate")
    samples = alternate(mine, other, options, warm=True)
    result = Result(unit, against, kind, *samples, notes={"trials": trials, "theirs": other.label})
    return {**result.raw(), "peak_bytes": peaks}


def rollouts(options: Options, size: str) -> dict[str, Any]:
    work = Work(2, 2, 2) if options.quick else WORK
    before = Device(options.device).held()
    mine = rollout_multi_turn.ours(options, size, work)
    candidates = [partial(rollout_multi_turn.theirs, options, size, work, ALONE)]
    outcome = compared(mine, candidates, options, before, "rate", "action tokens/s", rollout_multi_turn.AGAINST)
    return {**outcome, "work": asdict(work)}


def training_step(options: Options, size: str, prompt: int, method: Method) -> dict[str, Any]:
    """Raises DisagreementError if the two sides do not compute the same step."""
    tasks, group, answer = options.size(4, 2), options.size(8, 2), options.size(ANSWER, 8)
    before = Device(options.device).held()
    mine = Ours(options, size, prompt, answer, tasks, group, method)
    gradient = mine.gradient()
    repeats = same(gradient, mine.gradient())
    # In micro-batches, since all rows may not fit at once.
    other = Theirs(options, size, mine, group, accumulate=4)
    theirs = other.gradient()
    difference, their_repeats = train_step.disagreement(gradient, theirs), same(theirs, other.gradient())
    del gradient, theirs, other
    train_step.check(difference, f"prompts of {prompt} tokens, {method}", TOLERANCE)
    candidates = [
        lambda setting=setting: Theirs(options, size, mine, group, *setting).side()  # type: ignore[misc]
        for setting in train_step.SETTINGS
    ]
    outcome = compared(Side("bellwether", mine.run), candidates, options, before, "seconds", "s", train_step.AGAINST)
    work = {
        "rows": tasks * group,
        "prompt": prompt,
        "answer": answer,
        **asdict(method),
        "prefixes_shared": mine.maker.models.sharing,
        "gradient_repeats": {"ours": repeats, "theirs": their_repeats},
    }
    return {**outcome, "work": work, "difference": {name: rounded(value) for name, value in difference.items()}}


def same(first: Gradient, second: Gradient) -> bool:
    """Whether losses and gradients are equal bit for bit."""
    return first[0] == second[0] and all(bool((value == second[1][name]).all()) for name, value in first[1].items())


def plan(options: Options) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every scenario by name."""
    size = model_size(options)
    steps = {
        f"train_step_p{prompt}_{name}": lambda prompt=prompt, method=method: training_step(options, size, prompt, method)
        for name, method in METHODS.items()
        for prompt in ((24,) if options.quick else PROMPTS)
    }
    return {ROLLOUTS: lambda: rollouts(options, size), **steps}


def model_size(options: Options) -> str:
    return "large-tiny" if options.quick else "large"


def tell(text: str) -> None:
    """Show what a scenario, which may take minutes, has measured."""
    print(f"    {text}", flush=True)


def line(outcome: dict[str, Any]) -> str:
    """A one-line summary of an outcome."""
    if "failed" in outcome:
        return f"failed: {outcome['failed']}"
    ratio = outcome["ratio"]
    parts = [
        f"ours {outcome['ours']:.4g}, theirs {outcome['theirs']:.4g} {outcome['unit']}",
        f"speed-up {ratio['median']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})",
        *(f"peak of {side} {peak / 2**30:.3g} GiB" for side, peak in outcome["peak_bytes"].items() if peak is not None),
    ]
    return ", ".join(parts)


def measure(options: Options, only: Sequence[str], out: Path | None) -> dict[str, Any]:
    """Measure the scenarios whose names start with one of `only`, in that order, and write `out` after each. Others keep earlier
    results from the same device. Returns the contents of large.json; a failed scenario is {"failed": reason}."""
    device = Device(options.device).facts()
    model, _ = load(make_model(options, model_size(options)), "sdpa")
    found: dict[str, Any] = {
        "machine": {**machine(options), **device},
        "model": {**asdict(SHAPES[model_size(options)]), "parameters": model.num_parameters()},
        "repeats": options.times,
        "warm_ups": options.warm_ups,
        "scenarios": {},
    }
    del model
    if out is not None and out.exists():
        earlier = json.loads(out.read_text(encoding="utf-8"))
        if earlier["machine"]["device"] == device["device"]:
            found["scenarios"] = earlier["scenarios"]
    scenarios = plan(options)
    for name in dict.fromkeys(name for prefix in only for name in scenarios if name.startswith(prefix)):
        try:
            outcome = scenarios[name]()
        except (RuntimeError, ValueError) as error:
            outcome = {"failed": f"{type(error).__name__}: {error}"}
        found["scenarios"][name] = {**outcome, "commit": found["machine"]["commit"]}
        print(f"  {name}: {line(outcome)}", flush=True)
        if out is not None:
            write_json(out, found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only with --quick")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one repeat: a smoke test")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="prefixes of scenario names")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help=f"file to write (default: {OUT}; none with --quick)")
    parser.add_argument("--scratch", type=Path, help="folder for about 2 GB of temporary files (default: .bellwether)")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.quick:
        parser.error("this model takes hours on a CPU: add --quick or use a CUDA device")
    from stages.params import load_params
    from stages.runtime.workers import quiet_environment

    root = Path.cwd()
    threads = load_params(root / "params.yaml").resources.threads
    quiet_environment(threads)
    # With several devices, TRL's trainer would split its batches.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.large: no CUDA device found; nothing measured")
        return 0
    if reason := trl_side.available():
        print(f"benchmarks.large: {reason}", file=sys.stderr)
        return 1
    place = arguments.scratch or root / ".bellwether"
    place.mkdir(parents=True, exist_ok=True)
    out = arguments.out or (None if arguments.quick else OUT)
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=place) as scratch:
        options = Options(root, Path(scratch), arguments.quick, arguments.repeats, threads, 1, arguments.device, "bfloat16")
        found = measure(options, arguments.only, out)
    if out is not None:
        print(f"benchmarks.large: wrote {out}")
    return int(any("failed" in outcome for outcome in found["scenarios"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
