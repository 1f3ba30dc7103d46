"""Rows of episodes whose turns belong to roles."""

from __future__ import annotations

from typing import Any

from stages.records.episode import Episode, Owner, TurnRecord, episode_row


def spoken(name: str, role: str, actions: list[str], reward: float, **fields: Any) -> dict[str, Any]:
    """An episode of `role`: 5 tokens of prompt, 2 of each action, 3 of each result, a tool call but for the last action."""
    made = Episode(name, name, "search", name, 0, "", "", 1.0, 1.0, 0, role=role, **fields)
    made.append(range(5), Owner.PROMPT, -1)
    made.messages = [{"role": "user", "content": f"Prompt of {name}."}]
    for turn, action in enumerate(actions):
        last = turn == len(actions) - 1
        start = len(made.token_ids)
        made.messages.append({"role": "assistant", "content": action})
        made.append([1, 2], Owner.POLICY, turn, [-1.0, -1.0])
        made.turns.append(TurnRecord(action, "", True, reward if last else 0.0, float(not last), "", action, start, start + 2))
        made.append([] if last else [7, 8, 9], Owner.ENVIRONMENT, turn)
    made.reward = reward
    return {**episode_row(made), "reward_terms": "{}", "advantages": [0.0] * len(made.token_ids)}


def team_rows(play: str = "t/0") -> list[dict[str, Any]]:
    """A play of two rounds: a planner, who speaks first, and a solver, who acts."""
    planner = spoken(f"{play}/planner", "planner", ["plan one", "plan two"], 0.0, play=play, moves=[0, 2])
    solver = spoken(play, "solver", ["search x", "answer y"], 1.0, play=play, moves=[1, 3])
    return [{**row, "task_id": play.rpartition("/")[0]} for row in (solver, planner)]
