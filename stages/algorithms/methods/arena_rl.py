"""ArenaRL: tournaments among the episodes of a group, judged pairwise in both orders; advantages by rank."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="arena_rl",
    title="ArenaRL",
    paper="Zhang et al., arXiv 2601.06487",
    equation="a greedy episode meets all others and seeds them by S_i = J(i, 0)[first] + J(0, i)[second]; a single elimination "
    "bracket decides the order of finish k = 0 .. N-1; r = 1 - k/(N-1); A_i = (r_i - mean) / (std with n-1, + 1e-6); PPO's clip "
    "1 - 0.2 .. 1 + 0.28; mean over episodes; no KL. A judge's score is round(w P + (1-w) Q, 1), w = 0.6, P and Q the rounded "
    "means of the criteria on the steps and on the answer",
    assumptions="a judge that tells similar answers apart better in pairs than by absolute scores, which judge_agreement in the "
    "history measures; ranks hide how large differences are. Switches of ours: the greedy anchor is ranked but not trained on "
    "(judge.anchor: first trains on all); byes protect the top seeds (judge.byes: reference does not); judge.tie_policy "
    "split_rank gives a group without differences no advantages; judge.reward bradley_terry ranks by strengths. The released "
    "configuration uses judge.scheme anchor",
    reduces_to="groups of 2 with judge.anchor first: a win or a loss; judge.scheme round_robin with a transitive judge: GRPO on "
    "ranks; judge.scheme pointwise: GRPO on the judge's scores",
    tested_by="tests/judging/test_tournaments.py, tests/judging/test_groups.py, tests/training/test_judged_rl.py",
    switch="rl.algorithm: arena_rl",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kind": "judge",
        "judge.scheme": "seeded_single_elimination",
        "judge.anchor": "greedy",
        "judge.process_weight": 0.6,
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "loss.aggregation": "seq_mean_token_mean",
    },
)
