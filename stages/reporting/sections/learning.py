"""Chapters on the two kinds of training: supervised fine-tuning and reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping

from stages.reporting.blocks import Figures, Section, Table, Text, all_numbers, draw, missing, number
from stages.reporting.figures.curves import RL_PANELS, has_column, rl_panel, sft_loss, sft_rate
from stages.reporting.inputs import History, Inputs
from stages.reporting.results import scalar
from stages.reporting.style import domain_colour

SFT_INTRO = (
    "The base model learns from demonstrations of all domains together. Only the tokens an expert chose are trained on; what the "
    "environment said is read, never learnt. Training stops when the loss on held-out demonstrations no longer falls."
)
RL_INTRO = (
    "One copy of the fine-tuned policy per domain learns from its own attempts. Each step plays a batch of tasks, several "
    "attempts each, and makes what worked better more likely. Thin lines are single steps, strong ones the mean of five. "
    "Success in training stands among the results."
)
PAIRS_INTRO = (
    "One copy of the fine-tuned policy per domain learns from the preference pairs of tree search: each step makes the winning "
    "actions of some pairs more likely than the losing ones. Nothing is played, so there is no success in training. Thin lines "
    "are single steps, strong ones the mean of five."
)
RECORDS_INTRO = (
    "One copy of the fine-tuned policy per domain learns from recorded episodes, its own and others': a critic learns what turns "
    "are worth, and recorded actions become likelier the better they are by it. Nothing is played, so there is no success in "
    "training. Thin lines are single steps, strong ones the mean of five."
)
STORED_INTRO = (
    "One copy of the fine-tuned policy per domain learns from episodes that are there without playing: solutions, mistakes, and "
    "the fine-tuned policy's own rollouts. Where values of tokens are learnt, the value network comes first, alone. There is no "
    "success in training. Thin lines are single steps, strong ones the mean of five."
)
INTROS = {"pairs": PAIRS_INTRO, "records": RECORDS_INTRO, "stored": STORED_INTRO}
NOT_PLAYED = {"pairs": "stored pairs", "records": "recorded episodes", "stored": "stored episodes"}
TOLD = (
    *(("success", "success"), ("entropy", "entropy"), ("dead_groups", "dead groups")),
    *(("td_error", "critic's TD error"), ("q_correlation", "correlation of Q and return")),
    *(("pair_accuracy", "pairs ranked right"), ("margin", "margin"), ("value_td", "value's error"), ("td", "error of Q")),
)
"""Columns of the history in the table of what ran, and their titles."""


def sft_section(inputs: Inputs) -> Section:
    section = Section("sft", "Supervised fine-tuning", SFT_INTRO)
    history = inputs.sft_history
    if (inputs.sft or {}).get("steps") == 0:
        section.blocks.append(Text("No demonstrations (sft.demonstrations: 0): what follows starts from the base model."))
    elif history is None:
        section.blocks.append(missing("reports/sft/history.csv", "sft"))
    else:
        best = scalar(inputs.sft or {}, "best_step")
        drawings = [draw("sft-loss", "Loss on training batches and on held-out demonstrations.", sft_loss, history, best)]
        if has_column({"sft": history}, "lr"):
            drawings.append(draw("sft-rate", "The learning rate's schedule.", sft_rate, history))
        section.blocks.append(Figures(drawings))
    section.blocks += all_numbers(inputs.sft, "reports/sft.json")
    return section


def first_and_last(history: History, column: str, window: int = 5) -> tuple[float, float] | None:
    """Means over the first and the last `window` numbers of a column; None if it has none."""
    values = [value for value in history.get(column, []) if value == value]
    if not values:
        return None
    head, tail = values[:window], values[-window:]
    return sum(head) / len(head), sum(tail) / len(tail)


def reward_is_success(histories: Mapping[str, History]) -> bool:
    """Whether the mean reward says nothing that the success does not."""
    return all(history.get("reward_mean") == history.get("success") for history in histories.values())


def learnt_from(history: History) -> str:
    """What a history of rl is of, as in `stages.algorithms.card.Composition.data`."""
    for source in ("pairs", "stored"):
        if source in history:
            return source
    return "records" if "td_error" in history and "episodes" not in history else "episodes"


def rl_section(inputs: Inputs) -> Section:
    histories = {domain: given.rl_history for domain, given in inputs.domains.items() if given.rl_history is not None}
    sources = {learnt_from(history) for history in histories.values()}
    intro = INTROS.get(sources.pop() if len(sources) == 1 else "", RL_INTRO)
    section = Section("rl", "Reinforcement learning", intro)
    section.blocks += [
        missing(f"reports/rl/{domain}_history.csv", f"rl@{domain}") for domain in inputs.domains if domain not in histories
    ]
    if histories:
        told = [(column, title) for column, title in TOLD if has_column(histories, column)]
        rows = []
        for domain, history in histories.items():
            rl = inputs.params.section("rl", domain)
            played = NOT_PLAYED.get(learnt_from(history), f"{rl.tasks_per_step} × {rl.group_size}")
            row = [domain, rl.algorithm, number(len(next(iter(history.values())))), played]
            for column, _ in told:
                ends = first_and_last(history, column)
                row.append("–" if ends is None else f"{number(round(ends[0], 3))} → {number(round(ends[1], 3))}")
            rows.append(row)
        header = ("domain", "algorithm", "steps", "tasks × attempts", *(title for _, title in told))
        section.blocks.append(Table("What ran (means of the first and of the last five steps)", header, rows, text_columns=2))
        domains = inputs.params.domains
        drawings = [
            draw(f"rl-{column.replace('_', '-')}", caption, rl_panel, histories, domains, column, title)
            for column, title, caption in RL_PANELS
            if has_column(histories, column) and not (column == "reward_mean" and reward_is_success(histories))
        ]
        legend = [(domain_colour(index), domain) for index, domain in enumerate(domains) if domain in histories]
        section.blocks.append(Figures(drawings, legend))
    else:
        section.blocks.append(Text("No training history of any domain was found.", tone="note"))
    for domain, given in inputs.domains.items():
        section.blocks += all_numbers(given.rl, f"reports/rl/{domain}.json")
    return section
