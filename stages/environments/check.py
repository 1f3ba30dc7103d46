"""Tests an environment against the contract (protocol.py)."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from stages.environments.protocol import Domain, Environment, Observation, Step
from stages.environments.registry import load_domain
from stages.records.task import SPLITS, Task, succeeded
from stages.runtime.checking import Findings, MistakeError, expect
from stages.runtime.workers import worker_pool

RECORDS = 52
"""Number of records, enough for all splits."""
PLAYED = 5
"""Tasks of each split that are played."""


def check(name: str, found: Findings) -> None:
    """Raises ParamsError for a class that is not a domain."""
    domain = load_domain(name)
    if hasattr(domain, "ready"):
        domain.ready()
    found.passed.append("the class: its name, Settings, constructor and methods")
    records = found.check(
        "recipes: JSON records with task_id and split, the same for the same seed", domain.recipes, lambda: _records(domain)
    )
    if not records:
        return
    found.check(
        "check: accepts the recipes' records, and raises ValueError for others", domain.check, lambda: _checked(domain, records)
    )
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, part) for part in "ab"]
        tasks = found.check(
            "build: the same tasks and the same bytes each time", domain.build, lambda: _built(domain, records, folders)
        )
        if not tasks:
            return
        found.check("entities: those of training and test tasks differ", domain.entities, lambda: _disjoint(domain, tasks))
        environment = found.check("make: an environment", domain.make, lambda: domain.make(folders[0]))
        if environment is None:
            return
        shown = [task for split in SPLITS for task in [task for task in tasks if task.split == split][:PLAYED]]
        _play(domain, environment, shown, found)
        found.check("a worker process finds and plays it", type(environment), lambda: _in_worker(name, folders[0], shown[0]))
        found.check("close: may be called twice", environment.close, lambda: (environment.close(), environment.close()))


def _play(domain: Domain, environment: Environment, tasks: list[Task], found: Findings) -> None:
    games = found.check(
        "reset and step: Observation and Step; the same task plays the same",
        environment.step,
        lambda: _games(domain, environment, tasks),
    )
    if games is None:
        return
    found.check("expert: solves its tasks", domain.expert, lambda: _solves(games))
    found.check(
        "admissible: sorted actions that are accepted", environment.admissible, lambda: _admissible(environment, tasks[0])
    )
    found.check(
        "snapshot and restore: the same future, random state included",
        environment.restore,
        lambda: _restored(environment, tasks, games),
    )
    found.check("state_key: text that a snapshot brings back", environment.state_key, lambda: _keys(environment, tasks, games))


def _records(domain: Domain) -> list[dict[str, Any]]:
    first, again = (list(domain.recipes(RECORDS, 0)) for _ in range(2))
    expect(len(first) > 0, "it yields nothing; yield `count` records")
    expect(
        json.dumps(first) == json.dumps(again),
        "the same seed gives different records; use stages.plugins.stream(seed, ...)",
    )
    for record in first:
        expect(isinstance(record.get("task_id"), str) and bool(record["task_id"]), f"no text 'task_id' in {record}")
        expect(record.get("split") in SPLITS, f"'split' must be one of {list(SPLITS)} in {record}")
    expect(len({record["task_id"] for record in first}) == len(first), "two records have the same task_id")
    lacking = set(SPLITS) - {record["split"] for record in first}
    expect(not lacking, f"{RECORDS} records have no split {sorted(lacking)}; assign splits with stages.plugins.splits_in_turn")
    return first


def _checked(domain: Domain, records: list[dict[str, Any]]) -> None:
    for record in records:
        domain.check(record)
    try:
        domain.check({"task_id": "x", "split": "train", "no such key": 1})
    except ValueError:
        return
    raise MistakeError("it accepts a record with only an unknown key; raise ValueError that says what is wrong")


def _built(domain: Domain, records: list[dict[str, Any]], folders: list[Path]) -> list[Task]:
    made = [domain.build(records, folder, 1) for folder in folders]
    for task in made[0]:
        expect(isinstance(task, Task), f"it returned {type(task).__name__}, not a list of stages.plugins.Task")
        expect(task.domain == domain.name, f"task.domain is {task.domain!r}; set it to {domain.name!r}")
        json.dumps(dict(task.spec))
    ids = [record["task_id"] for record in records]
    expect([task.task_id for task in made[0]] == ids, "its tasks do not match the records and their order")
    expect(made[0] == made[1], "the same records give different tasks the second time")
    files = [{str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()} for root in folders]
    expect(files[0] == files[1], "the same records give different bytes below `folder` the second time")
    return made[0]


def _disjoint(domain: Domain, tasks: list[Task]) -> None:
    train, test = (set().union(*(domain.entities(task) for task in tasks if task.split == split)) for split in ("train", "test"))
    expect(not train & test, f"training and test tasks share {sorted(train & test)[:3]}; draw their names from disjoint sets")


def _trace(domain: Domain, environment: Environment, task: Task) -> list[Any]:
    """The expert's game: the first observation, then (action, step)."""
    first = environment.reset(task)
    expect(isinstance(first, Observation), f"reset returned {type(first).__name__}; return stages.plugins.Observation(text)")
    game: list[Any] = [first]
    while not (len(game) > 1 and game[-1][1].done):
        action = domain.expert(environment)
        if action is None:
            break
        step = environment.step(action)
        expect(isinstance(step, Step), f"step returned {type(step).__name__}; return stages.plugins.Step(...)")
        expect(isinstance(step.observation, Observation), "step.observation is not a stages.plugins.Observation")
        game.append((action, step))
        expect(len(game) <= 1000, "an episode has more than 1000 turns; set truncated at settings.max_turns")
    return game


def _games(domain: Domain, environment: Environment, tasks: list[Task]) -> list[list[Any]]:
    games = [_trace(domain, environment, task) for task in tasks]
    for task, game in zip(tasks, games, strict=True):
        expect(_trace(domain, environment, task) == game, f"task {task.task_id} gave a different game the second time")
    return games


def _solves(games: list[list[Any]]) -> None:
    for game in games:
        steps = [step for _, step in game[1:]]
        terms = dict(steps[-1].terms) if steps else {}
        expect(
            succeeded(sum(step.reward for step in steps), terms),
            f"the game {[action for action, _ in game[1:]]} does not succeed; next_action, or expert, has to choose actions that "
            f"solve every task",
        )


def _admissible(environment: Environment, task: Task) -> None:
    environment.reset(task)
    start, actions = environment.snapshot(), list(environment.admissible())
    expect(actions == sorted(actions), f"its actions {actions} are not sorted; return them in sorted order")
    for action in actions:
        environment.restore(start)
        expect(environment.step(action).accepted, f"{action!r} is listed, and step does not accept it; list what it accepts")


def _restored(environment: Environment, tasks: list[Task], games: list[list[Any]]) -> None:
    for task, game in zip(tasks, games, strict=True):
        environment.reset(task)
        states = []
        for action, _ in game[1:]:
            states.append(environment.snapshot())
            environment.step(action)
        for state, (action, step) in reversed(list(zip(states, game[1:], strict=True))):
            environment.restore(state)
            expect(
                environment.step(action) == step,
                f"after restore, {action!r} gives a different step on {task.task_id}; copy all state",
            )


def _keys(environment: Environment, tasks: list[Task], games: list[list[Any]]) -> None:
    for task, game in zip(tasks, games, strict=True):
        environment.reset(task)
        for action, _ in game[1:]:
            state, key = environment.snapshot(), environment.state_key()
            expect(isinstance(key, str), f"it returned {type(key).__name__}; return a string")
            environment.step(action)
            environment.restore(state)
            expect(environment.state_key() == key, "a restored state has a different key")
            environment.step(action)


def _worker(name: str, folder: Path, task: Task) -> str:
    return load_domain(name).make(folder).reset(task).text


def _in_worker(name: str, folder: Path, task: Task) -> None:
    pool: ProcessPoolExecutor = worker_pool(1)
    with pool:
        text = pool.submit(_worker, name, folder, task).result()
    expect(text == _worker(name, folder, task), "the task starts differently there")
