"""Data sets of episodes in Minari's format (data_format parquet): a folder with metadata and one Parquet file per episode.

`minari.load_dataset("pendulum/medium-v0")` reads them with MINARI_DATASETS_PATH=data/control. Actions are in the task's units.
The metadata hold a hash of all arrays, which is checked when a data set is read. Minari reads data sets of its other formats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.control.off_policy.vector_task import make_task
from stages.records.episode import write_json
from stages.runtime.files import atomic_folder
from stages.runtime.validation import ParamsError, nearest

FORMAT, VERSION, SHA256 = "parquet", "0.5.3", "sha256"
"""Minari's storage; a version of Minari whose data sets are written alike; the metadata's key of our hash."""
MAKE = "`dvc repro reports/control/dvc.yaml:data@<task>` makes data sets"


@dataclass(frozen=True)
class PlayedEpisode:
    """T steps."""

    observations: np.ndarray
    """[T + 1, S] float32."""
    actions: np.ndarray
    """[T, A] float32, in the task's units."""
    rewards: np.ndarray
    """[T] float64."""
    terminated: bool
    """Whether the task was over at the end; false where time was up."""


@dataclass(frozen=True)
class DataSet:
    name: str
    task: str
    episodes: Sequence[PlayedEpisode]

    @property
    def mean_return(self) -> float:
        return float(np.mean([episode.rewards.sum() for episode in self.episodes]))

    @property
    def steps(self) -> int:
        return sum(len(episode.rewards) for episode in self.episodes)


def content_hash(episodes: Sequence[PlayedEpisode]) -> str:
    """SHA-256 of the episodes' arrays."""
    found = hashlib.sha256()
    for episode in episodes:
        found.update(f"{len(episode.rewards)} {episode.terminated}".encode())
        for array, kind in ((episode.observations, "<f4"), (episode.actions, "<f4"), (episode.rewards, "<f8")):
            found.update(np.ascontiguousarray(array, dtype=kind).tobytes())
    return found.hexdigest()


def write_dataset(folder: Path, data: DataSet, algorithm: str) -> None:
    """Write `folder`/<name>, replacing what is there. algorithm: who played, for the metadata."""
    made = make_task(data.task)
    metadata = {
        "total_episodes": len(data.episodes),
        "total_steps": data.steps,
        "data_format": FORMAT,
        "jpeg_encoding": True,
        "observation_space": _space(made.observation_space),
        "action_space": _space(made.action_space),
        "env_spec": made.spec.to_json(),
        "dataset_id": data.name,
        "minari_version": VERSION,
        "algorithm_name": algorithm,
        "mean_return": data.mean_return,
        SHA256: content_hash(data.episodes),
    }
    with atomic_folder(folder / data.name) as partial:
        for number, episode in enumerate(data.episodes):
            place = partial / "data" / str(number)
            place.mkdir(parents=True)
            pq.write_table(_table(episode), place / "part-0.parquet", compression="zstd")
            write_json(place / "metadata.json", {"id": number, "total_steps": len(episode.rewards)})
        write_json(partial / "data" / "metadata.json", metadata)


def _space(space: Any) -> str:
    """A Box as Minari serialises it."""
    shape = {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape)}
    return json.dumps({**shape, "low": space.low.tolist(), "high": space.high.tolist()})


def _table(episode: PlayedEpisode) -> pa.Table:
    """T + 1 rows: the last one has the last observation, and zeros."""
    count = len(episode.rewards)
    last = np.zeros(count + 1, dtype=bool)
    last[count - 1] = True
    columns = {
        "observations": _vectors(episode.observations),
        "actions": _vectors(np.pad(episode.actions, ((0, 1), (0, 0)))),
        "rewards": np.pad(episode.rewards, (0, 1)),
        "terminations": last & episode.terminated,
        "truncations": last & (not episode.terminated),
    }
    return pa.table(columns)


def _vectors(values: np.ndarray) -> pa.Array:
    flat = np.ascontiguousarray(values, dtype=np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])


def read_dataset(folder: Path, name: str) -> DataSet:
    """The data set `folder`/<name>. Raises ParamsError if there is none, it is damaged, or its observations or actions are no
    vectors of numbers; ModuleNotFoundError if reading it needs Minari, which is not installed."""
    path = folder / name / "data"
    metadata = _metadata(folder, name, path)
    if metadata["data_format"] != FORMAT:
        return _read_by_minari(path, name, metadata)
    try:
        episodes = [_episode(path / str(number) / "part-0.parquet") for number in range(metadata["total_episodes"])]
    except (OSError, ValueError, KeyError) as error:
        raise ParamsError(f"dataset: {path} is damaged ({error}); remove it, then {MAKE}") from error
    _check(episodes, path)
    if SHA256 in metadata and metadata[SHA256] != content_hash(episodes):
        raise ParamsError(f"dataset: {path} is not what was written: its hash differs; remove it, then {MAKE}")
    return DataSet(name, _task(metadata, path), episodes)


def _metadata(folder: Path, name: str, path: Path) -> dict[str, Any]:
    if not (path / "metadata.json").is_file():
        known = sorted(str(item.parent.parent.relative_to(folder)) for item in folder.glob("*/*/data/metadata.json"))
        hint = nearest(name, known) if known else ""
        raise ParamsError(f"dataset: {folder / name} does not exist.{hint} {MAKE}")
    try:
        found: dict[str, Any] = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
        return {**found, "data_format": found["data_format"], "total_episodes": int(found["total_episodes"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ParamsError(f"dataset: {path / 'metadata.json'} is not Minari's metadata ({error}); {MAKE}") from error


def _task(metadata: dict[str, Any], path: Path) -> str:
    try:
        return str(json.loads(metadata["env_spec"])["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise ParamsError(f"dataset: {path / 'metadata.json'} does not say which task it is of (env_spec)") from error


def _episode(path: Path) -> PlayedEpisode:
    table = pq.read_table(path)
    vectors = [np.stack(table[name].to_numpy(zero_copy_only=False)) for name in ("observations", "actions")]
    over = np.asarray(table["terminations"])[:-1]
    return PlayedEpisode(vectors[0], vectors[1][:-1], np.asarray(table["rewards"])[:-1], bool(over.any()))


def _check(episodes: Sequence[PlayedEpisode], path: Path) -> None:
    """Raise ParamsError unless there are episodes, with steps, of vectors of finite numbers that have the same lengths in all."""
    if not episodes:
        raise ParamsError(f"dataset: {path} has no episodes; remove it, then {MAKE}")
    lengths: dict[str, int] = {}
    for number, episode in enumerate(episodes):
        for name, dimensions in (("observations", 2), ("actions", 2), ("rewards", 1)):
            values, where = getattr(episode, name), f"dataset: {name} of episode {number} in {path}"
            numeric = isinstance(values, np.ndarray) and values.dtype.kind in "fiu"
            if not numeric or values.ndim != dimensions:
                found = f"of shape {values.shape}" if numeric else "no arrays of numbers"
                raise ParamsError(f"{where} are {found}; learning needs a vector of observations and one of actions per step")
            if not len(values) or not np.isfinite(values).all():
                raise ParamsError(f"{where} are {'not all finite' if len(values) else 'none'}; remove the episode")
            if dimensions == 2 and lengths.setdefault(name, values.shape[1]) != values.shape[1]:
                raise ParamsError(f"{where} have {values.shape[1]} numbers, those before {lengths[name]}; use data of one task")


def _read_by_minari(path: Path, name: str, metadata: dict[str, Any]) -> DataSet:
    try:
        from minari import MinariDataset
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"dataset: {path} is in Minari's format {metadata['data_format']}, which needs Minari; install it with "
            f"pip install 'bellwether[control]'",
            name=error.name,
        ) from error
    episodes = [
        PlayedEpisode(one.observations, one.actions, one.rewards, bool(one.terminations.any())) for one in MinariDataset(path)
    ]
    _check(episodes, path)
    return DataSet(name, _task(metadata, path), episodes)
