"""The figures' content, and that their text fits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from stages.algorithms.settings import Rl
from stages.reporting import blocks
from stages.reporting.figures.curves import running_mean
from stages.reporting.figures.trees import _layout, example_tree, most_visited_path, search_tree
from stages.reporting.inputs import load_inputs
from stages.reporting.page import DETAILS, SUMMARY
from stages.reporting.sections.learning import INTROS, MIXED, rl_section
from stages.reporting.sections.outcome import learning_curve
from stages.reporting.style import Svg


def tick_labels(axis: Any, vertical: bool) -> list[Any]:
    """The drawn labels of an axis: those inside the view."""
    low, high = sorted(axis.get_view_interval())
    labels = [tick.label1 for tick in axis.get_major_ticks() if tick.label1.get_visible() or tick.label2.get_visible()]
    return [label for label in labels if label.get_text() and low - 1e-9 <= label.get_position()[vertical] <= high + 1e-9]


def check_texts(figure: Any, key: str) -> None:
    """Fail if a text extends beyond `figure`, or if tick labels of an axis overlap."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, frame = canvas.get_renderer(), figure.bbox
    for axes in figure.axes:
        if not axes.axison:
            continue
        ticks = {"x": tick_labels(axes.xaxis, False), "y": tick_labels(axes.yaxis, True)}
        for name, labels in ticks.items():
            boxes = [label.get_window_extent(renderer) for label in labels]
            spans = sorted((box.y0, box.y1) if name == "y" else (box.x0, box.x1) for box in boxes)
            assert all(a[1] <= b[0] + 1 for a, b in itertools.pairwise(spans)), (key, [label.get_text() for label in labels])
        every = {*axes.get_xticklabels(), *axes.get_yticklabels()}
        texts = [text for text in axes.findobj(Text) if text.get_visible() and text.get_text() and text not in every]
        for text in [*texts, *ticks["x"], *ticks["y"]]:
            box = text.get_window_extent(renderer)
            assert box.x0 >= frame.x0 - 1 and box.x1 <= frame.x1 + 1, (key, text.get_text())  # noqa: PT018
            assert box.y0 >= frame.y0 - 1 and box.y1 <= frame.y1 + 1, (key, text.get_text())  # noqa: PT018


def test_texts_fit_and_tick_labels_do_not_overlap(full_run, monkeypatch):
    """Contract: every text of every figure lies inside the figure, and labels of one axis do not overlap."""
    root, params = full_run
    seen = []

    def check(figure: Any, key: str, title: str) -> Svg:
        check_texts(figure, key)
        seen.append(key)
        return Svg("<svg/>", {})

    monkeypatch.setattr(blocks, "to_svg", check)
    inputs = load_inputs(root, params)
    for build in (*SUMMARY, *DETAILS):
        build(inputs)
    assert len(seen) == len(set(seen)), "figure keys are not unique"
    expected = {
        "journey",
        "changes",
        "success-search",
        "sft-loss",
        "pass-at-k",
        "calibration-search",
        "tree-textworld",
        "merge-groups",
        "rl-kl",
    }
    assert expected <= set(seen)


def node(number: int, parent: int, depth: int, n: int, w: float, task: str = "t") -> dict:
    return {"task_id": task, "node": number, "parent": parent, "depth": depth, "N": n, "W": w, "terminal": False}


TREE = [node(0, -1, 0, 10, 5.0), node(1, 0, 1, 4, 1.0), node(2, 0, 1, 6, 4.0), node(3, 2, 2, 3, 2.0), node(4, 2, 2, 3, 3.0)]


def test_most_visited_path_breaks_ties_by_value():
    assert [item["node"] for item in most_visited_path(TREE)] == [0, 2, 4]


def test_layout_puts_parents_between_their_children():
    places = _layout(TREE)
    assert places == {1: 0.0, 3: 1.0, 4: 2.0, 2: 1.5, 0: 0.75}


def test_example_tree_is_neither_all_success_nor_all_failure():
    others = [node(0, -1, 0, 10, 0.0, "a"), node(0, -1, 0, 10, 10.0, "b")]
    assert example_tree([*others, *TREE])[0]["task_id"] == "t"


def test_node_fill_is_its_value_scaled_to_the_limits():
    figure = search_tree(TREE, 0, limits=(-1.0, 1.0))
    fills = {mark.get_alpha() for mark in figure.axes[0].collections} - {None}
    assert sorted(fills) == pytest.approx([0.625, 0.75, 5 / 6, 1.0])


def test_running_mean_uses_past_values_only():
    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (True, "yes"), (12345, "12,345"), (0.123456, "0.1235"), (2.0, "2"), (math.nan, "–")]
)
def test_numbers_are_formatted_for_readers(value, text):
    assert blocks.number(value) == text


def with_rl(inputs, **rl):
    """The run's params with another section `rl`, in all domains."""
    given = Rl.model_validate(rl)
    return SimpleNamespace(domains=inputs.params.domains, section=lambda name, domain: given)


@pytest.mark.parametrize(
    ("rl", "about", "data"),
    [
        ({"algorithm": "rejection_sft"}, "its own successful attempts of the rollout stage", "successful attempts"),
        ({"algorithm": "tree_bc"}, "the paths of tree search that end in a success", "correct tree paths"),
        (
            {"algorithm": "dpo", "preference": {"source": "imported"}},
            "is trained on imported preference pairs:",
            "preference pairs",
        ),
        ({"algorithm": "agent_rlvr"}, "pairs of a successful attempt of the rollout stage", "preference pairs"),
        ({"algorithm": "grpo"}, "is trained on its own episodes", "16 × 8"),
    ],
)
def test_rl_section_says_what_was_trained_on(full_run, rl, about, data):
    """Contract: the algorithm and its settings decide what the text says, not the history's columns, which algorithms share."""
    inputs = load_inputs(*full_run)
    history = {"step": [0.0], "paths": [8.0], "loss": [1.0]}
    domains = {name: replace(given, rl_history=history) for name, given in inputs.domains.items()}
    section = rl_section(replace(inputs, params=with_rl(inputs, **rl), domains=domains))
    assert about in section.intro
    (table,) = [block for block in section.blocks if isinstance(block, blocks.Table) and "summary" in block.title]
    assert {row[3] for row in table.rows} == {data}


def test_rl_section_of_different_data_claims_none_for_all(full_run):
    inputs = load_inputs(*full_run)
    mixed = {"search": Rl(algorithm="grpo"), "textworld": Rl(algorithm="dpo")}
    params = SimpleNamespace(domains=list(mixed), section=lambda name, domain: mixed[domain])
    assert rl_section(replace(inputs, params=params)).intro == MIXED


def test_rl_section_of_preference_run_shows_pair_metrics(full_run):
    """Contract: no empty columns or panels for success, entropy and groups, which such a run does not have."""
    inputs = load_inputs(*full_run)
    columns = {"pairs": 32.0, "loss": 0.6, "pair_accuracy": 0.75, "margin": 1.5, "winner_logprob": -1.0, "loser_logprob": -2.0}
    history = {"step": [float(step) for step in range(12)], **{name: [value] * 12 for name, value in columns.items()}}
    domains = {name: replace(given, rl_history=history) for name, given in inputs.domains.items()}
    section = rl_section(replace(inputs, params=with_rl(inputs, algorithm="dpo"), domains=domains))
    assert "is trained on preference pairs of tree search" in section.intro
    (table,) = [
        block for block in section.blocks if isinstance(block, blocks.Table) and block.title.startswith("Training summary")
    ]
    assert table.header[3:] == ("tasks × attempts", "pair accuracy", "margin")
    assert table.rows[0][3:] == ["preference pairs", "0.75 → 0.75", "1.5 → 1.5"]
    (figures,) = [block for block in section.blocks if isinstance(block, blocks.Figures)]
    assert len(figures.drawings) == 5, "loss, accuracy, margin, winner and loser"
    assert learning_curve(replace(inputs, domains=domains)) is None


def test_rl_section_of_offline_run_shows_critic_metrics(full_run):
    """Contract: such a run has no success in training either; its critic's TD error and correlation with returns are shown."""
    inputs = load_inputs(*full_run)
    columns = {"loss": 0.6, "td_error": 0.25, "q_correlation": 0.5, "kl": 0.1}
    history = {"step": [float(step) for step in range(12)], **{name: [value] * 12 for name, value in columns.items()}}
    domains = {name: replace(given, rl_history=history) for name, given in inputs.domains.items()}
    section = rl_section(replace(inputs, params=with_rl(inputs, algorithm="archer_offline"), domains=domains))
    assert section.intro == INTROS["offline_replay"]
    (table,) = [
        block for block in section.blocks if isinstance(block, blocks.Table) and block.title.startswith("Training summary")
    ]
    assert table.header[3:] == ("tasks × attempts", "critic's TD error", "correlation of Q and return")
    assert table.rows[0][3:] == ["the offline dataset", "0.25 → 0.25", "0.5 → 0.5"]
