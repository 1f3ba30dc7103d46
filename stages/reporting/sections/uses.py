"""End of the chapter on trees: how the run uses its annotations, and the board's verdicts on each use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.algorithms.parts.critic import learns_values
from stages.algorithms.parts.guidance import plays_guided
from stages.algorithms.resolve import resolve_section, warm_start_of
from stages.params import Params
from stages.reporting.blocks import Block, Heading, Table, Text, number
from stages.reporting.inputs import Inputs

TITLE = "Use of the annotations"
SWITCHES = (
    "rl.credit.kind, rl.critic.init, rl.curriculum.kind, rl.algorithm (step_dpo and others), annotate.q_model.init, and models "
    "with +q in evaluate.models"
)


def used(params: Params, domain: str) -> list[str]:
    """The uses that later stages make of a domain's annotations; [] for none."""
    method, rl = resolve_section(params.section("rl", domain), params.model.max_length)
    found = []
    first = warm_start_of(rl)
    for learns, section in ((method, rl), *([first] if first else [])):
        if learns.data == "pairs" and section.preference.source in ("trees", "all"):
            found.append("preference pairs for RL")
        if learns.data == "paths":
            found.append("correct paths for RL")
        if plays_guided(section) and section.guidance.source == "mcts":
            found.append("hints for guided attempts")
    if rl.credit.kind == "annotated":
        found.append("step credit from the step-value model")
    if rl.credit.kind == "progress" and rl.credit.step_reward == "spa":
        found.append("step rewards from the progress estimator")
    if learns_values(rl) and rl.critic.init == "value_model":
        found.append("critic initialised from the step-value model")
    if rl.curriculum.kind == "value" and method.data == "episodes":
        found.append("task curriculum from the step-value model")
    q_model = params.section("annotate", domain).q_model
    if q_model.kind == "regression" and q_model.init == "value_model":
        found.append("Q-model initialised from the step-value model")
    if q_model.kind != "none" and any(model.endswith("+q") for model in params.evaluate.models or []):
        found.append("best-of-n actions by the Q-model in evaluation")
    return found


def _this_run(uses: Mapping[str, list[str]]) -> list[Block]:
    blocks: list[Block] = [Text(f"{domain}: {'; '.join(found)}.") for domain, found in uses.items() if found]
    if unused := [domain for domain, found in uses.items() if not found]:
        blocks.append(Text(f"Not used by later stages: {', '.join(unused)}. Switches: {SWITCHES}."))
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


def use_blocks(inputs: Inputs) -> list[Block]:
    """Heading, the uses of this run, and the board's verdicts."""
    uses = {domain: used(inputs.params, domain) for domain in inputs.params.domains}
    blocks: list[Block] = [Heading(TITLE), *_this_run(uses)]
    measured = inputs.uses
    if not measured:
        return blocks
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
