"""SimPO: length-normalised preference optimisation without a reference."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="simpo",
    title="SimPO",
    paper="Meng et al., arXiv 2405.14734",
    equation="loss = -log sigmoid(beta (l(winner) - l(loser)) - gamma), l: mean log-probability per token",
    assumptions="pairs of data/annotated/<domain>; no reference; gamma is not multiplied by beta (convert recipes that give "
    "gamma/beta)",
    reduces_to="gamma 0 and equal lengths: CPO without its likelihood term, beta divided by the length",
    tested_by="tests/algorithms/test_preference.py",
    switch="rl.algorithm: simpo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "preference.loss": "simpo",
        "preference.beta": 2.0,
        "preference.gamma": 1.0,
    },
    data="pairs",
)
