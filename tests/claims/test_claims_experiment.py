"""Experiments fixed before the run: their files, the settings of each arm, and what the digest covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from rloo_experiment import PARAMS, SPEC, experiment, write

from stages.algorithms.registry import names
from stages.claims import __main__ as stage
from stages.claims.arms import arm_values, run_values, start_key, start_values
from stages.claims.checks import check_environments, check_experiment
from stages.claims.entries import load_entries, with_profile
from stages.claims.experiment import FOLDER, Experiment, load_experiment, slugs
from stages.claims.plan import planned_runs
from stages.claims.results import Results
from stages.claims.session import drop_outdated
from stages.claims.tuning import FIRST_SEED
from stages.params import ROOT, load_params
from stages.records.sections import params_hash
from stages.reporting.board.rows import saved_results
from stages.runtime.validation import ParamsError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "tricks"}, "family"),
        ({"looks": [8, 8]}, r"looks must be one to 4 growing numbers of seeds from 2 on, not \[8, 8\]"),
        ({"untuned": None}, "lane rl needs tune, or untuned with the reason; it has neither"),
        ({"gate": {"baseline": "grpo"}}, "it has gate and ungated"),
        ({"ungated": None, "gate": {"baseline": "ppo"}}, r"gate names \['ppo'\]; the arms are rloo, grpo"),
        ({"untuned": None, "tune": {"key": "rl.learning_rate", "values": [0.1, 0.01]}}, "values must ascend"),
        ({"untuned": None, "tune": {"key": "sft.epochs", "values": [1, 2]}}, "tune.key"),
        ({"claims": [{**SPEC["claims"][0], "threshold": -0.02}]}, "greater than or equal to 0"),
        ({"claims": [{**SPEC["claims"][0], "metric": "panel.cost"}]}, "margin"),
        ({"claims": [{**SPEC["claims"][0], "kind": "equivalence"}]}, "a claim of equivalence has a margin only"),
        ({"arms": {"rloo": {}}}, "arms"),
        ({"claims": []}, "claims"),
        ({"budget": {}}, r"budget\.environment_steps"),
        ({"treshold": 1}, "unknown key 'treshold'"),
        ({"claims": [{**SPEC["claims"][0], "arm": "ppo"}]}, r"claim 1 names \['ppo'\]; the arms are rloo, grpo"),
        ({"claims": [{**SPEC["claims"][0], "arm": "grpo"}]}, "with itself"),
        ({"claims": [{**SPEC["claims"][0], "metric": "success"}]}, "metric"),
    ],
)
def test_invalid_experiment_error_names_file_and_key(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=rf"(?s)rloo\.yaml.*{message}"):
        write(tmp_path, **changes)


def test_arm_values_override_shared_and_domain_values() -> None:
    """params.yaml, then its overrides for the domain, then `shared`, then the arm; the budget ends every run."""
    values = run_values(experiment(), "rloo", 7, PARAMS)
    assert values["domains"] == ["search"]
    assert values["per_domain"]["search"]["environment"] == {"echo_query": True}
    assert values["per_domain"]["search"]["rl"] == {}
    rl = values["rl"]
    assert (rl["algorithm"], rl["learning_rate"], rl["group_size"], rl["seed"]) == ("rloo", 0.001, 8, 7)
    assert rl["environment_steps"] == 1000
    assert rl["steps"] == 32, "episodes of one turn each would still reach the budget: 1000 / (4 * 8) rounded up"
    assert values["evaluate"]["models"] == ["rl@search"]
    assert values["merge"]["weights"] == {}
    own = experiment(arms={"a": {"per_domain": {"search": {"rl": {"group_size": 16}}}}, "b": {"rl": {"steps": 5}}},
                     claims=[{**SPEC["claims"][0], "arm": "a", "against": "b"}])  # fmt: skip
    assert arm_values(own, "a", PARAMS)["rl"]["group_size"] == 16
    assert arm_values(own, "b", PARAMS)["rl"]["steps"] == 5
    assert PARAMS["per_domain"]["search"]["rl"] == {"steps": 50, "group_size": 2}, "the input is not modified"


def test_arms_and_seeds_share_the_starting_policy() -> None:
    """A claim about rl compares policies trained from one SFT policy, so everything before rl is the same for all runs."""
    starts = [start_values(run_values(experiment(), arm, seed, PARAMS)) for arm in SPEC["arms"] for seed in (0, 1)]
    assert all(start == starts[0] for start in starts)
    differing = {"a": {"sft": {"epochs": 1.0}}, "b": {}}
    claims = [{**SPEC["claims"][0], "arm": "a", "against": "b"}]
    with pytest.raises(ParamsError, match=r"(?s)arm 'b' and arm 'a' differ in sft.*start: own"):
        check_experiment(experiment(arms=differing, claims=claims), PARAMS, "x.yaml")
    check_experiment(experiment(arms=differing, claims=claims, start="own"), PARAMS, "x.yaml")


def test_success_of_the_start_is_kept_while_what_it_follows_from_is_the_same() -> None:
    """Contract: rollout, trees and rl come after the SFT policy; its settings, the seed's and the panel's sampling do not."""
    values = run_values(experiment(), "grpo", 0, PARAMS)
    for section in ("rollout", "annotate", "rl"):
        assert start_key({**values, section: {**values.get(section, {}), "new": 1}}) == start_key(values)
    for change in ({"sft": {"epochs": 1.0}}, {"seed": 5}, {"evaluate": {**values["evaluate"], "attempts": 7}}):
        assert start_key({**values, **change}) != start_key(values)


def test_a_gate_that_could_never_be_judged_is_refused() -> None:
    """Contract: an arm that trains nothing has one run, so the gate would wait for others while verdicts are given."""
    arms = {"rloo": {}, "grpo": {"rl": {"epochs": 2}}, "start": {"evaluate": {"models": ["sft"]}}}
    require = [{"arm": "start", "metric": "panel.turns", "range": [1, 5]}]
    for gate in ({"baseline": "start"}, {"baseline": "grpo", "require": require}):
        with pytest.raises(ParamsError, match=r"x\.yaml: gate names arm 'start', which trains nothing"):
            check_experiment(experiment(arms=arms, gate=gate, ungated=None), PARAMS, "x.yaml")
    check_experiment(experiment(arms=arms, gate={"baseline": "grpo"}, ungated=None), PARAMS, "x.yaml")


def test_a_claim_whose_metric_no_seed_changes_is_refused() -> None:
    """Contract: runs of lane rl share one start, whose reports are the same with every seed: differences do not scatter, and no
    look could decide."""
    for metric in ("annotate.judge_model.held_out.accuracy", "sft.control.agreement_after"):
        claims = [{**SPEC["claims"][0], "metric": metric, "margin": 0.02}]
        with pytest.raises(ParamsError, match=rf"x\.yaml: claim 1 is about {metric}, which all runs of an arm in lane rl share"):
            check_experiment(experiment(claims=claims), PARAMS, "x.yaml")


def test_first_looks_below_four_seeds_are_refused() -> None:
    with pytest.raises(ParamsError, match="the first is at 3 seeds"):
        check_experiment(experiment(looks=[3, 8]), PARAMS, "x.yaml")
    check_experiment(experiment(looks=[4, 8]), PARAMS, "x.yaml")


def test_claims_are_not_judged_by_tuning_seeds() -> None:
    claim = {**SPEC["claims"][0], "exploratory": True}
    assert max(experiment(claims=[{**claim, "fresh_from": 900}]).seeds) < FIRST_SEED
    with pytest.raises(ValidationError, match="fresh_from"):
        experiment(claims=[{**claim, "fresh_from": FIRST_SEED - 5}])


def test_invalid_override_error_names_the_arm() -> None:
    bad = {"rloo": {"rl": {"group_sise": 4}}, "grpo": {}}
    with pytest.raises(ParamsError, match=r"x\.yaml: arm 'rloo'.*group_sise.*group_size"):
        check_experiment(experiment(arms=bad), PARAMS, "x.yaml")


def test_setting_invalid_for_the_environment_names_the_arm() -> None:
    """Contract: arms must pass the checks of `python -m stages.params`."""
    arms = {"rloo": {}, "grpo": {"annotate": {"returns": [-1.0, 1.0]}}}
    checked = check_experiment(experiment(arms=arms, start="own"), PARAMS, "x.yaml")
    with pytest.raises(ParamsError, match=r"x\.yaml: arm 'grpo': in per_domain\.search: .*annotate\.returns to \[0\.0, 1\.0\]"):
        check_environments(checked, "x.yaml")
    check_environments({"rloo": checked["rloo"]}, "x.yaml")


def test_a_gallery_has_one_number_of_seeds_and_runs_each_arm_with_them() -> None:
    """Contract: an experiment without claims judges nothing; its arms run with the first look's seeds."""
    gallery = experiment(claims=[], looks=[1])
    assert list(gallery.seeds) == [0]
    assert [run.name for run in planned_runs(gallery, PARAMS)] == ["rloo/0", "grpo/0"]
    for looks in ([1, 2], [0]):
        with pytest.raises(ValidationError, match="without claims it is one number of seeds"):
            experiment(claims=[], looks=looks)


def test_the_galleries_show_every_shipped_method() -> None:
    """Contract: each method's page has a learning curve. A new method is a new arm of reports/claims/gallery_*.yaml."""
    galleries = [load_experiment(ROOT / FOLDER / f"{slug}.yaml") for slug in slugs(ROOT) if slug.startswith("gallery_")]
    shown = [arm for gallery in galleries for arm in gallery.arms]
    assert sorted(set(shown)) == sorted(shown)
    assert set(names()) <= set(shown)
    for gallery in galleries:
        for arm, overrides in gallery.arms.items():
            assert overrides.get("rl", {}).get("algorithm", arm) == arm


def test_every_shipped_experiment_is_valid_and_in_dvc_yaml() -> None:
    """Overrides that no longer fit params.yaml fail here, not hours into `make claims`."""
    assert list(load_entries(ROOT, slugs(ROOT), load_params(ROOT / "params.yaml").model_dump())) == slugs(ROOT)
    pipeline = yaml.safe_load((ROOT / FOLDER / "dvc.yaml").read_text(encoding="utf-8"))["stages"]["claim"]
    assert pipeline["matrix"]["method"] == slugs(ROOT)


def shipped() -> list[tuple[str, Experiment, dict[str, Any]]]:
    """Every experiment's name, and the params.yaml that it starts from."""
    params = load_params(ROOT / "params.yaml").model_dump()
    found = {slug: load_experiment(ROOT / FOLDER / f"{slug}.yaml") for slug in slugs(ROOT)}
    return [(slug, one, with_profile(ROOT, one.profile, params)) for slug, one in found.items()]


def test_nothing_is_claimed_twice() -> None:
    """Contract: no two claims, mirrored or in different experiments, compare equal arms by the same metric."""
    claims: dict[Any, list[str]] = {}
    for slug, one, params in shipped():
        tune = one.tune.model_dump_json() if one.tune else ""
        arms = {run.arm: (one.environment, run.key, tune * one.tunes(run.arm)) for run in planned_runs(one, params, seeds=[0])}
        for number, claim in enumerate(one.claims, start=1):
            compared = frozenset((arms[claim.arm], arms[claim.against])), claim.metric, claim.fresh_from
            claims.setdefault(compared, []).append(f"{slug} {number}")
    assert [names for names in claims.values() if len(names) > 1] == []


def test_no_shipped_verdict_is_of_other_settings() -> None:
    """Contract: a changed params.yaml leaves no verdict on the board that its runs do not support; `python -m stages.claims
    --judge` drops them."""
    for slug, one, params in shipped():
        if (saved := saved_results(ROOT, slug, one)) is not None and saved["runs"]:
            assert drop_outdated(one, params, Results.load(ROOT, slug)) == 0, slug


def test_unknown_experiment_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["claim", "lite-ppo"])
    assert stage.main() == 2
    assert "unknown experiment lite-ppo" in capsys.readouterr().err


def test_unset_keys_do_not_change_the_digest() -> None:
    """Contract: only the keys that an experiment sets are hashed, so results stay valid when the format gets another key."""
    claim = {key: one for key, one in SPEC["claims"][0].items() if key != "says"} | {"margin": 0.05}
    values = {key: SPEC[key] for key in ("environment", "budget", "shared", "arms")}
    assert experiment().fixed == params_hash({**values, "claims": [claim]})


def test_rewording_a_claim_keeps_its_results() -> None:
    claim = SPEC["claims"][0]
    reworded = experiment(method="Another title", claims=[{**claim, "says": "Reworded.", "checked": "By hand.", "world": "Yes."}])
    assert reworded.fixed == experiment().fixed
    assert experiment(claims=[{**claim, "threshold": 0.07}]).fixed != experiment().fixed


def test_what_changes_results_makes_another_start() -> None:
    plain, rounded = (
        start_values(run_values(experiment(**more), "grpo", 0, PARAMS))
        for more in ({}, {"shared": {"resources": {"precision": "bfloat16"}}})
    )
    assert {name for name in plain if plain[name] != rounded[name]} == {"resources"}
