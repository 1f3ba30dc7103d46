"""generate_ragged: tokens per second for single turns with log-normal lengths (maximum 4 times the mean), against transformers'
`generate`, where a batch decodes until its longest row is done.

Both sides take the sequences in the same order and stop each at its length in the table. Batch size, cache and attention of
`generate` are chosen by trial.
"""

from __future__ import annotations

import math
from functools import partial
from statistics import NormalDist

from benchmarks.measure import Options, Result, Side, alternate, fastest
from benchmarks.models import counting, forwarded_per_unit, load, make_model, named, sizes
from benchmarks.processes import ALONE, apart, candidates, own_layout, share
from stages.runtime.team import Team
from stages.seeding import permutation, stream

MEAN, MOST, SIGMA = 64, 4.0, 0.8
PROMPT = 32
SEQUENCES = {"1m": 256, "9m": 64, "270m": 32}
"""Fewer for the larger models, since `generate` takes minutes."""
AGAINST = "transformers generate"


def lengths(count: int, mean: int = MEAN) -> list[int]:
    """Tokens to generate, [count]: the log-normal's quantiles, none above MOST times the mean, in a fixed random order."""
    values = [math.exp(SIGMA * NormalDist().inv_cdf((index + 0.5) / count)) for index in range(count)]
    # Clipping lowers the mean, so the scale is iterated to convergence.
    scale, limit = mean * count / sum(values), MOST * mean
    for _ in range(20):
        scale *= mean * count / sum(min(scale * value, limit) for value in values)
    table = [max(1, round(min(scale * value, limit))) for value in values]
    return permutation(table, "benchmarks.lengths", count)


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Token ids of the prompts, [count, PROMPT]."""
    rng = stream("benchmarks.prompts", count)
    return [[rng.randrange(vocabulary) for _ in range(PROMPT)] for _ in range(count)]


def ours(options: Options, size: str, table: list[int], slots: int, team: Team = ALONE) -> Side:
    from stages.engine.engine import Sampling
    from stages.engine.torch_engine import TorchEngine
    from stages.seeding import key64

    model, tokenizer = load(make_model(options, size), "sdpa", options.device, options.precision)
    engine = TorchEngine(model, [], slots, PROMPT + max(table) + 1)
    own = share(list(enumerate(zip(prompts(len(table), len(tokenizer)), table, strict=True))), team)
    expected = sum(length for _, (_, length) in own)

    def run() -> float:
        for number, (text, length) in own:
            engine.request(engine.open(text), key64("benchmarks", number), Sampling(max_tokens=length))
        made = left = 0
        while left < len(own):
            for turn in engine.advance():
                made, left = made + len(turn.token_ids), left + 1
                engine.close(turn.session)
        if made != expected:
            raise RuntimeError(f"{made} tokens were generated, expected {expected}")
        return made

    return counting(Side("bellwether", run), model)


def theirs(
    options: Options,
    size: str,
    table: list[int],
    team: Team = ALONE,
    rows: int = 64,
    attention: str = "sdpa",
    cache: str | None = None,
) -> Side:
    """`generate` on batches of `rows` sequences."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    model, tokenizer = load(make_model(options, size), attention, options.device, options.precision)
    texts = torch.tensor(share(prompts(len(table), len(tokenizer)), team))
    wanted = torch.tensor(share(table, team))

    class AtLength(StoppingCriteria):
        """Ends each row at its length in the table."""

        def __init__(self, rows: torch.Tensor) -> None:
            self.rows = rows

        def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            return input_ids.shape[1] - PROMPT >= self.rows

    def run() -> float:
        made = 0
        with torch.inference_mode():
            for start in range(0, len(wanted), rows):
                part = wanted[start : start + rows]
                config = GenerationConfig(
                    max_new_tokens=int(part.max()),
                    do_sample=True,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    eos_token_id=None,
                    pad_token_id=tokenizer.pad_token_id,
                    cache_implementation=cache,
                    disable_compile=True,
                )
                ids = texts[start : start + rows]
                output = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    stopping_criteria=StoppingCriteriaList([AtLength(part)]),
                )
                if output.shape[1] != PROMPT + int(part.max()):
                    raise RuntimeError(f"generate produced {output.shape[1] - PROMPT} tokens, expected {int(part.max())}")
                made += int(part.sum())
        return made

    model.generation_config.eos_token_id = None
    return counting(Side(f"transformers {attention} cache={cache or 'dynamic'} rows={rows}", run), model)


def measure_size(options: Options, size: str, mean: int = MEAN) -> Result:
    count = options.size(SEQUENCES.get(size, 0), 8)
    table, slots = lengths(count, options.size(mean, 4)), options.size(min(64, count), 4)
    mine = apart(partial(ours, options, size, table, slots), own_layout(options))
    settings = [(rows, "sdpa", None) for rows in dict.fromkeys((slots, len(table)))]
    settings += [(slots, "eager", None), (slots, "sdpa", "static")]
    builds = [
        partial(theirs, options, size, table, rows=rows, attention=attention, cache=cache) for rows, attention, cache in settings
    ]
    other, trials = fastest(candidates(builds, options, distributed=False), options)
    samples = alternate(mine, other, options)
    notes = {
        "sequences": len(table),
        "slots": slots,
        "lengths": {"mean": sum(table) / len(table), "max": max(table), "prompt": PROMPT},
        "trials": trials,
        "ours": mine.label,
        "theirs": other.label,
        "tokens_forwarded_per_action_token": {"ours": forwarded_per_unit(mine), "theirs": forwarded_per_unit(other)},
    }
    mine.close()
    other.close()
    return Result("tokens/s", AGAINST, "rate", *samples, notes=notes)


def measure(options: Options) -> dict[str, Result]:
    return {named("generate_ragged", size): measure_size(options, size) for size in sizes(options)}
