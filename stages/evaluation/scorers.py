"""Which domains a variant of a model plays: those with a model to rank actions or episodes (a Q-model written by annotate, token
values or a reward model learned by rl), or those that can be played without tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.agent.model_names import ENVIRONMENTS, FEW_SHOT
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


def variant_domains(domains: Sequence[str], variant: str) -> list[str]:
    """Those of `domains` whose environment has the settings of a variant in ENVIRONMENTS."""
    keys = ENVIRONMENTS[variant].keys()
    return [domain for domain in domains if keys <= type(load_domain(domain).settings).model_fields.keys()]


def played_domains(models: Path, trained: Sequence[str], panels: Sequence[str], model: str) -> list[str]:
    """Those of `panels` (domains, `trained` or not) that evaluate's `model` plays; demonstrations are only of trained ones. See
    `scored_domains`."""
    choice = model.partition("+")[2]
    return scored_domains(models, trained if choice == FEW_SHOT else panels, choice)


def scored_domains(models: Path, domains: Sequence[str], choice: str) -> list[str]:
    """The domains whose panels a model with this choice among actions plays ("": no choice): those with a Q-model or token
    values if it needs them, those whose environment has its settings for a variant of it, else all. Raises FileNotFoundError if
    there are none."""
    if choice in ENVIRONMENTS:
        return variant_domains(domains, choice)
    found = scorers(models, domains)[choice] if choice in LACKING else list(domains)
    if not found:
        raise FileNotFoundError(f"evaluate.models: +{choice} finds no model to rank with in {models}. {LACKING[choice]}")
    return found
