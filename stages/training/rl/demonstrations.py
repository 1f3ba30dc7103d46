"""Demonstrations as external episodes: tokenized as a rollout of the same text would be, with the EXTERNAL owner."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from stages.agent.chat import Chat
from stages.agent.forgetting import with_hidden
from stages.algorithms.parts.external import External
from stages.records.episode import EXPERT, IMPORTED, Episode, Owner
from stages.seeding import permutation


def as_external(episode: Episode, chat: Chat) -> Episode:
    """A demonstration with its tokens; those that SFT would train on are EXTERNAL, without log-probabilities."""
    encoded = chat.encode_demonstration(episode.messages)
    owner = [int(Owner.EXTERNAL) if one == Owner.POLICY else one for one in encoded.owner]
    turns = [replace(turn, start=start, end=end) for turn, (start, end) in zip(episode.turns, encoded.spans, strict=True)]
    count = len(encoded.token_ids)
    written = {"token_ids": encoded.token_ids, "owner": owner, "turn": encoded.turn, "logprob": [0.0] * count}
    return with_hidden(chat, replace(episode, **written, turns=turns))


def is_fragment(episode: Episode) -> bool:
    """Whether it is an imported demonstration of only a part of an episode, whose return is unknown."""
    return episode.policy_hash == IMPORTED and (bool(episode.inherited) or not (episode.terminated or episode.truncated))


class ExternalEpisodes:
    """The demonstrations of the training tasks that may join groups of played episodes.

    Raises ValueError if there is none for any task, and for one of more than `max_length` tokens.
    """

    def __init__(
        self, episodes: Sequence[Episode], tasks: Collection[str], chat: Chat, params: External, max_length: int
    ) -> None:
        self.per_group = params.per_group or 0
        self.by_task: dict[str, list[Episode]] = {}
        candidates = [one for one in episodes if params.source == "all" or one.policy_hash == EXPERT]
        for episode in sorted(candidates, key=lambda one: one.episode_id):
            if episode.task_id not in tasks or is_fragment(episode):
                continue
            external = as_external(episode, chat)
            if len(external.token_ids) > max_length:
                raise ValueError(
                    f"demonstration {episode.episode_id} has {len(external.token_ids)} tokens, over model.max_length "
                    f"({max_length}); raise model.max_length or make tasks shorter"
                )
            self.by_task.setdefault(episode.task_id, []).append(external)
        if not self.by_task:
            raise ValueError(
                f"rl.external.per_group is {self.per_group}, but the training tasks have no demonstrations of source "
                f"{params.source}; set rl.external.source to all, raise curate.expert_demonstrations, or set per_group to 0"
            )

    def count(self, task_id: str) -> int:
        """How many demonstrations join a group of the task."""
        return min(self.per_group, len(self.by_task.get(task_id, ())))

    def draw(self, task_id: str, *key: object) -> list[Episode]:
        """`count` of the task's demonstrations, drawn by `key` and sorted by id."""
        known = self.by_task.get(task_id, [])
        chosen = permutation(range(len(known)), "external", *key, task_id)[: self.count(task_id)]
        return [known[place] for place in sorted(chosen)]
