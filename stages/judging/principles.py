"""Principles: what is preferred, in words, and how judgments by single principles become preferences (SALMON, arXiv 2310.05910).
Pure functions.

For principle d and answers y1, y2 a judge gives s_12 = l(y1) - l(y2) in one order, and s_21, also for y1 against y2, in the
other. With v_d the variance of all of the principle's s,

    g_d = ((s_12 + s_21) / 2) / v_d  if both have the same sign,  0 otherwise

A preference shows some principles, of which each is negated with a probability (g_d -> -g_d); the one with the largest |g_d|
decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from stages.judging.languages import strays
from stages.judging.settings import LengthBonus, Principle, PrincipleSampling, SampledPrinciples
from stages.seeding import stream

Margins = Mapping[str, tuple[float, float]]
"""Principle -> (s_12, s_21) of one pair of answers."""


@dataclass(frozen=True)
class Decision:
    """One preference: the principles shown, in order, with whether each is negated; the label that was stored, whether the first
    answer is better; `clean`, the label before noise; and whether a rule on phrases decided."""

    shown: tuple[tuple[str, bool], ...]
    first: bool
    clean: bool
    ruled: bool = False


def spreads(margins: Sequence[Margins], normaliser: Literal["variance", "std", "none"]) -> dict[str, float]:
    """The divisor of each principle's margins: variance or standard deviation (divisor n) of all its s, or 1; 1 where it is 0."""
    found: dict[str, list[float]] = {}
    for one in margins:
        for name, pair in one.items():
            found.setdefault(name, []).extend(pair)
    measure = {"variance": statistics.pvariance, "std": statistics.pstdev, "none": lambda values: 1.0}[normaliser]
    return {name: float(measure(values)) or 1.0 for name, values in sorted(found.items())}


def signed(margin: tuple[float, float], spread: float, agreement: bool = True) -> float:
    """g_d of one pair. `agreement`: whether margins of different sign count as undecided."""
    one, other = margin
    if agreement and one * other <= 0:
        return 0.0
    return (one + other) / 2 / spread


def drawn_count(rng: Random, probability: float, most: int) -> int:
    """n ~ Geometric(probability), drawn until n <= most."""
    while True:
        if probability >= 1:
            return 1
        count = 1 + math.floor(math.log(1.0 - rng.random()) / math.log(1.0 - probability))
        if count <= most:
            return count


def decide(scores: Mapping[str, float], sampling: PrincipleSampling, rng: Random, rule: bool | None = None) -> Decision | None:
    """The preference between two answers from g_d by principle; None if it is undecided. `rule`: whether the first answer is
    better by a rule on phrases or languages, which then overrides the principles; None: no rule applies."""
    names = sorted(scores)
    rng.shuffle(names)
    names = names[: drawn_count(rng, sampling.geometric, sampling.most)]
    shown = tuple((name, rng.random() < sampling.negate) for name in names)
    values = [-scores[name] if negated else scores[name] for name, negated in shown]
    decisive = max(values, key=abs)
    if rule is None and decisive == 0:
        return None
    clean = decisive > 0 if rule is None else rule
    noise = sampling.label_noise if rule is None else sampling.rule_label_noise
    return Decision(shown, clean != (rng.random() < noise), clean, rule is not None)


def phrase_rule(first: str, second: str, sampling: PrincipleSampling, rng: Random) -> bool | None:
    """Whether the first answer is better because only the other contains a stock phrase; None if the rule does not apply, which
    it does with `stock_probability` only."""
    found = [any(phrase.lower() in text.lower() for phrase in sampling.stock_phrases) for text in (first, second)]
    if found[0] == found[1] or rng.random() >= sampling.stock_probability:
        return None
    return found[1]


def language_rule(prompt: str, first: str, second: str) -> tuple[bool, bool | None]:
    """Whether both answers are in another language than the prompt, which leaves the pair out; and whether the first is better
    because only the second is, None if the rule does not apply."""
    strayed = [strays(prompt, text) for text in (first, second)]
    return all(strayed), (strayed[1] if strayed[0] != strayed[1] else None)


def texts(principles: Sequence[Principle], shown: Sequence[tuple[str, bool]]) -> tuple[str, ...]:
    """What a judge reads of the principles shown."""
    known = {principle.name: principle for principle in principles}
    return tuple(known[name].negative if negated else known[name].text for name, negated in shown)


def weights(params: SampledPrinciples, step: int) -> dict[str, float]:
    """Weight of each principle that can be drawn at a step (from 1); those that always hold are not drawn."""
    return {
        one.name: one.weight + params.bonus.get(one.name, 0.0)
        for one in params.items
        if not one.always and one.from_step <= step and one.weight + params.bonus.get(one.name, 0.0) > 0
    }


def sampled(params: SampledPrinciples, step: int, rng: Random) -> tuple[str, ...]:
    """Names of the principles of one task at a step: `per_task` drawn without replacement in proportion to their weights, then
    those that always hold."""
    left, drawn = weights(params, step), list[str]()
    while left and len(drawn) < params.per_task:
        name = rng.choices(list(left), weights=list(left.values()))[0]
        drawn.append(name)
        del left[name]
    return (*drawn, *(one.name for one in params.items if one.always and one.from_step <= step))


def read_at_step(params: SampledPrinciples | None, seed: int, step: int, task_id: str) -> tuple[str, ...]:
    """In words, the principles that a training step (from 0) draws for a task; () without principles."""
    if params is None:
        return ()
    names = sampled(params, step + 1, stream("judge.principles", seed, step, task_id))
    return texts(params.items, [(name, False) for name in names])


def shaped(reward: float, tokens: int, stopped: bool, bonus: LengthBonus | None, penalty: float) -> float:
    """R = r + scale min(cap, rate tokens / longest) - penalty [did not stop]; without `bonus` no term in length."""
    if bonus is not None:
        reward += bonus.scale * min(bonus.cap, bonus.rate * tokens / bonus.longest)
    return reward - (0.0 if stopped else penalty)
