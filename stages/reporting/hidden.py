"""Observations that later turns of an episode did not see (stages/agent/forgetting.py), for the pages that show episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.records.forgotten import left_context

if TYPE_CHECKING:
    from stages.agent.chat import Chat
    from stages.records.thinking import Thinking

Chats = Callable[[], "Chat | None"]
"""Loads the policy's chat format, which takes seconds: it is called only for episodes that hide something."""


def no_chat() -> Chat | None:
    return None


def load_chat(folder: Path, thinking: Thinking | None) -> Chat | None:
    """The chat format of a `save_pretrained` folder, with the marks of `model.thinking`; None if it has no tokenizer or is not
    there. Raises ValueError for one that `stages.agent.chat.Chat` refuses."""
    return _loaded(folder, thinking) if (folder / "tokenizer_config.json").exists() else None


@lru_cache(maxsize=4)
def _loaded(folder: Path, thinking: Thinking | None) -> Chat:
    from stages.agent.chat import Chat
    from stages.agent.policy import load_tokenizer

    return Chat(load_tokenizer(folder), thinking)


def hidden_observations(row: Mapping[str, Any], chat: Chats = no_chat) -> list[list[int]]:
    """[turn, by, start, stop] of each hidden observation of an episode row, by turn; [] if there is none.

    The turns after `by`, from 0, did not see the tokens [start, stop) of the observation of `turn`: its text; its message stayed,
    empty. [turn, by] without a chat format or tokens.
    """
    first = list(left_context(row.get("forgotten") or []).items())
    found = chat() if first and row["token_ids"] else None
    if found is None:
        return [[turn, by] for turn, by in first]
    from stages.agent.forgetting import hidden_spans

    turns = [(turn["start"], turn["end"]) for turn in row["turns"]]
    spans = hidden_spans(found, row["token_ids"], turns, first)
    return [[turn, by, start, stop] for (turn, by), (start, stop, _) in zip(first, spans, strict=True)]
