"""What a domain hides from rewards is refused by name, whatever setting would read it; what does not read it stays possible."""

from __future__ import annotations

from typing import Any

import pytest

from stages.algorithms.algorithm import resolve
from stages.algorithms.hidden import check_hidden
from stages.algorithms.settings import Rl
from stages.annotation.settings import Annotate
from stages.environments.briefing import BriefingDomain
from stages.environments.search import SearchDomain
from stages.params import check_domains, parse_params
from stages.runtime.validation import ParamsError

GRPO: dict[str, Any] = {"algorithm": "grpo"}
QUALITY = [{"name": "q", "term": "quality", "weight": 1.0}]
FORM = [{"name": "form_words", "weight": 0.5}, {"name": "outcome", "weight": 0.5}]
TREES = {"kind": "comparison", "labels": "trees"}
READS = [
    ({"reward": {"density": "single"}}, r"rl\.reward\.density: single"),
    ({"reward": {"density": "dense", "divisor": "reference"}}, r"rl\.reward\.divisor: reference"),
    ({"reward": {"correct": 1.0, "wrong": -1.0}}, r"rl\.reward\.correct and wrong"),
    ({"reward": {"tool_bonus": 0.1}}, r"rl\.reward\.tool_bonus"),
    ({"reward": {"kind": "prs", "prs": QUALITY}}, r"rl\.reward\.prs: quality"),
    ({"reward": {"kind": "prs", "prs": [{"name": "success", "weight": 1.0}]}}, r"rl\.reward\.prs: success"),
    ({"imitation": {"ratio": 0.5}}, r"rl\.imitation\.ratio: 0\.5"),
    ({"algorithm": "rejection_sft"}, r"rl\.algorithm: rejection_sft, which learns from successful attempts,"),
    ({"algorithm": "agent_rlvr", "warm_start": {}}, r"rl\.preference\.source: guided"),
    ({"algorithm": "dpo"}, r"rl\.preference\.level: trajectory, whose pairs go on to a success and a failure,"),
    ({"algorithm": "step_dpo"}, r"annotate\.pairs\.outcome_gate: true"),
    ({"warm_start": {"algorithm": "tree_bc"}}, r"rl\.warm_start: rl\.algorithm: tree_bc, which learns from correct tree paths,"),
]


@pytest.mark.parametrize(("settings", "named"), READS)
def test_rewards_that_read_what_briefs_hide_are_refused(settings: dict[str, Any], named: str) -> None:
    method = resolve(Rl.model_validate({**GRPO, **settings}))
    with pytest.raises(ParamsError, match=rf"{named} would train on what domain briefing hides .*\(quality, success\)"):
        check_hidden(method.rl, method.method.data, BriefingDomain(), Annotate())
    check_hidden(method.rl, method.method.data, SearchDomain(), Annotate())


@pytest.mark.parametrize(
    "settings",
    [
        GRPO,
        {**GRPO, "reward": {"kind": "prs", "prs": FORM}},
        {**GRPO, "reward": {"density": "dense"}},
        {**GRPO, "reward": {"tool_bonus": 0.1, "tool_bonus_on": "both"}},
        *({"algorithm": name} for name in ("arena_rl", "rlvrr", "salmon", "rlmt", "rlvr_cross_domain")),
    ],
)
def test_rewards_that_do_not_read_it_are_possible(settings: dict[str, Any]) -> None:
    method = resolve(Rl.model_validate(settings), 128)
    check_hidden(method.rl, method.method.data, BriefingDomain(), Annotate())


LABELLED = {"pairs": {"outcome_gate": False}}


@pytest.mark.parametrize(
    ("settings", "annotate", "named"),
    [
        ({"algorithm": "step_dpo"}, LABELLED, ""),
        ({**GRPO, "credit": {"kind": "annotated"}}, {}, ""),
        ({**GRPO, "credit": {"kind": "annotated"}}, {"labels": {"q": "hard"}}, r"annotate\.labels\.q: hard"),
        ({"algorithm": "arena_rl", "judge": {"kind": "local"}}, {"judge_model": TREES}, r"annotate\.pairs\.outcome_gate: true"),
        ({"algorithm": "arena_rl", "judge": {"kind": "local"}}, {**LABELLED, "judge_model": TREES}, ""),
        ({"algorithm": "arena_rl", "judge": {"kind": "local"}}, {"judge_model": {"kind": "comparison"}}, ""),
    ],
)
def test_what_annotate_makes_of_success_is_refused(settings: dict[str, Any], annotate: dict[str, Any], named: str) -> None:
    """Pairs and labels of trees that depend on success, and a judge model that learns from such pairs."""
    method = resolve(Rl.model_validate(settings), 128)
    given = (method.rl, method.method.data, BriefingDomain(), Annotate.model_validate({"tasks": 48, **annotate}))
    if not named:
        check_hidden(*given)
        return
    with pytest.raises(ParamsError, match=rf"{named} would train on what domain briefing hides"):
        check_hidden(*given)


def test_params_are_checked_for_it() -> None:
    """Before anything runs, and per domain: another domain may read its success."""
    values: dict[str, Any] = {
        "domains": ["search", "briefing"],
        "per_domain": {"search": {}, "briefing": {}},
        "model": {"max_length": 128},
        "rl": {"imitation": {"ratio": 0.5}},
    }
    with pytest.raises(ParamsError, match=r"per_domain\.briefing: rl\.imitation\.ratio: 0\.5 would train"):
        check_domains(parse_params(values))
    values["per_domain"]["briefing"] = {"rl": {"imitation": {"ratio": 0.0}}}
    check_domains(parse_params(values))
