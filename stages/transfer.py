"""transfer: the frozen panel of a domain that nothing is trained on (evaluate.transfer).

data/raw/<domain>.jsonl, or the domain's recipes -> data/transfer/<domain> (panel.json, worlds, and tasks.parquet with test tasks
alone) and reports/transfer/<domain>.json.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from stages import params
from stages.curation import messages
from stages.curation.assemble import assemble
from stages.curation.panel import make_panel, write_panel
from stages.curation.source import read_source
from stages.environments.registry import open_domain
from stages.records.episode import write_json, write_tasks
from stages.records.task import Split
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker


def run(context: StageContext) -> None:
    assert context.domain is not None
    params, name, folder = context.params, context.domain, context.data / "transfer" / context.domain
    curate = params.section("curate", name)
    domain = open_domain(name, params.per_domain[name].environment)
    sizes: dict[Split, int] = {"train": 0, "valid": 0, "test": curate.test}
    report = context.reports / "transfer" / f"{name}.json"
    warn = partial(messages.warn, f"transfer@{name}", report=f"reports/transfer/{name}.json")

    source = read_source(domain, context.data / "raw" / f"{name}.jsonl", sizes, params.seed, curate.seeds)
    warn(source.warnings)
    bar = partial(context.progress, "building", unit="task")
    made = assemble(domain, source.records, sizes, folder / "worlds", params.resources.workers, params.model.max_length, bar)
    rejections = source.rejections + made.rejections
    warn([f"rejected {rejection}" for rejection in rejections])
    if not made.tasks:
        raise ValueError(f"{source.labels['test']} gives no usable test task; see the rejections above")
    if len(made.tasks) < curate.test:
        warn([f"{source.labels['test']} gives {len(made.tasks)} usable test tasks of {curate.test}"])

    panel = make_panel(domain, made.tasks, folder / "worlds")
    write_tasks(folder / "tasks.parquet", made.tasks)
    write_panel(folder / "panel.json", panel)
    rejected = dict(sorted(Counter(rejection.reason for rejection in rejections).items()))
    counts = {"panel": panel.hash, "tasks": len(made.tasks), "rejected": rejected}
    write_json(report, {**source.summary(made.unused, []), **counts})
    context.metric("transfer/tasks", len(made.tasks))
    context.artifact(report)


if __name__ == "__main__":
    raise SystemExit(stage_run("transfer", run, params, open_tracker, per_domain=True))
