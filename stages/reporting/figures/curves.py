"""Learning curves of supervised fine-tuning and of reinforcement learning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.reporting.inputs import History
from stages.reporting.style import CARD, colour, domain_line, legend_above, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RL_PANELS: tuple[tuple[str, str, str], ...] = (
    ("reward_mean", "Mean reward of an episode", "Mean return of the step's episodes."),
    ("kl", "KL to the reference, nats per token", "How far the policy has moved from the fine-tuned model it started from."),
    ("entropy", "Policy entropy, nats per token", "How undecided the policy is. A fall to zero would end exploration."),
    ("dead_groups", "Groups without signal", "Groups whose episodes all earned the same: nothing to tell better from worse."),
    ("clip_fraction", "Clipped tokens, share", "Tokens whose probability had moved as far as one step allows."),
    ("grad_norm", "Gradient norm", "Norm of the gradient before clipping."),
    ("loss", "Policy loss", "The surrogate loss. Its level means little; jumps would."),
    ("td_error", "Critic's TD error", "Mean squared difference of Q from its bootstrapped target, before each update."),
    ("q_correlation", "Correlation of Q and return", "Of the critic's Q of turns with the discounted rewards that followed."),
    ("turns", "Turns per episode", "Actions the policy takes in an episode."),
    ("pair_accuracy", "Pairs ranked right, share", "Stored pairs whose winner the policy prefers, by the loss's own measure."),
    ("margin", "Margin of the winner, nats", "By how much more the winner is preferred than the loser."),
    ("winner_logprob", "Winner, nats per token", "Mean log-probability of winning continuations. A fall is unlearning."),
    ("loser_logprob", "Loser, nats per token", "Mean log-probability of losing continuations."),
    (
        "value_td",
        "Squared error of the value network",
        "Its temporal difference while it learns alone. It should flatten.",
    ),
    (
        "td",
        "Squared error of Q",
        "Temporal difference, the policy learning, to the value of the frozen policy's next token.",
    ),
    ("ground_truth_nll", "Ground truth, nats per token", "Negative log-probability of the solutions that are known to be right."),
    ("truncated", "Episodes cut off, share", "Episodes that a limit ended: turns, context or length."),
    ("tokens", "Tokens per episode", "Length of an episode in tokens."),
)
"""Column of the rl history, title of its panel, caption."""

SMOOTHING = 5


def finite(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points whose value is a finite number."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], window: int = SMOOTHING) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _steps(history: History) -> list[float]:
    length = len(next(iter(history.values())))
    return list(history.get("step", [float(index) for index in range(length)]))


def sft_loss(history: History, best_step: float | None = None) -> Figure:
    """Training and validation loss (nats per policy token) over optimiser steps; the kept checkpoint is marked."""
    figure, axes = new_figure(CARD)
    steps = _steps(history)
    if "train_loss" in history:
        x, y = finite(steps, history["train_loss"])
        axes.plot(x, y, color=colour("base"), linewidth=1.2, label="training")
    if "valid_loss" in history:
        x, y = finite(steps, history["valid_loss"])
        axes.plot(x, y, color=colour("sft"), marker="o", label="validation")
        if best_step is None and y:
            best_step = x[y.index(min(y))]
        if best_step in x:
            axes.plot(
                [best_step], [y[x.index(best_step)]], "o", markersize=9, markerfacecolor="none", color=colour("ink"), label="kept"
            )
    axes.set_xlabel("optimiser step")
    axes.set_title("Loss, nats per token")
    axes.set_ylim(bottom=0)
    legend_above(axes)
    return figure


def sft_rate(history: History) -> Figure:
    """Learning rate over optimiser steps."""
    figure, axes = new_figure(CARD)
    x, y = finite(_steps(history), history["lr"])
    axes.plot(x, y, color=colour("sft"))
    axes.set_xlabel("optimiser step")
    axes.set_title("Learning rate")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_ylim(bottom=0)
    return figure


def rl_panel(histories: Mapping[str, History], domains: Sequence[str], column: str, title: str) -> Figure:
    """One quantity per step for every domain that logged it: single steps faint, running mean strong."""
    figure, axes = new_figure(CARD)
    top, bottom = -math.inf, math.inf
    for index, domain in enumerate(domains):
        history = histories.get(domain)
        if not history or column not in history:
            continue
        x, y = finite(_steps(history), history[column])
        if not y:
            continue
        style: dict[str, Any] = domain_line(index)
        smooth = running_mean(y) if len(y) >= 2 * SMOOTHING else y
        if smooth is not y:
            axes.plot(x, y, linewidth=1, alpha=0.35, color=style["color"])
        axes.plot(x, smooth, label=domain, markevery=max(1, len(x) // 8), **style)
        top, bottom = max(top, *y), min(bottom, *y)
    axes.set_title(title)
    axes.set_xlabel("step")
    if column in ("success", "reward_mean") and bottom >= 0:
        axes.set_ylim(0, max(1.02, top * 1.05))
    elif bottom >= 0:
        axes.set_ylim(0, top * 1.12 if top > 0 else 1)
    if top and math.isfinite(top) and max(abs(top), abs(bottom)) < 1e-2:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def has_column(histories: Mapping[str, History], column: str) -> bool:
    """Whether any domain logged a number in `column`."""
    return any(any(math.isfinite(value) for value in history.get(column, [])) for history in histories.values())
