"""Resolves section `rl`: the user's keys override the method's choices, which override the parts' defaults; then each part checks
its combinations. Light to import: it checks params.yaml before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from stages.algorithms.card import PIECES, Composition
from stages.algorithms.parts.guidance import plays_guided
from stages.algorithms.parts.part import Part, parts_of, refuse_idle_keys, refuse_idle_parts
from stages.algorithms.registry import composition, learns_token_values
from stages.algorithms.settings import Rl
from stages.algorithms.stage_uses import without_rollouts, without_trees
from stages.algorithms.task_source import source_class
from stages.records.sections import deep_merge
from stages.runtime.validation import ParamsError, Section, explain, nearest

OF_GROUPS = frozenset({"tasks_per_step", "group_size", "epochs", "minibatches", "dead_groups"})
"""Keys of section rl that only methods with groups of episodes read."""


def resolve_section(given: Rl, max_length: int | None = None) -> tuple[Composition, Rl]:
    """The method and the section with every key resolved; `max_length`: model.max_length, for lengths that are not set. A None in
    the result means off (no dual clip), or that nothing reads the key.

    Raises ParamsError for an unknown algorithm, for keys without effect and for invalid combinations.
    """
    method = composition(given.algorithm)
    parts = parts_of(given)
    chosen = _choices(method, parts)
    values: dict[str, Any] = {name: value for name, value in given if name not in parts}
    values |= {name: value for name, value in chosen[""].items() if name not in given.model_fields_set}
    if "minibatches" not in given.model_fields_set:
        # Minibatches are whole groups, so there are no more of them than tasks.
        values["minibatches"] = min(values["minibatches"], given.tasks_per_step)
    for name, part in parts.items():
        defaults = {key: field.default for key, field in type(part).model_fields.items()}
        values[name] = {**defaults, **chosen[name], **{key: getattr(part, key) for key in part.model_fields_set}}
    for part in parts.values():
        part.derive(given, values, max_length)
    settings = _settings(given, method)
    values["settings"] = settings if method.derive is None else method.derive(settings, values)
    try:
        resolved = Rl.model_validate(values)
    except ValidationError as error:
        raise ParamsError(explain(error, Rl, f"algorithm {method.card.slug}", "rl.")) from error
    _check(given, resolved, method)
    if method.data == "episodes":
        for role in source_class(resolved.tasks.source).roles:
            role_section(method, resolved, role)
    warm_start_of(resolved, max_length)
    return method, resolved


def _choices(method: Composition, parts: Mapping[str, Part]) -> dict[str, dict[str, Any]]:
    """The method's choices by part, those of section `rl` itself under "". Raises ParamsError for a part that does not exist."""
    slug, chosen = method.card.slug, {name: dict[str, Any]() for name in ("", *parts)}
    for piece in method.pieces:
        if piece not in PIECES:
            raise ParamsError(f"algorithm {slug}: `pieces` has the unknown part '{piece}'.{nearest(piece, list(PIECES))}")
        chosen[piece][parts[piece].switch] = "own"
    for key, value in method.parts.items():
        section, _, name = key.rpartition(".")
        if section not in chosen:
            raise ParamsError(f"algorithm {slug}: `parts` has the unknown part '{section}'.{nearest(section, list(parts))}")
        chosen[section][name] = value
    return chosen


ROLE_KEYS = ("advantage", "loss", "reward", "group_size", "sampling")
"""Keys that `rl.roles` may set for a role."""


def role_section(method: Composition, rl: Rl, role: str) -> Rl:
    """The resolved section `rl` as it is for the episodes of a role: the choices of the task source for the role override it, the
    method's these, and `rl.roles` both. Raises ParamsError for keys that a role can't have or that have no effect."""
    own = rl.roles.get(role, {})
    if other := sorted(own.keys() - set(ROLE_KEYS)):
        raise ParamsError(f"rl.roles.{role}.{other[0]}: a role can have its own {', '.join(ROLE_KEYS)}; remove it")
    chosen: dict[str, Any] = {}
    by_source = source_class(rl.tasks.source).role_parts.get(role, {})
    for key, value in {**by_source, **method.roles.get(role, {})}.items():
        section, _, name = key.rpartition(".")
        chosen = deep_merge(chosen, {section: {name: value}} if section else {name: value})
    values = deep_merge(deep_merge(rl.model_dump(), chosen), own)
    values |= {"settings": rl.settings, "tasks": rl.tasks}
    try:
        given, resolved = Rl.model_validate(own), Rl.model_validate(values)
    except ValidationError as error:
        raise ParamsError(explain(error, Rl, "params.yaml", f"rl.roles.{role}.")) from error
    try:
        refuse_idle_keys(given, resolved, method)
        for name in ROLE_KEYS[:3]:
            getattr(resolved, name).check(resolved, method)
    except ParamsError as error:
        raise ParamsError(f"rl.roles.{role}: {error}") from error
    return resolved


def warm_start_of(rl: Rl, max_length: int | None = None) -> tuple[Composition, Rl] | None:
    """The method and the resolved section of `rl.warm_start`, if there is one. Raises ParamsError as `resolve_section`, and for a
    method that learns neither from trees nor from the rollout stage's attempts."""
    if not rl.warm_start:
        return None
    try:
        given = Rl.model_validate({"seed": rl.seed, **rl.warm_start})
    except ValidationError as error:
        raise ParamsError(explain(error, Rl, "rl.warm_start")) from error
    method = composition(given.algorithm)
    if method.data not in ("pairs", "paths", "attempts") or given.warm_start:
        raise ParamsError(
            f"rl.warm_start is training on annotate's trees or the rollout stage's attempts before rl, which algorithm "
            f"{given.algorithm} with its own warm_start {given.warm_start} is not; set rl.warm_start.algorithm to tree_bc, "
            f"step_dpo or rejection_sft, and nothing below it to warm_start"
        )
    if idle := sorted(given.model_fields_set & OF_GROUPS):
        source = "the rollout stage's attempts" if method.data == "attempts" else "annotate's trees"
        raise ParamsError(
            f"rl.warm_start.{idle[0]} has no effect: {given.algorithm} learns from {source}, not from groups of played episodes; "
            f"remove it"
        )
    try:
        method, resolved = resolve_section(given, max_length)
    except ParamsError as error:
        raise ParamsError(f"rl.warm_start: {error}") from error
    if plays_guided(resolved):
        raise ParamsError(
            "rl.warm_start: guided attempts are played for rl's own training, not before a warm start: leave settings.guided and "
            "preference.source: guided out of rl.warm_start"
        )
    return method, resolved


def contradictions(method: Composition, rl: Rl, section: Callable[[str], Any]) -> Iterator[str]:
    """What makes the resolved section impossible with the other sections of params.yaml; see Part.contradictions."""
    rank = section("model").lora.rank
    if learns_token_values(method) and rank:
        yield f"rl.algorithm {method.card.slug} trains all weights of a value network, and model.lora.rank is {rank}: set it to 0"
    yield from without_trees(method, rl, section("annotate"))
    yield from without_rollouts(method, rl, section("rollout"), section("annotate"))
    for part in parts_of(rl).values():
        yield from part.contradictions(rl, method, section)
    if (first := warm_start_of(rl)) is not None:
        yield from (f"rl.warm_start: {problem}" for problem in contradictions(*first, section))


def turn_contradictions(method: Composition, rl: Rl, merge_method: str) -> Iterator[str]:
    """Why the resolved section can't take turns with those of other domains on one policy, as `merge_method` wants it."""
    problems = {
        f"rl.algorithm {method.card.slug} learns from stored data and plays nothing": method.data != "episodes",
        "rl.warm_start trains before the policy's first turn": bool(rl.warm_start),
        f"rl.algorithm {method.card.slug} plays in a team, which one policy does without": rl.advantage.estimator == "team",
        f"rl.tasks.source {rl.tasks.source} makes tasks or instructions of its own": rl.tasks.source != "static",
    }
    for problem in (text for text, present in problems.items() if present):
        yield f"merge.method {merge_method} trains one policy on all domains in turn, but {problem}; change it, or merge.method"


def _check(given: Rl, resolved: Rl, method: Composition) -> None:
    """Raise ParamsError for a key that the user set and that would be ignored, and for invalid combinations."""
    for name in PIECES:
        switch = parts_of(resolved)[name].switch
        if getattr(getattr(resolved, name), switch) == "own" and name not in method.pieces:
            raise ParamsError(
                f"rl.{name}.{switch} is own, and algorithm {method.card.slug} has no {name} of its own; set it to null"
            )
    if method.data != "episodes":
        _check_unplayed(given, method.card.slug)
    elif given.add_tree_steps and given.environment_steps is None:
        raise ParamsError(
            "rl.add_tree_steps has no effect without rl.environment_steps, which it raises; set that, or it to false"
        )
    refuse_idle_parts(given, method)
    refuse_idle_keys(given, resolved, method)
    if method.data in ("episodes", "offline_replay"):
        _check_sampling(resolved, method)
    for part in parts_of(resolved).values():
        if method.data in part.data:
            part.check(resolved, method)
    if method.check is not None:
        method.check(given, resolved)


def _check_unplayed(given: Rl, slug: str) -> None:
    """Refuse limits on playing, for a method that plays no episodes."""
    for name in ("environment_steps", "stop_at_success"):
        if getattr(given, name) is not None:
            raise ParamsError(f"rl.{name} has no effect: algorithm {slug} plays no episodes; set it to null")
    if given.add_tree_steps:
        raise ParamsError(f"rl.add_tree_steps has no effect: algorithm {slug} plays no episodes; set it to false")


def _check_sampling(rl: Rl, method: Composition) -> None:
    """Refuse sampling whose distribution the training pass can't reproduce."""
    sampling = rl.sampling
    if sampling.temperature == 0:
        raise ParamsError("rl.sampling.temperature is 0, and greedy decoding explores nothing; set it above 0")
    own_loss = rl.loss.kind == "own"
    obstacles = {
        "replays turns of an offline dataset, which has no record of the tokens that top_p and top_k left": (
            method.data == "offline_replay" or rl.advantage.estimator == "utterance"
        ),
        "joins demonstrations to the groups (external.per_group), which were not drawn so": rl.external.per_group > 0,
        "reads the policy's probabilities over the whole vocabulary": own_loss
        and any(reads is not None and reads(rl) for reads in (method.vocabulary, method.rescored)),
    }
    why = next((why for why, holds in obstacles.items() if holds), None)
    if sampling.restricted and why is not None:
        raise ParamsError(
            f"rl.sampling (top_p {sampling.top_p:g}, top_k {sampling.top_k}) samples from a part of the vocabulary, and "
            f"algorithm {method.card.slug} {why}: set top_p 1, top_k 0"
        )


def _settings(given: Rl, method: Composition) -> Any:
    """The method's own keys, validated."""
    slug = method.card.slug
    if method.settings is None:
        if given.settings:
            raise ParamsError(
                f"rl.settings: algorithm {slug} has no keys of its own; got {sorted(given.settings)}; set it to {{}}"
            )
        return {}
    if not (isinstance(method.settings, type) and issubclass(method.settings, Section)):
        raise ParamsError(f"algorithm {slug}: `settings` must be a subclass of stages.plugins.Section")
    if isinstance(given.settings, method.settings):
        return given.settings
    try:
        return method.settings.model_validate(given.settings)
    except ValidationError as error:
        raise ParamsError(explain(error, method.settings, f"algorithm {slug}", "rl.settings.")) from error
