"""The turn critic (ArCHer, Zhou et al., arXiv 2402.19446): twin values of a history and of an action after it.

A backbone with four scalar heads of `stages.values.heads`. One causal pass over an episode reads all its turns: V_1, V_2 at the
last token before a turn, Q_1, Q_2 at the turn's last token. With a target network (primed values) and a turn's reward r and next
state s',

    Q_i(s, a) learns r + gamma V'_i(s'),   V_i(s) learns Q'_i(s, a_pi), with a_pi freshly sampled from the policy,

each head from its own twin, with V' = 0 after the last turn. Alternatively V_i learns Q'_i of the recorded action by expectile
regression (IQL, arXiv 2110.06169): its head's loss times |tau - 1(Q' <= V)|. For any head the optimum is the tau-expectile of the
targets, which is their mean under these weights. c51 learns projected distributions.

With the Gaussian head of DSAC-T (stages/values/gaussian.py) every value has a spread, fitted to a sample of the target's own
distribution, and with `twins: min` all targets are those of the twin with the smaller mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stages.agent.logprobs import States, states_at
from stages.seeding import seed_torch
from stages.values.contract import ValueHead
from stages.values.gaussian import GaussianHead, distribution, most_pessimistic
from stages.values.gaussian import losses as gaussian_losses
from stages.values.heads import C51Head, make_head
from stages.values.settings import HeadParams, ReturnDistribution
from stages.values.step_value import StepValueModel, check_same_head

TWINS = 2


@dataclass(frozen=True)
class Turns:
    """B episodes of at most U turns, padded on the right to T tokens: the critic's input."""

    token_ids: Tensor
    """[B, T] int64."""
    before: Tensor
    """[B, U + 1] int64: the last token before each turn, and before the state after the last turn if its value is bootstrapped;
    -1 elsewhere."""
    after: Tensor
    """[B, U] int64: each turn's last token; -1 past the end."""
    rewards: Tensor
    """[B, U] float32."""

    @property
    def real(self) -> Tensor:
        """[B, U] bool: the turn exists."""
        return self.after >= 0

    @property
    def bootstraps(self) -> Tensor:
        """[B, U] bool: the turn's target includes V of the next state."""
        return self.real & (self.before[:, 1:] >= 0)

    @property
    def reads(self) -> Tensor:
        """[B, T + 1] bool: a value is read right before this position; see `States`."""
        mask = torch.zeros(self.token_ids.shape[0], self.token_ids.shape[1] + 1, dtype=torch.bool, device=self.token_ids.device)
        for places in (self.before, self.after):
            rows, columns = (places >= 0).nonzero(as_tuple=True)
            mask[rows, places[rows, columns] + 1] = True
        return mask

    def rows(self, index: Sequence[int], device: torch.device | str = "cpu") -> Turns:
        """Some episodes on `device`, without tokens after the last position that is read."""
        picked = torch.tensor(index, dtype=torch.int64)
        before, after = self.before[picked], self.after[picked]
        width = int(torch.maximum(before.max(), after.max())) + 1
        parts = (self.token_ids[picked, :width], before, after, self.rewards[picked])
        return Turns(*(part.to(device) for part in parts))


class _ValueMlp(nn.Module):
    """Hidden states [..., D] -> logits [..., outputs]: a linear layer plus an MLP with two hidden ReLU layers of width D whose
    output starts at 0, so the linear layer alone determines the initial prediction."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.output = nn.Linear(width, outputs, bias=False)
        for parameter in (self.linear.weight, self.linear.bias, self.output.weight):
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) + self.output(self.hidden(hidden))


class TurnCriticModel(nn.Module):
    """`backbone`: the critic's own Hugging Face base model; `states`: computes its hidden states; `key`: seeds the hidden layers;
    `start`: a step-value model that owns the backbone and initialises all four heads (ValueError if its head differs)."""

    def __init__(
        self,
        backbone: Any,
        params: HeadParams | ReturnDistribution,
        states: States,
        *key: object,
        start: StepValueModel | None = None,
    ) -> None:
        super().__init__()
        seed_torch(*key, "utterance_critic")
        self._states = states
        self.backbone, self.head = backbone, make_head(params, 2 * TWINS)
        width, outputs = backbone.config.hidden_size, self.head.outputs
        self.q = nn.ModuleList(_ValueMlp(width, outputs) for _ in range(TWINS))
        self.v = nn.ModuleList(_ValueMlp(width, outputs) for _ in range(TWINS))
        if start is not None:
            assert isinstance(params, HeadParams), "refused when params.yaml is checked"
            check_same_head(start, params)
            for mlp in (*self.q, *self.v):
                mlp.linear.load_state_dict(start.output.state_dict())

    def logits(self, token_ids: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Both twins' logits of Q [2, B, U, outputs] at `after` [B, U] and of V [2, B, K, outputs] at `before` [B, K]."""
        places = torch.cat([after, before], 1)
        hidden = states_at(self._states, self.backbone, token_ids, places).to(self.q[0].linear.weight.dtype)
        of_actions, of_histories = hidden[:, : after.shape[1]], hidden[:, after.shape[1] :]
        return torch.stack([mlp(of_actions) for mlp in self.q]), torch.stack([mlp(of_histories) for mlp in self.v])

    @torch.no_grad()
    def values(self, token_ids: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """[B, U, 4] float32: Q_1, Q_2, V_1, V_2 of turns at `before`, `after` [B, U]; 0 past the last turn."""
        q, v = (self.head.decode(logits) for logits in self.logits(token_ids, before, after))
        values = torch.cat([q, v]).movedim(0, -1).float()
        return torch.where((after >= 0)[..., None], values, torch.zeros_like(values))


@torch.no_grad()
def polyak_update(target: nn.Module, module: nn.Module, tau: float) -> None:
    """target <- (1 - tau) target + tau module, for every parameter that they do not share."""
    for average, parameter in zip(target.parameters(), module.parameters(), strict=True):
        if average is not parameter:
            average.lerp_(parameter, tau)


@dataclass(frozen=True)
class Target:
    """A head's targets [2, ...]: `values` and, for c51, their `distribution` [2, ..., m], for a Gaussian head a sample."""

    values: Tensor
    distribution: Tensor | None = None
    sampled: Tensor | None = None

    @classmethod
    def bootstrapped(
        cls, head: ValueHead, logits: Tensor, reward: Tensor, discount: Tensor, noise: Tensor | None = None
    ) -> Target:
        """reward + discount * value: logits [2, ..., m], reward and discount [...]; noise [...]: standard normal draws for a
        Gaussian head."""
        if isinstance(head, GaussianHead):
            assert noise is not None, "a Gaussian head samples its targets"
            mean, std = distribution(logits.float())
            sampled = mean + std * noise
            if head.settings.twins == "min":
                mean, sampled = (each.expand_as(std) for each in most_pessimistic(mean, sampled))
            return cls(reward + discount * mean, sampled=reward + discount * sampled)
        values = reward + discount * head.decode(logits)
        if not isinstance(head, C51Head):
            return cls(values)
        rewards, discounts = reward.expand(values.shape), discount.expand(values.shape)
        return cls(values, head.project(torch.softmax(logits.float(), -1), rewards, discounts))

    def loss(self, head: ValueHead, logits: Tensor, first: int = 0) -> Tensor:
        """[2, ...] of logits [2, ..., m]; first: place of the first twin's spread in a Gaussian head's `running`."""
        if self.sampled is not None:
            assert isinstance(head, GaussianHead)
            running = head.running[first : first + TWINS].view(-1, *(1 for _ in self.values.shape[1:]))
            return gaussian_losses(*distribution(logits.float()), self.values, self.sampled, running, head.settings)
        if self.distribution is None:
            return head.loss(logits, self.values)
        assert isinstance(head, C51Head)
        return head.distribution_loss(logits, self.distribution)

    def averaged(self, real: Tensor, samples: int) -> Target:
        """The mean of `samples` consecutive values of [2, N] for each True of `real` [B, U], as [2, B, U]; 0 elsewhere. A mean of
        sampled returns would have too small a spread: of these the first is taken."""

        def grid(each: Tensor, first: bool = False) -> Tensor:
            grouped = each.unflatten(1, (-1, samples))
            means = grouped[:, :, 0] if first else grouped.mean(2)
            placed = torch.zeros(TWINS, *real.shape, *means.shape[2:], device=means.device)
            placed[:, real] = means
            return placed

        return Target(
            grid(self.values),
            None if self.distribution is None else grid(self.distribution),
            None if self.sampled is None else grid(self.sampled, first=True),
        )


def expectile_weights(difference: Tensor, tau: float) -> Tensor:
    """|tau - 1(u <= 0)| of u = target - prediction [...]."""
    return torch.where(difference > 0, tau, 1.0 - tau)


@dataclass(frozen=True)
class Losses:
    """Losses of one pass, [2, B, U] each; undefined past the last turn."""

    q: Tensor
    v: Tensor
    q_error: Tensor
    """Q minus its target, without gradient."""
    outside: Tensor
    """[2, B, U] bool: Q's target is outside the head's support."""
    spread: Tensor | None
    """[4, B, U], without gradient: a Gaussian head's spreads of Q_1, Q_2, V_1, V_2."""


def losses(
    critic: TurnCriticModel,
    target: TurnCriticModel,
    turns: Turns,
    gamma: float,
    fresh: tuple[Tensor, Tensor, int] | None,
    expectile: float,
    noise: Tensor | None = None,
) -> Losses:
    """The critic's losses on `turns`.

    fresh: histories with the policy's new actions, token_ids [N, T], the last token of each [N], and the number of samples per
    turn, turn by turn; None: V learns the `expectile` of the recorded actions' Q. noise: [2, B, U], for a Gaussian head: standard
    normal draws for the targets of Q and of V.
    """
    head, real = critic.head, turns.real
    q, v = critic.logits(turns.token_ids, turns.before[:, :-1], turns.after)
    with torch.no_grad():
        recorded = turns.after if fresh is None else turns.after[:, :0]
        target_q, target_v = target.logits(turns.token_ids, turns.before, recorded)
        for_q, for_v = (None, None) if noise is None else noise
        q_target = Target.bootstrapped(head, target_v[:, :, 1:], turns.rewards, gamma * turns.bootstraps, for_q)
        zero, one = torch.zeros((), device=q.device), torch.ones((), device=q.device)
        weights = one
        if fresh is None:
            v_target = Target.bootstrapped(head, target_q, zero, one, for_v)
            weights = expectile_weights(v_target.values - head.decode(v), expectile)
        else:
            token_ids, ends, samples = fresh
            sampled_q, _ = target.logits(token_ids, ends[:, None][:, :0], ends[:, None])
            drawn = None if for_v is None else for_v[real].repeat_interleave(samples)
            v_target = Target.bootstrapped(head, sampled_q[:, :, 0], zero, one, drawn).averaged(real, samples)
        error, outside = head.decode(q.detach()) - q_target.values, head.outside(q_target.values)
        spread = torch.cat([head.spread(q), head.spread(v)]) if isinstance(head, GaussianHead) else None
    return Losses(q_target.loss(head, q), weights * v_target.loss(head, v, TWINS), error, outside, spread)
