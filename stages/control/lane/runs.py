"""All seeds of one method: figures, learning curves, a film. Finished seeds are kept, and an ended run goes on from them."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.control.lane.settings import Film, Lane, load_lane
from stages.control.learnt import Learnt
from stages.control.offline.datasets import MAKE
from stages.control.problems import PROBLEMS
from stages.records.episode import read_json, write_json
from stages.runtime.files import atomic_bytes
from stages.runtime.lineage import dvc_hash
from stages.runtime.validation import ParamsError, Section
from stages.runtime.workers import worker_pool

SCRATCH = Path(".bellwether/control")


def code_of(root: Path) -> list[str]:
    """Hashes of the code that bears on the lane's runs, which reports/control/dvc.yaml lists too."""
    parts = ("control", "values", "records", "seeding.py", "environments/wordle/rules.py")
    return [dvc_hash(root / "stages" / part) for part in parts]


def digest(parts: list[Any]) -> str:
    """16 hex digits of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def scratch_of(root: Path, lane: Lane, name: str) -> Path:
    """Where a method's seeds are kept until all are finished; another folder for other settings, code or data. Raises ParamsError
    without the data set that it learns from."""
    method = lane.methods[name]
    parts: list[Any] = [method.model_dump(mode="json"), lane.film and lane.film.model_dump(), *code_of(root)]
    if method.dataset:
        data = root / "data/control" / method.dataset
        if not data.exists():
            raise ParamsError(f"dataset: {data} does not exist; {MAKE}")
        parts.append(dvc_hash(data))
    return root / SCRATCH / f"{name}-{digest(parts)}"


def play_seed(path: Path, name: str, seed: int, scratch: Path) -> dict[str, Any]:
    """Learn once with the settings in the file at `path`; {figures, steps, returns}, which `scratch` keeps."""
    kept = scratch / f"{seed}.json"
    if kept.exists():
        return dict(read_json(kept))
    lane = load_lane(path)
    settings = lane.section(name, seed, str(scratch / f"{seed}.pt"))
    learnt = learn(PROBLEMS[lane.methods[name].problem].module, settings)
    if lane.film and lane.methods[name].film and learnt.act and seed == 0:
        atomic_bytes(scratch / "film.webp", film_of(learnt, settings, lane.film))
    found = {"figures": learnt.figures, "steps": learnt.steps, "returns": learnt.returns}
    write_json(kept, found)
    return found


def learn(module: str, settings: Any) -> Learnt:
    """A run of a problem's module, which has `learn`, with curves, or only `run`."""
    imported = importlib.import_module(module)
    full: Callable[[Any], Learnt] | None = getattr(imported, "learn", None)
    if full is not None and plays(settings):
        return full(settings)
    return Learnt(dict(imported.run(settings)))


def plays(settings: Section) -> bool:
    """Whether policies are evaluated while they learn: the module has `learn`, and a run takes longer than starting a process."""
    return "evaluate_every" in type(settings).model_fields


def film_of(learnt: Learnt, settings: Any, film: Film) -> bytes:
    from stages.control.lane.films import film as make_film

    assert learnt.act is not None
    return make_film(learnt.act, task_of(settings), getattr(settings, "distractors", 0), film)


def task_of(settings: Any) -> str:
    """The Gymnasium task of a run's settings; "" for other problems."""
    if getattr(settings, "dataset", None):
        from stages.control.offline.datasets import read_dataset

        return str(settings.task or read_dataset(Path(settings.folder), settings.dataset).task)
    return str(getattr(settings, "task", ""))


def play_method(root: Path, path: Path, name: str, workers: int) -> dict[str, Any]:
    """All seeds of a method: {task, steps [E], returns [R, E], figures {name: [R]}}, and the film's bytes under `film`, if any.
    Raises ParamsError as the problem does. The number of workers changes time alone."""
    lane = load_lane(path)
    scratch = scratch_of(root, lane, name)
    scratch.mkdir(parents=True, exist_ok=True)
    jobs = [(path, name, seed, scratch) for seed in range(lane.seeds)]
    if workers > 1 and len(jobs) > 1 and plays(lane.section(name, 0)):
        with worker_pool(min(workers, len(jobs)), one_thread) as pool:
            runs = list(pool.map(play_seed, *zip(*jobs, strict=True)))
    else:
        runs = [play_seed(*job) for job in jobs]
    film = scratch / "film.webp"
    return {
        "problem": lane.methods[name].problem,
        "task": task_of(lane.section(name, 0)),
        "seeds": lane.seeds,
        "steps": runs[0]["steps"],
        "returns": [run["returns"] for run in runs],
        "figures": {figure: [run["figures"][figure] for run in runs] for figure in runs[0]["figures"]},
        "film": film.read_bytes() if film.exists() else b"",
    }


def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
