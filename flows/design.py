"""Search over agent designs as a Prefect flow: `python -m flows.design`, `python -m flows.design design.method=random`.

One task per design that is evaluated, by the ordinary stage `evaluate` in a copy of the checkout. `python -m
stages.designs` chooses what is evaluated next and records the results; its settings are in reports/design/design.yaml. A stopped
search resumes, and a design that was evaluated before, by any method, is not played again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow, runtime, task
from prefect.artifacts import create_table_artifact
from prefect.states import Completed, State
from pydantic import BaseModel, ConfigDict, Field

from flows.checkout import only_run
from flows.experiments import environment
from flows.lifecycle import can_be_retried, echo, gpu
from flows.overrides import OVERRIDE
from flows.pipeline import BAD_PARAMETERS, ROOT, WORDS_KEPT, StageFailedError, on_gpu
from stages.runtime.command import command

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
        le=100_000,
        title="Budget",
        description="Designs to evaluate; empty: budget in reports/design/design.yaml. A larger budget continues the search.",
    )
    overrides: list[Annotated[str, Field(pattern=OVERRIDE)]] = Field(
        default_factory=list, title="Overrides", description="For this search: design.tasks=24, or keys of params.yaml."
    )
    retries: int = Field(
        2, ge=0, le=10, title="Retries", description="How often an evaluation that fails for an outside reason is tried again."
    )
    retry_delay_s: int = Field(30, ge=0, le=3600, title="Seconds before a retry", description="Finished chunks are kept.")

    @property
    def changes(self) -> list[str]:
        own = {"design.method": self.method, "design.budget": self.budget}
        return [*self.overrides, *(f"{key}={value}" for key, value in own.items() if value is not None)]


def run_name() -> str:
    """Of the parent run in MLflow."""
    return f"design {runtime.flow_run.name}"


def run_quietly(command: Sequence[str], folder: Path, say: Callable[[str], None]) -> tuple[int, list[str]]:
    """Exit code of a command in `folder`, all of whose processes end with this one, and the end of what it said, which is
    echoed."""
    supervised = [sys.executable, "-m", "flows.supervise", sys.executable, *command]
    variables = {"BELLWETHER_TRACKING": "off", **environment(run_name())}
    said: list[str] = []
    with subprocess.Popen(
        supervised, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                said = [*said, line.rstrip("\n")][-WORDS_KEPT:]
                say(f"  {said[-1]}")
        except BaseException:
            child.terminate()
            raise
    return child.returncode, said


def next_step(root: Path, changes: Sequence[str], *news: str) -> dict[str, Any]:
    """What `python -m stages.designs` says. Raises StageFailedError with its message."""
    command = [sys.executable, "-m", "flows.supervise", sys.executable, "-m", "stages.designs", *news]
    command += ["--set", *changes] if changes else []
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment(run_name()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as child:
        try:
            out, complaints = child.communicate()
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        raise StageFailedError(complaints.strip() or f"stages.designs.__main__ ended with {child.returncode}", child.returncode)
    print(complaints, end="", file=sys.stderr, flush=True)
    return json.loads(out.splitlines()[-1])


@task(retry_condition_fn=can_be_retried)
def evaluate(step: Mapping[str, Any], on_gpu: bool) -> State:
    """Play one design. Its data: seconds, and why it could not be run, if so. Raises StageFailedError for outside reasons."""
    say, began = echo(), time.monotonic()
    with gpu(on_gpu):
        code, said = run_quietly(["-m", "stages.evaluate"], Path(step["folder"]), say)
    told = "".join(f"\n    {line}" for line in said)
    if code not in (0, BAD_PARAMETERS):
        raise StageFailedError(f"evaluating '{step['label']}' failed (exit code {code}). It said:{told}", code)
    failed = re.sub(r"\s+", " ", told).strip() or "it said nothing" if code else ""
    message = f"could not be run: {failed}" if code else step["label"]
    return Completed(name="Refused" if code else "Evaluated", message=message, data=(time.monotonic() - began, failed))


def show(done: Mapping[str, Any]) -> None:
    rows = [{"domain": domain, **{name: of[name] for name in ("default", "winner")}} for domain, of in done["domains"].items()]
    create_table_artifact(rows, key="design", description=f"Success on the frozen panels; the winner: {done['label']}")


@flow(name="design")
def design(search: DesignSearch = DesignSearch(), root: str = "") -> dict[str, Any]:  # noqa: B008
    """Search for the agent design that does best on validation tasks; returns what came of it.

    Args:
        search: Overrides of reports/design/design.yaml.
        root: The checkout; empty: the one that this flow belongs to.
    """
    say, place = echo(), Path(root or ROOT)
    task_of = evaluate.with_options(retries=search.retries, retry_delay_seconds=search.retry_delay_s)
    with only_run(place, say, LOCK):
        used = "evaluate" in on_gpu(place)
        step = next_step(place, search.changes)
        while step["kind"] != "done":
            title = " ".join(filter(None, (step["kind"], step["count"])))
            say(f"design: {title} ({step['origin']}): {step['label']}")
            ended = task_of.with_options(task_run_name=f"{title} {step['name']}")(step, used, return_state=True)
            seconds, failed = ended.result()
            news = ["--ended", f"{seconds:.1f}", *(["--failed", failed] if failed else [])]
            step = next_step(place, search.changes, *news)
    show(step)
    panel = step["panel"]
    say(f"design: winner: {step['label']}")
    say(f"design: on the frozen panels {100 * panel['winner']:.1f} %, as params.yaml has it {100 * panel['default']:.1f} %")
    say(f"design: {step['result']}; to use it: python -m stages.params --apply {step['overlay']}")
    return step


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.design", description="Search over agent designs.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides, such as design.method=random")
    parser.add_argument("--budget", type=int, help="designs to evaluate; a larger budget continues the search")
    options = parser.parse_args()
    bad = [change for change in options.overrides if not re.fullmatch(OVERRIDE, change)]
    if bad:
        parser.error(f"changes are written KEY=VALUE, not {bad[0]}")
    try:
        design(DesignSearch(overrides=options.overrides, budget=options.budget))
    except StageFailedError as error:
        print(f"design: {error}", file=sys.stderr)
        return BAD_PARAMETERS if error.bad_parameters else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
