"""How `rl.algorithm` and explicit settings resolve to one algorithm, and which combinations are rejected."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from stages.agent.logprobs import Vocabulary
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.advantage import GreedyReturns
from stages.algorithms.parts.loss import MeanLogprobs, denominators
from stages.algorithms.parts.part import Part, conditions, get, parts_of
from stages.algorithms.parts.progress import Progress
from stages.algorithms.parts.reward import SCORED, EpisodeRewards
from stages.algorithms.parts.teacher import Teacher
from stages.algorithms.parts.turn_critic import TurnCritic
from stages.algorithms.registry import cards, composition, names
from stages.algorithms.settings import Rl
from stages.records.sections import params_hash
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[2]
EPISODES = [name for name in names() if composition(name).data in ("episodes", "offline_replay")]
PAIRS = [name for name in names() if composition(name).data == "pairs"]
MAX_LENGTH = 100


def test_methods_of_the_survey_and_later_papers_exist() -> None:
    survey = {
        "reinforce",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "rloo",
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "remax",
        "a2c",
        "ppo",
        "gpg",
        "opo",
        "bon_sft",
        "rwr",
    }
    newer = {"lite_ppo", "grpo_t", "grpo_tcr", "grpo_scr", "vspo", "vspo_prs", "meow_tea_taro"}
    further = {"pacs", "rl_plus", "scaling_inter", "rover"}
    assert survey | newer | further <= set(EPISODES)
    assert {"dpo", "ipo", "kto", "orpo", "simpo", "step_dpo", "una", "dro"} <= set(PAIRS)
    assert {name for name in names() if composition(name).data == "offline"} == {"b_coder", "stored_pg"}


@pytest.mark.parametrize("name", names())
def test_every_method_has_a_complete_card(name: str) -> None:
    method = composition(name)
    card = method.card
    assert card.slug == name
    assert card.switch == f"rl.algorithm: {name}"
    for field in ("title", "paper", "equation", "assumptions", "reduces_to", "tested_by"):
        assert getattr(card, field)
    for path in card.tested_by.split(", "):
        assert (ROOT / path).is_file(), f"{name}: {path} does not exist"
    assert set(method.parts) <= set(_keys())


def _keys() -> dict[str, Any]:
    """Every key that a method can choose, with its default."""
    parts = parts_of(Rl()).items()
    of_parts = {f"{name}.{key}": value for name, part in parts for key, value in part}
    return {"minibatches": 1, "group_size": 8, "warm_start": {}} | of_parts


DERIVED = {"advantage.level", "branching.initial", "loss.constant_length", "horizon.steps_per_stage", "replay.policy_updates"} | {
    "reward.overlong_max",
    "reward.overlong_of",
    "reward.overlong_cache",
    "tasks.settings",
    "verifier.fit_share",
}
"""Keys that are derived from others unless the user sets them."""


def test_unset_keys_dump_as_null_and_null_means_unset() -> None:
    """Contract: a params.yaml full of nulls sets nothing; a default value that is set explicitly counts as set."""
    nothing, asked = Rl(), Rl.model_validate({"loss": {"clip_high": 0.2, "kl_coef": None}, "minibatches": None})
    dumped = nothing.model_dump(mode="json")
    assert {key for part in parts_of(nothing) for key, value in dumped[part].items() if value is not None} == set()
    assert dumped["minibatches"] is None
    assert Rl.model_validate(dumped) == nothing != asked
    assert asked.model_dump(exclude_defaults=True) == asked.model_dump(exclude_unset=True) == {"loss": {"clip_high": 0.2}}
    assert resolve(Rl(algorithm="dapo", loss={"clip_high": 0.2})).rl.loss.clip_high == 0.2
    assert resolve(Rl(algorithm="dapo", loss={"clip_high": None})).rl.loss.clip_high == 0.28
    with pytest.raises(ValidationError, match="clip_hgh"):
        Rl.model_validate({"loss": {"clip_hgh": None}})


def test_inapplicable_key_error_names_its_condition() -> None:
    """Contract: the messages come from the conditions declared at the keys, and these name real keys."""
    expected = {
        "reward.overlong_max": "it needs a reward.overlong_penalty above 0",
        "loss.clip_low": "it needs loss.kind: ppo_clip, turn_clip, gspo or cispo",
        "external.mix": "it needs an external.per_group above 0 ",
        "replay.samples": "it needs advantage.estimator: utterance ",
    }
    for key, message in expected.items():
        part, _, name = key.partition(".")
        with pytest.raises(ParamsError, match=message):
            resolve(Rl.model_validate({"algorithm": "reinforce", part: {name: 1 if key != "loss.clip_low" else 0.5}}))
    with pytest.raises(ParamsError, match=r"it needs external\.loss: sft "):
        resolve(Rl(external={"per_group": 1, "coef": 2.0}))
    for name, part in parts_of(Rl()).items():
        assert isinstance(part, Part)
        for key in type(part).model_fields:
            for condition in conditions(type(part), key):
                assert isinstance(condition.holds(resolve(Rl()).rl, name), bool)


@pytest.mark.parametrize("name", names())
def test_unset_key_takes_method_value_or_default(name: str) -> None:
    """Contract: an unset key is the method's value, else the default."""
    rl, method = resolve(Rl(algorithm=name), MAX_LENGTH).rl, composition(name)
    own = dict.fromkeys((f"{piece}.{parts_of(rl)[piece].switch}" for piece in method.pieces), "own")
    for key, default in _keys().items():
        if key not in DERIVED or key in method.parts:
            assert get(rl, key) == {**own, **method.parts}.get(key, default), key


@pytest.mark.parametrize("name", names())
def test_explicit_value_overrides_the_method(name: str) -> None:
    """Contract: a value that the user sets takes precedence over the method's."""
    others: dict[str, Any] = {"group_resampling.kind": "exclude", "loss.aggregation": "seq_mean_token_sum", "loss.clip_high": 0.5}
    others |= {"external.per_group": 2, "external.gamma": 0.1, "horizon.kind": "environment", "advantage.mean": "leave_one_out"}
    others |= {"preference.level": "step", "preference.beta": 0.7, "reward.kl_coef": 0.3, "loss.kl_coef": 0.2}
    others |= {"reward.correct": 2.0, "reward.tool_bonus": 0.4, "reward.overlong_penalty": 0.25, "reward.density": "single"}
    others |= {"minibatches": 3}
    for key in composition(name).parts:
        if key not in others or (key == "preference.level" and name == "step_dpo"):
            continue
        section, _, field = key.rpartition(".")
        values = {section: {field: others[key]}} if section else {field: others[key]}
        rl = resolve(Rl.model_validate({"algorithm": name, **values}), MAX_LENGTH).rl
        assert get(rl, key) == others[key]


@pytest.mark.parametrize(("tasks", "given", "updates"), [(16, None, 4), (3, None, 3), (3, 2, 2), (2, None, 2)])
def test_default_minibatches_are_capped_by_tasks_per_step(tasks: int, given: int | None, updates: int) -> None:
    """Contract: null is the method's number, at most the tasks per step; an explicit number is kept."""
    assert resolve(Rl(algorithm="rover", tasks_per_step=tasks, minibatches=given)).rl.minibatches == updates
    assert resolve(Rl(algorithm="grpo", tasks_per_step=tasks, minibatches=given)).rl.minibatches == (given or 1)


def test_grpo_with_explicit_parts_equals_lite_ppo() -> None:
    """lite_ppo is GRPO with batch std and token mean."""
    by_hand = Rl(algorithm="grpo", advantage={"std": "batch"}, loss={"aggregation": "token_mean"})
    assert resolve(by_hand).rl.model_copy(update={"algorithm": "lite_ppo"}) == resolve(Rl(algorithm="lite_ppo")).rl


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "grpoo"}, "did you mean 'grpo'"),
        ({"algorithm": "grpo", "settings": {"alpha": 1}}, "no keys of its own"),
        ({"algorithm": "ppo", "advantage": {"mean": "group"}}, "estimator: group"),
        ({"algorithm": "ppo", "advantage": {"level": "trajectory"}}, "gae credits turns or tokens"),
        ({"algorithm": "grpo", "advantage": {"lam": 0.5}}, "estimator: gae"),
        ({"algorithm": "grpo", "advantage": {"gamma": 0.5}}, "level: turn or token"),
        ({"algorithm": "grpo", "advantage": {"level": "token", "gamma": 0.9}}, "discount per token"),
        ({"algorithm": "grpo", "advantage": {"whiten": True}}, "already normalised"),
        ({"algorithm": "reinforce", "loss": {"clip_low": 0.2}}, "ppo_clip"),
        ({"algorithm": "gspo", "loss": {"dual_clip": 3.0}}, "ppo_clip"),
        ({"algorithm": "grpo", "loss": {"constant_length": 30}}, "aggregation: constant"),
        ({"algorithm": "grpo", "loss": {"kind": "own"}}, "no loss of its own"),
        ({"algorithm": "grpo", "critic": {"learning_rate": 1e-3}}, "a method with a critic"),
        ({"algorithm": "dapo", "critic": {"warmup_steps": 3}}, "a method with a critic"),
        ({"algorithm": "archer", "sampling": {"top_p": 0.9}}, "archer replays turns of an offline dataset"),
        ({"algorithm": "rl_plus", "sampling": {"top_p": 0.9}}, "rl_plus joins demonstrations to the groups"),
        ({"algorithm": "rover", "sampling": {"top_p": 0.9}}, "rover reads the policy's probabilities over the whole vocabulary"),
        ({"algorithm": "grpo", "sampling": {"temperature": 0.0}}, "set it above 0"),
        ({"algorithm": "reinforce", "epochs": 2}, "does not correct"),
        ({"algorithm": "grpo", "preference": {"beta": 0.1}}, "learns from episodes"),
        ({"algorithm": "tree_bc", "preference": {"beta": 0.1}}, "learns from correct tree paths; set it to null, or algorithm"),
        ({"algorithm": "b_coder", "preference": {"beta": 0.1}}, "learns from an offline dataset; set it to null, or algorithm"),
        ({"algorithm": "dpo", "advantage": {"mean": "group"}}, "preference pairs"),
        ({"algorithm": "dpo", "preference": {"gamma": 0.5}}, "simpo"),
        ({"algorithm": "grpo", "reward": {"tool_bonus_cap": -0.5}}, "tool_bonus above 0"),
        ({"algorithm": "grpo", "reward": {"correct": 1.0}}, "set both"),
        ({"algorithm": "grpo", "reward": {"correct": 0.0, "wrong": 1.0}}, "must be above wrong"),
        ({"algorithm": "grpo", "reward": {"prs": [{"name": "parse", "weight": 1.0}]}}, "kind: prs"),
        ({"algorithm": "vspo", "group_resampling": {"value_of": "last_stage"}}, "reward.kind to prs"),
        ({"algorithm": "vspo_prs", "reward": {"density": "dense"}}, "would replace its scores"),
        ({"algorithm": "grpo", "group_resampling": {"rounds": 2}}, "resample"),
        ({"algorithm": "remax", "advantage": {"level": "turn"}}, "whole episodes"),
        ({"algorithm": "opo", "advantage": {"level": "token"}}, "whole episodes"),
        ({"algorithm": "grpo", "group_size": 1}, "group_size is 1"),
        ({"algorithm": "rloo", "group_size": 1}, "group_size must be"),
        ({"algorithm": "opo", "group_size": 1}, "group_size must be"),
        ({"algorithm": "lite_ppo", "group_size": 1}, "group_size must be"),
        ({"algorithm": "vspo", "group_size": 1}, "groups of equal rewards"),
        ({"algorithm": "reinforce", "group_size": 1, "tasks_per_step": 1}, "only one"),
        ({"algorithm": "remax", "group_size": 1, "advantage": {"std": "batch"}, "tasks_per_step": 1}, "only one"),
        ({"algorithm": "remax", "group_size": 1, "advantage": {"std": "group"}}, "compares episodes of a group"),
        ({"algorithm": "reinforce", "group_size": 1, "group_resampling": {"kind": "exclude"}}, "groups of equal rewards"),
        ({"algorithm": "gpg", "group_size": 1}, "group_size is 1"),
        ({"algorithm": "rwr", "group_size": 1, "settings": {"over": "group"}}, "group_size is 1"),
        ({"algorithm": "ppo", "advantage": {"std": "batch"}}, "estimator: group"),
        ({"algorithm": "ppo", "advantage": {"ddof": 0}}, "estimator: group"),
        ({"algorithm": "ppo", "critic": {"warmup_steps": 20}}, "leaves none of rl.steps"),
        ({"algorithm": "a2c", "epochs": 2}, "does not correct"),
        ({"algorithm": "a2c", "minibatches": 2}, "does not correct"),
        ({"algorithm": "a2c", "loss": {"clip_high": 0.3}}, "ppo_clip"),
        (
            {"curriculum": {"kind": "uniform", "floor": 0.3}},
            r"rl\.curriculum\.floor .* needs curriculum\.kind: difficulty or value",
        ),
        ({"selection": {"easy_min": 0.9}}, r"rl\.selection\.easy_min .* needs selection\.kind: model_aware"),
        ({"algorithm": "remax", "critic": {"coef": 0.5}}, "a method with a critic"),
        ({"algorithm": "gpg", "advantage": {"mean": "group"}}, "estimator: group"),
        ({"algorithm": "gpg", "advantage": {"level": "turn"}}, "group, gae or team"),
        ({"algorithm": "gpg", "settings": {"most": -1}}, r"'rl\.settings\.most' Input should be greater than 0"),
        ({"algorithm": "grpo", "advantage": {"estimator": "own"}}, "no advantage of its own"),
        ({"algorithm": "dpo", "preference": {"loss": "own"}}, "no preference of its own"),
        ({"algorithm": "grpo", "loss": {"kl_estimator": "k1"}}, "kl_coef above 0"),
        ({"algorithm": "grpo", "reward": {"kl_estimator": "k1"}}, "kl_coef above 0"),
        ({"algorithm": "grpo", "credit": {"weight": 0.5}}, "credit.kind: annotated"),
        ({"algorithm": "grpo", "reward": {"max_total": 5.0}}, "density: dense"),
        ({"algorithm": "grpo", "reward": {"overlong_max": 50}}, "overlong_penalty above 0"),
        ({"algorithm": "dapo", "reward": {"overlong_max": 50, "overlong_cache": 60}}, "must be at most overlong_max"),
        ({"algorithm": "grpo_tcr", "reward": {"tool_bonus_cap": 1.0}}, "below correct"),
        ({"algorithm": "grpo_tcr", "reward": {"tool_bonus_cap": -2.0}}, "at least wrong"),
        ({"algorithm": "grpo_tcr", "reward": {"density": "dense"}}, "correct and wrong replace the rewards"),
        ({"algorithm": "grpo_tcr", "reward": {"density": "single"}}, "correct and wrong replace the rewards"),
        ({"algorithm": "grpo_tcr", "reward": {"kind": "prs"}}, "correct and wrong replace the rewards"),
        ({"algorithm": "vspo_prs", "reward": {"density": "single"}}, "would replace its scores"),
        ({"algorithm": "vspo_prs", "reward": {"prs": [{"name": "parse", "weight": 0.0}]}}, "set one above 0"),
        ({"algorithm": "vspo_prs", "reward": {"prs": [{"name": "parse", "weight": 0.5}] * 2}}, "names a stage twice"),
        ({"algorithm": "vspo_prs", "reward": {"prs": [{"name": "parse", "weight": 3.0}]}}, "up to 3"),
        ({"algorithm": "vspo", "reward": {"correct": 5.0, "wrong": 0.0}}, "up to 5"),
        ({"algorithm": "vspo", "group_resampling": {"min_value": 0.1}}, "replace: low_value"),
        ({"algorithm": "vspo", "group_resampling": {"kind": "random", "temperature": 2.0}}, "group_resampling.kind: value"),
        ({"algorithm": "grpo", "group_resampling": {"smooth": "sqrt"}}, "random or value"),
        ({"algorithm": "grpo", "group_resampling": {"zero_tol": 0.1}}, "other than none"),
        ({"algorithm": "archer", "sampling": {"top_k": 5}}, "top_k 0"),
        ({"algorithm": "orpo", "preference": {"smoothing": 0.1}}, "cdpo or robust_dpo"),
        ({"algorithm": "dpo", "preference": {"length_normalise": True}}, "preference.loss: ipo"),
        ({"algorithm": "dpo", "preference": {"desirable": 2.0}}, "preference.loss: kto"),
        ({"algorithm": "una", "preference": {"nll_coef": 2.0}}, "cpo or orpo"),
        (
            {"algorithm": "una", "settings": {"distance": "kl"}},
            r"'rl\.settings\.distance' Input should be 'mse'",
        ),
        ({"algorithm": "kto", "critic": {"coef": 0.5}}, "preference pairs"),
        ({"algorithm": "simpo", "credit": {"kind": "annotated"}}, "preference pairs"),
        ({"algorithm": "kto", "preference": {"pairs_per_step": 1}}, "at least 2"),
    ],
    ids=str,
)
def test_conflicting_settings_error_names_key_and_remedy(values: dict, message: str) -> None:
    """The message names the key, the reason and the remedy."""
    with pytest.raises(ParamsError, match=message) as error:
        resolve(Rl.model_validate(values), MAX_LENGTH)
    text = str(error.value)
    assert re.search(r"\brl\.[a-z]", text), text
    assert re.search(r"\b(set|set it|choose|raise|must|mean|known|give|should)\b", text), text


@pytest.mark.parametrize("name", EPISODES)
def test_group_methods_reject_groups_of_one(name: str) -> None:
    """G = 1 with a group estimator is a configuration error; the advantage would be the return itself."""
    single = Rl(algorithm=name, group_size=1)
    advantage = resolve(Rl(algorithm=name), MAX_LENGTH).rl.advantage
    compares = {"group", "leave_one_out", "length_weighted"} & {advantage.mean, advantage.std}
    if compares or composition(name).whole_groups or name == "gpg":  # gpg centres returns within groups
        with pytest.raises(ParamsError, match="group_size"):
            resolve(single, MAX_LENGTH)
    else:
        assert resolve(single, MAX_LENGTH).rl.group_size == 1


@pytest.mark.parametrize("name", EPISODES)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"])
def test_every_method_and_aggregation_takes_a_step(make_batch, name: str, aggregation: str) -> None:
    """A finite loss and a non-zero gradient on two prompts."""
    algorithm = resolve(Rl(algorithm=name, group_size=2, loss={"aggregation": aggregation}), MAX_LENGTH)
    batch = make_batch([[1, 0], [0, 1]], lengths=[2, 3, 4, 1]).with_extra(GreedyReturns(torch.tensor([0.0, 0.0, 1.0, 1.0])))
    if algorithm.rl.reward.kind in SCORED:
        batch = batch.with_extra(EpisodeRewards(batch.rewards))
    if algorithm.needs_reference:
        batch = batch.with_(logprobs_ref=batch.logprobs_old - 0.1 * batch.mask)
    if algorithm.needs_critic:
        batch = batch.with_(values=torch.full(batch.mask.shape, 0.5) * batch.mask)
    if algorithm.needs_turn_critic:
        batch = batch.with_extra(TurnCritic(batch.rewards[:, None, None].expand(-1, 1, 2), torch.full((4, 1, 2), 0.5)))
    if algorithm.needs_progress:
        batch = batch.with_extra(Progress(batch.rewards[:, None] - 0.25))
    if algorithm.needs_teacher:
        batch = batch.with_extra(Teacher(batch.logprobs_old - batch.rewards[:, None] * batch.mask, batch.mask))
    nothing, whole = torch.zeros(batch.mask.shape), None
    if algorithm.needs_vocabulary:
        batch, whole = batch.with_extra(MeanLogprobs(nothing)), Vocabulary(nothing, nothing)
    batch = algorithm.prepare(algorithm.resample(algorithm.shape(batch), "key"))
    logprobs = batch.logprobs_old.clone().requires_grad_()
    terms = algorithm.loss(logprobs, nothing, batch, denominators(batch, 8.0), whole)
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    assert torch.isfinite(terms.loss)
    assert gradient.abs().sum() > 0
    assert gradient[~batch.mask].abs().sum() == 0
    assert int(terms.sums["tokens"]) == 10


def test_kl_terms_need_reference_logprobs(make_batch) -> None:
    algorithm = resolve(Rl(algorithm="grpo", group_size=2, loss={"kl_coef": 0.1}))
    assert algorithm.needs_reference
    batch = algorithm.prepare(make_batch([[1, 0]]))
    with pytest.raises(ValueError, match="reference"):
        algorithm.loss(batch.logprobs_old, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
    in_reward = resolve(Rl(algorithm="grpo", group_size=2, reward={"kl_coef": 0.1}))
    assert in_reward.needs_reference
    with pytest.raises(ValueError, match="reference"):
        in_reward.prepare(make_batch([[1, 0]]))


def test_cards_are_sorted_and_params_check_imports_no_torch() -> None:
    assert [card.slug for card in cards()] == names()
    code = "import stages.params as p, sys; p.load_params(); raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_added_keys_change_no_hash() -> None:
    """Contract: episodes of the default run have the hash of their settings, so a key that is added, with its default, must not
    change it (stages/records/sections.py: ADDED, ADDED_PARTS)."""
    assert params_hash(resolve(Rl(), 640).rl) == "fec48c38a66abe57"
