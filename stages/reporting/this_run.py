"""The reported run as a `Run`, for comparison with kept runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.records.episode import DRAWN
from stages.reporting.inputs import ROLLOUTS, Inputs
from stages.reporting.kept import Run, Success, Work, total


def solved(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """`Run.solved` from the rows of data/evaluation/rows.parquet."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for row in rows:
        tasks = counts.setdefault(row["model"], {}).setdefault(row["domain"], {})
        tasks[row["task_id"]] = tasks.get(row["task_id"], 0) + bool(row["success"])
    return {
        model: {domain: [tasks[task] for task in sorted(tasks)] for domain, tasks in sorted(by_domain.items())}
        for model, by_domain in sorted(counts.items())
    }


def _at(report: Mapping[str, Any] | None, key: str) -> int | None:
    value = (report or {}).get(key)
    return round(value) if isinstance(value, (int, float)) else None


def _trained(report: Mapping[str, Any] | None) -> int | None:
    return _at(report, "ledger/policy_tokens_trained")


def _evaluation_work(evaluation: Mapping[str, Any]) -> Work:
    """Models with the same weights are evaluated once."""
    played = {
        (domain, row.get("policy_hash", model)): row
        for model, by_domain in evaluation["models"].items()
        for domain, row in by_domain.items()
    }
    attempts = evaluation.get("attempts", 1)
    episodes = sum(row["success"]["n"] for row in played.values()) * attempts
    tokens = [row["tokens"]["mean"] * row["success"]["n"] for row in played.values() if isinstance(row.get("tokens"), Mapping)]
    return Work(episodes=episodes, sampled_tokens=round(sum(tokens) * attempts) if tokens else None)


def _rl_work(report: Mapping[str, Any] | None, epochs: int) -> Work:
    """Of the training and of the warm start before it, if there was one."""
    trained, dropped = _trained(report), _at(report, "ledger/policy_tokens_dropped")
    skipped = _at(report, "ledger/policy_tokens_skipped") or 0
    no_rollouts = _at(report, "environment_steps") == 0
    first = (report or {}).get("warm_start")
    parts = [Work(steps=_at(one, "steps"), trained_tokens=_trained(one)) for one in (report, first)]
    return Work(
        episodes=_at(report, "episodes"),
        environment_steps=_at(report, "environment_steps") or None,
        steps=total(parts, "steps"),
        sampled_tokens=None if trained is None or dropped is None or no_rollouts else (trained + dropped + skipped) // epochs,
        trained_tokens=total(parts, "trained_tokens"),
    )


def _merge_work(inputs: Inputs) -> Work:
    """What a method that trains the merged model played and trained; nothing for one that merges weights."""
    merge = inputs.merge or {}
    if joint := merge.get("joint_rl"):
        parts = [_rl_work(found, inputs.params.section("rl", domain).epochs) for domain, found in joint["domains"].items()]
    elif distil := merge.get("distil"):
        names = ("episodes", "environment_steps", "sampled_tokens")
        parts = [Work(**{name: found[name] for name in names}) for found in distil["domains"].values()]
        parts.append(Work(steps=distil["steps"], trained_tokens=distil.get("trained_tokens")))
    else:
        parts = []
    return Work(**{name: total(parts, name) for name in Work.model_fields})


def work(inputs: Inputs) -> dict[str, Work]:
    """Stage -> its work, from the stages' reports; in the order of the run."""
    found: dict[str, Work] = {}
    for domain, given in inputs.domains.items():
        kept = ((given.curate or {}).get("demonstrations") or {}).get("kept")
        found[f"curate@{domain}"] = Work(episodes=sum(kept.values()) if isinstance(kept, Mapping) else None)
    found["sft"] = Work(steps=_at(inputs.sft, "steps"), trained_tokens=_trained(inputs.sft))
    for domain, given in inputs.domains.items():
        rows = given.episodes.get(ROLLOUTS, [])
        off = 0 if _at(given.rollout, "tasks") == 0 else None
        sampled = sum(owner in DRAWN for row in rows for owner in row["owner"])
        found[f"rollout@{domain}"] = Work(
            episodes=_at(given.rollout, "episodes"),
            environment_steps=sum(len(row["turns"]) for row in rows) or off,
            sampled_tokens=sampled or off,
        )
    for domain, given in inputs.domains.items():
        found[f"annotate@{domain}"] = Work(
            environment_steps=_at(given.annotate, "environment_steps"),
            steps=_at(given.annotate, "iterations"),
            sampled_tokens=_at(given.annotate, "policy_tokens"),
        )
    for domain, given in inputs.domains.items():
        found[f"rl@{domain}"] = _rl_work(given.rl, inputs.params.section("rl", domain).epochs)
    found["merge"] = _merge_work(inputs)
    found["evaluate"] = _evaluation_work(inputs.evaluation)
    return {stage: item for stage, item in found.items() if item != Work()}


def this_run(inputs: Inputs) -> Run:
    """The run described by `inputs`, without the fields that `keep` adds."""
    success = {
        model: {
            domain: Success(**{key: float(row["success"][key]) for key in ("mean", "low", "high")}, n=int(row["success"]["n"]))
            for domain, row in sorted(by_domain.items())
        }
        for model, by_domain in sorted(inputs.evaluation["models"].items())
    }
    return Run(
        params=inputs.params.model_dump(mode="json"),
        code=dict(inputs.code),
        panels={domain: str(digest) for domain, digest in sorted(inputs.evaluation["panels"].items())},
        success=success,
        solved=solved(inputs.outcomes),
        work=work(inputs),
        attempts=int(inputs.evaluation.get("attempts", 1)),
    )
