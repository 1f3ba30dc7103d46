"""Search over agent designs as a Prefect flow: `python -m flows.design`, `python -m flows.design design.method=random`.

One task per design that is evaluated, by the ordinary stage `evaluate` in a copy of the checkout. `python -m
stages.designs` chooses the next design and stores the results; its settings are in reports/design/design.yaml. A stopped
search resumes, and a design that was evaluated before, by any method, is not evaluated again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow, runtime, task
from prefect.artifacts import create_table_artifact
from prefect.states import Completed, State
from pydantic import BaseModel, ConfigDict, Field

from flows.checkout import run_lock
from flows.lifecycle import can_be_retried, gpu, logger
from flows.overrides import OVERRIDE
from flows.pipeline import gpu_stages
from flows.process import BAD_PARAMETERS, ROOT, StageFailedError, python_environment, quoted, run_supervised
from flows.tracked import run_environment
from stages.runtime.command import command, whole_number
from stages.runtime.process import supervised

LARGEST_BUDGET = 100_000
LOCK = Path(".bellwether") / "design" / "search.lock"


class DesignSearch(BaseModel):
    """Overrides of reports/design/design.yaml for one search, and what to do when an evaluation fails."""

    model_config = ConfigDict(extra="forbid")

    method: Literal["agentswift", "unguided", "random"] | None = Field(
        None, title="Method", description="Empty: method in reports/design/design.yaml."
    )
    budget: int | None = Field(
        None,
        ge=1,
        le=LARGEST_BUDGET,
        title="Budget",
        description="Designs to evaluate; empty: budget in reports/design/design.yaml. A larger budget continues the search.",
    )
    overrides: list[Annotated[str, Field(pattern=OVERRIDE)]] = Field(
        default_factory=list, title="Overrides", description="For this search: design.tasks=24, or keys of params.yaml."
    )
    retries: int = Field(
        2,
        ge=0,
        le=10,
        title="Retries",
        description="How often a failed evaluation is retried; a rejected design is not.",
    )
    retry_delay_s: int = Field(30, ge=0, le=3600, title="Seconds before a retry", description="Finished chunks are kept.")

    @property
    def changes(self) -> list[str]:
        own = {"design.method": self.method, "design.budget": self.budget}
        return [*self.overrides, *(f"{key}={value}" for key, value in own.items() if value is not None)]


def environment(**variables: str) -> dict[str, str]:
    """One parent run in MLflow for the search."""
    name = f"design {runtime.flow_run.name}"
    return python_environment(**run_environment(name, name), **variables)


def next_step(root: Path, changes: Sequence[str], *report: str) -> dict[str, Any]:
    """The step that `python -m stages.designs` prints. Raises StageFailedError with its message."""
    command = supervised([sys.executable, "-m", "stages.designs", *report, *(["--set", *changes] if changes else [])])
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=root, env=environment(), **streams) as child:
        try:
            out, errors = child.communicate()
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        raise StageFailedError(errors.strip() or f"stages.designs failed (exit code {child.returncode})", child.returncode)
    print(errors, end="", file=sys.stderr, flush=True)
    return json.loads(out.splitlines()[-1])


@task(retry_condition_fn=can_be_retried)
def evaluate(step: Mapping[str, Any], on_gpu: bool) -> State:
    """Evaluate one design. Its data: seconds, and why the stage rejected the design, else "". Raises StageFailedError for other
    failures."""
    log, began = logger(), time.monotonic()
    with gpu(on_gpu):
        variables = environment(**{"BELLWETHER_TRACKING": os.environ.get("BELLWETHER_TRACKING", "off")})
        code, tail = run_supervised(["-m", "stages.evaluate"], Path(step["folder"]), variables, lambda line: log(f"  {line}"))
    if code not in (0, BAD_PARAMETERS):
        raise StageFailedError(f"evaluating '{step['label']}' failed (exit code {code}). Its last output:{quoted(tail)}", code)
    failed = re.sub(r"\s+", " ", quoted(tail)).strip() or "no output" if code else ""
    message = f"rejected: {failed}" if code else step["label"]
    return Completed(name="Rejected" if code else "Evaluated", message=message, data=(time.monotonic() - began, failed))


def show(done: Mapping[str, Any]) -> None:
    rows = [
        {"domain": domain, **{name: scores[name] for name in ("default", "winner")}} for domain, scores in done["domains"].items()
    ]
    create_table_artifact(rows, key="design", description=f"Success on the frozen panels; winner: {done['label']}")


@flow(name="design")
def design(search: DesignSearch = DesignSearch(), root: str = "") -> dict[str, Any]:  # noqa: B008
    """Search for the agent design that scores best on validation tasks; returns its results.

    Args:
        search: Overrides of reports/design/design.yaml.
        root: The checkout; empty: that of this flow.
    """
    log, folder = logger(), Path(root or ROOT)
    evaluation = evaluate.with_options(retries=search.retries, retry_delay_seconds=search.retry_delay_s)
    with run_lock(folder, log, LOCK):
        on_gpu = "evaluate" in gpu_stages(folder)
        step = next_step(folder, search.changes)
        while step["kind"] != "done":
            title = " ".join(filter(None, (step["kind"], step["count"])))
            log(f"design: {title} ({step['origin']}): {step['label']}")
            ended = evaluation.with_options(task_run_name=f"{title} {step['name']}")(step, on_gpu, return_state=True)
            seconds, failed = ended.result()
            report = ["--ended", f"{seconds:.1f}", *(["--failed", failed] if failed else [])]
            step = next_step(folder, search.changes, *report)
    show(step)
    panel = step["panel"]
    log(f"design: winner: {step['label']}")
    log(f"design: on the frozen panels {100 * panel['winner']:.1f} %, default {100 * panel['default']:.1f} %")
    log(f"design: {step['result']}; to use it: python -m stages.params --apply {step['overlay']}")
    return step


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.design", description="Search over agent designs.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, such as design.method=random")
    parser.add_argument(
        "--budget",
        type=whole_number(1, LARGEST_BUDGET),
        help="designs to evaluate; a larger budget continues the search",
    )
    options = parser.parse_args()
    bad = [change for change in options.overrides if not re.fullmatch(OVERRIDE, change)]
    if bad:
        parser.error(f"overrides are KEY=VALUE, not {bad[0]}")
    try:
        design(DesignSearch(overrides=options.overrides, budget=options.budget))
    except StageFailedError as error:
        print(f"design: {error}", file=sys.stderr)
        return BAD_PARAMETERS if error.bad_parameters else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
