"""Episodes as rows that other trainers read. Each row is of one episode, or of one turn:

messages   a conversation (TRL's and verl's SFT)
turns      prompt and completion, one row per turn of the policy (TRL's SFT with the loss on completions)
tokens     input_ids and assistant_masks: what was sampled, token for token (TRL's SFT)
verl       verl's RL: prompt, data_source, ability, reward_model, extra_info; and the conversation
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stages.records.episode import Episode, Owner
from stages.records.messages import Messages
from stages.records.task import Task

Row = dict[str, Any]
ABILITY = "agent"
"""verl's column `ability`, which names a kind of problem and is not looked at in training."""


def conversation(episode: Episode) -> Messages:
    """The episode's messages, an answer after each turn but an empty last one, as its tokens are laid out."""
    messages = [dict(episode.messages[0])]
    said = [message["content"] for message in episode.messages if message["role"] == "assistant"]
    for turn, text in zip(episode.turns, said, strict=True):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn.observation}]
    return messages if messages[-1]["content"] or len(messages) == 1 else messages[:-1]


def about(episode: Episode) -> Row:
    """What every row of an episode says of it."""
    return {
        "domain": episode.domain,
        "task_id": episode.task_id,
        "episode_id": episode.episode_id,
        "policy_hash": episode.policy_hash,
        "reward": episode.reward,
        "success": episode.success,
        "stop_reason": episode.stop_reason,
    }


def message_rows(episode: Episode) -> Iterator[Row]:
    yield {"messages": conversation(episode), **about(episode)}


def turn_rows(episode: Episode) -> Iterator[Row]:
    """Without the turns that the episode took over from another, whose own rows they are."""
    messages = conversation(episode)
    for turn, record in enumerate(episode.turns[episode.inherited :], start=episode.inherited):
        place = 2 * turn + 1
        row = {"prompt": messages[:place], "completion": messages[place : place + 1], **about(episode)}
        yield {**row, "turn": turn, "accepted": record.accepted, "turn_reward": record.reward}


def token_rows(episode: Episode) -> Iterator[Row]:
    """The mask is 1 where RL would train. Raises ValueError for an episode without tokens."""
    if not episode.token_ids:
        raise ValueError(
            f"{episode.episode_id} has no tokens: demonstrations get theirs from the model that learns them. Write messages or "
            "turns"
        )
    own = [
        int(owner == Owner.POLICY and turn >= episode.inherited) for owner, turn in zip(episode.owner, episode.turn, strict=True)
    ]
    yield {"input_ids": episode.token_ids, "assistant_masks": own, "logprobs": episode.logprob, **about(episode)}


def problem(task: Task, opening: str, index: int) -> Row:
    """verl's columns for a task that `opening` tells. `ground_truth` is the task's spec as JSON, for a reward of one's own."""
    return {
        "data_source": task.domain,
        "prompt": [{"role": "user", "content": opening}],
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": json.dumps(task.spec, sort_keys=True, ensure_ascii=False)},
        "extra_info": {"index": index, "split": task.split, "task_id": task.task_id, "difficulty": task.difficulty},
        "domain": task.domain,
        "task_id": task.task_id,
    }


def verl_rows(episode: Episode, task: Task, index: int) -> Row:
    return {**problem(task, episode.messages[0]["content"], index), **about(episode), "messages": conversation(episode)}


FORMATS: dict[str, Callable[[Episode], Iterator[Row]]] = {"messages": message_rows, "turns": turn_rows, "tokens": token_rows}


def episode_rows(episodes: Sequence[Episode], form: str, tasks: Mapping[str, Task]) -> list[Row]:
    """Rows in the order of `episodes`; `tasks` (by id) are needed for verl. Raises ValueError for episodes of unknown tasks
    there, and for an unknown form."""
    if form != "verl":
        if form not in FORMATS:
            raise ValueError(f"there is no format '{form}'; there are {', '.join([*FORMATS, 'verl'])}")
        return [row for episode in episodes for row in FORMATS[form](episode)]
    unknown = [episode.task_id for episode in episodes if episode.task_id not in tasks]
    if unknown:
        raise ValueError(f"verl's rows need their tasks, and {unknown[0]} is none of the curated ones")
    return [verl_rows(episode, tasks[episode.task_id], index) for index, episode in enumerate(episodes)]
