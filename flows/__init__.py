"""Prefect flows over the command line of the stages. Prefect's state is in .prefect of this checkout."""

import os
import sys
from pathlib import Path

from flows import auth

_HOME = Path(__file__).resolve().parent.parent / ".prefect"
# Set before Prefect is imported, which reads them once; the caller's values take precedence.
for _name, _value in {
    "PREFECT_HOME": str(_HOME),
    "PREFECT_UI_STATIC_DIRECTORY": str(_HOME / "ui"),
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": auth.origins(4200),
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
}.items():
    os.environ.setdefault(_name, _value)
if "prefect" not in sys.modules:  # too late otherwise: the servers would require a password that this process does not send
    os.environ.update(auth.settings(os.environ))
