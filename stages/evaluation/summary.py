"""Evaluation rows -> reports/evaluation.json: per model and domain its numbers with intervals, and the paired comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stages.agent.model_names import SELECTORS
from stages.curation.panel import require_same_hash
from stages.evaluation.statistics import (
    Interval,
    chance_of_differing,
    compare,
    distinct_at_k,
    maj_at_k,
    mean_interval,
    pass_at_k_by_task,
)

DIGITS = 6
Rows = Sequence[Mapping[str, Any]]


def _estimate(found: Interval) -> dict[str, Any]:
    return {"mean": round(found.mean, DIGITS), "low": round(found.low, DIGITS), "high": round(found.high, DIGITS), "n": found.n}


def _column(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def _tasks(rows: Rows) -> list[str]:
    return [row["task_id"] for row in rows]


def _clusters(rows: Rows) -> dict[str, str]:
    return {row["task_id"]: row["cluster"] for row in rows}


def _maj_at_k(rows: Rows, k: int, seed: int) -> float:
    """Mean over tasks."""
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_task.setdefault(row["task_id"], []).append(row)
    found = [maj_at_k([row["answer"] for row in of], [row["success"] for row in of], k, seed) for of in by_task.values()]
    return sum(found) / len(found)


def _solutions(rows: Rows) -> list[tuple[int, list[int]]]:
    """(attempts, attempts per solution) of every task."""
    by_task: dict[str, list[str | None]] = {}
    for row in rows:
        by_task.setdefault(row["task_id"], []).append(row["solution"])
    return [(len(found), sorted(Counter(one for one in found if one is not None).values())) for found in by_task.values()]


def _distinct(rows: Rows, ks: Sequence[int]) -> dict[str, Any]:
    """Diversity of a task's solutions: their number among k attempts, and the probability that two successes differ (mean over
    the `n` tasks with two successes)."""
    tasks = _solutions(rows)
    differ = [chance for _, counts in tasks if (chance := chance_of_differing(counts)) is not None]
    return {
        "distinct_at_k": {
            str(k): round(sum(distinct_at_k(n, counts, k) for n, counts in tasks) / len(tasks), DIGITS) for k in ks
        },
        "solutions_differ": {"mean": round(sum(differ) / max(len(differ), 1), DIGITS), "n": len(differ)},
    }


def _calls(rows: Rows) -> dict[str, Any]:
    """Calls of priced tools per attempt: by tool, and of all tools by difficulty."""
    by_level: dict[float, list[float]] = {}
    by_tool: dict[str, float] = {}
    for row in rows:
        calls = row.get("calls", {})
        by_level.setdefault(row["difficulty"], []).append(sum(calls.values()))
        for tool, count in calls.items():
            by_tool[tool] = by_tool.get(tool, 0.0) + count
    return {
        "calls": {tool: round(count / len(rows), DIGITS) for tool, count in sorted(by_tool.items())},
        "calls_by_difficulty": {f"{level:g}": round(sum(of) / len(of), DIGITS) for level, of in sorted(by_level.items())},
    }


def proportions(rows: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Which columns are proportions on a panel, given all its rows: success, the share of accepted actions, and the reward if it
    equals success in every episode."""
    binary = all(row["reward"] == float(row["success"]) for row in rows)
    return frozenset({"success", "accepted", *(["reward"] if binary else [])})


def summarise(
    rows: Rows, attempts: int, confidence: float, resamples: int, seed: int, shares: frozenset[str] | None = None
) -> dict[str, Any]:
    """One model on one panel: means over tasks with cluster-bootstrap intervals; pass@k and distinct@k for k = 1, 2, 4 ... up to
    `attempts`, and maj@k if the domain has answers. Success is average@k with k = `attempts`.

    `shares`: `proportions` over all models' rows; None: over these.
    """
    shares = proportions(rows) if shares is None else shares
    options: dict[str, Any] = {"clusters": _clusters(rows), "confidence": confidence, "resamples": resamples, "seed": seed}
    summary: dict[str, Any] = {
        name: _estimate(mean_interval(_column(rows, name), _tasks(rows), proportion=name in shares, **options))
        for name in ("success", "reward", "turns", "tokens", "accepted", "cost")
    }
    successes = [bool(row["success"]) for row in rows]
    ks = sorted({attempts, *(2**power for power in range(9) if 2**power <= attempts)})
    summary["pass_at_k"] = {str(k): round(float(pass_at_k_by_task(successes, _tasks(rows), k)[1].mean()), DIGITS) for k in ks}
    if attempts > 1:
        summary |= _distinct(rows, ks)
    if any(row["answer"] is not None for row in rows):
        summary["maj_at_k"] = {str(k): round(_maj_at_k(rows, k, seed), DIGITS) for k in ks}
    levels = sorted({row["difficulty"] for row in rows})
    if len(levels) <= 12:
        summary["by_difficulty"] = {}
        for level in levels:
            values = [bool(row["success"]) for row in rows if row["difficulty"] == level]
            summary["by_difficulty"][f"{level:g}"] = {
                "success": round(sum(values) / len(values), DIGITS),
                "attempts": len(values),
            }
    if any("calls" in row for row in rows):
        summary |= _calls(rows)
    if all("environment_steps" in row for row in rows):  # of a search at test time
        summary["environment_steps"] = round(sum(row["environment_steps"] for row in rows) / len(rows), DIGITS)
    summary["stop_reasons"] = dict(sorted(Counter(row["stop_reason"] for row in rows).items()))
    summary["policy_hash"] = rows[0]["policy_hash"]
    return summary


def pairs_to_compare(models: Sequence[str]) -> list[tuple[str, str]]:
    """(a, b): every model against sft, specialists against the merge, the merge against the linear average, sft against base;
    variants against the plain model, and selection by values against selection by log-probability."""
    choosers = [name.partition("+") for name in models if "+" in name]
    models = [name for name in models if "+" not in name] + [name for name in models if "+" in name]
    specialists = [name for name in models if name.startswith("rl@") and "+" not in name]
    pairs = [(name, "sft") for name in models if name not in ("sft", "base") and "+" not in name]
    pairs += [(f"{name}+{by}", name) for name, _, by in choosers]
    pairs += [(f"{name}+{by}", f"{name}+logprob") for name, _, by in choosers if by != "logprob" and by in SELECTORS]
    pairs += [(name, "merged") for name in specialists]
    pairs += [("merged", "merged_linear"), ("sft", "base")]
    return [(a, b) for a, b in pairs if a in models and b in models]


def compare_models(a: Rows, b: Rows, confidence: float, resamples: int, seed: int) -> dict[str, Any]:
    """Success of a minus success of b, paired by task. Raises PanelMismatchError if their panels differ."""
    require_same_hash({"a": a[0]["panel"], "b": b[0]["panel"]}, a[0]["domain"])
    found = compare(
        _column(a, "success"),
        _tasks(a),
        _column(b, "success"),
        _tasks(b),
        clusters=_clusters(a),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )
    values = asdict(found)
    return {key: round(value, DIGITS) if isinstance(value, float) else value for key, value in values.items()}


def report(
    rows: Mapping[str, Mapping[str, Rows]],
    panels: Mapping[str, str],
    *,
    attempts: int,
    confidence: float,
    resamples: int,
    seed: int,
    split: str = "test",
) -> dict[str, Any]:
    """Content of reports/evaluation.json from `rows[model][domain]`; models are compared on the domains they share. Models of
    equal hash share one summary. It has a `split` only if that is not the frozen panels' one."""
    done: dict[tuple[str, str], dict[str, Any]] = {}
    models: dict[str, dict[str, Any]] = {}
    shares = {domain: proportions(row for by_domain in rows.values() for row in by_domain.get(domain, ())) for domain in panels}
    for model, by_domain in rows.items():
        models[model] = {}
        for domain, of_domain in by_domain.items():
            key = (of_domain[0]["policy_hash"], domain)
            if key not in done:
                done[key] = summarise(of_domain, attempts, confidence, resamples, seed, shares[domain])
            models[model][domain] = done[key]
    comparisons = [
        {"a": a, "b": b, "domain": domain, **compare_models(rows[a][domain], rows[b][domain], confidence, resamples, seed)}
        for a, b in pairs_to_compare(list(rows))
        for domain in panels
        if domain in rows[a] and domain in rows[b]
    ]
    found = {"panels": dict(panels), "models": models, "comparisons": comparisons, "confidence": confidence, "attempts": attempts}
    return found if split == "test" else {**found, "split": split}


def headline(evaluation: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Domain -> success of the SFT policy, the domain's specialist and the merge: the columns of `dvc exp show`. Everything else
    is in reports/evaluation.json only, since every number here is a column."""
    numbers: dict[str, dict[str, float]] = {}
    for domain in evaluation["panels"]:
        models = {"sft": "sft", "rl": f"rl@{domain}", "merged": "merged"}
        found = {name: evaluation["models"].get(model) for name, model in models.items()}
        numbers[domain] = {name: round(of[domain]["success"]["mean"], 4) for name, of in found.items() if of is not None}
    return numbers


def csv_lines(evaluation: Mapping[str, Any]) -> Iterable[str]:
    """model,domain,success,low,high,n: the plot of `dvc plots show`."""
    yield "model,domain,success,low,high,n"
    for model, by_domain in evaluation["models"].items():
        for domain, values in by_domain.items():
            success = values["success"]
            yield f"{model},{domain},{success['mean']},{success['low']},{success['high']},{success['n']}"
