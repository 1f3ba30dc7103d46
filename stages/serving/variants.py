"""The names under which a model is served, and how each selects its actions.

`merged` and its folder `data/models/merged` are the plain policy; as in `evaluate.models`, `merged+logprob`, `merged+vote`,
`merged+q@search` and `merged+value@code` select the best of n actions by the policy's log-probability, majority vote, a domain's
Q-model or its specialist's token values. A server started as `merged+q@search` also uses this for the plain names, so that
clients that request a model by its folder (`resources.engine`) get it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from stages.agent.best_of_n import Ranking, by_logprob
from stages.agent.model_names import model_names, resolve_model
from stages.evaluation.panels import BestOf, ranking
from stages.evaluation.scorers import LACKING, scorers
from stages.params import Params
from stages.runtime.validation import ParamsError


@dataclass(frozen=True)
class Variant:
    """Each turn is the best of `n` draws by `rank()`, which loads the ranking on first use; None is a majority vote."""

    n: int
    rank: Callable[[], Ranking | None]


@dataclass(frozen=True)
class ServedModel:
    """A model to serve; `names`: the names it is served under, plain ones first -> variant; `plain`: those without a selector."""

    folder: Path
    names: dict[str, Variant]
    plain: tuple[str, ...]


PLAIN = Variant(1, lambda: by_logprob)
EPISODES = "reward"
"""The selector that ranks finished episodes."""
ABSENT = {**LACKING, EPISODES: "A reward model ranks whole episodes, and a server sees single turns; evaluate.models has it"}
"""Selector -> why no name has it."""


def variants(root: Path, params: Params, name: str) -> dict[str, Variant]:
    """Suffixes of a model's name ("" for none) -> variant, as in evaluate. `+q` and `+value` without a domain are available if
    the domain is unambiguous: a specialist's own, or the only one."""

    def variant(by: str, domain: str = "") -> Variant:
        best_of = BestOf.of(by, params.evaluate, root / "data" / "models")
        return Variant(best_of.n, cache(partial(ranking, best_of, domain, params.resources.device)))

    found = {"": PLAIN, "+logprob": variant("logprob"), "+vote": variant("vote")}
    own = name.partition("@")[2] if name in model_names(params.domains) else ""
    for by, domains in scorers(root / "data" / "models", params.domains).items():
        if by == EPISODES:
            continue
        of_domain = {domain: variant(by, domain) for domain in domains}
        if own in of_domain or len(of_domain) == 1:
            found[f"+{by}"] = of_domain.get(own) or next(iter(of_domain.values()))
        found |= {f"+{by}@{domain}": one for domain, one in of_domain.items()}
    return found


def find_served_model(wanted: str, root: Path, params: Params) -> ServedModel:
    """The model called `wanted` (`merged`, `merged+q@search`, `path/to/a/folder`). Raises ParamsError for an unknown name."""
    from stages.agent.player import served_name

    name, plus, selector = wanted.partition("+")
    folder = resolve_model(name, root, params)
    known = variants(root, params, name)
    if plus + selector not in known:
        alike = [suffix for suffix in known if suffix.partition("@")[0] == plus + selector.partition("@")[0]]
        near = difflib.get_close_matches(plus + selector, alike or list(known), n=1)
        hint = f"; did you mean '{name}{near[0]}'?" if near else "."
        message = f"unknown model '{wanted}'{hint} Available: {', '.join(f'{name}{suffix}' for suffix in known)}"
        for by, lacking in ABSENT.items():
            if selector.startswith(by) and not any(suffix.startswith(f"+{by}") for suffix in known):
                message += f". {lacking}"
        raise ParamsError(message)
    chosen = known[plus + selector]
    names = {f"{name}{suffix}": variant for suffix, variant in known.items() if suffix}
    plain = (name, served_name(folder))
    return ServedModel(folder, {**dict.fromkeys(plain, chosen), **names}, plain)
