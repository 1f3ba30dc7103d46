"""The episode browser's data: which episodes are chosen, and that packing loses nothing."""

from __future__ import annotations

import json

import pytest

from stages.agent.sample_episodes import choose, outcome
from stages.reporting.episodes import browser_data, pack
from stages.reporting.inputs import load_inputs


def row(name: str, reward: float, tokens: int = 4, **changes) -> dict:
    policy = tokens - 1
    base = {
        "episode_id": name,
        "task_id": "t",
        "domain": "d",
        "reward": reward,
        "truncated": False,
        "stop_reason": "terminated",
        "policy_hash": "p",
        "reward_terms": "{}",
        "messages": [],
        "turns": [],
        "token_ids": list(range(tokens)),
        "owner": [0] + [1] * policy,
        "turn": [-1] + [0] * policy,
        "logprob": [0.0] + [-0.5] * policy,
    }
    return {**base, **changes}


def test_choice_alternates_best_worst_random_without_repeats():
    rows = [row(f"e{index}", index / 9) for index in range(10)]
    chosen = choose(rows, 6, 0, "key")
    assert [pick for pick, _ in chosen] == ["best", "worst", "random"] * 2
    assert chosen[0][1]["episode_id"] == "e9"
    assert chosen[1][1]["episode_id"] == "e0"
    assert len({item["episode_id"] for _, item in chosen}) == 6


def test_choice_is_independent_of_row_order():
    rows = [row(f"e{index}", index % 2) for index in range(20)]
    assert choose(rows, 9, 0, "key") == choose(rows[::-1], 9, 0, "key")


def test_choice_takes_all_of_few_episodes():
    assert len(choose([row("a", 1.0), row("b", 0.0)], 10, 0)) == 2
    assert choose([], 10, 0) == []


def test_outcome_distinguishes_failure_from_truncation():
    assert outcome(row("a", 1.0, truncated=True)) == "success"
    assert outcome(row("a", 0.5, truncated=True)) == "truncated"
    assert outcome(row("a", 0.5)) == "failure"


def test_packing_keeps_every_token_owner_turn_and_policy_number():
    """Contract: the browser shows exactly what happened, token for token."""
    given = row(
        "a",
        1.0,
        5,
        owner=[0, 1, 1, 2, 1],
        turn=[-1, 0, 0, 0, 1],
        logprob=[0.0, -0.1234, -2.0, 0.0, -0.5],
        advantages=[0, 1.5, 1.5, 0, -0.25],
    )
    packed = pack(given, "rl step 1", "best")
    spread = [value for value, count in packed["turn"] for _ in range(count)]
    assert packed["ids"] == given["token_ids"]
    assert packed["owner"] == "01121"
    assert spread == given["turn"]
    assert packed["logprob"] == [-0.123, -2, -0.5]
    assert packed["advantage"] == [[1.5, 2], [-0.25, 1]]


def test_roles_are_packed_where_there_are_some():
    packed = pack(row("t/0/planner", 0.0, role="planner", play="t/0"), "rl step 1", "best")
    assert (packed["role"], packed["play"]) == ("planner", "t/0")
    for plain in (row("e", 1.0), row("e", 1.0, role="", play="")):
        assert not {"role", "play"} & set(pack(plain, "rl step 1", "best"))


def test_byte_limit_drops_episodes_evenly_over_sources():
    rows = [row(f"e{index}", index / 50, 60) for index in range(50)]
    browser = browser_data({"d": {"one": rows, "two": rows}}, 40, None, 0, limit=8000)
    assert browser.chosen == 40
    assert 0 < browser.shown < 40
    sources = [episode["source"] for episode in browser.data["episodes"]]
    assert abs(sources.count("one") - sources.count("two")) <= 1
    assert sum(len(json.dumps(episode, separators=(",", ":"))) for episode in browser.data["episodes"]) <= 8000


def test_token_texts_join_to_the_episode_text(full_run):
    root, params = full_run
    inputs = load_inputs(root, params)
    browser = browser_data({"search": inputs.domains["search"].episodes}, 4, inputs.tokenizer, 0)
    episode = browser.data["episodes"][0]
    text = "".join(browser.data["vocabulary"][str(token)] for token in episode["ids"])
    assert text.startswith("<|user|>Your task in search: find what is asked.\nYou are in a kitchen.<|end|><|assistant|>")
    assert all(content in text for role, content in episode["messages"] if role == "assistant")


def test_without_a_tokenizer_tokens_are_shown_by_id():
    assert browser_data({"d": {"s": [row("a", 1.0)]}}, 1, None, 0).data["vocabulary"]["2"] == "#2"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_requested_number_of_episodes_is_shown(count):
    rows = [row(f"e{index}", index % 2) for index in range(9)]
    assert browser_data({"d": {"one": rows, "two": rows}}, count, None, 0).shown == count
