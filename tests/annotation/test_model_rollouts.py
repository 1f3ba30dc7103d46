"""Rollouts in a learnt model of keydoor: exact with an exact model, learnt from episodes, and refused where they can't be."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stages.annotation import model_rollouts
from stages.annotation.derived import check_trees
from stages.annotation.model_rollouts import exact, replayed
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.claims.known_tree import Chat, FakeEngine
from stages.environments.keydoor import KeydoorDomain, KeydoorSettings
from stages.environments.keydoor.environment import KeydoorState
from stages.environments.keydoor.features import KeydoorFeatures
from stages.environments.keydoor.settings import WeightedLevel
from stages.environments.keydoor.world import World
from stages.environments.learnt import Imagined, Vector
from stages.records.sections import params_hash
from stages.records.task import Task
from stages.runtime.validation import ParamsError
from stages.values.settings import StateModel
from stages.values.state_model import LearntModel, Moves, errors, fit, gradient_weights, model_loss

LEVELS = (
    WeightedLevel(corridor=1, doors=0, side_rooms=2),
    WeightedLevel(corridor=0, doors=1, side_rooms=2, decoys=1),
    WeightedLevel(corridor=1, doors=0, side_rooms=2, deliver=True),
)
ROLLOUTS: dict[str, Any] = {"keep_rollouts": False, "model_rollouts": {}}


@pytest.fixture(scope="module")
def domain() -> KeydoorDomain:
    return KeydoorDomain(KeydoorSettings(levels=LEVELS, max_turns=8))


@pytest.fixture(scope="module")
def tasks(domain: KeydoorDomain) -> list[Task]:
    return [domain.task(record, {}) for record in domain.recipes(18, 3)]


class Oracle:
    """The dynamics themselves, as a model: it looks up the state and the action that the vectors stand for."""

    def __init__(self, features: KeydoorFeatures, task: Task) -> None:
        self.features, self.places = features, features.places(task)
        world = self.places.world
        things = (*self.places.rooms, *world.places)
        names = ("look", *(f"{verb} {name}" for verb in ("go", "unlock", "take", "drop") for name in things))
        self.names = {self._key(state, name): (state, name) for state in world.states for name in names}

    def _key(self, state: Any, name: str) -> bytes:
        taken = self.features.taken(self.places, state, 0, name)[: self.features.actions - self.features.context]
        return self.features.encoded(self.places, state).tobytes() + taken.tobytes()

    def following(self, state: Vector, action: Vector) -> Vector:
        key = state.tobytes() + action[: self.features.actions - self.features.context].tobytes()
        if key not in self.names:
            return state
        before, name = self.names[key]
        return self.features.encoded(self.places, self.places.world.after(before, name) or before)


def test_states_are_decoded_as_they_were_encoded(domain: KeydoorDomain, tasks: list[Task]) -> None:
    """Every state of every world; places follow the order of rooms and needs."""
    features = domain.features(tasks)
    for task in tasks:
        places = features.places(task)
        assert next(iter(places.rooms)) == places.world.start
        for state in places.world.states:
            vector = features.encoded(places, state)
            assert vector.shape == (features.states,)
            assert features.decoded(places, vector + np.float32(0.3) * (0.5 - vector)) == state
            assert features.same(task, KeydoorState(task_id=task.task_id, world=state), vector)
            assert features.taken(places, state, 3, "go nowhere").shape == (features.actions,)


def test_an_exact_model_imagines_what_happens(domain: KeydoorDomain, tasks: list[Task]) -> None:
    """Contract: observations, rewards, ends and terms are the environment's; a plain snapshot leads back to it."""
    features = domain.features(tasks)
    for number, task in enumerate(tasks[:6]):
        real, imagined = domain.make(Path()), domain.imagined(Path(), features, Oracle(features, task))
        real.reset(task)
        imagined.reset(task)
        imagined.restore(Imagined(imagined.snapshot()))
        rng = Random(number)
        while not real.snapshot().over:
            action = real.next_action() if rng.random() < 0.6 else rng.choice([*real.admissible(), "go nowhere", "sing"])
            assert imagined.step(str(action)) == real.step(str(action))
        assert imagined.snapshot() == real.snapshot()


def test_restoring_leaves_the_model(domain: KeydoorDomain, tasks: list[Task]) -> None:
    """A model that never changes anything: its steps are not accepted; after a plain snapshot the environment's are."""

    class Nothing:
        def following(self, state: Vector, action: Vector) -> Vector:
            return state

    environment = domain.imagined(Path(), domain.features(tasks), Nothing())
    environment.reset(tasks[0])
    start, action = environment.snapshot(), environment.next_action()
    environment.restore(Imagined(start))
    assert not environment.step(str(action)).accepted
    environment.restore(start)
    assert environment.step(str(action)).accepted
    environment.restore(Imagined(start))
    environment.reset(tasks[0])
    assert environment.step(str(action)).accepted


class Words(Chat):
    """Tokens are the words of one world."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def prompt_tokens(self, text: str) -> list[int]:
        return [20, 11]

    def action_text(self, turn_ids: Sequence[int]) -> str:
        return self.names[turn_ids[0]]


def grown(environment: Any, task: Task, names: Sequence[str], **evaluation: Any) -> Any:
    class Pool:
        def take(self) -> Any:
            return environment()

        def give_back(self, environment: Any) -> None:
            environment.close()

    settings = {"iterations": 12, "expand_k": 3, "max_depth": 5, "expansion": {"kind": "eager"}}
    params = Annotate(**settings, evaluation={"keep_rollouts": False, **evaluation})
    (tree,) = Search(FakeEngine(), Words(names), Pool(), params, 5, 10_000).grow([task])
    return tree


def test_search_with_an_exact_model_grows_the_same_tree_with_fewer_steps(domain: KeydoorDomain, tasks: list[Task]) -> None:
    """Contract: only rollouts are imagined; successes of the model are not the tree's first."""
    task = next(task for task in tasks if not task.spec["locks"] and not task.spec["deliver"])
    world, features = World.from_spec(task.spec), domain.features(tasks)
    side = world.places[world.thing]
    names = (f"go {world.back[side]}", f"go {side}", f"take {world.thing}", "look", "look")
    oracle = Oracle(features, task)
    real = grown(lambda: domain.make(Path()), task, names)
    model = grown(lambda: domain.imagined(Path(), features, oracle), task, names, model_rollouts={})
    assert [node.edge for node in model.nodes] == [node.edge for node in real.nodes]
    assert [(node.N, node.W, node.R, node.n_success) for node in model.nodes] == [
        (node.N, node.W, node.R, node.n_success) for node in real.nodes
    ]
    steps = real.counters["environment_steps"]
    assert model.counters["model_steps"] > 0.3 * steps
    assert model.counters["environment_steps"] + model.counters["model_steps"] == steps
    assert "model_steps" not in real.counters
    won = [node.iteration for node in model.nodes if node.edge.terminal]
    assert real.first_success is not None
    assert model.first_success is None or model.first_success >= min(won)


def random_rows(domain: KeydoorDomain, tasks: Sequence[Task], attempts: int) -> list[dict[str, Any]]:
    environment, rows = domain.make(Path()), []
    for task in tasks:
        for attempt in range(attempts):
            environment.reset(task)
            rng, turns = Random(f"{task.task_id}/{attempt}"), []
            while not environment.snapshot().over:
                action = environment.next_action() if rng.random() < 0.5 else rng.choice([*environment.admissible(), "sing"])
                turns.append({"action": str(action)})
                environment.step(str(action))
            rows.append({"task_id": task.task_id, "turns": turns})
    return rows


def test_moves_are_what_the_episodes_did(domain: KeydoorDomain, tasks: list[Task]) -> None:
    """Values are rewards to come, the step's own included: 1 on every step of a won episode."""
    known = {task.task_id: task for task in tasks}
    rows = random_rows(domain, tasks[:3], 2)
    features = domain.features(tasks)
    data, names, after = replayed(domain.make(Path()), features, known, rows)
    assert len(names) == len(after) == len(data.value) == sum(len(row["turns"]) for row in rows)
    ends = np.cumsum([len(row["turns"]) for row in rows])
    for row, (first, last) in zip(rows, zip([0, *ends[:-1]], ends, strict=True), strict=True):
        won = after[last - 1].world.won
        assert data.value[first:last].tolist() == [float(won)] * len(row["turns"])
        torch.testing.assert_close(data.state[first + 1 : last], data.following[first : last - 1])
    assert data.after.shape == (len(names), features.context)
    assert float(data.after[0, -1]) == pytest.approx(1 / 8)


def toy_model(**settings: Any) -> LearntModel:
    return LearntModel(StateModel.model_validate({"members": 1, "width": 4, **settings}), (2, 1, 1), 0)


def toy_moves() -> Moves:
    zero = torch.zeros(1, 1)
    return Moves(torch.zeros(1, 2), zero, torch.tensor([[-0.5, 1.0]]), zero, torch.zeros(1))


@pytest.mark.parametrize(
    ("settings", "loss"),
    [({"plain": False}, 1.0), ({}, 1.625), ({"loss": "vaml", "plain": False}, 0.0), ({"loss": "mse"}, 0.625)],
)
def test_loss_by_hand(settings: dict[str, Any], loss: float) -> None:
    """Errors 1/2 and -1 with the value's gradient (2, 1)."""
    model = toy_model(**settings)
    for parameter in model.network.parameters():
        torch.nn.init.zeros_(parameter)
    batch = Moves(*(part[None] for part in vars(toy_moves()).values()))
    weights = None if settings.get("loss") == "mse" else torch.tensor([2.0, 1.0])[None, None, None]
    assert float(model_loss(model, batch, weights).detach()) == pytest.approx(loss)


def test_weights_are_the_values_gradients_and_reach_no_weight_of_it() -> None:
    model = toy_model(clip_quantile=None, unit_gradients=False)
    data = toy_moves()
    weights = gradient_weights(model, data)
    step = 1e-3
    with torch.no_grad():
        for place in range(2):
            moved = data.following.clone()
            moved[0, place] += step
            slope = (model.values(moved[None], data.after) - model.values(data.following[None], data.after)) / step
            torch.testing.assert_close(slope[:, 0], weights[:, 0, place], atol=2e-3, rtol=0)
    assert not weights.requires_grad
    model_loss(model, Moves(*(part[None] for part in vars(data).values())), weights[:, None]).backward()
    assert all(parameter.grad is None for parameter in model.value.parameters())


@pytest.mark.parametrize("lipschitz", [{}, {"kind": "spectral", "beta": 0.8}, {"kind": "robust"}])
def test_a_fitted_model_predicts_held_out_steps(domain: KeydoorDomain, tasks: list[Task], lipschitz: dict[str, Any]) -> None:
    """Better than that nothing changes; spectral: slopes are at most the product of the layers' norms."""
    known = {task.task_id: task for task in tasks}
    features = domain.features(tasks)
    data, names, after = replayed(domain.make(Path()), features, known, random_rows(domain, tasks, 3))
    held = torch.tensor([name in {task.task_id for task in tasks[-4:]} for name in names])
    settings = StateModel(members=2, width=32, updates=150, batch=64, learning_rate=5e-3, lipschitz=lipschitz)
    model = LearntModel(settings, (features.states, features.actions, features.context), 0)
    fit(model, data.at(~held), 0)
    rest = held.nonzero()[:, 0]
    right = exact(model, features, known, data.at(rest), [names[row] for row in rest], [after[row] for row in rest])
    unchanged = float((data.state == data.following).all(1)[rest].float().mean())
    assert right > max(0.5, unchanged + 0.2)
    measured = errors(model, data.at(rest))
    assert measured["state_error"] < 0.03
    if lipschitz.get("kind") == "spectral":
        assert measured["slope"] <= 0.8**3 * 1.05


def test_the_model_is_fitted_once_and_kept(domain: KeydoorDomain, tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a checkpoint gives the same model without fitting again; the default has none."""
    monkeypatch.setattr(model_rollouts, "read_rows", lambda path: random_rows(domain, tasks[:6], 1))

    @contextmanager
    def progress(*_: object) -> Any:
        yield None

    context: Any = SimpleNamespace(domain="keydoor", data=Path(), params=SimpleNamespace(seed=3), progress=progress)
    kept: dict[str, Any] = {}
    checkpoints: Any = SimpleNamespace(load=kept.get, save=kept.__setitem__)
    params = Annotate(expansion={"kind": "eager"}, evaluation={**ROLLOUTS, "model_rollouts": {"updates": 5, "width": 8}})
    first = model_rollouts.learn_dynamics(context, domain, tasks, params, checkpoints)
    monkeypatch.setattr(model_rollouts, "fit", lambda *_: pytest.fail("fitted again"))
    second = model_rollouts.learn_dynamics(context, domain, tasks, params, checkpoints)
    assert first is not None
    assert second is not None
    assert first.metrics == second.metrics
    assert first.metrics["held_out"].keys() == {"steps", "state_error", "value_error", "slope", "exact", "unchanged"}
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert model_rollouts.learn_dynamics(context, domain, tasks, Annotate(), checkpoints) is None
    with pytest.raises(ValueError, match=r"raise rollout\.tasks"):
        fit(toy_model(), toy_moves().at(torch.tensor([], dtype=torch.int64)), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation": {"model_rollouts": {}}}, "set keep_rollouts to false"),
        ({"evaluation": {"kind": "value_model", "keep_rollouts": False, "model_rollouts": {}}}, "model_rollouts has no effect"),
        ({"evaluation": ROLLOUTS, "expansion": {"kind": "lazy"}}, "set that to eager"),
        ({"evaluation": {**ROLLOUTS, "model_rollouts": {"loss": "nll"}}}, "Input should be 'mse', 'vaml' or 'vagram'"),
        ({"evaluation": {**ROLLOUTS, "model_rollouts": {"loss": "mse", "plain": False}}}, "model_rollouts.plain has no effect"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Annotate(**{"expansion": {"kind": "eager"}, **changes})


def test_other_domains_are_refused_by_name_and_the_default_hash_stays(domain: KeydoorDomain) -> None:
    params = Annotate(expansion={"kind": "eager"}, evaluation=ROLLOUTS)
    check_trees(params, "keydoor", domain, [0.0, 1.0])
    with pytest.raises(ParamsError, match=r"model_rollouts needs numbers for the domain's states.*shop gives none"):
        check_trees(params, "shop", object(), [0.0, 1.0])
    values = Annotate().model_dump(mode="json")
    del values["evaluation"]["model_rollouts"]
    assert params_hash(values) == params_hash(Annotate())
