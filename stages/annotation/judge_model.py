"""Fits annotate's judge model: pairs of rollouts are labelled by a judge, or annotate's pairs are taken, and a copy of the policy
learns to say which answer is better."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.annotation.fit_models import fitting
from stages.annotation.nodes import path_to
from stages.judging.agreement import against, kappa_below
from stages.judging.contract import Candidate, Cost, Judge, Question, Rubric
from stages.judging.episodes import attributes, candidate, gold_quality, named
from stages.judging.fit_judge import by_principle, fit_judge, measured, verdicts
from stages.judging.local import LocalJudge
from stages.judging.measures import order_measures, verdict
from stages.judging.preferences import (
    JUDGE_PREFERENCE_SCHEMA,
    QUALITY,
    Preference,
    by_principles,
    by_quality,
    from_trees,
    margins_of,
    pairs_of,
)
from stages.judging.principles import Margins, signed
from stages.judging.program import ProgramJudge
from stages.judging.server import ServerJudge
from stages.judging.settings import JudgeModel, LocalParams
from stages.judging.table import judgment_row, write_judgments
from stages.records.episode import Episode, read_episodes, write_table
from stages.records.task import Task, opening
from stages.values.fitting import TaskSplit

if TYPE_CHECKING:
    from stages.agent.policy import Policy
    from stages.environments.protocol import Domain
    from stages.runtime.stage import StageContext

FOLDER = "judge_model"
"""Below data/annotated/<domain>."""


@dataclass
class Labelled:
    """Preferences, and where they come from: the pairs compared, their margins, and rows of the table of judgments."""

    preferences: list[Preference]
    pairs: Sequence[Question] = ()
    margins: Sequence[Margins] = ()
    rows: Sequence[dict[str, Any]] = ()
    gold: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What is known of the episodes: by QUALITY the gold quality, or by each principle the attribute that it names, if the domain
    has it; then by episode."""


def _program(domain: Domain, tasks: Mapping[str, Task], episodes: Sequence[Episode], params: JudgeModel, seed: int) -> Judge:
    """A judge that knows the episodes' qualities, or by principles their attributes."""
    if params.principles is None:
        gold = {one.episode_id: gold_quality(domain, tasks[one.task_id], one) for one in episodes}
        return ProgramJudge(params.program, lambda question, one: gold[one.name], seed)
    known = {one.episode_id: attributes(domain, tasks[one.task_id], one) for one in episodes}
    names = {one.text: one.name for one in params.principles.items}
    section = "annotate.judge_model.principles"

    def perceived(question: Question, one: Candidate) -> float:
        return named(known[one.name], names[question.rubric.principles[0]], section)

    return ProgramJudge(params.program, perceived, seed)


def _judge(context: StageContext, policy: Policy, program: Any, params: JudgeModel) -> Judge:
    if params.labels == "server":
        return ServerJudge(params.server, context.root)
    if params.labels == "policy":
        return LocalJudge(policy, LocalParams(options=params.options), context.params.model.max_length)
    return program()


def _by_judge(
    context: StageContext,
    policy: Policy,
    domain: Domain,
    tasks: Mapping[str, Task],
    prompts: Mapping[str, str],
    params: JudgeModel,
) -> Labelled:
    """Pairs of the rollouts of each task, labelled by a judge."""
    seed = context.params.seed
    episodes = [
        one
        for one in read_episodes(context.data / "rollouts" / str(context.domain) / "episodes.parquet")
        if one.task_id in tasks and one.turns
    ]
    answers: dict[str, list[Candidate]] = {}
    for episode in episodes:
        answers.setdefault(episode.task_id, []).append(candidate(episode))
    pairs = pairs_of(prompts, answers, params, seed)
    judge = _judge(context, policy, lambda: _program(domain, tasks, episodes, params, seed), params)
    try:
        with context.progress("labelling pairs", len(pairs), "pair") as bar:
            began = time.monotonic()
            margins, asked = margins_of(judge, pairs, params.principles)
            seconds = time.monotonic() - began
            judge.keep()
            bar.advance(len(pairs))
    finally:
        judge.close()
    cost = sum((judgment.cost for _, judgment in asked), Cost())
    speed = judge.sent / max(seconds, 1e-9)
    print(f"{context.title}: {cost.calls:,} judge calls, {speed:,.1f} a second, cost {cost.money:.4g}", flush=True)
    if judge.sent:
        context.metric("judge/calls_per_second", speed)
    found = by_quality(pairs, margins) if params.principles is None else by_principles(pairs, margins, params.principles, seed)
    rows = [judgment_row(judge, *one) for one in asked]
    return Labelled(found, pairs, margins, rows, _gold(domain, tasks, episodes, params))


def _gold(
    domain: Domain, tasks: Mapping[str, Task], episodes: Sequence[Episode], params: JudgeModel
) -> dict[str, dict[str, float]]:
    """See `Labelled.gold`."""
    if params.principles is None:
        return {QUALITY: {one.episode_id: gold_quality(domain, tasks[one.task_id], one) for one in episodes}}
    known = {one.episode_id: attributes(domain, tasks[one.task_id], one) for one in episodes}
    named = [item.name for item in params.principles.items if all(item.name in found for found in known.values())]
    return {name: {episode: found[name] for episode, found in known.items()} for name in named}


def _truth(gold: Mapping[str, float], pairs: Sequence[Question]) -> list[list[int | None]]:
    """By pair, which answer has the higher value: 1 the first, -1 the second, 0 neither."""
    return [[verdict(*(gold[one.name] for one in pair.candidates))] for pair in pairs]


def _against_gold(params: JudgeModel, labelled: Labelled, judge: LocalJudge, tasks: set[str]) -> tuple[Any, Any]:
    """Agreement with what is known of the answers: of the labelling judge, and of the model on the held-out `tasks`. By principle
    if there are some, each read alone."""
    assert params.kind != "none"
    held = [pair for pair in labelled.pairs if pair.task_id in tasks]
    texts = {} if params.principles is None else {item.name: item.text for item in params.principles.items}
    labels, model = {}, {}
    for name, gold in labelled.gold.items():
        shown = [replace(pair, rubric=Rubric(principles=(texts[name],))) for pair in held] if texts else held
        labels[name] = against([of.get(name) for of in labelled.margins], _truth(gold, labelled.pairs))
        model[name] = against(verdicts(judge, params.kind, shown), _truth(gold, held))
    return (labels, model) if texts else (labels[QUALITY], model[QUALITY])


def _by_trees(
    prompts: Mapping[str, str], rows: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], seed: int
) -> Labelled:
    """annotate's own pairs: two actions after the same steps."""
    trees: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        trees.setdefault(row["task_id"], []).append(row)
    compared = []
    for pair in pairs:
        tree = trees[pair["task_id"]]
        steps = tuple(tree[node]["action"] for node in path_to(tree, pair["parent"])[1:])
        win, lose = (Candidate(tree[pair[key]]["action"], steps, f"{pair['task_id']}/{pair[key]}") for key in ("win", "lose"))
        compared.append((pair["task_id"], win, lose))
    return Labelled(from_trees(prompts, compared, seed))


def _undecided(labelled: Labelled, agreement: bool) -> float:
    """Share of pairs and principles without a margin on which both orders agree."""
    scores = [signed(pair, 1.0, agreement) for of_pair in labelled.margins for pair in of_pair.values()]
    return sum(score == 0 for score in scores) / max(1, len(scores))


def _report(
    params: JudgeModel, labelled: Labelled, judge: LocalJudge, held: Sequence[Preference], tasks: set[str]
) -> dict[str, Any]:
    """What is known of labels and model; measured on the held-out `tasks`."""
    assert params.kind != "none"
    report: dict[str, Any] = {
        "kind": params.kind,
        "labels": params.labels,
        "version": judge.version,
        "preferences": len(labelled.preferences),
        "held_out": measured(judge, params.kind, held, params.alpha),
    }
    if params.labels != "trees":
        agreement = params.principles is None or params.principles.sign_agreement
        statuses = [row["status"] for row in labelled.rows]
        report["labelling"] = {
            "pairs": len(labelled.pairs),
            "undecided": _undecided(labelled, agreement),
            "calls": sum(row["calls"] for row in labelled.rows),
            "money": sum(row["money"] for row in labelled.rows),
            "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
            **order_measures(labelled.rows),
        }
        report["labelling"]["against_gold"], report["against_gold"] = _against_gold(params, labelled, judge, tasks)
    if params.principles is not None:
        chosen = [place for place, pair in enumerate(labelled.pairs) if pair.task_id in tasks]
        signs = [{name: signed(pair, 1.0) for name, pair in labelled.margins[place].items()} for place in chosen]
        pairs = [labelled.pairs[place] for place in chosen]
        report["principles"] = by_principle(judge, params.kind, pairs, signs, params.principles.items)
    return report


def fit_judge_model(
    context: StageContext,
    policy: Policy,
    domain: Domain,
    tasks: Sequence[Task],
    rows: Sequence[Mapping[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    params: JudgeModel,
    out: Path,
) -> dict[str, Any]:
    """Fit the model of `annotate.judge_model`, write it with its preferences and judgments below `out`, and return its report.

    Raises ValueError if there are too few preferences, for principles that the labelling judge does not know, and for a model
    below `least_kappa`.
    """
    from stages.agent.policy import load_policy, save_policy

    assert params.kind != "none"
    seed, model = context.params.seed, context.params.model
    prompts = {task.task_id: opening(task.prompt, "") for task in tasks}
    by_id = {task.task_id: task for task in tasks}
    if params.labels == "trees":
        labelled = _by_trees(prompts, rows, pairs, seed)
    else:
        labelled = _by_judge(context, policy, domain, by_id, prompts, params)
    found = labelled.preferences
    # Of all tasks with pairs, decided or not: how labels are made does not change which tasks measure the model.
    compared = {pair.task_id for pair in labelled.pairs} or {one.task_id for one in found}
    held_out = TaskSplit.of(compared, params.valid_share, seed).held_out if len(compared) > 1 else compared
    known = [one for one in found if one.task_id not in held_out]
    held = [one for one in found if one.task_id in held_out]
    if not known:
        raise ValueError(
            f"annotate.judge_model finds {len(found)} preferences, and needs some on tasks beside the {len(held_out)} that it "
            f"holds out; raise rollout.tasks or attempts, or with labels: trees annotate.tasks or iterations"
        )
    micro = context.params.resources.tokens_per_batch
    watch = partial(fitting, context, "the judge model", "judge_model")
    judge, fitted = fit_judge(policy, known, params, model.max_length, seed, micro, watch)
    save_policy(judge.model, policy.tokenizer, out / FOLDER)
    write_table(out / "preferences.parquet", JUDGE_PREFERENCE_SCHEMA, (one.row() for one in found))
    if labelled.rows:
        write_judgments(out / "judgments.parquet", labelled.rows)
        context.artifact(out / "judgments.parquet")
    stored = LocalJudge(
        load_policy(out / FOLDER, device=context.params.resources.device), judge.params, model.max_length, judge.logits
    )
    losses = {"steps": fitted.steps, "loss_first": fitted.history[0], "loss_last": fitted.history[-1]}
    report = {**_report(params, labelled, stored, held, set(held_out)), **losses}
    _check_believable(params, report["held_out"])
    return report


def _check_believable(params: JudgeModel, held: Mapping[str, float]) -> None:
    """Raise ValueError if the model agrees less with held-out labels than the section demands."""
    if (kappa := kappa_below(held, params.least_kappa)) is not None:
        raise ValueError(
            f"annotate.judge_model agrees with held-out labels with kappa {kappa:.2f} over {held['pairs']:.0f} pairs, and "
            f"least_kappa is {params.least_kappa}: give it more rollouts (rollout.tasks, attempts), pairs or epochs, or lower it"
        )
