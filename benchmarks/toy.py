"""A scripted environment for timing, with observations of fixed length that do not depend on the actions.

Both sides see the same prompts and observations and act in turns of the same length. Each samples its own actions; with random
weights and forced lengths the cost does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.agent.chat import Chat
from stages.environments.protocol import Observation, Step
from stages.records.task import Task
from stages.seeding import stream

FRAME = 3
"""Template tokens around a user message: its opening, its end, the assistant's opening."""


def text_of(tokenizer: Any, count: int, *key: object) -> str:
    """A text that encodes as exactly `count` tokens, drawn by `key`. Raises ValueError if none is found."""
    rng = stream("benchmarks.text", *key)
    words = sorted(
        text.strip() for text in (tokenizer.decode([token]) for token in range(len(tokenizer))) if text.strip().isalpha()
    )
    text, length = "", 0
    for _ in range(100 * count):
        if length == count:
            return text
        longer = f"{text} {rng.choice(words)}".strip()
        tokens = len(tokenizer.encode(longer, add_special_tokens=False))
        if length < tokens <= count:
            text, length = longer, tokens
    raise ValueError(f"found no text of {count} tokens for this tokenizer")


class ToyChat(Chat):
    """The chat format without closing tokens for truncated turns, so that forced lengths stay the same on both sides."""

    def closing_tokens(self, turn_ids: Sequence[int]) -> list[int]:
        return []


class ToyEnvironment:
    """`spec`: {"turns": number of turns, "texts": observation after each turn but the last}."""

    def reset(self, task: Task) -> Observation:
        self._spec, self._turn = task.spec, 0
        return Observation("")

    def step(self, action: str) -> Step:
        self._turn += 1
        over = self._turn >= self._spec["turns"]
        text = "" if over else self._spec["texts"][self._turn - 1]
        return Step(Observation(text), float(over and len(action) % 2), True, over, False)

    def snapshot(self) -> Any:
        return self._spec, self._turn

    def restore(self, state: Any) -> None:
        self._spec, self._turn = state

    def state_key(self) -> str:
        return str(self._turn)

    def admissible(self) -> Sequence[str]:
        return []

    def close(self) -> None:
        self._turn = 0


class ToyToolEnvironment:
    """The same for TRL: a dataset row carries `turns` and `texts`; the tool answers, and the last turn is no tool call."""

    def reset(self, **row: Any) -> None:
        self._texts, self._turn = row["texts"], 0

    def act(self, action: str) -> str:
        """Act.

        Args:
            action: The action.

        Returns:
            The observation.
        """
        self._turn += 1
        return self._texts[self._turn - 1]


def toy_tasks(tokenizer: Any, count: int, prompt_tokens: int, turns: int, observation_tokens: int) -> list[Task]:
    """Tasks whose rendered prompts and observations have exactly the given number of tokens, template included."""
    tasks = []
    for number in range(count):
        prompt = text_of(tokenizer, prompt_tokens - FRAME, number, "prompt")
        texts = [text_of(tokenizer, observation_tokens - FRAME, number, turn) for turn in range(turns - 1)]
        tasks.append(Task(f"toy-{number:04d}", "toy", "train", number, prompt, {"turns": turns, "texts": texts}, 0.0))
    return tasks


def dataset_rows(tasks: Sequence[Task], group: int) -> list[dict[str, Any]]:
    """A row per episode, `group` consecutive ones per task, in the order of TRL's sampler."""
    return [
        {"prompt": [{"role": "user", "content": task.prompt}], "texts": task.spec["texts"]}
        for task in tasks
        for _ in range(group)
    ]
