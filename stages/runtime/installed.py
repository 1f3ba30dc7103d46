"""Classes and modules that other packages bring through entry points: found by name, and loaded without raw tracebacks."""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from stages.runtime.validation import ParamsError


@cache
def _installed(group: str, search_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Every package is looked into, which takes longer than the rest of a check of params.yaml: once for each path."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


@dataclass(frozen=True)
class Group:
    """A group of entry points and the key of params.yaml that names one of them."""

    name: str
    key: str

    def points(self) -> dict[str, EntryPoint]:
        """Name -> entry point of what is installed, by name. Imports nothing."""
        return _installed(self.name, tuple(sys.path))

    def load(self, name: str, known: Iterable[str] = ()) -> Any:
        """What the entry point `name` stands for; `known`: names that are found in other ways. Raises ParamsError for a name that
        is unknown, and with file and line for a module that can't be imported."""
        points = self.points()
        if name not in points:
            raise ParamsError(self.unknown(name, known))
        try:
            return points[name].load()
        except Exception as error:
            raise ParamsError(self.fault(name, error, f"its entry point {points[name].value} can't be loaded")) from error

    def unknown(self, name: str, known: Iterable[str]) -> str:
        """That nothing is called so, and `hint`."""
        return f"unknown {self.key} '{name}'{self.hint(name, known)}"

    def hint(self, name: str, known: Iterable[str]) -> str:
        """What follows "unknown": the nearest name, all of them, and how a package is installed."""
        names = sorted({*known, *self.points()})
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        nearest = f"; did you mean '{near[0]}'?" if near else "."
        return (
            f"{nearest} Known: {', '.join(names)}. One of your own package is found once its "
            f'pyproject.toml names it under [project.entry-points."{self.name}"] and the package is installed (again): '
            "pip install -e FOLDER"
        )

    def fault(self, name: str, error: BaseException, what: str = "it can't be made") -> str:
        """What went wrong in a plugin's own code: where, in one line."""
        return f"{self.key} '{name}': {what}: {described(error)}"

    def place(self, thing: Any) -> str:
        return place(thing)


def described(error: BaseException) -> str:
    """An error in one line, with the file and line of the outside code that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def place(thing: Any) -> str:
    """`file:line` of a class, function, method or of an instance's class; its name where there is no source."""
    subject = getattr(thing, "func", thing)  # a partial's function
    owner = getattr(subject, "__self__", None)
    if owner is not None and getattr(subject, "__module__", "").startswith("stages."):
        subject = type(owner)  # what a class inherits from here is the class's own to mend
    subject = inspect.unwrap(subject) if callable(subject) else subject
    if not (inspect.isclass(subject) or inspect.isroutine(subject) or inspect.ismodule(subject)):
        subject = type(subject)
    try:
        return f"{inspect.getsourcefile(subject)}:{max(inspect.getsourcelines(subject)[1], 1)}"
    except (TypeError, OSError):
        return getattr(subject, "__qualname__", repr(subject))
