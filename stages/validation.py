"""What settings files are checked with: the base of their sections, and errors that a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=1)]


class ParamsError(ValueError):
    """A settings file is wrong; the message says where and what to do."""


class Section(BaseModel):
    """A part of a settings file; unknown keys are errors, and so are values of another type (`true` or "3" for a number)."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True)


def watched(name: str) -> bool:
    """Whether a path lies below data/raw of the repository, where DVC sees it change."""
    path = PurePosixPath(name)
    return path.parts[:2] == ("data", "raw") and len(path.parts) > 2 and ".." not in path.parts


def refuse_idle(section: Section, where: str, needs: Mapping[str, tuple[bool, str]]) -> None:
    """Raise ValueError where a key of `section` was changed and nothing would come of it. `needs`: by key, whether it counts as
    things stand, and what it would need for that. `where`: dotted place of the section in the one that is checked, with a dot at
    its end, or nothing."""
    for name, (counts, need) in needs.items():
        given, default = getattr(section, name), type(section).model_fields[name].default
        if not counts and given != default:
            shown = default.model_dump() if isinstance(default, BaseModel) else "null" if default is None else default
            raise ValueError(f"{where}{name} would be ignored, since it needs {need}: set it to {shown}, as it is by default")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, be it alone, in a mapping or in a sequence."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    held = [_section_of(part) for part in getattr(annotation, "__args__", ())]
    return next((section for section in held if section is not None), None)


def known_names(root: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Field names of the section of `root` that `location` (a pydantic error's, its last part a field) points into; parts that
    are no fields, such as a domain's name, are passed over."""
    section = root
    for part in location[:-1]:
        if part in section.model_fields:
            section = _section_of(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def explain(error: ValidationError, root: type[BaseModel], source: str, prefix: str = "") -> str:
    """A pydantic error of a file of shape `root` as lines a person can act on: where, what was given, what is allowed, the
    nearest known name. `prefix`: dotted place of what was checked, with a dot at its end."""
    lines = []
    for item in error.errors():
        location = (*prefix.rstrip(".").split("."), *item["loc"]) if prefix else item["loc"]
        key = ".".join(str(part) for part in location)
        if item["type"] == "extra_forbidden":
            known = known_names(root, location)
            near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known here: {', '.join(known)}."
            lines.append(f"{source}: unknown key '{key}'.{hint}")
        else:
            given = "" if isinstance(item["input"], (dict, BaseModel)) else f" (given: {item['input']!r})"
            place = f" '{key}'" if key else ""
            lines.append(f"{source}:{place} {item['msg'].removeprefix('Value error, ')}{given}")
    return "\n".join(lines)


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that gives a key twice, of which YAML would keep the last, and a value that its tag does not fit."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:  # a 13th month, a number of 5000 digits, `!!bool maybe`
            said = f"this can't be read as {str(node.tag).rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, said, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for place, (key, _) in enumerate(node.value):
            if key.value in keys[:place]:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(data: bytes, path: Path, may_be_empty: bool = False) -> dict[str, Any]:
    """The mapping that `data`, the content of `path`, holds. Raises ParamsError where it is no UTF-8, no YAML or no mapping."""
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
        raise ParamsError(f"{path} is not valid YAML: thousands of brackets within each other") from error
    if values is None and may_be_empty:
        return {}
    if not isinstance(values, dict):
        raise ParamsError(f"{path} must hold a mapping of sections")
    return values
