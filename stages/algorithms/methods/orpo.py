"""ORPO: an odds-ratio loss added to the likelihood of the winner, without a reference."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="orpo",
    title="ORPO",
    paper="Hong et al., arXiv 2403.07691",
    equation="loss = nll_coef * -l(winner) - beta log sigmoid(log odds(winner) - log odds(loser)); l: mean log-probability per "
    "token, odds = p / (1 - p), p = exp(l)",
    assumptions="pairs of data/annotated/<domain>; no reference",
    reduces_to="beta 0: supervised fine-tuning on the winners",
    tested_by="tests/algorithms/test_preference.py",
    switch="rl.algorithm: orpo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "preference.loss": "orpo",
        "preference.beta": 0.1,
    },
    data="pairs",
)
