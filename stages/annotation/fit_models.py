"""What annotate fits beside the step-value model, and what it reports of that: Q-models to trees, progress estimators to
rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stages.annotation.settings import Annotate
from stages.records.episode import read_episodes

if TYPE_CHECKING:
    from stages.agent.policy import Policy
    from stages.annotation.decisions import Decision
    from stages.runtime.stage import StageContext
    from stages.values.fitting import Example, FitReport, TaskSplit
    from stages.values.progress import ProgressEstimator
    from stages.values.q_model import PreferenceQ, RegressionQ
    from stages.values.step_value import StepValueModel


def _told(fitted: FitReport, train: Sequence[Example], held_out: Sequence[Example]) -> dict[str, Any]:
    """The report's lines about a fit."""
    numbers = {name: value for name, value in asdict(fitted).items() if name != "history"}
    return {
        **numbers,
        "loss_first": fitted.history[0],
        "loss_last": fitted.history[-1],
        "train": {"tasks": len({one.task_id for one in train}), "examples": len(train)},
        "held_out_tasks": len({one.task_id for one in held_out}),
    }


def fit_q_model(
    context: StageContext,
    policy: Policy,
    values: StepValueModel,
    rows: Sequence[Mapping[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    params: Annotate,
    split: TaskSplit,
) -> tuple[PreferenceQ | RegressionQ, dict[str, Any]]:
    """The Q-model that `annotate.q_model` names, fitted on the trees (`rows` and their `pairs`) of the tasks that the step-value
    model learnt from, and how well it orders the actions of those that are held out from both. Raises ValueError if the trees
    hold nothing to learn from."""
    from stages.annotation.decisions import sibling_decisions, step_pairs, trajectory_pairs
    from stages.annotation.q_fitting import evaluate, fit_preferences, fit_regression

    q, seed, micro = params.q_model, context.params.seed, context.params.resources.tokens_per_batch
    siblings = sibling_decisions(rows, params)
    train_trees, held_out = split.parts(siblings)
    kept = {decision.task_id for decision in train_trees}
    made: dict[str, list[Decision]] = {"step_dpo": step_pairs(rows, pairs), "trajectory_dpo": trajectory_pairs(rows, params)}
    train = [decision for decision in made.get(q.kind, siblings) if decision.task_id in kept]
    if not train:
        raise ValueError(
            f"annotate.q_model.kind: {q.kind} finds nothing to learn from in the trees of {len(kept)} tasks; raise "
            f"annotate.tasks or iterations, or lower annotate.pairs.min_margin"
        )
    total = round(q.epochs * sum(decision.rows * decision.width for decision in train))
    with context.progress("fitting the Q-model", total, "token") as bar:

        def on_step(step: int, tokens: int, loss: float) -> None:
            bar.advance(tokens, f"loss {loss:.4f}")
            context.metric("q_model/loss", loss, step)

        model: PreferenceQ | RegressionQ
        if q.kind == "regression":
            backbone = values.backbone if q.init == "value_model" else policy.model.base_model
            model, fitted = fit_regression(backbone, train, q, seed, micro, on_step)
        else:
            model, fitted = fit_preferences(policy.model, train, q, seed, micro, on_step)
    judged = evaluate(model, held_out, params.pairs.min_margin)
    return model, {"kind": q.kind, **_told(fitted, train, held_out), "held_out": judged}


def fit_progress(
    context: StageContext, policy: Policy, params: Annotate, split: TaskSplit
) -> tuple[ProgressEstimator, dict[str, Any]]:
    """The progress estimator, fitted on the rollouts of all tasks but those that `split` holds out and as large a share of the
    tasks without a tree, and how well contributions add up to the returns of these."""
    from stages.values import progress

    assert context.domain is not None
    seed, micro = context.params.seed, context.params.resources.tokens_per_batch
    episodes = read_episodes(context.data / "rollouts" / context.domain / "episodes.parquet")
    rollouts = [progress.Rollout.of(episode) for episode in episodes if episode.turns]
    train, held_out = split.with_tasks(one.task_id for one in rollouts).parts(rollouts)
    if not train or not held_out:
        raise ValueError(
            f"the progress estimator has rollouts of {len(train)} episodes to learn from and {len(held_out)} to be judged by; "
            f"raise rollout.tasks or annotate.value_model.valid_share"
        )
    mean = sum(one.reward for one in train) / len(train)
    total = round(params.progress.epochs * sum(one.width for one in train))
    with context.progress("fitting progress", total, "token") as bar:

        def on_step(step: int, tokens: int, loss: float) -> None:
            bar.advance(tokens, f"loss {loss:.4f}")
            context.metric("progress/loss", loss, step)

        model, fitted = progress.fit_progress(policy.model.base_model, train, params.progress, seed, micro, on_step)
    told = {**_told(fitted, train, held_out), "mean_return": mean, "without_turns": len(episodes) - len(rollouts)}
    return model, {"kind": params.progress.kind, **told, "held_out": progress.evaluate(model, held_out, mean, micro)}
