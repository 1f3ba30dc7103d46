"""Asks the evaluated models what they prefer (evaluate.utilities)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.agent.policy import load_policy, policy_hash
from stages.judging.chooser import Chooser
from stages.judging.utilities import measured
from stages.judging.utility_settings import Utilities
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.stage import StageContext

SECTION = "evaluate.utilities"


def utilities_of(context: StageContext, folders: Mapping[str, Path], params: Utilities) -> dict[str, Any]:
    """Model -> its utilities and their coherence, and the outcomes. Models with the same weights are asked once; each model is a
    checkpoint. Raises ValueError if no model is left to ask."""
    plain = {name: folder for name, folder in folders.items() if "+" not in name}
    chosen = {name: folder for name, folder in plain.items() if params.models is None or name in params.models}
    if not chosen:
        raise ValueError(f"{SECTION}.models {params.models} names none of the evaluated models {', '.join(plain)}; add one")
    checkpoints, found, known = Checkpoints(context), dict[str, Any](), dict[str, Any]()
    with context.progress("asking for preferences", len(chosen), "model") as bar:
        for name, folder in chosen.items():
            digest = policy_hash(folder)
            if digest not in known:
                stored = checkpoints.load(f"utilities-{digest}")
                known[digest] = stored if stored is not None else _asked(context, folder, params)
                checkpoints.save(f"utilities-{digest}", known[digest])
            found[name] = known[digest]
            bar.advance(1)
            for key, value in found[name].items():
                if isinstance(value, (int, float)):
                    context.metric(f"utilities/{name}/{key}", float(value))
    return {"outcomes": list(params.outcomes), "models": found}


def _asked(context: StageContext, folder: Path, params: Utilities) -> dict[str, Any]:
    resources = context.params.resources
    policy = load_policy(folder, device=resources.device, precision=resources.precision)
    chooser = Chooser(policy, params.question, params.options, context.params.model.max_length, SECTION)
    return measured(params, chooser.probabilities, context.params.seed)
