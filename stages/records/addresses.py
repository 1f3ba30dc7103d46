"""Addresses in the episode viewer, and where `make ui` and `make serve` serve it."""

from __future__ import annotations

import os
from urllib.parse import urlencode, urljoin

VIEWER = "episodes/index.html"
"""From the report."""
REPORT_URL = "BELLWETHER_REPORT_URL"
"""Environment variable: the report's address, where it is not DEFAULT_REPORT."""
DEFAULT_REPORT = "http://127.0.0.1:5001/report.html"


def of_episode(source: str, episode_id: str) -> str:
    """An episode in the viewer, from the report; `source`: who played, as the viewer names it."""
    return f"{VIEWER}#{urlencode({'source': source, 'episode': episode_id})}"


def served(address: str) -> str:
    """The address as the report's server has it."""
    return urljoin(os.environ.get(REPORT_URL) or DEFAULT_REPORT, address)
