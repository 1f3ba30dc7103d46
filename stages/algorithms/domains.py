"""Whether a method can be trained on a domain. Light to import."""

from __future__ import annotations

from typing import Any

from stages.algorithms.card import Composition
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError


def check_domain(method: Composition, rl: Rl, domain: Any) -> None:
    """Raise ParamsError if the resolved section does not fit the domain: one without training tasks, a method that needs another,
    costs without prices, or credit of turns that have no token to train."""
    if getattr(domain, "only_tests", False):
        raise ParamsError(f"domains lists {domain.name}, which has test tasks alone; list it in evaluate.transfer instead")
    if method.fits is not None:
        method.fits(domain, rl)
    if rl.cost.kind != "none" and not (hasattr(domain, "tools") and domain.tools()):
        raise ParamsError(
            f"rl.cost.kind: {rl.cost.kind} needs priced tools, and {domain.name} has none; set "
            f"per_domain.search.environment.route, or cost.kind to none"
        )
    by_turn = rl.advantage.level == "turn" or rl.advantage.estimator == "utterance" or rl.credit.kind != "outcome"
    if by_turn and rl.loss.evidence == "exclude" and hasattr(domain, "writes_evidence") and domain.writes_evidence():
        raise ParamsError(
            f"rl.loss.evidence: exclude leaves turns of {domain.name} without a token to train (the policy writes results "
            f"itself), and rl.advantage.level, estimator or rl.credit.kind credits every turn: set evidence to include, or "
            f"credit by episode"
        )
