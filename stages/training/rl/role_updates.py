"""Losses by role: a step's episodes of other roles than the main one are credited and trained by settings of their own
(`rl.roles`), on the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import TrajectoryBatch
from stages.records.episode import Episode
from stages.training.common.batches import trajectory_batch
from stages.training.common.ledger import Ledger
from stages.training.common.loop import Sums, Update, merge_sums
from stages.training.rl.models import Models
from stages.training.rl.policy_updates import PolicyUpdates, policy_row


def policy_sums(sums: Mapping[str, Sums]) -> Sums:
    """The statistics of the policy's updates, those of all roles together."""
    found = Sums()
    for learner, values in sums.items():
        if learner.partition("@")[0] == "policy":
            merge_sums(found, values)
    return found


class RoleUpdates:
    """The updates of roles, in the order of `roles`."""

    def __init__(self, models: Models, algorithm: Algorithm, ledger: Ledger, roles: Sequence[str]) -> None:
        self.models = models
        self.algorithms = {role: algorithm.of_role(role) for role in roles}
        self.policy_updates = {role: PolicyUpdates(models, own, ledger) for role, own in self.algorithms.items()}
        self.batches: dict[str, TrajectoryBatch] = {}
        """The step's prepared batches of the roles that have episodes to learn from."""
        self.episodes: Mapping[str, Sequence[Episode]] = {}
        """Of the step, in the order of the batches' rows."""

    def prepare(self, episodes: Mapping[str, Sequence[Episode]], step: int, key: Sequence[object]) -> None:
        """Credit a step's episodes, by role; before the step's first update, since importance ratios are to the policy that
        played them. Groups are not resampled: a role's group may have one member."""
        self.batches, self.episodes = {}, {role: found for role, found in episodes.items() if found}
        for role, found in self.episodes.items():
            algorithm = self.algorithms[role]
            batch = self.models.annotate(algorithm.shape(trajectory_batch(found)), algorithm)
            self.batches[role] = self.policy_updates[role].rescored(algorithm.prepare(batch), step, (*key, role))

    def updates(self, step: int, key: Sequence[object], on_policy: bool) -> Iterator[Update]:
        """The updates on the prepared batches. on_policy: no other update of the step comes before."""
        for role, batch in self.batches.items():
            for update in self.policy_updates[role].updates(batch, step, (*key, role), on_policy):
                on_policy = False
                yield replace(update, role=role)

    def row(self, sums: Mapping[str, Sums]) -> dict[str, float]:
        """Columns of the history: `<role>/` and what there is for the main role, too."""
        row: dict[str, float] = {}
        for role, found in self.episodes.items():
            own = {
                "episodes": float(len(found)),
                "reward_mean": sum(episode.reward for episode in found) / len(found),
                "turns": sum(len(episode.turns) for episode in found) / len(found),
                "policy_tokens": sum(episode.policy_tokens for episode in found) / len(found),
                **(policy_row({"policy": sums[learner]}) if (learner := f"policy@{role}") in sums else {}),
            }
            row |= {f"{role}/{name}": value for name, value in own.items()}
        return row
