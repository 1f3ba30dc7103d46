"""The documentation as a site: every page, no broken link, a page per method with its evidence, search without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stages.algorithms.registry import names
from stages.params import ROOT
from stages.reporting.board.rows import entries
from stages.reporting.site.methods import concerns, method_pages
from stages.reporting.site.sources import CHAPTERS, gather


@pytest.fixture(scope="module")
def of_methods() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.reporting.site.method_curves._svg", lambda *_: "<svg/>")  # drawing takes long
        return method_pages(ROOT, entries(ROOT))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, of_methods: Any) -> Path:
    folder = tmp_path_factory.mktemp("site") / "sources"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.reporting.site.sources.method_pages", lambda root, board: of_methods)
        gather(ROOT, folder)
    return folder


def test_every_document_is_in_the_navigation(sources: Path) -> None:
    index = (sources / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^(\S+)$", "".join(re.findall(r"```{toctree}\n(.*?)```", index, re.S)), re.M))
    pages = {path.relative_to(sources).with_suffix("").as_posix() for path in sources.rglob("*.md")}
    assert pages - listed == {"index"}
    assert {name for of in CHAPTERS.values() for name in of} <= pages


def test_links_within_the_site_lead_to_pages_or_pictures(sources: Path) -> None:
    for page in sources.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("[gone](docs/gone.md)")
    for name in ("dvc.yaml", "params.yaml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    with pytest.raises(FileNotFoundError, match=r"README.md: the link to docs/gone.md leads nowhere"):
        gather(tmp_path, tmp_path / "sources")


def test_each_method_has_a_page_with_switch_and_evidence(of_methods: Any) -> None:
    families, figures = of_methods
    pages = {path.stem: text for of_family in families.values() for path, text in of_family.items()}
    assert set(names()) <= set(pages)
    assert "    rl: {algorithm: arpo}\n" in pages["arpo"]
    assert "[arpo 1](../../reports/claims/arpo.md)" in pages["arpo"]
    assert '| `rl.loss.aggregation` | `"token_mean"` |' in pages["lite_ppo"]
    for control in ("arsq", "ravl", "r2pvi", "risk_averse_equilibrium", "shapley_marl", "vagram", "dsac_t", "rladapter"):
        assert f"[{control} 1](../../reports/claims/{control}.md)" in pages[control]
    assert any("No experiment of the board uses it yet" in text for text in pages.values())
    for name, text in pages.items():
        assert re.findall(r"^## (Formula|Switch|Evidence|Learning curve)$", text, re.M) == [
            *("Formula", "Switch", "Evidence", "Learning curve")
        ], name
    assert "default_algorithm_curves.svg)" in pages["grpo"].partition("## Learning curve")[2]
    assert "It does not train a policy" in pages["slerp"]
    assert "evaluated at the end only" in pages["r2pvi"].partition("## Learning curve")[2]
    for path in figures:
        assert f"](figures/{path.name})" in pages[path.stem].partition("## Learning curve")[2]


def test_an_experiment_concerns_the_methods_of_its_arms_and_of_its_switch() -> None:
    experiments = {slug: entry.experiment for slug, entry in entries(ROOT).items()}
    from stages.algorithms.registry import composition
    from stages.values import heads

    card = composition("lite_ppo").card
    assert {slug for slug, one in experiments.items() if concerns(one, card)} >= {"lite_ppo"}
    assert not concerns(experiments["arpo"], card)
    assert concerns(experiments["hl_gauss"], heads.CARD)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Contract: Sphinx takes warnings as errors; the search index is a file that needs no server."""
    pytest.importorskip("furo")
    from stages.reporting.site.__main__ import build

    pages = build(ROOT, tmp_path / "site")
    html = tmp_path / "site" / "html"
    assert len([path for path in html.rglob("*.html") if path.name not in ("search.html", "genindex.html")]) == pages
    assert "searchindex.js" in (html / "search.html").read_text(encoding="utf-8")
    assert (html / "docs" / "screenshots" / "report.png").exists()
    assert "SHOW_SEARCH_SUMMARY: false" in (html / "_static" / "documentation_options.js").read_text(encoding="utf-8")
