"""The policy's own weights as a teacher that sees a solution of the task: its log-probabilities of the played tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stages.agent.chat import Chat, equal_length
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.group_resampling import forward_rows
from stages.algorithms.parts.teacher import Teacher
from stages.annotation.correct_paths import correct_episodes
from stages.records.episode import EXPERT, Episode, Owner, read_episodes, read_rows
from stages.training.common.batches import trajectory_batch
from stages.training.rl.models import Models


def solutions(source: str, curated: Path, annotated: Path, domain: str) -> dict[str, str]:
    """Task -> the actions of its solution with the fewest turns, a line each.

    source: `demonstrations` of curate's expert, or correct paths of annotate's `trees`. Raises ValueError if there is none.
    """
    if source == "trees":
        found = correct_episodes(read_rows(annotated / "nodes.parquet"), 1, domain)
    else:
        found = [one for one in read_episodes(curated / "demonstrations.parquet") if one.policy_hash == EXPERT and one.success]
    if not found:
        more = "raise annotate.tasks or annotate.iterations" if source == "trees" else "raise curate.expert_demonstrations"
        raise ValueError(f"rl.settings.source: {source} has no solution of any task of {domain}; {more}, or change source")
    ordered = sorted(found, key=lambda one: (one.task_id, len(one.turns), one.episode_id), reverse=True)
    return {one.task_id: "\n".join(turn.action for turn in one.turns) for one in ordered}


class SelfTeacher:
    """Reads played episodes with a solution in their first message. `settings`: of the method (`opsd.Settings`); `evidence`: as
    `trajectory_batch` takes it."""

    def __init__(
        self, models: Models, chat: Chat, settings: Any, known: Mapping[str, str], max_length: int, evidence: bool = False
    ) -> None:
        self.models, self.chat, self.settings, self.known, self.max_length = models, chat, settings, known, max_length
        self.evidence = evidence

    def hinted(self, episode: Episode) -> Episode | None:
        """The episode with the hint at the end of its first message, its other tokens as they are, also those of messages before
        it; None if there is no solution, no room for it in max_length, or no such message at the end of the prompt."""
        if episode.task_id not in self.known or not episode.messages:
            return None
        hint = self.settings.hint.replace("{solution}", self.known[episode.task_id])
        text, own = episode.messages[0]["content"], sum(owner == Owner.PROMPT for owner in episode.owner)
        plain, told = self.chat.prompt_tokens(text), self.chat.prompt_tokens(f"{text}\n{hint}")
        same = equal_length(plain, told)
        # What a prompt begins with (a system message, earlier turns of another conversation) is not among its messages.
        before = own - (len(plain) - same)
        if before < 0 or episode.token_ids[before:own] != plain[same:]:
            return None
        prompt = [*episode.token_ids[:before], *told[same:]]
        if len(prompt) + len(episode.token_ids) - own > self.max_length:
            return None
        count = len(prompt)
        return replace(
            episode,
            token_ids=[*prompt, *episode.token_ids[own:]],
            owner=[int(Owner.PROMPT)] * count + episode.owner[own:],
            logprob=[0.0] * count + episode.logprob[own:],
            turn=[-1] * count + episode.turn[own:],
            kept=[()] * count + episode.kept[own:] if episode.kept else [],
        )

    def annotate(self, batch: TrajectoryBatch, episodes: Sequence[Episode], temperature: float) -> TrajectoryBatch:
        """The batch of `episodes`, in this order, with Teacher."""
        rows = [row for row in forward_rows(batch).tolist() if row < len(episodes)]
        read = [(row, one) for row in rows if (one := self.hinted(episodes[row])) is not None]
        logprobs, known = torch.zeros(batch.mask.shape), torch.zeros_like(batch.mask)
        if read:
            with_hints = trajectory_batch([one for _, one in read], self.evidence)
            model = self.models.reference if self.settings.teacher == "start" else self.models.policy
            found = self.models.logprobs(model, with_hints, range(with_hints.size), temperature)
            for place, (row, _) in enumerate(read):
                # Both have the same policy tokens, in the same order.
                logprobs[row, batch.mask[row]] = found[place, with_hints.mask[place]]
                known[row] = batch.mask[row]
        return batch.with_extra(Teacher(logprobs, known))
