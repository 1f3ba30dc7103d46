"""Which domains have something to rank actions by: a Q-model, or values of tokens. It is told from what annotate and rl left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

LACKING = {
    "q": "No domain has a Q-model: annotate makes them where annotate.q_model.kind is not none",
    "value": "No domain has values of tokens: rl learns them with rl.algorithm b_coder",
}


def judges(models: Path, domains: Sequence[str]) -> dict[str, list[str]]:
    """q, value -> those of `domains` that have it in the folder `models` (data/models)."""
    from stages.values.q_model import q_model_kind
    from stages.values.token_q import has_token_q

    return {
        "q": [domain for domain in domains if q_model_kind(models / "q" / domain) != "none"],
        "value": [domain for domain in domains if has_token_q(models / "rl" / domain)],
    }


def judged(models: Path, domains: Sequence[str], choice: str) -> list[str]:
    """The domains whose panels a model that chooses so among its actions plays ("" for one that does not): those with a Q-model,
    or with values of tokens; otherwise all. Raises FileNotFoundError where a choice would have no panel to play."""
    found = judges(models, domains)[choice] if choice in LACKING else list(domains)
    if not found:
        raise FileNotFoundError(f"evaluate.models: +{choice} has nothing to choose by in {models}. {LACKING[choice]}")
    return found
