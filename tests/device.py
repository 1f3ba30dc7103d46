"""The device that tests of engine and training compute on: `BELLWETHER_TEST_DEVICE=cuda pytest tests/engine/test_decoder.py
tests/agent/test_shared_prefixes.py tests/training` on a machine with a GPU."""

from __future__ import annotations

import os
from typing import Any

from stages.runtime.workers import quiet_environment

DEVICE = os.environ.get("BELLWETHER_TEST_DEVICE", "cpu")
RESOURCES: dict[str, Any] = {} if DEVICE == "cpu" else {"device": DEVICE, "workers": 1}
"""Of a stage on the device: one process with environments beside it."""
if RESOURCES:
    quiet_environment(1)
