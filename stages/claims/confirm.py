"""`python -m stages.claims --confirm SLUG`: whether runs of older code still give what is stored; repeats one of each arm."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from stages.claims.plan import Outcome, Run, planned_runs
from stages.claims.results import Results
from stages.claims.rows import Row
from stages.claims.session import Session, outcomes
from stages.claims.tuning import chosen_values


def sampled_runs(session: Session) -> list[Run]:
    """Of each arm, the stored run of the lowest seed whose code is not the checkout's."""
    experiment, stored, found = session.experiment, session.results.outcomes, []
    tuned = chosen_values(experiment, session.results)
    older = [name.rpartition("/") for name, one in stored.items() if one["code"] != session.runner.code]
    for arm in experiment.arms:
        if seeds := [int(seed) for of, _, seed in older if of == arm]:
            found += planned_runs(experiment, session.params, tuned, [min(seeds)], [arm])
    return found


def _differ(before: Sequence[Row], now: Sequence[Row]) -> bool:
    """Whether rows differ in what was recorded before: a column may be newer than the run."""
    pairs = zip(before, now, strict=False)
    return len(before) != len(now) or any(
        old[name] != new.get(name) for old, new in pairs for name in old if old[name] is not None
    )


def differences(stored: Results, run: Run, outcome: Outcome) -> Iterator[str]:
    """What the repeated run found that differs from what is stored of it."""
    old = stored.outcomes[run.name]
    for name, value in outcome.metrics.items():
        if name in old["metrics"] and old["metrics"][name] != value:
            yield f"{name} {old['metrics'][name]}, now {value}"
    if old["environment_steps"] != outcome.environment_steps:
        yield f"environment_steps {old['environment_steps']}, now {outcome.environment_steps}"
    tables = stored.tables
    for name, before, now in (("rows", tables.rows, outcome.rows), ("curve", tables.curves, outcome.curve)):
        if run.name in before and _differ(before[run.name], now):
            yield f"{name} per {'task' if name == 'rows' else 'step'} differ"


def _is_stored(session: Session, run: Run, outcome: Outcome | Exception) -> bool:
    """Whether a repeated run found what is stored; says so."""
    found = [str(outcome)] if isinstance(outcome, Exception) else list(differences(session.results, run, outcome))
    if found:
        print(f"claim: {session.slug}: {run.name} is not as stored: {'; '.join(found)}", file=sys.stderr, flush=True)
    else:
        session.say(f"{run.name} is as stored")
    return not found


def confirm(session: Session) -> bool:
    """Repeat `sampled_runs`; whether all gave the stored results exactly. Which runs did is written to the experiment's file with
    the hash of the code, for the page. Stored results are never replaced."""
    session.load()
    runs, same = sampled_runs(session), []
    session.say(f"{len(runs)} runs to repeat, {session.jobs} at a time" if runs else "no run is of older code")
    for played in outcomes(session.by_workspace(runs).values(), session.play, session.jobs):
        found = [run.name for run, outcome in played if _is_stored(session, run, outcome)]
        same += found
        if len(found) == len(played):
            session.runner.release(session.workspace_of(played[0][0]))
    if len(same) < len(runs):
        session.say(
            "the reason may be another type of processor, which rounds differently, instead of newer code: repeat on the type of "
            "machine that made the stored runs, or compare with runs of their commit here"
        )
    if same:
        session.results.confirmed = {"code": session.runner.code, "runs": sorted(same)}
        session.save()
    return len(same) == len(runs)
