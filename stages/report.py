"""report: the results of the run on one self-contained page, reports/report.html, and beside it a viewer of all its episodes,
reports/episodes/index.html.

reports/*.json and histories, evaluation rows, saved runs (reports/runs.jsonl), tree nodes and episodes -> figures, tables, an
episode browser, and the viewer's files. Only reports/evaluation.json is required. The report loads nothing; the viewer loads the
files in its folder, without a server. Both contain no dates or paths; the same inputs give the same bytes.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import cast

from stages import params
from stages.params import Params
from stages.reporting.blocks import Section
from stages.reporting.episodes import browser_data
from stages.reporting.inputs import load_inputs
from stages.reporting.page import DETAILS, SUMMARY, render_page
from stages.reporting.sections.behaviour import behaviour_section
from stages.reporting.viewer.folder import FOLDER, write_viewer
from stages.reporting.viewer.groups import group_count, groups_of
from stages.reporting.viewer.patterns import patterns_of
from stages.runtime.files import atomic_text
from stages.runtime.stage import StageContext, stage_run
from stages.runtime.unlisted_domains import keep_only
from stages.tracking import open_tracker

FOLDERS = ["data/rollouts", "data/annotated", "data/rl", "reports/curate", "reports/rollout", "reports/annotate", "reports/rl"]
"""Folders with an entry per domain."""


def prune(context: StageContext) -> None:
    """Remove what unlisted domains left in the inputs."""
    keep_only(context.root, context.params.domains, FOLDERS)


def run(context: StageContext) -> None:
    params = cast(Params, context.params)
    inputs = load_inputs(context.root, params)

    # All episodes: the viewer's files, and how often each pattern of behaviour occurs. Learnt values of states are computed
    # beside the chapters, each of which reads its inputs and draws its figures.
    patterns = patterns_of(params)
    summary: list[Section] = []
    details: list[Section] = []
    with ExitStack() as around:
        with context.progress("episodes", group_count(context.root, inputs), "group") as bar:
            groups = groups_of(context.root, inputs)
            viewer = write_viewer(
                context.reports / FOLDER, inputs, groups, patterns, lambda group: bar.advance(), context.data / "annotated"
            )
            indexed, found = around.enter_context(viewer)
        with context.progress("chapters", len(SUMMARY) + len(DETAILS), "chapter") as bar:
            for builders, chapters in ((SUMMARY, summary), (DETAILS, details)):
                for build in builders:
                    chapter = build(inputs)
                    chapters += [chapter] if chapter is not None else []
                    bar.advance()
    behaviour = behaviour_section(inputs, indexed, patterns, found)
    summary[1:1] = [behaviour] if behaviour is not None else []

    # Episodes: best, worst and random ones of every domain and source.
    sources = {domain: given.episodes for domain, given in inputs.domains.items()}
    browser = browser_data(sources, params.report.episodes, inputs.tokenizer, params.seed, chat=inputs.chat)

    path = context.reports / "report.html"
    every = sum(len(group.tasks) for group in indexed)
    atomic_text(path, render_page(inputs, summary, details, browser, every))
    context.metric("report/bytes", path.stat().st_size)
    context.metric("report/episodes", browser.shown)
    context.metric("report/all_episodes", every)
    context.artifact(path)


if __name__ == "__main__":
    raise SystemExit(stage_run("report", run, params, open_tracker, prune=prune))
