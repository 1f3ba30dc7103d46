"""Paths of stored trees as episodes."""

from __future__ import annotations

from tabular import ROOT

from stages.annotation.correct_paths import correct_episodes
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree


def test_rejected_actions_stay_rejected() -> None:
    """Contract: a turn of an eager tree is accepted if the environment accepted it; lazy trees do not store that."""
    for kind, expected in (("eager", [False, True]), ("lazy", [True, True])):
        tree = Tree("t", ROOT, Annotate(expansion={"kind": kind}))
        rejected = Edge("what", (1,), (-0.5,), "no", (9,), 0.0, False, False, "s", accepted=False)
        tree.insert(0, [rejected, Edge("go", (2,), (-0.5,), "", (), 1.0, True, False, "")], 1)
        (episode,) = correct_episodes(tree.rows(), 1, "toy")
        assert [turn.accepted for turn in episode.turns] == expected
