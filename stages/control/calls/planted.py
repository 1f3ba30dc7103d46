"""Converts a planted log and measures what the log's kinds and right answers allow to measure.

Three kinds of calls have answers that follow from the prompt (an intent, a field as JSON, a date), one is open talk, whose
answers a small model can't foresee and should leave to the large one. The large model is a program; its size is the base
model's. Some prompts have addresses of people, which must not reach any output.

Run as `python -m stages.control.calls.planted --settings FILE --result FILE` by the board (stages/control/problems.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from stages.control.calls.settings import PlantedCalls
from stages.conversion.call_log import CallLog
from stages.conversion.masking import Masker, load_key
from stages.conversion.rounds import convert
from stages.conversion.router import LARGE, CallRouter, Routed
from stages.conversion.settings import Conversion, CurateCalls
from stages.runtime.command import command
from stages.seeding import stream

REPOSITORY = Path(__file__).resolve().parents[3]
BASE = REPOSITORY / "data/base"
KINDS = ("intent", "field", "date", "talk")
VERBS = ("take", "open", "put", "find", "drop", "close")
NOUNS = ("key", "lamp", "box", "door", "bell", "drum", "jar", "ring")
PLACES = ("kitchen", "barn", "river", "room", "garden", "cellar")
MAX_LENGTH, MAX_TOKENS = 160, 24
SHIFTED = "intent"
"""The kind that is worded anew."""


def call_of(kind: str, rng: Random, shifted: bool = False) -> tuple[str, str]:
    """Prompt and right answer of one call."""
    number, noun, other = rng.randrange(1000, 10_000), *rng.sample(NOUNS, 2)
    sender = f" from ann{number}@mail.org" if rng.random() < 0.1 else ""
    if kind == "intent":
        verb, place = rng.choice(VERBS), rng.choice(PLACES)
        told = (
            f"somebody at the {place} says: {verb} that {noun}. name it" if shifted else f"wish: {verb} the {noun} in the {place}"
        )
        return f"ticket {number}{sender}. {told}", f"intent {verb}"
    if kind == "field":
        first, second = rng.randrange(10, 100), rng.randrange(10, 100)
        return f"form {number}{sender}. {noun} {first}, {other} {second}. fields of {noun}", json.dumps({noun: first})
    if kind == "date":
        day, later = rng.randrange(1, 20), rng.randrange(1, 9)
        return f"calendar {number}{sender}. day {day} and {later} days later", f"date {day + later}"
    words = [rng.choice((*NOUNS, *PLACES, *VERBS)) for _ in range(4)]
    return f"letter {number}{sender}. tell a story with {noun} and {other}", f"once a {' '.join(words)}"


def calls_of(count: int, seed: int, part: str, kinds: Sequence[str] = KINDS, shifted: bool = False) -> list[dict[str, Any]]:
    """`count` calls with their kinds, each a trace of its own."""
    made = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        prompt, answer = call_of(kind, stream("conversion.planted", seed, part, number), shifted)
        made.append(
            {"kind": kind, "trace": f"{part}-{number}", "prompt": [{"role": "user", "content": prompt}], "response": answer}
        )
    return made


def write_log(log: CallLog, calls: Sequence[dict[str, Any]]) -> None:
    for call in calls:
        log.call(call["trace"], call["prompt"], call["response"], 1.0, tokens=len(call["response"].split()))
        log.outcome(call["trace"], True)


def small_model(layers: int, folder: Path) -> None:
    """The base model's first layers, as a model. Raises ValueError if it has fewer."""
    from stages.agent.policy import load_policy, save_policy

    policy = load_policy(BASE)
    model = policy.model
    if layers > model.config.num_hidden_layers:
        raise ValueError(f"layers is {layers}, and the base model has {model.config.num_hidden_layers}")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    save_policy(model, policy.tokenizer, folder)


def settings_of(given: PlantedCalls, folder: Path) -> Conversion:
    return Conversion.model_validate(
        {
            "log": "calls.jsonl",
            "key": "key",
            "teacher": str(BASE),
            "out": "out",
            "max_length": MAX_LENGTH,
            "max_tokens": MAX_TOKENS,
            "seed": given.seed,
            "curate": {"min_examples": 100},
            "cluster": {"k": given.k, "k_range": [2, 8], "min_cluster": 50, "seed": given.seed},
            "select": {"candidates": {"small": {"path": str(folder / "small")}}, "max_latency_ms": 1e9},
            "specialise": {"epochs": given.epochs, "learning_rate": given.learning_rate, "kd_weight": 0.0},
            "router": {"epsilon": given.epsilon},
            "iterate": {"every_n_calls": given.shifted},
        }
    )


def fallback(routed: Sequence[Routed]) -> float:
    """Share of calls that the large model answers."""
    return sum(one.by == LARGE for one in routed) / max(len(routed), 1)


def _leaks(folder: Path) -> int:
    """Files of an output that hold a planted address."""
    return sum(b"@mail.org" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def _measured(router: CallRouter, calls: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """What the router does with fresh calls of the first wordings."""
    from sklearn.metrics import adjusted_rand_score

    routed = router.route(calls)
    own = [(one.answer.text.strip(), call["response"]) for one, call in zip(routed, calls, strict=True) if one.answer is not None]
    yield "kept", len(own) / len(calls)
    yield "right", float(np.mean([said == right for said, right in own])) if own else 0.0
    yield "rand_index", float(adjusted_rand_score([call["kind"] for call in calls], router.clusters.nearest(calls)[0]))


def planted(given: PlantedCalls) -> dict[str, float]:
    """One conversion; see the module. Figures: share of fresh calls that specialists keep and how many of these are right, the
    cost of a call, leaks, agreement of clusters and kinds, and fallbacks on the new wording before and after it was logged."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        small_model(given.layers, folder / "small")
        settings = settings_of(given, folder)
        log = CallLog(folder / settings.log, Masker(load_key(folder / settings.key), CurateCalls().pii))
        write_log(log, calls_of(given.calls, given.seed, "first"))
        report = convert(settings, folder)
        new, fresh = (calls_of(200, given.seed, part, (SHIFTED,), shifted=True) for part in ("before", "after"))
        found = {"replaceable_share": report["replaceable_share"], "cost_per_call": report["cost_per_call"]}
        first = CallRouter.load(folder / settings.out)
        found |= dict(_measured(first, calls_of(400, given.seed, "fresh")))
        found["fallback_before"] = fallback(first.route(new))
        write_log(log, calls_of(given.shifted, given.seed, "second", (SHIFTED,), shifted=True))
        if given.rounds == 2:
            convert(settings, folder)
        found["fallback_after"] = fallback(CallRouter.load(folder / settings.out).route(fresh))
        return {**found, "leaks": float(_leaks(folder / settings.out) + (b"@mail.org" in (folder / settings.log).read_bytes()))}


@command
def main() -> int:
    import torch

    from stages.control.one_run import one_run

    return one_run("control", __doc__, PlantedCalls, planted, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
