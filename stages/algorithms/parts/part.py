"""Base classes of the parts of section `rl`: keys that the method chooses unless the user sets them, and conditions for keys.

`model_fields_set` of a part as given has the keys that the user set; any other key is null in params.yaml and in a dump of the
part, and takes the method's choice, or its default. Light to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

from stages.runtime.validation import ParamsError, Section

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Layered(Section):
    """A section whose keys override a method's choices; null means not set."""

    layered: ClassVar[frozenset[str] | None] = None
    """The keys of which this is true; None: all."""

    @classmethod
    def layered_keys(cls) -> list[str]:
        return [name for name in cls.model_fields if cls.layered is None or name in cls.layered]

    @model_validator(mode="before")
    @classmethod
    def _null_is_not_set(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        keys = cls.layered_keys()
        return {key: value for key, value in values.items() if value is not None or key not in keys}

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        found: dict[str, Any] = handler(self)
        for name in self.layered_keys():
            if name not in self.model_fields_set:
                if name in found:
                    found[name] = None
            elif info.exclude_defaults and name not in found:
                # A default value that the user set overrides the method's choice, so it must stay in the dump.
                found |= self.model_dump(mode=info.mode, include={name})
        return found

    def _set_keys(self) -> set[str]:
        return self.model_fields_set & set(self.layered_keys())

    def __eq__(self, other: object) -> bool:
        """Equal values and the same keys set: a default value that was set overrides a method's choice."""
        return super().__eq__(other) and isinstance(other, Layered) and self._set_keys() == other._set_keys()


class Part(Layered):
    """A part of an algorithm. Its defaults apply where neither the method nor the user sets a key."""

    switch: ClassVar[str] = "kind"
    """The key that is `own` where a method replaces the part by a function of its own."""
    data: ClassVar[tuple[str, ...]] = ("episodes", "offline_replay")
    """Which methods have this part, by `Composition.data`."""
    applies: ClassVar[Condition | None] = None
    """When any key of the part has an effect; None: always."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        """Set keys of the section's `values` that follow from others; given: as the user set it; max_length: model.max_length."""

    def check(self, rl: Rl, method: Composition) -> None:
        """Raise ParamsError for invalid combinations; `rl`: the resolved section."""

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        """What makes this part impossible with other sections of params.yaml, each with the remedy. `section`: name -> section
        as the domain has it."""
        yield from ()


def get(rl: Rl, key: str) -> Any:
    """The value of a dotted key of section `rl`."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(rl, section) if section else rl, name)


@dataclass(frozen=True)
class Condition:
    """When a key has an effect: `holds` for a resolved section; `words` describe it in messages. All conditions of a key must
    hold. Keys without a dot are of the part itself."""

    holds: Callable[[Rl, str], bool]
    words: Callable[[str], str]


def _dotted(part: str, key: str) -> str:
    return key if "." in key else f"{part}.{key}"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def AppliesTo(key: str, *values: Any) -> Condition:  # noqa: N802 - reads as a type in an annotation
    """Where `key` has one of `values`."""
    named = [str(value) for value in values if value != "own"]
    choices = " or ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)
    return Condition(lambda rl, part: get(rl, _dotted(part, key)) in values, lambda part: f"{_dotted(part, key)}: {choices}")


def AppliesAboveZero(key: str) -> Condition:  # noqa: N802
    """Where the number `key` is above 0."""
    return Condition(lambda rl, part: get(rl, _dotted(part, key)) > 0, lambda part: f"{_a(_dotted(part, key))} above 0")


def AppliesIf(holds: Callable[[Rl], bool], words: str) -> Condition:  # noqa: N802
    """Where `holds` is true of the resolved section; `words` describe it."""
    return Condition(lambda rl, _: holds(rl), lambda _: words)


def conditions(part: type[Part], key: str) -> list[Condition]:
    """The conditions for `key` of `part` to have an effect."""
    own = [item for item in part.model_fields[key].metadata if isinstance(item, Condition)]
    return [*([part.applies] if part.applies else []), *own]


def parts_of(rl: Rl) -> dict[str, Part]:
    """The parts of section `rl` by key, in the order of its fields."""
    return {name: value for name, value in rl if isinstance(value, Part)}


SOURCES = {
    "pairs": "preference pairs",
    "paths": "correct tree paths",
    "attempts": "successful attempts",
    "offline": "an offline dataset",
}
"""What methods without `pieces` for played episodes learn from, by `Composition.data`."""


def refuse_idle_parts(given: Rl, method: Composition) -> None:
    """Raise ParamsError for a key that the user set of a part that the method does not have."""
    slug = method.card.slug
    for name, part in parts_of(given).items():
        if method.data in part.data:
            continue
        for key in (key for key in type(part).model_fields if key in part.model_fields_set):
            if "pairs" in part.data and "episodes" not in part.data:
                data = SOURCES.get(method.data, "episodes" if method.data == "episodes" else SOURCES["offline"])
                why = f"learns from {data}; set it to null, or algorithm to one that learns from pairs, such as dpo"
            elif method.data in SOURCES:
                why = f"learns from {SOURCES[method.data]}, not from what it plays; set it to null"
            else:
                why = "learns from an offline dataset and plays nothing; set it to null"
            raise ParamsError(f"rl.{name}.{key} has no effect: algorithm {slug} {why}")


def refuse_idle_keys(given: Rl, resolved: Rl, method: Composition) -> None:
    """Raise ParamsError for a key that the user set and that has no effect with the other keys as they are."""
    for name, part in parts_of(given).items():
        for key in (key for key in type(part).model_fields if key in part.model_fields_set):
            unmet = [condition for condition in conditions(type(part), key) if not condition.holds(resolved, name)]
            if not unmet:
                continue
            words = " and ".join(condition.words(name) for condition in unmet)
            raise ParamsError(
                f"rl.{name}.{key} has no effect here: it needs {words} (algorithm {method.card.slug}); set it to null, or change "
                f"that"
            )
