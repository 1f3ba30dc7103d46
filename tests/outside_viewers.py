"""The environment of `make viewers`: Inspect and Harbor, which read and show what this project exports."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = "BELLWETHER_VIEWERS"


def viewers() -> Path:
    """Its folder: BELLWETHER_VIEWERS, or .bellwether/viewers of the checkout."""
    return Path(os.environ.get(VARIABLE) or ROOT / ".bellwether" / "viewers")


def lacking() -> str:
    """Why tests that need it are skipped; "" if it is there."""
    return "" if (viewers() / "bin" / "inspect").exists() else "no Inspect and Harbor ('make viewers' installs them)"
