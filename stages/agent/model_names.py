"""The models of a run by their names: base, sft, rl@<domain>, merged, merged_linear."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.params import Params

SELECTORS = {
    "q": "the Q-model of annotate",
    "value": "the values of tokens that rl has learnt (b_coder)",
    "logprob": "the policy's own log-probability",
    "vote": "how many of the draws are the same action (self-consistency)",
}
"""`<model>+<choice>` in evaluate.models: at each turn the best of several actions, by this."""


def model_names(domains: Sequence[str]) -> list[str]:
    """Names of a run's models, in the order they are made."""
    return ["base", "sft", *(f"rl@{domain}" for domain in domains), "merged", "merged_linear"]


def model_folder(name: str, root: Path, params: Params) -> Path:
    """The folder of the run's model called `name`; a hub model, which only base can be, is downloaded if need be.

    Raises ParamsError for a name that the run does not have.
    """
    from stages.agent.policy import HUB, load_policy

    known = model_names(params.domains)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise ParamsError(f"there is no model '{name}'{hint} There are {', '.join(known)}, and folders by their path")
    if name == "base":
        path = params.model.path
        return load_policy(path).folder if path.startswith(HUB) else root / path
    return root / "data" / "models" / name.replace("@", "/")


def resolve_model(name: str, root: Path, params: Params) -> Path:
    """`model_folder` of a name, and what has a slash in it, or is no name and a folder, as a path."""
    path = root / name
    if name not in model_names(params.domains) and ("/" in name or path.is_dir()):
        return path
    return model_folder(name, root, params)
