"""A round of a conversion to small models as a Prefect flow: `python -m flows.convert conversion.yaml`.

`python -m stages.conversion` does the work, if new calls or fallbacks are a reason for a round. Otherwise nothing changes, so a
schedule may run it as often as wanted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel, ConfigDict, Field

from flows.lifecycle import can_be_retried, logger
from flows.process import BAD_PARAMETERS, ROOT, StageFailedError, python_environment, quoted, run_supervised
from stages.runtime.command import command


class ConversionRound(BaseModel):
    """The settings of a conversion, and what to do when a round fails."""

    model_config = ConfigDict(extra="forbid")

    settings: str = Field("conversion.yaml", title="Settings", description="A YAML file in the checkout; docs/conversion.md.")
    retries: int = Field(1, ge=0, le=10, title="Retries", description="How often a failed round is retried.")
    retry_delay_s: int = Field(30, ge=0, le=3600, title="Seconds before a retry")


@task(retry_condition_fn=can_be_retried)
def convert_calls(settings: str, root: Path) -> str:
    """One round; its last line of output. Raises StageFailedError."""
    log = logger()
    code, tail = run_supervised(["-m", "stages.conversion", settings], root, python_environment(), lambda line: log(f"  {line}"))
    if code:
        raise StageFailedError(f"the conversion of {settings} failed (exit code {code}). Its last output:{quoted(tail)}", code)
    return tail[-1] if tail else ""


@flow(name="convert")
def convert(conversion: ConversionRound = ConversionRound(), root: str = "") -> str:  # noqa: B008
    """Convert narrow calls of the serving log to small models, if there is a reason for a round; returns what came of it.

    Args:
        conversion: Which settings, and retries.
        root: The checkout; empty: that of this flow.
    """
    folder = Path(root or ROOT)
    done = convert_calls.with_options(retries=conversion.retries, retry_delay_seconds=conversion.retry_delay_s)(
        conversion.settings, folder
    )
    create_markdown_artifact(done, key="conversion", description=f"Conversion by {conversion.settings}")
    return done


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.convert", description=__doc__)
    parser.add_argument("settings", nargs="?", default="conversion.yaml", help="a YAML file in the checkout")
    options = parser.parse_args()
    try:
        print(convert(ConversionRound(settings=options.settings)))
    except StageFailedError as error:
        print(f"convert: {error}", file=sys.stderr)
        return BAD_PARAMETERS if error.bad_parameters else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
