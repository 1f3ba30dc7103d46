"""Learning from replayed episodes: the critic of utterances first, then the policy, each on draws of its own.

After each update of the critic its target network follows. What V learns from, and the policy, may be actions that the policy
draws anew after the histories of drawn episodes: those of a step's critic updates are drawn together, since the policy does not
change meanwhile, those of each batch of the policy when its turn comes.
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
from stages.training.adapters import trained_names, twin
from stages.training.batches import padded, trajectory_batch
from stages.training.loop import Update
from stages.training.rl.models import Models
from stages.training.rl.policy_updates import PolicyUpdates
from stages.training.rl.replay import Replay, as_turns
from stages.values.turn_critic import losses, polyak_update


def one_turn(episode: Episode, place: int, name: str, turn: Turn) -> Episode:
    """An episode called `name` that ends after one turn: the history of `episode` before its turn `place`, and what was drawn
    after it."""
    start = episode.turns[place].start
    history = episode.token_ids[:start]
    labels = (episode.seed, episode.policy_hash, episode.params_hash, episode.temperature, episode.top_p, episode.top_k)
    made = Episode(name, episode.task_id, episode.domain, name, *labels, terminated=True, stop_reason="terminated")
    made.append(history, Owner.PROMPT, -1)
    made.append(turn.token_ids, Owner.POLICY, 0, turn.logprobs)
    made.turns = [TurnRecord("", "", True, 0.0, 0.0, "", "", start, len(made.token_ids))]
    return made


class OffPolicy:
    """`maker` makes the policy's updates. `engine` draws the policy's turns, `width` of them at once; None where none are to be
    drawn. `key`: of all random draws."""

    def __init__(
        self,
        models: Models,
        algorithm: Algorithm,
        maker: PolicyUpdates,
        replay: Replay,
        engine: Engine | None,
        chat: Chat,
        width: int,
        max_length: int,
        *key: object,
    ) -> None:
        assert models.utterances is not None
        self.models, self.algorithm, self.maker, self.replay = models, algorithm, maker, replay
        self.engine, self.chat, self.width, self.max_length, self.key = engine, chat, width, max_length, key
        self.critic = models.utterances
        self.target = twin(self.critic).requires_grad_(False).eval()
        self.batch: TrajectoryBatch | None = None
        """The last that the policy learnt from."""

    def updates(self, step: int, played: TrajectoryBatch | None = None) -> Iterator[Update]:
        """The optimiser updates of loop step `step`, from 0; played: the step's own episodes, with shaped rewards."""
        rl = self.algorithm.rl
        replay, key = rl.replay, (*self.key, step)
        count, tau = replay.episodes, replay.tau
        draws = [self.replay.draw(count, *key, "critic", number) for number in range(replay.critic_updates)]
        fresh: list[list[Episode]] = []
        if replay.value_target == "policy":
            fresh = self.drawn([episode for draw in draws for episode in draw], replay.samples, *key, "critic")
        for number, episodes in enumerate(draws):
            yield self._critic_update(episodes, fresh[number * count : (number + 1) * count])
            polyak_update(self.target, self.critic, tau)
        if step < rl.critic.warmup_steps:
            return
        for number in range(replay.policy_updates):
            on_policy = number == 0 or replay.actions != "played"
            if on_policy:
                batch = played if replay.actions == "played" else self._policy_batch(*key, "policy", number)
                assert batch is not None, "actions: played needs episodes that were played"
                prepared = self.algorithm.prepare(self.models.annotate(batch, self.algorithm))
                self.batch = self.maker.rescored(prepared, step, (*key, number))
            assert self.batch is not None
            yield from self.maker.updates(self.batch, step, (*key, number), on_policy)

    def drawn(self, episodes: Sequence[Episode], samples: int, *key: object) -> list[list[Episode]]:
        """For each episode, turn by turn, `samples` turns that the policy as it is draws after the same history (see `one_turn`).
        The processes share the work."""
        assert self.engine is not None
        self.models.refresh_player()
        wanted = [[place for place in range(len(episode.turns)) for _ in range(samples)] for episode in episodes]
        asked = [
            ContinuationRequest(
                episode.token_ids,
                [episode.turns[place].start for place in places],
                [key64(*key, "fresh", number, which) for which in range(len(places))],
            )
            for number, (episode, places) in enumerate(zip(episodes, wanted, strict=True))
        ]
        processes, sampling = self.models.processes, Sampling(**self.algorithm.rl.sampling.model_dump())
        mine = range(processes.index, len(asked), processes.count)
        own = sample_turns(self.engine, [asked[number] for number in mine], sampling, self.width)
        found = dict(processes.gather(list(zip(mine, own, strict=True))))
        return [
            [
                one_turn(episode, place, f"{episode.episode_id}/{number}/{which}", turn)
                for which, (place, turn) in enumerate(zip(places, found[number], strict=True))
            ]
            for number, (episode, places) in enumerate(zip(episodes, wanted, strict=True))
        ]

    def _policy_batch(self, *key: object) -> TrajectoryBatch:
        """What the policy learns from: drawn episodes, or what it does now where it stood in them."""
        rl = self.algorithm.rl
        episodes = self.replay.draw(rl.replay.episodes, *key)
        if rl.replay.actions == "fresh":
            return trajectory_batch([made for each in self.drawn(episodes, 1, *key) for made in each])
        batch = self.algorithm.shape(trajectory_batch(episodes)).with_(external=None, group=torch.arange(len(episodes)))
        rows = list(range(batch.size))
        return batch.with_(logprobs_old=self.models.logprobs(self.models.policy, batch, rows, rl.sampling.temperature))

    def _critic_update(self, episodes: Sequence[Episode], fresh: Sequence[Sequence[Episode]]) -> Update:
        rl, device = self.algorithm.rl, self.models.policy.device
        chat = self.chat if rl.replay.bootstrap_truncated else None
        turns = as_turns(episodes, self.algorithm.shape, chat, self.max_length)
        total, gamma = float(turns.real.sum()), 1.0 if rl.advantage.gamma is None else rl.advantage.gamma

        def loss(rows: list[int]) -> Iterator[LossTerms]:
            part, drawn = turns.rows(rows, device), None
            if fresh:
                tokens = [made.token_ids for row in rows for made in fresh[row]]
                ends = torch.tensor([len(row) - 1 for row in tokens], device=device)
                drawn = padded(tokens, 0, torch.int64).to(device), ends, rl.replay.samples
            found = losses(self.critic, self.target, part, gamma, drawn, rl.replay.expectile)
            share = ((found.q + found.v).sum(0) * part.real).sum() / total
            sums = {"loss": share.detach(), "turns": part.real.sum()}
            sums["td_error"] = (found.q_error.square().mean(0) * part.real).sum()
            sums["outside"] = (found.outside.float().mean(0) * part.real).sum()
            yield LossTerms(share, sums)

        padded_ids = torch.nn.functional.pad(turns.token_ids, (0, 1))
        return Update("utterances", self.models.plan_reads(padded_ids, turns.reads, list(range(len(episodes)))), loss)

    def state_dict(self) -> dict[str, Any]:
        """The target's own weights, and what was played."""
        present = self.target.state_dict()
        return {
            "replay": self.replay.state_dict(),
            "target": {name: present[name] for name in sorted(trained_names(self.critic))},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replay.load_state_dict(state["replay"])
        self.target.load_state_dict(state["target"], strict=False)
