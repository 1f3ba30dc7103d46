"""The critic of utterances (ArCHer, Zhou et al., arXiv 2402.19446): twin values of a history and of an action after it.

A backbone with four scalar heads of `stages.values.heads`. One causal pass over an episode reads all its turns: V_1, V_2 at the
last token before a turn, Q_1, Q_2 at the turn's last token. With a target network, whose values are primed, and r, s' what a turn
brought,

    Q_i(s, a) learns r + gamma V'_i(s'),   V_i(s) learns Q'_i(s, a_pi), a_pi drawn by the policy anew,

each head from its own twin; nothing follows the last turn. In place of the latter V_i can learn Q'_i of the recorded action by
expectile regression (IQL, arXiv 2110.06169): the loss of its head times |tau - 1(Q' <= V)|, which for any head has the
tau-expectile of the targets as its optimum, since that is their mean under these weights. c51 learns projected distributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.agent.logprobs import States
from stages.seeding import seed_torch
from stages.values.contract import ValueHead
from stages.values.heads import C51Head, make_head
from stages.values.settings import HeadParams
from stages.values.step_value import StepValueModel, check_same_head

TWINS = 2


@dataclass(frozen=True)
class Turns:
    """B episodes of at most U turns, padded on the right to T tokens, as the critic reads them."""

    token_ids: Tensor
    """[B, T] int64."""
    before: Tensor
    """[B, U + 1] int64: the last token before each turn; after the last turn the end of what followed it, where values go on
    there; -1 elsewhere."""
    after: Tensor
    """[B, U] int64: each turn's last token; -1 past the end."""
    rewards: Tensor
    """[B, U] float32."""

    @property
    def real(self) -> Tensor:
        """[B, U] bool: there is such a turn."""
        return self.after >= 0

    @property
    def goes_on(self) -> Tensor:
        """[B, U] bool: V of the state after the turn belongs to the turn's target."""
        return self.real & (self.before[:, 1:] >= 0)

    @property
    def reads(self) -> Tensor:
        """[B, T + 1] bool: a value is read just before this place; see `States`."""
        mask = torch.zeros(self.token_ids.shape[0], self.token_ids.shape[1] + 1, dtype=torch.bool, device=self.token_ids.device)
        for places in (self.before, self.after):
            rows, columns = (places >= 0).nonzero(as_tuple=True)
            mask[rows, places[rows, columns] + 1] = True
        return mask

    def rows(self, index: Sequence[int], device: torch.device | str = "cpu") -> Turns:
        """Some episodes, cut to what is read of them, on `device`."""
        picked = torch.tensor(index, dtype=torch.int64)
        before, after = self.before[picked], self.after[picked]
        width = int(torch.maximum(before.max(), after.max())) + 1
        parts = (self.token_ids[picked, :width], before, after, self.rewards[picked])
        return Turns(*(part.to(device) for part in parts))


class _Reader(nn.Module):
    """Hidden states [..., D] -> logits [..., outputs]: a linear layer, and beside it two hidden ReLU layers of width D whose
    output starts at 0. So the linear layer alone says what is predicted before the first update."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, outputs)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.output = nn.Linear(width, outputs, bias=False)
        for parameter in (self.linear.weight, self.linear.bias, self.output.weight):
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) + self.output(self.hidden(hidden))


class UtteranceCritic(nn.Module):
    """`backbone`: a Hugging Face base model of the critic's own; `states`: how its hidden states are computed; `key`: of the
    random hidden layers; `start`: a step-value model whose backbone it is and whose head all four heads start from.

    Raises ValueError if the head of `start` is another one.
    """

    def __init__(
        self, backbone: Any, params: HeadParams, states: States, *key: object, start: StepValueModel | None = None
    ) -> None:
        super().__init__()
        seed_torch(*key, "utterance_critic")
        self._states = states
        self.backbone, self.head = backbone, make_head(params)
        width, outputs = backbone.config.hidden_size, self.head.outputs
        self.q = nn.ModuleList(_Reader(width, outputs) for _ in range(TWINS))
        self.v = nn.ModuleList(_Reader(width, outputs) for _ in range(TWINS))
        if start is not None:
            check_same_head(start, params)
            for reader in (*self.q, *self.v):
                reader.linear.load_state_dict(start.output.state_dict())

    def _read(self, token_ids: Tensor, places: Tensor) -> Tensor:
        """Hidden states [B, K, D] after the tokens at `places` [B, K] of token_ids [B, T]; 0 where a place is -1."""
        ids, real = functional.pad(token_ids, (0, 1)), places >= 0
        rows, columns = real.nonzero(as_tuple=True)
        following = places[rows, columns] + 1
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        mask[rows, following] = True
        states = self._states(self.backbone, ids, mask)
        number = mask.flatten().cumsum(0).view(mask.shape) - 1
        read = torch.zeros(*places.shape, states.shape[-1], dtype=states.dtype, device=states.device)
        return read.index_put((rows, columns), states[number[rows, following]])

    def logits(self, token_ids: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of Q [2, B, U, outputs] at `after` [B, U] and of V [2, B, K, outputs] at `before` [B, K], each twin's."""
        hidden = self._read(token_ids, torch.cat([after, before], 1)).to(self.q[0].linear.weight.dtype)
        acted, waiting = hidden[:, : after.shape[1]], hidden[:, after.shape[1] :]
        return torch.stack([read(acted) for read in self.q]), torch.stack([read(waiting) for read in self.v])

    @torch.no_grad()
    def values(self, token_ids: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """[B, U, 4] float32: Q_1, Q_2, V_1, V_2 of turns at `before`, `after` [B, U]; 0 where there is no turn."""
        q, v = (self.head.decode(logits) for logits in self.logits(token_ids, before, after))
        found = torch.cat([q, v]).movedim(0, -1).float()
        return torch.where((after >= 0)[..., None], found, torch.zeros_like(found))


@torch.no_grad()
def follow(target: nn.Module, module: nn.Module, tau: float) -> None:
    """Polyak averaging: target <- (1 - tau) target + tau module, for every parameter that they do not share."""
    for mine, theirs in zip(target.parameters(), module.parameters(), strict=True):
        if mine is not theirs:
            mine.lerp_(theirs, tau)


@dataclass(frozen=True)
class Target:
    """What a head is to learn: `values` [...] and, for c51, their `distribution` [..., m]."""

    values: Tensor
    distribution: Tensor | None

    @classmethod
    def bootstrapped(cls, head: ValueHead, logits: Tensor, reward: Tensor, discount: Tensor) -> Target:
        """reward + discount * value: logits [..., m], reward and discount [...]."""
        values = reward + discount * head.decode(logits)
        if not isinstance(head, C51Head):
            return cls(values, None)
        return cls(
            values, head.project(torch.softmax(logits.float(), -1), reward.expand(values.shape), discount.expand(values.shape))
        )

    def loss(self, head: ValueHead, logits: Tensor) -> Tensor:
        """[...] of logits [..., m]."""
        if self.distribution is None:
            return head.loss(logits, self.values)
        assert isinstance(head, C51Head)
        return head.distribution_loss(logits, self.distribution)

    def averaged(self, real: Tensor, samples: int) -> Target:
        """`samples` values in a row for each True of `real` [B, U], [2, N]: their means as [2, B, U], 0 elsewhere."""

        def grid(each: Tensor) -> Tensor:
            means = each.unflatten(1, (-1, samples)).mean(2)
            placed = torch.zeros(TWINS, *real.shape, *means.shape[2:], device=means.device)
            placed[:, real] = means
            return placed

        return Target(grid(self.values), None if self.distribution is None else grid(self.distribution))


def expectile_weights(difference: Tensor, tau: float) -> Tensor:
    """|tau - 1(u <= 0)| of u = target - prediction [...]."""
    return torch.where(difference > 0, tau, 1.0 - tau)


@dataclass(frozen=True)
class Losses:
    """Of one pass, [2, B, U] each, whatever stands where there is no turn."""

    q: Tensor
    v: Tensor
    q_error: Tensor
    """Q minus its target, without gradient."""
    outside: Tensor
    """[2, B, U] bool: Q's target lies outside the head's support."""


def losses(
    critic: UtteranceCritic,
    target: UtteranceCritic,
    turns: Turns,
    gamma: float,
    fresh: tuple[Tensor, Tensor, int] | None,
    expectile: float,
) -> Losses:
    """What critic learns from `turns`.

    fresh: histories with the policy's new actions, token_ids [N, T], the last token of each [N], and how many there are in a row
    for each turn, turn by turn; None: V learns the `expectile` of the recorded actions' Q.
    """
    head, real = critic.head, turns.real
    q, v = critic.logits(turns.token_ids, turns.before[:, :-1], turns.after)
    with torch.no_grad():
        behind = turns.after if fresh is None else turns.after[:, :0]
        next_q, next_v = target.logits(turns.token_ids, turns.before, behind)
        wanted = Target.bootstrapped(head, next_v[:, :, 1:], turns.rewards, gamma * turns.goes_on)
        zero, one = torch.zeros((), device=q.device), torch.ones((), device=q.device)
        weights = one
        if fresh is None:
            valued = Target.bootstrapped(head, next_q, zero, one)
            weights = expectile_weights(valued.values - head.decode(v), expectile)
        else:
            token_ids, ends, samples = fresh
            drawn, _ = target.logits(token_ids, ends[:, None][:, :0], ends[:, None])
            valued = Target.bootstrapped(head, drawn[:, :, 0], zero, one).averaged(real, samples)
        error, outside = head.decode(q.detach()) - wanted.values, head.outside(wanted.values)
    return Losses(wanted.loss(head, q), weights * valued.loss(head, v), error, outside)
