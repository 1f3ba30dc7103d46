"""Fits annotate's models and reports on them: step-value models and Q-models to trees, progress estimators to rollouts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stages.annotation.derived import value_head, value_range
from stages.annotation.settings import Annotate
from stages.engine.attention import use_attention
from stages.records.episode import read_episodes, read_rows
from stages.runtime.spans import span

if TYPE_CHECKING:
    from stages.agent.policy import Policy
    from stages.annotation.decisions import Decision
    from stages.runtime.stage import StageContext
    from stages.values.fitting import Example, FitReport, TaskSplit
    from stages.values.progress import ProgressEstimator
    from stages.values.q_model import PreferenceQ, RegressionQ
    from stages.values.step_value import Reading, StepValueModel, ValuePath


@contextmanager
def fitting(context: StageContext, what: str, name: str, tokens: float) -> Iterator[Callable[[int, int, float], None]]:
    """An `on_step` for `stages.values.fitting.fit` that shows progress over about `tokens` tokens and logs `<name>/loss`."""
    with span("training"), context.progress(f"fitting {what}", round(tokens), "token") as bar:

        def on_step(step: int, tokens: int, loss: float) -> None:
            bar.advance(tokens, f"loss {loss:.4f}")
            context.metric(f"{name}/loss", loss, step)

        yield on_step


def _fit_metrics(fitted: FitReport, train: Sequence[Example], held_out: Sequence[Example]) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(fitted).items() if name != "history"},
        "loss_first": fitted.history[0],
        "loss_last": fitted.history[-1],
        "train": {"tasks": len({one.task_id for one in train}), "examples": len(train)},
        "held_out_tasks": len({one.task_id for one in held_out}),
    }


def rollout_paths(context: StageContext, params: Annotate) -> list[ValuePath]:
    """What `annotate.value_model` learns from the stage rollout's episodes; nothing if it is not to."""
    from stages.annotation.leaf_values import episode_paths

    if not params.value_model.rollouts or params.labels.q != "rollout":
        return []
    return episode_paths(read_rows(context.data / "rollouts" / str(context.domain) / "episodes.parquet"), params.gamma)


def value_model(context: StageContext, policy: Policy, params: Annotate) -> StepValueModel:
    """An untrained step-value model on a copy of the policy's backbone."""
    from stages.values.step_value import StepValueModel

    backbone = copy.deepcopy(policy.model.base_model).float()
    use_attention(backbone, "sdpa")  # a third faster than the engine's; the saved model loads with it, too
    model = StepValueModel(backbone, value_head(params), params.value_model.hidden)
    model.to(context.params.resources.device)
    return model


def value_data(
    rows: Sequence[Mapping[str, Any]], episodes: Sequence[ValuePath], params: Annotate, seed: int
) -> tuple[list[ValuePath], list[ValuePath], list[ValuePath], TaskSplit]:
    """Paths of the training tasks' trees, of the held-out tasks' trees, those of `episodes` that are not of held-out tasks, and
    the split of the trees' tasks."""
    from stages.annotation.paths import value_paths
    from stages.values.fitting import TaskSplit

    paths = value_paths(rows, params)
    split = TaskSplit.of((path.task_id for path in paths), params.value_model.valid_share, seed)
    train, held_out = split.parts(paths)
    return train, held_out, split.with_tasks(path.task_id for path in episodes).parts(episodes)[0], split


def fit_value_model(
    context: StageContext,
    policy: Policy,
    rows: Sequence[Mapping[str, Any]],
    episodes: Sequence[ValuePath],
    params: Annotate,
    seed: int,
    read: Reading | None = None,
) -> tuple[StepValueModel, TaskSplit, dict[str, Any]]:
    """The step-value model fitted on the training tasks' trees (`rows`) and `episodes`, the split of the trees' tasks into
    training and held-out ones, and the report with the calibration on the trees of the latter. read: in place of
    `step_value.read_states`."""
    from stages.annotation.calibration import calibration
    from stages.annotation.paths import mean_value
    from stages.values.step_value import fit, predict, read_states

    micro = context.params.resources.tokens_per_batch
    train, held_out, played, split = value_data(rows, episodes, params, seed)
    model = value_model(context, policy, params)
    baseline = mean_value(train)
    epochs = params.value_model.epochs if params.value_model.trains == "all" else 1.0
    tokens = epochs * sum(len(path.token_ids) for path in (*train, *played))
    with fitting(context, "values", "value_model", tokens) as on_step:
        fitted = fit(model, [*train, *played], params.value_model, seed, micro, on_step, read or read_states)
    metrics = {
        "train": {
            "tasks": len({path.task_id for path in train}),
            "paths": len(train),
            "mean_value": baseline,
            "rollouts": len(played),
        },
        **({"epochs": fitted.epochs} if params.value_model.hidden else {"l2": fitted.l2}),
        "steps": fitted.steps,
        "tokens": fitted.tokens,
        "loss_first": fitted.history[0],
        "loss_last": fitted.history[-1],
        "clamped": fitted.clamped,
        "held_out_tasks": len({path.task_id for path in held_out}),
        "calibration": calibration(*predict(model, held_out, micro), baseline, value_range(params)),
    }
    return model, split, metrics


def fit_q_model(
    context: StageContext,
    policy: Policy,
    values: StepValueModel,
    rows: Sequence[Mapping[str, Any]],
    pairs: Sequence[Mapping[str, Any]],
    params: Annotate,
    split: TaskSplit,
) -> tuple[PreferenceQ | RegressionQ, dict[str, Any]]:
    """The Q-model of `annotate.q_model`, fitted on the trees (`rows` and their `pairs`) of the step-value model's training tasks,
    and its report, with its ranking accuracy on the held-out tasks. Raises ValueError if the trees give no training data."""
    from stages.annotation.decisions import sibling_decisions, step_pairs, trajectory_pairs
    from stages.annotation.q_fitting import disagreements, evaluate, fit_preferences, fit_regression
    from stages.values.q_model import RegressionQ

    q, seed, micro = params.q_model, context.params.seed, context.params.resources.tokens_per_batch
    siblings = sibling_decisions(rows, params)
    train_trees, held_out = split.parts(siblings)
    train_tasks = {decision.task_id for decision in train_trees}
    paired: dict[str, list[Decision]] = {"step_dpo": step_pairs(rows, pairs), "trajectory_dpo": trajectory_pairs(rows, params)}
    train = [decision for decision in paired.get(q.kind, siblings) if decision.task_id in train_tasks]
    if not train:
        raise ValueError(
            f"annotate.q_model.kind: {q.kind} finds nothing to learn from in the trees of {len(train_tasks)} tasks; raise "
            f"annotate.tasks or iterations, or lower annotate.pairs.min_margin"
        )
    tokens = q.epochs * sum(decision.rows * decision.width for decision in train)
    with fitting(context, "the Q-model", "q_model", tokens) as on_step:
        model: PreferenceQ | RegressionQ
        if q.kind == "regression":
            backbone = values.backbone if q.init == "value_model" else policy.model.base_model
            model, fitted = fit_regression(backbone, train, q, seed, micro, on_step)
        else:
            model, fitted = fit_preferences(policy.model, train, q, seed, micro, on_step)
    ranking = evaluate(model, held_out, params.pairs.min_margin)
    if q.ensemble is not None:
        assert isinstance(model, RegressionQ)
        ranking["disagreement"], ranking["disagreement_in_training"] = (disagreements(model, one) for one in (held_out, train))
    return model, {"kind": q.kind, **_fit_metrics(fitted, train, held_out), "held_out": ranking}


def fit_progress(
    context: StageContext, policy: Policy, params: Annotate, split: TaskSplit
) -> tuple[ProgressEstimator, dict[str, Any]]:
    """The progress estimator, fitted on the rollouts of all tasks except those that `split` holds out and an equal share of the
    tasks without a tree, and its report, with its errors on the held-out tasks."""
    from stages.values import progress

    assert context.domain is not None
    seed, micro = context.params.seed, context.params.resources.tokens_per_batch
    episodes = read_episodes(context.data / "rollouts" / context.domain / "episodes.parquet")
    rollouts = [progress.Rollout.of(episode) for episode in episodes if episode.turns]
    train, held_out = split.with_tasks(one.task_id for one in rollouts).parts(rollouts)
    if not train or not held_out:
        raise ValueError(
            f"the progress estimator has {len(train)} episodes to train on and {len(held_out)} held out; "
            f"raise rollout.tasks or annotate.value_model.valid_share"
        )
    mean = sum(one.reward for one in train) / len(train)
    with fitting(context, "progress", "progress", params.progress.epochs * sum(one.width for one in train)) as on_step:
        model, fitted = progress.fit_progress(policy.model.base_model, train, params.progress, seed, micro, on_step)
    metrics = {**_fit_metrics(fitted, train, held_out), "mean_return": mean, "without_turns": len(episodes) - len(rollouts)}
    return model, {"kind": params.progress.kind, **metrics, "held_out": progress.evaluate(model, held_out, mean, micro)}
