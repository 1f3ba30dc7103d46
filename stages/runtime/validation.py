"""Sections of settings files, and error messages that name file, key and remedy."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]


MOST_MISTAKES = 20
"""Mistakes of one file that a message lists, with at most MOST_CHARACTERS in total."""
MOST_CHARACTERS = 3000


class ParamsError(ValueError):
    """A settings file is wrong; the message says where and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__("\n".join(brief(line) for line in message.splitlines()))


def brief(text: str, most: int = 1000) -> str:
    """`text` without its middle if it is longer than `most` characters: messages may quote values of any length."""
    if len(text) <= most:
        return text
    head, tail = most * 2 // 3, most // 4
    return f"{text[:head]} [... {len(text) - head - tail} characters ...] {text[-tail:]}"


class Checked(BaseModel):
    """Strictly typed settings: no `true` or "3" for a number, no infinite numbers, no integers beyond 64 bits, no text that UTF-8
    can't encode."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _representable(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Mapping) and section_within(cls.model_fields[str(info.field_name)].annotation):
            return value  # a section checks its own keys
        for item in _flat(value):
            if isinstance(item, int) and not -(2**63) <= item < 2**63:
                raise ValueError("holds an integer outside [-2^63, 2^63)")
            if isinstance(item, float) and item - item != 0:
                raise ValueError(f"holds {item}; give a finite number")
            if isinstance(item, str) and not item.isascii() and item.encode("utf-8", "replace").decode("utf-8") != item:
                raise ValueError(f"holds {shortened(item)}, which has half of a surrogate pair and is not valid text")
        return value


class Section(Checked):
    """A part of params.yaml; unknown keys are errors."""

    model_config = ConfigDict(validate_default=True)


def _flat(value: Any) -> Iterable[Any]:
    """A value, or the items of a list or mapping; deeper values belong to sections, which check them."""
    if isinstance(value, Mapping):
        return (*value, *value.values())
    return value if isinstance(value, (list, tuple)) else (value,)


_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = _SHORTENED.maxother = _SHORTENED.maxlong = 120


def shortened(value: Any) -> str:
    """`repr` of a value, short enough for a message."""
    try:
        return _SHORTENED.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def _readable(part: Any) -> str:
    """A key as the file has it, unless it is long or has invisible characters."""
    text = str(part)
    return text if len(text) <= 120 and text.isprintable() else shortened(text)


def watched(name: str) -> bool:
    """Whether a path is below data/raw, where DVC notices changes."""
    path = PurePosixPath(name)
    return path.parts[:2] == ("data", "raw") and len(path.parts) > 2 and ".." not in path.parts


def refuse_idle(section: Checked, where: str, needs: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ValueError for a key of `section` that was changed and has no effect. `needs`: key -> (whether it has one, what it
    needs for that). `where`: place of the section, ending in a dot, or ""."""
    for name, (applies, need) in needs.items():
        given, default = getattr(section, name), type(section).model_fields[name].default
        if not applies and given != default:
            shown = default.model_dump() if isinstance(default, BaseModel) else "null" if default is None else default
            raise ValueError(f"{where}{name} has no effect: it needs {need}; set it to {shown}, the default, or change that")


def section_within(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds: alone, in a mapping or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    held = [section_within(part) for part in getattr(annotation, "__args__", ())]
    return next((section for section in held if section is not None), None)


def known_names(root: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Field names of the section that `location`, a pydantic error's, points into; parts that are no fields, such as a domain's
    name, are skipped."""
    section = root
    for part in location[:-1]:
        if part in section.model_fields:
            section = section_within(section.model_fields[part].annotation) or section
    return list(section.model_fields)


RENAMED = {"rl.filling": "rl.group_resampling"}
"""Keys of params.yaml by their former names; `python -m stages.params --migrate` renames them in a file."""
MOVED = {"design": "reports/design/design.yaml"}
"""Former sections of params.yaml, and the files that hold them now."""


def renamed(location: tuple[Any, ...]) -> str:
    """The remedy for a key's former name; "" for other keys."""
    key = ".".join(map(str, location))
    if key in RENAMED:
        return f" It is now '{RENAMED[key]}': rename it, or run 'python -m stages.params --migrate'."
    return f" It is now the file {MOVED[key]}: run 'python -m stages.params --migrate'." if key in MOVED else ""


def closest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that is most similar, whatever its case; None if none is by `cutoff`."""
    folded = {one.casefold(): one for one in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None


def guess(name: str, known: Iterable[str]) -> str:
    """The hint `(did you mean 'search'?)` after a space, or "" if no known name is similar."""
    near = closest(name, known)
    return f" (did you mean '{near}'?)" if near else ""


def places(root: type[BaseModel], name: str, prefix: str = "") -> Iterator[str]:
    """Dotted places of the keys `name` in `root` and its sections, without the overrides of domains."""
    for key, field in root.model_fields.items():
        if key == name:
            yield f"{prefix}{key}"
        inner = section_within(field.annotation)
        if inner is not None and key != "per_domain":
            yield from places(inner, name, f"{prefix}{key}.")


MOST_PLACES = 3
"""Places of a key that a hint names."""


def nearest(name: str, known: list[str], elsewhere: Iterable[str] = ()) -> str:
    """A hint at the known name that differs by a slip, at the keys of this name in other sections if they are few, at a similar
    known name, or at all."""
    found = list(elsewhere)
    near = closest(name, known, 0.8)
    if near is None and 0 < len(found) <= MOST_PLACES:
        return f" Did you mean {' or '.join(map(repr, found))}?"
    near = near or closest(name, known)
    return f" Did you mean '{near}'?" if near else f" Known here: {', '.join(known)}."


def _as_number(kind: str, given: Any) -> str:
    """How to write text that is a number, such as 3e-4 (YAML's numbers have a dot), for an error of this pydantic type."""
    if kind not in ("int_type", "float_type") or not isinstance(given, str):
        return ""
    try:
        number = float(given)
    except ValueError:
        return ""
    if number - number != 0 or (kind == "int_type" and not number.is_integer()):
        return ""
    text = str(int(number)) if kind == "int_type" else repr(number)
    text = text if "." in text else text.replace("e", ".0e")
    return f", which YAML reads as text; write {text}"


MESSAGES = {"model_type": "must be a mapping of keys"}
"""Messages of our own for pydantic's error types."""


def explain(error: ValidationError, root: type[BaseModel], source: str, prefix: str = "") -> str:
    """A pydantic error as lines that say where, what was given, what is allowed, and the nearest known name. `root`: the file's
    sections; `prefix`: place of the checked section, ending in a dot, or ""."""
    lines = []
    for item in error.errors():
        location = (*prefix.rstrip(".").split("."), *item["loc"]) if prefix else item["loc"]
        key = ".".join(_readable(part) for part in location)
        if item["type"] == "extra_forbidden":
            known, name = known_names(root, location), str(location[-1])
            elsewhere = places(root, name, "" if location[0] in root.model_fields else prefix)
            lines.append(f"{source}: unknown key '{key}'.{renamed(location) or nearest(name, known, elsewhere)}")
        else:
            value, kind = item["input"], item["type"]
            given = "" if isinstance(value, (dict, BaseModel)) else f" (given: {shortened(value)}{_as_number(kind, value)})"
            place, message = f" '{key}'" if key else "", MESSAGES.get(kind, item["msg"].removeprefix("Value error, "))
            lines.append(f"{source}:{place} {message}{given}")
    shown = [brief(line) for line in lines[:MOST_MISTAKES]]
    while len(shown) > 1 and sum(map(len, shown)) > MOST_CHARACTERS:
        shown.pop()
    left = len(lines) - len(shown)
    return "\n".join([*shown, *([f"{source}: {left} more mistakes"] if left else [])])


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would keep the last, and values that do not fit their tag."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # a 13th month, a number of 5000 digits, `!!bool maybe`
            problem = f"this can't be read as {str(node.tag).rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(data: bytes, path: Path, may_be_empty: bool = False) -> dict[str, Any]:
    """The mapping in `data`, the content of `path`. Raises ParamsError where it is not UTF-8, not YAML or not a mapping."""
    try:
        loader = _Loader(data.decode())
        loader.name = path.name
        values = loader.get_single_data()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ParamsError(f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8") from error
    except yaml.YAMLError as error:
        raise ParamsError(f"{path} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise ParamsError(f"{path} is not valid YAML: it nests too deeply") from error
    if values is None and may_be_empty:
        return {}
    if not isinstance(values, dict):
        raise ParamsError(f"{path} must hold a mapping of sections")
    return values


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in params.yaml, or in a file of its format. Raises ParamsError, also without the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ParamsError(f"{path} does not exist; restore it with 'git checkout params.yaml'") from error
    return parse_yaml(data, path)
