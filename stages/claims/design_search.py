"""Searches over agent designs, replayed on a table of all designs' scores: a run of lane designs.

`python -m stages.claims.design_search --settings FILE --table`, in a workspace where everything before rl is done, evaluates
every design of `design.space` once with the SFT policy, on validation tasks and on tasks of the frozen panel, as the stage
evaluate does. With `--result FILE` one search, configured by FILE's section `design`, reads its scores from the table: it sees
only the validation scores; its picks are scored on the panel.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import yaml

from stages.agent.environment_pool import processes_beside
from stages.claims.design_metrics import AFTER, METRICS
from stages.curation.panel import Panel
from stages.designs.evaluations import DesignScore, summarise
from stages.designs.search import Search
from stages.designs.session import best_so_far
from stages.designs.settings import SearchParams, parse_search
from stages.designs.space import Design, Space
from stages.designs.tree import Node
from stages.designs.value_model import FittedValueModel, describe
from stages.engine.engine import EngineSettings, Sampling
from stages.evaluation.panels import BestOf, Outcome, Settings, jobs_of, load_panels, play
from stages.records.episode import read_json, write_json
from stages.records.sections import deep_merge, params_hash
from stages.runtime.command import command
from stages.runtime.cores import available_cores
from stages.runtime.parent import die_with_parent
from stages.runtime.validation import ParamsError
from stages.runtime.workers import quiet_environment, worker_pool
from stages.seeding import permutation

PANEL_TASKS = 64
ENOUGH = 0.95


def play_design(folder: str, values: Mapping[str, Any], panels: Mapping[str, Panel], models: str) -> list[Outcome]:
    """One design's episodes on each of `panels`: the policy in `folder`, configured by `values` (params.yaml with the design)."""
    params = parse_search(values)
    name, _, by = (params.evaluate.models or ["sft"])[0].partition("+")
    if name != "sft":
        raise ParamsError(f"lane designs plays the SFT policy only, but design.space.model lists {name}; set it to [sft]")
    if by == "value":
        raise ParamsError("lane designs runs before rl, which learns token values; remove value from design.space.choose")
    best_of = BestOf.of(by, params.evaluate, Path(models)) if by else None
    settings = Settings(
        seed=params.seed,
        sampling=Sampling(**params.evaluate.sampling.model_dump()),
        engine=EngineSettings.of(params.resources, params.model.max_length, params.model.thinking),
        scaffold=params.evaluate.scaffold,
        environment_processes=processes_beside(params.resources),
    )
    curated = Path("data/curated")
    return [
        play(job, settings)
        for split, panel in panels.items()
        for job in jobs_of(Path(folder), split, {panel.domain: panel}, curated, params.design.attempts, 10**9, best_of)
    ]


def panels_of(params: SearchParams) -> dict[str, Panel]:
    """The tasks that searches use, `valid`, and those that score their picks, `test`: PANEL_TASKS of the panel."""
    (name,) = params.domains
    valid = load_panels(Path("data/curated"), [name], "valid")[name]
    test = load_panels(Path("data/curated"), [name])[name]
    some = permutation(test.tasks, 0, "design_search.tasks")[:PANEL_TASKS]
    tasks = tuple(sorted(some, key=lambda task: task.task_id))
    return {"valid": valid, "test": Panel(test.domain, tasks, test.environment, test.worlds)}


def table_path(params: SearchParams, space: Space) -> Path:
    shape = params.model_dump(mode="json", include={"seed", "evaluate"})
    shape |= {"options": tuple(space.factor_options.values()), "attempts": params.design.attempts}
    return Path(f"designs-{params_hash(shape)}.json")


def start_worker() -> None:
    """Of the pool of processes that play designs, one thread each."""
    quiet_environment(1)
    import torch

    torch.set_num_threads(1)


def make_table(values: Mapping[str, Any], params: SearchParams, workers: int) -> dict[str, Any]:
    """Design name -> {valid, test: score}; written after each design, so that an interrupted table resumes."""
    space = Space.of(params)
    path = table_path(params, space)
    table: dict[str, Any] = read_json(path) if path.exists() else {}
    left = {space.name(design): design for design in space.all() if space.name(design) not in table}
    if not left:
        return table
    panels = panels_of(params)
    with worker_pool(workers, start_worker) as pool:
        futures = {
            pool.submit(play_design, "data/models/sft", deep_merge(values, space.overrides(design)), panels, "data/models"): name
            for name, design in left.items()
        }
        for future in as_completed(futures):
            outcomes = dict(zip(panels, future.result(), strict=True))
            found = {split: summarise(one.rows, params.design.metric).__dict__ for split, one in outcomes.items()}
            table[futures[future]] = found
            write_json(path, table)
    return table


def run_search(search: Search, scores: Mapping[Design, DesignScore]) -> list[Node]:
    """The nodes of one search, scored by a table."""
    nodes: list[Node] = []
    while (proposal := search.propose(nodes)) is not None:
        nodes.append(Node(**proposal.__dict__, **scores[proposal.design].__dict__))
    return nodes


def score_search(
    search: Search, nodes: Sequence[Node], valid: Mapping[Design, DesignScore], test: Mapping[Design, DesignScore]
) -> dict[str, float]:
    """METRICS of a search that has evaluated `nodes`."""
    best = best_so_far([node.score for node in nodes])
    optimum, most = max(one.score for one in valid.values()), max(one.score for one in test.values())
    reached = [count for count, score in enumerate(best, start=1) if score >= ENOUGH * optimum]
    found: dict[str, float] = {
        "area": sum(best) / len(best),
        "to_95": float(reached[0] if reached else len(nodes) + 1),
        "rank_correlation": 0.0,
    }
    for count in AFTER:
        some = nodes[:count]
        pick = max(some, key=lambda node: node.score).design
        found |= {f"best.{count}": best[len(some) - 1], f"found.{count}": test[pick].score}
        found[f"regret.{count}"] = most - test[pick].score
    if search.value_model is not None:
        from scipy.stats import spearmanr

        evaluated = {node.design for node in nodes}
        unseen = [design for design in valid if design not in evaluated]
        search.value_model.fit(nodes)
        if len(unseen) > 2:
            correlation = spearmanr(search.value_model.predict(unseen)[0], [valid[design].score for design in unseen]).statistic
            found["rank_correlation"] = float(correlation) if correlation == correlation else 0.0
    return {name: round(found[name], 6) for name in METRICS}


def replay(params: SearchParams, table: Mapping[str, Any], description: Mapping[str, float]) -> dict[str, float]:
    """METRICS of the search that `params.design` configures."""
    space, settings = Space.of(params), params.design
    (domain,) = params.domains
    scores = {
        split: {design: DesignScore(**table[space.name(design)][split]) for design in space.all()} for split in ("valid", "test")
    }
    model = FittedValueModel(space, {domain: description}, settings.value_model) if settings.method == "agentswift" else None
    search = Search(space, settings, settings.seed or 0, model)
    return score_search(search, run_search(search, scores["valid"]), scores["valid"], scores["test"])


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.claims.design_search", description=(__doc__ or "").strip())
    parser.add_argument("--settings", type=Path, required=True, help="the run's params.yaml")
    parser.add_argument("--table", action="store_true", help="evaluate all designs that the table lacks")
    parser.add_argument("--result", type=Path, help="where a search's metrics are written")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a search (default: 1)")
    parser.add_argument("--workers", type=int, default=available_cores(), help="worker processes (default: one per core)")
    options = parser.parse_args()
    die_with_parent()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    try:
        values = yaml.safe_load(options.settings.read_text(encoding="utf-8"))
        params = parse_search(values, str(options.settings))
        if options.table:
            make_table(values, params, options.workers)
        if options.result:
            path = table_path(params, Space.of(params))
            if not path.exists():
                raise ParamsError(f"{path} does not exist; create it with --table")
            panel = panels_of(params)["valid"]
            metrics = replay(params, read_json(path), describe(panel.tasks, int(panel.environment["max_turns"])))
            write_json(options.result, {**{f"designs.{name}": one for name, one in metrics.items()}, "environment_steps": 0})
    except ParamsError as error:
        print(f"design search: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
