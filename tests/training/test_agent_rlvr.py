"""Agent-RLVR: guided attempts at failed tasks, pairs without hints, rejection sampling and the reward model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from stages import rl
from stages.agent.active_episode import EpisodeRequest
from stages.agent.chat import Chat
from stages.agent.guidance import CLOSE, OPEN, env_feedback, env_interaction, hint_of, leaks, marked, mentions, plan
from stages.agent.policy import load_policy, load_tokenizer
from stages.algorithms.parts.guidance import Guidance
from stages.algorithms.parts.preference import PairScores, Preference, dpo
from stages.algorithms.resolve import resolve_section, warm_start_of
from stages.algorithms.settings import Rl
from stages.annotation.correct_paths import failed_paths
from stages.judging.chat_server import ChatServer
from stages.judging.chat_settings import ChatParams
from stages.judging.contract import JudgeError
from stages.params import parse_params
from stages.records.episode import EXPERT, Episode, Owner, TurnRecord, read_rows, write_episodes
from stages.runtime.validation import ParamsError
from stages.training.rl.cloning import chosen_successes
from stages.training.rl.guided_pairs import guided_pairs
from stages.training.rl.guided_pass import Attempts, GuidedEpisode, Hint, checked_hints, plan_hints
from stages.training.rl.hint_teachers import HintRequest, Solutions, hints_by_rules, hints_by_server, read_solutions
from stages.training.sft.hints import demonstration_hints
from stages.values.reward_model import RewardModel, best_of, bradley_terry, load_reward_model
from training.test_tree_bc import TREE
from training.toys import KilledError, demonstration, kill_at_step, letter_tasks, outputs, run, store_pairs

RL: dict[str, Any] = {
    "algorithm": "agent_rlvr",
    "steps": 3,
    "learning_rate": 0.003,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
    "warm_start": {"algorithm": "rejection_sft", "steps": 2, "settings": {"fraction": 0.5}},
}
TURNS = [
    TurnRecord(action, seen, True, 0.0, 0.0, "", action.lower(), 0, 0)
    for action, seen in (("search Ada", "Ada: born Rome"), ("search Rome", "Rome: mayor Bo"), ("answer Bo", ""))
]
FAILED = [TURNS[0], TurnRecord("search  Bo", "No page found.", True, 0.0, 0.0, "", "search bo", 0, 0)]


def attempt(chat: Chat, task_id: str, number: int, success: bool, guidance: str = "", actions: tuple[str, ...] = ()) -> Episode:
    """An episode of a task of the toy domain; successes and failures have different actions, and no two of a task the same."""
    actions = actions or ("open the door", "go" if success else "take the key" + " key" * number)
    seed = int(task_id.partition("-")[2] or 0)
    episode = demonstration(letter_tasks(seed + 1)[seed], actions)
    encoded = chat.encode(episode.messages, guidance)
    turns = [
        replace(turn, action_key=turn.action, start=start, end=end)
        for turn, (start, end) in zip(episode.turns, encoded.spans, strict=True)
    ]
    turns[-1].reward = float(success)
    logprob = [-1.0 if owner == Owner.POLICY else 0.0 for owner in encoded.owner]
    return replace(
        episode,
        **{"episode_id": f"{task_id}/{number:04d}", "task_id": task_id, "group_id": task_id, "policy_hash": "p", "turns": turns},
        **{"token_ids": encoded.token_ids, "owner": encoded.owner, "turn": encoded.turn, "logprob": logprob},
        **{"reward": float(success), "temperature": 1.0, "terminated": True, "reward_terms": {"letter": float(success)}},
    )


@pytest.fixture(scope="module")
def chat(tiny_policy: Path) -> Chat:
    return Chat(load_tokenizer(tiny_policy))


def attempts_of(chat: Chat, plain: list[int], guided: list[int], text: str = "do this: open the door") -> Attempts:
    of_hint = [
        GuidedEpisode(Hint("toy-000", number, "plan", text), attempt(chat, "toy-000", number, bool(success), marked(text)))
        for number, success in enumerate(guided)
    ]
    return Attempts([attempt(chat, "toy-000", number, bool(success)) for number, success in enumerate(plain)], of_hint)


def pairs_of(chat: Chat, plain: list[int], guided: list[int], text: str = "do this: open the door", **settings: Any):
    return guided_pairs(attempts_of(chat, plain, guided, text), Guidance(**settings), 0)


def make_failing(make_context, name: str = "run", **section: Any):
    """A context whose tasks have two plain failures and, every second of them, a success."""
    context = make_context("rl", name, rl={**RL, **section})
    chat = Chat(load_policy(Path(context.params.model.path)).tokenizer)
    tasks = [task for task in letter_tasks(16) if task.split == "train"]
    plain = [
        attempt(chat, task.task_id, number, number == 2) for place, task in enumerate(tasks) for number in range(2 + place % 2)
    ]
    write_episodes(context.root / "data/rollouts/toy/episodes.parquet", plain)
    episodes = [replace(demonstration(task), policy_hash=EXPERT) for task in letter_tasks(16)]
    write_episodes(context.root / "data/curated/toy/demonstrations.parquet", episodes)
    return context


# ---- must hold ---------------------------------------------------------------------------------------------------------------


def test_loss_by_hand() -> None:
    """pi = pi_ref: log 2 for any beta; beta 0.1 and log-ratios +2 and -1: margin 0.3, loss 0.5544."""
    zero = torch.zeros(1)
    for beta in (0.1, 3.0):
        assert float(dpo(PairScores(*[zero] * 8), Preference(beta=beta))) == pytest.approx(0.6931, abs=1e-4)
    pair = PairScores(torch.tensor([-3.0]), torch.tensor([-6.0]), torch.tensor([-5.0]), torch.tensor([-5.0]), *[zero] * 4)
    assert 0.1 * float(pair.difference) == pytest.approx(0.3)
    assert float(dpo(pair, Preference(beta=0.1))) == pytest.approx(0.5544, abs=1e-4)


@pytest.mark.parametrize(
    ("plain", "guided", "count"),
    [([1, 1, 0, 0, 0], [], 2), ([0, 0, 0], [1, 0], 1), ([1, 1], [], 0), ([0, 0], [0, 0], 0), ([1, 1], [1], 0)],
)
def test_every_success_is_paired_with_a_plain_failure(chat: Chat, plain: list[int], guided: list[int], count: int) -> None:
    pairs, counts = pairs_of(chat, plain, guided)
    assert len(pairs) == count == counts["pairs_plain"] + counts["pairs_guided"]
    assert all((pair.win.value, pair.lose.value) == (1.0, 0.0) for pair in pairs)
    assert counts["tasks_without_success"] == int(not any(plain + guided))


def test_stored_prompts_are_independent_of_the_hints(chat: Chat) -> None:
    """Contract: no training sequence has a token of a hint or of its marks, and other hints change none."""
    (pair,), _ = pairs_of(chat, [0, 0, 0], [1, 0])
    plain = attempt(chat, "toy-000", 0, True)
    assert [*pair.history, *pair.win.token_ids] == plain.token_ids
    assert pair.history == tuple(chat.prompt_tokens("take the key\nyou are in room 0"))
    for text in ("do this: open the door", "xxxxxxxxxxxxxxxxxxxxxx"):
        assert pairs_of(chat, [0, 0, 0], [1, 0], text)[0] == [pair]
    guided = attempts_of(chat, [0], [1]).guided[0].episode
    assert guided.owner.count(Owner.GUIDANCE) == len(chat.tokens_of(marked("do this: open the door")))
    shown = chat.tokenizer.decode(
        [token for token, owner in zip(guided.token_ids, guided.owner, strict=True) if owner == Owner.GUIDANCE]
    )
    assert shown == marked("do this: open the door")
    assert OPEN not in chat.tokenizer.decode([*pair.history, *pair.win.token_ids, *pair.lose.token_ids])
    assert guided.without_guidance().token_ids == plain.token_ids
    assert guided.without_guidance().turns == plain.turns


def test_successes_that_talk_about_the_hint_are_left_out(chat: Chat) -> None:
    assert mentions(["as the Guidance says"], "x y", ["hint", "guidance"])
    assert mentions(["I DO this: open the door now"], "do this: open the door", [])
    assert mentions([f"go {CLOSE}"], "x", [])
    assert not mentions(["hinterland", "open"], "do this: open the door", ["hint"])
    quoting = replace(attempts_of(chat, [0], [1]).guided[0], hint=Hint("toy-000", 0, "plan", "open the door"))
    attempts = replace(attempts_of(chat, [0], []), guided=[quoting])
    pairs, counts = guided_pairs(attempts, Guidance(), 0)
    assert (pairs, counts["successes"], counts["mention_hint"]) == ([], 1, 1)


def test_equal_continuations_make_no_pair(chat: Chat) -> None:
    same = attempt(chat, "toy-000", 0, False, actions=("open the door", "go"))
    assert guided_pairs(Attempts([same, attempt(chat, "toy-000", 1, True)]), Guidance(), 0)[0] == []


def test_fraction_of_plain_successes(chat: Chat) -> None:
    """round(0.2 * 13) = 3 of the plain successes, whatever their order."""
    plain = [attempt(chat, f"toy-{number:03d}", 0, number < 13) for number in range(16)]
    chosen = chosen_successes(plain, 0.2, 5)
    assert len(chosen) == 3
    assert all(episode.success for episode in chosen)
    assert chosen_successes(plain[::-1], 0.2, 5) == chosen
    assert len(chosen_successes(plain, 1.0, 5)) == 13


@pytest.mark.parametrize(("passed", "success"), [(10, True), (9, False), (0, False)])
def test_reward_needs_every_test(passed: int, success: bool) -> None:
    """9 of 10 tests: no success; nor without a submission, whose return is 0."""
    episode = Episode("e", "t", "code", "t", 0, "", "", 1.0, 1.0, 0, reward=passed / 10)
    assert episode.success is success


# ---- hints -------------------------------------------------------------------------------------------------------------------


def test_hints_by_hand() -> None:
    assert plan(TURNS) == "plan: search, search, answer"
    assert env_interaction(TURNS, FAILED) == "do this: search Rome"
    assert env_feedback(TURNS, FAILED) == "wrong before: search Bo, which gave: No page found."
    assert env_interaction(TURNS, TURNS[:2]) == "", "the last action is never told"
    assert env_feedback(TURNS, TURNS) == ""
    assert hint_of("plan", [], FAILED) == ""


@pytest.mark.parametrize(
    ("hint", "answer", "found"),
    [("look up Bo.", "bo", True), ("look up Bob", "bo", False), ("the MAYOR,  bo", "mayor bo", True), ("anything", "?!", False)],
)
def test_leaks(hint: str, answer: str, found: bool) -> None:
    assert leaks(hint, answer) is found


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
    hints, counts = checked_hints(requests, texts, {"toy-000": "bo"}, chat, Guidance(max_tokens=32))
    assert [hint.text for hint in hints] == ["look"]
    assert counts == {"leaked": 1, "none": 1, "too_long": 1, "used": 1}
    free, _ = checked_hints(requests, texts, {"toy-000": "bo"}, chat, Guidance(max_tokens=32, forbid_answer=False))
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
    hints = demonstration_hints(episodes, 0.5, 3)
    assert 10 < sum(bool(hint) for hint in hints) < 30
    assert {hint.split()[1] for hint in hints if hint} == {"plan:", "do"}
    assert demonstration_hints(episodes[::-1], 0.5, 3) == hints[::-1]
    assert demonstration_hints(episodes, 0.0, 3) == [""] * 40


# ---- the stage ---------------------------------------------------------------------------------------------------------------


def test_method_resumes_to_the_same_bytes(make_context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: guided attempts, warm start and training go on where they were killed."""
    monkeypatch.setattr("stages.training.rl.guided_pass.CHUNK", 16)
    section = {"preference": {"reward_model": True}}
    plain = make_failing(make_context, "plain", **section)
    history = run(plain)
    report = json.loads((plain.root / "reports/rl/toy.json").read_text())
    guidance = report["guidance"]
    assert guidance["hints"]["used"] == guidance["guided_episodes"] > 0
    assert report["environment_steps"] == 2 * guidance["guided_episodes"]
    assert report["pairs"] == guidance["pairs_plain"] + guidance["pairs_guided"]
    assert guidance["pairs_plain"] == 6
    assert guidance["coverage_guided"] >= guidance["coverage_plain"] == 6
    assert (report["warm_start"]["algorithm"], report["warm_start"]["paths"]) == ("rejection_sft", 3)
    assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert report["ledger/environment_tokens_trained"] == 0
    rows = read_rows(plain.root / "data/rl/toy/guided.parquet")
    assert len(rows) == guidance["guided_episodes"]
    assert all(Owner.GUIDANCE in row["owner"] and row["messages"][0]["content"].endswith(marked(row["hint"])) for row in rows)
    episodes = guidance["guided_episodes"]
    for step in (1, episodes + 1, episodes + 4):  # in the guided pass, the warm start and rl
        killed = make_failing(make_context, f"killed {step}", **section)
        kill_at_step(killed, step)
        with pytest.raises(KilledError):
            rl.run(killed)
        rl.run(make_failing(make_context, f"killed {step}", **section))
        assert outputs(killed.root) == outputs(plain.root)


def test_without_kinds_it_is_dpo_on_plain_attempts(make_context) -> None:
    """Contract: the reduction in the card, to the last bit of the policy."""
    files = []
    for name, section in (
        ("guided", {"guidance": {"kinds": []}}),
        ("dpo", {"algorithm": "dpo", "preference": {"source": "guided"}, "guidance": {"kinds": []}}),
    ):
        context = make_failing(make_context, name, **section)
        run(context)
        files.append((context.root / "data/models/rl/toy/model.safetensors").read_bytes())
        assert json.loads((context.root / "reports/rl/toy.json").read_text())["pairs"] == 6
        assert not (context.root / "data/rl/toy/guided.parquet").exists()
    assert files[0] == files[1]


def test_rejection_sampling_alone(make_context) -> None:
    context = make_failing(make_context, algorithm="rejection_sft", warm_start={}, settings={"guided": True})
    history = run(context)
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert report["paths"] == 6 + report["guidance"]["guided_success"] * report["guidance"]["guided_episodes"]
    assert history[-1]["loss"] < history[0]["loss"]
    assert "trees" not in report


def test_attempts_without_pairs_are_refused(make_context) -> None:
    context = make_failing(make_context, warm_start={}, guidance={"kinds": []})
    chat = Chat(load_policy(Path(context.params.model.path)).tokenizer)
    write_episodes(context.root / "data/rollouts/toy/episodes.parquet", [attempt(chat, "toy-000", 0, False)])
    with pytest.raises(ValueError, match=r"no task of toy has both a success, plain or guided, and a plain failure"):
        rl.run(context)
    context = make_failing(make_context, "sft", algorithm="rejection_sft", warm_start={})
    write_episodes(context.root / "data/rollouts/toy/episodes.parquet", [attempt(chat, "toy-000", 0, False)])
    with pytest.raises(ValueError, match=r"is none to learn from; raise rollout\.tasks"):
        rl.run(context)


# ---- reward model ------------------------------------------------------------------------------------------------------------


def test_reward_model_by_hand(tiny_policy: Path, tmp_path: Path) -> None:
    """s_w - s_l = 0.3: 0.5544; an untrained model scores everything 0, so that the first is best."""
    assert float(bradley_terry(torch.tensor([1.3]), torch.tensor([1.0]))) == pytest.approx(0.5544, abs=1e-4)
    assert [best_of(scores) for scores in ([0.0], [1.0, 1.0, 1.0], [0.0, 2.0, 2.0], [float("nan"), -1.0])] == [0, 0, 1, 1]
    model = RewardModel.of(load_policy(tiny_policy).model)
    assert model.scores([[5, 6, 7], [8]]) == [0.0, 0.0]
    torch.nn.init.normal_(model.output.weight, generator=torch.Generator().manual_seed(0))
    model.save(tmp_path / "reward")
    loaded = load_reward_model(tmp_path)
    assert loaded.scores([[5, 6, 7], [8]]) == pytest.approx(model.scores([[5, 6, 7], [8]]), rel=1e-5)
    assert loaded.scores([[8]]) == loaded.scores([[5, 6, 7], [8]])[1:]


def test_reward_model_learns_the_pairs(make_context) -> None:
    section = {"preference": {"reward_model": True, "reward_learning_rate": 0.01}, "guidance": {"kinds": []}, "warm_start": {}}
    context = make_failing(make_context, steps=8, **section)
    history = run(context)
    assert history[0]["reward_model_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert history[-1]["reward_model_accuracy"] == 1.0
    model = load_reward_model(context.root / "data/models/rl/toy")
    chat = Chat(load_policy(Path(context.params.model.path)).tokenizer)
    right, wrong = (attempt(chat, "toy-000", 0, success).token_ids for success in (True, False))
    assert best_of(model.scores([wrong, right])) == 1


# ---- settings ----------------------------------------------------------------------------------------------------------------


def test_defaults_of_the_method() -> None:
    method, section = resolve_section(Rl(algorithm="agent_rlvr"))
    assert (method.data, section.preference.source, section.preference.loss) == ("pairs", "guided", "dpo")
    found = warm_start_of(section)
    assert found is not None
    assert (found[0].card.slug, found[1].settings.fraction) == ("rejection_sft", 0.2)
    assert warm_start_of(resolve_section(Rl(algorithm="agent_rlvr", warm_start={}))[1]) is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"preference": {"source": "trees"}}, r"agent_rlvr learns from guided attempts: set it to guided"),
        ({"preference": {"level": "step"}}, r"guided attempts are whole episodes: set it to trajectory"),
        ({"guidance": {"kinds": ["plan", "plan"]}}, r"lists one twice"),
        ({"guidance": {"source": "server"}}, r"rl\.guidance\.server\.model is empty: name the model at the server"),
        ({"guidance": {"server": {"model": "m"}}}, r"rl\.guidance\.server has no effect here"),
        ({"preference": {"reward_learning_rate": 0.1}}, r"reward_learning_rate has no effect here"),
        ({"algorithm": "dpo", "guidance": {"attempts": 2}}, r"rl\.guidance\.attempts has no effect here"),
        ({"algorithm": "grpo", "guidance": {"attempts": 2}}, r"rl\.guidance\.attempts has no effect: algorithm grpo"),
        (
            {"algorithm": "grpo", "warm_start": {"algorithm": "rejection_sft", "settings": {"guided": True}}},
            r"leave settings\.guided",
        ),
        ({"algorithm": "rejection_sft", "settings": {"fraction": 0}}, r"fraction"),
        ({"algorithm": "step_dpo", "preference": {"reward_model": True}}, r"set level to trajectory"),
    ],
)
def test_invalid_settings_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve_section(Rl(**{"algorithm": "agent_rlvr", **section}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"curate": {"expert_demonstrations": 0}}, r"curate\.expert_demonstrations is 0: set it to 1, or source to mcts"),
        ({"model": {"lora": {"rank": 4}}, "rl": {"preference": {"reward_model": True}}}, r"set model\.lora\.rank to 0"),
        ({"evaluate": {"models": ["rl@toy+reward"]}}, r"rl@toy\+reward needs a reward model"),
    ],
)
def test_contradictions_are_refused(sections: dict[str, Any], message: str) -> None:
    values = {"domains": ["toy"], "per_domain": {"toy": {"rl": {"algorithm": "agent_rlvr"}}}, **sections}
    with pytest.raises(ParamsError, match=message):
        parse_params(values)


def test_requests_with_and_without_hint_are_different_prompts() -> None:
    task = letter_tasks(1)[0]
    keys = {EpisodeRequest(task, 0, "g", guidance=hint).prompt_key for hint in ("", "a", "b")}
    assert len(keys) == 3
