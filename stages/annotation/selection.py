"""Which child a descent visits next, and which failed rollout OmegaPRM searches next.

Rules (Q = value of a child, n its visits, N those of its parent):
  uct      Q + c sqrt(ln N / n)        rStar (2408.06195), rStar-Math (2501.04519): c = 2
  uct_2ln  Q + c sqrt(2 ln N / n)      UCB1 as LATS (2310.04406; c = 1) and ReST-MCTS* (2406.03816; c = 0.7) write it
  uct_1p   Q + c sqrt(ln N / (1 + n))  an implementation of Agent Q (2408.07199): c = 1
  puct     Q + c P sqrt(N) / (1 + n)   P = softmax over siblings of the length-normalised log-probability / temperature
  random   uniform                     the control
Children without visits (n = 0), under a UCT rule:
  first    before all others, in order                 LATS
  random   before all others, in random order          rStar
  zero     0, but ends before all others               rStar-Math, which backs up ends as soon as they are drawn; the others
                                                       starve beside siblings of positive value
  value    the value model's estimate                  LATS on HotPotQA
  bonus    that + 1                                    ReST-MCTS*
Under puct their Q is the lowest return (zero) or the value model's estimate (value, bonus), with the prior as usual.
Exhausted siblings are skipped; they take no share of P and no critic's rank. (Stored values rank all siblings.) Ties go to the
first child.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stages.annotation.derived import lowest_value, unvisited_rule

if TYPE_CHECKING:
    from random import Random

    from stages.annotation.settings import Annotate, OmegaScore

BONUS = 1.0
UNVISITED_FIRST = ("first", "random")


@dataclass(frozen=True)
class Arm:
    """A child as selection sees it. `q`: in the tree's units, without visits the value model's estimate or the lowest return;
    `visits`: including those in progress; `prior`: the action's mean log-probability per token (nats); `end`: whether it ends the
    episode."""

    q: float
    visits: int
    prior: float
    end: bool = False


def uct(q: float, visits: int, parent_visits: int, c: float, factor: float = 1.0, more: int = 0) -> float:
    """Q + c sqrt(factor ln N / (n + more)); infinite for an unvisited child."""
    if visits == 0:
        return math.inf
    return q + c * math.sqrt(factor * math.log(parent_visits) / (visits + more))


def puct(q: float, visits: int, parent_visits: int, c: float, probability: float) -> float:
    """Q + c P sqrt(N) / (1 + n)."""
    return q + c * probability * math.sqrt(parent_visits) / (1 + visits)


def softmax(priors: Sequence[float], temperature: float) -> list[float]:
    """Probabilities proportional to exp(prior / temperature)."""
    top = max(priors)
    weights = [math.exp((prior - top) / temperature) for prior in priors]
    return [weight / sum(weights) for weight in weights]


def exploration(params: Annotate, iteration: int) -> float:
    """c in iteration `iteration` (from 0): decays from c to c * decay_to over the search; rStar's decay_to is 0.1."""
    selection, done = params.selection, iteration / params.iterations
    if selection.decay == "linear":
        return selection.c * (1 - (1 - selection.decay_to) * done)
    if selection.decay == "exponential":
        return selection.c * selection.decay_to**done
    return selection.c


def virtual(params: Annotate, arm: Arm, pending: int) -> Arm:
    """A child with `pending` visits in progress. `loss`: they count as visits with the worst return; `wu_uct` (Liu et al.,
    1810.11755): they count as visits only, Q is unchanged."""
    if not pending:
        return arm
    visits = arm.visits + pending
    if params.virtual == "wu_uct":
        return replace(arm, visits=visits)
    return replace(arm, q=(arm.q * arm.visits + pending * lowest_value(params)) / visits, visits=visits)


def scores(arms: Sequence[Arm], parent_visits: int, params: Annotate, c: float | None = None) -> list[float]:
    """The score of every child under the chosen rule (except random). `c`: None for `selection.c`."""
    rule = params.selection.rule
    c = params.selection.c if c is None else c
    if rule == "puct":
        probabilities = softmax([arm.prior for arm in arms], params.selection.prior_temperature)
        return [
            math.inf
            if arm.visits == 0 and unvisited_rule(params) in UNVISITED_FIRST
            else puct(arm.q, arm.visits, parent_visits, c, probability)
            for arm, probability in zip(arms, probabilities, strict=True)
        ]
    factor, more = (2.0 if rule == "uct_2ln" else 1.0), int(rule == "uct_1p")
    own = {"zero": _zero, "value": lambda arm: arm.q, "bonus": lambda arm: arm.q + BONUS}.get(unvisited_rule(params))
    return [own(arm) if own and arm.visits == 0 else uct(arm.q, arm.visits, parent_visits, c, factor, more) for arm in arms]


def _zero(arm: Arm) -> float:
    return math.inf if arm.end else 0.0


def select(
    arms: Sequence[Arm], parent_visits: int, params: Annotate, c: float | None = None, stream: Random | None = None
) -> int:
    """Index of the child to visit: the highest score, the first of ties. `stream`: for rules that draw at random. Raises
    ValueError if there are no children."""
    if params.selection.rule == "random":
        candidates = list(range(len(arms)))
    else:
        candidates = [place for place, arm in enumerate(arms) if arm.visits == 0 and unvisited_rule(params) == "random"]
    if candidates:
        assert stream is not None
        return candidates[stream.randrange(len(candidates))]
    ranked = scores(arms, parent_visits, params, c)
    return ranked.index(max(ranked))


def critic_ranks(values: Sequence[float]) -> list[float]:
    """1/rank of each sibling, the highest value first; ties share their best rank."""
    ordered = sorted(values, reverse=True)
    return [1.0 / (ordered.index(value) + 1) for value in values]


def mixed(search: float, critic: float, share: float) -> float:
    """Agent Q (2408.07199): (1 - share) Q_search + share Q_critic."""
    return (1 - share) * search + share * critic


def omega_score(mc: float, words: int, visits: int, all_visits: int, params: OmegaScore, c: float) -> float:
    """OmegaPRM's score (2406.06592, eq. 2 and 3) of a failed rollout of `words` words from a state of value `mc`:
    alpha^(1 - MC) beta^(words / length) + c sqrt(visits of all states) / (1 + visits of this one)."""
    value = params.alpha ** (1 - mc) * params.beta ** (words / params.length)
    return value + c * math.sqrt(all_visits) / (1 + visits)
