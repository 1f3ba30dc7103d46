"""Addresses in the viewer, as the report links to them."""

from __future__ import annotations

from urllib.parse import urlencode

from stages.records.addresses import VIEWER


def side_by_side(domain: str, model: str, baseline: str) -> str:
    """The attempts of `model` beside those of `baseline`, which is on the left."""
    return f"{VIEWER}#{urlencode({'tab': 'compare', 'domain': domain, 'a': baseline, 'b': model})}"


def with_pattern(domain: str, source: str, pattern: str) -> str:
    """The episodes of a source in which a pattern occurs."""
    return f"{VIEWER}#{urlencode({'domain': domain, 'source': source, 'pattern': pattern})}"
