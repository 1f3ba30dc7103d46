"""Off-policy updates from the replay buffer: the turn critic first, then the policy, each on its own draws.

The target network follows each critic update. V and the policy may learn from actions that the policy redraws at the states of
drawn episodes. Those for all critic updates of a step are drawn together, since the policy does not change meanwhile; those for
each policy batch when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stages.agent.chat import Chat
from stages.agent.continuations import ContinuationRequest, sample_turns
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import LossTerms, TrajectoryBatch
from stages.engine.engine import Engine, Sampling, Turn
from stages.records.episode import Episode, Owner, TurnRecord
from stages.seeding import key64
from stages.training.common.adapters import trained_names, twin
from stages.training.common.batches import padded, trajectory_batch, turn_boundaries, turn_ends
from stages.training.common.loop import Sums, Update
from stages.training.rl.models import Models
from stages.training.rl.policy_updates import PolicyUpdates
from stages.training.rl.replay_buffer import ReplayBuffer
from stages.values.gaussian import GaussianHead, standard_normal
from stages.values.turn_critic import TWINS, Turns, losses, polyak_update


def one_turn(episode: Episode, place: int, name: str, turn: Turn) -> Episode:
    """An episode called `name` of a single turn: the history of `episode` before its turn `place`, then `turn`."""
    start = episode.turns[place].start
    history = episode.token_ids[:start]
    labels = (episode.seed, episode.policy_hash, episode.params_hash, episode.temperature, episode.top_p, episode.top_k)
    made = Episode(name, episode.task_id, episode.domain, name, *labels, terminated=True, stop_reason="terminated")
    made.append(history, Owner.PROMPT, -1)
    made.append(turn.token_ids, Owner.POLICY, 0, turn.logprobs)
    made.turns = [TurnRecord("", "", True, 0.0, 0.0, "", "", start, len(made.token_ids))]
    return made


def as_turns(episodes: Sequence[Episode], batch: TrajectoryBatch, chat: Chat | None, max_length: int) -> Turns:
    """Episodes as the turn critic reads them; batch: of the episodes, with shaped rewards.

    chat: if given, the critic bootstraps from the state after a truncated episode, tokenized as the policy would have read it,
    unless that exceeds `max_length` tokens.
    """
    after = turn_ends(batch)
    before = torch.cat([turn_boundaries(batch), torch.full((len(episodes), 1), -1)], 1)
    rows = [list(episode.token_ids) for episode in episodes]
    for row, episode in enumerate(episodes):
        last = episode.turns[-1]
        if chat is None or not episode.truncated:
            continue
        answer = episode.token_ids[last.start : last.end]
        rows[row] = [*rows[row][: last.end], *chat.closing_tokens(answer), *chat.observation_tokens(last.observation)]
        if len(rows[row]) <= max_length:
            before[row, len(episode.turns)] = len(rows[row]) - 1
    return Turns(padded(rows, 0, torch.int64), before, after, batch.turn_rewards)


class OffPolicy:
    """The updates of turn critic and policy. `engine` draws the policy's turns, `width` at once; None if none are redrawn. `key`
    seeds all random draws."""

    def __init__(
        self,
        models: Models,
        algorithm: Algorithm,
        policy_updates: PolicyUpdates,
        buffer: ReplayBuffer,
        engine: Engine | None,
        chat: Chat,
        width: int,
        max_length: int,
        *key: object,
    ) -> None:
        assert models.turn_critic is not None
        self.models, self.algorithm, self.policy_updates, self.buffer = models, algorithm, policy_updates, buffer
        self.engine, self.chat, self.width, self.max_length, self.key = engine, chat, width, max_length, key
        self.critic = models.turn_critic
        self.target = twin(self.critic).requires_grad_(False).eval()
        self.batch: TrajectoryBatch | None = None
        """The policy's last batch."""

    def updates(self, step: int, played: TrajectoryBatch | None = None) -> Iterator[Update]:
        """The optimiser updates of loop step `step`, from 0; played: the step's own episodes, with shaped rewards."""
        rl = self.algorithm.rl
        replay, key = rl.replay, (*self.key, step)
        count = replay.critic_updates + (replay.warmup_updates if step == 0 else 0)
        draws = [self.buffer.draw(replay.episodes, *key, "critic", number) for number in range(count)]
        fresh: list[list[Episode]] = []
        if replay.value_target == "policy":
            fresh = self.redraw([episode for draw in draws for episode in draw], replay.samples, *key, "critic")
        for number, episodes in enumerate(draws):
            redrawn = fresh[number * replay.episodes : (number + 1) * replay.episodes]
            yield self._critic_update(episodes, redrawn, *key, "spread", number)
            polyak_update(self.target, self.critic, replay.tau)
        if step < rl.critic.warmup_steps:
            return
        for number in range(replay.policy_updates):
            on_policy = number == 0 or replay.actions != "played"
            if on_policy:
                batch = played if replay.actions == "played" else self._policy_batch(*key, "policy", number)
                assert batch is not None, "rl.replay.actions: played needs played episodes"
                prepared = self.algorithm.prepare(self.models.annotate(batch, self.algorithm))
                self.batch = self.policy_updates.rescored(prepared, step, (*key, number))
            assert self.batch is not None
            yield from self.policy_updates.updates(self.batch, step, (*key, number), on_policy)

    def redraw(self, episodes: Sequence[Episode], samples: int, *key: object) -> list[list[Episode]]:
        """For each episode, turn by turn, `samples` turns that the current policy draws after the same history (see `one_turn`).
        The processes share the work."""
        assert self.engine is not None
        self.models.refresh_player()
        places = [[place for place in range(len(episode.turns)) for _ in range(samples)] for episode in episodes]
        requests = [
            ContinuationRequest(
                episode.token_ids,
                [episode.turns[place].start for place in of_episode],
                [key64(*key, "fresh", number, which) for which in range(len(of_episode))],
            )
            for number, (episode, of_episode) in enumerate(zip(episodes, places, strict=True))
        ]
        processes, sampling = self.models.processes, Sampling(**self.algorithm.rl.sampling.model_dump())
        mine = range(processes.index, len(requests), processes.count)
        own = sample_turns(self.engine, [requests[number] for number in mine], sampling, self.width)
        turns = dict(processes.gather(list(zip(mine, own, strict=True))))
        return [
            [
                one_turn(episode, place, f"{episode.episode_id}/{number}/{which}", turn)
                for which, (place, turn) in enumerate(zip(of_episode, turns[number], strict=True))
            ]
            for number, (episode, of_episode) in enumerate(zip(episodes, places, strict=True))
        ]

    def _batch(self, episodes: Sequence[Episode]) -> TrajectoryBatch:
        return trajectory_batch(episodes, self.algorithm.rl.loss.trains_evidence)

    def _policy_batch(self, *key: object) -> TrajectoryBatch:
        """What the policy learns from: drawn episodes, or its current actions at their states."""
        rl = self.algorithm.rl
        episodes = self.buffer.draw(rl.replay.episodes, *key)
        if rl.replay.actions == "fresh":
            return self._batch([made for each in self.redraw(episodes, 1, *key) for made in each])
        batch = self.algorithm.shape(self._batch(episodes)).with_(external=None, group=torch.arange(len(episodes)))
        rows = list(range(batch.size))
        return batch.with_(logprobs_old=self.models.logprobs(self.models.policy, batch, rows, rl.sampling.temperature))

    def _critic_update(self, episodes: Sequence[Episode], fresh: Sequence[Sequence[Episode]], *key: object) -> Update:
        rl, device = self.algorithm.rl, self.models.policy.device
        chat = self.chat if rl.replay.bootstrap_truncated else None
        turns = as_turns(episodes, self.algorithm.shape(self._batch(episodes)), chat, self.max_length)
        total, gamma = float(turns.real.sum()), rl.advantage.gamma
        head = self.critic.head
        noise = standard_normal((2, *turns.real.shape), *key) if isinstance(head, GaussianHead) else None

        def loss(rows: list[int]) -> Iterator[LossTerms]:
            part, drawn = turns.rows(rows, device), None
            if fresh:
                tokens = [made.token_ids for row in rows for made in fresh[row]]
                ends = torch.tensor([len(row) - 1 for row in tokens], device=device)
                drawn = padded(tokens, 0, torch.int64).to(device), ends, rl.replay.samples
            noise_part = None if noise is None else noise[:, rows, : part.real.shape[1]].to(device)
            found = losses(self.critic, self.target, part, gamma, drawn, rl.replay.expectile, noise_part)
            share = ((found.q + found.v).sum(0) * part.real).sum() / total
            sums = {"loss": share.detach(), "turns": part.real.sum()}
            sums["td_error"] = (found.q_error.square().mean(0) * part.real).sum()
            sums["outside"] = (found.outside.float().mean(0) * part.real).sum()
            if found.spread is not None:
                sums |= {f"spread_{place}": (each * part.real).sum() for place, each in enumerate(found.spread)}
            yield LossTerms(share, sums)

        def follow(sums: Sums) -> None:
            assert isinstance(head, GaussianHead)
            head.follow(torch.tensor([sums[f"spread_{place}"] for place in range(2 * TWINS)]) / total)

        padded_ids = torch.nn.functional.pad(turns.token_ids, (0, 1))
        plan = self.models.plan_reads(padded_ids, turns.reads, list(range(len(episodes))))
        return Update("turn_critic", plan, loss, on_sums=follow if noise is not None else None)

    def state_dict(self) -> dict[str, Any]:
        """The target network's trained weights, and the played episodes."""
        current = self.target.state_dict()
        return {
            "replay_buffer": self.buffer.state_dict(),
            "target": {name: current[name] for name in sorted(trained_names(self.critic))},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer.load_state_dict(state["replay_buffer"])
        self.target.load_state_dict(state["target"], strict=False)
