"""The end of the chapter on trees: what the run makes of them, and what each use was worth where that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.algorithms.needs import learns_values
from stages.algorithms.resolve import resolve_section
from stages.params import Params
from stages.reporting.blocks import Block, Heading, Table, Text, number
from stages.reporting.inputs import Inputs

TITLE = "What is made of it"
NOT_MEASURED = (
    "What each use is worth was not measured here: reports/annotation_uses.json is missing. Run `make claims "
    "METHOD=annotation_uses`, then `python -m stages.reporting.readme`."
)


def used(params: Params, domain: str) -> list[str]:
    """What the later stages take of one domain's annotations, in words; [] for nothing."""
    method, rl = resolve_section(params.section("rl", domain), params.model.max_length)
    found = []
    if method.data == "pairs":
        found.append("its preference pairs are what the policy learns from")
    if rl.credit.kind == "annotated":
        found.append("turns are credited by the step-value model")
    if rl.credit.kind == "progress":
        found.append("turns are rewarded by the progress estimator")
    if learns_values(rl) and rl.critic.init == "value_model":
        found.append("the critic starts as the step-value model")
    if rl.curriculum.kind == "value" and method.data == "episodes":
        found.append("tasks are drawn by what the step-value model thinks of them")
    if any(model.endswith("+q") for model in params.evaluate.models or []):
        found.append("in the evaluation a Q-model chooses among actions")
    return found


def _this_run(inputs: Inputs) -> list[Block]:
    told = {domain: used(inputs.params, domain) for domain in inputs.params.domains}
    blocks: list[Block] = [Text(f"{domain}: {'; '.join(uses)}.") for domain, uses in told.items() if uses]
    idle = [domain for domain, uses in told.items() if not uses]
    if idle:
        blocks.append(
            Text(
                f"Nothing of it is used in {' and '.join(idle)}: the policy learns from the outcomes of its own episodes alone. "
                "The switches are rl.credit.kind, rl.critic.init, rl.curriculum.kind, rl.algorithm (step_dpo and others) and "
                "models with +q in evaluate.models."
            )
        )
    return blocks


def _measured(measured: Mapping[str, Any]) -> list[Block]:
    rows = [[claim["says"], claim["state"], claim["difference"]] for claim in measured["claims"]]
    title = (
        f"What each use was worth on {measured['environment']} ({measured['seeds']} paired seeds, "
        f"{number(measured['environment_steps'])} environment steps per run that plays)"
    )
    gains = [claim for claim in measured["claims"] if claim["state"] == "reproduced" and claim["gain"]]
    if gains:
        summary = "A gain over the same run without annotations was shown for: " + " ".join(claim["says"] for claim in gains)
    else:
        summary = (
            "None of these uses was shown to be a gain over the same run without annotations. Where the step-value model "
            "explains little of the outcomes of held-out trees (explained variance in the table above), it adds little to what "
            "the outcomes themselves say."
        )
    return [
        Table(title, ("claim", "verdict", "difference (95 % interval)"), rows, text_columns=3),
        Text(summary + " Numbers per seed: reports/claims/README.md."),
    ]


def use_blocks(inputs: Inputs) -> list[Block]:
    """Heading, what this run uses, and the board's verdicts."""
    blocks: list[Block] = [Heading(TITLE), *_this_run(inputs)]
    return blocks + (_measured(inputs.uses) if inputs.uses else [Text(NOT_MEASURED, tone="note")])
