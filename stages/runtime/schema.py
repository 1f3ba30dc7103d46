"""Documentation of a settings file from its sections: a JSON schema for editors, a page, explanations of keys.

Fields' docstrings are read from the source here, only when needed: pydantic would read them at every import of a section.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from stages.runtime.validation import ParamsError, nearest, places, section_within
from stages.runtime.yaml_files import read_yaml

Environments = Callable[[str], type[BaseModel]]
"""Domain -> the settings of its environment."""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


INTRO = """# Parameters

    python -m stages.params --explain rl.loss        # this page for one key or section, with the code that reads it
    python -m stages.params                          # check params.yaml and print what it resolves to
    dvc exp run -S ++rl.loss.clip_high=0.3           # set any key for one experiment

Every key of `params.yaml`. Absent keys have their defaults, except in `rl` and its parts, where the method may choose other
values ([methods.md](methods.md)). `per_domain.<domain>` overrides `curate`, `rollout`, `annotate` and `rl` for one domain and has
the environment's own settings ([environments.md](environments.md)). `make docs` generates this page and `params.schema.json`,
with which editors complete and check the file.
"""


@cache
def _docstrings(path: Path) -> dict[str, dict[str, str]]:
    """Class name -> field -> docstring, for the classes of a module."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found.setdefault(node.name, {})[field.target.id] = " ".join(str(text.value.value).split())
    return found


def field_docs(section: type[BaseModel]) -> dict[str, str]:
    """Field -> docstring, inherited ones included, and those of the sections whose fields it takes over (`assembled_from`)."""
    found: dict[str, str] = {}
    for part in getattr(section, "assembled_from", ()):
        found |= field_docs(part)
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _docstrings(Path(inspect.getfile(base))).get(base.__name__, {})
    return found


class _Schema(GenerateJsonSchema):
    """With the fields' docstrings, and null where a method chooses what is not set."""

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        made, section = super().model_schema(schema), schema["cls"]
        unset = section.layered_keys() if hasattr(section, "layered_keys") else []
        docs = field_docs(section)
        for name, value in made.get("properties", {}).items():
            value.pop("default", None) if "$ref" in value else None
            if name in unset and {"type": "null"} not in value.get("anyOf", []):
                made["properties"][name] = value = {"anyOf": [value, {"type": "null"}]}
            if name in docs:
                value["description"] = docs[name]
        return made

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(root: type[BaseModel]) -> str:
    """The JSON schema of the file; domains override sections with the sections' own keys."""
    made = root.model_json_schema(schema_generator=_Schema)
    for name, value in made["$defs"]["PerDomain"]["properties"].items():
        if name in made["properties"]:
            value["allOf"] = [made["properties"][name]]
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Key:
    """One key of a section. `values`: a description of allowed values; `inner`: the section under this key, if any."""

    name: str
    values: str
    default: str
    needs: str
    text: str
    inner: type[BaseModel] | None


def _words(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows."""
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{one}`" for one in options)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_words, schema["anyOf"])))
    if "$ref" in schema:
        return "section"
    kind = {"array": "list", "object": "mapping", "boolean": "`true`, `false`"}.get(
        schema.get("type", ""), schema.get("type", "any")
    )
    if kind == "list" and "items" in schema:
        kind = f"list of {_words(schema['items'])}"
    if "minimum" in schema and "maximum" in schema:
        return f"{kind}, {schema['minimum']:.10g} to {schema['maximum']:.10g}"
    bounds = [f"{sign} {schema[name]:.10g}" for name, sign in BOUNDS.items() if name in schema]
    return f"{kind} {', '.join(bounds)}".strip()


def _shown(default: Any) -> str:
    """A default as written in the file."""
    if isinstance(default, str) and default:
        return default
    return json.dumps(default, default=lambda section: section.model_dump())


def _needs(section: type[BaseModel], field: FieldInfo, place: str) -> str:
    """The settings required for the key to have an effect, if any."""
    marks = [getattr(section, "applies", None), *field.metadata]
    return " and ".join(mark.words(place.rpartition(".")[2]) for mark in marks if hasattr(mark, "words"))


def keys(section: type[BaseModel], place: str) -> Iterator[Key]:
    """The keys of `section`, whose dotted place in the file is `place` ("" for the file itself)."""
    shown, docs = section.model_json_schema(schema_generator=_Schema)["properties"], field_docs(section)
    for name, field in section.model_fields.items():
        inner = section_within(field.annotation)
        fixed = not (field.is_required() or field.default_factory or isinstance(field.default, BaseModel))
        default = _shown(field.default) if fixed else ""
        values = _words(shown[name])
        if name == getattr(section, "switch", None):
            values = values.replace(", `own`", "")  # a method's own function, which only methods choose
        if hasattr(section, "layered_keys") and field.default is not None:
            values = values.removesuffix(" or null")  # null: the method chooses
        yield Key(name, values, default, _needs(section, field, place), docs.get(name, ""), inner)


def sections(root: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(place, section) for the file itself and every section in it, depth first."""
    yield place, root
    for name, field in root.model_fields.items():
        inner = section_within(field.annotation)
        if inner is not None:
            between = ".<domain>" if name == "per_domain" else ""
            yield from sections(inner, f"{place}.{name}{between}".lstrip("."))


def _summary(section: type[BaseModel]) -> str:
    """The class's own docstring."""
    return " ".join((section.__dict__.get("__doc__") or "").split())


def page(root: type[BaseModel]) -> str:
    """docs/params.md: a table per section."""
    lines = [INTRO]
    for place, section in sections(root):
        if place:
            lines += [f"## {place}", ""]
            lines += [_summary(section), ""] if _summary(section) else []
        rows = [key for key in keys(section, place) if key.values != "section" or key.text]
        lines += ["| key | values | default | |", "|---|---|---|---|"] if rows else []
        for key in rows:
            needs = f"Needs {key.needs}." if key.needs else ""
            text = " ".join(filter(None, [key.text, needs])).replace("|", "\\|")
            lines.append(f"| `{key.name}` | {key.values} | {f'`{key.default}`' if key.default else ''} | {text} |")
        lines += [""] if rows else []
    return "\n".join(lines).rstrip() + "\n"


# ---- one key -----------------------------------------------------------------------------------------------------------


def _find(root: type[BaseModel], key: str, environment: Environments) -> tuple[str, type[BaseModel], str | None]:
    """Place and section of `key`, and the field's name unless `key` is itself a section or a domain. Raises ParamsError."""
    section, parts = root, key.split(".")
    passed: list[str] = []
    if parts[0] == "per_domain" and parts[2:3] == ["environment"]:
        root = section = environment(parts[1])
        passed, parts = parts[:3], parts[3:]
    elif parts[0] == "per_domain":
        # a domain's overrides have the section's own keys
        parts = parts[2:] if len(parts) > 2 and parts[2] in root.model_fields else ["per_domain", *parts[2:3]]
    for number, part in enumerate(parts):
        if part not in section.model_fields:
            raise ParamsError(f"unknown key '{key}'.{nearest(part, list(section.model_fields), places(root, part))}")
        inner = section_within(section.model_fields[part].annotation)
        if inner is None:
            if number + 1 < len(parts):
                raise ParamsError(f"unknown key '{key}': '{'.'.join(parts[: number + 1])}' has no keys of its own")
            return ".".join(passed), section, part
        section = inner
        passed.append(part)
    return ".".join(passed), section, None


def _stages(root: Path, key: str) -> list[str]:
    """The stages that dvc.yaml reruns after an edit of `key`, without the report, which shows all parameters."""
    entries = read_yaml(root / "dvc.yaml")["stages"]
    key = re.sub(r"^per_domain\.[^.]+", "per_domain.${item.domain}", key)

    def reads(listed: Any) -> bool:
        return (isinstance(listed, str) and f"{key}.".startswith(f"{listed}.")) or f"{listed}.".startswith(f"{key}.")

    return [name for name, entry in entries.items() if any(map(reads, entry.get("params", [])))]


def _modules(root: Path, section: type[BaseModel], place: str, name: str | None) -> list[str]:
    """Modules that appear to read `section` or its field `name`: they contain the last two names of its place, or define or
    import the section and contain the field's name."""
    declaring = [part for part in getattr(section, "assembled_from", ()) if name in part.model_fields]
    home, parts = Path(inspect.getfile(section)).resolve(), [*place.split("."), *([name] if name else [])]
    chain = re.compile(rf"\b{'.'.join(map(re.escape, ['params', *parts][-2:]))}\b")
    imported = re.compile(rf"from {re.escape(section.__module__)} import [^\n]*\b{section.__name__}\b")
    found = []
    for path in sorted((root / "stages").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        knows = path.resolve() == home or imported.search(text)
        if chain.search(text) or (knows and (name is None or re.search(rf"\.{name}\b", text))):
            found.append(str(path.relative_to(root)))
    return sorted({*found, *(path for part in declaring for path in _modules(root, part, place, name))})


def explain_key(root: type[BaseModel], key: str, checkout: Path, environment: Environments) -> str:
    """Fields, defaults, values and readers of a key or section, as text. Raises ParamsError for an unknown key."""
    place, section, name = _find(root, key, environment)
    home = Path(inspect.getfile(section)).resolve()
    stages = _stages(checkout, key)
    lines = [f"{key}: {_summary(section)}" if not name and _summary(section) else key]
    lines.append(f"defined in {home.relative_to(checkout) if home.is_relative_to(checkout) else home}")
    lines.append(f"read by the stages {', '.join(stages)}" if stages else "a change runs only the stage report again")
    lines += textwrap.wrap(f"read in {', '.join(_modules(checkout, section, place, name))}", 120, subsequent_indent="  ")
    for one in keys(section, place):
        if name in (None, one.name):
            default = f"; default {one.default}" if one.default else ""
            lines += ["", f"  {one.name}: {one.values.replace('`', '')}{default}"]
            for text in filter(None, [one.text, f"Needs {one.needs}." if one.needs else ""]):
                lines += textwrap.wrap(text, 120, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)
