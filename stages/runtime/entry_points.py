"""Classes and modules by name: those shipped here, and those of other packages, found through entry points and loaded without raw
tracebacks."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.runtime.validation import ParamsError, closest


@cache
def _installed(group: str, search_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Cached: reading every package's metadata takes longer than the rest of a check of params.yaml."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


@cache
def _modules(folders: tuple[str, ...]) -> frozenset[str]:
    """Cached: a check of params.yaml asks a dozen times."""
    return frozenset(module.name for module in pkgutil.iter_modules(folders))


@dataclass(frozen=True)
class Group:
    """A group of entry points and the key of params.yaml that names one of them.

    package: one whose modules have names of the group, too. attribute: what of such a module counts; an entry point names the
    module or what counts."""

    name: str
    key: str
    package: ModuleType | None = None
    attribute: str = ""

    def shipped(self) -> frozenset[str]:
        """Names of the modules in the package, without importing them."""
        return _modules(tuple(self.package.__path__)) if self.package else frozenset()

    def names(self) -> list[str]:
        """All names, sorted. Imports nothing."""
        return sorted(self.shipped() | set(self.points()))

    def points(self) -> dict[str, EntryPoint]:
        """Name -> installed entry point, sorted. Imports nothing."""
        return _installed(self.name, tuple(sys.path))

    def load(self, name: str) -> Any:
        """What `name` stands for; the module itself if it lacks the attribute. Raises ParamsError for an unknown name, and with
        file and line for another package's module that can't be imported."""
        if self.package and name in self.shipped():
            found = import_module(f"{self.package.__name__}.{name}")
        elif name in self.points():
            found = self._outside(name, self.points()[name])
        else:
            raise ParamsError(self.unknown(name))
        return getattr(found, self.attribute, found) if self.attribute else found

    def _outside(self, name: str, point: EntryPoint) -> Any:
        try:
            return point.load()
        except Exception as error:
            raise ParamsError(self.fault(name, error, f"its entry point {point.value} can't be loaded")) from error

    def unknown(self, name: str) -> str:
        """The message for an unknown name."""
        return f"unknown {self.key} '{name}'{self.hint(name)}"

    def hint(self, name: str) -> str:
        """The nearest name, all names, and how to install a package."""
        names = self.names()
        near = closest(name, names)
        nearest = f"; did you mean '{near}'?" if near else "."
        return (
            f"{nearest} Known: {', '.join(names)}. To use your own, name it in its package's pyproject.toml under "
            f'[project.entry-points."{self.name}"] and (re)install the package: pip install -e FOLDER'
        )

    def fault(self, name: str, error: BaseException, what: str = "it can't be made") -> str:
        """The message for an error in a plugin's own code, in one line."""
        return f"{self.key} '{name}': {what}: {described(error)}"


OURS = Path(__file__).resolve().parents[1]


def described(error: BaseException, home: Path = OURS) -> str:
    """An error in one line, with the file and line that raised it; `home`: the folder of another package's code, whose last line
    is then the one, whatever that called."""
    raised = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in raised if "importlib" not in frame.filename and frame.filename != __file__]
    if OURS not in (home, *home.parents):
        frames = [frame for frame in frames if home in Path(frame.filename).parents] or frames
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def place(thing: Any) -> str:
    """`file:line` of a class, function, method or of an instance's class; its name where there is no source."""
    subject = thing
    if isinstance(thing, functools.partial):  # its function, or that which it wraps
        subject = next(filter(callable, thing.args), thing.func)
    owner = getattr(subject, "__self__", None)
    if owner is not None and getattr(subject, "__module__", "").startswith("stages."):
        subject = type(owner)  # an inherited method: point to the subclass
    subject = inspect.unwrap(subject) if callable(subject) else subject
    if not (inspect.isclass(subject) or inspect.isroutine(subject) or inspect.ismodule(subject)):
        subject = type(subject)
    try:
        return f"{inspect.getsourcefile(subject)}:{max(inspect.getsourcelines(subject)[1], 1)}"
    except (TypeError, OSError):
        return getattr(subject, "__qualname__", repr(subject))
