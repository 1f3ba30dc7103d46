"""A small log of narrow calls, whose kinds, parts and right answers are known, for tests of conversions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tiny import make_tiny_policy

from stages.conversion.call_log import CallLog
from stages.conversion.curate_calls import part_of

FAMILIES = {
    "intent": ("classify this wish please", "wish {}"),
    "field": ("extract every field from", "field {}"),
    "date": ("shift that calendar day by", "date {}"),
    "unit": ("convert length value into metres", "unit {}"),
}


def call_of(family: str, number: int, **more: Any) -> dict[str, Any]:
    prompt, response = FAMILIES[family]
    numbers = " ".join(str(number % prime) for prime in (97, 89, 83, 79, 73))
    row = {
        "trace": f"{family}-{number:04d}",
        "call": 0,
        "prompt": [{"role": "user", "content": f"{prompt} {numbers}"}],
        "response": response.format(number % 3),
        "outcome": 1,
        "provenance": "llm",
        "fallback": "",
        "latency_ms": 1.0,
        "tokens": 9,
    }
    return {**row, **more}


def logged(count: int, families: Iterable[str], start: int = 0) -> Iterator[dict[str, Any]]:
    for number in range(start, start + count):
        for family in families:
            call = call_of(family, number)
            yield {**call, "prompt": [{"role": "user", "content": f"{FAMILIES[family][0]} {number % 3} {number}"}]}


def strange(count: int, part: str, start: int = 0) -> list[dict[str, Any]]:
    """Calls of one part (train, valid, test) whose prompts resemble no other's, with an answer as those of `intent`."""
    found, number = [], start
    while len(found) < count:
        if part_of(trace := f"strange-{number:04d}", 0) == part:
            prompt = [{"role": "user", "content": f"zebra{number} quokka{number} okapi{number}"}]
            found.append(call_of("intent", number, trace=trace, prompt=prompt))
        number += 1
    return found


def write_log(path: Path, calls: Iterable[dict[str, Any]]) -> None:
    """Log calls without masking; those whose outcome is None have none reported."""
    log = CallLog(path, None)
    for call in calls:
        more = {name: call[name] for name in ("provenance", "fallback", "tokens")}
        log.call(call["trace"], call["prompt"], call["response"], 1.0, **more)
        if call["outcome"] is not None:
            log.outcome(call["trace"], bool(call["outcome"]))


def small_settings(policy: Path, **more: Any) -> dict[str, Any]:
    """Settings of a conversion of such a log beside it, from a model with twice the layers to the one in the folder `policy`, in
    two clusters."""
    large = policy.with_name("large")
    if not large.exists():
        make_tiny_policy(large, num_hidden_layers=4)
    return {
        **{"log": "calls.jsonl", "key": "key", "teacher": str(large), "out": "out", "max_length": 96, "max_tokens": 12},
        "curate": {"min_examples": 40, "dedup_jaccard": 1.0},
        "cluster": {"k": 2, "min_cluster": 30},
        "select": {"candidates": {"tiny": {"path": str(policy)}}, "max_latency_ms": 1e6},
        "specialise": {"epochs": 12, "learning_rate": 0.01, "batch_tokens": 512, "kd_weight": 0.0},
        "router": {"epsilon": 0.5, "min_confidence": 0.3, "min_calls": 2},
        "iterate": {"every_n_calls": 30},
        **more,
    }
