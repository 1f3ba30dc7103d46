"""Writes the viewer: reports/episodes/index.html with its index, a file per domain and source, the vocabulary, and per domain the
learnt values of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.agent.model_names import evaluated_domains
from stages.environments.registry import GROUP
from stages.reporting.blocks import rounded
from stages.reporting.episodes import token_text
from stages.reporting.inputs import Inputs
from stages.reporting.results import on_panels
from stages.reporting.style import css_variables
from stages.reporting.template import TEMPLATES, template
from stages.reporting.viewer.groups import Group, file_name, group_key
from stages.reporting.viewer.index import Indexed, index_group, index_json
from stages.reporting.viewer.pack import pack_group, script, used_tokens
from stages.reporting.viewer.patterns import Pattern
from stages.reporting.viewer.prevalence import Prevalence, prevalences
from stages.reporting.viewer.values import ShortestHistories, values_beside
from stages.runtime.files import atomic_folder
from stages.runtime.validation import ParamsError

RENDERERS = TEMPLATES / "viewer" / "renderers"
SAME = {"code_folder": "code"}
"""Domain -> the shipped domain whose script draws it, too."""
FOLDER = "episodes"
"""Beside report.html."""


def renderer(domain: str) -> str | None:
    """The script that draws a domain's episodes: that of the domain's class (`renderer`, a Path or the JavaScript itself) or the
    shipped one; None without either. Raises ParamsError if the class names a file that can't be read."""
    given = getattr(GROUP.load(domain), "renderer", None) if domain in GROUP.points() else None
    shipped = RENDERERS / f"{SAME.get(domain, domain)}.js"
    if given is None:
        return shipped.read_text(encoding="utf-8") if shipped.exists() else None
    if isinstance(given, str):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParamsError(f"domain '{domain}': its renderer {given} can't be read ({error}); name a JavaScript file") from error


def inline(text: str) -> str:
    """JavaScript for a <script> element, which `</script` or `<!--` within it would end or change."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def render_viewer(
    inputs: Inputs,
    groups: Sequence[Indexed],
    patterns: Sequence[Pattern],
    found: Sequence[Prevalence],
    values: Mapping[str, str],
) -> str:
    """The viewer's page as HTML. values: domain -> name of its file of learnt values, without its ending."""
    titles = {pattern.name: {"title": pattern.title, "about": pattern.about} for pattern in patterns}
    listed = {
        "patterns": titles,
        "order": list(titles),
        "intervals": intervals(found),
        "confidence": inputs.params.evaluate.confidence,
        "evaluated_on": "the frozen panel" if on_panels(inputs.evaluation) else "validation tasks",
        "comparisons": comparisons(inputs),
        "values": dict(values),
    }
    scripts = {domain: text for domain in evaluated_domains(inputs.params) if (text := renderer(domain)) is not None}
    return viewer_page({**index_json(groups), **listed}, [inline(scripts[domain]) for domain in sorted(scripts)])


def viewer_page(index: Mapping[str, Any], renderers: Sequence[str]) -> str:
    """The viewer's page with an index and the scripts that draw episodes."""
    found = template("viewer/index.html.j2")
    return found.render(light=css_variables(0), dark=css_variables(1), index=index, renderers=renderers)


def intervals(found: Sequence[Prevalence]) -> dict[str, dict[str, list[float | None]]]:
    """Key of a group -> pattern -> [low, high] of its share."""
    ends: dict[str, dict[str, list[float | None]]] = {}
    for one in found:
        ends.setdefault(group_key(one.domain, one.source), {})[one.pattern] = [rounded(one.low, 4), rounded(one.high, 4)]
    return ends


def comparisons(inputs: Inputs) -> list[dict[str, Any]]:
    """The evaluation's paired comparisons, for the heading of models side by side."""
    keys = ("domain", "a", "b", "difference", "low", "high", "p", "verdict")
    return [{key: item[key] for key in keys} for item in inputs.evaluation["comparisons"]]


@contextmanager
def write_viewer(
    folder: Path,
    inputs: Inputs,
    groups: Iterable[Group],
    patterns: Sequence[Pattern],
    shown: Callable[[Group], None] = lambda group: None,
    annotated: Path | None = None,
) -> Iterator[tuple[list[Indexed], list[Prevalence]]]:
    """Write the viewer to `folder`, which it replaces at the end of the block, one group in memory at a time. `shown` is called
    after each group. `annotated`: data/annotated, with the models that value states, which compute beside the block; None: no
    values.

    Yields the groups' index and how often each pattern occurs, for the chapter on behaviour.
    """
    indexed: list[Indexed] = []
    tokens: set[int] = set()
    histories = ShortestHistories()
    with atomic_folder(folder) as partial:
        for group in groups:
            (partial / f"{group.key}.js").write_text(pack_group(group, inputs.chat), encoding="utf-8")
            tokens |= used_tokens(group.rows)
            histories.add(group)
            indexed.append(index_group(group, patterns))
            shown(group)
        valued = histories.found if annotated is not None and inputs.params.report.state_values else {}
        with values_beside(annotated or Path(), valued, inputs.params.resources) as values:
            vocabulary = {str(token): token_text(inputs.tokenizer, token) for token in sorted(tokens)}
            (partial / "vocabulary.js").write_text(script("vocabulary", vocabulary), encoding="utf-8")
            found = prevalences(indexed, inputs)
            yield indexed, found
            names = write_values(partial, values())
        (partial / "index.html").write_text(render_viewer(inputs, indexed, patterns, found, names), encoding="utf-8")


def write_values(partial: Path, values: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Write a file with the learnt values of each domain that has any; domain -> its name."""
    written = {}
    for domain, own in values.items():
        if own:
            written[domain] = f"values_{file_name(domain)}"
            (partial / f"{written[domain]}.js").write_text(script("valued", domain, own), encoding="utf-8")
    return written
