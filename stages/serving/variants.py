"""The names that a served model answers to, and how each chooses its actions.

`merged` and its folder `data/models/merged` are the policy itself; what `evaluate.models` names `merged+logprob` and so on is
served under that name: the best of n actions by the policy's own log-probability, by vote, by the Q-model of a domain
(`merged+q@search`) or by the values of tokens that its specialist has learnt (`merged+value@code`). A server that was started as
`merged+q@search` gives that the plain names, so that whoever asks for a model by its folder (`resources.engine`) gets it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from stages.agent.best_of_n import Ranking, by_logprob
from stages.agent.model_names import model_names, resolve_model
from stages.evaluation.judges import LACKING, judges
from stages.evaluation.panels import BestOf, ranking
from stages.params import Params
from stages.runtime.validation import ParamsError


@dataclass(frozen=True)
class Variant:
    """A turn is the best of `n` draws; `rank` gives the ranking, reading what ranks the first time, or None for a vote."""

    n: int
    rank: Callable[[], Ranking | None]


@dataclass(frozen=True)
class ServedModel:
    """A model to serve. `names`: every name that it answers to, the plain ones first -> how it then chooses."""

    folder: Path
    names: dict[str, Variant]


PLAIN = Variant(1, lambda: by_logprob)


def variants(root: Path, params: Params, name: str) -> dict[str, Variant]:
    """What may stand behind a model's name, "" for nothing -> how it then chooses: as in evaluate. A bare `+q` or `+value` is
    there where it is clear whose is meant: a specialist's own domain's, or the only one."""

    def choice(by: str, domain: str = "") -> Variant:
        best_of = BestOf.of(by, params.evaluate, root / "data" / "models")
        return Variant(best_of.n, cache(partial(ranking, best_of, domain, params.resources.device)))

    found = {"": PLAIN, "+logprob": choice("logprob"), "+vote": choice("vote")}
    own = name.partition("@")[2] if name in model_names(params.domains) else ""
    for by, domains in judges(root / "data" / "models", params.domains).items():
        of_domain = {domain: choice(by, domain) for domain in domains}
        if own in of_domain or len(of_domain) == 1:
            found[f"+{by}"] = of_domain.get(own) or next(iter(of_domain.values()))
        found |= {f"+{by}@{domain}": one for domain, one in of_domain.items()}
    return found


def find_served_model(wanted: str, root: Path, params: Params) -> ServedModel:
    """What `wanted` (`merged`, `merged+q@search`, `path/to/a/folder`) names. Raises ParamsError for a name that there is not."""
    from stages.agent.player import served_name

    name, plus, how = wanted.partition("+")
    folder = resolve_model(name, root, params)
    ways = variants(root, params, name)
    if plus + how not in ways:
        alike = [way for way in ways if way.partition("@")[0] == plus + how.partition("@")[0]]
        near = difflib.get_close_matches(plus + how, alike or list(ways), n=1)
        hint = f"; did you mean '{name}{near[0]}'?" if near else "."
        message = f"there is no '{wanted}'{hint} There are {', '.join(f'{name}{way}' for way in ways)}"
        for by, lacking in LACKING.items():
            if how.startswith(by) and not any(way.startswith(f"+{by}") for way in ways):
                message += f". {lacking}"
        raise ParamsError(message)
    plain = ways[plus + how]
    path = served_name(folder)
    return ServedModel(folder, {name: plain, path: plain, **{f"{name}{way}": choice for way, choice in ways.items() if way}})
