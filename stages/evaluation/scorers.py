"""Which domains a variant of a model plays: those with a model to rank actions or episodes (a Q-model written by annotate, token
values or a reward model learned by rl), or those that can be played without tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.agent.model_names import CLOSED_BOOK
from stages.environments.registry import load_domain

LACKING = {
    "q": "No domain has a Q-model: annotate fits one if annotate.q_model.kind is not none",
    "value": "No domain has token values: rl learns them with rl.algorithm b_coder",
    "reward": "No domain has a reward model: rl fits one with rl.preference.reward_model: true",
}


def scorers(models: Path, domains: Sequence[str]) -> dict[str, list[str]]:
    """q, value, reward -> those of `domains` with such a model in the folder `models` (data/models)."""
    from stages.values.q_model import q_model_kind
    from stages.values.reward_model import has_reward_model
    from stages.values.token_q import has_token_q

    return {
        "q": [domain for domain in domains if q_model_kind(models / "q" / domain) != "none"],
        "value": [domain for domain in domains if has_token_q(models / "rl" / domain)],
        "reward": [domain for domain in domains if has_reward_model(models / "rl" / domain)],
    }


def closed_book_domains(domains: Sequence[str]) -> list[str]:
    """Those of `domains` that can be played without tools."""
    return [domain for domain in domains if CLOSED_BOOK in type(load_domain(domain).settings).model_fields]


def scored_domains(models: Path, domains: Sequence[str], choice: str) -> list[str]:
    """The domains whose panels a model with this choice among actions plays ("": no choice): those with a Q-model or token
    values if it needs them, those that can be played without tools for `closed_book`, else all. Raises FileNotFoundError if
    there are none."""
    if choice == CLOSED_BOOK:
        return closed_book_domains(domains)
    found = scorers(models, domains)[choice] if choice in LACKING else list(domains)
    if not found:
        raise FileNotFoundError(f"evaluate.models: +{choice} finds no model to rank with in {models}. {LACKING[choice]}")
    return found
