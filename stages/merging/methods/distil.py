"""distil: no merge of weights but its rival. The specialists play training tasks, and one policy learns from their successes
(stages/training/distillation.py)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stages.engine.settings import SamplingParams
from stages.merging.contract import Merger
from stages.records.card import Card
from stages.runtime.validation import Count, Positive, Section


class Distillation(Section):
    """method distil: what the specialists play, and how the base policy learns from it."""

    tasks: Count | None = None
    """Training tasks of each domain that its specialist plays, drawn at random; null: all."""
    attempts: Annotated[int, Field(ge=1, le=64)] = 2
    """Per task."""
    keep: Annotated[int, Field(ge=1, le=64)] = 2
    """Successes of a task to learn from, at most, of those with different actions; the first ones."""
    sampling: SamplingParams = SamplingParams()
    epochs: Positive = 2.0
    """Passes over the successes."""
    learning_rate: Positive = 3e-4
    """Peak, after the warm-up."""
    batch_tokens: Annotated[int, Field(ge=256)] = 2048
    """Approximate number of tokens per optimiser step, in whole episodes."""


class Settings(Section):
    distil: Distillation = Distillation()


class Distil(Merger):
    """Supervised learning from the specialists' successes, from the base policy on (rejection sampling, policy distillation)."""

    card = Card(
        slug="distil",
        title="Distilling the specialists",
        paper="ours; the parts: policy distillation, Rusu et al., arXiv 1511.06295; RAFT, arXiv 2304.06767",
        equation="max_theta sum over domains d, successes tau of pi_d: sum_t log pi_theta(a_t | h_t), from the base policy on",
        assumptions="The specialists succeed often enough on training tasks; their episodes and the training cost time.",
        reduces_to="One domain: the specialist itself, as with every method.",
        tested_by="tests/training/test_distil.py",
        switch="merge.method: distil",
    )
    needs_base = True
    Settings = Settings
    weighted = False
    trains = True
    became = ", from whose successes one generalist learnt"


MERGER = Distil()
