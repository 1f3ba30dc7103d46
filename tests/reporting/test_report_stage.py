"""The report page is complete, self-contained, safe, deterministic, and tolerates missing inputs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stages.params import ROOT, parse_params
from stages.records.episode import read_rows, write_json
from stages.report import run
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "circle"}


def write_report(root: Path, params) -> str:
    run(StageContext("report", None, params, root, Tracker()))
    return (root / "reports" / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(full_run) -> str:
    return write_report(*full_run)


def evaluation_only(root: Path, full: Path) -> Path:
    (root / "reports").mkdir(parents=True)
    shutil.copy(full / "reports" / "evaluation.json", root / "reports" / "evaluation.json")
    return root


def full_episode(root: Path) -> dict:
    return read_rows(root / "data" / "rollouts" / "search" / "episodes.parquet")[0]


class Structure(HTMLParser):
    """Collects ids, anchors, loaded addresses and unclosed tags."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        if tag == "a":
            self.anchors.append(values["href"])
        self.loads += [values[name] for name in ("src", "srcset", "action") if name in values]
        self.loads += [values["href"]] if tag == "link" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()


def test_page_is_well_formed_and_loads_nothing(page):
    """Contract: one self-contained page; nothing comes from the network or another file."""
    structure = Structure()
    structure.feed(page)
    assert structure.open == []
    assert sorted(structure.ids) == sorted(set(structure.ids)), "ids are unique"
    inner = {anchor for anchor in structure.anchors if not anchor.startswith(("episodes/index.html", "control/page.html"))}
    assert {anchor.removeprefix("#") for anchor in inner} <= set(structure.ids)
    assert [load for load in structure.loads if load != "data:,"] == []
    # Parameters, shown in a <pre>, may contain addresses.
    shown = re.sub(r"<pre.*?</pre>", "", page, flags=re.DOTALL)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", shown)
    assert len(page.encode()) < 3_000_000


def test_page_has_all_sections(page):
    for chapter in ("results", "changes", "cost", "data", "sft", "rollouts", "trees", "rl", "merge", "episodes", "parameters"):
        assert f'id="{chapter}"' in page
    assert 'class="note"' not in re.sub(r"<noscript>.*?</noscript>|<script.*?</script>", "", page, flags=re.S), (
        "a note says that something is missing"
    )
    assert "Merged model vs. fine-tuned model: +24.0 points" in page.replace("\u00a0", " ")
    order = [
        page.index(f'<section class="chapter" id="{chapter}">') for chapter in ("results", "changes", "cost", "episodes", "data")
    ]
    assert order == sorted(order)
    assert page.index("<figure") < page.index("<table")
    assert "prefers-color-scheme: dark" in page
    for model in ("base", "sft", "rl@search", "rl@textworld", "merged", "merged_linear"):
        assert f"<td>{model}</td>" in page


def test_page_has_no_dates_or_local_paths(page, full_run):
    """Contract: no timestamps, host names or absolute paths in any DVC output."""
    root, _ = full_run
    assert str(root) not in page
    assert str(ROOT) not in page
    assert not re.search(r"/(?:home|root|tmp|Users)/", page)
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", page)


@pytest.mark.slow
def test_page_is_identical_in_another_process(page, full_run, tmp_path):
    """Contract: `dvc repro` twice gives the same bytes, whatever the hash seed; the stage does not import torch."""
    root, _ = full_run
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    (copy / "reports" / "report.html").unlink()
    shutil.rmtree(copy / "reports" / "episodes")
    code = (
        "import sys, runpy\nsys.argv = ['stages.report']\n"
        "try:\n    runpy.run_module('stages.report', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(ROOT),
        "BELLWETHER_TRACKING": "off",
        "BELLWETHER_DEBUG": "1",
    }
    subprocess.run([sys.executable, "-c", code], cwd=copy, env=environment, check=True, timeout=120)
    assert (copy / "reports" / "report.html").read_text(encoding="utf-8") == page
    first, again = (sorted((folder / "reports" / "episodes").iterdir()) for folder in (root, copy))
    assert [(path.name, path.read_bytes()) for path in first] == [(path.name, path.read_bytes()) for path in again]


def test_hostile_text_in_episodes_is_escaped(full_run, tmp_path):
    """Contract: what a model or an environment writes can't break out of the page."""
    from stages.reporting.episodes import browser_data
    from stages.reporting.inputs import load_inputs
    from stages.reporting.page import render_page

    full, params = full_run
    inputs = load_inputs(evaluation_only(tmp_path / "run", full), params)
    hostile = "</script><script>alert('x')</script><!-- &amp; "
    row = {
        **full_episode(full),
        "episode_id": hostile,
        "task_id": hostile,
        "messages": [{"role": "user", "content": hostile}],
    }
    page = render_page(inputs, [], [], browser_data({"search": {"sft rollout": [row]}}, 1, None, 0))
    assert hostile not in page
    embedded = re.search(r'id="episode-data">(.*?)</script>', page, re.S)
    assert embedded is not None
    assert json.loads(embedded.group(1))["episodes"][0]["messages"] == [["user", hostile]]


def test_missing_optional_files_are_named_on_the_page(full_run, tmp_path):
    """Contract: a missing optional file gives a sentence instead of a figure."""
    full, params = full_run
    page = write_report(evaluation_only(tmp_path / "run", full), params)
    for name in ("reports/curate/search.json", "reports/sft/history.csv", "reports/rollout/search.json",
                 "reports/annotate/textworld.json", "reports/rl/search_history.csv", "reports/merge.json"):  # fmt: skip
        assert f"Not shown: {name} does not exist" in page
    assert "No episodes: data/rollouts and data/rl are empty" in page
    assert "success-search" in page


def test_missing_evaluation_error_names_file_and_command(full_run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"reports/evaluation\.json does not exist; run 'dvc repro evaluate'"):
        write_report(tmp_path, full_run[1])


def test_broken_inputs_are_rejected_with_file_and_line(full_run, tmp_path):
    root = evaluation_only(tmp_path / "run", full_run[0])
    (root / "reports" / "sft").mkdir()
    history = root / "reports" / "sft" / "history.csv"
    history.write_text("step,train_loss\n1,0.5\n2,oops\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"history\.csv, line 3, column 'train_loss': 'oops' is not a number"):
        write_report(root, full_run[1])
    history.unlink()
    (root / "reports" / "merge.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"merge\.json is not valid JSON"):
        write_report(root, full_run[1])


def test_page_of_one_domain_without_merge(full_run, tmp_path):
    full, _ = full_run
    root = evaluation_only(tmp_path / "run", full)
    evaluation = json.loads((root / "reports" / "evaluation.json").read_text())
    evaluation["models"] = {
        name: {"search": row["search"]} for name, row in evaluation["models"].items() if name in ("base", "sft")
    }
    evaluation["panels"], evaluation["comparisons"] = {"search": "abc"}, []
    write_json(root / "reports" / "evaluation.json", evaluation)
    page = write_report(root, parse_params({"domains": ["search"], "per_domain": {"search": {}}}))
    assert "a specialist on search" in page


def test_model_evaluated_on_some_panels_is_shown_for_those(full_run, tmp_path):
    """Contract: a model evaluated on one panel has rows for that panel, and the page names the panel it lacks."""
    full, params = full_run
    root = evaluation_only(tmp_path / "run", full)
    evaluation = json.loads((root / "reports" / "evaluation.json").read_text())
    evaluation["models"]["sft+q"] = {"search": evaluation["models"]["merged"]["search"]}
    pair = {"a": "sft+q", "b": "sft", "domain": "search", "difference": 0.314, "low": 0.2, "high": 0.4, "p": 0.001}
    evaluation["comparisons"].append({**pair, "verdict": "better"})
    write_json(root / "reports" / "evaluation.json", evaluation)
    page = write_report(root, params)
    assert "Not evaluated: sft+q on textworld." in page
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)]
    model_rows = [row for row in rows if "sft+q" in row]
    # One row in each table: results, numbers, comparisons, costs, hashes.
    compared = [row for row in model_rows if "+31.4" in row]
    assert [row[:5] for row in compared] == [
        ["sft+q", "62.0\N{NO-BREAK SPACE}%", "55.3 to 68.7", "sft", "+31.4"],
        ["sft+q", "sft", "+31.4", "+20.0 to +40.0", "0.001"],
    ]
    assert len(model_rows) == 5
