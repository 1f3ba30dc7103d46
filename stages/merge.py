"""merge: the specialists of all domains become one model; beside it, the linear average to compare with.

data/models/rl/<domain> for every domain, in their order -> data/models/merged (merge.method), data/models/merged_linear,
reports/merge.json (method, what it resolved to, diagnostics of the task vectors). A specialist may be an adapter folder: its
tensors are made from base and adapter one by one while they are read. With one domain the merge is that specialist.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.domains import keep_only
from stages.files import atomic_text
from stages.runtime import StageContext, stage_run

if TYPE_CHECKING:
    from stages.merging.settings import MergeSettings
    from stages.merging.streaming import MergeResult


HARDLY_ANY = 0.01
"""Share of changed entries below which a merge is not worth the name."""


def base_folder(context: StageContext) -> Path:
    """The model deltas are taken against: the SFT policy, or the base model itself."""
    if context.params.merge.base == "sft":
        return context.data / "models" / "sft"
    path = context.params.model.path
    if not path.startswith("hub:"):
        return context.root / path
    from stages.agent.policy import load_policy

    return load_policy(path).folder


def merge_into(context: StageContext, name: str, method: str, base: Path, settings: MergeSettings) -> MergeResult:
    """Merge the specialists into data/models/<name>."""
    from stages.merging.streaming import merge_folders

    merge = context.params.merge
    return merge_folders(
        method,
        [context.data / "models" / "rl" / domain for domain in context.params.domains],
        base,
        context.data / "models" / name,
        settings,
        seed=context.params.seed,
        out_dtype=merge.out_dtype,
        shard_bytes=merge.shard_bytes,
        progress=context.progress,
    )


def scan_summary(method: str, result: MergeResult, settings: MergeSettings, domains: list[str]) -> dict[str, Any]:
    """What the first pass found, as far as it says something to people: RAM+'s counts and enlargements per domain."""
    if method != "ram_plus" or result.totals is None:
        return {}
    from stages.merging.ram import enlargement

    shared, unique = result.totals["shared"], result.totals["unique"]
    scale = enlargement(shared, unique, settings.ram.r, settings.ram.alpha)
    return {
        domain: {"shared": int(shared[i]), "unique": int(unique[i]), "enlargement": scale[i]} for i, domain in enumerate(domains)
    }


def warn_of_empty_deltas(method: str, eps: float, changed: dict[str, float | None]) -> None:
    """RAM takes changes of at most eps for none. Where that is nearly all that a specialist learned, say so."""
    if not method.startswith("ram"):
        return
    for domain, share in changed.items():
        if share is not None and share < HARDLY_ANY:
            print(
                f"merge: merge.ram.eps {eps:g} counts {share:.1%} of rl@{domain}'s weights as changed, so the merged model takes "
                "next to nothing from it; lower merge.ram.eps",
                file=sys.stderr,
            )


def run(context: StageContext) -> None:
    from stages.merging.diagnostics import measure, relative_distance
    from stages.merging.registry import used_parameters
    from stages.merging.settings import MergeSettings

    merge, domains = context.params.merge, context.params.domains
    keep_only(context.root, domains, ["data/models/rl"])
    base = base_folder(context)
    settings = MergeSettings.of(merge, domains)
    # What tunes another method (a factor on deltas, a missing division) means nothing to the average it is compared with.
    average = replace(settings, lam=1.0, normalize=None)
    method = merge.method
    if len(domains) == 1:
        method, settings = "linear", average
    parameters = used_parameters(method, settings)
    context.log_params({"method": method, "base": merge.base, **parameters})
    result = merge_into(context, "merged", method, base, settings)
    merge_into(context, "merged_linear", "linear", base, average)
    models = [context.data / "models" / "rl" / domain for domain in domains]
    diagnostics = measure(domains, models, base, merge.ram.eps, context.progress)
    changed = {domain: diagnostics["models"][domain]["changed_fraction"] for domain in domains}
    warn_of_empty_deltas(method, merge.ram.eps, changed)
    merged, linear = context.data / "models" / "merged", context.data / "models" / "merged_linear"
    report = {
        "method": method,
        "requested": merge.method,
        "base": merge.base,
        "domains": domains,
        "parameters": parameters,
        "linear_parameters": used_parameters("linear", average),
        "tensors": result.tensors,
        "entries": result.entries,
        "scan": scan_summary(method, result, settings, domains),
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


def main() -> int:
    return stage_run("merge", run)


if __name__ == "__main__":
    raise SystemExit(main())
