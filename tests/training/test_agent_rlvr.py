"""Agent-RLVR: guided attempts at failed tasks, pairs without hints, rejection sampling and the reward model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages import rl
from stages.agent.chat import Chat
from stages.agent.guidance import CLOSE, OPEN, marked, mentions
from stages.agent.policy import load_policy
from stages.algorithms.parts.guidance import Guidance
from stages.algorithms.parts.preference import PairScores, Preference, dpo
from stages.records.episode import EXPERT, Episode, Owner, read_episodes, read_rows, write_episodes
from stages.training.rl.cloning import chosen_successes
from stages.training.rl.guided_pairs import guided_pairs
from stages.training.rl.guided_pass import Attempts, Hint
from stages.values.reward_model import RewardModel, best_of, bradley_terry, load_reward_model
from training.guided_attempts import RL, attempt, attempts_of
from training.toys import KilledError, demonstration, kill_at_step, letter_tasks, outputs, run


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


def thinking(episode: Episode, thought: str, turn: int = 0) -> Episode:
    """The episode with a thought before the action of a turn, as messages of reasoning models have it; the action stays."""
    messages = [dict(message) for message in episode.messages]
    messages[1 + 2 * turn]["content"] = f"<think>{thought}</think>{messages[1 + 2 * turn]['content']}"
    return replace(episode, messages=messages)


@pytest.mark.parametrize("thought", ["the hint says so", f"{OPEN} open", "I shall do this:  OPEN the door", "as in my Guidance"])
def test_thoughts_that_talk_about_the_hint_are_not_learned(chat: Chat, thought: str) -> None:
    """Contract: thoughts are trained on, so what they say counts as what actions say."""
    attempts = attempts_of(chat, [0], [1])
    (guided,) = attempts.guided
    for text, kept in ((thought, 0), ("I see a door", 1)):
        changed = replace(attempts, guided=[replace(guided, episode=thinking(guided.episode, text))])
        pairs, counts = guided_pairs(changed, Guidance(), 0)
        assert (len(pairs), counts["successes"], counts["mention_hint"]) == (kept, 1, 1 - kept)


def test_no_training_sequence_has_marks_of_hints(chat: Chat) -> None:
    """Contract: plain successes and failures with a mark in a thought, an action or an observation are not learned from, nor are
    guided successes whose observations echo one."""
    plain = [attempt(chat, "toy-000", number, number < 2) for number in range(4)]
    plain[0] = thinking(plain[0], f"where is the {OPEN}", 1)
    plain[3].messages[2]["content"] = f"no such thing: {CLOSE.upper()}"
    attempts = Attempts(plain)
    assert [one.episode_id[-1] for one in attempts.trainable] == ["1", "2"]
    assert attempts.report()["plain_marked"] == 2
    ((pair,), counts) = guided_pairs(attempts, Guidance(), 0)
    assert counts["pairs_plain"] == 1
    assert (list(pair.history + pair.win.token_ids), list(pair.history + pair.lose.token_ids)) == (
        plain[1].token_ids[: len(pair.history + pair.win.token_ids)],
        plain[2].token_ids[: len(pair.history + pair.lose.token_ids)],
    )
    assert guided_pairs(Attempts([plain[0], plain[2]]), Guidance(), 0)[0] == []
    assert guided_pairs(Attempts([plain[1], plain[3]]), Guidance(), 0)[0] == []
    echoing = attempts_of(chat, [0], [1])
    shown = "do this: open the door"
    for first in ("", marked(shown)):  # what rollouts write, and what tests write, in the first message
        messages = [dict(message) for message in echoing.guided[0].episode.messages]
        messages[0]["content"] += first
        played = replace(echoing.guided[0].episode, messages=messages)
        assert len(guided_pairs(replace(echoing, guided=[replace(echoing.guided[0], episode=played)]), Guidance(), 0)[0]) == 1
    echoing.guided[0].episode.messages[2]["content"] = f"unknown: {OPEN}"
    assert guided_pairs(echoing, Guidance(), 0)[0] == []


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


def test_rejection_sampling_learns_from_no_plain_success_with_marks(make_context) -> None:
    """Contract: round(1.0 * 5) of the six plain successes, since one has a mark."""
    context = make_failing(make_context, algorithm="rejection_sft", warm_start={}, guidance={})
    path = context.root / "data/rollouts/toy/episodes.parquet"
    episodes = read_episodes(path)
    marked_one = next(episode for episode in episodes if episode.success)
    marked_one.messages[1]["content"] = f"{OPEN} {marked_one.messages[1]['content']}"
    write_episodes(path, episodes)
    run(context)
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    assert (report["paths"], report["guidance"]["plain_marked"]) == (5, 1)


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
