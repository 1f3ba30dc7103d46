"""Every causal language model of transformers: the engines compute its log-probabilities, or reject it by name."""

from __future__ import annotations

import re

import pytest
from families import BEGIN, CONFIGS, END, LEAN_PASS, OWN, PAGE, REASONS, RUNS, SLOTS, outcome

SAMPLE = {
    "bloom": OWN[256],
    "cohere": SLOTS,
    "deepseek_v3": OWN[256],
    "gemma2": SLOTS,
    "gemma3_text": LEAN_PASS,
    "granite": SLOTS,
    "jamba": OWN[1],
    "llama": LEAN_PASS,
    "mamba": OWN[1],
    "olmo2": SLOTS,
    "roberta": "token by token",
    "smollm3": LEAN_PASS,
    "stablelm": OWN[256],
    "xlnet": "token by token",
    "zamba2": OWN[0],
}
"""Families with what must come out, tested in every run."""


def shown(name: str) -> str:
    """What docs/families.md says of a family."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = (line.strip("|").split("|") for line in table.strip().splitlines())
    return next(row[0].strip() for row in rows if name in re.split("[ ,]+", row[2]))


@pytest.mark.parametrize("name", SAMPLE)
def test_sample_of_families(name: str) -> None:
    result = outcome(name)
    assert SAMPLE[name] in result
    assert shown(name) == (result if result in RUNS else f"refused: {REASONS[SAMPLE[name]]}")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_agrees_or_is_rejected_by_name(name: str) -> None:
    """Contract: log-probabilities of a ragged rollout of several turns, with forks of a shared prompt, equal those of training
    and of the model's own logits, or the model is rejected in a message that names it, before it generates anything.
    docs/families.md says which."""
    result = outcome(name)
    assert shown(name) == result if result in RUNS else shown(name).startswith("refused: ")
