"""joint_rl: no merge of weights but its rival. One policy learns all domains by reinforcement learning, playing them in turn
(stages/training/rl/joint.py)."""

from __future__ import annotations

from stages.merging.contract import Merger
from stages.records.card import Card
from stages.runtime.validation import Section


class JointRl(Merger):
    """Multi-task reinforcement learning from the SFT policy on, by the specialists' settings and limits."""

    card = Card(
        slug="joint_rl",
        title="Joint reinforcement learning",
        paper="ours; one policy for all tasks is the baseline of Distral, Teh et al., arXiv 1707.04175",
        equation="step s updates theta on the next domain d that has steps left: theta += rate * gradient of d's objective (rl), "
        "from the SFT policy on; each domain has an optimiser of its own",
        assumptions="One policy can play all domains. The specialists are not used, though the stage reports on them.",
        reduces_to="One domain: the specialist itself, as with every method.",
        tested_by="tests/training/test_joint_rl.py",
        switch="merge.method: joint_rl",
    )
    needs_base = True
    Settings = Section
    weighted = False
    trains = True
    from_specialists = False
    became = "; one generalist learnt all domains in turn, from the fine-tuned policy on"


MERGER = JointRl()
