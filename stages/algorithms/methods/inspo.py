"""INSPO: a population of instructions evolves together with the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.algorithms.card import Card, Composition
from stages.algorithms.methods import grpo
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.algorithms.settings import Rl

CARD = Card(
    slug="inspo",
    title="INSPO",
    paper="Zhou et al., arXiv 2512.01945",
    equation="one instruction I per question, drawn by p_j = exp(w_j / tau) / sum_k exp(w_k / tau); GRPO inside its group, KL "
    "coefficient 0.001 (k3); w_j <- (1 - rate) w_j + rate * mean reward of the step's episodes with I_j; now and then the lower "
    "half by weight is pruned, and an editor's candidates join that are no worse than the best survivor when the current policy "
    "plays them",
    assumptions="a policy that follows instructions (sft.instructed for small models). Softmax and objective are the paper's, "
    "the KL coefficient that of Search-R1 (arXiv 2503.09516), on which it builds; the rule of the weights, pruning, verification "
    "and all numbers of rl.tasks.settings are ours",
    reduces_to="population 1: GRPO with loss.kl_coef 0.001 under a fixed instruction; that GRPO itself with the instruction "
    "{question}",
    tested_by="tests/training/test_inspo.py, tests/training/test_inspo_candidates.py",
    switch="rl.algorithm: inspo",
)


def check(given: Rl, rl: Rl) -> None:
    if rl.tasks.source != "instructions":
        raise ParamsError(
            f"rl.tasks.source is {rl.tasks.source}, and inspo draws instructions: set it to instructions, or algorithm to grpo"
        )


COMPOSITION = Composition(
    card=CARD,
    parts={
        **grpo.COMPOSITION.parts,
        "tasks.source": "instructions",
        "loss.kl_coef": 0.001,
        "loss.kl_estimator": "k3",
    },
    check=check,
)
