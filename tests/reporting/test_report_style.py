"""The palette and the figures' SVG."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from stages.reporting.style import _PLACEHOLDERS, DOMAIN_COLOURS, PALETTE, colour, drawing, new_figure, to_svg

MARKS = ("base", "sft", "merged", *(f"domain{index}" for index in range(DOMAIN_COLOURS)))
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
DEFICIENCIES = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}

OKLAB_1 = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
OKLAB_2 = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def linear(code: str) -> list[float]:
    channels = [int(code[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""
    light = sorted(
        sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear(code), strict=True)) for code in (a, b)
    )
    return (light[1] + 0.05) / (light[0] + 0.05)


def times(matrix, vector: list[float]) -> list[float]:
    return [sum(weight * value for weight, value in zip(row, vector, strict=True)) for row in matrix]


def oklab(rgb: list[float]) -> list[float]:
    """Linear RGB -> Oklab (Ottosson 2020)."""
    return times(OKLAB_2, [max(0.0, value) ** (1 / 3) for value in times(OKLAB_1, rgb)])


def simulated(code: str, deficiency: str) -> list[float]:
    return oklab([max(0.0, value) for value in times(DEFICIENCIES[deficiency], linear(code))])


@pytest.mark.parametrize("scheme", [0, 1])
def test_marks_and_text_contrast_with_the_background(scheme):
    """Contract: in both colour schemes marks have a contrast of 3:1 and text of 4.5:1."""
    surface = PALETTE["surface"][scheme]
    for name in MARKS:
        assert contrast(PALETTE[name][scheme], surface) >= 3, name
    for name in ("ink", "muted"):
        assert contrast(PALETTE[name][scheme], surface) >= 4.5, name


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_of_one_figure_differ_under_colour_blindness(scheme, deficiency):
    """Contract: the first two domains, sft and the merge can be distinguished under red-green colour blindness."""
    for a, b in itertools.combinations(("domain0", "domain1", "sft", "merged"), 2):
        distance = math.dist(simulated(PALETTE[a][scheme], deficiency), simulated(PALETTE[b][scheme], deficiency))
        assert distance >= 0.07, (a, b, distance)


def make_svg(standalone: bool = False):
    with drawing():
        figure, axes = new_figure()
        axes.plot([0, 1, 2], [0.5, 1.5, 0.25], color=colour("sft"), marker="o", label="a <line>")
        axes.set_title('A & "title"')
        axes.legend()
        return to_svg(figure, "a-key", 'What is < shown & "so"', standalone)


def test_svg_is_byte_deterministic():
    """Contract: no dates and no random ids."""
    assert make_svg() == make_svg()


def test_inline_svg_uses_colours_and_glyphs_of_the_page():
    svg = make_svg()
    ElementTree.fromstring(svg.text)
    assert "var(--sft)" in svg.text
    assert not [placeholder for placeholder in _PLACEHOLDERS.values() if placeholder in svg.text]
    used = set(re.findall(r'href="#(DejaVu[^"]+)"', svg.text))
    assert used == set(svg.glyphs), "the page gets other glyphs than the figure uses"
    assert not re.search(r'id="DejaVu', svg.text)
    ids = re.findall(r'id="([^"]+)"', svg.text)
    assert ids
    assert all(name.startswith("a-key-") for name in ids)
    assert set(re.findall(r"url\(#([^)]+)\)", svg.text)) <= set(ids)
    assert "<text" not in svg.text


def test_standalone_svg_is_self_contained():
    text = make_svg(standalone=True).text
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    ids = set(re.findall(r'id="([^"]+)"', text))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= ids
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")


def test_invalid_figure_key_is_rejected():
    with drawing():
        figure, _ = new_figure()
        with pytest.raises(ValueError, match="figure key"):
            to_svg(figure, "No Id", "title")
