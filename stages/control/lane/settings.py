"""Settings of the lane: reports/control/params.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from stages.control.offline.settings import KINDS, DataSets
from stages.control.problems import PROBLEMS
from stages.runtime.validation import Count, ParamsError, Section, explain, nearest, parse_yaml

PARAMS = Path("reports/control/params.yaml")
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]


class Film(Section):
    """Animated WebP of the first seed's policy, drawn by Gymnasium; needs the extra `control`."""

    frames: Count = 60
    every: Count = 3
    """Steps between frames."""
    width: Annotated[int, Field(ge=32, le=1024)] = 160
    """Pixels."""


class Method(Section):
    problem: str
    """One of stages/control/problems.py."""
    settings: dict[str, Any] = {}
    """Of the problem; `seed` and `checkpoint` are set for each run."""
    film: bool = True
    """false: no film of it, whatever `film` says, such as for MuJoCo's tasks where there is no OpenGL."""
    title: str = ""
    """In figures and tables; empty: the method's key."""

    @model_validator(mode="after")
    def _known(self) -> Method:
        if self.problem not in PROBLEMS:
            raise ValueError(f"there is no problem {self.problem}.{nearest(self.problem, list(PROBLEMS))}")
        for name in ("seed", "checkpoint"):
            if name in self.settings:
                raise ValueError(f"settings.{name} is set for each run; remove it")
        return self

    @property
    def dataset(self) -> str | None:
        """The data set of the lane that it learns from, if any."""
        if "folder" in self.settings:
            return None
        return str(self.settings.get("dataset", "")) if self.problem == "offline" or "dataset" in self.settings else None


class Scale(Section):
    """Returns that count as 0 and 1 where tasks are averaged."""

    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Scale:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self

    def normalised(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


class Lane(Section):
    seeds: Annotated[int, Field(ge=1, le=1000)] = 3
    """Runs of every method, with the seeds 0, 1, ..."""
    film: Film | None = Film()
    """null: no films."""
    scales: dict[str, Scale] = {}
    """By task."""
    data: dict[Name, DataSets] = {}
    """By the name of their folder in data/control."""
    methods: dict[Name, Method]

    @model_validator(mode="after")
    def _fits(self) -> Lane:
        for name, method in self.methods.items():
            known = [f"{folder}/{kind}-v0" for folder in self.data for kind in KINDS]
            if (data := method.dataset) is not None and data not in known:
                raise ValueError(f"methods.{name}.settings.dataset: no data set {data!r} is made.{nearest(data, known)}")
        return self

    def section(self, name: str, seed: int, checkpoint: str | None = None) -> Section:
        """The settings of a method's run. Raises ParamsError naming a wrong key."""
        method = self.methods[name]
        kind = PROBLEMS[method.problem].settings
        values = {**method.settings, "seed": seed}
        if checkpoint and "checkpoint" in kind.model_fields:
            values["checkpoint"] = checkpoint
        try:
            return kind.model_validate(values)
        except ValidationError as error:
            prefix = f"methods.{name}.settings."
            raise ParamsError(explain(error, kind, str(PARAMS), prefix)) from error


def load_lane(path: Path) -> Lane:
    """The file's settings, with those of every method checked. Raises ParamsError naming key and remedy."""
    if not path.is_file():
        raise ParamsError(f"{path} does not exist; run this in the checkout's root")
    values = parse_yaml(path.read_bytes(), path)
    try:
        lane = Lane.model_validate(values)
    except ValidationError as error:
        raise ParamsError(explain(error, Lane, str(path))) from error
    for name in lane.methods:
        lane.section(name, 0)
    return lane
