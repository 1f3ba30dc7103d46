"""The generated blocks of README.md and docs/."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from stages.algorithms.card import Card
from stages.params import ROOT
from stages.reporting.board.index import PAGE
from stages.reporting.documents import FIGURE, all_cards, blocks, generated, methods_table
from stages.reporting.generated_blocks import block_names, documents, link, replace_block

README = (
    "# Title\n<!-- results:begin -->\nold\n<!-- results:end -->\nbetween\n<!-- methods:begin -->\n<!-- methods:end -->\nend\n"
)


def test_only_the_block_is_replaced():
    text = replace_block(README, "results", "new\n")
    assert text == README.replace("old", "new")
    assert replace_block(text, "results", "new\n") == text


def test_missing_or_reversed_markers_are_rejected():
    with pytest.raises(ValueError, match="results:begin"):
        replace_block("nothing", "results", "new")
    with pytest.raises(ValueError, match="in this order"):
        replace_block("<!-- results:end --><!-- results:begin -->", "results", "new")


def test_pipe_in_an_equation_is_escaped():
    card = Card("x", "X", "P", "a |b|\nc", "", "none", "t", "merge.method: x")
    assert methods_table([card]).splitlines()[-1] == r"| `merge.method: x` | X | a \|b\| c | none | P |"


def test_every_method_has_a_row():
    """Contract: the method table is made from the cards of all RL and merge methods."""
    slugs = {card.slug for cards in all_cards().values() for card in cards}
    assert {
        "reinforce",
        "rloo",
        "grpo",
        "ppo",
        "linear",
        "task_arithmetic",
        "slerp",
        "ties",
        "dare",
        "dare_ties",
        "ram",
        "ram_plus",
    } <= slugs


def test_results_and_figure_are_written_from_the_reports(full_run, tmp_path):
    full, _ = full_run
    (tmp_path / "reports").mkdir()
    for name in ("params.yaml", "reports/evaluation.json"):
        (tmp_path / name).write_bytes((full / name).read_bytes())
    (tmp_path / "README.md").write_text("# Title\n<!-- results:begin -->\n<!-- results:end -->\nbetween\n", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/methods.md").write_text(README, encoding="utf-8")
    files = generated(tmp_path)
    readme, page = files[Path("README.md")], files[Path("docs/methods.md")]
    assert "| `rl@search` |" in readme
    assert "between" in readme
    assert "vs." not in readme
    assert "| `rl@search` |" in page
    assert "`rl.algorithm: grpo`" in page
    assert files[FIGURE].startswith("<svg")
    assert generated(tmp_path)[FIGURE] == files[FIGURE]
    evaluation = json.loads((tmp_path / "reports/evaluation.json").read_text())
    (tmp_path / "reports/evaluation.json").write_text(json.dumps({**evaluation, "split": "valid"}))
    with pytest.raises(
        ValueError, match=r"reports/evaluation\.json has results on validation tasks.*set evaluate\.split to test"
    ):
        generated(tmp_path)


def test_links_are_relative_to_the_document():
    assert link("docs/figures/x.svg", Path("README.md")) == "docs/figures/x.svg"
    assert link("docs/figures/x.svg", Path("docs/benchmarks.md")) == "figures/x.svg"
    assert link(PAGE, Path("docs/methods.md")) == "../reports/claims/README.md"


def test_every_block_has_a_command_that_writes_it():
    """Contract: a block with a misspelt name would never be written."""
    elsewhere = {"benchmarks", "gpu", "gpu-run", "speed", "screenshots", "fuzz", "families"}  # other commands
    found = {name for document in documents(ROOT) for name in block_names((ROOT / document).read_text(encoding="utf-8"))}
    assert found == {*blocks(ROOT), *elsewhere}


def test_documents_are_up_to_date():
    """Contract: the documents' numbers are those of the reports in git; `python -m stages.reporting.documents` rewrites them."""
    listed = subprocess.run(["git", "ls-files", "reports/evaluation.json"], cwd=ROOT, capture_output=True, text=True, check=True)
    if not listed.stdout.strip():
        pytest.skip("reports/evaluation.json is not in git")
    stale = [
        str(path) for path, text in generated(ROOT).items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text
    ]
    assert stale == [], "run 'python -m stages.reporting.documents'"


def test_readme_is_short():
    """Contract: README has at most 250 lines."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 250
