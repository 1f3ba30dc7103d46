"""Sample episodes as MLflow's traces show them: what was asked, and per turn the action, what the policy thought of it, what it
brought and how it was credited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.agent.sample_episodes import choose, outcome

Row = Mapping[str, Any]


def trace_of(row: Row) -> dict[str, Any]:
    """An episode's row (EPISODE_SCHEMA, and where it was trained on `advantages` [T] and `step`) as a trace event's content.

    Per turn: `logprob`, the sum over the action's tokens under the behaviour policy, and `advantage`, their mean.
    """
    advantages = row.get("advantages")
    turns = []
    for turn in row["turns"]:
        span = slice(turn["start"], turn["end"])
        told = {key: turn[key] for key in ("action", "observation", "reward", "accepted", "cost")}
        told["tokens"] = turn["end"] - turn["start"]
        told["logprob"] = round(sum(row["logprob"][span]), 4)
        if advantages is not None and told["tokens"]:
            told["advantage"] = round(sum(advantages[span]) / told["tokens"], 4)
        turns.append(told)
    messages = row["messages"]
    return {
        "name": row["task_id"],
        "prompt": messages[0]["content"] if messages else "",
        "turns": turns,
        "outcome": {"reward": row["reward"], "success": outcome(row) == "success", "stop_reason": row["stop_reason"]},
        "tags": {"episode": row["episode_id"], "task": row["task_id"], "domain": row["domain"], "outcome": outcome(row)},
    }


def sample(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` of the rows in turn best, worst and random; the same rows give the same sample."""
    return [row for _, row in choose(rows, count, "traces")]
