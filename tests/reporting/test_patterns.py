"""Patterns of behaviour: where they occur by hand, own ones with their errors, shares and paired tests."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from stages import params as settings
from stages.environments import registry
from stages.evaluation.own_patterns import check_patterns
from stages.evaluation.statistics import compare, mean_interval
from stages.params import SHIPPED_PATTERNS, OwnPattern, parse_params
from stages.report import run
from stages.reporting.inputs import load_inputs
from stages.reporting.sections.behaviour import trend
from stages.reporting.viewer import patterns
from stages.reporting.viewer.groups import groups_of
from stages.reporting.viewer.index import Indexed, index_group
from stages.reporting.viewer.patterns import SHIPPED, own_pattern, patterns_of
from stages.reporting.viewer.prevalence import Difference, Prevalence, differences, kept, prevalences
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker
from stages.runtime.validation import ParamsError


def episode(*turns: str, success: bool = False, truncated: bool = False) -> dict[str, Any]:
    """An episode from turns "state action -> observation"; a "!" before the action: refused."""
    rows = []
    for text in turns:
        state, action, observation = re.fullmatch(r"(\S+) (.*?) -> (.*)", text).groups()  # type: ignore[union-attr]
        accepted, action = not action.startswith("!"), action.removeprefix("!")
        rows.append(
            {"state_key": state, "action_key": action, "action": action, "observation": observation, "accepted": accepted}
        )
    messages = [{"role": "assistant", "content": f"<think>so</think>{row['action']}"} for row in rows]
    ends = {
        "terminated": not truncated,
        "truncated": truncated,
        "reward": float(success),
        "reward_terms": json.dumps({"won": 1.0}),
    }
    return {"turns": rows, "messages": messages, "episode_id": "one", **ends}


def test_loop_is_an_action_again_in_its_state() -> None:
    """Back and forth is a loop from the second round on; the same action in another state is none."""
    walk = episode("a east -> b", "b west -> a", "a east -> b", "b !east -> no", "b west -> a", "c east -> d")
    assert patterns.loops(walk) == [3, 5]
    assert patterns.loops(episode("a look -> a", "b look -> b")) == []


def test_repeated_query_needs_the_same_result_and_acceptance() -> None:
    asked = episode(
        "0 search x -> page", "1 search x -> page", "1 search y -> page", "1 search x -> other", "1 !search x -> page"
    )
    assert patterns.repeated_queries(asked) == [2]


def test_refused_in_a_row_counts_from_the_second() -> None:
    acted = episode("a !x -> no", "a y -> yes", "a !x -> no", "a !x -> no", "a !z -> no", "a y -> yes")
    assert patterns.refused_in_a_row(acted) == [4, 5]


@pytest.mark.parametrize(
    ("success", "truncated", "gave_up", "ran_out"),
    [(False, False, [2], []), (False, True, [], [2]), (True, False, [], []), (True, True, [], [])],
)
def test_endings(success: bool, truncated: bool, gave_up: list[int], ran_out: list[int]) -> None:
    ended = {**episode("a x -> y", "b x -> z", success=success, truncated=truncated), "reward_terms": "{}"}
    assert patterns.gave_up(ended) == gave_up
    assert patterns.ran_out(ended) == ran_out


def test_answer_without_search_is_the_first_accepted_action() -> None:
    find = patterns.answers_unseen(lambda action: action.removeprefix("answer ") if action.startswith("answer ") else None)
    assert find(episode("a answer 3 -> Answered.")) == [1]
    assert find(episode("a !searh x -> no", "a answer 3 -> Answered.")) == [2]
    assert find(episode("a search x -> page", "b answer 3 -> Answered.")) == []
    assert find(episode("a search x -> page")) == []


def test_answer_without_search_applies_to_domains_with_answers() -> None:
    given = parse_params({"domains": ["textworld", "search"], "per_domain": {"textworld": {}, "search": {}}})
    found = {pattern.name: pattern for pattern in patterns_of(given)}
    assert sorted(found) == sorted(SHIPPED_PATTERNS)
    assert found["answer_without_search"].applies("search")
    assert not found["answer_without_search"].applies("textworld")
    assert [pattern.name for pattern in SHIPPED] == list(SHIPPED_PATTERNS[:-1])


def test_own_regular_expression_is_searched_where_it_says() -> None:
    row = episode("a go north -> a wall", "a go south -> a door")
    cases = {"action": ("south", [2]), "observation": ("wall|door", [1, 2]), "message": ("<think>so.*NORTH", [])}
    for where, (regex, turns) in cases.items():
        assert own_pattern("mine", OwnPattern(regex=regex, where=where)).turns(row) == turns  # type: ignore[arg-type]
    assert own_pattern("mine", OwnPattern(regex="(?i)<think>so.*NORTH", where="message")).turns(row) == [1]


def test_own_predicate_returns_whether_or_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_predicates.py").write_text(
        "def won(row): return row['reward_terms']['won'] == 1.0\n"
        "def doors(row): return [n for n, t in enumerate(row['turns'], 1) if 'door' in t['observation']]\n"
        "def late(row): return 7\n"
        "def broken(row): return row['nothing']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_predicates", raising=False)
    row = episode("a x -> a wall", "a y -> a door", "b z -> a door")

    def turns(function: str) -> list[int]:
        return own_pattern("mine", OwnPattern(predicate=f"own_predicates:{function}")).turns(row)

    assert turns("won") == [3]
    assert turns("doors") == [2, 3]
    with pytest.raises(
        ParamsError, match=r"report\.patterns\.mine\.predicate: returned 7 .* return True, False or turns from 1 to 3"
    ):
        turns("late")
    with pytest.raises(ParamsError, match=r"KeyError in episode one: 'nothing'"):
        turns("broken")
    with pytest.raises(ParamsError, match=r"own_predicates:none can't be imported .* name a module and its function"):
        turns("none")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mine": {}}, "needs either regex or predicate"),
        ({"mine": {"regex": "x", "predicate": "a:b"}}, "needs either regex or predicate"),
        ({"mine": {"regex": "("}}, "regex is not a regular expression of Python"),
        ({"mine": {"predicate": "no function"}}, "predicate must be module:function"),
        ({"loop": {"regex": "x"}}, "'loop' is a shipped pattern; choose another name"),
        ({"My pattern": {"regex": "x"}}, "must be lower-case letters"),
        ({"mine": {"regx": "x"}}, "regex"),
    ],
)
def test_faulty_own_patterns_are_refused_with_the_reason(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=re.escape(message)):
        parse_params({"domains": ["search"], "per_domain": {"search": {}}, "report": {"patterns": given}})


def test_pattern_for_an_unknown_domain_is_refused() -> None:
    values: dict[str, Any] = {
        "domains": ["search"],
        "per_domain": {"search": {}, "bank": {}},
        "evaluate": {"transfer": ["bank"]},
        "report": {"patterns": {"mine": {"regex": "x", "domains": ["bank"]}}},
    }
    assert patterns_of(parse_params(values))[-1].domains == {"bank"}, "its episodes are shown, too"
    values["report"]["patterns"]["mine"]["domains"] += ["maze"]
    with pytest.raises(ParamsError, match=r"report\.patterns\.mine\.domains: maze is not among .*\(search, bank\)"):
        patterns_of(parse_params(values))


def test_patterns_are_checked_without_their_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the checks load no domain, so that they can be made before anything runs."""
    monkeypatch.setattr(registry, "load_domain", lambda *given: pytest.fail("a domain was loaded"))
    check_patterns({"mine": OwnPattern(predicate="json:dumps", domains=["search"])}, ["search"])
    with pytest.raises(ParamsError, match=r"report\.patterns\.mine\.predicate: nomod:f can't be imported"):
        check_patterns({"mine": OwnPattern(predicate="nomod:f")}, ["search"])


def test_absent_patterns_change_no_hash() -> None:
    """Contract: runs kept before the setting existed are still recognised."""
    values = {"domains": ["search"], "per_domain": {"search": {}}}
    assert "patterns" not in parse_params(values).model_dump(mode="json")["report"]
    given = parse_params({**values, "report": {"patterns": {"mine": {"regex": "x"}}}})
    assert given.model_dump(mode="json")["report"]["patterns"]["mine"]["where"] == "action"
    assert settings.params_hash(given) != settings.params_hash(parse_params(values))


def groups_with(full_run: Any) -> tuple[Any, list[Indexed]]:
    root, given = full_run
    inputs = load_inputs(root, given)
    return inputs, [index_group(group, patterns_of(given)) for group in groups_of(root, inputs)]


def test_shares_are_means_over_tasks_with_clustered_intervals(full_run: Any) -> None:
    inputs, groups = groups_with(full_run)
    group = next(one for one in groups if (one.domain, one.source) == ("search", "merged"))
    found = next(one for one in prevalences([group], inputs) if one.pattern == "ran_out")
    values = group.occurs("ran_out")
    assert set(group.clusters.values()) == {f"search-{number}" for number in range(10)}
    wanted = mean_interval(values, group.tasks, proportion=True, clusters=group.clusters, resamples=2000, seed=0)
    assert (found.share, found.low, found.high) == (pytest.approx(wanted.mean), wanted.low, wanted.high)
    assert (found.count, found.episodes) == (sum(values), 80)


def test_models_are_compared_with_the_test_of_the_results(full_run: Any) -> None:
    inputs, groups = groups_with(full_run)
    found = differences(groups, inputs, {("merged", "search"): ("sft", "none"), ("none", "search"): ("sft",)})
    by_name = {(one.source, one.domain): one for one in groups if one.kind == "panel"}
    a, b = by_name["merged", "search"], by_name["sft", "search"]
    assert {(one.a, one.b) for one in found} == {("merged", "sft")}
    one = next(one for one in found if one.pattern == "gave_up")
    wanted = compare(a.occurs("gave_up"), a.tasks, b.occurs("gave_up"), b.tasks, clusters=a.clusters, resamples=2000, seed=0)
    assert one.comparison == wanted
    assert one.words == {"better": "▲ more often", "worse": "▼ less often"}.get(wanted.verdict, "undecided")


def test_benjamini_hochberg_by_hand() -> None:
    """p = 0.01, 0.02, 0.04, 0.2 at 5 %: thresholds 0.0125, 0.025, 0.0375, 0.05; two are kept."""

    def difference(p: float) -> Difference:
        test = compare([1.0, 0.0, 1.0], ["a", "b", "c"], [0.0, 0.0, 1.0], ["a", "b", "c"])
        return Difference("loop", "search", "a", "b", type(test)(**{**vars(test), "p": p}))

    assert kept([difference(p) for p in (0.2, 0.02, 0.04, 0.01)], 0.95) == 2
    assert kept([], 0.95) == 0


def test_trend_has_the_rollouts_and_the_steps_of_rl_alone() -> None:
    """Contract: models on the panel, of this run or of a kept one, are no points of the training curve."""
    kinds = {
        "sft rollout": "rollout",
        "rl step 20": "training",
        "rl step 1": "training",
        "merged": "panel",
        "merged, run 2": "kept",
    }
    shares = {"sft rollout": 8, "rl step 20": 2, "rl step 1": 6, "merged": 1, "merged, run 2": 1}
    found: Any = [Prevalence("loop", "search", source, kinds[source], shares[source], 10, None, None) for source in kinds]  # type: ignore[arg-type]
    assert trend(found, "search", {"loop": "Loop"}) == [("Loop", [(0, 0.8), (1, 0.6), (20, 0.2)])]
    assert trend(found[:1], "search", {"loop": "Loop"}) == []


def test_chapter_links_shares_to_episodes_and_shows_own_patterns(
    full_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.report.SUMMARY", [])  # drawing the other chapters takes long
    monkeypatch.setattr("stages.report.DETAILS", [])
    root, given = full_run
    values = {
        **given.model_dump(mode="json", exclude_unset=True),
        "report": {"patterns": {"asks_river": {"regex": "river", "domains": ["search"]}}},
    }
    own = tmp_path / "own"
    (own / "reports").mkdir(parents=True)
    (own / "data").symlink_to(root / "data", target_is_directory=True)
    for path in (root / "reports").iterdir():
        if path.name not in ("report.html", "episodes"):
            (own / "reports" / path.name).symlink_to(path)
    run(StageContext("report", None, parse_params(values), own, Tracker()))
    page = (own / "reports" / "report.html").read_text(encoding="utf-8")
    assert 'id="behaviour"' in page
    assert 'href="episodes/index.html#domain=search&amp;source=merged&amp;pattern=asks_river"' in page
    assert 'href="episodes/index.html#tab=compare&amp;domain=search&amp;a=sft&amp;b=merged"' in page
    assert "domain=textworld&amp;source=merged&amp;pattern=asks_river" not in page
    assert "Benjamini–Hochberg keeps" in page
