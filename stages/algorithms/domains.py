"""Whether a method can be trained on a domain. Light to import."""

from __future__ import annotations

from typing import Any

from stages.algorithms.card import Composition
from stages.algorithms.resolve import warm_start_of
from stages.algorithms.settings import Rl
from stages.algorithms.task_source import source_class
from stages.environments.protocol import forgets
from stages.runtime.validation import ParamsError


def check_domain(method: Composition, rl: Rl, domain: Any, reader: str | None = None) -> None:
    """Raise ParamsError if the resolved section does not fit the domain: one without training tasks, a method that needs another,
    costs without prices, credit of turns that have no token to train, or a domain that forgets with what reads whole histories.
    reader: what in other sections does."""
    if getattr(domain, "only_tests", False):
        raise ParamsError(f"domains lists {domain.name}, which has test tasks alone; list it in evaluate.transfer instead")
    if method.fits is not None:
        method.fits(domain, rl)
    if method.data == "episodes":
        source_class(rl.tasks.source).fits(domain, rl)
    if rl.cost.kind != "none" and not (hasattr(domain, "tools") and domain.tools()):
        raise ParamsError(
            f"rl.cost.kind: {rl.cost.kind} needs priced tools, and {domain.name} has none; set "
            f"per_domain.search.environment.route and closed_book to false, or cost.kind to none"
        )
    if forgets(domain) and (reader := _reader_of_histories(method, rl) or reader):
        raise ParamsError(
            f"{reader}, and the policy of {domain.name} does not see rejected results any more: change it, or set "
            f"environment.judge.context to soft"
        )
    by_turn = rl.advantage.level == "turn" or rl.advantage.estimator == "utterance" or rl.credit.kind != "outcome"
    if by_turn and rl.loss.evidence == "exclude" and hasattr(domain, "writes_evidence") and domain.writes_evidence():
        raise ParamsError(
            f"rl.loss.evidence: exclude leaves turns of {domain.name} without a token to train (the policy writes results "
            f"itself), and rl.advantage.level, estimator or rl.credit.kind credits every turn: set evidence to include, or "
            f"credit by episode"
        )


def _reader_of_histories(method: Composition, rl: Rl) -> str | None:
    """What in section `rl` reads or continues an episode's tokens as if the policy had seen them all; None if nothing does."""
    first = warm_start_of(rl)
    found = {
        f"rl.algorithm: {method.card.slug} learns from whole histories": method.data in ("pairs", "offline", "offline_replay"),
        "rl.advantage.estimator: utterance continues whole histories": rl.advantage.estimator == "utterance",
        "rl.advantage.estimator: team plays conversations that keep everything": rl.advantage.estimator == "team",
        f"the teacher of rl.algorithm: {method.card.slug} reads whole histories": rl.credit.kind == "own"
        and method.teacher is not None
        and method.teacher(rl),
        "rl.imitation with rl.reannotate learns from whole paths of trees": rl.imitation.ratio > 0 and rl.reannotate.every > 0,
        "rl.warm_start learns from whole histories": first is not None and _reader_of_histories(*first) is not None,
    }
    return next((reader for reader, holds in found.items() if holds), None)
