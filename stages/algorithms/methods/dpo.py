"""DPO: direct preference optimisation."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="dpo",
    title="DPO",
    paper="Rafailov et al., arXiv 2305.18290",
    equation="loss = -log sigmoid(beta D), D = (log pi - log pi_ref)(winner) - (log pi - log pi_ref)(loser), log-probabilities "
    "summed over the policy tokens of the two continuations of a common history",
    assumptions="pairs of data/annotated/<domain>; a continuation leads from the compared action to the nearest successful "
    "(failed) end in the tree (preference.level: step: only the action)",
    reduces_to="preference.loss cdpo with smoothing 0; D = 0: log 2",
    tested_by="tests/algorithms/test_preference.py",
    switch="rl.algorithm: dpo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "preference.loss": "dpo",
        "preference.level": "trajectory",
    },
    data="pairs",
)
