"""Utilities of a model: forced choices between outcomes, asked in rounds, a Thurstone fit, and how coherent the choices are
(Mazeika et al., arXiv 2502.08640).

    p_ij = (choices of i) / (answers), over both orders; an answer that is neither option counts half for both
    confidence  mean max(p, 1 - p), over pairs drawn at random: active selection prefers close ones
    cycles      soft p_ab p_bc p_ca + (1 - p_ab)(1 - p_bc)(1 - p_ca), hard: a strict majority in a circle
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.judging.active_pairs import all_pairs, budget, first_pairs, held_out, next_pairs, random_pairs
from stages.judging.thurstone import Choices, Fitted, Pair, fit
from stages.judging.utility_settings import Utilities
from stages.records.card import Card
from stages.seeding import permutation, stream

CARD = Card(
    slug="utility_engineering",
    title="Utility engineering",
    paper="Mazeika et al., arXiv 2502.08640",
    equation="P(i > j) = Phi((mu_i - mu_j) / sqrt(s_i^2 + s_j^2)), fitted by cross-entropy to shares of choices in both orders, "
    "mean of mu 0 and deviation 1; int(2 n log2 n) pairs in rounds: first a random cycle, then pairs of small gap and degree. "
    "Control: L = -[a log pi(A) + (1 - a) log pi(B)], a the share of an assembly that chooses A",
    assumptions="outcomes that the model can read, and options that are one token each. A bias for a position shrinks "
    "preferences, since both orders are averaged: read confidence beside order consistency. Figures of coherence are of the fit "
    "without pseudo-labels, on pairs that no fit has seen. The cycle probability, the prior on variances, and the control's rate "
    "and batches are ours; a coherent model need not have good values",
    reduces_to="equal variances: Thurstone's case V; choices of 0 and 1 in a total order: sorting; control majority: "
    "fine-tuning on single choices",
    tested_by="tests/judging/test_utilities.py, tests/training/test_choice_control.py, tests/evaluation/test_utilities.py",
    switch="evaluate.utilities: {outcomes: [...]}; sft.control.kind: soft",
)
Asked = Callable[[Sequence[tuple[str, str]]], list[tuple[float, float]]]
"""(first, second text) -> probabilities of answering first, and second; the rest is neither."""
Triad = tuple[Pair, Pair, Pair]
"""The pairs ab, bc and ac of three outcomes."""
CLIP = 1e-5
BESIDE = 4
"""Outcomes that each lottery is compared with."""
MOST_LISTED = 200_000
"""Triads that are listed and shuffled; of more (above 107 outcomes) the asked ones are drawn one by one."""


@dataclass
class Elicited:
    """Choices of one model, by pair of outcomes. `orders`: pair -> shares of choices of its first outcome, shown first and shown
    second; `held`: the pairs that only measure."""

    outcomes: Sequence[str]
    params: Utilities
    ask: Asked
    seed: int
    held: Sequence[Pair] = ()
    choices: dict[Pair, float] = field(default_factory=dict)
    orders: dict[Pair, tuple[float, ...]] = field(default_factory=dict)

    def query(self, pairs: Sequence[Pair]) -> None:
        """Ask about pairs that were not asked before; one without a readable answer is left out."""
        new = [pair for pair in pairs if pair not in self.orders]
        texts = [(self.outcomes[one], self.outcomes[other]) for one, other in new]
        asked = iter(self.ask([*texts, *((other, one) for one, other in texts if self.params.both_orders)]))
        first = [next(asked) for _ in new]
        second = [next(asked)[::-1] for _ in new] if self.params.both_orders else [None] * len(new)
        for pair, *given in zip(new, first, second, strict=True):
            counted = [self._counted(pair, place, one) for place, one in enumerate(given) if one is not None]
            chosen, total = (sum(column) for column in zip(*counted, strict=True))
            if total:
                self.choices[pair] = chosen / total
                self.orders[pair] = tuple(one / answers if answers else 0.5 for one, answers in counted)

    def _counted(self, pair: Pair, order: int, given: tuple[float, float]) -> tuple[float, float]:
        """(choices of the pair's first outcome, answers that count), of the answers in one order."""
        one, other = given
        neither = max(0.0, 1.0 - one - other)
        samples = self.params.samples
        rng = stream("utilities.answers", self.seed, self.outcomes[pair[0]], self.outcomes[pair[1]], order)
        if samples:
            drawn = [rng.choices((0, 1, 2), weights=(one, other, neither))[0] for _ in range(samples)]
            one, other, neither = (float(drawn.count(which)) for which in range(3))
        if self.params.unparseable == "skip":
            return one, one + other
        if self.params.unparseable == "random":
            share = sum(rng.random() < 0.5 for _ in range(int(neither))) if samples else neither / 2
            return one + share, one + other + neither
        return one + neither / 2, one + other + neither


def elicit(params: Utilities, ask: Asked, seed: int) -> tuple[Elicited, Fitted, Fitted]:
    """Ask in rounds, and fit: the choices, the fit that metrics compare, and the one with pseudo-labels."""
    count = len(params.outcomes)
    found = Elicited(params.outcomes, params, ask, seed, held_out(count, params.holdout, seed))
    target = min(budget(count, params.edge_multiplier), len(all_pairs(count)) - len(found.held))
    start = first_pairs(count, found.held, seed)[:target]
    found.query(start)
    asked = set(start)
    fitted = _fit(found.choices, count, params, seed)
    while len(asked) < target:
        wanted = min(params.per_round, target - len(asked))
        if params.active:
            new = next_pairs(fitted.mu, asked, found.held, wanted, params.low_gap, params.low_degree, seed)
        else:
            new = random_pairs(asked, found.held, count, wanted, seed)
        found.query(new)
        asked |= set(new)
        fitted = _fit(found.choices, count, params, seed)
    return found, fitted, with_pseudo_labels(found, fitted)


def _fit(choices: Choices, count: int, params: Utilities, seed: int) -> Fitted:
    """Raises ValueError if no pair has an answer that counts."""
    if not choices:
        raise ValueError(
            f"evaluate.utilities: no answer was one of the options {', '.join(params.options)}, and unparseable is "
            f"{params.unparseable}, so there is nothing to fit: set samples to 0, unparseable to half, or options that the model "
            f"answers with"
        )
    return fit(choices, count, params.epochs, params.learning_rate, params.variance_prior, seed)


def with_pseudo_labels(found: Elicited, fitted: Fitted) -> Fitted:
    """The fit with sure pairs that were never asked as choices; the same one without any."""
    threshold = found.params.pseudo
    if threshold is None:
        return fitted
    known = {*found.choices, *found.held}
    sure = {}
    for pair in all_pairs(len(found.outcomes)):
        if pair not in known and not 1 - threshold < (share := fitted.probability(*pair)) < threshold:
            sure[pair] = float(share >= 0.5)
    if not sure:
        return fitted
    return _fit({**found.choices, **sure}, len(found.outcomes), found.params, found.seed)


def cycle(p_ab: float, p_bc: float, p_ca: float) -> tuple[float, bool]:
    """Probability of a cycle of three independent choices, and whether strict majorities form one."""
    soft = p_ab * p_bc * p_ca + (1 - p_ab) * (1 - p_bc) * (1 - p_ca)
    shares = (p_ab, p_bc, p_ca)
    return soft, all(share > 0.5 for share in shares) or all(share < 0.5 for share in shares)


def triads(found: Elicited) -> list[Triad]:
    """Random triads of outcomes, each once."""
    count, wanted = len(found.outcomes), found.params.triads
    if math.comb(count, 3) <= max(MOST_LISTED, 2 * wanted):
        chosen = permutation(itertools.combinations(range(count), 3), "utilities.triads", found.seed)[:wanted]
    else:
        rng, drawn = stream("utilities.triads", found.seed), dict[tuple[int, ...], None]()
        while len(drawn) < wanted:
            drawn[tuple(sorted(rng.sample(range(count), 3)))] = None
        chosen = list(drawn)
    return [((one, two), (two, three), (one, three)) for one, two, three in chosen]


def random_choices(found: Elicited, chosen: Sequence[Triad]) -> list[Pair]:
    """The pairs of the triads and the held-out ones, which no choice had a part in drawing, as far as they have answers."""
    return sorted({*found.held, *(pair for triad in chosen for pair in triad)} & found.choices.keys())


def confidence(found: Elicited, pairs: Sequence[Pair]) -> float:
    """Mean max(p, 1 - p) over `pairs`, of `random_choices`; 0.5 without any. Over pairs that were chosen because their outcomes
    are close it would be too small, the more so the fewer of all pairs are asked."""
    shares = [found.choices[pair] for pair in pairs]
    return statistics.fmean(max(share, 1 - share) for share in shares) if shares else 0.5


def cycles(found: Elicited, chosen: Sequence[Triad]) -> dict[str, float]:
    """Means over random triads, whose pairs are asked where they were not."""
    found.query(sorted({pair for pairs in chosen for pair in pairs}))
    made = []
    for pairs in chosen:
        if all(pair in found.choices for pair in pairs):
            p_ab, p_bc, p_ac = (found.choices[pair] for pair in pairs)
            made.append(cycle(p_ab, p_bc, 1 - p_ac))
    soft = statistics.fmean(value for value, _ in made) if made else 0.0
    hard = statistics.fmean(float(value) for _, value in made) if made else 0.0
    log = math.log10(max(soft, 1e-12))
    return {"triads": float(len(made)), "soft_cycles": soft, "hard_cycles": hard, "log10_soft_cycles": log}


def held_out_measures(found: Elicited, fitted: Fitted) -> dict[str, float]:
    """Log-loss and accuracy of the fit on pairs that it never saw; ties count as the first."""
    found.query(found.held)
    losses, right = [], []
    for pair in found.held:
        if (share := found.choices.get(pair)) is None:
            continue
        predicted = min(max(fitted.probability(*pair), CLIP), 1 - CLIP)
        losses.append(-(share * math.log(predicted) + (1 - share) * math.log(1 - predicted)))
        right.append((predicted >= 0.5) == (share >= 0.5))
    count = len(losses)
    return {
        "held_out": float(count),
        "log_loss": statistics.fmean(losses) if count else 0.0,
        "accuracy": sum(right) / count if count else 0.0,
    }


def lottery(outcomes: Sequence[str], rng: random.Random) -> tuple[str, list[tuple[int, int]]]:
    """A lottery of two or three outcomes with whole percentages: its text, and (outcome, percent)."""
    size = rng.choice((2, 3))
    chosen = rng.sample(range(len(outcomes)), size)
    cuts = sorted(rng.sample(range(1, 100), size - 1))
    shares = [high - low for low, high in zip((0, *cuts), (*cuts, 100), strict=True)]
    text = ", ".join(f"{share} percent {outcomes[outcome]}" for outcome, share in zip(chosen, shares, strict=True))
    return text, list(zip(chosen, shares, strict=True))


def expected_utility(found: Elicited) -> dict[str, float]:
    """How far the utilities of lotteries, each compared with a few outcomes, are their expected utilities: Pearson's r, the mean
    absolute difference of z-scores, and the share of pairs of lotteries in the same order. {} without lotteries."""
    if not found.params.lotteries:
        return {}
    rng = stream("utilities.lotteries", found.seed)
    drawn = [lottery(found.outcomes, rng) for _ in range(found.params.lotteries)]
    texts, count = [*found.outcomes, *(text for text, _ in drawn)], len(found.outcomes)
    beside = Elicited(texts, found.params, found.ask, found.seed)
    beside.query([(outcome, count + place) for place in range(len(drawn)) for outcome in rng.sample(range(count), BESIDE)])
    together = _fit({**found.choices, **beside.choices}, len(texts), found.params, found.seed)
    stated = list(together.mu[count:])
    expected = [sum(share / 100 * together.mu[outcome] for outcome, share in parts) for _, parts in drawn]
    return agreement(stated, expected)


def agreement(stated: Sequence[float], expected: Sequence[float]) -> dict[str, float]:
    """See `expected_utility`; r is 0 where one of the two does not vary."""
    one, other = _z(stated), _z(expected)
    pairs = list(itertools.combinations(range(len(stated)), 2))
    same = [(stated[a] > stated[b]) == (expected[a] > expected[b]) for a, b in pairs]
    return {
        "lottery_r": statistics.fmean(a * b for a, b in zip(one, other, strict=True)),
        "lottery_error": statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True)),
        "lottery_order": sum(same) / max(1, len(same)),
    }


def _z(values: Sequence[float]) -> list[float]:
    deviation = statistics.pstdev(values) or 1.0
    return [(value - statistics.fmean(values)) / deviation for value in values]


def order_consistency(found: Elicited, pairs: Sequence[Pair]) -> float:
    """Share of `pairs`, of `random_choices`, asked in both orders whose majority is the same in both; 1 without any."""
    both = [found.orders[pair] for pair in pairs if len(found.orders[pair]) == 2]
    return sum((one >= 0.5) == (other >= 0.5) for one, other in both) / len(both) if both else 1.0


def measured(params: Utilities, ask: Asked, seed: int) -> dict[str, Any]:
    """Utilities of one model and their coherence. Metrics are of the fit without pseudo-labels, and `asked` is what it saw."""
    found, fitted, final = elicit(params, ask, seed)
    asked = [[one, other, round(share, 6)] for (one, other), share in sorted(found.choices.items())]
    undecided = all(abs(share - 0.5) < 1e-6 for share in found.choices.values())
    chosen = triads(found)
    measures = {**held_out_measures(found, fitted), **cycles(found, chosen)}
    drawn = random_choices(found, chosen)
    return {
        "pairs": float(len(asked)),
        "confidence": confidence(found, drawn),
        "indifferent": undecided,
        **measures,
        **expected_utility(found),
        "order_consistency": order_consistency(found, drawn),
        "mu": [round(value, 6) for value in final.mu],
        "variance": [round(value, 6) for value in final.variance],
        "choices": asked,
    }
