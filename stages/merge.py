"""merge: the specialists of all domains become one model, and their linear average another, as a baseline.

data/models/rl/<domain> of every domain, in order -> data/models/merged (merge.method), data/models/merged_linear and
reports/merge.json (method, resolved parameters, diagnostics of the task vectors). A specialist may be a LoRA adapter, whose
weights are merged into the base's tensor by tensor as they are read. With one domain, the merge is that specialist.

Two methods train the merged model instead: distil on the specialists' episodes, played in data/curated/<domain>, and joint_rl on
its own, as the stage rl does on one domain, from that stage's inputs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages import params
from stages.runtime.files import atomic_text
from stages.runtime.stage import StageContext, stage_run
from stages.runtime.unlisted_domains import keep_only
from stages.tracking import open_tracker

if TYPE_CHECKING:
    from stages.merging.contract import MergeParams
    from stages.merging.streaming import MergeResult


def base_folder(context: StageContext) -> Path:
    """The model that task vectors are relative to: the SFT policy or the base model."""
    if context.params.merge.base == "sft":
        return context.data / "models" / "sft"
    path = context.params.model.path
    if not path.startswith("hub:"):
        return context.root / path
    from stages.agent.policy import load_policy

    return load_policy(path).folder


def merge_into(context: StageContext, name: str, method: str, base: Path, params: MergeParams) -> MergeResult:
    """Merge the specialists into data/models/<name>."""
    from stages.merging.streaming import merge_folders

    merge = context.params.merge
    return merge_folders(
        method,
        [context.data / "models" / "rl" / domain for domain in context.params.domains],
        base,
        context.data / "models" / name,
        params,
        seed=context.params.seed,
        out_dtype=merge.out_dtype,
        shard_bytes=merge.shard_bytes,
        workers=context.params.resources.workers,
        progress=context.progress,
    )


def remarks(method: str, params: MergeParams, totals: Mapping[str, Any] | None, diagnostics: dict[str, Any]) -> dict[str, Any]:
    """The method's remarks on its passes for statistics, for the report; its warnings go to standard error."""
    from stages.merging.registry import get_merger

    merger = get_merger(method)
    for warning in merger.warnings(params, diagnostics):
        print(f"merge: {warning}", file=sys.stderr)
    return merger.scan_report(totals, params, list(diagnostics["models"]))


def train(context: StageContext, method: str, base: Path, settings: Any) -> dict[str, Any]:
    """Train data/models/merged by a method that trains; its part of the report."""
    from stages.training import distillation
    from stages.training.rl import joint

    trainers = {"distil": distillation.train, "joint_rl": joint.train}
    return trainers[method](context, base, settings)


def prune(context: StageContext) -> None:
    """Remove what unlisted domains left in the inputs."""
    keep_only(context.root, context.params.domains, ["data/curated", "data/models/rl"])


def run(context: StageContext) -> None:
    from stages.merging.diagnostics import measure, relative_distance
    from stages.merging.registry import bind, get_merger, used_parameters

    merge, domains = context.params.merge, context.params.domains
    base = base_folder(context)
    # The baseline is the plain average: other methods' settings do not apply to it.
    average = bind("linear", merge.weights_of(domains))
    method, params = (merge.method, merge.bind(domains)) if len(domains) > 1 else ("linear", average)
    if method != merge.method:
        print(f"merge: {domains[0]} is the only domain, so merge.method {merge.method} is not used", file=sys.stderr)
    parameters = used_parameters(method, params)
    context.log_params({"method": method, "base": merge.base, **parameters})
    merger, linear_result = get_merger(method), merge_into(context, "merged_linear", "linear", base, average)
    trained, totals = {}, None
    if merger.trains:
        trained = train(context, method, base, params.settings)
    else:
        totals = merge_into(context, "merged", method, base, params).totals
    models = [context.data / "models" / "rl" / domain for domain in domains]
    diagnostics = measure(domains, models, base, merger.change_thresholds(params, totals), context.progress)
    changed = {domain: diagnostics["models"][domain]["changed_fraction"] for domain in domains}
    merged, linear = context.data / "models" / "merged", context.data / "models" / "merged_linear"
    report = {
        "method": method,
        "requested": merge.method,
        "base": merge.base,
        "domains": domains,
        "parameters": parameters,
        "linear_parameters": used_parameters("linear", average),
        "tensors": linear_result.tensors,
        "entries": linear_result.entries,
        "scan": remarks(method, params, totals, diagnostics),
        **trained,
        "distance_to_linear": relative_distance(merged, linear, base),
        "diagnostics": diagnostics,
    }
    path = context.reports / "merge.json"
    atomic_text(path, json.dumps(report, indent=2, sort_keys=True) + "\n")
    for domain in domains:
        context.metric(f"changed_fraction.{domain}", changed[domain])
    for pair in diagnostics["pairs"]:
        context.metric(f"jaccard.{pair['a']}.{pair['b']}", pair["jaccard"] or 0.0)
    context.artifact(path)


if __name__ == "__main__":
    raise SystemExit(stage_run("merge", run, params, open_tracker, prune=prune))
