"""The value model of designs: few labels, task features, transfer to a similarly described domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from searches import SPACE, TASKS, run, search, settings, true_score

from stages.designs.settings import parse_search
from stages.designs.space import INDEX, Space
from stages.designs.tree import Node
from stages.designs.value_model import FEWEST, FittedValueModel, describe
from stages.records.task import Task


def test_value_model_learns_from_few_labels() -> None:
    """Contract: 30 labels rank unseen designs (Spearman above 0.7), unseen designs are more uncertain than seen ones, and with
    too few labels the prediction is the mean."""
    from scipy.stats import spearmanr

    nodes = run(search(settings(method="random", budget=30)))
    space = Space.of(settings())
    seen = [item.design for item in nodes]
    unseen = [design for design in space.all() if design not in set(seen)]
    for kind in ("gp", "ridge"):
        model = FittedValueModel(space, TASKS, kind)
        model.fit(nodes)
        mean, std = model.predict(unseen)
        assert spearmanr(mean, [true_score(space, design) for design in unseen]).statistic > 0.7
        assert std.mean() > model.predict(seen)[1].mean()
        model.fit(nodes[: FEWEST - 1])
        assert np.ptp(model.predict(unseen)[0]) == 0.0


def test_failed_designs_do_not_train_the_value_model() -> None:
    """Contract: their score of 0 and error of 0 are not labels."""
    nodes = run(search(settings(method="random", budget=12)))
    space = Space.of(settings())
    failed = [replace(item, score=0.0, error=0.0, by_domain={"search": (0.0, 0.0)}, failed="no room") for item in nodes[6:]]
    for kind in ("gp", "ridge"):
        found = []
        for labels in (nodes[:6], [*nodes[:6], *failed]):
            model = FittedValueModel(space, TASKS, kind)
            model.fit(labels)
            found.append(model.predict(space.all()))
        for one, other in zip(*found, strict=True):
            assert np.array_equal(one, other)
        model.fit(failed)
        assert set(model.predict(space.all())[0]) == {0.5}


def test_value_model_distinguishes_domains() -> None:
    """Contract: rows are (design, domain), so opposite effects in two domains are distinguished, and the score is the mean over
    both."""
    both = parse_search({"domains": ["search", "shop"], "per_domain": {"search": {}, "shop": {}}, "design": {"space": SPACE}})
    space = Space.of(both)
    domains = {**TASKS, "shop": describe([Task("a", "shop", "valid", 0, "buy a red cup", {}, 3.0)], 10)}
    assert domains["shop"] == {"difficulty": 3.0, "prompt_words": 4.0, "max_turns": 10.0}
    nodes = []
    for number, design in enumerate(space.all()[::2]):
        warm = design[INDEX["temperature"]]
        by = {"search": (0.2 + 0.6 * warm, 0.01), "shop": (0.7 - 0.2 * warm, 0.01)}
        nodes.append(Node(design, -1 + (number > 0), "random", sum(s for s, _ in by.values()) / 2, 0.01, by))
    model = FittedValueModel(space, domains, "gp")
    model.fit(nodes)
    designs = space.all()[1::2]
    mean, _ = model.predict(designs)
    assert mean == pytest.approx([0.45 + 0.2 * design[INDEX["temperature"]] for design in designs], abs=0.03)
    rows = model.rows([designs[0]] * 2, ["search", "shop"])
    assert not np.array_equal(rows[0], rows[1])


@pytest.mark.parametrize("kind", ["gp", "ridge"])
def test_new_domain_is_predicted_like_the_similarly_described_one(kind: str) -> None:
    """Contract: a domain without evaluations is predicted, in level and effects, like the domain with the same description and
    not like the other; equal descriptions do not distinguish."""
    names = ["search", "shop", "textworld"]
    space = Space.of(parse_search({"domains": names, "per_domain": {name: {} for name in names}, "design": {"space": SPACE}}))
    designs, temperature = space.all(), INDEX["temperature"]
    nodes = [
        Node(
            one,
            -1,
            "random",
            0.0,
            0.01,
            {"search": (0.2 + 0.4 * one[temperature], 0.01), "shop": (0.9 - 0.4 * one[temperature], 0.01)},
        )
        for one in designs[::2]
    ]
    easy, hard = TASKS["search"], {"difficulty": 5.0, "prompt_words": 40.0, "max_turns": 16.0}

    def predicted(shop: dict[str, float], new: dict[str, float]) -> list[np.ndarray]:
        model = FittedValueModel(space, {"search": easy, "shop": shop, "textworld": new}, kind)
        model.fit(nodes)
        return [model.predict(designs[1::2], [name])[0] for name in names]

    for new, near, far in ((easy, 0, 1), (hard, 1, 0)):
        found = predicted(hard, new)
        away = {at: np.abs(found[2] - found[at]).mean() for at in (near, far)}
        assert away[near] < away[far] / 4
        assert np.corrcoef(found[2], found[near])[0, 1] > 0.9
    found = predicted(easy, easy)
    away = {at: np.abs(found[2] - found[at]).mean() for at in (0, 1)}
    assert away[0] == pytest.approx(away[1], rel=0.2), "equal descriptions do not distinguish"
