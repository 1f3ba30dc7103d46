"""evaluate.attribution: teams some of whose members are replaced, and what each contributes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from stages import evaluate
from stages.agent.active_episode import EpisodeRequest
from stages.agent.rollout import Labels
from stages.agent.scaffold import Scaffold
from stages.agent.team import Member, StoredTeam, read_team, write_team
from stages.control.exact.contributions import contributions, team_coalitions
from stages.engine.engine import EngineSettings, Sampling, Turn
from stages.evaluation.coalition_play import Reciter, drawn_voices, voiced_by
from stages.evaluation.coalitions import coalition_jobs, splits
from stages.evaluation.panels import Job, Settings, jobs_of, load_panels, play, unload
from stages.evaluation.replaced import coalition_name, coalition_of
from stages.evaluation.settings import Attribution
from stages.params import parse_params
from stages.records.episode import read_rows
from stages.records.task import Task
from stages.runtime.resources import Resources
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker
from stages.runtime.validation import ParamsError

SETTINGS = Settings(0, Sampling(max_tokens=6), EngineSettings.of(Resources(slots=8), 512))
PAIR = [Member(role="planner", prompt="planner.txt"), Member(role="solver", sees=["planner"])]
PARAMS: dict[str, Any] = {
    "domains": ["search"],
    "resources": {"threads": 1, "workers": 1, "slots": 8},
    "model": {"max_length": 512},
    "rl": {"algorithm": "marft"},
    "evaluate": {"attempts": 2, "resamples": 100, "chunk": 8, "sampling": {"max_tokens": 6}, "models": ["sft", "rl@search"]},
    "per_domain": {"search": {}},
}


@pytest.fixture
def team(tmp_path: Path, tiny_policy: Path) -> Path:
    """Weights of a solver with those of a planner, half as large, below them."""
    from safetensors.torch import load_file, save_file

    solver = tmp_path / "data" / "models" / "rl" / "search"
    shutil.copytree(tiny_policy, solver)
    shutil.copytree(tiny_policy, solver / "agents" / "planner")
    halved = {name: tensor / 2 for name, tensor in load_file(tiny_policy / "model.safetensors").items()}
    save_file(halved, solver / "agents" / "planner" / "model.safetensors", metadata={"format": "pt"})
    write_team(solver, "search", True, PAIR)
    unload()  # another test's models may have had the same folders
    return solver


def jobs(curated: Path, folder: Path, chunk: int = 100) -> list[Job]:
    return jobs_of(folder, "h", load_panels(curated, ["search"]), curated, 2, chunk)


def coalitions(curated: Path, folder: Path, chunk: int = 100, **attribution: Any) -> dict[str, list[Job]]:
    panels = load_panels(curated, ["search"])
    return coalition_jobs({"rl@search": jobs(curated, folder, chunk)}, Attribution(**attribution), panels, Scaffold(), 0)


def rows(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Without the hash of who played."""
    return [{**row, "policy_hash": ""} for job in jobs for row in play(job, SETTINGS).rows]


def first_read(jobs: Sequence[Job]) -> dict[str, str]:
    """Episode -> what the acting member read first, of the sample episodes."""
    outcomes = [play(job, SETTINGS) for job in jobs]
    return {one["episode_id"]: one["messages"][0]["content"] for outcome in outcomes for one in outcome.samples}


def test_all_coalitions_but_the_team_itself() -> None:
    assert list(splits(["a", "b"])) == [((), ("a", "b")), (("a",), ("b",)), (("b",), ("a",))]
    assert len(list(splits("abcd"))) == 15
    names = [coalition_name("rl@x", active) for active, _ in splits(["a", "b"])]
    assert names == ["rl@x[]", "rl@x[a]", "rl@x[b]"]
    assert [coalition_of(name, "rl@x") for name in names] == [(), ("a",), ("b",)]
    assert [coalition_of(name, "rl@x") for name in ("rl@x", "rl@y[a]", "rl@x+q")] == [None] * 3


def test_noop_drops_a_members_message(curated: Path, tiny_policy: Path, team: Path) -> None:
    """Contract: with its planner's messages dropped, a solver plays exactly as it does alone: the random draws are the same.
    Without a solver nothing is done."""
    found = coalitions(curated, team)
    assert list(found) == ["rl@search[]", "rl@search[planner]", "rl@search[solver]"]
    assert len({job.name for of in found.values() for job in of} | {job.name for job in jobs(curated, team)}) == 4
    whole = rows(jobs(curated, team))
    without_planner = rows(found["rl@search[solver]"])
    assert without_planner == rows(jobs(curated, tiny_policy))
    assert without_planner != whole
    for name in ("rl@search[]", "rl@search[planner]"):
        idle = rows(found[name])
        assert [(row["task_id"], row["attempt"]) for row in idle] == [(row["task_id"], row["attempt"]) for row in whole]
        assert {(row["success"], row["reward"], row["turns"], row["tokens"], row["stop_reason"]) for row in idle} == {
            (False, 0.0, 0, 0, "silent")
        }


def test_random_messages_are_those_of_another_task(curated: Path, team: Path) -> None:
    """Contract: the solver reads its task and the plan that the planner made for a task of another cluster; how many tasks are
    played at once changes nothing."""
    jobs_of_coalition = coalitions(curated, team, replacement="random")["rl@search[solver]"]
    (job,) = jobs_of_coalition
    assert job.replaced is not None
    donors = {task.task_id: donor for task, donor in zip(job.tasks, job.replaced.donors, strict=True)}
    clusters = {task.task_id: task.cluster for task in job.tasks}
    assert all(clusters[donor.task_id] != clusters[name] for name, donor in donors.items())
    read = first_read(jobs_of_coalition)
    whole = {
        one["episode_id"]: one["messages"][0]["content"]
        for part in jobs(curated, team, 1)
        for one in play(replace(part, attempts=2), SETTINGS).samples
    }
    assert read
    for name, text in read.items():
        task_id, _, attempt = name.rpartition("/")
        donor = whole[f"{donors[task_id].task_id}/{attempt}"]
        task, _, plan = text.partition("\nplanner: ")
        assert plan == donor.partition("\nplanner: ")[2]
        assert task == whole[name].partition("\nplanner: ")[0]
    in_parts = coalitions(curated, team, chunk=4, replacement="random")["rl@search[solver]"]
    assert len(in_parts) == 4
    assert rows(in_parts) == rows(jobs_of_coalition)


def test_another_members_message_has_its_weights_and_its_view() -> None:
    """By hand: the critic spoken for by the solver reads the planner, not itself, and still speaks in the first round alone; the
    draw is the same for equal plays."""
    members = [
        Member(role="planner", prompt="planner.txt"),
        Member(role="critic", sees=["planner"], speaks="first"),
        Member(role="solver", sees=["planner", "critic"]),
    ]
    team = StoredTeam.model_validate(
        {
            "domain": "search",
            "own_weights": True,
            "members": [{**one.model_dump(exclude={"prompt"}), "template": one.template} for one in members],
        }
    )
    engines: dict[str, Any] = {"planner": "P", "critic": "C", "solver": "S"}
    voiced, own = voiced_by(team, {"critic": "solver", "planner": "critic"}, engines)
    assert own == {"planner": "C", "critic": "S", "solver": "S"}
    assert [(one.role, one.sees, one.speaks) for one in voiced] == [
        ("planner", [], "every"),
        ("critic", ["planner"], "first"),
        ("solver", ["planner", "critic"], "every"),
    ]
    assert voiced[0].template == members[1].template == "{task}"
    requests = [EpisodeRequest(Task(f"t{index}", "search", "test", 0, "", {}, 1.0), 0, "") for index in range(200)]
    drawn = drawn_voices(team, ["critic"], requests, Labels(0))
    assert {voices: len(of) for voices, of in drawn.items()}.keys() == {("planner",), ("solver",)}
    assert all(70 < len(of) < 130 for of in drawn.values())
    whose = {request.task.task_id: voices for voices, of in drawn.items() for request in of}
    again = {
        request.task.task_id: voices
        for voices, of in drawn_voices(team, ["critic"], requests[:100], Labels(0)).items()
        for request in of
    }
    assert again == {f"t{index}": whose[f"t{index}"] for index in range(100)}


def test_random_players_play_the_panel(curated: Path, team: Path) -> None:
    """Contract: with two members each is spoken for by the other; what is done beside does not matter."""
    found = coalitions(curated, team, replacement="random_player")
    for name in ("rl@search[]", "rl@search[solver]"):
        assert rows(found[name]) == rows(coalitions(curated, team, chunk=4, replacement="random_player")[name])
    texts = first_read(found["rl@search[planner]"])
    assert texts
    assert all("\nPlan the next action." in text for text in texts.values()), "the planner's view, in place of the solver's"
    assert not any("\nplanner: " in text for text in texts.values())


def test_a_reciter_says_all_turns_in_order_and_then_again() -> None:
    said = [Turn(0, (1, 9), (0.0, 0.0), "stop"), Turn(0, (2,), (0.0,), "length")]
    engine, sampling = Reciter({7: said, 8: []}), Sampling()
    first, second = engine.open([1]), engine.open([1])
    found = []
    for key in (7, 70, 71):
        engine.request(first, key, sampling)
        found += [turn.token_ids for turn in engine.advance()]
    assert found == [(1, 9), (2,), (1, 9)]
    engine.request(second, 8, sampling)
    assert [(turn.session, turn.token_ids, turn.stop_reason) for turn in engine.advance()] == [(second, (), "context")]


def test_the_stage_adds_rows_of_coalitions_and_changes_nothing_else(curated: Path, tiny_policy: Path, team: Path) -> None:
    """Contract: their contributions to the team's success sum to its gain; evaluation.json is the same without them."""
    root = team.parents[3]
    for name in ("data/base", "data/models/sft", "data/models/merged", "data/models/merged_linear"):
        shutil.copytree(tiny_policy, root / name)
    shutil.copytree(curated, root / "data" / "curated")
    written = []
    for attribution in (None, {}):
        values = {**PARAMS, "evaluate": {**PARAMS["evaluate"], "attribution": attribution}}
        evaluate.run(StageContext("evaluate", None, parse_params(values), root, Tracker()))
        table = read_rows(root / "data/evaluation/rows.parquet")
        written.append((table, (root / "reports/evaluation.json").read_bytes(), (root / "reports/metrics.json").read_bytes()))
    (plain, *reports), (more, *again) = written
    assert again == reports
    assert more[: len(plain)] == plain
    assert set(json.loads(reports[0])["models"]) == {"sft", "rl@search"}
    extra = {"rl@search[]": 16, "rl@search[planner]": 16, "rl@search[solver]": 16}
    assert pd.Series([row["model"] for row in more[len(plain) :]]).value_counts().to_dict() == extra
    frame = pd.DataFrame(more)
    found = contributions(frame, *team_coalitions(list(frame.model.unique()), "rl@search"))["search"]
    assert list(found.players) == ["planner", "solver"]
    assert sum(one.mean for one in found.players.values()) == pytest.approx(found.gain.mean)


def test_teams_without_players_are_refused_by_name(curated: Path, tiny_policy: Path, team: Path) -> None:
    assert read_team(team, "search") is not None
    with pytest.raises(ValueError, match=r"none of the evaluated models \(rl@search\) plays in a team with chef; add"):
        coalitions(curated, team, players=["chef"])
    assert list(coalitions(curated, team, players=["planner"])) == ["rl@search[]"]
    panels = load_panels(curated, ["search"])
    alike = tuple(replace(task, cluster="one") for task in panels["search"].tasks)
    panels = {"search": replace(panels["search"], tasks=alike)}
    own = jobs_of(team, "h", panels, curated, 2, 100)
    with pytest.raises(ValueError, match=r"the panel of search has one cluster; set replacement to noop or random_player"):
        coalition_jobs({"m": own}, Attribution(replacement="random"), panels, Scaffold(), 0)
    for rl, attribution, message in (
        ({}, {}, "evaluate.attribution has no effect without a team of at least two: list rl.team.members"),
        ({"algorithm": "marft"}, {"players": ["chef"]}, "names chef, which is no role of rl.team: planner, solver"),
        ({"algorithm": "marft"}, {"players": ["planner", "planner"]}, "names a role twice"),
        ({"algorithm": "marft"}, {"players": ["planner"]}, "has one player in a team"),
    ):
        with pytest.raises(ParamsError, match=message.replace(".", r"\.")):
            parse_params({**PARAMS, "rl": rl, "evaluate": {"attribution": attribution}})
    large = {"search": [f"m{index}" for index in range(9)]}
    assert "too many of 9 players: name at most 8" in str(Attribution().problem(large))
    assert Attribution(players=["m0", "m1"]).problem(large) is None
