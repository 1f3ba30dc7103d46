"""Groups that go in rounds: all their episodes take one turn, then a `Plan` says where new ones branch off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stages.agent.active_episode import ActiveEpisode, BranchPoint, EpisodeRequest
from stages.agent.branching import Fork, Path, Plan


@dataclass
class Group:
    """A group under way that has places left for branches."""

    name: str
    plan: Plan
    reserve: list[EpisodeRequest]
    """The requests not started yet, the next one last."""
    awaited: int
    """Episodes of the round that have not taken their turn."""
    key: tuple[object, ...]
    """Names its random draws."""
    members: list[ActiveEpisode] = field(default_factory=list)
    """Its episodes under way or over, by row."""
    moved: set[int] = field(default_factory=set)
    """Rows that took a turn in this round."""
    parked: int = 0
    """Episodes that have, and wait for the others."""
    leaving: list[ActiveEpisode] = field(default_factory=list)
    """Members that ended in this round; their sessions stay open until the plan has decided."""

    def join(self, play: ActiveEpisode) -> None:
        play.row = len(self.members)
        self.members.append(play)

    def record(self, play: ActiveEpisode, mark: BranchPoint) -> None:
        """`play` took a turn, and stands at `mark`."""
        self.moved.add(play.row)
        play.marks.append(mark)

    def arrive(self, play: ActiveEpisode) -> bool:
        """`play` has taken its turn of the round, or has ended; whether the round is over with that."""
        self.awaited -= 1
        if not play.over:
            self.parked += 1
        elif play.session >= 0:
            self.leaving.append(play)
        return not self.awaited

    def living(self) -> list[ActiveEpisode]:
        return [play for play in self.members if not play.over]

    def forks(self) -> list[Fork]:
        """What the plan wants after a round. Raises ValueError for a fork that cannot be made."""
        paths = [
            Path(row, play.episode.inherited, tuple(play.entropies), row in self.moved, not play.over)
            for row, play in enumerate(self.members)
        ]
        forks = self.plan.grow(paths, len(self.reserve), *self.key)
        for fork in forks:
            marks = self.members[fork.row].marks if fork.row in self.moved else []
            if not 0 < fork.turns <= len(marks) or marks[fork.turns - 1].snapshot is None:
                raise ValueError(
                    f"the plan forks row {fork.row} after {fork.turns} turns, where no episode of this round went on"
                )
        if len(forks) > len(self.reserve):
            raise ValueError(f"the plan makes {len(forks)} forks, and the group has {len(self.reserve)} places left")
        return forks


class Rounds:
    """A collection's groups that go in rounds, none without a plan.

    `requests`: all of the collection, the first to start last; `key` names its random draws. Raises ValueError for a group of
    more than one task.
    """

    def __init__(self, plan: Plan | None, requests: Sequence[EpisodeRequest], *key: object) -> None:
        self.groups: dict[str, Group] = {}
        by_group: dict[str, list[EpisodeRequest]] = {}
        for request in requests if plan else ():
            by_group.setdefault(request.group_id, []).append(request)
        for name, members in by_group.items():
            if len({request.task.task_id for request in members}) > 1:
                raise ValueError(f"group {name} has more than one task, so its episodes cannot be branches of one another")
            assert plan is not None
            first, starting = members[-1], max(plan.initial(len(members)), 1)
            if starting < len(members):
                draws = (*key, "branch", first.task.task_id, first.attempt)
                self.groups[name] = Group(name, plan, members[:-starting], starting, draws)

    @property
    def reserve(self) -> list[EpisodeRequest]:
        """Requests that wait for a place to branch from."""
        return [request for group in self.groups.values() for request in group.reserve]

    @property
    def parked(self) -> int:
        """Episodes that wait for others of their group."""
        return sum(group.parked for group in self.groups.values())

    def group(self, request: EpisodeRequest) -> Group | None:
        """The group of a request, None if it does not go in rounds, or no longer."""
        return self.groups.get(request.group_id)

    def go_on(self, group: Group, playing: int) -> list[EpisodeRequest]:
        """Begin a group's next round, with `playing` members. Where there are none, the requests that are left, the next one
        last: they are to start from the task.

        A group without places left is forgotten: its episodes go on each at its own pace.
        """
        group.awaited, group.parked, group.leaving, group.moved = playing, 0, [], set()
        starting = []
        if not playing:
            starting, group.reserve = group.reserve, []
        if not group.reserve:
            del self.groups[group.name]
            for play in group.members:
                play.marks, play.entropies = [], []
        return starting
