"""The word game against Wordle's rules, and offline Q-learning against exact targets."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from stages.control import offline_q
from stages.control.guessing import Games, Guessing
from stages.control.offline_q import Trainer, pairs_of
from stages.control.settings import Game, OfflineQ
from stages.environments.wordle.rules import code_of, marks_of

TINY = {"letters": 2, "alphabet": 3, "words": 6, "guesses": 3}
SMALL: dict[str, Any] = {"game": TINY, "games": 60, "updates": 3, "batch": 8, "layers": 1, "width": 16, "play": 20, "seed": 4}


def test_answers_follow_the_rules_of_wordle() -> None:
    """Contract: guesses are answered as in Wordle, also with repeated letters; only the word itself solves the game."""
    game = Guessing(Game(letters=3, alphabet=3, words=27, guesses=3), 1)
    assert game.words == sorted(itertools.product(range(3), repeat=3))
    for (row, guess), (column, hidden) in itertools.product(enumerate(game.words), repeat=2):
        marks = marks_of("".join("abc"[letter] for letter in guess), "".join("abc"[letter] for letter in hidden))
        assert game.answers[row, column] == code_of(marks)
        assert (game.answers[row, column] == game.solved) == (row == column)


def test_games_follow_the_rules() -> None:
    """Contract: some word fits all answers of a game, every guess but a correct one costs 1, and a game ends when it is
    solved."""
    game = Guessing(Game(**TINY), 1)
    games = game.play(200, game.careless(0.5, 0), 0)
    assert 0.1 < games.solved.mean() < 1.0
    for row in range(200):
        fits = np.ones(len(game.words), dtype=bool)
        count = int(games.real[row].sum())
        assert games.real[row].tolist() == [place < count for place in range(3)]
        for place in range(count):
            answer = games.answer[row, place]
            fits &= game.answers[games.guess[row, place]] == answer
            assert fits.any()
            assert games.reward[row, place] == (0.0 if answer == game.solved else -1.0)
            assert games.last[row, place] == (answer == game.solved or place == 2)
        assert games.last[row].sum() == 1


def test_discounted_returns() -> None:
    rewards = np.array([[-1.0, -1.0, 0.0], [-1.0, 0.0, 0.0]])
    real = np.array([[True, True, True], [True, True, False]])
    games = Games(np.zeros((2, 3), int), np.zeros((2, 3), int), rewards, real, np.zeros((2, 3), bool))
    np.testing.assert_allclose(games.returns(0.5), [[-1.5, -1.0, 0.0], [-1.0, 0.0, 0.0]])


def test_values_ignore_guess_order_and_later_guesses() -> None:
    trainer = Trainer(OfflineQ(**SMALL))
    torch.nn.init.normal_(trainer.network.output.weight)
    guess, answer = np.array([[2, 4, 1], [4, 2, 1], [2, 4, 3]]), np.array([[5, 0, 1], [0, 5, 1], [5, 0, 8]])
    with torch.no_grad():
        q = trainer.network.values(pairs_of(trainer.game, guess, answer))
    torch.testing.assert_close(q[0, 2], q[1, 2])
    assert not torch.allclose(q[0, 1], q[1, 1])
    torch.testing.assert_close(q[0], q[2])
    every = {int(pairs_of(trainer.game, np.array([[g]]), np.array([[a]]))) for g in range(6) for a in range(9)}
    assert every == set(range(1, 55)), "every guess with every answer has its own index"


def set_target_values(trainer: Trainer) -> torch.Tensor:
    """Sets the target network's output bias so that Q = -(index of the word) / 10 everywhere."""
    head = trainer.target.head
    values = -torch.arange(len(trainer.game.words)) / 10
    with torch.no_grad():
        encoded = head.encode(values)
        bias = encoded[:, None] if head.outputs == 1 else encoded.clamp(min=1e-9).log()
        trainer.target.output.bias.copy_(bias.flatten())
        trainer.target.output.weight.zero_()
    return head.decode(trainer.target.output.bias.detach().view(len(values), -1))


@pytest.mark.parametrize("loss", ["mse", "two_hot", "hl_gauss"])
@pytest.mark.parametrize("target", ["max", "sarsa", "monte_carlo"])
def test_targets_match_brute_force(loss: str, target: str) -> None:
    """Contract: r + gamma max_a Q(s', a), r + gamma Q(s', a') or the return, with noise; no bootstrap after a game's end."""
    head = {"loss": loss, "v_min": -6.0, "v_max": 2.0, "bins": 161}
    trainer = Trainer(OfflineQ(**{**SMALL, "target": target, "noise": 0.5, "head": head, "conservative": 0.0}))
    q = set_target_values(trainer)
    rows = np.arange(10)
    games, gamma = trainer.games, trainer.settings.gamma
    expected = torch.zeros(10, 3)
    for row, place in itertools.product(rows, range(3)):
        if not games.real[row, place]:
            continue
        following = games.guess[row, min(place + 1, 2)]
        after = {"max": q.max(), "sarsa": q[following], "monte_carlo": 0.0}[target]
        expected[row, place] = trainer.rewards[row, place] + gamma * (0.0 if games.last[row, place] else float(after))
        if target == "monte_carlo":
            left = range(int(games.real[row, place:].sum()))
            expected[row, place] = sum(gamma**k * trainer.rewards[row, place + k] for k in left)
    seen = {}
    head_of = trainer.network.head
    original = head_of.loss
    head_of.loss = lambda logits, y: seen.setdefault("target", y) is None or original(logits, y)
    trainer.loss(rows)
    real = torch.from_numpy(games.real[rows])
    torch.testing.assert_close(seen["target"][real], expected[real], atol=1e-4, rtol=0)


def test_noise_is_uniform_and_added_once() -> None:
    plain, noisy = (Trainer(OfflineQ(**{**SMALL, "games": 2000, "noise": noise})) for noise in (0.0, 1.0))
    added = (noisy.rewards - plain.rewards)[plain.games.real]
    assert (added.min() >= 0.0, added.max() <= 1.0) == (True, True)
    assert added.mean() == pytest.approx(0.5, abs=0.02)
    assert (plain.rewards == plain.games.reward).all()


@pytest.mark.parametrize("loss", ["mse", "two_hot", "hl_gauss", "c51"])
def test_every_head_beats_the_recorded_player(loss: str) -> None:
    """Contract: trained on recorded games alone, the greedy player wins clearly more often than the recorded one."""
    head = {"loss": loss, "v_min": -6.0, "v_max": 2.0, "bins": 31}
    learning = {"games": 400, "updates": 200, "batch": 64, "width": 32, "learning_rate": 5e-3, "target_every": 20}
    settings = OfflineQ(game=TINY, layers=1, play=300, carelessness=1.0, head=head, **learning)
    found = offline_q.run(settings)
    assert found["loss_last"] < found["loss_first"]
    assert found["win_rate"] > 0.75, "three different random guesses win 1/2"


def test_run_is_reproducible_and_written_by_the_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, result = tmp_path / "s.yaml", tmp_path / "r.json"
    settings.write_text(json.dumps(SMALL))
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["offline_q", "--settings", str(settings), "--result", str(result)])
    assert offline_q.main() == 0
    torch.set_num_threads(threads)
    assert json.loads(result.read_text()) == pytest.approx(
        {**{f"offline.{name}": value for name, value in offline_q.run(OfflineQ(**SMALL)).items()}, "environment_steps": 0},
        abs=1e-6,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"game": {"letters": 1, "alphabet": 3, "words": 4}}, "makes only 3; lower words"),
        ({"head": {"loss": "hl_gauss", "v_min": -2.0, "v_max": 2.0}}, "discounted returns are in"),
        ({"noise": 3.0}, "v_max to at least"),
    ],
)
def test_conflicting_settings_are_rejected(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OfflineQ(**changes)
