"""Learnt values of states in the viewer."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
from pathlib import Path

import pytest
from reporting_run import add_value_model

from stages.params import Report
from stages.reporting.inputs import load_inputs
from stages.reporting.viewer.folder import write_viewer
from stages.reporting.viewer.groups import Group, groups_of
from stages.reporting.viewer.pack import state_name
from stages.reporting.viewer.patterns import SHIPPED
from stages.reporting.viewer.values import MODEL, ShortestHistories, covering, learnt_values, values_beside
from stages.runtime.resources import Resources


def group(kind: str, *episodes: tuple[list[int], list[tuple[str, int]]]) -> Group:
    """Episodes of task t: their tokens, and of each turn the state before it and where it starts."""
    rows = [
        {"task_id": "t", "token_ids": tokens, "turns": [{"state_key": key, "start": start} for key, start in turns]}
        for tokens, turns in episodes
    ]
    return Group("toy", "sft", kind, rows)


def test_a_state_is_valued_after_the_shortest_history() -> None:
    """Contract: the first of equally short ones; a kept run's tokens may be another model's."""
    found = ShortestHistories()
    found.add(group("kept", ([9], [("a", 1)])))
    found.add(group("panel", ([1, 2, 3, 4], [("a", 2), ("b", 3), ("a", 4)]), ([1, 5, 6], [("a", 2), ("b", 2), ("c", 0)])))
    assert {name: list(tokens) for name, tokens in found.found["toy"].items()} == {
        state_name("t", "a"): [1, 2],
        state_name("t", "b"): [1, 5],
    }


def test_histories_that_begin_others_are_read_within_them() -> None:
    given = {"p": [1, 2], "q": [1, 2, 3], "r": [1, 4], "same": [1, 4], "s": [1]}
    assert [(list(tokens), sorted(ends)) for tokens, ends in covering(given)] == [
        ([1, 4], [(1, "r"), (1, "same")]),
        ([1, 2, 3], [(0, "s"), (1, "p"), (2, "q")]),
    ]


@pytest.fixture(scope="module")
def valued(full_run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a value model for search."""
    root = tmp_path_factory.mktemp("valued")
    shutil.copytree(full_run[0], root, dirs_exist_ok=True)
    add_value_model(root, "search")
    return root


def test_values_are_the_model_s_at_the_end_of_each_history(valued: Path, full_run) -> None:
    """Contract: whatever histories are read together."""
    import torch

    from stages.values.step_value import StepValueModel

    folder = valued / "data/annotated/search/value_model"
    histories = ShortestHistories()
    for one in groups_of(valued, load_inputs(valued, full_run[1])):
        histories.add(one)
    given = dict(sorted(histories.found["search"].items())[:40])
    found = learnt_values(folder, given, 256)
    assert list(found) == list(given)
    model = StepValueModel.load(folder)
    for name, tokens in given.items():
        ids = torch.tensor([list(tokens)])
        value = model.turn_values(ids, torch.tensor([ids.shape[1]]), torch.tensor([[ids.shape[1] - 1]]))
        assert found[name] == pytest.approx(value.item(), abs=6e-4)
    assert len(set(found.values())) > 5
    assert learnt_values(valued / "none", given, 256) == {}


@pytest.mark.slow
def test_values_beside_are_those_of_this_process(valued: Path, full_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: the same numbers in a process of its own, whose errors are raised here; a domain without a model has none."""
    histories = ShortestHistories()
    for one in groups_of(valued, load_inputs(valued, full_run[1])):
        histories.add(one)
    found = {domain: dict(sorted(histories.found["search"].items())[:9]) for domain in ("search", "unknown")}
    annotated = valued / "data/annotated"
    resources = Resources(tokens_per_batch=256, workers=2)
    with values_beside(annotated, found, resources) as values:
        here = values()
    assert list(here) == ["search"]
    assert here["search"]
    monkeypatch.setattr("stages.reporting.viewer.values.BESIDE", 0)
    before = set(multiprocessing.active_children())
    with values_beside(annotated, found, resources) as values:
        assert len(set(multiprocessing.active_children()) - before) == 1
        assert values() == here
    (tmp_path / "search" / MODEL).mkdir(parents=True)
    with pytest.raises(FileNotFoundError), values_beside(tmp_path, found, resources) as values:
        values()


@pytest.mark.parametrize("on", [True, False])
def test_viewer_has_the_values_of_domains_with_a_model(valued: Path, full_run, tmp_path: Path, on: bool) -> None:
    inputs = load_inputs(valued, full_run[1].model_copy(update={"report": Report(state_values=on)}))
    groups = [one for one in groups_of(valued, inputs) if one.kind == "training"]
    with write_viewer(tmp_path / "episodes", inputs, groups, SHIPPED[:1], annotated=valued / "data/annotated"):
        pass
    page = (tmp_path / "episodes/index.html").read_text(encoding="utf-8")
    found = re.search(r'id="index">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["values"] == ({"search": "values_search"} if on else {})
    assert (tmp_path / "episodes/values_search.js").exists() == on
