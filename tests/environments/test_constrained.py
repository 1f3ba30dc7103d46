"""Domains with a constraint: turns of the specification reach the domain's environment, and violations are counted once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from constraints.spec_files import spec_file

from stages.constraints.conformance import first_violation
from stages.constraints.settings import Constraint
from stages.curation.demonstrations import DemonstrationPlan, demonstrate
from stages.curation.games import make_games
from stages.curation.imports import Importer
from stages.curation.settings import Curate
from stages.environments.constrained import ConstrainedDomain, ConstrainedEnvironment
from stages.environments.protocol import tell_logprobs
from stages.environments.registry import load_domain, returns_of
from stages.params import check_domains, parse_params
from stages.records.task import Task
from stages.runtime.validation import ParamsError


def open_search(folder: Path, **constraint: Any) -> tuple[ConstrainedDomain, ConstrainedEnvironment, Task]:
    domain = load_domain("search", {"max_turns": 6, "constraint": constraint})
    assert isinstance(domain, ConstrainedDomain)
    task = domain.build(list(domain.recipes(2, 0)), folder, 1)[0]
    environment = domain.make(folder)
    environment.reset(task)
    return domain, environment, task


def test_expert_plays_in_the_specifications_words(tmp_path: Path):
    domain, environment, task = open_search(tmp_path, spec="react")
    plan = DemonstrationPlan(Curate(expert_demonstrations=1, noisy_demonstrations=2, noise=0.4), 0, 640)
    made = demonstrate(domain, environment, task, plan)
    assert made.episodes
    for episode in made.episodes:
        assert episode.success
        assert [turn.action.split(" ")[0] for turn in episode.turns] == ["[Thought]"] * (len(episode.turns) - 1) + ["[Final"]
        assert (episode.reward_terms["violations"], episode.reward_terms["fulfilled"]) == (0.0, 1.0)


def test_violations_count_once_and_cost_the_penalty(tmp_path: Path):
    domain, environment, _ = open_search(tmp_path, spec="search_then_answer", enforcement="report_only", penalty=0.25)
    assert returns_of(domain) == (-0.25, 1.0)
    first = environment.step("search Kelmar")
    assert (first.reward, first.terms["violations"], first.terms["fulfilled"]) == (0.0, 0.0, 0.0)
    second = environment.step("look around")
    assert (second.reward, second.accepted, second.terms["violations"]) == (-0.25, False, 1.0)
    assert "fulfilled" not in second.terms
    third = environment.step("look around")
    assert (third.reward, third.terms["violations"]) == (0.0, 0.0)


def test_violations_of_grammars_count_once(tmp_path: Path):
    """Contract: in an episode, a violation is counted and charged at most once, whatever the kind of constraint."""
    pytest.importorskip("llguidance")
    regex: dict[str, Any] = {"kind": "regex", "spec": "search [A-Z][a-z]+", "enforcement": "report_only", "penalty": 0.5}
    domain, environment, task = open_search(tmp_path, **regex)
    start, key = environment.snapshot(), environment.state_key()
    steps = [environment.step(action) for action in ("search Kelmar", "look", "look", "search Kelmar", "look")]
    assert [step.terms["violations"] for step in steps] == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert sum(step.reward for step in steps) == -0.5 == returns_of(domain)[0]
    assert environment.state_key().endswith(" | violated")
    after = environment.snapshot()
    environment.restore(start)
    assert environment.state_key() == key
    assert environment.step("look").reward == -0.5
    environment.restore(after)
    assert environment.step("look").reward == 0.0
    environment.reset(task)
    assert environment.step("look").reward == -0.5


def test_fulfilled_formula_ends_the_episode_or_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = '(states (q env) (search "search" turn) (r env)) (behaviour (next q search r))'
    spec = spec_file(tmp_path, text, monkeypatch)
    _, environment, _ = open_search(tmp_path / "end", spec=spec)
    step = environment.step("search Kelmar")
    assert (step.terminated, step.terms["fulfilled"], step.observation.text) == (True, 1.0, "")
    _, environment, _ = open_search(tmp_path / "again", spec=spec, terminate_on_restart=False)
    for _ in range(2):
        step = environment.step("search Kelmar")
        assert (step.terminated, step.terms["fulfilled"], step.terms["violations"]) == (False, 1.0, 0.0)


def test_a_formula_begins_anew_for_environments_and_transcripts_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Contract: `first_violation`, by which imports are judged, finds what the environment counts."""
    text = (
        '(states (q env) (plan "plan" turn) (noted env) (search "search" turn) (r env))'
        "(behaviour (next q plan noted (always_0_3 (next search r))))"
    )
    spec = spec_file(tmp_path, text, monkeypatch)
    _, environment, task = open_search(tmp_path, spec=spec, terminate_on_restart=False)
    for actions in (["plan x", "plan y", "plan z"], ["plan x", "search Kelmar"], ["search Kelmar"]):
        environment.reset(task)
        counted = [environment.step(action).terms["violations"] for action in actions]
        found = first_violation(environment.rules, actions)
        assert (found[0] if found else None) == (counted.index(1.0) if 1.0 in counted else None)
        assert (found is None) == (actions[1:2] == ["plan y"])


def test_actions_of_a_plan_run_together(tmp_path: Path):
    _, environment, task = open_search(tmp_path, spec="pass")
    name = task.prompt.split()[-1].rstrip("?")
    step = environment.step(f"[Plan] x\n[Action] search {name}\n[Action] search {name} heir")
    assert len(step.observation.text.splitlines()) == 2
    assert (step.cost, step.terms["violations"]) == (2.0, 0.0)
    assert environment.step("[Final Thought] y\n[Answer] nobody").terminated


def test_snapshots_keep_the_place_in_the_formula(tmp_path: Path):
    domain, environment, task = open_search(tmp_path, spec="react")
    start = environment.snapshot()
    turn = domain.expert(environment)
    assert turn is not None
    key = environment.state_key()
    environment.step(turn)
    environment.restore(start)
    assert environment.state_key() == key
    assert environment.step(turn).terms["violations"] == 0.0
    copy = pickle.loads(pickle.dumps(domain))
    again = copy.make(tmp_path)
    again.reset(task)
    assert again.step(turn).terms["violations"] == 0.0
    assert copy.answer("[Final Thought] x\n[Answer] Selat") == domain.domain.answer("answer Selat")
    assert all(action.startswith("[") for action in environment.admissible())


def test_log_probabilities_reach_the_domains_environment(tmp_path: Path):
    """Contract: an environment behind a constraint is told how sure the policy was, as without one."""
    searched = []
    for constraint in (None, {"spec": "search_then_answer"}):
        domain = load_domain("search", {"tool_mode": "entropy_gated", "think": False, "constraint": constraint})
        task = domain.build(list(domain.recipes(1, 0)), tmp_path, 1)[0]
        environment = domain.make(tmp_path)
        environment.reset(task)
        for logprobs in ([-0.01] * 3, [-1.0] * 3):
            tell_logprobs(environment, logprobs)
            step = environment.step(f"search {task.spec['start']} {task.spec['relations'][0]}")
        searched.append(step.terms["real_search"])
    assert searched == [1.0, 1.0]


def open_code(folder: Path, turn: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ConstrainedDomain, Any, Task]:
    """The domain of programs with a formula of one turn."""
    text = (
        f'(states (q env) (think "[Think]" (say "I write it.")) (code "[Code]" (send "{turn}"))) (behaviour (next q think code))'
    )
    spec = spec_file(folder, text, monkeypatch)
    sandbox = {"backend": "unsafe_subprocess"}
    domain = load_domain("code", {"kinds": ["number"], "sandbox": sandbox, "constraint": {"spec": spec}})
    return domain, domain.make(folder), domain.build(list(domain.recipes(1, 0)), folder, 1)[0]  # type: ignore[return-value]


def test_known_actions_and_players_speak_the_specifications_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    domain, environment, task = open_code(tmp_path, "{}", monkeypatch)
    plain = domain.domain.known_actions(task)  # type: ignore[attr-defined]
    assert domain.known_actions(task) == [(f"[Think] I write it.\n[Code] {action}", value) for action, value in plain]
    environment.reset(task)
    step = environment.step(domain.known_actions(task)[0][0])
    assert (step.reward, step.terms["violations"]) == (plain[0][1], 0.0)
    (game,) = make_games(domain, tmp_path, [task], 1, 0)
    assert all(action.startswith("[Think] I write it.\n[Code] ") for action in game["actions"])
    domain, _, task = open_code(tmp_path, "run {}", monkeypatch)
    assert domain.known_actions(task) == []
    with pytest.raises(
        ParamsError, match=r"per_domain\.code\.environment\.constraint has no place for .*, the action of the player"
    ):
        next(make_games(domain, tmp_path, [task], 1, 0))


def test_attributes_are_of_what_turns_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = '(states (q env) (note "[Note]") (brief "[Brief]" (send "{}"))) (behaviour (next q note brief))'
    domain: Any = load_domain("briefing", {"constraint": {"spec": spec_file(tmp_path, text, monkeypatch)}})
    task = domain.build(list(domain.recipes(1, 0)), tmp_path, 1)[0]
    reference = domain.references(task)[0]
    expected = domain.domain.attributes(task, [reference])
    assert domain.attributes(task, [f"[Note] such words are not of the brief\n[Brief] {reference}"]) == expected
    assert expected["plain"] == 0.0


def test_rollouts_by_a_model_are_refused():
    domain: Any = load_domain("keydoor", {"constraint": {"kind": "ltl", "spec": "react"}})
    with pytest.raises(ParamsError, match=r"per_domain\.keydoor: annotate\.evaluation\.model_rollouts .* to null"):
        _ = domain.imagined


def test_imports_that_violate_are_rejected(tmp_path: Path):
    domain, _, task = open_search(tmp_path, spec="search_then_answer")
    assistant = [{"role": "assistant", "content": text} for text in ("look", "answer x")]
    user = {"role": "user", "content": "q"}
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"messages": [user, assistant[0], user, assistant[1]]}) + "\n")
    found = Importer(domain, [task], tmp_path, 640).read(tmp_path, ["mine.jsonl"])
    assert [one.reason for one in found.rejections] == ["violates_constraint"]
    assert "turn 1 violates" in found.rejections[0].detail


@pytest.mark.parametrize(
    ("constraint", "sections", "problem"),
    [
        ({"spec": "specs/mine.sexp"}, {}, "spec is specs/mine.sexp; put the file below data/raw, where DVC tracks changes"),
        ({"kind": "json_schema", "spec": "/tmp/a.json"}, {}, "put the file below data/raw"),
        ({"spec": "data/raw/none.sexp"}, {}, "nor a readable file"),
        ({"spec": "reakt"}, {}, "neither a shipped specification (pass, react"),
        ({"enforcement": "retry"}, {}, "leave rl out of apply"),
        ({"values": {"action": []}}, {}, "values has an empty list"),
        ({"values": {"acting": ["x"]}}, {}, "values of 'acting', which is no state of the policy"),
        ({"kind": "regex", "spec": "("}, {}, "is not valid"),
        ({"kind": "regex", "spec": "x", "enforcement": "rollback", "apply": ["rollout"]}, {}, "set it to mask or retry"),
        ({"kind": "regex", "spec": "x", "budget_exit": "truncate"}, {}, "budget_exit has no effect: it needs kind ltl"),
        ({"retries": 2}, {}, "retries has no effect: it needs enforcement retry"),
        ({"enforcement": "report_only", "renormalise": False}, {}, "renormalise has no effect: it needs enforcement mask"),
        ({}, {"model": {"thinking": {}}}, "set one of the two to null"),
        ({}, {"resources": {"engine": {"kind": "openai"}}}, "set enforcement to retry or report_only, or kind to torch"),
        ({}, {"evaluate": {"scaffold": {"think": "plan"}}}, "set it to none"),
    ],
)
def test_invalid_settings_are_refused(constraint: dict[str, Any], sections: dict[str, Any], problem: str):
    if constraint.get("kind", "ltl") != "ltl":
        pytest.importorskip("llguidance")
    values = {"domains": ["search"], "per_domain": {"search": {"environment": {"constraint": constraint}}}, **sections}
    with pytest.raises(ParamsError) as caught:
        check_domains(parse_params(values))
    assert problem in str(caught.value)
    assert "per_domain.search" in str(caught.value)


def test_an_edited_file_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Contract: what a specification says is the text of its file, not what was parsed under its name before."""
    text = '(states (q env) (search "search" turn) (r env)) (behaviour (next q search r))'
    constraint = Constraint(spec=spec_file(tmp_path, text, monkeypatch))
    assert first_violation(constraint.rules, ["look up"]) is not None
    spec_file(tmp_path, text.replace('"search"', '"look"'), monkeypatch)
    assert first_violation(constraint.rules, ["look up"]) is None
    assert first_violation(Constraint(spec=constraint.spec).rules, ["search up"]) is not None


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"a\/b", "a/b", "a"),
        (r"a/b", "a/b", "ab"),
        (r"go \\/[/x]", "go \\/x", "go /x"),
    ],
)
def test_regular_expressions_may_have_slashes(pattern: str, matching: str, other: str):
    """Contract: a slash stands for itself, with a backslash before it or without."""
    pytest.importorskip("llguidance")
    rules = Constraint(kind="regex", spec=pattern).rules
    assert not rules.read((), matching).violation
    assert rules.read((), other).violation


def test_a_content_outside_its_list_stops_the_stage_where_asked(tmp_path: Path):
    react: dict[str, Any] = {"spec": "react", "values": {"action": ["search"]}, "enforcement": "report_only"}
    _, environment, _ = open_search(tmp_path, **react, on_invalid_value="error")
    assert environment.step("[Thought] x\n[Action] search\n[Input] Kelmar heir").terms["violations"] == 0.0
    with pytest.raises(ValueError, match="'look' is not among the values of action; extend its closed list"):
        environment.step("[Thought] x\n[Action] look\n[Input] Kelmar heir")
    _, environment, _ = open_search(tmp_path / "out_of_order", **react, on_invalid_value="error")
    assert environment.step("[Input] Kelmar heir").terms["violations"] == 1.0
