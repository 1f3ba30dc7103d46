"""Tables and summary lines from the contents of reports/evaluation.json.

Shares in [0, 1] are shown in per cent, their differences in points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.agent.model_names import CLOSED_BOOK, ENVIRONMENTS, FEW_SHOT, SEARCH
from stages.reporting.generated_blocks import markdown_table

NBSP = "\u00a0"
MODEL_LABELS = {"base": "base model", "sft": "fine-tuned model", "merged": "merged model", "merged_linear": "linear average"}
HOW = {CLOSED_BOOK: "without tools", FEW_SHOT: "shown examples", SEARCH: "looking ahead"}
"""How a variant of a model plays."""


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval over `n` panel tasks (or attempts)."""

    mean: float
    low: float
    high: float
    n: int

    def percent(self, digits: int = 1) -> str:
        return f"{100 * self.mean:.{digits}f}{NBSP}%"

    def interval(self, digits: int = 1) -> str:
        return f"{100 * self.low:.{digits}f} to {100 * self.high:.{digits}f}"


def check_evaluation(evaluation: Any, source: str) -> None:
    """Raise ValueError naming the missing keys unless `evaluation` has panels, models and comparisons with their keys."""
    if not isinstance(evaluation, Mapping):
        raise ValueError(f"{source} must hold a JSON object; run 'python -m stages.evaluate' again")

    def require(keys: Sequence[str], values: Mapping[str, Any], where: str) -> None:
        if missing := [key for key in keys if key not in values]:
            raise ValueError(f"{source}{where} lacks {missing}; run 'python -m stages.evaluate' again")

    require(("panels", "models", "comparisons"), evaluation, "")
    for model, domains in evaluation["models"].items():
        for domain, row in domains.items():
            require(("mean", "low", "high", "n"), row.get("success", {}), f": models.{model}.{domain}.success")
    for index, item in enumerate(evaluation["comparisons"]):
        keys = ("a", "b", "domain", "difference", "low", "high", "p", "verdict")
        require(keys, item, f": comparisons[{index}]")


def on_panels(evaluation: Mapping[str, Any]) -> bool:
    """Whether the models played the frozen panels, not the validation tasks (evaluate.split: valid)."""
    return evaluation.get("split", "test") == "test"


def model_order(models: Sequence[str], domains: Sequence[str]) -> list[str]:
    """Models sorted: base, sft, specialists (in the order of `domains`), merged, merged_linear, others; each followed by its
    best-of-n variants (`sft+q`)."""
    order = ["base", "sft", *(f"rl@{domain}" for domain in domains), "merged", "merged_linear"]
    places = {name: place for place, name in enumerate(order)}
    return sorted(models, key=lambda name: (places.get(name.partition("+")[0], len(order)), name))


def success(evaluation: Mapping[str, Any], model: str, domain: str) -> Estimate | None:
    """Success of `model` on `domain`; None if it was not evaluated there."""
    row = evaluation["models"].get(model, {}).get(domain)
    if row is None:
        return None
    values = row["success"]
    return Estimate(*(float(values[key]) for key in ("mean", "low", "high")), n=int(values["n"]))


def panel_sizes(evaluation: Mapping[str, Any], domain: str) -> str:
    """Number of tasks on a domain's panel, "200"; "100/200" if models differ."""
    counts = {found.n for model in evaluation["models"] if (found := success(evaluation, model, domain))}
    return "/".join(map(str, sorted(counts)))


def scalar(row: Mapping[str, Any], *names: str) -> float | None:
    """The number (or the `mean` of the mapping) under the first of `names` that is in `row`."""
    for name in names:
        value = row.get(name)
        if isinstance(value, Mapping):
            value = value.get("mean")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def journey(evaluation: Mapping[str, Any], domain: str) -> list[tuple[str, Estimate]]:
    """(model, success) of the models along a domain's pipeline: base, sft, its specialist, merged."""
    steps = [(model, success(evaluation, model, domain)) for model in ("base", "sft", f"rl@{domain}", "merged")]
    return [(model, estimate) for model, estimate in steps if estimate is not None]


def signed(points: float) -> str:
    """A difference with its sign (U+2212 for minus)."""
    return f"{points:+z.1f}".replace("-", "−")


def worth(claim: Mapping[str, Any]) -> str:
    """A judged difference of success: "+1.2 points (−1.6 to +4.1, equivalent)"."""
    difference, low, high = (signed(100 * claim[name]) for name in ("difference", "low", "high"))
    return f"{difference} points ({low} to {high}, {claim['effect']})"


def p_value(p: float, bare: bool = False) -> str:
    """ "p = 0.021"; with `bare` "0.021", for a column headed p."""
    text = f"p{NBSP}<{NBSP}0.001" if p < 0.001 else f"p{NBSP}={NBSP}{p:.3f}"
    return text.removeprefix("p").strip(f"={NBSP}") if bare else text


def verdict_mark(verdict: str) -> str:
    """A verdict with a sign, for tables."""
    return {"better": "▲ better", "worse": "▼ worse"}.get(verdict, verdict)


def comparison_cells(item: Mapping[str, Any]) -> list[str]:
    """Points, interval, p and verdict of a paired comparison, for a table."""
    interval = f"{signed(100 * item['low'])} to {signed(100 * item['high'])}"
    return [signed(100 * item["difference"]), interval, p_value(item["p"], bare=True), verdict_mark(item["verdict"])]


def model_label(model: str, domain: str) -> str:
    """The name of a model in lines about `domain`."""
    if model == f"rl@{domain}":
        return "specialist"
    model, plus, by = model.partition("+")
    how = HOW.get(by) or (by.replace("_", " ") if by in ENVIRONMENTS else f"best action by {by}")
    return MODEL_LABELS.get(model, model) + (f", {how}" if plus else "")


def comparison_line(comparison: Mapping[str, Any], confidence: float) -> str:
    """ "Specialist vs. fine-tuned model: +21.3 points (95 % CI +14.0 to +28.6, p = 0.002)." """
    a, b = (model_label(comparison[side], comparison["domain"]) for side in ("a", "b"))
    low, high = (signed(100 * comparison[end]) for end in ("low", "high"))
    unclear = "" if comparison["verdict"] in ("better", "worse") else "; not significant"
    return (
        f"{a[:1].upper()}{a[1:]} vs. {b}: {signed(100 * comparison['difference'])} points "
        f"({100 * confidence:g}{NBSP}% CI {low} to {high}, {p_value(comparison['p'])}{unclear})."
    )


def find_comparison(evaluation: Mapping[str, Any], a: str, b: str, domain: str) -> Mapping[str, Any] | None:
    """The comparison of a with b on `domain`, reversed if the file has b with a; None if it has neither."""
    found = {(item["a"], item["b"], item["domain"]): item for item in evaluation["comparisons"]}
    item = found.get((b, a, domain))
    if (a, b, domain) in found or item is None:
        return found.get((a, b, domain))
    verdict = {"better": "worse", "worse": "better"}.get(item["verdict"], item["verdict"])
    ends = {"difference": -item["difference"], "low": -item["high"], "high": -item["low"]}
    return {**item, **ends, "a": a, "b": b, "verdict": verdict}


def retention(evaluation: Mapping[str, Any], domain: str) -> float | None:
    """The merged model's success as a share of the domain specialist's; None if either is missing or the specialist never
    succeeds."""
    merged, specialist = success(evaluation, "merged", domain), success(evaluation, f"rl@{domain}", domain)
    if merged is None or specialist is None or specialist.mean == 0:
        return None
    return merged.mean / specialist.mean


def retention_line(evaluation: Mapping[str, Any], domain: str) -> list[str]:
    """What the merge retains of the specialist's success; [] without a merge or a specialist."""
    share = retention(evaluation, domain)
    return [] if share is None else [f"Merged model's success relative to the specialist: {100 * share:.0f}{NBSP}%."]


def verdicts(evaluation: Mapping[str, Any], domain: str, confidence: float) -> list[str]:
    """One line per paired test of a domain: each step of the pipeline, and the merge against linear averaging."""
    specialist = f"rl@{domain}"
    pairs = (("sft", "base"), (specialist, "sft"), ("merged", specialist), ("merged", "sft"), ("merged", "merged_linear"))
    found = [find_comparison(evaluation, a, b, domain) for a, b in pairs]
    lines = [comparison_line(item, confidence) for item in found if item is not None]
    return lines + retention_line(evaluation, domain)


def headline(evaluation: Mapping[str, Any], domain: str, confidence: float) -> list[str]:
    """Two lines per domain: the last model of its pipeline against the fine-tuned one, and what the merge retains."""
    last = next((model for model, _ in reversed(journey(evaluation, domain)) if model not in ("base", "sft")), "sft")
    found = find_comparison(evaluation, last, "base" if last == "sft" else "sft", domain)
    lines = [] if found is None else [comparison_line(found, confidence)]
    return lines + retention_line(evaluation, domain)


def success_table(evaluation: Mapping[str, Any], domains: Sequence[str], confidence: float) -> str:
    """Success per model (rows) and domain (columns) with intervals, as a Markdown table, followed by the panels."""
    level = f"{100 * confidence:g} %"
    rows = []
    for model in model_order(list(evaluation["models"]), domains):
        cells = [f"`{model}`"]
        for domain in domains:
            estimate = success(evaluation, model, domain)
            cells.append("–" if estimate is None else f"{estimate.percent()} ({estimate.interval()})")
        rows.append(cells)
    header = ["model", *(f"{domain} success ({level} CI)" for domain in domains)]
    table = markdown_table(header, rows, "l" + "r" * len(domains))
    sizes = [
        f"{domain}: n = {panel_sizes(evaluation, domain)}, panel `{evaluation['panels'].get(domain, '?')}`" for domain in domains
    ]
    return f"{table}\n\n{'; '.join(sizes)}.\n"


def comparisons_list(evaluation: Mapping[str, Any], domains: Sequence[str], confidence: float) -> str:
    """One Markdown line per paired comparison; "" if there are none."""
    lines = [f"- {domain}: {line}" for domain in domains for line in verdicts(evaluation, domain, confidence)]
    return "\n".join(["Paired on the same tasks:", "", *lines]) + "\n" if lines else ""
