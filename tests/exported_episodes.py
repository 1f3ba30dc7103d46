"""Episodes with everything that other tools' formats must carry: thoughts, refused actions, branches, limits, tokens or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.records.episode import Episode, Owner, TurnRecord, read_episodes, write_episodes

OPENING = "You are in the hall. Find the “lamp” & bring it <here>."


def episode(name: str, turns: list[tuple[str, str, str, float]], **changes: Any) -> Episode:
    """Turns: message, action, observation, reward. Every message has two tokens, every observation one, the opening three."""
    made = Episode(name, name.split("/")[0], "textworld", f"{name.split('/')[0]}@0", 7, "a1b2", "c3d4", 0.7, 0.95, 0)
    made.append([1, 2, 3], Owner.PROMPT, -1)
    made.messages = [{"role": "user", "content": OPENING}]
    for number, (message, action, observation, reward) in enumerate(turns):
        start = len(made.token_ids)
        made.append([10 + number, 20 + number], Owner.POLICY, number, [-0.5 - number, -0.125])
        made.turns.append(
            TurnRecord(action, observation, bool(observation), reward, 0.25, f"state{number}", action.lower(), start, start + 2)
        )
        made.append([30 + number], Owner.ENVIRONMENT, number)
        made.messages += [{"role": "assistant", "content": message}, {"role": "user", "content": observation}]
    made.reward = sum(turn.reward for turn in made.turns)
    made.terminated, made.stop_reason = True, "terminated"
    for field, value in changes.items():
        setattr(made, field, value)
    return made


def varied(path: Path) -> list[Episode]:
    """The episodes as a Parquet file at `path` returns them."""
    won = episode("t1/0000", [("go east", "go east", "A lamp.", 0.0), ("take lamp", "take lamp", "", 1.0)])
    won.reward_terms = {"success": 1.0, "format": 0.5}
    won.messages = won.messages[:-1]
    thinking = episode("t1/0001", [("<think>east?</think>\ngo east", "go east", "A lamp.", 0.0)], stop_reason="turn_limit")
    thinking.terminated, thinking.truncated = False, True
    branch = episode("t1/0002", [("go east", "go east", "A lamp.", 0.0), ("sing", "sing", "Refused.", -0.1)])
    branch.parent, branch.inherited = "t1/0000", 1
    untold = episode("t2/0000", [("wait", "wait", "Time passes.", 0.0)])
    untold.token_ids, untold.owner, untold.logprob, untold.turn = [], [], [], []
    untold.turns[0].start = untold.turns[0].end = 0
    cut = episode("t2/0001", [("look", "look", "A hall.", 0.0)], stop_reason="context", terminated=False, truncated=True)
    cut.append([99, 98], Owner.POLICY, 1, [-2.0, -3.0])  # a reply that was cut off is no turn
    cut.messages = [*cut.messages[:-1], {"role": "user", "content": "A hall. (shortened)"}]
    silent = episode("t3/0000", [], stop_reason="context", terminated=False, truncated=True)
    write_episodes(path, [won, thinking, branch, untold, cut, silent])
    return read_episodes(path)
