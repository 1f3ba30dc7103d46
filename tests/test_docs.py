"""Documentation matches the code: links resolve, and quoted messages are those that the code prints."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from screenshots.__main__ import CAPTIONS, FOLDER, LARGEST, TAKERS, documents_with_pictures
from stages.params import ROOT, Params, ParamsError, check_domains, load_params, parse_params
from stages.records.sections import deep_merge
from stages.runtime.listed_keys import check_listed

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines() if line[:1] == "#"
    }
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:href|src)="([^"]+)"', text)]:
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (path.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rl.stepz", 5),
        ("rl.steps", 0),
        ("rl.steps", "40"),
        ("merge.method", "tie"),
        ("rl.group_size", 1),
        ("domains", ["search", "maze"]),
        ("per_domain.search.environment.echo", True),
    ],
)
def test_quoted_params_errors_are_those_printed(tmp_path: Path, key: str, value: Any) -> None:
    """Contract: docs/troubleshooting.md quotes the message that such a mistake prints."""
    values = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    *sections, name = key.split(".")
    node = values = copy.deepcopy(values)
    for section in sections:
        node = node[section]
    node[name] = value
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(ParamsError) as error:
        check_domains(load_params(path))
    assert f"| `{error.value}` |" in TROUBLESHOOTING


def recipes() -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Document, line, and the indented block of settings of params.yaml that begins there."""
    for path in DOCUMENTS:
        for block in re.finditer(r"(?:^    .*\n)+", path.read_text(encoding="utf-8"), re.M):
            with contextlib.suppress(yaml.YAMLError):
                found = yaml.safe_load(textwrap.dedent(block[0]))
                if isinstance(found, dict) and found and found.keys() <= Params.model_fields.keys():
                    yield path.name, block.string.count("\n", 0, block.start()) + 1, found


@pytest.mark.parametrize(("document", "line", "recipe"), recipes(), ids=lambda value: str(value)[:40])
def test_recipes_are_valid_overlays(document: str, line: int, recipe: dict[str, Any]) -> None:
    """Contract: what a document tells to write into params.yaml passes its check, with what DVC needs if it names all domains."""
    sections = recipe.get("per_domain", {})
    for name, section in sections.items():
        sections[name] = {key: value for key, value in section.items() if key != "..."}
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    values = deep_merge(shipped, {"domains": list(sections) or shipped["domains"], **recipe})
    params = parse_params(values, f"docs/{document}, line {line}")
    check_domains(params)
    if "domains" in recipe:
        check_listed(values, params.model_dump(mode="json"), ROOT / "params.yaml")


def test_recipes_are_found() -> None:
    found = list(recipes())
    assert {"annotation.md", "environments.md", "values.md"} <= {document for document, _, _ in found}
    assert any(recipe.get("rl") == {"algorithm": "b_coder"} for _, _, recipe in found)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("stages/runtime/stage.py", "is not among `domains` in params.yaml"),
        ("stages/agent/policy.py", "is truncated: it has"),
        ("stages/agent/policy.py", "does not exist; check model.path in params.yaml, or restore it"),
        ("stages/agent/policy.py", "CUDA devices here; set it to cpu, or"),
        ("stages/merging/folders.py", "does not exist; run the stage that creates it first"),
        ("stages/reporting/inputs.py", "reports/evaluation.json does not exist; run 'dvc repro evaluate'"),
        ("stages/curation/panel.py", "can't be compared"),
        ("stages/sandbox/probe.py", "no sandbox is available on this machine for programs that a model writes"),
        ("stages/sandbox/probe.py", "sandbox: WARNING: sandbox.backend is unsafe_subprocess"),
        ("stages/environments/code/domain.py", "does not pass its tests"),
        ("stages/curation/raw.py", "must be a non-empty string, not"),
        ("stages/runtime/checkpoints.py", "cannot be read"),
        ("stages/reporting/keep.py", "these stages are not up to date with params.yaml, data and code:"),
        ("stages/reporting/keep.py", "nothing added"),
        ("stages/reporting/sections/cost.py", "No times yet: 'make keep' stores this run with its measurements."),
        ("tests/browser/conftest.py", "skipped: tests in a real browser"),
    ],
)
def test_quoted_messages_occur_in_the_code(file: str, words: str) -> None:
    """Rewording a message requires rewording its quote in the document."""
    assert words in (ROOT / file).read_text(encoding="utf-8")
    assert words in TROUBLESHOOTING


def test_every_screenshot_is_generated_and_small() -> None:
    assert sorted(CAPTIONS) == sorted(name for names in TAKERS.values() for name in names)
    for path in sorted((ROOT / FOLDER).glob("*")):
        assert path.stem in CAPTIONS, path
        assert path.stat().st_size <= LARGEST, path


def test_pages_show_the_existing_screenshots() -> None:
    pages = documents_with_pictures(ROOT)
    assert pages
    for path, text in pages.items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, "run 'python -m screenshots'"


def test_conversations_that_method_profiles_import_fit_the_model() -> None:
    """Contract: sft refuses a demonstration over model.max_length, so a profile allows for those that it imports."""
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / shipped["model"]["path"])
    longest = {}
    for path in sorted((ROOT / "profiles/methods").glob("*.yaml")):
        params = parse_params(deep_merge(shipped, yaml.safe_load(path.read_text(encoding="utf-8"))))
        for source in params.curate.imports:
            lines = (ROOT / source).read_text(encoding="utf-8").splitlines()
            tokens = [len(tokenizer.apply_chat_template(json.loads(line)["messages"])["input_ids"]) for line in lines]
            longest[path.stem] = max(tokens)
            assert max(tokens) <= params.model.max_length, path
    assert set(longest) == {"marft", "ssp", "ssp_factbook"}


def test_method_profiles_match_the_documentation() -> None:
    """Contract: profiles/methods has the settings that docs/annotation.md lists for published methods; each is a valid overlay of
    params.yaml and differs from the defaults."""
    shipped = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    profiles = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "profiles/methods").glob("*.yaml"))]
    for overlay in profiles:
        assert parse_params(deep_merge(shipped, overlay)) != parse_params(shipped)
    text = (ROOT / "docs" / "annotation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `(\{.*?\})`", text, re.M)
    assert len(rows) == 9
    for settings in rows:
        assert {"rollout": {"tasks": 96}, "annotate": yaml.safe_load(settings)} in profiles
