"""Chapters on supervised fine-tuning and reinforcement learning."""

from __future__ import annotations

from collections.abc import Mapping

from stages.algorithms.registry import composition
from stages.algorithms.resolve import resolve_section
from stages.algorithms.settings import Rl
from stages.reporting.blocks import Figures, Section, Table, Text, all_numbers, draw, missing, number
from stages.reporting.figures.curves import RL_PANELS, has_column, rl_panel, sft_loss, sft_rate
from stages.reporting.inputs import History, Inputs
from stages.reporting.results import scalar
from stages.reporting.style import domain_colour

SFT_INTRO = (
    "The base model is trained on demonstrations of all domains together; only the expert's tokens are in the loss. Training "
    "stops when the loss on held-out demonstrations no longer falls."
)
LINES = "Thin lines are single steps, bold ones the mean of five."
OFFLINE = f"No episodes are played, so there is no training success. {LINES}"
INTROS = {
    "episodes": "One copy of the fine-tuned policy per domain is trained on its own episodes, several attempts per task and "
    f"step. {LINES} Training success is among the results.",
    "pairs": "One copy of the fine-tuned policy per domain is trained on {pairs}: winners become more likely than losers. "
    f"{OFFLINE}",
    "paths": "One copy of the fine-tuned policy per domain is trained on the paths of tree search that end in a success. "
    f"{OFFLINE}",
    "attempts": "One copy of the fine-tuned policy per domain is trained on its own successful attempts of the rollout stage; "
    f"with rl.settings.guided also on those with a hint. {OFFLINE}",
    "offline_replay": "One copy of the fine-tuned policy per domain is trained on an offline dataset, its own episodes and "
    f"others': a critic learns the values of turns, and actions of the dataset are weighted by advantage. {OFFLINE}",
    "offline": "One copy of the fine-tuned policy per domain is trained on stored programs: solutions, mistakes, and the "
    f"policy's own rollouts. Where token values are learned, the value network is trained first. {OFFLINE}",
}
"""By what rl learns from: `stages.algorithms.card.Composition.data`."""
MIXED = (
    "One copy of the fine-tuned policy per domain is trained, on different kinds of data. Those that learn from stored data play "
    f"no episodes, so they have no training success. {LINES}"
)
PAIRS = {
    "trees": "preference pairs of tree search",
    "imported": "imported preference pairs",
    "all": "preference pairs of tree search and imported ones",
    "guided": "pairs of a successful attempt of the rollout stage, plain or with a hint, and a plain failure",
}
"""By rl.preference.source."""
SOURCES = {
    "pairs": "preference pairs",
    "paths": "correct tree paths",
    "attempts": "successful attempts",
    "offline_replay": "the offline dataset",
    "offline": "the offline dataset",
}
SUMMARY_COLUMNS = (
    *(("success", "success"), ("entropy", "entropy"), ("dead_groups", "dead groups")),
    *(("td_error", "critic's TD error"), ("q_correlation", "correlation of Q and return")),
    *(("pair_accuracy", "pair accuracy"), ("margin", "margin"), ("value_td", "TD error of V"), ("td", "TD error of Q")),
)
"""Columns of the history in the summary table, with titles."""


def sft_section(inputs: Inputs) -> Section:
    section = Section("sft", "Supervised fine-tuning", SFT_INTRO)
    history = inputs.sft_history
    if (inputs.sft or {}).get("steps") == 0:
        section.blocks.append(Text("No demonstrations (sft.demonstrations: 0): RL starts from the base model."))
    elif history is None:
        section.blocks.append(missing("reports/sft/history.csv", "sft"))
    else:
        best = scalar(inputs.sft or {}, "best_step")
        drawings = [draw("sft-loss", "Loss on training batches and on held-out demonstrations.", sft_loss, history, best)]
        if has_column({"sft": history}, "lr"):
            drawings.append(draw("sft-rate", "Learning-rate schedule.", sft_rate, history))
        section.blocks.append(Figures(drawings))
    section.blocks += all_numbers(inputs.sft, "reports/sft.json")
    return section


def first_and_last(history: History, column: str, window: int = 5) -> str:
    """ "0.41 → 0.62": means over the first and the last `window` values of a column."""
    values = [value for value in history.get(column, []) if value == value]
    if not values:
        return "–"
    ends = (values[:window], values[-window:])
    return " → ".join(number(round(sum(end) / len(end), 3)) for end in ends)


def reward_is_success(histories: Mapping[str, History]) -> bool:
    return all(history.get("reward_mean") == history.get("success") for history in histories.values())


def data_source(rl: Rl) -> str:
    """What an algorithm learns from: a key of INTROS."""
    return composition(rl.algorithm).data


def introduction(rl: Rl) -> str:
    """What one domain's policy is trained on."""
    method, resolved = resolve_section(rl)
    return INTROS[method.data].format(pairs=PAIRS[resolved.preference.source] if method.data == "pairs" else "")


def _summary_table(inputs: Inputs, histories: Mapping[str, History]) -> Table:
    columns = [(column, title) for column, title in SUMMARY_COLUMNS if has_column(histories, column)]
    rows = []
    for domain, history in histories.items():
        rl = inputs.params.section("rl", domain)
        data = SOURCES.get(data_source(rl), f"{rl.tasks_per_step} × {rl.group_size}")
        steps = number(len(next(iter(history.values()))))
        rows.append([domain, rl.algorithm, steps, data, *(first_and_last(history, column) for column, _ in columns)])
    header = ("domain", "algorithm", "steps", "tasks × attempts", *(title for _, title in columns))
    return Table("Training summary (means of the first and last five steps)", header, rows, text_columns=2)


def rl_section(inputs: Inputs) -> Section:
    histories = {domain: given.rl_history for domain, given in inputs.domains.items() if given.rl_history is not None}
    introductions = {introduction(inputs.params.section("rl", domain)) for domain in inputs.params.domains}
    section = Section("rl", "Reinforcement learning", introductions.pop() if len(introductions) == 1 else MIXED)
    section.blocks += [
        missing(f"reports/rl/{domain}_history.csv", f"rl@{domain}") for domain in inputs.domains if domain not in histories
    ]
    if histories:
        domains = inputs.params.domains
        drawings = [
            draw(f"rl-{column.replace('_', '-')}", caption, rl_panel, histories, domains, column, title)
            for column, title, caption in RL_PANELS
            if has_column(histories, column) and not (column == "reward_mean" and reward_is_success(histories))
        ]
        legend = [(domain_colour(index), domain) for index, domain in enumerate(domains) if domain in histories]
        section.blocks += [_summary_table(inputs, histories), Figures(drawings, legend)]
    for domain, given in inputs.domains.items():
        section.blocks += all_numbers(given.rl, f"reports/rl/{domain}.json")
    return section
