"""RLMT: the policy thinks before it answers, and a preference model scores the answer alone."""

from stages.algorithms.card import Card, Composition
from stages.judging.settings import Extraction

CARD = Card(
    slug="rlmt",
    title="RL with model-rewarded thinking",
    paper="Bhaskar et al., arXiv 2509.20357",
    equation="max E r(x, E(o)), o the thought and the response, E(o) the response: after the end of a thought, or [NULL] "
    "without one; r a preference model's scalar; A = (r - mean) / (std with n-1, + 1e-6) in groups; PPO's clip 0.2, at most 3 "
    "|A| for A < 0; mean over the batch's tokens, thoughts included; + 0.001 KL (k3) - 0.001 entropy",
    assumptions="a policy that thinks between the markers of model.thinking: warm start on demonstrations with thoughts "
    "(curate.thoughts), or none and an instruction (sft.demonstrations 0, model.thinking.instruction). The reward model is "
    "annotate.judge_model, of kind reward, fitted to preferences between responses. Where a message has several ends of "
    "thoughts, environment and judge read after the same one (model.thinking.occurrence; the authors' code trains on the first "
    "and evaluates by the last). judge.extract.strict false is the lenient format, in "
    "which a policy that leaves the marker out has its thoughts judged; the history has the share with a "
    "response, and the lengths of thoughts and responses. curate.thoughts padding controls for length",
    reduces_to="judge.extract.marker '': RLHF with the same reward model; reward.kind environment: GRPO with thoughts; groups of "
    "2: the better of two",
    tested_by="tests/judging/test_extraction.py, tests/training/test_rlmt.py, tests/curation/test_thoughts.py",
    switch="rl.algorithm: rlmt",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kind": "judge",
        "judge.kind": "local",
        "judge.scheme": "pointwise",
        "judge.raw": True,
        "judge.extract": Extraction(),
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.dual_clip": 3.0,
        "loss.aggregation": "token_mean",
        "loss.kl_coef": 0.001,
        "loss.kl_estimator": "k3",
        "loss.entropy_coef": 0.001,
    },
)
