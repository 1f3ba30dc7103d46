"""Sections of params.yaml as stages use them: a domain's overrides applied, the seed resolved, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

if TYPE_CHECKING:
    from stages.runtime.run_params import RunParams
    from stages.runtime.validation import Section


def deep_merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`lower` recursively updated with `upper`."""
    merged = dict(lower)
    for key, value in upper.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = deep_merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def section_of(params: RunParams, name: str, domain: str) -> Any:
    """Section `name` with the overrides of `domain`. Raises pydantic's ValidationError for invalid overrides."""
    shared: Section = getattr(params, name)
    override = getattr(params.per_domain[domain], name)
    if not override:
        return shared
    merged = deep_merge(shared.model_dump(exclude_unset=True), override)
    return type(shared).model_validate(merged)


class Seeded(Protocol):
    """A section with a seed of its own."""

    seed: int | None


def seed_of(params: RunParams, section: Seeded) -> int:
    """The section's own seed, or `params.seed` where it is null."""
    return params.seed if section.seed is None else section.seed


HASHED_AS = {"group_resampling": "filling"}
"""Renamed keys are hashed under their first name, so that a rename changes no hash in outputs and results."""


ADDED: Mapping[str, Any] = {
    "warmup_updates": 0,
    "warm_start": {},
    "add_tree_steps": False,
    "imitation": {"ratio": 0.0, "coef": 1.0, "capacity": 20_000},
    "reannotate": {"every": 0, "annotate": {}},
    "observation": {"coef": 0.0},
    "guided": 0.0,
    "instructed": 0.0,
    "distribution": None,
    "std_eps": 0.1,
    "ratio_range": [0.1, 10.0],
    "scale_of": "spread",
    "scale_eps": 0.0,
    "scaled": "both",
    "ensemble": None,
    "model_rollouts": None,
    "roles": {},
    "combine": False,
    "labelled_pairs": None,
    "least_kappa": None,
    "longest_wait_s": 300.0,
}
"""Keys that are left out of hashes while they have this value, their default: adding them changed no hash."""


ADDED_PARTS: Mapping[str, Any] = {
    "guidance": {
        "kinds": ["plan", "env_feedback", "env_interaction"],
        "source": "oracle",
        "attempts": 4,
        "max_tokens": 64,
        "forbid_answer": True,
        "drop_mentions": ["hint", "guidance"],
        "server": {
            "base_url": "http://127.0.0.1:8000/v1",
            "model": "",
            "temperature": 0.0,
            "max_tokens": 256,
            "timeout_s": 60.0,
            "attempts": 5,
            "wait_s": 1.0,
            "requests": 4,
            "cache": "data/replies",
        },
    },
    "cost": {
        **{"kind": "none", "weight": 0.0, "only_correct": True, "transform": "sqrt", "bounds": "running", "window": 1000},
        **{"low": 0.05, "high": 0.95, "cheap": 0.0, "dear": 1000.0},
    },
    "evidence": "exclude",
    "overlong_of": None,
    "team": {"members": [], "weights": "own", "credit": "chain", "token_gamma": 1.0, "interval": 0},
    **{"ratio_norm": "sum", "kl_stop": None, "trunk": "own", "hidden": [], "huber_delta": None, "value_clip": 0.0},
    "reward_model": False,
    "reward_learning_rate": 1e-4,
}
"""As ADDED, for keys that are null in a section that is not resolved: left out while nothing of them is set, too."""


REWARDED_BY = {"judge": "judge", "references": "references", "verifier": "verifier"}
"""Keys of section `rl` -> the reward.kind with which they have an effect; without it they are left out of hashes."""


IDLE = {"judge_model": ("kind", "none"), "control": ("kind", "none")}
"""Sections that are left out of hashes while this key of theirs has this value: adding them changed no hash."""


def _without_idle(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Section `rl` without the keys of REWARDED_BY that have no effect (where it is not resolved, without those of which nothing
    is set), and without the default source of tasks. Other mappings as they are."""
    reward = values.get("reward")
    if not isinstance(reward, Mapping):
        return values

    def idle(key: str) -> bool:
        held, kind = values.get(key), reward.get("kind")
        unset = isinstance(held, Mapping) and all(value is None for value in held.values())
        return key in REWARDED_BY and isinstance(held, Mapping) and kind != REWARDED_BY[key] and (kind is not None or unset)

    tasks = values.get("tasks")
    static = isinstance(tasks, Mapping) and tasks.get("source") in (None, "static") and not tasks.get("settings")
    return {key: value for key, value in values.items() if not idle(key) and not (static and key == "tasks")}


def _is_idle(key: str, value: Any) -> bool:
    switch, off = IDLE.get(key, ("", None))
    return bool(switch) and isinstance(value, Mapping) and value.get(switch, off) == off


def _as_before(key: str, value: Any) -> bool:
    """Whether a key was added later and nothing of it is set."""
    if key in ADDED_PARTS:
        unset = all(one is None for one in value.values()) if isinstance(value, Mapping) else value is None
        return unset or value == ADDED_PARTS[key]
    return _is_idle(key, value) or (key in ADDED and value == ADDED[key])


def _hashed(values: Any) -> Any:
    if isinstance(values, Mapping):
        values = _without_idle(values)
        kept = {key: value for key, value in values.items() if not _as_before(key, value)}
        return {HASHED_AS.get(key, key): _hashed(value) for key, value in kept.items()}
    return [_hashed(value) for value in values] if isinstance(values, (list, tuple)) else values


def params_hash(params: Any) -> str:
    """16 hex digits that identify parameters (a model, or JSON values), independent of key order."""
    values = params.model_dump(mode="json") if isinstance(params, BaseModel) else params
    return hashlib.sha256(json.dumps(_hashed(values), sort_keys=True).encode()).hexdigest()[:16]
