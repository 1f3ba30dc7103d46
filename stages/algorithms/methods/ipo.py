"""IPO: the squared loss of identity preference optimisation."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="ipo",
    title="IPO",
    paper="Azar et al., arXiv 2310.12036",
    equation="loss = (D - 1 / (2 beta))^2, D as in DPO",
    assumptions="pairs of data/annotated/<domain>; sums of log-probabilities as in the paper and OpenRLHF "
    "(preference.length_normalise: true takes means per token, as TRL does)",
    reduces_to="D = 1 / (2 beta): 0",
    tested_by="tests/algorithms/test_preference.py",
    switch="rl.algorithm: ipo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "preference.loss": "ipo",
    },
    data="pairs",
)
