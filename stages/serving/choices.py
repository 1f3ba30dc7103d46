"""The names that a served model answers to, and how each chooses its actions.

`merged` and its folder `data/models/merged` are the policy itself; `merged+logprob` plays the best of n actions by the policy's
own log-probability, `merged+q@search` by the Q-model of a domain. A server that was started as `merged+q@search` gives that the
plain names, so that whoever asks for a model by its folder (`resources.engine`) gets it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stages.agent.named import named_or_folder
from stages.agent.selecting import Ranking, by_logprob, by_scorer
from stages.params import Params, model_names
from stages.validation import ParamsError


@dataclass(frozen=True)
class Choice:
    """A turn is the best of `n` draws; `rank` gives the ranking, reading a Q-model the first time."""

    n: int
    rank: Callable[[], Ranking]


@dataclass(frozen=True)
class Served:
    """A model to serve. `names`: every name that it answers to, the plain ones first -> how it then chooses."""

    folder: Path
    names: dict[str, Choice]


PLAIN = Choice(1, lambda: by_logprob)


def q_folders(root: Path, params: Params) -> dict[str, Path]:
    """Domain -> folder of its Q-model, for those that have one."""
    from stages.values.q_model import q_model_kind

    folders = {domain: root / "data" / "models" / "q" / domain for domain in params.domains}
    return {domain: folder for domain, folder in folders.items() if q_model_kind(folder) != "none"}


def choices(root: Path, params: Params, name: str) -> dict[str, Choice]:
    """What may stand behind a model's name, "" for nothing -> how it then chooses. A bare `+q` is there where it is clear whose
    Q-model is meant: a specialist's own domain's, or the only one."""

    def reader(folder: Path) -> Callable[[], Ranking]:
        @cache
        def read() -> Ranking:
            from stages.values.q_model import load_q_model

            return by_scorer(load_q_model(folder, root / "data" / "models" / "sft", params.resources.device))

        return read

    n = params.evaluate.best_of.n
    by_domain = {domain: Choice(n, reader(folder)) for domain, folder in q_folders(root, params).items()}
    found = {"": PLAIN, "+logprob": Choice(n, lambda: by_logprob)}
    own = name.partition("@")[2] if name in model_names(params.domains) else ""
    if own in by_domain or len(by_domain) == 1:
        found["+q"] = by_domain[own] if own in by_domain else next(iter(by_domain.values()))
    return found | {f"+q@{domain}": choice for domain, choice in by_domain.items()}


def served(wanted: str, root: Path, params: Params) -> Served:
    """What `wanted` (`merged`, `merged+q@search`, `path/to/a/folder`) names. Raises ParamsError for a name that there is not."""
    from stages.agent.engines import served_name

    name, plus, how = wanted.partition("+")
    folder = named_or_folder(name, root, params)
    ways = choices(root, params, name)
    if plus + how not in ways:
        near = difflib.get_close_matches(plus + how, list(ways), n=1)
        hint = f"; did you mean '{name}{near[0]}'?" if near else "."
        message = f"there is no '{wanted}'{hint} There are {', '.join(f'{name}{way}' for way in ways)}"
        if not any(way.startswith("+q") for way in ways):
            message += ". No domain has a Q-model: annotate makes them where annotate.q_model.kind is not none"
        raise ParamsError(message)
    plain = ways[plus + how]
    path = served_name(folder)
    return Served(folder, {name: plain, path: plain, **{f"{name}{way}": choice for way, choice in ways.items() if way}})
