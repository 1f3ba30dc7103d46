"""What makes no sense about the episodes of a group: whose they are, and how they are played. Light to import."""

from __future__ import annotations

from itertools import pairwise

from stages.parameters.rl import Rl
from stages.validation import ParamsError


def check_groups(rl: Rl) -> None:
    """Raise ParamsError if a resolved section asks for groups that cannot be."""
    _check_external(rl)
    _check_horizon(rl)


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
