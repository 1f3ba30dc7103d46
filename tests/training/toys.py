"""A toy domain that a tiny policy learns within seconds, and helpers of stage tests."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from stages import rl
from stages.agent.policy import load_policy
from stages.annotation.pairs import PAIR_SCHEMA
from stages.environments.protocol import Observation, Step
from stages.records.episode import NODE_SCHEMA, Episode, Owner, TurnRecord, write_table
from stages.records.task import Task
from stages.runtime.stage import StageContext

PAIRS = 6


class FirstLetterEnvironment:
    """Ends after two actions; succeeds if the second starts with a letter before `n`."""

    @classmethod
    def in_folder(cls, folder: Path) -> FirstLetterEnvironment:
        """What a domain's `make` returns; picklable, since environments live in processes of their own while a GPU generates."""
        return cls()

    def reset(self, task: Task) -> Observation:
        self.task, self.actions = task, 0
        return Observation(f"you are in room {task.seed}")

    def step(self, action: str) -> Step:
        self.actions += 1
        over = self.actions == 2
        reward = float(over and "a" <= action[:1].lower() < "n")
        return Step(Observation("" if over else "you see a key"), reward, True, over, False, 1.0, {"letter": reward})

    def state_key(self) -> str:
        return str(self.actions)

    def snapshot(self) -> int:
        return self.actions

    def restore(self, state: int) -> None:
        self.actions = state

    def close(self) -> None:
        self.actions = 0


def read_history(root: Path) -> list[dict[str, float]]:
    """Rows of the toy domain's history, NaN for empty cells."""
    with (root / "reports/rl/toy_history.csv").open() as handle:
        return [{name: float(cell or "nan") for name, cell in row.items()} for row in csv.DictReader(handle)]


SHORT_RUN: dict[str, Any] = {
    "steps": 3,
    "tasks_per_step": 3,
    "group_size": 4,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}
"""Section `rl` of a run of a second."""


def run(context: Any) -> list[dict[str, float]]:
    """Run rl; returns its history."""
    rl.run(context)
    return read_history(context.root)


def letter_tasks(count: int) -> list[Task]:
    splits = ("train", "train", "train", "valid")
    return [Task(f"toy-{index:03d}", "toy", splits[index % 4], index, "take the key", {}, 1.0) for index in range(count)]


def demonstration(task: Task, actions: tuple[str, ...] = ("open the door", "take the key")) -> Episode:
    messages = [{"role": "user", "content": f"{task.prompt}\nyou are in room {task.seed}"}]
    for action in actions:
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": "you see a key"}]
    turns = [TurnRecord(action, "you see a key", True, 0.0, 1.0, "", action, 0, 0) for action in actions]
    turns[-1].reward = 1.0
    return Episode(
        *(f"{task.task_id}/expert-0", task.task_id, "toy", task.task_id, 0, "expert", "", 0.0, 1.0, 0),
        turns=turns,
        reward=1.0,
        messages=messages[:-1],
    )


def make_episode(name: str, group: str, turns: list[int], reward: float) -> Episode:
    """Two prompt tokens, then turns of the given numbers of policy tokens, with one environment token between turns."""
    episode = Episode(name, group, "toy", group, 0, "", "", 1.0, 1.0, 0)
    episode.append([5, 6], Owner.PROMPT, -1)
    for turn, count in enumerate(turns):
        start = len(episode.token_ids)
        episode.append(range(10, 10 + count), Owner.POLICY, turn, [-0.5] * count)
        last = turn + 1 == len(turns)
        episode.turns.append(TurnRecord("a", "o", True, reward if last else 0.0, 0.0, "", "a", start, start + count))
        if not last:
            episode.append([7], Owner.ENVIRONMENT, turn)
    episode.reward = reward
    return episode


def store_pairs(context: StageContext) -> None:
    """Write a tree per task: the prompt, a first action, and below it a right and a wrong second one."""
    tokenizer = load_policy(Path(context.params.model.path)).tokenizer
    prompt, after = tokenizer.encode("you are in room"), tokenizer.encode("you see a key")
    right, wrong, first = (tokenizer.encode(text) for text in ("take the key", "put the lamp", "open the door"))
    nodes, pairs = [], []
    for number in range(PAIRS):
        shapes = [(-1, [], [*prompt, 7 + number], 0.0, False), (0, first, after, 0.0, False)]
        shapes += [(1, right, [], 1.0, True), (1, [*wrong, 5 + number], [], 0.0, True)]
        for node, (parent, tokens, context_ids, reward, terminal) in enumerate(shapes):
            nodes.append(
                {
                    **dict.fromkeys(NODE_SCHEMA.names),
                    **{"task_id": f"t{number}", "node": node, "parent": parent, "depth": node, "action": str(node)},
                    **{"token_ids": tokens, "context_ids": context_ids, "logprob": [0.0] * len(tokens), "prior": 0.0, "N": 2},
                    **{
                        "W": 1.0,
                        "n_success": int(reward or not terminal),
                        "n_rollouts": 1,
                        "reward": reward,
                        "terminal": terminal,
                    },
                    **{"truncated": False, "state_key": "", "iteration": 0, "observation": ""},
                }
            )
        pairs.append(
            {"task_id": f"t{number}", "parent": 1, "win": 2, "lose": 3, "margin": 1.0, "n_win": 2, "n_lose": 2, "weight": 1.0}
        )
    folder = context.root / "data/annotated/toy"
    write_table(folder / "nodes.parquet", NODE_SCHEMA, nodes)
    write_table(folder / "pairs.parquet", PAIR_SCHEMA, pairs)


def outputs(root: Path) -> dict[str, bytes]:
    """Name -> bytes of everything below data and reports that a stage of this folder writes."""
    folders = ("data/models/sft", "data/models/rl", "data/models/merged", "data/rl", "reports")
    files = [path for folder in folders for path in sorted((root / folder).rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


class KilledError(Exception):
    """Simulates a kill."""


def kill_at_step(context: StageContext, step: int) -> None:
    """Make the context raise KilledError when the training loop reports step `step` as done."""
    done = []

    @contextmanager
    def dying(label: str, total: int, unit: str = "step") -> Iterator[SimpleNamespace]:
        def advance(count: int = 1, note: str = "") -> None:
            done.extend([None] * count)
            if len(done) >= step:
                raise KilledError

        yield SimpleNamespace(advance=advance, restore=advance)

    context.progress = dying  # type: ignore[method-assign]


Result = TypeVar("Result")


class _UnmetError(Exception):
    """A process needs what the others have not gathered yet."""


def as_processes(count: int, run: Callable[[int, Callable[[list[Any]], list[list[Any]]]], Result]) -> list[Result]:
    """Results of `run(index, gather)` in each of `count` simulated processes, run one after the other in this one: a run stops
    at a gather that another process has not reached, and is repeated once it has. `gather` returns every process's list."""
    rounds: list[dict[int, list[Any]]] = []

    def process(index: int) -> Result:
        calls = iter(range(len(rounds) + 1))

        def gather(own: list[Any]) -> list[list[Any]]:
            turn = next(calls)
            if turn == len(rounds):
                rounds.append({})
            rounds[turn][index] = own
            if len(rounds[turn]) < count:
                raise _UnmetError
            return [rounds[turn][other] for other in range(count)]

        return run(index, gather)

    while True:
        results: list[Result] = []
        for index in range(count):
            with suppress(_UnmetError):
                results.append(process(index))
        if len(results) == count:
            return results
