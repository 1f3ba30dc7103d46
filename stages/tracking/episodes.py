"""Sample episodes as MLflow traces: the prompt, and per turn the action, its log-probability, observation, reward, advantage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stages.agent.sample_episodes import outcome
from stages.records.addresses import of_episode, served
from stages.records.forgotten import left_context


def trace_of(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The trace event of an episode row (EPISODE_SCHEMA; `advantages` [T] if it was trained on); `source`: who played, as the
    episode viewer names it.

    `scores` are the reward terms. Per turn: `logprob`, the sum over the action's tokens under the behaviour policy,
    `advantage`, their mean, and `left_context_after_turn` if turns after that one, from 1, did not see the observation.
    """
    advantages = row.get("advantages")
    left = left_context(row.get("forgotten") or [])
    turns = []
    for number, turn in enumerate(row["turns"]):
        span = slice(turn["start"], turn["end"])
        values = {key: turn[key] for key in ("action", "observation", "reward", "accepted", "cost")}
        values["tokens"] = turn["end"] - turn["start"]
        values["logprob"] = round(sum(row["logprob"][span]), 4)
        if number in left:
            values["left_context_after_turn"] = left[number] + 1
        if advantages is not None and values["tokens"]:
            values["advantage"] = round(sum(advantages[span]) / values["tokens"], 4)
        turns.append(values)
    messages, terms = row["messages"], row.get("reward_terms") or "{}"
    told = {"episode": row["episode_id"], "source": source, "task": row["task_id"], "domain": row["domain"]}
    return {
        "name": row["task_id"],
        "prompt": messages[0]["content"] if messages else "",
        "turns": turns,
        "outcome": {"reward": row["reward"], "success": outcome(row) == "success", "stop_reason": row["stop_reason"]},
        "scores": {name: value for name, value in json.loads(terms).items() if name not in ("reward", "success")},
        "viewer": served(of_episode(source, row["episode_id"])),
        "tags": {**told, "outcome": outcome(row), **{key: row[key] for key in ("role", "play") if row.get(key)}},
    }
