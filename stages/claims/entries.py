"""The experiments of reports/claims as a session takes them: read, checked, each with the params.yaml that it starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.claims.checks import check_environments, check_experiment
from stages.claims.experiment import FOLDER, Experiment, load_experiment, slugs
from stages.params import parse_params
from stages.records.sections import deep_merge
from stages.runtime.validation import ParamsError, guess, parse_yaml

PROFILES = Path("profiles")


@dataclass(frozen=True)
class Entry:
    """An experiment, and params.yaml with the defaults and its profile."""

    experiment: Experiment
    params: dict[str, Any]


def with_profile(root: Path, profile: str | None, params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` (params.yaml with its defaults) with the values of profiles/<profile>.yaml over them. Raises ParamsError."""
    if profile is None:
        return dict(params)
    path = root / PROFILES / f"{profile}.yaml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in (root / PROFILES).glob("*.yaml")))
        raise ParamsError(f"unknown profile {profile}; {PROFILES} has {known}")
    values = deep_merge(params, parse_yaml(path.read_bytes(), path))
    return parse_params(values, f"params.yaml with {PROFILES}/{profile}.yaml").model_dump()


def chosen(root: Path, names: Iterable[str], profile: str | None) -> dict[str, Experiment]:
    """The experiments `names`, or without names all of this profile (None: all that have none). Raises ParamsError for unknown
    names, invalid experiments, a profile that no experiment has, and one that is not that of an experiment that is named."""
    known, named = slugs(root), list(names)
    if unknown := sorted(set(named) - set(known)):
        raise ParamsError(f"unknown experiment {', '.join(unknown)}{guess(unknown[0], known)}; {FOLDER} has {', '.join(known)}")
    found = {slug: load_experiment(root / FOLDER / f"{slug}.yaml") for slug in named or known}
    if named:
        if profile and (others := [f"{slug}: {one.profile or 'none'}" for slug, one in found.items() if one.profile != profile]):
            raise ParamsError(f"not of profile {profile}, but {', '.join(others)}; run each profile's experiments by themselves")
        return found
    if profile not in (profiles := {None, *(one.profile for one in found.values())}):
        has = ", ".join(sorted(name for name in profiles if name)) or "none"
        raise ParamsError(f"no experiment of {FOLDER} has profile {profile}; their profiles are {has}")
    return {slug: one for slug, one in found.items() if one.profile == profile}


def entry_of(root: Path, experiment: Experiment, params: Mapping[str, Any], source: str) -> Entry:
    """`params`: params.yaml with its defaults; `source`: the experiment's file. Raises ParamsError for an experiment whose arms
    are no valid params.yaml."""
    values = with_profile(root, experiment.profile, params)
    check_environments(check_experiment(experiment, values, source), source)
    return Entry(experiment, values)


def load_entries(root: Path, names: Iterable[str], params: Mapping[str, Any], profile: str | None = None) -> dict[str, Entry]:
    """Entries of the experiments that `chosen` finds, by name. Raises ParamsError."""
    return {
        slug: entry_of(root, experiment, params, f"{FOLDER}/{slug}.yaml")
        for slug, experiment in chosen(root, names, profile).items()
    }
