"""curate.thoughts: demonstrations think before they act, or pad as long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.agent.chat import Chat
from stages.agent.policy import load_tokenizer
from stages.curation.demonstrations import DemonstrationPlan, demonstrate
from stages.curation.settings import Curate
from stages.environments.registry import load_domain
from stages.params import parse_params
from stages.records.episode import Episode
from stages.records.task import Task
from stages.records.thinking import Thinking, parse_turn
from stages.runtime.validation import ParamsError

DOMAIN = load_domain("briefing")
MARKS = Thinking()


def task() -> Task:
    record = next(DOMAIN.recipes(1, 0))
    return DOMAIN.task(record, {})  # type: ignore[attr-defined]


def shown(thinking: Thinking = MARKS, **curate: Any) -> Episode:
    plan = DemonstrationPlan(Curate(noisy_demonstrations=0, **curate), 0, 640, thinking)
    (episode,) = demonstrate(DOMAIN, DOMAIN.make(Path()), task(), plan).episodes
    return episode


def test_thoughts_come_before_the_action_and_change_no_turn() -> None:
    plain, thinking = shown(), shown(thoughts="expert")
    assert [turn.action for turn in plain.turns] == [turn.action for turn in thinking.turns]
    parsed = parse_turn(thinking.messages[-1]["content"], MARKS)
    assert parsed.action == plain.messages[-1]["content"] == plain.turns[0].action
    values = dict(task().spec["facts"])
    assert [values[noun] in parsed.thought for noun in task().spec["wanted"]] == [True] * len(task().spec["wanted"])
    assert thinking.reward == plain.reward


def test_padding_is_as_long_and_says_nothing() -> None:
    thought = parse_turn(shown(thoughts="expert").messages[-1]["content"], MARKS).thought
    padding = parse_turn(shown(thoughts="padding").messages[-1]["content"], MARKS).thought
    assert set(padding.split()) == {"."}
    assert len(padding.split()) == -(-len(thought) // 3)


def test_default_leaves_the_hash_of_demonstrations() -> None:
    assert "thoughts" not in Curate().model_dump()
    assert shown().params_hash != shown(thoughts="expert").params_hash


def test_response_markers_and_an_instruction_are_read_back(tiny_policy: Path) -> None:
    marks = Thinking(response=("<response>", "</response>"), instruction="think first")
    message = shown(marks, thoughts="expert").messages
    assert parse_turn(message[-1]["content"], marks).action == shown().turns[0].action
    tokenizer = load_tokenizer(tiny_policy)
    chat, plain = Chat(tokenizer, marks), Chat(tokenizer, Thinking())
    assert tokenizer.decode(chat.prompt_tokens("look")) == tokenizer.decode(plain.prompt_tokens("think first\nlook"))
    assert chat.read(chat.assistant_tokens(message[-1]["content"])).action == shown().turns[0].action


@pytest.mark.parametrize(
    ("domain", "model", "says"),
    [("briefing", {}, "model.thinking is null"), ("search", {"thinking": {}}, "search has no `thought`")],
)
def test_impossible_settings_are_refused(domain: str, model: dict[str, Any], says: str) -> None:
    values = {"domains": [domain], "per_domain": {domain: {}}, "model": model, "curate": {"thoughts": "expert"}}
    with pytest.raises(ParamsError, match=says):
        parse_params(values)
