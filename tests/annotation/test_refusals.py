"""Contradictory settings of annotate are rejected with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from stages.annotation.derived import q_range, value_head, value_range
from stages.annotation.settings import Annotate
from stages.params import ParamsError, check_domains, parse_params

TREES: dict[str, Any] = {"tasks": 48}
EAGER = {"kind": "eager"}
WIDE: dict[str, Any] = {"value_model": {"head": {"v_min": -7.0, "v_max": 2.0}}}
NARROW: dict[str, Any] = {"value_model": {"head": {"v_min": -5.0, "v_max": 1.5}}}
DISCARDED: dict[str, Any] = {"expansion": EAGER, "evaluation": {"keep_rollouts": False}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 0.9, "labels": {"q": "tree"}}, "set gamma to 1"),
        ({"gamma": 0.9, "labels": {"q": "process"}}, "set gamma to 1"),
        ({"reward_range": [1.0, 0.0]}, "reward_range must be"),
        ({"reward_range": [-1.0, 1.0], "backup": "discounted_max"}, "single rewards"),
        ({"reward_range": [-1.0, 1.0], "labels": {"q": "best"}}, "single rewards"),
        ({"backup": "discounted_max", "cut_return": 0.0}, "have no effect"),
        ({"backup": "discounted_max", "evaluation": {"kind": "mixed"}}, "have no effect"),
        ({"cut_return": -0.5}, "outside reward_range"),
        ({"pairs": {"min_margin": 1.5}}, r"'rollout', which is in \[0, 1\]"),
        ({"pairs": {"min_margin": 1.5}, "reward_range": [-1.0, 1.0]}, r"'rollout', which is in \[0, 1\]"),
        ({"pairs": {"min_margin": 7.0}, "returns": [-6.0, 0.0]}, r"'rollout', which is in \[-6, 0\]"),
        (
            {"pairs": {"min_margin": 7.0}, "returns": [-6.0, 0.0], "labels": {"q": "best"}, **WIDE},
            r"'best', which is in \[-6, 0\]",
        ),
        ({"returns": [0.0, -6.0]}, "returns must be"),
        ({"returns": [-6.0, 0.0], "labels": {"q": "tree"}, **NARROW}, r"value_model.head: returns are in \[-6, 0\]"),
        ({"returns": [-6.0, 0.0], **NARROW}, r"value_model.head: returns are in \[-6, 0\]"),
        ({"returns": [-6.0, 0.0], "evaluation": {"kind": "mixed"}, **NARROW}, r"value_model.head: returns are in \[-6, 0\]"),
        ({"returns": [-6.0, 0.0], "progress": {"kind": "spa", "head": {"loss": "two_hot"}}}, r"progress.head: returns are"),
        (
            {"returns": [-6.0, 0.0], "labels": {"q": "best"}, **WIDE, "q_model": {"kind": "regression"}},
            r"q_model.head: the labels' q are in \[-6, 0\]",
        ),
        ({"evaluation": {"kind": "value_model"}}, "set that to eager"),
        ({"evaluation": {"keep_rollouts": False}}, "set that to eager"),
        ({"selection": {"unvisited": "zero"}}, "every child has a visit"),
        ({"expansion": {"drop_refused": True}}, "a rollout continues"),
        ({"expansion": {"dedupe": "state"}}, "exact tokens"),
        ({"expansion": EAGER, "selection": {"unvisited": "value"}}, "set evaluation.kind to value_model"),
        ({"expansion": EAGER, "selection": {"unvisited": "bonus"}}, "set evaluation.kind to value_model"),
        ({**DISCARDED, "labels": {"q": "process"}}, "needs the ends below a step"),
        ({**DISCARDED, "labels": {"q": "best"}}, "needs the ends below a step"),
        ({**DISCARDED, "pairs": {"rule": "best_path"}}, "needs the ends below a step"),
        (
            {**DISCARDED, "backup": "discounted_max"},
            "backup 'discounted_max' needs the ends below a step: set evaluation.keep_roll",
        ),
        ({"tasks": 0, "q_model": {"kind": "step_dpo"}}, "q_model.kind needs trees, and tasks is 0"),
        ({"tasks": 0, "judge_model": {"kind": "comparison", "labels": "trees"}}, "judge_model.labels needs trees"),
        ({**DISCARDED, "q_model": {"kind": "trajectory_dpo"}}, "needs the ends below a step"),
        ({"expansion": EAGER, "evaluation": {"critic": "value"}}, "needs a value model"),
        ({"expansion": EAGER, "evaluation": {"kind": "value_model"}}, "has none: set it to tree"),
        (
            {"expansion": EAGER, "evaluation": {"kind": "value_model", "rollouts": 2}, "labels": {"q": "tree"}},
            "uses no rollouts",
        ),
        ({"evaluation": {"lookahead": 2}}, "looks ahead with the value model"),
        ({"stop": {"extra_after_success": 3}}, "needs on_success"),
        ({"stop": {"value": 0.9}}, "stop.value needs a value model"),
        ({"selection": {"rule": "random", "decay": "linear"}}, "does not decay"),
        ({"selection": {"rule": "random", "unvisited": "first"}}, "set unvisited to null"),
        ({"selection": {"rule": "omega"}}, "at least 2"),
        ({"selection": {"rule": "omega"}, "evaluation": {"rollouts": 8}, "backup": "max"}, "set backup to mean"),
        ({"selection": {"rule": "omega"}, "evaluation": {"rollouts": 8}, "expansion": EAGER}, "set expansion.kind to lazy"),
        ({"selection": {"rule": "omega"}, "evaluation": {"rollouts": 8}, "leaves_per_tree": 2}, "set leaves_per_tree to 1"),
    ],
)
def test_conflicting_settings_are_rejected(settings: dict[str, Any], message: str):
    """Contract: settings that would have no effect or no meaning are rejected before anything runs."""
    with pytest.raises(ValueError, match=message):
        Annotate(**TREES | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selection": {"omega": {"alpha": 0.1}}}, "selection.omega has no effect: it needs rule: omega"),
        ({"selection": {"decay_to": 0.5}}, "selection.decay_to has no effect: it needs decay: linear or exponential"),
        ({"selection": {"prior_temperature": 2.0}}, "selection.prior_temperature has no effect: it needs rule: puct"),
        (
            {"value_model": {"rollouts": False}, "labels": {"q": "tree"}},
            "value_model.rollouts has no effect: it needs labels.q: rollout; set it to True",
        ),
        ({"pairs": {"rule": "threshold", "top": 3}}, "pairs.top has no effect: it needs rule: top_bottom, or q_model.kind: traj"),
        ({"pairs": {"rule": "best_path", "bottom": 1}}, "pairs.bottom has no effect: it needs rule: top_bottom"),
        ({"virtual": "loss"}, "virtual has no effect: it needs leaves_per_tree of at least 2; set it to wu_uct"),
        ({"evaluation": {"value_share": 0.9}}, "evaluation.value_share has no effect: it needs kind: mixed"),
        ({"evaluation": {"backbone": "own"}}, "evaluation.backbone has no effect"),
        ({"value_model": {"epochs": 3}}, "value_model.epochs has no effect: it needs trains: all"),
        ({"value_model": {"trains": "all", "l2": 0.1}}, "value_model.l2 has no effect: it needs trains: head"),
        ({"q_model": {"kind": "regression", "init": "value_model"}}, "set value_model.trains to all, or init to sft"),
        ({"evaluation": {"critic_share": 0.1}}, "evaluation.critic_share has no effect: it needs critic"),
        (
            {"expansion": EAGER, "evaluation": {"kind": "value_model", "temperature": 0.7}, "labels": {"q": "tree"}},
            "evaluation.temperature has no effect: it needs kind: rollout or mixed; set it to null",
        ),
        ({"labels": {"q": "tree", "pool": False}}, "labels.pool has no effect: it needs q: rollout; set it to True"),
        ({"pairs": {"rule": "threshold", "lone": 1}}, "pairs.lone has no effect: it needs rule: top_bottom"),
        ({"q_model": {"kind": "regression", "beta": 3.0}}, "q_model.beta has no effect: it needs kind: step_dpo"),
        ({"q_model": {"kind": "step_dpo", "head": {"loss": "mse"}}}, "q_model.head has no effect: it needs kind: regr"),
        ({"q_model": {"epochs": 4.0}}, "q_model.epochs has no effect: it needs a kind other than none"),
        ({"progress": {"learning_rate": 0.1}}, "progress.learning_rate has no effect"),
        ({"progress": {"head": {"loss": "c51"}}}, "progress.head has no effect: it needs kind: spa"),
    ],
)
def test_settings_without_effect_are_rejected(settings: dict[str, Any], message: str):
    """Contract: the message says what would read the setting and what to set it to."""
    with pytest.raises(ValueError, match=message):
        Annotate(**TREES | settings)


PLAIN: dict[str, Any] = {"domains": ["search"], "per_domain": {"search": {}}, "annotate": TREES}


@pytest.mark.parametrize(
    ("rl", "key"),
    [
        ({"algorithm": "step_dpo"}, "algorithm: step_dpo"),
        ({"algorithm": "tree_bc"}, "algorithm: tree_bc"),
        ({"warm_start": {"algorithm": "tree_bc"}}, "algorithm: tree_bc"),
        ({"credit": {"kind": "annotated"}}, "credit.kind: annotated"),
        ({"curriculum": {"kind": "value"}}, "curriculum.kind: value"),
        ({"algorithm": "ppo", "critic": {"init": "value_model"}}, "critic.init: value_model"),
        ({"algorithm": "opsd", "settings": {"source": "trees"}}, "settings.source: trees"),
        ({"environment_steps": 100, "add_tree_steps": True}, "add_tree_steps"),
    ],
)
def test_readers_of_trees_are_refused_without_them(rl: dict[str, Any], key: str):
    """Contract: annotate.tasks 0 grows no trees, so that nothing may read them; what reads none of them is accepted."""
    parse_params({**PLAIN, "rl": rl})
    with pytest.raises(ParamsError, match=f"rl.{key} .*annotate.tasks is 0"):
        parse_params({**PLAIN, "rl": rl, "annotate": {"tasks": 0}})


def test_no_trees_are_accepted_where_nothing_reads_them():
    for rl in ({}, {"algorithm": "spa_rl"}, {"algorithm": "dpo", "preference": {"source": "imported"}}):
        own = {"curate": {"imports": ["data/raw/pairs.jsonl"]}} if rl.get("preference") else {}
        rest = {"rl": rl, "rollout": {"tasks": 96}, "annotate": {"tasks": 0, "progress": {"kind": "spa"}}}
        parse_params({**PLAIN, **own, **rest})
    again = {"credit": {"kind": "annotated"}, "reannotate": {"every": 5, "annotate": {"tasks": 0}}}
    with pytest.raises(ParamsError, match=r"rl\.reannotate\.annotate\.tasks is 0"):
        parse_params({**PLAIN, "rl": again})


def test_settings_are_accepted_where_they_have_an_effect():
    """Contract: pairs.top and bottom also choose the episodes of trajectory_dpo; prior_temperature applies to puct."""
    ends = Annotate(**TREES, pairs={"rule": "threshold", "top": 3, "bottom": 1}, q_model={"kind": "trajectory_dpo"}).pairs
    assert (ends.top, ends.bottom) == (3, 1)
    other = Annotate(selection={"rule": "puct", "prior_temperature": 2.0}, value_model={"rollouts": False})
    assert (other.selection.prior_temperature, other.value_model.rollouts) == (2.0, False)


def test_policy_backbone_needs_the_torch_engine():
    """Contract: a value model on the policy's hidden states needs the torch engine; one with its own backbone does not."""
    values: dict[str, Any] = {
        "domains": ["search"],
        "per_domain": {"search": {}},
        "resources": {"engine": {"kind": "openai"}},
        "annotate": {"evaluation": {"kind": "mixed"}},
    }
    with pytest.raises(ParamsError, match=r"set backbone to own and value_model\.trains to all"):
        parse_params(values)
    values["annotate"]["evaluation"]["backbone"] = "own"
    with pytest.raises(ParamsError, match=r"trains a copy of the policy, and value_model\.trains is head: set it to all"):
        parse_params(values)
    values["annotate"]["value_model"] = {"trains": "all"}
    parse_params(values)


def test_episode_preferences_need_kept_rollouts():
    """Contract: methods on pairs of whole episodes need rollouts as nodes; methods on steps, and those that play episodes, do
    not."""
    values: dict[str, Any] = {"domains": ["search"], "per_domain": {"search": {}}, "annotate": TREES | DISCARDED}
    with pytest.raises(ParamsError, match="keep_rollouts: false does not keep"):
        parse_params({**values, "rl": {"algorithm": "dpo"}})
    parse_params({**values, "rl": {"algorithm": "step_dpo"}})
    parse_params({**values, "rl": {"algorithm": "grpo"}})


def test_value_ranges_follow_the_returns():
    """Contract: labels that are returns have the returns' range, and heads and margins allow for it."""
    for q in ("rollout", "best"):
        params = Annotate(returns=[-6.0, 0.0], labels={"q": q}, pairs={"min_margin": 5.0}, **WIDE)
        assert value_range(params) == q_range(params) == (-6.0, 0.0)
    graded: dict[str, Any] = {"labels": {"q": "tree"}, "pairs": {"min_margin": 1.0}, "q_model": {"kind": "regression"}}
    tree = Annotate(**TREES, returns=[-6.0, 0.0], **graded, **WIDE)
    assert (value_range(tree), q_range(tree)) == ((-6.0, 0.0), (0.0, 1.0))
    assert value_range(Annotate(returns=[-6.0, 0.0], labels={"q": "hard"})) == (0.0, 1.0), "hard labels are 0 or 1"


def test_default_head_support_follows_the_returns():
    """Contract: the head's default support, a fifth beyond [0, 1] on either side, is scaled to other returns; an explicit support
    stays, and so does the default for shares."""
    head = value_head(Annotate(returns=[-6.0, 0.0]))
    assert (head.v_min, head.v_max) == pytest.approx((-7.2, 1.2))
    assert value_head(Annotate()) == Annotate().value_model.head
    assert value_head(Annotate(returns=[-6.0, 0.0], **WIDE)).v_min == -7.0
    assert value_head(Annotate(returns=[-6.0, 0.0], labels={"q": "hard"})).v_min == -0.2


ANNOTATED, OTHER_REWARDS = {"credit": {"kind": "annotated"}}, "credit.kind: annotated .*set rl.reward.kind and density to env"
UNSUITABLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (ANNOTATED, {"labels": {"q": "hard"}}, "labels.q 'hard' .* set q to rollout, tree or best, or kind to outcome"),
    (ANNOTATED, {"labels": {"q": "process"}}, "rl.credit.kind: annotated .*labels.q 'process'"),
    (ANNOTATED, {"gamma": 0.9}, "annotate.gamma is 0.9: set it to 1"),
    ({**ANNOTATED, "reward": {"density": "single"}}, {}, OTHER_REWARDS),
    ({**ANNOTATED, "reward": {"correct": 1.0, "wrong": -1.0}}, {}, OTHER_REWARDS),
    ({"algorithm": "ppo", "critic": {"init": "value_model"}}, {"labels": {"q": "process"}}, "or init to policy"),
    ({"curriculum": {"kind": "value"}}, {"labels": {"q": "hard"}}, "rl.curriculum.kind: value .*or kind to difficulty"),
    (
        {"curriculum": {"kind": "value"}},
        {"returns": [-6.0, 0.0]},
        r"returns p in \[0, 1\], and annotate.returns is \[-6.0, 0.0\]",
    ),
]


@pytest.mark.parametrize(("rl", "annotate", "message"), UNSUITABLE)
def test_values_that_do_not_estimate_the_return_are_rejected(rl: dict[str, Any], annotate: dict[str, Any], message: str):
    """Contract: readers of the step-value model need estimates of the environment's undiscounted return; the message names the
    reader and the remedy."""
    with pytest.raises(ParamsError, match=message):
        parse_params({"domains": ["wordle"], "per_domain": {"wordle": {"rl": rl, "annotate": TREES | annotate}}})


@pytest.mark.parametrize("q", ["rollout", "tree", "best"])
def test_step_credit_supports_any_returns(q: str):
    """Contract: with labels that are returns, step credit and a critic initialised from the step-value model accept any domain's
    returns: -6 to 0 in wordle, graded ones in shop."""
    wide = {"v_min": -7.2, "v_max": 1.2}
    lmrl = {"environment": {"reward": "lmrl"}, "annotate": {"returns": [-6.0, 0.0], "labels": {"q": q}}}
    shop = {"annotate": {"labels": {"q": q}}}
    start = {"algorithm": "ppo", "critic": {"init": "value_model"}}
    wordle = {**start, "critic": {**start["critic"], "head": wide}}
    for rl in (
        {"wordle": {"credit": {"kind": "annotated"}}, "shop": {"credit": {"kind": "annotated"}}},
        {"wordle": wordle, "shop": start},
    ):
        per_domain = {"wordle": {**lmrl, "rl": rl["wordle"]}, "shop": {**shop, "rl": rl["shop"]}}
        check_domains(parse_params({"domains": ["wordle", "shop"], "per_domain": per_domain, "annotate": TREES}))
