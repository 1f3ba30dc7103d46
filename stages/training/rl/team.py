"""The agents of a team in rl (`rl.team`): their weights on a shared base, their play, and who is trained on which rows.

Members with weights of their own are twins of the start policy: under LoRA they share its frozen weights and the engine, so that
each costs an adapter and its moments. The critic and the reference are the team's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.agent.active_episode import EpisodeRequest
from stages.agent.branching import Plan
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.policy import save_policy
from stages.agent.prompts import load_prompt
from stages.agent.rollout import Labels
from stages.agent.team import AGENTS, write_team
from stages.agent.team_play import collect_team
from stages.agent.wrapped_engine import WrappedEngine
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.team_gae import TeamMoves, team_moves
from stages.engine.adapter_view import share_base
from stages.engine.adapters import CONFIG
from stages.engine.engine import Engine, Sampling
from stages.engine.local_engine import make_engine
from stages.engine.torch_engine import TorchEngine
from stages.records.episode import Episode
from stages.training.common.adapters import adapted, save_adapters, twin
from stages.training.common.loop import Learner, Sums
from stages.training.rl.models import Models, make_learners
from stages.training.rl.playing import Player
from stages.training.rl.policy_updates import Agent, policy_row

POLICY = "policy"
"""The learner of the acting member, or of all where they share weights; of another member: with its role after an @."""


class Team:
    """The team of a run; `models`: those of the acting member, which speaks last."""

    def __init__(self, models: Models, algorithm: Algorithm) -> None:
        self.rl, self.params = algorithm.rl, algorithm.rl.team
        self.roles = [member.role for member in self.params.members]
        self.acting = self.roles[-1]
        self.models = {self.acting: models}
        for role in self.roles[:-1]:
            own = self.params.weights == "own"
            policy = twin(models.policy) if own else models.policy
            self.models[role] = replace(models, policy=policy, player=policy) if own else models
        self.others: dict[str, list[Episode]] = {}
        """Of the step: the episodes of the members that do not act, by the play that they belong to."""

    def learner(self, role: str) -> str:
        return POLICY if role == self.acting or self.params.weights == "shared" else f"{POLICY}@{role}"

    def learners(self) -> dict[str, Learner]:
        """Those of the members with weights of their own, but for the acting one."""
        own = [role for role in self.roles[:-1] if self.learner(role) != POLICY]
        return {self.learner(role): make_learners(replace(self.models[role], critic=None), self.rl)[POLICY] for role in own}

    # ---- playing ------------------------------------------------------------------------------------------------------------

    def engines(self, engine: Engine, chat: Chat, width: int, max_length: int) -> dict[str, Engine]:
        """Each member's; `engine`: the acting member's. It plays all members with the same weights and, if it is a torch engine,
        those with adapters of their own on a shared base. Constraints are about actions, so that they bind the acting one."""
        plain = engine.engine if isinstance(engine, WrappedEngine) else engine
        made: dict[str, Engine] = {}
        for role in self.roles[:-1]:
            model = self.models[role].player
            if self.learner(role) == POLICY:
                made[role] = plain
            elif isinstance(plain, TorchEngine) and share_base(plain.model, model):
                made[role] = plain.beside(model)
            else:
                made[role] = make_engine(model, [chat.end_of_turn], width, max_length)
        return {**made, self.acting: engine}

    def player(
        self, models: Models, engine: Engine, chat: Chat, pool: EnvironmentPool, labels: Labels, width: int, max_length: int
    ) -> TeamPlayer:
        """Plays the team; the arguments of `Player`."""
        engines = self.engines(engine, chat, width, max_length)
        return TeamPlayer(models, engine, chat, pool, labels, width, max_length, self, engines)

    def rows(self, played: Sequence[Episode]) -> list[Episode]:
        """The other members' episodes of these plays, in order; those of other plays are forgotten."""
        self.others = {one.play: self.others[one.play] for one in played if one.play in self.others}
        return [episode for episodes in self.others.values() for episode in episodes]

    def with_moves(self, batch: TrajectoryBatch, episodes: Sequence[Episode]) -> TrajectoryBatch:
        """The batch of these episodes with its TeamMoves."""
        return batch.with_extra(team_moves(episodes, self.roles, batch.turn_rewards.shape[1]))

    # ---- training -----------------------------------------------------------------------------------------------------------

    def frozen_rows(self, batch: TrajectoryBatch, step: int) -> set[int]:
        """Rows of the members that are not trained in step `step`."""
        learns = self.params.learns(step, self.rl.advantage.level)
        return {row for row, member in enumerate(_members(batch)) if self.roles[member] not in learns}

    def agents(self, batch: TrajectoryBatch, rows: Sequence[int]) -> Iterator[Agent]:
        """Weights with their rows among `rows`, in the order of the members."""
        members = _members(batch)
        by_learner: dict[str, tuple[Models, list[int]]] = {self.learner(role): (self.models[role], []) for role in self.roles}
        for row in rows:
            by_learner[self.learner(self.roles[members[row]])][1].append(row)
        yield from (Agent(learner, models, own) for learner, (models, own) in by_learner.items() if own)

    def rows_of(self, batch: TrajectoryBatch, agent: Agent, rows: Sequence[int]) -> list[int]:
        """Those of `rows` that belong to the agent, also if it is not trained on them."""
        members = _members(batch)
        return [row for row in rows if self.learner(self.roles[members[row]]) == agent.learner]

    def row(self, played: Sequence[Episode], batch: TrajectoryBatch | None, sums: Mapping[str, Sums]) -> dict[str, float]:
        """Columns of the history, `<role>/` and: texts and tokens per play, mean advantage of its texts, for members that do not
        act the share of texts that the next action repeats (`followed`), and what a run without a team has of its policy."""
        assert batch is not None
        assert batch.advantages is not None
        row: dict[str, float] = {}
        episodes, advantages = [*played, *self.rows(played)], batch.advantages
        # All trained tokens of a text have its advantage at the level of turns; a decoder may have forced the first ones.
        trained = [
            [turn.start + int(places[0]) for turn in one.turns if len(places := mask[turn.start : turn.end].nonzero())]
            for one, mask in zip(episodes, batch.mask, strict=True)
        ]
        firsts = [[float(values[place]) for place in places] for places, values in zip(trained, advantages, strict=True)]
        for role in self.roles:
            own = [index for index, episode in enumerate(episodes) if episode.role == role]
            credited = [value for index in own for value in firsts[index]]
            found = {
                "turns": sum(len(episodes[index].turns) for index in own) / len(played),
                "policy_tokens": sum(episodes[index].policy_tokens for index in own) / len(played),
                "advantage": sum(credited) / max(len(credited), 1),
            }
            if role != self.acting and credited:
                said = [repeats for index in own for repeats in self._followed(episodes[index], played)]
                found["followed"] = sum(said) / len(said)
            learner = self.learner(role)
            if learner in sums and (learner != POLICY or role == self.acting):
                found |= policy_row({POLICY: sums[learner]})
            row |= {f"{role}/{name}": value for name, value in found.items()}
        return row

    @staticmethod
    def _followed(episode: Episode, played: Sequence[Episode]) -> list[bool]:
        """Whether the action after each text of a member that does not act is the same."""
        acting = next(one for one in played if one.play == episode.play)
        after = [next((k for k, place in enumerate(acting.moves) if place > move), None) for move in episode.moves]
        return [
            place is not None and acting.turns[place].action_key == turn.action_key
            for place, turn in zip(after, episode.turns, strict=True)
        ]

    def report(self) -> dict[str, Any]:
        """For the stage's report: the roles in their order, and the hashes of the files of prompts."""
        names = sorted({member.prompt for member in self.params.members} - {""})
        return {"team": {"roles": self.roles, "prompts": {name: load_prompt(name).sha256 for name in names}}}

    def save(self, folder: Path, domain: str, tokenizer: Any) -> None:
        """Write what playing the team needs to the folder of the acting member's weights, whose adapter has the same base."""
        own = self.params.weights == "own"
        for role in self.roles[:-1] if own else ():
            model, place = self.models[role].policy, folder / AGENTS / role
            if adapted(model):
                base = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
                save_adapters(model, tokenizer, place, base=base)
            else:
                save_policy(model, tokenizer, place)
        write_team(folder, domain, own, self.params.members)


def _members(batch: TrajectoryBatch) -> list[int]:
    moves = batch.get(TeamMoves)
    assert moves is not None, "batches of a team have TeamMoves"
    return moves.member.tolist()


@dataclass(frozen=True)
class TeamPlayer(Player):
    """Plays a team; the acting member's episodes are those of the requests, the others' are in `Team.others`."""

    team: Team
    engines: Mapping[str, Engine]

    def play(
        self,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        max_turns: int | None = None,
        plan: Plan | None = None,
    ) -> list[Episode]:
        """See `Player.play`; the episodes of the acting member."""
        team, played = self.team, list[Episode]()
        for episode in super().play(requests, sampling, max_turns, plan):
            if episode.role == team.acting:
                played.append(episode)
            else:
                team.others.setdefault(episode.play, []).append(episode)
        return played

    def _collect(
        self, requests: Sequence[EpisodeRequest], sampling: Sampling, max_turns: int | None, plan: Plan | None
    ) -> list[Episode]:
        """Those of all members. A team's groups do not branch (rl.branching is refused)."""
        limits: dict[str, Any] = {"max_length": self.max_length, "max_turns": max_turns, "width": self.width}
        members = self.team.params.members
        return collect_team(self.engines, self.chat, self.pool, requests, members, sampling, self.labels, **limits)
