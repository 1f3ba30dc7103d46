"""Agent-RLVR's hints: by rules, from trees, from a server, and in demonstrations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.agent.active_episode import EpisodeRequest
from stages.agent.chat import Chat
from stages.agent.guidance import env_feedback, env_interaction, hint_of, leaks, marked, plan
from stages.algorithms.parts.guidance import Guidance
from stages.annotation.correct_paths import failed_paths
from stages.environments.factbook.domain import FactbookDomain
from stages.judging.chat_server import ChatServer
from stages.judging.chat_settings import ChatParams
from stages.judging.contract import JudgeError
from stages.records.episode import Episode, TurnRecord
from stages.training.rl.guided_pass import answers_of, checked_hints, plan_hints
from stages.training.rl.hint_teachers import HintRequest, Solutions, hints_by_rules, hints_by_server, read_solutions
from stages.training.sft.hints import demonstration_hints
from training.guided_attempts import RL, attempt, attempts_of
from training.test_tree_bc import TREE
from training.toys import demonstration, letter_tasks, store_pairs

TURNS = [
    TurnRecord(action, seen, True, 0.0, 0.0, "", action.lower(), 0, 0)
    for action, seen in (("search Ada", "Ada: born Rome"), ("search Rome", "Rome: mayor Bo"), ("answer Bo", ""))
]
FAILED = [TURNS[0], TurnRecord("search  Bo", "No page found.", True, 0.0, 0.0, "", "search bo", 0, 0)]


def test_hints_by_hand() -> None:
    assert plan(TURNS) == "plan: search, search, answer"
    assert env_interaction(TURNS, FAILED) == "do this: search Rome"
    assert env_feedback(TURNS, FAILED) == "wrong before: search Bo, which gave: No page found."
    assert env_interaction(TURNS, TURNS[:2]) == "", "the last action is never told"
    assert env_feedback(TURNS, TURNS) == ""
    assert hint_of("plan", [], FAILED) == ""


@pytest.mark.parametrize(
    ("hint", "answer", "found"),
    [
        *(("look up Bo.", "bo", True), ("look up Bob", "bo", False), ("the MAYOR,  bo", "mayor bo", True), ("any", "?!", False)),
        *(("go to (Gambia)", "the Gambia", True), ("see OBriens, OBrien", "O'Brien", True), ("option b, or a one", "A", True)),
        *(
            ("area: 1.284 million km", "1,284,000", True),
            ("1,284,000 km", "1.284 million", True),
            ("$1284000", "1,284,000", True),
        ),
        *(("1.2845 million", "1,284,000", False), ("1.284 billion", "1,284,000", False), ("in 1975-1980", "1980", True)),
        *(("a 17.45 share", "17.4", False), ("room17.4", "17.4", False), ("about 17.40.", "17.4", True)),
    ],
)
def test_leaks(hint: str, answer: str, found: bool) -> None:
    assert leaks(hint, answer) is found
    assert leaks(hint, "nothing", answer) is found


def test_answers_are_all_forms_that_the_task_accepts() -> None:
    """Contract: the spec's answers, and the solution's as the domain reads it; the last action in domains without answers."""
    accepted = {"answer": "United States", "accepted": ["United States", "USA"]}
    tasks = {
        name: replace(letter_tasks(1)[0], spec=accepted if name == "listed" else {}) for name in ("listed", "bare", "unsolved")
    }
    known = Solutions({"listed": TURNS, "bare": TURNS}, {})
    found = answers_of(FactbookDomain(), tasks, known)
    assert found == {"listed": ["United States", "USA", "bo", "Bo"], "bare": ["bo", "Bo"], "unsolved": [""]}
    assert answers_of(object(), tasks, known)["bare"] == ["Bo"]
    known.of["bare"][-1].action = "push the button"
    assert answers_of(object(), tasks, known)["bare"] == ["push the button"]


def test_the_domains_own_hints_do_not_leak_other_forms_of_the_answer(chat: Chat) -> None:
    """Contract: an observation that shows the answer in another form is no hint, nor one with a synonym."""
    failed = attempt(chat, "toy-000", 0, False)
    tasks = {"toy-000": replace(letter_tasks(1)[0], spec={"answer": "1,284,000", "accepted": ["1,284,000", "USA"]})}
    requests = [HintRequest("toy-000", number, "env_feedback", failed, 0) for number in range(3)]
    texts = ["wrong before: open 2, which gave: total: 1.284 million sq km", "ask the USA", "wrong before: open 3"]
    answers = answers_of(FactbookDomain(), tasks, Solutions({}, {}))
    hints, counts = checked_hints(requests, texts, answers, chat, Guidance(max_tokens=64))
    assert ([hint.text for hint in hints], counts["leaked"]) == (["wrong before: open 3"], 2)


def test_kinds_and_failures_take_turns(chat: Chat) -> None:
    plain = attempts_of(chat, [1, 0, 0], []).plain
    requests = plan_hints([*plain, attempt(chat, "toy-001", 0, True)], Guidance(kinds=["plan", "env_feedback"], attempts=5))
    assert [(one.attempt, one.kind, one.failed.episode_id[-1]) for one in requests] == [
        *((0, "plan", "1"), (1, "env_feedback", "1"), (2, "plan", "2"), (3, "env_feedback", "2"), (4, "plan", "1"))
    ]
    assert {one.task_id for one in requests} == {"toy-000"}


def test_hints_that_leak_or_are_long_are_not_used(chat: Chat) -> None:
    failed = attempt(chat, "toy-000", 0, False)
    requests = [HintRequest("toy-000", number, "plan", failed, 0) for number in range(4)]
    texts = ["", "it is Bo", "go " * 40, "look"]
    hints, counts = checked_hints(requests, texts, {"toy-000": ["bo"]}, chat, Guidance(max_tokens=32))
    assert [hint.text for hint in hints] == ["look"]
    assert counts == {"leaked": 1, "none": 1, "too_long": 1, "used": 1}
    free, _ = checked_hints(requests, texts, {"toy-000": ["bo"]}, chat, Guidance(max_tokens=32, forbid_answer=False))
    assert [hint.text for hint in free] == ["it is Bo", "look"]


def test_trees_teach_with_their_failed_branches(make_context) -> None:
    assert failed_paths(TREE, 9) == [[0, 3], [0, 1, 6]]
    context = make_context("rl", rl=RL)
    store_pairs(context)
    known = read_solutions("mcts", context.root, context.root / "data/annotated/toy", "toy")
    assert [turn.action for turn in known.of["t0"]] == ["1", "2"]
    request = HintRequest("t0", 0, "env_feedback", Episode("e", "t0", "toy", "t0", 0, "", "", 1.0, 1.0, 0), 0)
    assert hints_by_rules([request], known) == ["wrong before: 3"]


def answering(replies: list[httpx.Response], asked: list[Any], **params: Any) -> ChatServer:
    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return replies[min(len(asked), len(replies)) - 1]

    settings = ChatParams(model="m", **params)
    return ChatServer(settings, "rl.guidance.server", Path("/"), httpx.MockTransport(handle), sleep=lambda seconds: None)


def reply(text: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}}]})


def test_server_writes_hints_once(chat: Chat, tmp_path: Path) -> None:
    """Contract: a reply is found again by its whole request, without the server; what the model sees has no hidden part."""
    asked: list[Any] = []
    failed = attempt(chat, "toy-000", 0, False)
    known = Solutions({"toy-000": TURNS}, {})
    requests = [HintRequest("toy-000", 0, kind, failed, 0) for kind in ("plan", "env_interaction")]
    cache = str(tmp_path / "replies")
    server = answering([httpx.Response(503), reply("look\n there")], asked, requests=1, cache=cache)
    assert hints_by_server(requests, known, server, 64) == ["look there", "look there"]
    assert len(asked) == 3
    seen = asked[0]["messages"][0]["content"]
    assert "> search Ada\nAda: born Rome" in seen
    assert "> take the key" in seen
    server.close()
    silent = answering([httpx.Response(503)], asked, requests=1, cache=cache)
    assert hints_by_server(requests, known, silent, 64) == ["look there", "look there"]
    assert len(asked) == 3
    with pytest.raises(JudgeError, match=r"rl\.guidance\.server: no reply in 5 attempts, the last with HTTP 503"):
        hints_by_server(requests, known, silent, 32)
    silent.close()


def test_refusals_are_no_hints_and_a_wrong_setup_ends_the_run(chat: Chat) -> None:
    asked: list[Any] = []
    refusing = answering([httpx.Response(400)], asked, cache="")
    assert refusing.write([[{"role": "user", "content": "x"}]]) == [None]
    refusing.close()
    wrong = answering([httpx.Response(404)], asked, cache="")
    with pytest.raises(JudgeError, match=r"rl\.guidance\.server: .* answers 404 for model 'm'"):
        wrong.write([[{"role": "user", "content": "x"}]])
    wrong.close()


def test_demonstrations_with_hints(chat: Chat) -> None:
    tasks = letter_tasks(40)
    episodes = [demonstration(task) for task in tasks]
    hints = demonstration_hints(episodes, 0.5, 3, {})
    assert 10 < sum(bool(hint) for hint in hints) < 30
    assert {hint.split()[1] for hint in hints if hint} == {"plan:", "do"}
    assert demonstration_hints(episodes[::-1], 0.5, 3, {}) == hints[::-1]
    assert demonstration_hints(episodes, 0.0, 3, {}) == [""] * 40


def test_hints_of_demonstrations_contain_no_answer() -> None:
    """Contract: the rule of the guided pass. The answer is Bo: neither "do this: search Bo" nor, where the task accepts Ada, too,
    "do this: ask Ada" is a hint; the plan is."""
    tasks = letter_tasks(60)
    told = [demonstration(task, ("search Bo", "answer Bo")) for task in tasks]
    assert set(demonstration_hints(told, 1.0, 3, {})) == {"", marked("plan: search, answer")}
    also = [demonstration(task, ("ask Ada", "answer Bo")) for task in tasks]
    assert marked("do this: ask Ada") in demonstration_hints(also, 1.0, 3, {})
    specs = {("toy", task.task_id): {"answer": "Bo", "accepted": ["Bo", "Ada"]} for task in tasks}
    assert set(demonstration_hints(also, 1.0, 3, specs)) == {"", marked("plan: ask, answer")}


def test_requests_with_and_without_hint_are_different_prompts() -> None:
    task = letter_tasks(1)[0]
    keys = {EpisodeRequest(task, 0, "g", guidance=hint).prompt_key for hint in ("", "a", "b")}
    assert len(keys) == 3


def test_requests_with_other_examples_are_different_prompts() -> None:
    task = letter_tasks(1)[0]
    shown = [(), ({"role": "user", "content": "a"},), ({"role": "user", "content": "b"},)]
    assert len({EpisodeRequest(task, 0, "g", examples=one).prompt_key for one in shown}) == 3
