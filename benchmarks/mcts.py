"""mcts: steps annotated per second by tree search on `search`, against the same search with one-by-one `generate`.

`annotation` times the parts of the stage annotate for 200 tasks at 32 iterations.

The other side runs the same tree code on a naive engine that serves one request at a time by `model.generate` on the whole text.
Its rate does not depend on the number of trees, so it grows fewer of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.measure import Options, Result, Side, alternate, fastest, rounded
from benchmarks.models import load
from benchmarks.processes import ALONE, apart, candidates, own_layout, share
from benchmarks.search_domain import SearchTasks, search_tasks, weights
from stages.runtime.team import Team

AGAINST = "the same search, one model.generate per request"
TASKS, ITERATIONS = 200, 32
PARTS = ("search_s", "labels_s", "value_model_s")
"""Of `annotation`."""


class OneByOne:
    """`stages.engine.engine.Engine` without a cache, slots or batches."""

    def __init__(self, model: Any, end_of_turn: int, pad: int) -> None:
        self.model, self.end_of_turn, self.pad = model, end_of_turn, pad
        self._tokens: dict[int, list[int]] = {}
        self._queue: list[tuple[int, Any]] = []
        self._next = 0
        self._counters = {"sampled_tokens": 0, "fed_tokens": 0, "forward_passes": 0, "forked_tokens": 0}

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def open(self, token_ids: Sequence[int], prefix: tuple[int, ...] | None = None) -> int:
        self._next += 1
        self._tokens[self._next] = [*(prefix or ()), *token_ids]
        return self._next

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        self._tokens[session].extend(token_ids)

    def request(self, session: int, key: int, sampling: Any) -> None:
        self._queue.append((session, sampling))

    def snapshot(self, session: int) -> tuple[int, ...]:
        return tuple(self._tokens[session])

    def fork(self, session: int, count: int) -> list[int]:
        return [self.open(self._tokens[session]) for _ in range(count)]

    def close(self, session: int) -> None:
        del self._tokens[session]

    def advance(self) -> list[Any]:
        """The oldest request's turn."""
        import torch
        from transformers import GenerationConfig

        from stages.engine.engine import Turn

        if not self._queue:
            return []
        session, sampling = self._queue.pop(0)
        tokens = self._tokens[session]
        room = min(sampling.max_tokens, self.model.config.max_position_embeddings - len(tokens))
        config = GenerationConfig(
            max_new_tokens=room,
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            eos_token_id=self.end_of_turn,
            pad_token_id=self.pad,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            output = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
            drawn = output.sequences[0, len(tokens) :]
            logs = torch.cat(output.logits).log_softmax(-1).gather(-1, drawn[:, None])[:, 0]
        turn = Turn(session, tuple(drawn.tolist()), tuple(logs.tolist()), "stop" if drawn[-1] == self.end_of_turn else "length")
        tokens.extend(turn.token_ids)
        return [turn]


def side(label: str, engine: Any, chat: Any, tasks: SearchTasks, count: int, options: Options, team: Team) -> Side:
    """Grow this process's share of `count` trees with `engine`; the amount is the number of annotated steps."""
    from stages.agent.rollout import EnvironmentPool
    from stages.annotation.search import Search

    params = tasks.params.section("annotate", "search")
    params = params.model_copy(update={"iterations": options.size(params.iterations, 2)})
    pool = EnvironmentPool(tasks.make)
    numbers = iter(range(10**9))

    def run() -> float:
        # A new seed for each run.
        search = Search(engine, chat, pool, params, next(numbers), tasks.params.model.max_length)
        trees = search.grow(share(tasks.tasks[:count], team))
        return sum(len(tree.nodes) - 1 for tree in trees)

    return Side(label, run)


def ours(options: Options, tasks: SearchTasks, count: int, team: Team = ALONE) -> Side:
    from stages.agent.chat import Chat
    from stages.engine.torch_engine import TorchEngine

    model, tokenizer = load(tasks.weights, "eager")
    chat, params = Chat(tokenizer), tasks.params
    engine = TorchEngine(model, [chat.end_of_turn], params.resources.slots, params.model.max_length)
    return side("bellwether", engine, chat, tasks, count, options, team)


def theirs(options: Options, tasks: SearchTasks, count: int, team: Team = ALONE, attention: str = "sdpa") -> Side:
    from stages.agent.chat import Chat

    model, tokenizer = load(tasks.weights, attention)
    chat = Chat(tokenizer)
    engine = OneByOne(model, chat.end_of_turn, chat.pad_token)
    return side(f"generate {attention}", engine, chat, tasks, count, options, team)


def measure(options: Options) -> dict[str, Result]:
    tasks = search_tasks(options, weights(options))
    trees, fewer = options.size(128, 2), options.size(4, 1)
    builds = [partial(theirs, options, tasks, fewer, attention=attention) for attention in ("sdpa", "eager")]
    other, trials = fastest(candidates(builds, options, distributed=False), options)
    mine = apart(partial(ours, options, tasks, trees), own_layout(options))
    samples = alternate(mine, other, options)
    notes = {
        "trees": {"ours": trees, "theirs": fewer},
        "weights": tasks.named,
        "ours": mine.label,
        "theirs": other.label,
        "trials": trials,
    }
    return {"mcts": Result("steps/s", AGAINST, "rate", *samples, notes=notes)}


def annotation(options: Options) -> list[dict[str, float]]:
    """Seconds of the stage annotate for TASKS tasks of `search` at ITERATIONS iterations (trees, labels and pairs, step-value
    model); a row for each of at most three runs."""
    from stages.agent.chat import Chat
    from stages.engine.torch_engine import TorchEngine

    tasks = search_tasks(options, weights(options))
    params = tasks.params.section("annotate", "search")
    params = params.model_copy(update={"iterations": options.size(ITERATIONS, 2)})
    model, tokenizer = load(tasks.weights, "eager")
    chat = Chat(tokenizer)
    engine = TorchEngine(model, [chat.end_of_turn], tasks.params.resources.slots, tasks.params.model.max_length)
    chosen = replace(tasks, tasks=tasks.tasks[: options.size(TASKS, 4)])
    return [_annotated(chosen, params, model, engine, chat, seed) for seed in range(min(options.times, 3))]


def _annotated(tasks: SearchTasks, params: Any, model: Any, engine: Any, chat: Any, seed: int) -> dict[str, float]:
    from stages.agent.rollout import EnvironmentPool
    from stages.annotation.derived import value_head
    from stages.annotation.labels import label_rows
    from stages.annotation.pairs import pair_rows
    from stages.annotation.paths import value_paths
    from stages.annotation.search import Search
    from stages.engine.attention import use_attention
    from stages.values.fitting import TaskSplit
    from stages.values.step_value import StepValueModel, fit

    chosen, times = tasks.tasks, [time.monotonic()]
    with EnvironmentPool(tasks.make) as pool:
        search = Search(engine, chat, pool, params, seed, tasks.params.model.max_length)
        starts = range(0, len(chosen), params.chunk)
        rows = [row for start in starts for tree in search.grow(chosen[start : start + params.chunk]) for row in tree.rows()]
    times.append(time.monotonic())
    labels, pairs = label_rows(rows, params), pair_rows(rows, params)
    times.append(time.monotonic())
    backbone = copy.deepcopy(model.base_model).float()
    use_attention(backbone, "sdpa")
    paths = value_paths(rows, params)
    train, _ = TaskSplit.of((path.task_id for path in paths), params.value_model.valid_share, seed).parts(paths)
    values = StepValueModel(backbone, value_head(params))
    fit(values, train, params.value_model, seed, tasks.params.resources.tokens_per_batch)
    times.append(time.monotonic())
    parts = {name: rounded(end - start) for name, (start, end) in zip(PARTS, pairwise(times), strict=True)}
    sizes = {"tasks": len(chosen), "iterations": params.iterations, "steps": len(rows) - len(chosen)}
    return {**sizes, "labels": len(labels), "pairs": len(pairs), **parts, "seconds": rounded(times[-1] - times[0])}
