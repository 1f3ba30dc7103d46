"""params.yaml with mutated values, keys and bytes: refused with the file and a key, or accepted completely and workable."""

from __future__ import annotations

import contextlib
import io
import random
import re
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import stages.params as project
from stages.algorithms.registry import names as algorithms
from stages.environments.registry import GROUP, load_domain
from stages.params import ROOT, Params, ParamsError, check_launch
from stages.records.sections import deep_merge

from . import mutation, probes
from .outcomes import ACCEPTED, LOST, LostError, Outcome, check_refusal, run_case

FILE = "params.yaml"
YAML_SPLICES = (
    *(
        b"*anchor",
        b"&a [*a]",
        b"!!python/object/apply:os.system ['true']",
        b"!!python/name:os.system",
        b"!!binary /w==",
        b"!!set {a, b}",
    ),
    *(
        b"!!int x",
        b"!unknown 1",
        b"<<: *a",
        b"? [a, b]\n: 1",
        b"'",
        b'"',
        b'"\\ud800"',
        b'"\\0"',
        b"|",
        b">-",
        b"2024-02-29",
        b"1:30",
        b"0o17",
    ),
    *(
        b"{a: 1, a: 2}",
        b"[" * 2000,
        b"{a: " * 2000,
        b"- " * 2000,
        b"[" * 300 + b"]" * 300,
        b"@",
        b"`",
        b"%TAG",
        b"yes",
        b"~",
        b".nan",
        b"-.inf",
    ),
    *mutation.NUMERALS,
)
BOMB = b"\n".join(
    b"a%d: &a%d [%s]" % (depth, depth, b", ".join([b"*a%d" % (depth - 1)] * 9) if depth else b"1") for depth in range(9)
)


# ---- operators of this suite -----------------------------------------------------------------------------------------


def _schema_at(schema: Mapping[str, Any], path: mutation.Path) -> Mapping[str, Any]:
    """The JSON schema of the field at `path`, or nothing."""
    definitions, here = schema.get("$defs", {}), schema
    for key in path:
        choices = [here, *here.get("anyOf", [])]
        choices = [definitions[choice["$ref"].rsplit("/", 1)[1]] if "$ref" in choice else choice for choice in choices]
        found = [choice["properties"][key] for choice in choices if key in choice.get("properties", {})]
        if not found:
            return {}
        here = definitions[found[0]["$ref"].rsplit("/", 1)[1]] if "$ref" in found[0] else found[0]
    return here


@cache
def _schema(domain: str | None) -> Mapping[str, Any]:
    return GROUP.load(domain).Settings.model_json_schema() if domain else Params.model_json_schema()


def schema_of(path: mutation.Path) -> Mapping[str, Any]:
    if path[:1] != ("per_domain",):
        return _schema_at(_schema(None), path)
    if len(path) > 3 and path[2] == "environment":
        return _schema_at(_schema(path[1]), path[3:])
    return _schema_at(_schema(None), path[2:]) if len(path) > 3 else {}


def option_taken(rng: random.Random, values: Any) -> Any:
    """Another of a key's options, or a number at or just outside the bounds of its range."""
    found = []
    for path in mutation.paths(values):
        schema = schema_of(path) if path else {}
        for choice in (schema, *schema.get("anyOf", [])):
            options = [*choice.get("enum", []), *([choice["const"]] if "const" in choice else [])]
            edges = [choice[name] for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if name in choice]
            options += [number for edge in edges for number in (edge, edge + 1, edge - 1, edge + 0.01)]
            options += [True, False] if choice.get("type") == "boolean" else []
            found += [(path, option) for option in options]
    if not found:
        return values
    path, option = rng.choice(found)
    return mutation.put(values, path, option)


def method_taken(rng: random.Random, values: Any) -> Any:
    return mutation.put(values, ("rl", "algorithm"), rng.choice(algorithms())) if isinstance(values.get("rl"), dict) else values


def domains_taken(rng: random.Random, values: Any) -> Any:
    known = sorted(GROUP.points())
    return {**values, "domains": rng.sample(known, rng.randint(1, 3))}


def yaml_value(rng: random.Random, values: Any) -> Any:
    return mutation.replaced(rng, values, mutation.YAML_ONLY)


def yaml_key(rng: random.Random, values: Any) -> Any:
    """A mapping with a key that is not a string."""
    path = mutation.random_path(rng, values, dict)
    held = mutation.at(values, path or ())
    return mutation.put(values, path or (), {**held, rng.choice((1, None, True, 1.5, mutation.YAML_ONLY[0])): 1})


def yaml_spliced(rng: random.Random, text: bytes) -> bytes:
    """Replace the value of a key."""
    lines = text.splitlines(keepends=True)
    keys = [number for number, line in enumerate(lines) if re.match(rb"\s*\w+:", line)]
    if not keys:
        return text
    where = rng.choice(keys)
    lines[where] = lines[where].split(b":", 1)[0] + b": " + rng.choice(YAML_SPLICES) + b"\n"
    return b"".join(lines)


def line_doubled(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    where = rng.randrange(len(lines))
    return b"".join([*lines[:where], lines[where], *lines[where:]])


def indented(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    where = rng.randrange(len(lines))
    lines[where] = rng.choice((b" ", b"  ", b"\t", b"- ", b"? ")) + lines[where]
    return b"".join(lines)


def ends_added(rng: random.Random, text: bytes) -> bytes:
    more = rng.choice((BOMB, b"\n---\nseed: 1\n", b"\n...\nx", b"\nseed: 1\n", b"\x00", b"\n%YAML 9.9\n---\n", b"#" * 100_000))
    return text + more if rng.random() < 0.7 else more + b"\n" + text


OPTIONS = (option_taken, option_taken, option_taken, method_taken, domains_taken)
VALUES = (*mutation.VALUES, *mutation.VALUES, yaml_value, option_taken)
KEYS = (*mutation.KEYS, *mutation.KEYS, yaml_key)
BYTES = (*mutation.BYTES, yaml_spliced, yaml_spliced, yaml_spliced, line_doubled, indented, ends_added)


# ---- the suite -------------------------------------------------------------------------------------------------------


@cache
def shipped() -> tuple[bytes, Any, frozenset[str]]:
    """params.yaml as bytes, as values with all defaults, and the names of its keys."""
    text, values = (ROOT / FILE).read_bytes(), project.load_params(ROOT / FILE).model_dump()
    return text, values, frozenset(name for _, name in probes.scalars(values) if isinstance(name, str) and name.isidentifier())


def check_values(values: Mapping[str, Any], params: Params) -> None:
    """Checks of every accepted file; see `probes`."""
    for name, entry in params.per_domain.items():
        if name in GROUP.points():
            settings = load_domain(name, entry.environment).settings.model_dump(by_alias=True)
            probes.check_nothing_ignored(entry.environment, settings, f"per_domain.{name}.environment")
            probes.check_meaning(settings)
        for section in ("curate", "rollout", "annotate", "rl"):
            meant = params.section(section, name).model_dump()
            probes.check_nothing_ignored(getattr(entry, section), meant, f"per_domain.{name}.{section}")
            probes.check_meaning(meant)
    meant = params.model_dump()
    probes.check_nothing_ignored(values, meant)
    probes.check_meaning(meant)
    project.params_hash(params)
    probes.check_works(params)


def refusal(error: ParamsError) -> Outcome:
    message = str(error)
    outcome = check_refusal(message, FILE)
    words = set(re.findall(r"\w+", message.replace(FILE, "")))
    if outcome.kind != LOST and not words & {*shipped()[2], "line", "mapping", "position", "byte", "section"}:
        return Outcome(LOST, f"the message names neither key nor line: {message[:200]!r}")
    return outcome


def check_parsed(values: Any) -> Outcome:
    """Outcome of `python -m stages.params` for a file with these values, in this process."""
    try:
        params = project.parse_params(values, FILE)
        project.check_domains(params)
        project.check_model(params)
        check_launch(params, ROOT)
    except ParamsError as error:
        return refusal(error)
    check_values(values, params)
    return Outcome(ACCEPTED)


def check_file(text: bytes) -> Outcome:
    """Outcome of the command itself for a file with these bytes."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        path.write_bytes(text)
        argv, sys.argv = sys.argv, ["stages.params", "--file", str(path)]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = project.main()
        finally:
            sys.argv = argv
        if code == 2:
            return refusal(ParamsError(err.getvalue()))
        if code != 0 or "# params hash " not in out.getvalue():
            raise LostError(f"exit code {code}: {err.getvalue()[:200]}")
    values = project.parse_yaml(text, path)
    check_values(values, project.parse_params(values, FILE))
    return Outcome(ACCEPTED)


def check_overlay(text: bytes) -> Outcome:
    """`--apply` of an overlay with these bytes is refused, or it is applied."""
    err = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path, overlay = Path(folder) / FILE, Path(folder) / "overlay.yaml"
        path.write_bytes(shipped()[0])
        overlay.write_bytes(text)
        argv, sys.argv = sys.argv, ["stages.params", "--file", str(path), "--apply", str(overlay)]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
                code = project.main()
        finally:
            sys.argv = argv
        if code == 2:
            return check_refusal(err.getvalue(), f"{FILE}|overlay.yaml")
        if code != 0:
            raise LostError(f"exit code {code}: {err.getvalue()[:200]}")
        project.load_params(path)
    return Outcome(ACCEPTED)


@cache
def profiles() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted((ROOT / "profiles").glob("*.yaml")))


def case(seed: int, number: int) -> tuple[str, Outcome]:
    """(operators, outcome) of one mutated file."""
    rng = random.Random(f"params/{seed}/{number}")
    text, values, _ = shipped()
    kind = rng.choices(("options", "values", "keys", "bytes", "overlay"), (25, 25, 20, 26, 4))[0]
    if kind == "bytes":
        changed, names = mutation.mutated(rng, text, BYTES, most=2)
        return names, run_case(lambda: check_file(changed))
    if kind == "overlay":
        changed, names = mutation.mutated(rng, rng.choice(profiles()), BYTES, most=2)
        return f"overlay:{names}", run_case(lambda: check_overlay(changed))
    if rng.random() < 0.3:
        values = domains_taken(rng, values)
    if rng.random() < 0.2:
        values = deep_merge(values, {"rl": {"algorithm": rng.choice(algorithms())}})
    operators: tuple[mutation.Operator, ...] = {"options": OPTIONS, "values": VALUES, "keys": KEYS}[kind]
    changed, names = mutation.mutated(rng, values, operators, most=1 if kind == "values" else 3)
    if not isinstance(changed, dict):
        return names, run_case(lambda: check_file(yaml.safe_dump(changed, allow_unicode=True).encode("utf-8", "surrogatepass")))
    return names, run_case(lambda: check_parsed(changed))
