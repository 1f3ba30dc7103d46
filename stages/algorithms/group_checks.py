"""What makes no sense about how a group is played and compared step by step. Light to import."""

from __future__ import annotations

from stages.parameters.rl import Rl
from stages.validation import ParamsError

BRANCHING = ("random", "entropy")
_MERGING = ("graph", "branches")


def check_groups(rl: Rl) -> None:
    """Raise ParamsError for branching or merging credit that a resolved section leaves no group for."""
    branching, credit = rl.branching, rl.credit
    if branching.kind in BRANCHING and (branching.initial or 1) > rl.group_size:
        raise ParamsError(
            f"rl.branching.initial is {branching.initial}, more than the group_size of {rl.group_size} episodes; lower it, or "
            f"raise rl.group_size"
        )
    if branching.kind in BRANCHING and rl.group_size < 2:
        raise ParamsError("rl.branching makes branches of a group's episodes, and rl.group_size is 1; set it to >= 2")
    if credit.kind == "branches" and branching.kind == "none":
        raise ParamsError(
            "rl.credit.kind: branches is about turns that branches share; set rl.branching.kind to entropy or random"
        )
    if credit.kind in _MERGING and rl.group_size < 2:
        raise ParamsError(f"rl.credit.kind: {credit.kind} compares episodes of a group, and rl.group_size is 1; set it to >= 2")
    if credit.kind in _MERGING and rl.advantage.level == "token":
        raise ParamsError(
            f"rl.credit.kind: {credit.kind} gives whole turns one advantage, and rl.advantage.level: token gives each token its "
            f"own; set level to trajectory or turn"
        )
