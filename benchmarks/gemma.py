"""The scenarios of generation and training with the shape of Gemma 3 270M: 262,144 words, bfloat16, LoRA of rank 16.

Random weights; lengths are those of an episode of factbook. prefill: prompts read at once, against the model's own forward pass
over them, padded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks import engine_limit, generate_ragged, rollout_multi_turn, train_step
from benchmarks.large import TOLERANCE
from benchmarks.measure import Options, Result, Side, alternate, fastest
from benchmarks.models import load, make_model, named
from benchmarks.processes import ALONE, apart, candidates, own_layout, share
from benchmarks.rollout_multi_turn import Work
from benchmarks.train_step import Method
from stages.runtime.team import Team
from stages.seeding import stream

SIZE = "270m"
ROWS, DECODED, MEAN = 32, 48, 32
"""Rows and tokens of the limit of decoding; mean length of single turns."""
PROMPT = 192
WORK = Work(tasks=2, group=8, turns=3, prompt=PROMPT, action=12, observation=40)
LORA = Method(rank=16, tokens_per_batch=1024)
GROUPS = (2, 4)
"""Groups of a training step, and episodes of each: both sides take seconds per row."""
REPEATS = 3


def texts(rows: int, longest: int) -> list[list[int]]:
    """Prompts of random tokens, [rows], from half of `longest` to that."""
    rng = stream("benchmarks.prefill", rows, longest)
    return [[rng.randrange(4096) for _ in range(longest // 2 + row * longest // (2 * rows))] for row in range(rows)]


def reading(options: Options, size: str, rows: int, longest: int, team: Team = ALONE) -> Side:
    """Our engine's pass over all prompts; the unit is a token."""
    from stages.engine.torch_engine import TorchEngine

    model, _ = load(make_model(options, size), "sdpa", options.device, options.precision)
    own = share(texts(rows, longest), team)
    engine = TorchEngine(model, [], len(own), longest + 8)

    def run() -> float:
        engine.read([engine.open(text) for text in own])
        engine.reset()
        return sum(map(len, own))

    return Side("bellwether", run)


def forward(options: Options, size: str, rows: int, longest: int, team: Team = ALONE, attention: str = "sdpa") -> Side:
    """The model's own forward pass over the padded prompts, with a cache and without the output layer."""
    import torch

    model, tokenizer = load(make_model(options, size), attention, options.device, options.precision)
    own = share(texts(rows, longest), team)
    width = max(map(len, own))
    ids = torch.tensor([text + [tokenizer.pad_token_id] * (width - len(text)) for text in own])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in own])

    def run() -> float:
        with torch.inference_mode():
            model.base_model(input_ids=ids, attention_mask=mask, use_cache=True)
        return sum(map(len, own))

    return Side(f"transformers {attention}", run)


def prefill(options: Options, size: str) -> Result:
    rows, longest = options.size(ROWS, 4), options.size(PROMPT, 8)
    mine = apart(partial(reading, options, size, rows, longest), own_layout(options))
    builds = [partial(forward, options, size, rows, longest, attention=kernel) for kernel in ("sdpa", "eager")]
    other, trials = fastest(candidates(builds, options, distributed=False), options)
    samples = alternate(mine, other, options)
    notes = {"rows": rows, "longest": longest, "trials": trials, "ours": mine.label, "theirs": other.label}
    mine.close()
    other.close()
    return Result("tokens/s", "transformers, forward pass", "rate", *samples, notes=notes)


def measure(options: Options) -> dict[str, Result]:
    low = replace(options, precision="bfloat16", repeats=min(options.repeats, REPEATS))
    size = "270m-tiny" if options.quick else SIZE
    work = Work(2, 2, 2) if options.quick else WORK
    prompt = low.size(PROMPT, 24)
    return {
        named("prefill", SIZE): prefill(low, size),
        named("generate_ragged", SIZE): generate_ragged.measure_size(low, size, MEAN),
        named("rollout_multi_turn", SIZE): rollout_multi_turn.measure_size(low, size, work),
        named(f"train_step_p{PROMPT}", SIZE): train_step.measure_prompt(low, size, prompt, LORA, TOLERANCE, GROUPS),
        named("engine_share_of_limit", SIZE): engine_limit.measure_size(low, size, ROWS, DECODED),
    }
