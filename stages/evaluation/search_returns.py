"""Checks that players that search know a domain's returns, by which they scale values and know that no episode is better."""

from __future__ import annotations

from stages.agent.model_names import SEARCH
from stages.evaluation.settings import Evaluate
from stages.runtime.validation import ParamsError


def check_search(evaluate: Evaluate, domain: str, returns: tuple[float, float]) -> None:
    """Raise ParamsError if a model plays by search and `search.returns` are not those of a domain's episodes."""
    searches = any(name.endswith(f"+{SEARCH}") for name in evaluate.models or ())
    if searches and tuple(evaluate.search.returns) != returns:
        raise ParamsError(
            f"params.yaml: evaluate.search.returns is {evaluate.search.returns}, and episodes of {domain} return {list(returns)}"
            f": set it to {list(returns)}, or take models with +{SEARCH} out of evaluate.models"
        )
