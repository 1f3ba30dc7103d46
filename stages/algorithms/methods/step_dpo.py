"""Step-DPO: DPO on single steps."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="step_dpo",
    title="Step-DPO",
    paper="Lai et al., arXiv 2406.18629",
    equation="DPO on the two actions after a common history, without their continuations",
    assumptions="pairs of data/annotated/<domain>, whose actions differ in value by at least annotate.pairs.min_margin",
    reduces_to="preference.level trajectory: DPO",
    tested_by="tests/algorithms/test_preference.py",
    switch="rl.algorithm: step_dpo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "preference.loss": "dpo",
        "preference.level": "step",
    },
    data="pairs",
)
