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
    ("reward_mean", "Mean return", "Mean return of the step's episodes."),
    ("kl", "KL to the reference, nats per token", "Divergence of the policy from the fine-tuned model."),
    ("entropy", "Policy entropy, nats per token", "Entropy of the policy; at zero, exploration has ended."),
    ("dead_groups", "Zero-advantage groups", "Groups whose episodes all have the same return."),
    ("clip_fraction", "Clipped tokens, share", "Tokens whose importance ratio is clipped."),
    ("grad_norm", "Gradient norm", "Norm of the gradient before clipping."),
    ("loss", "Policy loss", "Surrogate loss; watch for jumps, not for its level."),
    ("td_error", "Critic's TD error", "Mean squared TD error of Q before each update."),
    ("q_correlation", "Correlation of Q and return", "Of the critic's turn-level Q with the discounted return."),
    ("turns", "Turns per episode", "Actions of the policy per episode."),
    ("pair_accuracy", "Pair accuracy", "Share of preference pairs whose winner the policy prefers, by the loss's measure."),
    ("margin", "Margin of the winner, nats", "Preference for the winner over the loser."),
    ("winner_logprob", "Winner, nats per token", "Mean log-probability of winning continuations; a fall means unlearning."),
    ("loser_logprob", "Loser, nats per token", "Mean log-probability of losing continuations."),
    ("value_td", "TD error of V", "Squared TD error of the value network, trained alone; it should flatten."),
    ("td", "TD error of Q", "Squared TD error of Q while the policy is trained, against the frozen policy's next-token value."),
    ("ground_truth_nll", "Ground truth, nats per token", "Negative log-probability of the reference solutions."),
    ("truncated", "Truncated episodes, share", "Episodes ended by a limit on turns, context or length."),
    ("tokens", "Tokens per episode", "Length of an episode in tokens."),
)
"""Column of the RL history, title, caption."""

SMOOTHING = 5


def finite(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The points with a finite value."""
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], window: int = SMOOTHING) -> list[float]:
    """Trailing mean over `window` values."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _steps(history: History) -> list[float]:
    length = len(next(iter(history.values())))
    return list(history.get("step", [float(index) for index in range(length)]))


def sft_loss(history: History, best_step: float | None = None) -> Figure:
    """Training and validation loss (nats per policy token) over optimiser steps; the selected checkpoint is marked."""
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
            ring = {"markersize": 9, "markerfacecolor": "none", "color": colour("ink")}
            axes.plot([best_step], [y[x.index(best_step)]], "o", label="selected", **ring)
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
    """One metric per step and domain: single steps faint, running mean bold."""
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
    """Whether any domain has a finite value in `column`."""
    return any(any(math.isfinite(value) for value in history.get(column, [])) for history in histories.values())
