"""Documentation matches the code: links resolve, and quoted messages are those that the code prints."""

from __future__ import annotations

import copy
import itertools
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from screenshots.__main__ import CAPTIONS, FOLDER, LARGEST, TAKERS, documents_with_pictures
from stages.params import ROOT, ParamsError, check_domains, load_params, parse_params
from stages.records.sections import deep_merge

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


def test_token_values_recipe_is_a_valid_overlay() -> None:
    text = (ROOT / "docs" / "values.md").read_text(encoding="utf-8").split("\n## Values of tokens")[1]
    lines = itertools.takewhile(lambda line: line.startswith("    "), text.splitlines()[2:])
    recipe = yaml.safe_load(textwrap.dedent("\n".join(lines)).replace(", ...", ""))
    assert recipe["rl"] == {"algorithm": "b_coder"}
    values = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    check_domains(parse_params(deep_merge(values, {"domains": ["code"], **recipe}), "docs/values.md"))


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
        assert {"annotate": yaml.safe_load(settings)} in profiles
