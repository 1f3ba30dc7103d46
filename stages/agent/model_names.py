"""Names of a run's models (base, sft, rl@<domain>, merged, merged_linear) and their folders."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.runtime.run_params import RunParams

SELECTORS = {
    "q": "the Q-model of annotate",
    "value": "the token values that rl learned (b_coder)",
    "logprob": "the policy's own log-probability",
    "vote": "majority vote over the draws (self-consistency)",
    "reward": "the reward model that rl fitted to preference pairs (preference.reward_model)",
}
"""`<model>+<selector>` in evaluate.models: at each turn, the best of several actions by this criterion; for `reward`, the best of
several episodes."""
CLOSED_BOOK = "closed_book"
"""`<model>+closed_book` in evaluate.models: without tools, in domains whose settings have `closed_book`."""
ENVIRONMENTS: Mapping[str, Mapping[str, Any]] = {
    CLOSED_BOOK: {CLOSED_BOOK: True},
    "self_search": {"tool_mode": "self"},
    "real_search": {"tool_mode": "real"},
    "gated_search": {"tool_mode": "entropy_gated"},
}
"""`<model>+<variant>` in evaluate.models: the model plays with these settings of the environment, in domains that have them."""
FEW_SHOT = "few_shot"
"""`<model>+few_shot` in evaluate.models: demonstrations of training tasks come before the task (evaluate.examples)."""
SEARCH = "search"
"""`<model>+search` in evaluate.models: before each turn it simulates episodes in the environment (evaluate.search)."""
VARIANTS = (*SELECTORS, *ENVIRONMENTS, FEW_SHOT, SEARCH)


def evaluated_domains(params: RunParams) -> list[str]:
    """The domains whose panels are played: those that are trained on, then those of evaluate.transfer."""
    return [*params.domains, *params.evaluate.transfer]


def model_names(domains: Sequence[str]) -> list[str]:
    """Names of a run's models, in the order in which they are made."""
    return ["base", "sft", *(f"rl@{domain}" for domain in domains), "merged", "merged_linear"]


def model_folder(name: str, root: Path, params: RunParams) -> Path:
    """The folder of the run's model `name`; a hub model (base only) is downloaded if necessary. Raises ParamsError for an unknown
    name."""
    from stages.agent.policy import HUB, load_policy

    known = model_names(params.domains)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise ParamsError(f"unknown model '{name}'{hint} Known models: {', '.join(known)}; name other models by folder")
    if name == "base":
        path = params.model.path
        return load_policy(path).folder if path.startswith(HUB) else root / path
    return root / "data" / "models" / name.replace("@", "/")


def resolve_model(name: str, root: Path, params: RunParams) -> Path:
    """`model_folder(name)`, or the folder at path `name`: one with a slash, or an existing folder that is not a model's name."""
    path = root / name
    if name not in model_names(params.domains) and ("/" in name or path.is_dir()):
        return path
    return model_folder(name, root, params)
