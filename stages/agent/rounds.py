"""Groups played in rounds: all episodes take one turn, then a `Plan` chooses where new ones branch off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stages.agent.active_episode import ActiveEpisode, BranchPoint, EpisodeRequest
from stages.agent.branching import Fork, Path, Plan


@dataclass
class Group:
    """A group that may still branch."""

    name: str
    plan: Plan
    reserve: list[EpisodeRequest]
    """Requests not started yet, the next one last."""
    awaited: int
    """Episodes that have not taken their turn in this round."""
    key: tuple[object, ...]
    """Keys the group's random draws."""
    members: list[ActiveEpisode] = field(default_factory=list)
    """Started episodes, by row."""
    moved: set[int] = field(default_factory=set)
    """Rows that took a turn in this round."""
    parked: int = 0
    """Episodes that took their turn and wait for the others."""
    leaving: list[ActiveEpisode] = field(default_factory=list)
    """Members that ended in this round; their sessions stay open until the plan has decided."""

    def join(self, play: ActiveEpisode) -> None:
        play.row = len(self.members)
        self.members.append(play)

    def record(self, play: ActiveEpisode, point: BranchPoint) -> None:
        """Record that `play` took a turn, after which it may be branched at `point`."""
        self.moved.add(play.row)
        play.branch_points.append(point)

    def arrive(self, play: ActiveEpisode) -> bool:
        """Record that `play` took its turn or ended; return whether that completes the round."""
        self.awaited -= 1
        if not play.over:
            self.parked += 1
        elif play.session >= 0:
            self.leaving.append(play)
        return not self.awaited

    def living(self) -> list[ActiveEpisode]:
        return [play for play in self.members if not play.over]

    def forks(self) -> list[Fork]:
        """The plan's branches after a round. Raises ValueError for an impossible fork."""
        paths = [
            Path(row, play.episode.inherited, tuple(play.entropies), row in self.moved, not play.over)
            for row, play in enumerate(self.members)
        ]
        forks = self.plan.grow(paths, len(self.reserve), *self.key)
        for fork in forks:
            points = self.members[fork.row].branch_points if fork.row in self.moved else []
            if not 0 < fork.turns <= len(points) or points[fork.turns - 1].snapshot is None:
                raise ValueError(
                    f"the plan forks row {fork.row} after {fork.turns} turns; it must be a row that moved in this round, after a "
                    "turn that did not end it"
                )
        if len(forks) > len(self.reserve):
            raise ValueError(f"the plan makes {len(forks)} forks, but the group has only {len(self.reserve)} free episodes")
        return forks


class Rounds:
    """The groups of a collection that are played in rounds (none without a plan).

    `requests`: all requests, the first to start last; `key` keys the random draws. Raises ValueError for a group with several
    tasks.
    """

    def __init__(self, plan: Plan | None, requests: Sequence[EpisodeRequest], *key: object) -> None:
        self.groups: dict[str, Group] = {}
        by_group: dict[str, list[EpisodeRequest]] = {}
        for request in requests if plan else ():
            by_group.setdefault(request.group_id, []).append(request)
        for name, members in by_group.items():
            if len({request.task.task_id for request in members}) > 1:
                raise ValueError(f"group {name} has more than one task, so its episodes can't branch off each other")
            assert plan is not None
            first, starting = members[-1], max(plan.initial(len(members)), 1)
            if starting < len(members):
                draws = (*key, "branch", first.task.task_id, first.attempt)
                self.groups[name] = Group(name, plan, members[:-starting], starting, draws)

    @property
    def reserve(self) -> list[EpisodeRequest]:
        """Requests that wait to become branches."""
        return [request for group in self.groups.values() for request in group.reserve]

    @property
    def parked(self) -> int:
        """Episodes that wait for others of their group."""
        return sum(group.parked for group in self.groups.values())

    def group(self, request: EpisodeRequest) -> Group | None:
        """The request's group, or None if it is not, or no longer, played in rounds."""
        return self.groups.get(request.group_id)

    def next_round(self, group: Group, playing: int) -> list[EpisodeRequest]:
        """Begin a group's next round with `playing` members. If there are none, return the remaining requests, which start from
        the task, the next one last.

        A group without remaining requests is dropped: its episodes continue without rounds.
        """
        group.awaited, group.parked, group.leaving, group.moved = playing, 0, [], set()
        starting = []
        if not playing:
            starting, group.reserve = group.reserve, []
        if not group.reserve:
            del self.groups[group.name]
            for play in group.members:
                play.branch_points, play.entropies = [], []
        return starting
