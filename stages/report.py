"""report: the results of the run on one self-contained page, reports/report.html.

reports/*.json and histories, evaluation rows, saved runs (reports/runs.jsonl), tree nodes and sample episodes -> figures, tables
and an episode browser. Only reports/evaluation.json is required. The page contains no dates or paths and loads nothing; the same
inputs give the same bytes.
"""

from __future__ import annotations

from typing import cast

from stages import params
from stages.params import Params
from stages.reporting.blocks import Section
from stages.reporting.episodes import browser_data
from stages.reporting.inputs import load_inputs
from stages.reporting.page import DETAILS, SUMMARY, render_page
from stages.runtime.files import atomic_text
from stages.runtime.stage import StageContext, stage_run
from stages.runtime.unlisted_domains import keep_only
from stages.tracking import open_tracker

FOLDERS = ["data/rollouts", "data/annotated", "data/rl", "reports/curate", "reports/rollout", "reports/annotate", "reports/rl"]
"""Folders with an entry per domain."""


def run(context: StageContext) -> None:
    params = cast(Params, context.params)
    keep_only(context.root, params.domains, FOLDERS)
    inputs = load_inputs(context.root, params)

    # Chapters: each builder reads its inputs and draws its figures.
    summary: list[Section] = []
    details: list[Section] = []
    with context.progress("chapters", len(SUMMARY) + len(DETAILS), "chapter") as bar:
        for builders, chapters in ((SUMMARY, summary), (DETAILS, details)):
            for build in builders:
                chapter = build(inputs)
                chapters += [chapter] if chapter is not None else []
                bar.advance()

    # Episodes: best, worst and random ones of every domain and source.
    sources = {domain: given.episodes for domain, given in inputs.domains.items()}
    browser = browser_data(sources, params.report.episodes, inputs.tokenizer, params.seed)

    path = context.reports / "report.html"
    atomic_text(path, render_page(inputs, summary, details, browser))
    context.metric("report/bytes", path.stat().st_size)
    context.metric("report/episodes", browser.shown)
    context.artifact(path)


if __name__ == "__main__":
    raise SystemExit(stage_run("report", run, params, open_tracker))
