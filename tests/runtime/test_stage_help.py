"""Help texts of all commands: printed without heavy imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = [
    "curate",
    "sft",
    "rollout",
    "annotate",
    "rl",
    "merge",
    "evaluate",
    "report",
    "pretraining",
    "claims",
    "tracking.promote",
    "params",
]
HEAVY = {
    *("accelerate", "bm25s", "datasets", "dvc", "fastapi", "httpx", "matplotlib", "mlflow", "pandas", "peft", "prefect"),
    *("requests", "scipy.stats", "sqlalchemy", "sympy", "textworld", "tokenizers", "torch", "transformers"),
}
ASK_FOR_HELP = """
import contextlib, io, runpy, sys

for name in sys.argv[1:]:
    sys.argv, output = [name, "--help"], io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        runpy.run_module(f"stages.{name}", run_name="__main__", alter_sys=True)
    print(name, "usage:" in output.getvalue(), *sys.modules)
"""


def test_help_imports_no_heavy_modules() -> None:
    """One process runs all commands in turn, so the first one listed with a heavy module is the one that imports it."""
    command = [sys.executable, "-W", "ignore", "-c", ASK_FOR_HELP, *COMMANDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == COMMANDS
    for name, helped, *modules in lines:
        assert helped == "True", name
        assert not HEAVY.intersection(modules), name
