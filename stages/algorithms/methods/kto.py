"""KTO: Kahneman-Tversky optimisation of single examples."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="kto",
    title="KTO",
    paper="Ethayarajh et al., arXiv 2402.01306",
    equation="h = log pi - log pi_ref; loss = desirable (1 - sigmoid(beta (h - z0))) of winners + undesirable (1 - "
    "sigmoid(beta (z0 - h))) of losers, mean over both; z0 = max(0, mean h of mismatched histories and continuations), no "
    "gradient",
    assumptions="pairs of data/annotated/<domain>; winners and losers are used as single examples; z0 costs a pass over "
    "mismatched continuations: each history with those of the next pair with a different history",
    reduces_to="h = z0: 0.5",
    tested_by="tests/algorithms/test_preference.py",
    switch="rl.algorithm: kto",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "preference.loss": "kto",
    },
    data="pairs",
)
