"""Episodes as rows for other trainers. A row is one episode or one turn:

messages   a conversation (SFT in TRL and verl)
turns      prompt and completion, one row per turn of the policy (SFT in TRL with the loss on completions only)
tokens     input_ids and assistant_masks: the sampled tokens themselves (SFT in TRL)
verl       prompt, data_source, ability, reward_model, extra_info and the conversation (RL in verl)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stages.records.episode import Episode, Owner
from stages.records.forgotten import left_context
from stages.records.messages import Messages
from stages.records.task import Task

Row = dict[str, Any]
ABILITY = "agent"
"""verl's column `ability`, a kind of problem; training ignores it."""


def conversation(episode: Episode) -> Messages:
    """The episode's messages as in its tokens: an observation follows each turn, except an empty last one."""
    messages = [dict(episode.messages[0])]
    replies = [message["content"] for message in episode.messages if message["role"] == "assistant"]
    for turn, text in zip(episode.turns, replies, strict=True):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn.observation}]
    return messages if messages[-1]["content"] or len(messages) == 1 else messages[:-1]


def left_after(episode: Episode) -> dict[int, int]:
    """`left_context` with turns from 1, as exported files number them."""
    return {turn + 1: by + 1 for turn, by in left_context(episode.forgotten).items()}


def with_left_context(rows: Sequence[Row], episodes: Sequence[Episode]) -> None:
    """Add the column `left_context`, a list of `turn` and `after_turn`, if an episode has some; rows of a table have the same
    keys."""
    left = {episode.episode_id: left_after(episode) for episode in episodes}
    for row in rows if any(left.values()) else ():
        found = left[row["episode_id"]].items()
        row["left_context"] = [{"turn": turn, "after_turn": after} for turn, after in found]


def about(episode: Episode) -> Row:
    """The columns about an episode that each of its rows has."""
    return {
        "domain": episode.domain,
        "task_id": episode.task_id,
        "episode_id": episode.episode_id,
        "policy_hash": episode.policy_hash,
        "reward": episode.reward,
        "success": episode.success,
        "stop_reason": episode.stop_reason,
        **({"role": episode.role} if episode.role else {}),
        **({"play": episode.play, "moves": episode.moves} if episode.play else {}),
    }


def message_rows(episode: Episode) -> Iterator[Row]:
    yield {"messages": conversation(episode), **about(episode)}


def turn_rows(episode: Episode) -> Iterator[Row]:
    """One row per turn; turns inherited from another episode are left out, since they are among that episode's rows."""
    messages = conversation(episode)
    for turn, record in enumerate(episode.turns[episode.inherited :], start=episode.inherited):
        place = 2 * turn + 1
        row = {"prompt": messages[:place], "completion": messages[place : place + 1], **about(episode)}
        yield {**row, "turn": turn, "accepted": record.accepted, "turn_reward": record.reward}


def token_rows(episode: Episode) -> Iterator[Row]:
    """One row; the mask is 1 for tokens that RL would train, and `owners` has the names of who wrote them
    (`stages.records.episode.Owner`). Raises ValueError for an episode without tokens."""
    if not episode.token_ids:
        raise ValueError(
            f"{episode.episode_id} has no tokens: demonstrations are tokenised only for the model trained on them. "
            "Use --format messages or turns"
        )
    own = [
        int(owner == Owner.POLICY and turn >= episode.inherited) for owner, turn in zip(episode.owner, episode.turn, strict=True)
    ]
    owners = [Owner(owner).name.lower() for owner in episode.owner]
    tokens = {"input_ids": episode.token_ids, "assistant_masks": own, "logprobs": episode.logprob, "owners": owners}
    yield {**tokens, **about(episode)}


def task_row(task: Task, opening: str, index: int) -> Row:
    """verl's columns for a task; `opening`: its first message. `ground_truth` is the task's spec as JSON, for custom rewards."""
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
    return {**task_row(task, episode.messages[0]["content"], index), **about(episode), "messages": conversation(episode)}


FORMATS: dict[str, Callable[[Episode], Iterator[Row]]] = {"messages": message_rows, "turns": turn_rows, "tokens": token_rows}


def episode_rows(episodes: Sequence[Episode], form: str, tasks: Mapping[str, Task]) -> list[Row]:
    """Rows in the order of `episodes`; verl needs `tasks` (by id). Raises ValueError for an unknown `form`, and with verl for
    episodes of unknown tasks."""
    if form != "verl":
        if form not in FORMATS:
            raise ValueError(f"unknown format '{form}'; known: {', '.join([*FORMATS, 'verl'])}")
        rows = [row for episode in episodes for row in FORMATS[form](episode)]
        with_left_context(rows, episodes)
        return rows
    unknown = [episode.task_id for episode in episodes if episode.task_id not in tasks]
    if unknown:
        raise ValueError(f"the format verl needs each episode's task, but {unknown[0]} is not among the curated tasks")
    rows = [verl_rows(episode, tasks[episode.task_id], index) for index, episode in enumerate(episodes)]
    with_left_context(rows, episodes)
    return rows
