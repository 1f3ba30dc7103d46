"""An episode whose first result was rejected, and hidden from the turns after the rejection."""

from __future__ import annotations

from typing import Any

from stages.agent.chat import Chat
from stages.records.episode import Episode, Owner, TurnRecord, episode_row

PROMPT = "Who keeps Cormas?"
RESULT = "Cormas. A river in the north."
TURNS = [
    ("search Cormas", RESULT),
    ("judge no", "You rejected the result: search again."),
    ("search Cormas keeper", "Keepers. Ada keeps Cormas."),
    ("judge yes", "Search again or answer."),
    ("answer Ada", ""),
]


def judged(chat: Chat, hard: bool = True, name: str = "t/0") -> Episode:
    """Five turns, token for token as played: the judgment, the second one, hides the result of the first if `hard`."""
    made = Episode(name, "t", "search", "t", 0, "p", "q", 1.0, 1.0, 0, reward=1.0, terminated=True, stop_reason="terminated")
    made.append(chat.prompt_tokens(PROMPT), Owner.PROMPT, -1)
    made.messages = [{"role": "user", "content": PROMPT}]
    for turn, (action, observation) in enumerate(TURNS):
        start, tokens = len(made.token_ids), chat.assistant_tokens(action)
        last = turn == len(TURNS) - 1
        made.append(tokens, Owner.POLICY, turn, [-0.5] * len(tokens))
        step = TurnRecord(action, observation, True, float(last), 0.0, f"s{turn}", action.lower(), start, len(made.token_ids))
        made.turns.append(step)
        made.messages.append({"role": "assistant", "content": action})
        if not last:
            made.messages.append({"role": "user", "content": observation})
            made.append(chat.observation_tokens(observation), Owner.ENVIRONMENT, turn)
    made.forgotten = [[0, 1]] if hard else []
    return made


def judged_row(chat: Chat, hard: bool = True, name: str = "t/0") -> dict[str, Any]:
    """The row as a table has it: without `forgotten` where nothing is hidden."""
    row = episode_row(judged(chat, hard, name))
    return row if hard else {key: value for key, value in row.items() if key != "forgotten"}
