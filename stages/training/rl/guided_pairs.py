"""Preference pairs of plain and guided attempts (Agent-RLVR, arXiv 2506.11425, section on training): what was learned with a hint
is taught without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stages.agent.guidance import marked, mentions, shows_marks
from stages.algorithms.parts.guidance import Guidance
from stages.annotation.continuations import Continuation, Pair
from stages.records.episode import Episode, Owner
from stages.seeding import stream
from stages.training.rl.guided_pass import Attempts, GuidedEpisode

_FIRST = (int(Owner.PROMPT), int(Owner.GUIDANCE))


def speaks_of_hint(one: GuidedEpisode, words: Sequence[str]) -> bool:
    """Whether the policy's turns, thoughts included, mention the hint (`mentions`), or anything but the hint itself has its
    marks."""
    first, *others = [message["content"] for message in one.episode.messages] or [""]
    own = [message["content"] for message in one.episode.messages if message["role"] == "assistant"]
    own += [turn.action for turn in one.episode.turns]
    shown = [first.removesuffix(marked(one.hint.text)), *others]
    return mentions(own, one.hint.text, words) or shows_marks(shown)


def usable_successes(attempts: Attempts, settings: Guidance) -> tuple[list[Episode], dict[str, int]]:
    """Guided successes without their hints, less those that speak of them; and the numbers of both."""
    kept, counts = [], Counter({"successes": 0, "mention_hint": 0})
    for one in attempts.guided:
        if not one.episode.success:
            continue
        counts["successes"] += 1
        if speaks_of_hint(one, settings.drop_mentions):
            counts["mention_hint"] += 1
        else:
            kept.append(one.episode.without_guidance())
    return kept, dict(counts)


def _continuation(episode: Episode, start: int) -> Continuation:
    """An episode's tokens from `start` up to the last one of the policy."""
    end = max((place + 1 for place, owner in enumerate(episode.owner) if owner == Owner.POLICY), default=start)
    policy = tuple(owner == Owner.POLICY for owner in episode.owner[start:end])
    return Continuation(tuple(episode.token_ids[start:end]), policy, float(episode.success))


def episode_pair(chosen: Episode, rejected: Episode) -> Pair | None:
    """A pair of two attempts at a task from its plain first message on; None if one has no action, or both have the same."""
    start = sum(owner in _FIRST for owner in chosen.owner)
    history = tuple(chosen.token_ids[:start])
    if history != tuple(rejected.token_ids[:start]) or any(owner == Owner.GUIDANCE for owner in (*chosen.owner, *rejected.owner)):
        raise ValueError(f"episodes {chosen.episode_id} and {rejected.episode_id} do not start with the same first message")
    win, lose = _continuation(chosen, start), _continuation(rejected, start)
    if not win.token_ids or not lose.token_ids or win.token_ids == lose.token_ids:
        return None
    return Pair(chosen.task_id, history, win, lose, 1.0)


def guided_pairs(attempts: Attempts, settings: Guidance, seed: int) -> tuple[list[Pair], dict[str, int]]:
    """For every success, plain or guided, a pair with a random plain failure of its task, all from the plain prompt and without
    marks of hints; and counts for the report. Tasks without a plain failure, or without a success, have none."""
    guided, counts = usable_successes(attempts, settings)
    plain = sorted(attempts.trainable, key=lambda episode: episode.episode_id)
    failures: dict[str, list[Episode]] = {}
    for episode in plain:
        if not episode.success:
            failures.setdefault(episode.task_id, []).append(episode)
    pairs: list[Pair] = []
    of_kind = {"plain": 0, "guided": 0}
    for kind, successes in (("plain", [episode for episode in plain if episode.success]), ("guided", guided)):
        for chosen in sorted(successes, key=lambda episode: episode.episode_id):
            if chosen.task_id not in failures:
                continue
            rejected = stream("guided.pairs", seed, kind, chosen.episode_id).choice(failures[chosen.task_id])
            if (pair := episode_pair(chosen, rejected)) is not None:
                pairs.append(pair)
                of_kind[kind] += 1
    solved = {episode.task_id for episode in (*plain, *guided) if episode.success}
    unsolved = len(set(failures) - solved)
    pair_counts = {f"pairs_{kind}": count for kind, count in of_kind.items()}
    return pairs, {**counts, **pair_counts, "tasks_without_success": unsolved}
