"""What reports/evaluation.json says, in order and in words: pure functions over its contents.

Success and its interval are shares in [0, 1] in the file and are shown in per cent; differences are shown in points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NBSP = "\u00a0"
"""Keeps a number and its unit on one line."""

IN_WORDS = {
    "base": "base model",
    "sft": "fine-tuned model",
    "merged": "merged model",
    "merged_linear": "linear average",
}


KEEPS = "The merged model keeps {share} of the specialist's success."


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval; `n` is the number of panel tasks (or attempts) behind it."""

    mean: float
    low: float
    high: float
    n: int

    def percent(self, digits: int = 1) -> str:
        return f"{100 * self.mean:.{digits}f}{NBSP}%"

    def interval(self, digits: int = 1) -> str:
        return f"{100 * self.low:.{digits}f} to {100 * self.high:.{digits}f}"


def check_evaluation(evaluation: Any, source: str) -> None:
    """Raise ValueError, saying which key is missing, unless `evaluation` has panels, models and comparisons with their keys."""
    if not isinstance(evaluation, Mapping):
        raise ValueError(f"{source} must hold a JSON object; run 'python -m stages.evaluate' again")
    for key in ("panels", "models", "comparisons"):
        if key not in evaluation:
            raise ValueError(f"{source} has no key '{key}'; run 'python -m stages.evaluate' again")
    for model, domains in evaluation["models"].items():
        for domain, row in domains.items():
            missing = [key for key in ("mean", "low", "high", "n") if key not in row.get("success", {})]
            if missing:
                raise ValueError(
                    f"{source}: models.{model}.{domain}.success lacks {missing}; run 'python -m stages.evaluate' again"
                )
    for index, item in enumerate(evaluation["comparisons"]):
        missing = [key for key in ("a", "b", "domain", "difference", "low", "high", "p", "verdict") if key not in item]
        if missing:
            raise ValueError(f"{source}: comparisons[{index}] lacks {missing}; run 'python -m stages.evaluate' again")


def model_order(models: Sequence[str], domains: Sequence[str]) -> list[str]:
    """Models in the order of the run: base, sft, specialists (in the order of `domains`), merged, merged_linear, others; each
    before those that choose among its actions (`sft+q`)."""
    order = ["base", "sft", *(f"rl@{domain}" for domain in domains), "merged", "merged_linear"]
    places = {name: place for place, name in enumerate(order)}
    return sorted(models, key=lambda name: (places.get(name.partition("+")[0], len(order)), name))


def success(evaluation: Mapping[str, Any], model: str, domain: str) -> Estimate | None:
    """Success of `model` in `domain`; None if it was not evaluated there."""
    row = evaluation["models"].get(model, {}).get(domain)
    if row is None:
        return None
    values = row["success"]
    return Estimate(float(values["mean"]), float(values["low"]), float(values["high"]), int(values["n"]))


def scalar(row: Mapping[str, Any], *names: str) -> float | None:
    """The number (or the `mean` of the mapping) under the first of `names` that `row` has."""
    for name in names:
        value = row.get(name)
        if isinstance(value, Mapping):
            value = value.get("mean")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def journey(evaluation: Mapping[str, Any], domain: str) -> list[tuple[str, Estimate]]:
    """(model, success) along a domain's own way: base, sft, its specialist, merged."""
    steps = []
    for model in ("base", "sft", f"rl@{domain}", "merged"):
        estimate = success(evaluation, model, domain)
        if estimate is not None:
            steps.append((model, estimate))
    return steps


def signed(points: float) -> str:
    """A difference with its sign, a real minus included."""
    return f"{points:+.1f}".replace("-", "−")


def p_value(p: float, bare: bool = False) -> str:
    """ "p = 0.021"; `bare` without the name, for a column that has it at its head."""
    text = f"p{NBSP}<{NBSP}0.001" if p < 0.001 else f"p{NBSP}={NBSP}{p:.3f}"
    return text.removeprefix("p").strip(f"={NBSP}") if bare else text


def verdict_mark(verdict: str) -> str:
    """A verdict for a table: a sign that is seen at a glance, and the word."""
    return {"better": "▲ better", "worse": "▼ worse"}.get(verdict, verdict)


def in_words(model: str, domain: str) -> str:
    """A model as a person would call it on the page of `domain`."""
    if model == f"rl@{domain}":
        return "specialist"
    model, plus, by = model.partition("+")
    return IN_WORDS.get(model, model) + (f", best of its actions by {by}" if plus else "")


def sentence(comparison: Mapping[str, Any], confidence: float) -> str:
    """A paired comparison: "Specialist vs. fine-tuned model: +21.3 points (95 % CI +14.0 to +28.6, p = 0.002)."."""
    a, b = (in_words(comparison[side], comparison["domain"]) for side in ("a", "b"))
    low, high = (signed(100 * comparison[end]) for end in ("low", "high"))
    unclear = "" if comparison["verdict"] in ("better", "worse") else "; not significant"
    return (
        f"{a[:1].upper()}{a[1:]} vs. {b}: {signed(100 * comparison['difference'])} points "
        f"({100 * confidence:g}{NBSP}% CI {low} to {high}, {p_value(comparison['p'])}{unclear})."
    )


def find_comparison(evaluation: Mapping[str, Any], a: str, b: str, domain: str) -> Mapping[str, Any] | None:
    """The comparison of a with b on `domain`, turned round if the file has it as b with a."""
    for item in evaluation["comparisons"]:
        if (item["a"], item["b"], item["domain"]) == (a, b, domain):
            return item
    for item in evaluation["comparisons"]:
        if (item["a"], item["b"], item["domain"]) == (b, a, domain):
            swapped = {"better": "worse", "worse": "better"}
            return {
                **item,
                "a": a,
                "b": b,
                "difference": -item["difference"],
                "low": -item["high"],
                "high": -item["low"],
                "verdict": swapped.get(item["verdict"], item["verdict"]),
            }
    return None


def retention(evaluation: Mapping[str, Any], domain: str, model: str = "merged") -> float | None:
    """Success of `model` as a share of the domain specialist's; None if either is missing or the specialist never succeeds."""
    merged, specialist = success(evaluation, model, domain), success(evaluation, f"rl@{domain}", domain)
    if merged is None or specialist is None or specialist.mean == 0:
        return None
    return merged.mean / specialist.mean


def verdicts(evaluation: Mapping[str, Any], domain: str, confidence: float) -> list[str]:
    """What the paired tests say about a domain, in words: each step of its way, and the merge against linear averaging."""
    specialist = f"rl@{domain}"
    pairs = (("sft", "base"), (specialist, "sft"), ("merged", specialist), ("merged", "sft"), ("merged", "merged_linear"))
    found = [find_comparison(evaluation, a, b, domain) for a, b in pairs]
    lines = [sentence(item, confidence) for item in found if item is not None]
    kept = retention(evaluation, domain)
    if kept is not None:
        lines.append(KEEPS.format(share=f"{100 * kept:.0f}{NBSP}%"))
    return lines


def headline(evaluation: Mapping[str, Any], domain: str, confidence: float) -> list[str]:
    """What a reader in a hurry needs of a domain: its way's last model against the fine-tuned one, and what a merge keeps."""
    last = next((model for model, _ in reversed(journey(evaluation, domain)) if model not in ("base", "sft")), "sft")
    found = find_comparison(evaluation, last, "base" if last == "sft" else "sft", domain)
    kept = retention(evaluation, domain)
    lines = [] if found is None else [sentence(found, confidence)]
    return lines if kept is None else [*lines, KEEPS.format(share=f"{100 * kept:.0f}{NBSP}%")]


def results_rows(evaluation: Mapping[str, Any], domains: Sequence[str]) -> list[dict[str, Any]]:
    """One row per (domain, model) evaluated, in order: success, reward, turns, tokens, pass@k, distinct@k and maj@k (k -> share
    or number; {} where there is none)."""
    rows = []
    for domain in domains:
        for model in model_order(list(evaluation["models"]), domains):
            estimate = success(evaluation, model, domain)
            if estimate is None:
                continue
            values = evaluation["models"][model][domain]
            at_k = {
                name: dict(sorted((int(k), float(v)) for k, v in (values.get(name) or {}).items()))
                for name in ("pass_at_k", "distinct_at_k", "maj_at_k")
            }
            rows.append(
                {
                    "domain": domain,
                    "model": model,
                    "success": estimate,
                    "reward": scalar(values, "reward", "reward_mean"),
                    "turns": scalar(values, "turns", "turns_mean"),
                    "tokens": scalar(values, "tokens", "tokens_mean"),
                    **at_k,
                }
            )
    return rows


def markdown_table(evaluation: Mapping[str, Any], domains: Sequence[str], confidence: float) -> str:
    """Success per model (rows) and domain (columns) with intervals, as a Markdown table, and the panels below it."""
    level = f"{100 * confidence:g} %"
    header = ["model", *(f"{domain} success ({level} CI)" for domain in domains)]
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * len(domains)]
    for model in model_order(list(evaluation["models"]), domains):
        cells = [f"`{model}`"]
        for domain in domains:
            estimate = success(evaluation, model, domain)
            cells.append("–" if estimate is None else f"{estimate.percent()} ({estimate.interval()})")
        lines.append("| " + " | ".join(cells) + " |")
    sizes = []
    for domain in domains:
        counts = sorted({found.n for model in evaluation["models"] if (found := success(evaluation, model, domain))})
        sizes.append(f"{domain}: n = {'/'.join(map(str, counts))}, panel `{evaluation['panels'].get(domain, '?')}`")
    return "\n".join([*lines, "", "; ".join(sizes) + "."]) + "\n"


def comparisons_list(evaluation: Mapping[str, Any], domains: Sequence[str], confidence: float) -> str:
    """One Markdown line per paired comparison; "" where there are none."""
    told = [(domain, line) for domain in domains for line in verdicts(evaluation, domain, confidence)]
    if not told:
        return ""
    return "\n".join(["Paired on the same tasks:", "", *(f"- {domain}: {line}" for domain, line in told)]) + "\n"
