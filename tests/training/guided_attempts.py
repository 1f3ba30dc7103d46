"""Attempts at tasks of the toy domain, some of them with hints, as Agent-RLVR makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stages.agent.chat import Chat
from stages.agent.guidance import marked
from stages.records.episode import Episode, Owner
from stages.training.rl.guided_pass import Attempts, GuidedEpisode, Hint
from training.toys import demonstration, letter_tasks

RL: dict[str, Any] = {
    "algorithm": "agent_rlvr",
    "steps": 3,
    "learning_rate": 0.003,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
    "warm_start": {"algorithm": "rejection_sft", "steps": 2, "settings": {"fraction": 0.5}},
}


def attempt(chat: Chat, task_id: str, number: int, success: bool, guidance: str = "", actions: tuple[str, ...] = ()) -> Episode:
    """An episode of a task of the toy domain; successes and failures have different actions, and no two of a task the same."""
    actions = actions or ("open the door", "go" if success else "take the key" + " key" * number)
    seed = int(task_id.partition("-")[2] or 0)
    episode = demonstration(letter_tasks(seed + 1)[seed], actions)
    encoded = chat.encode(episode.messages, guidance)
    turns = [
        replace(turn, action_key=turn.action, start=start, end=end)
        for turn, (start, end) in zip(episode.turns, encoded.spans, strict=True)
    ]
    turns[-1].reward = float(success)
    logprob = [-1.0 if owner == Owner.POLICY else 0.0 for owner in encoded.owner]
    return replace(
        episode,
        **{"episode_id": f"{task_id}/{number:04d}", "task_id": task_id, "group_id": task_id, "policy_hash": "p", "turns": turns},
        **{"token_ids": encoded.token_ids, "owner": encoded.owner, "turn": encoded.turn, "logprob": logprob},
        **{"reward": float(success), "temperature": 1.0, "terminated": True, "reward_terms": {"letter": float(success)}},
    )


def attempts_of(chat: Chat, plain: list[int], guided: list[int], text: str = "do this: open the door") -> Attempts:
    of_hint = [
        GuidedEpisode(Hint("toy-000", number, "plan", text), attempt(chat, "toy-000", number, bool(success), marked(text)))
        for number, success in enumerate(guided)
    ]
    return Attempts([attempt(chat, "toy-000", number, bool(success)) for number, success in enumerate(plain)], of_hint)
