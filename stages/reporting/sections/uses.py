"""The end of the chapter on trees: what the run makes of them, and what each use was worth where that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.algorithms.parts.critic import learns_values
from stages.algorithms.resolve import resolve_section
from stages.params import Params
from stages.reporting.blocks import Block, Heading, Table, Text, number
from stages.reporting.inputs import Inputs

TITLE = "What is made of it"


def used(params: Params, domain: str) -> list[str]:
    """What the later stages take of one domain's annotations, in words; [] for nothing."""
    method, rl = resolve_section(params.section("rl", domain), params.model.max_length)
    found = []
    if method.data == "pairs" and rl.preference.source != "imported":
        found.append("the trees' preference pairs are what the policy learns from")
    if rl.credit.kind == "annotated":
        found.append("turns are credited by the step-value model")
    if rl.credit.kind == "progress" and rl.credit.step_reward == "spa":
        found.append("turns are rewarded by the progress estimator")
    if learns_values(rl) and rl.critic.init == "value_model":
        found.append("the critic starts as the step-value model")
    if rl.curriculum.kind == "value" and method.data == "episodes":
        found.append("tasks are drawn by what the step-value model thinks of them")
    q_model = params.section("annotate", domain).q_model
    if q_model.kind == "regression" and q_model.init == "value_model":
        found.append("the Q-model starts as the step-value model")
    if q_model.kind != "none" and any(model.endswith("+q") for model in params.evaluate.models or []):
        found.append("in the evaluation a Q-model chooses among actions")
    return found


def _this_run(told: Mapping[str, list[str]]) -> list[Block]:
    blocks: list[Block] = [Text(f"{domain}: {'; '.join(uses)}.") for domain, uses in told.items() if uses]
    idle = [domain for domain, uses in told.items() if not uses]
    if idle:
        blocks.append(
            Text(
                f"Nothing that later stages do depends on it in {' and '.join(idle)}. The switches are rl.credit.kind, "
                "rl.critic.init, rl.curriculum.kind, rl.algorithm (step_dpo and others), annotate.q_model.init and models with "
                "+q in evaluate.models."
            )
        )
    return blocks


def _known(inputs: Inputs) -> str:
    """What the step-value models of this run know, as a sentence; empty where there are none."""
    shares = []
    for domain, given in inputs.domains.items():
        calibration = ((given.annotate or {}).get("value_model") or {}).get("calibration") or {}
        if "explained_variance" in calibration:
            shares.append(f"{100 * calibration['explained_variance']:.0f} % in {domain}")
    if not shares:
        return ""
    return (
        " What a step-value model can add is bounded by what it knows: on held-out trees this run's explains "
        f"{', '.join(shares)} of the variance of outcomes."
    )


def _summary(measured: Mapping[str, Any], told: Mapping[str, list[str]]) -> str:
    ended = [claim for claim in measured["claims"] if claim["state"] in ("reproduced", "not reproduced", "undecided")]
    gains = [claim for claim in ended if claim["gain"]]
    shown = [claim["says"] for claim in gains if claim["state"] == "reproduced"]
    if len(ended) < len(measured["claims"]):
        return "Not all of this has been measured yet (make claims METHOD=annotation_uses)."
    if not shown:
        found = "None of these uses was shown to be a gain over the same run without annotations."
        if any(claim["state"] == "reproduced" and claim["cheaper"] for claim in measured["claims"]):
            found += (
                " What is reproduced above is so against something that costs less, the policy's own draws or the policy before "
                "it learnt, and not against the best that can be had at equal cost without annotations."
            )
        return found
    unused = "" if told.get(measured["environment"]) else f" This run makes no use of it in {measured['environment']}."
    return f"Shown to be a gain over the same run without annotations: {' '.join(shown)}{unused}"


def use_blocks(inputs: Inputs) -> list[Block]:
    """Heading, what this run uses, and the board's verdicts."""
    told = {domain: used(inputs.params, domain) for domain in inputs.params.domains}
    blocks: list[Block] = [Heading(TITLE), *_this_run(told)]
    measured = inputs.uses
    if not measured:
        return blocks
    title = (
        f"What each use was worth on {measured['environment']} ({measured['seeds']} paired seeds, "
        f"{number(measured['environment_steps'])} environment steps per run that plays)"
    )
    rows = [
        [claim["says"], claim["state"] + (f"; checked: {claim['checked']}" if claim["checked"] else ""), claim["difference"]]
        for claim in measured["claims"]
    ]
    summary = _summary(measured, told) + _known(inputs) + " Numbers per seed: reports/claims/."
    return [*blocks, Table(title, ("claim", "verdict", "difference (95 % interval)"), rows, text_columns=3), Text(summary)]
