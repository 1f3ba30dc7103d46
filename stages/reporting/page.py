"""Renders sections and browser data into one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stages.reporting.blocks import Figures, Section
from stages.reporting.episodes import Browser
from stages.reporting.inputs import Inputs
from stages.reporting.sections.changes import changes_section
from stages.reporting.sections.contributions import contributions_section
from stages.reporting.sections.control import control_section
from stages.reporting.sections.cost import cost_section
from stages.reporting.sections.data import curate_section, rollout_section
from stages.reporting.sections.designs import design_section
from stages.reporting.sections.judges import judges_section
from stages.reporting.sections.learning import rl_section, sft_section
from stages.reporting.sections.merging import merge_section
from stages.reporting.sections.outcome import confidence_of, lead, outcome_section, tiles
from stages.reporting.sections.provenance import provenance_section
from stages.reporting.sections.roles import roles_section
from stages.reporting.sections.search import search_section
from stages.reporting.sections.speed import speed_section
from stages.reporting.sections.tools import tools_section
from stages.reporting.sections.utilities import utilities_section
from stages.reporting.style import css_variables
from stages.reporting.template import template
from stages.reporting.viewer.links import VIEWER

Builder = Callable[[Inputs], Section | None]
"""Returns None to omit the chapter."""
SUMMARY: Sequence[Builder] = (outcome_section, changes_section, cost_section, speed_section)
"""The first chapters, in order; the episode browser follows."""
DETAILS: Sequence[Builder] = (
    curate_section,
    sft_section,
    rollout_section,
    search_section,
    rl_section,
    judges_section,
    roles_section,
    tools_section,
    merge_section,
    contributions_section,
    utilities_section,
    design_section,
    control_section,
    provenance_section,
)
"""The chapters after the browser, stage by stage."""


def render_page(
    inputs: Inputs, summary: Sequence[Section], details: Sequence[Section], browser: Browser, all_episodes: int = 0
) -> str:
    """The page as HTML: `summary`, the episode browser, `details`. Everything but figures and palette is escaped. `all_episodes`:
    number of episodes in the viewer beside the page; 0: no link to it."""
    glyphs: dict[str, str] = {}
    for section in (*summary, *details):
        for block in section.blocks:
            if isinstance(block, Figures):
                for drawing in block.drawings:
                    glyphs.update(drawing.svg.glyphs)
    return template("page.html.j2").render(
        light=css_variables(0),
        dark=css_variables(1),
        glyphs=[glyphs[name] for name in sorted(glyphs)],
        lead=lead(inputs),
        tiles=tiles(inputs),
        level=f"{100 * confidence_of(inputs):g} %",
        summary=summary,
        details=details,
        browser=browser,
        viewer=VIEWER if all_episodes else None,
        all_episodes=all_episodes,
    )
