"""Losses by role: a step's episodes of other roles than the main one are credited and trained by settings of their own
(`rl.roles`), on the same weights: in updates before or after those of the main role, or in the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

from torch import Tensor

from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import LossTerms, TrajectoryBatch
from stages.algorithms.task_source import TaskSource
from stages.records.episode import Episode
from stages.training.common.batches import trajectory_batch
from stages.training.common.ledger import Ledger
from stages.training.common.loop import Sums, Update, merge_sums
from stages.training.rl.models import Models
from stages.training.rl.policy_updates import PolicyUpdates, policy_row

OFFSET = 1 << 32
"""Added to the rows of the n-th batch of a combined update, n times."""


def combined(parts: Sequence[Iterator[Update]]) -> Iterator[Update]:
    """One optimiser step on the sum of the losses of the parts' first updates, then of their second ones, and so on; the rest of
    a longer part is as it is. All are of the policy."""
    for found in zip_longest(*parts):
        updates = [update for update in found if update is not None]
        yield updates[0] if len(updates) == 1 else summed(updates)


def summed(updates: Sequence[Update]) -> Update:
    """An update with the micro-batches of all, which tells each which of its tokens were trained."""

    def loss(micro: tuple[int, Any]) -> Iterator[LossTerms]:
        place, own = micro
        for terms in updates[place].loss(own):
            assert terms.trained is not None
            rows, mask = terms.trained
            yield replace(terms, trained=(rows + place * OFFSET, mask))

    def tell(rows: Tensor, mask: Tensor, skipped: bool) -> None:
        update = updates[place := int(rows[0]) // OFFSET]
        own = update.on_tokens_skipped if skipped else update.on_tokens_trained
        assert own is not None
        own(rows - place * OFFSET, mask)

    def skips(sums: Sums) -> bool:
        return any(update.skips(sums) for update in updates if update.skips is not None)

    micro_batches = [(place, micro) for place, update in enumerate(updates) for micro in update.micro_batches]
    limited = any(update.skips is not None for update in updates)
    trained, skipped = partial(tell, skipped=False), partial(tell, skipped=True)
    limit = skips if limited else None
    return Update(updates[0].learner, micro_batches, loss, trained, skips=limit, on_tokens_skipped=skipped)


def policy_sums(sums: Mapping[str, Sums]) -> Sums:
    """The statistics of the policy's updates, those of all roles together."""
    found = Sums()
    for learner, values in sums.items():
        if learner.partition("@")[0] == "policy":
            merge_sums(found, values)
    return found


class RoleUpdates:
    """The updates of roles, in the order of `roles`."""

    def __init__(
        self, models: Models, algorithm: Algorithm, ledger: Ledger, roles: Sequence[str], combined: bool = False
    ) -> None:
        """combined: whether a step's updates are on the episodes of all roles at once, so that several batches are open."""
        self.models, self.ledger, self.combined = models, ledger, combined
        self.algorithms = {role: algorithm.of_role(role) for role in roles}
        self.ledgers = {role: Ledger() if combined else ledger for role in roles}
        self.policy_updates = {role: PolicyUpdates(models, own, self.ledgers[role]) for role, own in self.algorithms.items()}
        self.batches: dict[str, TrajectoryBatch] = {}
        """The step's prepared batches of the roles that learn from it."""
        self.episodes: Mapping[str, Sequence[Episode]] = {}
        """Of the step, in the order of the batches' rows."""

    def prepare(self, source: TaskSource, step: int, key: Sequence[object]) -> None:
        """Credit the source's episodes of the roles that learn in this step; before the step's first update, since importance
        ratios are to the policy that played them. Groups are not resampled: a role's group may have one member."""
        self.batches, self.episodes = {}, {role: found for role, found in source.role_episodes().items() if found}
        for role, found in self.episodes.items():
            if not source.learns(role, step):
                continue
            algorithm = self.algorithms[role]
            batch = self.models.annotate(algorithm.shape(trajectory_batch(found, algorithm.rl.loss.trains_evidence)), algorithm)
            batch = source.credited(role, algorithm.prepare(batch))
            self.batches[role] = self.policy_updates[role].rescored(batch, step, (*key, role))

    def in_order(
        self, main: Callable[[bool], Iterator[Update]], source: TaskSource, step: int, key: Sequence[object]
    ) -> Iterator[Update]:
        """The step's updates, with those of the main role (`main`: whether no update comes before -> updates)."""
        learns = source.learns(source.main_role, step)
        if self.combined and self.batches and learns:
            own = [self.policy_updates[role].updates(batch, step, (*key, role)) for role, batch in self.batches.items()]
            yield from combined([*own, main(True)])
            for ledger in self.ledgers.values():
                self.ledger.absorb(ledger)
            return
        first = bool(self.batches) and source.roles_first
        if first:
            yield from self.updates(step, key, on_policy=True)
        if learns:
            yield from main(not first)
        if not first:
            yield from self.updates(step, key, on_policy=False)

    def updates(self, step: int, key: Sequence[object], on_policy: bool) -> Iterator[Update]:
        """The updates on the prepared batches. on_policy: no other update of the step comes before."""
        for role, batch in self.batches.items():
            for update in self.policy_updates[role].updates(batch, step, (*key, role), on_policy):
                on_policy = False
                yield replace(update, role=role)
            if self.combined:
                self.ledger.absorb(self.ledgers[role])

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
