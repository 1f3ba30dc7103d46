"""A small, realistic run generated from a seed: every file the report reads, in the stages' formats."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml
from reporting_documents import (
    DOMAINS,
    annotate_report,
    curate_report,
    evaluation_report,
    history_table,
    merge_report,
    write_sft_reports,
)
from reporting_episodes import drawn_nodes, drawn_outcomes, write_played_episodes, write_rollouts_and_samples, write_tokenizer

from stages.annotation.labels import LABEL_SCHEMA, label_rows
from stages.annotation.pairs import PAIR_SCHEMA, pair_rows
from stages.annotation.settings import Annotate
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.params import Params, parse_params
from stages.records.episode import NODE_SCHEMA, write_json, write_table
from stages.reporting.inputs import load_inputs
from stages.reporting.kept import Run, append
from stages.reporting.this_run import this_run


def _measured_spans(stage: str) -> dict[str, Any]:
    """Costs of a stage of 83.4 s in two processes, half of their time in the stage's main work."""
    most = {"curate": "environment", "sft": "training", "rl": "training.forward", "merge": "other"}.get(
        stage.split("@")[0], "engine"
    )
    spans = {"start": 6.0, "environment": 20.0, "engine": 30.0, "training": 12.0, "waiting": 9.0, "files": 2.0, "other": 4.4}
    spans[most] = spans.get(most, 0.0) + 83.4
    counts = {"sampled_tokens": 81_000, "fed_tokens": 402_290, "environment_steps": 14_990}
    return {"peak_tree_bytes": 1_400_000_000, "cores": 2, "spans": spans, "beside": {"environment": 21.0}, "counts": counts}


def _write_earlier_run(root: Path, params: Params) -> None:
    """Write reports/runs.jsonl with one earlier run: PPO instead of GRPO, half the success on search, another machine."""
    now = this_run(load_inputs(root, params))
    values = now.model_dump()
    values["params"]["rl"]["algorithm"] = "ppo"
    values["solved"]["merged"]["search"] = [count // 2 for count in values["solved"]["merged"]["search"]]
    values["success"]["merged"]["search"]["mean"] /= 2
    took = {
        "seconds": 83.4,
        "cpu_seconds": 150.0,
        "peak_bytes": 1_100_000_000,
        "peak_gpu_bytes": 0,
        "machine": "Test CPU, 2 cores",
    }
    values["measured"] = {stage: {**took, "runs": 1, **_measured_spans(stage)} for stage in values["work"]}
    append(root, Run(**{**values, "note": "PPO first", "commit": "0123456789ab"}))


def make_run(root: Path, seed: int = 0) -> Params:
    """Write a complete run below `root`; returns its parameters (also written to params.yaml)."""
    rng = random.Random(seed)
    values = {
        **{"domains": list(DOMAINS), "per_domain": {domain: {} for domain in DOMAINS}},
        **{"annotate": {"tasks": 48}, "report": {"episodes": 12}},
    }
    root.mkdir(parents=True, exist_ok=True)
    (root / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    reports = root / "reports"
    write_json(reports / "evaluation.json", evaluation_report())
    write_sft_reports(reports)
    write_json(reports / "merge.json", merge_report(rng))
    tokenizer = write_tokenizer(root / "data" / "models" / "sft" / "tokenizer.json")
    (reports / "rl").mkdir()
    for domain in DOMAINS:
        base = 0.3 + 0.2 * rng.random()
        pass_at_k = {str(k): 1 - (1 - base) ** (k**0.6) for k in (1, 2, 4)}
        rollout = {"episodes": 96, "success": base, "pass_at_k": pass_at_k, "turns": {"mean": 4.2, "max": 9}}
        write_json(reports / "curate" / f"{domain}.json", curate_report(domain, rng))
        write_json(reports / "rollout" / f"{domain}.json", rollout)
        write_json(reports / "annotate" / f"{domain}.json", annotate_report(rng))
        (reports / "rl" / f"{domain}_history.csv").write_text(history_table(domain, rng), encoding="utf-8")
        write_json(reports / "rl" / f"{domain}.json", {"algorithm": "grpo", "episodes": 2560, "success_last": 0.7})
        nodes = drawn_nodes(domain, rng)
        annotated, settings = root / "data" / "annotated" / domain, Annotate()
        write_table(annotated / "nodes.parquet", NODE_SCHEMA, nodes)
        write_table(annotated / "labels.parquet", LABEL_SCHEMA, label_rows(nodes, settings))
        write_table(annotated / "pairs.parquet", PAIR_SCHEMA, pair_rows(nodes, settings))
        write_rollouts_and_samples(root, domain, rng, tokenizer)
    outcomes = drawn_outcomes(rng)
    write_table(root / "data" / "evaluation" / "rows.parquet", EVALUATION_SCHEMA, outcomes)
    write_played_episodes(root, outcomes, tokenizer)
    params = parse_params(values)
    _write_earlier_run(root, params)
    return params


def add_value_model(root: Path, domain: str) -> Path:
    """Write a random step-value model for a domain of a run; its folder."""
    import torch
    from tiny import make_tiny_model

    from stages.values.settings import HeadParams
    from stages.values.step_value import StepValueModel

    model = StepValueModel(make_tiny_model(512).base_model, HeadParams(loss="mse"))
    torch.nn.init.normal_(model.output.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    folder = root / "data" / "annotated" / domain / "value_model"
    model.save(folder)
    return folder
