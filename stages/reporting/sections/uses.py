"""End of the chapter on trees: how the run uses its annotations, and the board's verdicts on each use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.algorithms.resolve import resolve_section, warm_start_of
from stages.algorithms.stage_uses import uses_of
from stages.params import Params
from stages.reporting.blocks import Block, Heading, Table, Text, number, percent
from stages.reporting.inputs import Inputs
from stages.reporting.kept import Measured
from stages.runtime.speed import duration

TITLE = "Use of the annotations"
SWITCHES = (
    "rl.credit.kind, rl.critic.init, rl.curriculum.kind, rl.algorithm and rl.warm_start (tree_bc, step_dpo and others), "
    "annotate.q_model.init, and models with +q in evaluate.models; annotate.tasks: 0 grows no trees"
)


def used(params: Params, domain: str) -> list[str]:
    """The uses that later stages make of a domain's annotations; [] for none."""
    method, rl = resolve_section(params.section("rl", domain), params.model.max_length)
    found = [use.what for use in uses_of(method, rl, warm_start_of(rl))]
    q_model = params.section("annotate", domain).q_model
    if q_model.kind == "regression" and q_model.init == "value_model":
        found.append("Q-model initialised from the step-value model")
    if q_model.kind != "none" and any(model.endswith("+q") for model in params.evaluate.models or []):
        found.append("best-of-n actions by the Q-model in evaluation")
    return found


def _this_run(params: Params, uses: Mapping[str, list[str]]) -> list[Block]:
    blocks: list[Block] = [Text(f"{domain}: {'; '.join(found)}.") for domain, found in uses.items() if found]
    unused = [domain for domain, found in uses.items() if not found]
    if off := [domain for domain in unused if not params.section("annotate", domain).tasks]:
        blocks.append(Text(f"Off, and nothing needs it: {', '.join(off)} (annotate.tasks: 0)."))
    if idle := [domain for domain in unused if domain not in off]:
        readers = " The viewer of episodes shows the step-value model's values." if params.report.state_values else ""
        blocks.append(Text(f"Not used by later stages: {', '.join(idle)}.{readers} Switches: {SWITCHES}."))
    return blocks


def _explained_variance(inputs: Inputs) -> str:
    """Explained variance of this run's step-value models, of what true values would explain, which bounds their benefit; "" if
    there are none."""
    shares = []
    for domain, given in inputs.domains.items():
        calibration = ((given.annotate or {}).get("value_model") or {}).get("calibration") or {}
        if "explained_variance" in calibration:
            most = f" of {100 * calibration['explainable']:.0f} %" if "explainable" in calibration else ""
            shares.append(f"{domain} {100 * calibration['explained_variance']:.0f} %{most}")
    return f" Variance of held-out outcomes explained by this run's step-value models: {', '.join(shares)}." if shares else ""


def _summary(measured: Mapping[str, Any], uses: Mapping[str, list[str]]) -> str:
    claims = measured["claims"]
    ended = [claim for claim in claims if claim["state"] in ("reproduced", "not reproduced", "undecided", "gate failed")]
    if len(ended) < len(claims):
        return "Some claims have not been measured yet (make claims METHOD=annotation_uses)."
    if any(claim["state"] == "gate failed" for claim in ended):
        return "The experiment failed its gate, so it decides nothing (reports/claims/annotation_uses.md)."
    gains = [claim["says"] for claim in ended if claim["gain"] and claim["state"] == "reproduced"]
    if gains:
        unused = "" if uses.get(measured["environment"]) else f" This run uses none of it on {measured['environment']}."
        return f"Significant gain over the same run without annotations: {' '.join(gains)}{unused}"
    cheaper = any(claim["state"] == "reproduced" and claim["cheaper"] for claim in ended)
    note = " Reproduced claims are against cheaper baselines, not against the best one of equal cost." if cheaper else ""
    return f"No use has a significant gain over the same run without annotations.{note}"


def life_blocks(life: Mapping[str, Any]) -> list[Block]:
    """What each use of the trees bought in an experiment on the life (stages/reporting/tree_life.py)."""
    trees = life["tree_steps"]
    rows = []
    for arm in life["arms"]:
        all_steps = None if arm["steps"] is None or trees is None else arm["steps"] + trees * arm["trees"]
        steps = [number(None if value is None else round(value)) for value in (arm["steps"], all_steps)]
        rows.append([arm["use"], percent(arm["success"]), percent(arm["curve"]), *steps, number(round(arm["seconds"]))])
    header = ("use", "success afterwards", "success while training", f"steps to {life['target']} %", "with the trees'", "seconds")
    title = (
        f"What the trees bought on {life['environment']} (means of {life['seeds']} seeds, {number(life['environment_steps'])} "
        f"environment steps of RL)"
    )
    return [Table(title, header, rows, text_columns=1), Text(_paid(life))]


def _paid(life: Mapping[str, Any]) -> str:
    """Whether the use that saves most environment steps saves as many as the trees cost."""
    source = f"Verdicts: reports/claims/{life['slug']}.md."
    known = [arm for arm in life["arms"] if arm["steps"] is not None]
    alone, of_trees = [arm for arm in known if not arm["trees"]][:1], [arm for arm in known if arm["trees"]]
    if not alone or not of_trees or life["tree_steps"] is None:
        return source
    best = min(of_trees, key=lambda arm: arm["steps"])
    saved = round(alone[0]["steps"] - best["steps"])
    cost = f"The trees cost {number(life['tree_steps'])} environment steps."
    if saved <= 0:
        return f"{cost} No use of them saves any of RL's on the way to {life['target']} %. {source}"
    pays = "which pays for them" if saved > life["tree_steps"] else "which does not pay for them"
    most = f"What saves most of RL's on the way to {life['target']} % is {best['use']}: {number(saved)} steps, {pays}."
    return f"{cost} {most} {source}"


def _trees_cost(inputs: Inputs) -> list[Block]:
    """Environment steps of this run's trees, and the seconds of annotate in the newest kept run that has its times."""
    steps = {domain: (given.annotate or {}).get("environment_steps") for domain, given in inputs.domains.items()}
    grown = {domain: count for domain, count in steps.items() if count}
    if not grown:
        return []
    measured: Mapping[str, Measured] = next((run.measured for run in reversed(inputs.kept) if run.measured), {})
    timed = {domain: measured[f"annotate@{domain}"] for domain in grown if f"annotate@{domain}" in measured}
    parts = [
        f"{domain} {number(count)} environment steps" + (f", {duration(timed[domain].seconds)}" if domain in timed else "")
        for domain, count in grown.items()
    ]
    return [Text(f"Cost of this run's trees: {'; '.join(parts)}{' (times of the newest kept run)' if timed else ''}.")]


def use_blocks(inputs: Inputs) -> list[Block]:
    """Heading, the uses of this run and what the trees cost, what uses bought, and the board's verdicts."""
    uses = {domain: used(inputs.params, domain) for domain in inputs.params.domains}
    blocks: list[Block] = [Heading(TITLE), *_this_run(inputs.params, uses), *_trees_cost(inputs)]
    measured = inputs.uses
    if not measured:
        return blocks
    for life in measured.get("lives", ()):
        blocks += life_blocks(life)
    title = (
        f"Measured on {measured['environment']} ({measured['seeds']} paired seeds, {number(measured['environment_steps'])} "
        "environment steps per RL run)"
    )
    rows = [
        [claim["says"], claim["state"] + (f"; checked: {claim['checked']}" if claim["checked"] else ""), claim["difference"]]
        for claim in measured["claims"]
    ]
    text = f"{_summary(measured, uses)}{_explained_variance(inputs)} Numbers per seed: reports/claims/."
    return [*blocks, Table(title, ("claim", "verdict", "difference (95 % CI)"), rows, text_columns=3), Text(text)]
