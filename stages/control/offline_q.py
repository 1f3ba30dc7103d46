"""offline Q-learning: Q over the guesses of a small game from a dataset of games, with any scalar head.

`python -m stages.control.offline_q --settings FILE --result FILE` trains and evaluates once: a run of lane offline_q
(reports/claims/hl_gauss.yaml). After "Stop Regressing" (Farebrother et al., arXiv
2403.03950): DQN's targets with a target network and the regulariser of conservative Q-learning; two-hot and HL-Gauss bootstrap
from decoded scalars, and c51 projects the whole return distribution.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stages.control.guessing import Games, Guessing
from stages.control.one_run import one_run
from stages.control.settings import OfflineQ
from stages.runtime.command import command
from stages.seeding import key64, seed_torch
from stages.values.conservative import conservative
from stages.values.heads import C51Head, make_head


def pairs_of(game: Guessing, guess: np.ndarray, answer: np.ndarray) -> Tensor:
    """Guesses with their answers as one number each, [N, U] int64 from [N, U]; 0 past the end."""
    return torch.from_numpy(np.where(guess < 0, 0, 1 + guess * (game.solved + 1) + answer).astype(np.int64))


class QNetwork(nn.Module):
    """Q(s, a) of all W words. Knowledge does not depend on the order of guesses: a state is the sum of embeddings of guesses with
    their answers, and of their number; hidden layers and a head follow."""

    def __init__(self, game: Guessing, settings: OfflineQ, start: float) -> None:
        """`start`: the initial Q."""
        super().__init__()
        self.words, width = len(game.words), settings.width
        self.pairs = nn.Embedding(1 + self.words * (game.solved + 1), width, padding_idx=0)
        self.count = nn.Embedding(game.settings.guesses, width)
        hidden = [layer for _ in range(settings.layers) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(nn.LayerNorm(width), *hidden)
        self.head = make_head(settings.head)
        self.output = nn.Linear(width, self.words * self.head.outputs)
        nn.init.zeros_(self.output.weight)
        with torch.no_grad():
            encoded = self.head.encode(torch.tensor(start)).reshape(-1)
            bias = encoded if self.head.outputs == 1 else encoded.clamp(min=1e-6).log()
            self.output.bias.copy_(bias.repeat(self.words))

    def forward(self, pairs: Tensor) -> Tensor:
        """Logits [N, U, W, outputs] before each of U guesses, from `pairs_of` [N, U], the last of which is ignored."""
        embedded = self.pairs(pairs)
        before = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, :-1].cumsum(1)], 1)
        states = before + self.count(torch.arange(pairs.shape[1]))
        return self.output(self.layers(states)).unflatten(-1, (self.words, self.head.outputs))

    def values(self, pairs: Tensor) -> Tensor:
        """Q [N, U, W]."""
        return self.head.decode(self(pairs))


class Trainer:
    """One run; see `OfflineQ`."""

    def __init__(self, settings: OfflineQ) -> None:
        seed_torch(settings.seed, "offline_q")
        self.settings, self.game = settings, Guessing(settings.game, settings.seed)
        player = self.game.careless(settings.carelessness, settings.seed, "stored")
        stored = self.game.play(settings.games + max(1, settings.games // 10), player, settings.seed, "stored")
        self.games, self.held_out = _cut(stored, slice(0, settings.games)), _cut(stored, slice(settings.games, None))
        rng = np.random.default_rng(key64(settings.seed, "offline_q", "noise"))
        noise = rng.uniform(0.0, settings.noise, self.games.reward.shape) if settings.noise else 0.0
        self.rewards = self.games.reward + noise
        self.returns = replace(self.games, reward=self.rewards).returns(settings.gamma)
        self.network = QNetwork(self.game, settings, float(self.returns[self.games.real].mean()))
        self.target = copy.deepcopy(self.network)
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate)

    def train(self) -> list[float]:
        """Train; the loss of every update."""
        rng = np.random.default_rng(key64(self.settings.seed, "offline_q", "batches"))
        losses = []
        for update in range(self.settings.updates):
            if update % self.settings.target_every == 0:
                self.target.load_state_dict(self.network.state_dict())
            rows = rng.integers(self.settings.games, size=self.settings.batch)
            loss = self.loss(rows)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimiser.step()
            losses.append(float(loss.detach()))
        return losses

    def loss(self, rows: np.ndarray) -> Tensor:
        """Mean over the guesses of the games `rows` [B] of the head's loss and `conservative` times the regulariser."""
        settings, games = self.settings, _cut(self.games, rows)
        pairs = pairs_of(self.game, games.guess, games.answer)
        action = torch.from_numpy(np.maximum(games.guess, 0))
        real = torch.from_numpy(games.real)
        logits = self.network(pairs)
        taken = logits.gather(2, action[..., None, None].expand(-1, -1, 1, logits.shape[-1]))[:, :, 0]
        per_guess = self.head_loss(taken, pairs, action, torch.from_numpy(games.last), rows)
        if settings.conservative:
            data = nn.functional.one_hot(action, len(self.game.words)).float()
            per_guess = per_guess + settings.conservative * conservative(self.network.head.decode(logits), data)
        return (per_guess * real).sum() / real.sum()

    def head_loss(self, taken: Tensor, pairs: Tensor, action: Tensor, last: Tensor, rows: np.ndarray) -> Tensor:
        """Loss [B, U] of the logits of the guesses made, `taken` [B, U, outputs], against the targets of `settings.target`."""
        settings, head = self.settings, self.network.head
        if settings.target == "monte_carlo":
            return head.loss(taken, torch.from_numpy(self.returns[rows]).float())
        reward = torch.from_numpy(self.rewards[rows]).float()
        with torch.no_grad():
            after = torch.cat([ahead := self.target(pairs)[:, 1:], torch.zeros_like(ahead[:, :1])], 1)
            values = head.decode(after)
            following = torch.cat([action[:, 1:], action[:, -1:]], 1)
            choice = values.argmax(-1) if settings.target == "max" else following
            discount = settings.gamma * (~last).float()
            if isinstance(head, C51Head):
                chosen = after.gather(2, choice[..., None, None].expand(-1, -1, 1, after.shape[-1]))[:, :, 0]
                return_distribution = head.project(torch.softmax(chosen, -1), reward, discount)
            else:
                target = reward + discount * values.gather(2, choice[..., None])[..., 0]
        if isinstance(head, C51Head):
            return head.distribution_loss(taken, return_distribution)
        return head.loss(taken, target)

    @torch.no_grad()
    def greedy(self, guess: np.ndarray, answer: np.ndarray, consistent: np.ndarray) -> np.ndarray:
        """The guesses [N] of highest Q; see `Choose`."""
        unknown = np.full((len(guess), 1), -1)
        pairs = pairs_of(self.game, np.concatenate([guess, unknown], 1), np.concatenate([answer, unknown], 1))
        return self.network.values(pairs)[:, -1].argmax(-1).numpy()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """win_rate and mean_return of the greedy player; value_rmse: error of Q of the guesses in held-out games against their
        discounted returns without noise (for targets that evaluate the behaviour policy, at least the returns' spread);
        overestimation: the largest Q at the first guess minus the greedy player's return."""
        settings, gamma = self.settings, self.settings.gamma
        played = self.game.play(settings.play, self.greedy, settings.seed, "judged")
        pairs = pairs_of(self.game, self.held_out.guess, self.held_out.answer)
        action = torch.from_numpy(np.maximum(self.held_out.guess, 0))
        predicted = self.network.values(pairs).gather(2, action[..., None])[..., 0].numpy()
        errors = (predicted - self.held_out.returns(gamma))[self.held_out.real]
        promised = float(self.network.values(torch.zeros(1, 1, dtype=torch.int64)).max())
        return {
            "win_rate": float(played.solved.mean()),
            "mean_return": float(np.where(played.real, played.reward, 0.0).sum(1).mean()),
            "value_rmse": float(np.sqrt((errors**2).mean())),
            "overestimation": promised - float(played.returns(gamma)[:, 0].mean()),
        }


def _cut(games: Games, rows: Any) -> Games:
    return Games(*(getattr(games, name)[rows] for name in ("guess", "answer", "reward", "real", "last")))


def run(settings: OfflineQ) -> dict[str, float]:
    """Train once; the metrics of `evaluate`, and the mean losses of the first and last tenth of the updates."""
    trainer = Trainer(settings)
    losses = trainer.train()
    tenth = max(1, len(losses) // 10)
    return {
        **trainer.evaluate(),
        "loss_first": sum(losses[:tenth]) / tenth,
        "loss_last": sum(losses[-tenth:]) / tenth,
    }


@command
def main() -> int:
    return one_run("offline", __doc__, OfflineQ, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
