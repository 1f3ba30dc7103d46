"""What the value model of designs learns: from few labels, of the task as well as the design, and of a domain like another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from searches import SPACE, TASKS, run, search, settings, worth

from stages.designs.settings import parse_search
from stages.designs.space import INDEX, Space
from stages.designs.tree import Node
from stages.designs.value_model import FEWEST, FittedValueModel, describe
from stages.records.task import Task


def test_the_value_model_learns_from_few_labels() -> None:
    """Contract: 30 labels order unseen designs (Spearman above 0.7), the model is less sure of those than of what it has seen,
    and before it has enough it says the mean."""
    from scipy.stats import spearmanr

    nodes = run(search(settings(method="random", budget=30)))
    space = Space.of(settings())
    seen = [item.design for item in nodes]
    unseen = [design for design in space.all() if design not in set(seen)]
    for kind in ("gp", "ridge"):
        model = FittedValueModel(space, TASKS, kind)
        model.fit(nodes)
        mean, std = model.predict(unseen)
        assert spearmanr(mean, [worth(space, design) for design in unseen]).statistic > 0.7
        assert std.mean() > model.predict(seen)[1].mean()
        model.fit(nodes[: FEWEST - 1])
        assert np.ptp(model.predict(unseen)[0]) == 0.0


def test_designs_that_could_not_be_run_teach_the_value_model_nothing() -> None:
    """Contract: their score of 0 is no score, and no less sure for having no error."""
    nodes = run(search(settings(method="random", budget=12)))
    space = Space.of(settings())
    lost = [replace(item, score=0.0, error=0.0, by_domain={"search": (0.0, 0.0)}, failed="no room") for item in nodes[6:]]
    for kind in ("gp", "ridge"):
        found = []
        for given in (nodes[:6], [*nodes[:6], *lost]):
            model = FittedValueModel(space, TASKS, kind)
            model.fit(given)
            found.append(model.predict(space.all()))
        for one, other in zip(*found, strict=True):
            assert np.array_equal(one, other)
        model.fit(lost)
        assert set(model.predict(space.all())[0]) == {0.5}


def test_the_model_reads_the_task_as_well_as_the_design() -> None:
    """Contract: rows are (design, domain); what helps in one domain and hurts in the other is told apart, and the score is the
    mean over both."""
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
def test_a_domain_that_is_described_alike_is_predicted_alike(kind: str) -> None:
    """Contract: of a domain in which nothing was played, the description says what to expect: the scores of the domain that is
    described so, their level and what helps there, and not those of the other; without descriptions there is no telling."""
    names = ["search", "shop", "textworld"]
    space = Space.of(parse_search({"domains": names, "per_domain": {name: {} for name in names}, "design": {"space": SPACE}}))
    designs, place = space.all(), INDEX["temperature"]
    nodes = [
        Node(one, -1, "random", 0.0, 0.01, {"search": (0.2 + 0.4 * one[place], 0.01), "shop": (0.9 - 0.4 * one[place], 0.01)})
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
    assert away[0] == pytest.approx(away[1], rel=0.2), "it is the description that told"
