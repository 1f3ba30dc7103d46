"""Checks of accepted settings: valid settings must also let an expert play, tokens be sampled and models be merged."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from stages.algorithms.algorithm import resolve
from stages.curation.demonstrations import play_out
from stages.engine.sampling import draw
from stages.environments.registry import load_domain
from stages.merging.registry import get_merger
from stages.merging.streaming import tensor_generator
from stages.params import Params

from .outcomes import LostError

SLOW_TO_BUILD = ("textworld", "code", "code_folder")
"""Domains whose tasks are compiled, or need a sandbox: their settings and records are checked, but nothing is played."""
VOCABULARY = 400


def scalars(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple, set)) else ()
    for key, held in items:
        yield from scalars(held, (*path, str(key)))
        if isinstance(key, str):
            yield ".".join(path), key
    if not isinstance(value, (Mapping, list, tuple, set)):
        yield ".".join(path), value


def check_meaning(resolved: Any) -> None:
    """Raise LostError for an unusable value: a non-finite number, an integer that no tensor or table holds, text that is not
    Unicode."""
    for key, value in scalars(resolved):
        if isinstance(value, float) and not math.isfinite(value):
            raise LostError(f"accepted {key} = {value}")
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise LostError(f"accepted {key} = an integer of {value.bit_length()} bits")
        if isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise LostError(f"accepted {key} with a lone surrogate") from error


def check_nothing_ignored(given: Any, meant: Any, path: str = "") -> None:
    """Raise LostError if a key of `given` is not in `meant`, or a value differs."""
    if isinstance(given, Mapping):
        if not isinstance(meant, Mapping):
            raise LostError(f"{path}: a mapping was parsed as {meant!r}")
        known = {str(key): value for key, value in meant.items()}
        for key, value in given.items():
            if str(key) not in known:
                raise LostError(f"{path}.{key} was ignored")
            check_nothing_ignored(value, known[str(key)], f"{path}.{key}")
    elif isinstance(given, (list, tuple)):
        if not isinstance(meant, (list, tuple)) or len(given) != len(meant):
            raise LostError(f"{path}: a list was parsed as {meant!r}")
        for place, (one, other) in enumerate(zip(given, meant, strict=True)):
            check_nothing_ignored(one, other, f"{path}.{place}")
    elif given != meant or isinstance(given, bool) != isinstance(meant, bool) or isinstance(given, str) != isinstance(meant, str):
        raise LostError(f"{path}: {given!r} was parsed as {meant!r}")


_PLAYED: set[str] = set()


def check_plays(name: str, settings: Mapping[str, Any]) -> None:
    """Raise whatever goes wrong when an expert plays two tasks of a domain with these settings; equal settings are tried once.
    Recipes may refuse the settings if they name the key to change."""
    key = f"{name} {sorted(settings.items(), key=str)!r}"
    if key in _PLAYED:
        return
    domain = load_domain(name, settings)
    try:
        records = list(itertools.islice(domain.recipes(8, 0), 8))
    except ValueError as error:
        if f"per_domain.{name}" not in str(error):
            raise
        records = []
    for record in records:
        domain.check(record)
    if name in SLOW_TO_BUILD:
        _PLAYED.add(key)
        return
    with tempfile.TemporaryDirectory() as folder:
        tasks = domain.build(records, Path(folder), 1)
        environment = domain.make(Path(folder))
        for task in tasks[:2]:
            environment.reset(task)
            play_out(environment, task, "expert", "expert", lambda: domain.expert(environment), complete=False)
        environment.close()
    _PLAYED.add(key)


@functools.lru_cache(maxsize=4096)
def check_draws(temperature: float, top_p: float, top_k: int) -> None:
    """Raise LostError if sampled tokens are invalid or have no finite log-probability."""
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 5
    columns = [torch.full((4,), value, dtype=torch.float64) for value in (temperature, top_p)]
    token, logprob = draw(logits, *columns, torch.full((4,), top_k), torch.tensor([0.0, 0.3, 0.7, 0.999], dtype=torch.float64))
    if not bool(((token >= 0) & (token < VOCABULARY) & logprob.isfinite()).all()):
        raise LostError(f"temperature {temperature}, top_p {top_p}, top_k {top_k} draw {token.tolist()}, {logprob.tolist()}")


def check_merges(params: Params) -> None:
    """Raise LostError if merging small tensors gives numbers that are not finite."""
    generator = torch.Generator().manual_seed(0)
    base, *models = [torch.randn(4, 6, generator=generator) for _ in range(len(params.domains) + 1)]
    method = params.merge.method
    merger, chosen = get_merger(method), params.merge.bind(params.domains)
    totals = merger.scan("x", base, models, chosen)
    merged = merger.merge_tensor("x", base, models, chosen, tensor_generator(0, "fuzz", "x"), totals)
    if not bool(merged.isfinite().all()):
        raise LostError(f"merge {params.merge.model_dump_json()} gives {merged.flatten()[:3].tolist()}")


def check_works(params: Params) -> None:
    """Raise LostError, or whatever goes wrong, if these settings do not work."""
    for name in params.domains:
        check_plays(name, params.per_domain[name].environment)
        for section in ("rollout", "annotate", "rl"):
            sampling = params.section(section, name).sampling
            check_draws(sampling.temperature, sampling.top_p, sampling.top_k)
        resolve(params.section("rl", name), params.model.max_length)
    sampling = params.evaluate.sampling
    check_draws(sampling.temperature, sampling.top_p, sampling.top_k)
    check_merges(params)
