"""Stage contexts on a toy domain whose tasks a tiny policy can learn within seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from device import RESOURCES

from stages.agent.chat import Chat
from stages.agent.policy import load_tokenizer
from stages.params import parse_params
from stages.records.episode import write_episodes, write_json, write_tasks
from stages.runtime.stage import StageContext
from training.toys import FirstLetterEnvironment, demonstration, letter_tasks

MakeContext = Callable[..., StageContext]


@pytest.fixture
def other_precision() -> Iterator[None]:
    """For tests whose precision is not float32: accelerate keeps one per process until its state is reset."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def make_context(make_contexts: Callable[[Path], MakeContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeContext:
    """make_context(stage, name, **sections): a context below tmp_path/name with curated toy data and the tiny policy as model."""
    from stages import rl

    domain = SimpleNamespace(make=FirstLetterEnvironment.in_folder, settings=SimpleNamespace(max_turns=2))
    for opened in ("load_domain", "open_domain"):
        monkeypatch.setattr(rl, opened, lambda name, settings: domain)
    return make_contexts(tmp_path)


@pytest.fixture(scope="session")
def make_contexts(tiny_policy: Path) -> Callable[[Path], MakeContext]:
    """make_contexts(folder)(stage, name, **sections): a context below folder/name; the stage's domain is not replaced."""
    return lambda folder: partial(make_in, folder, tiny_policy)


@pytest.fixture(scope="module")
def chat(tiny_policy: Path) -> Chat:
    return Chat(load_tokenizer(tiny_policy))


def make_in(folder: Path, tiny_policy: Path, stage: str, name: str = "run", **sections: Any) -> StageContext:
    root = folder / name
    values: dict[str, Any] = {
        "seed": 3,
        "domains": ["toy"],
        "resources": {"slots": 16, "threads": 1, "tokens_per_batch": 512},
        "model": {"path": str(tiny_policy), "max_length": 128},
        "per_domain": {"toy": {}},
        "rollout": {"tasks": 96},
        "annotate": {"tasks": 48},
    }
    values |= sections
    values["resources"] = {**RESOURCES, **values["resources"]}
    root.mkdir(exist_ok=True)
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": {stage: {"params": list(values)}}}))
    tasks = letter_tasks(16)
    write_tasks(root / "data/curated/toy/tasks.parquet", tasks)
    write_episodes(root / "data/curated/toy/demonstrations.parquet", [demonstration(task) for task in tasks])
    write_json(root / "data/rollouts/toy/difficulty.json", {task.task_id: 0.5 for task in tasks if task.split == "train"})
    sft = root / "data/models/sft"
    if stage == "rl" and not sft.exists():
        sft.parent.mkdir(parents=True)
        sft.symlink_to(tiny_policy)
    metrics: dict[str, list[float]] = {}
    tracker = SimpleNamespace(
        params=lambda values: None,
        metric=lambda name, value, step=None: metrics.setdefault(name, []).append(value),
        artifact=lambda path: None,
        episodes=lambda *values, **settings: None,
        metrics=metrics,
    )
    return StageContext(stage, "toy" if stage == "rl" else None, parse_params(values), root, tracker)
