"""What makes no sense about the episodes of a group: whose they are, how they are played and compared step by step. Light to
import."""

from __future__ import annotations

from itertools import pairwise

from stages.parameters.rl import Rl
from stages.validation import ParamsError

BRANCHING = ("random", "entropy")
"""Kinds of branching that the shared plan knows."""
_MERGING = ("graph", "branches")


def check_groups(rl: Rl) -> None:
    """Raise ParamsError if a resolved section asks for groups that cannot be."""
    _check_external(rl)
    _check_horizon(rl)
    _check_branching(rl)
    _check_merging(rl)


def _check_external(rl: Rl) -> None:
    count = rl.external.per_group or 0
    if count and count >= rl.group_size:
        raise ParamsError(
            f"rl.external.per_group is {count} and rl.group_size {rl.group_size}: no episode of the policy's own would be left; "
            f"lower per_group, or raise group_size"
        )
    if count and rl.advantage.estimator == "gae":
        raise ParamsError(
            "rl.external.per_group is above 0 and rl.advantage.estimator gae: the critic would learn the returns of somebody "
            "else's policy; set per_group to 0, or estimator to group"
        )


def _check_horizon(rl: Rl) -> None:
    horizon = rl.horizon
    if horizon.kind == "fixed" and horizon.turns is None:
        raise ParamsError("rl.horizon.kind: fixed needs rl.horizon.turns")
    rounds = horizon.rounds or []
    if any(later <= earlier for earlier, later in pairwise(rounds)):
        raise ParamsError(f"rl.horizon.rounds must rise from stage to stage; got {rounds}")


def _check_branching(rl: Rl) -> None:
    branching, played = rl.branching, rl.group_size - (rl.external.per_group or 0)
    if branching.kind not in BRANCHING:
        return
    if played < 2:
        raise ParamsError(
            f"rl.branching makes branches of the episodes of a group that the policy plays, and there is {played} "
            f"(rl.group_size less rl.external.per_group); raise rl.group_size"
        )
    if (branching.initial or 1) > played:
        raise ParamsError(
            f"rl.branching.initial is {branching.initial}, more than the {played} episodes of a group that the policy plays "
            f"(rl.group_size less rl.external.per_group); lower it, or raise rl.group_size"
        )


def _check_merging(rl: Rl) -> None:
    """Merging credit needs a group, turns that have one advantage each, and, for branches, branching."""
    credit = rl.credit
    if credit.kind not in _MERGING:
        return
    if credit.kind == "branches" and rl.branching.kind == "none":
        raise ParamsError(
            "rl.credit.kind: branches is about turns that branches share; set rl.branching.kind to entropy or random"
        )
    if rl.group_size < 2:
        raise ParamsError(f"rl.credit.kind: {credit.kind} compares episodes of a group, and rl.group_size is 1; set it to >= 2")
    if rl.advantage.level == "token":
        raise ParamsError(
            f"rl.credit.kind: {credit.kind} gives whole turns one advantage, and rl.advantage.level: token gives each token its "
            f"own; set level to trajectory or turn"
        )
