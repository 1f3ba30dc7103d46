"""What the jobs of stage rl have in common, whatever data they learn from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.agent.chat import Chat
from stages.agent.policy import Policy
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.hidden import check_hidden
from stages.algorithms.parts.credit import TurnCredit
from stages.environments.protocol import Domain
from stages.records.episode import Episode, episode_row, read_json
from stages.records.sections import seed_of
from stages.training.common.ledger import Ledger
from stages.training.common.loop import Job
from stages.training.common.processes import Processes
from stages.training.rl.models import Models

if TYPE_CHECKING:
    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.settings import Rl
    from stages.runtime.stage import StageContext

History = Sequence[Mapping[str, float]]


class RlJob(Job):
    """Base class: the settings, the token ledger, and defaults for jobs that write nothing but the policy."""

    models: Models

    def __init__(
        self, context: StageContext, algorithm: Algorithm, policy: Policy, processes: Processes, domain: Domain | None
    ) -> None:
        assert context.domain is not None
        if domain is not None:
            check_hidden(algorithm.rl, algorithm.method.data, domain)
        params = context.params
        self.context, self.algorithm, self.rl = context, algorithm, algorithm.rl
        self.processes, self.seed = processes, seed_of(params, algorithm.rl)
        self.chat = Chat(policy.tokenizer, params.model.thinking)
        self.max_length, self.tokens_per_batch = params.model.max_length, params.resources.tokens_per_batch
        self.curated = context.data / "curated" / context.domain
        self.annotated = context.data / "annotated" / context.domain
        self.ledger = Ledger()
        self.samples: list[dict[str, Any]] = []
        """Sample episodes for the report, with step and advantages."""
        self.last: tuple[int, Sequence[Episode], TrajectoryBatch | None] = (0, (), None)
        """Number, episodes and prepared batch, in which they come first, of the last step that played."""

    def state_dict(self) -> dict[str, Any]:
        return {"ledger": self.ledger.state_dict(), "algorithm": self.algorithm.state, "costs": self.algorithm.costs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        restore(self.algorithm.state, state["algorithm"])
        self.algorithm.costs.clear()
        self.algorithm.costs.update(state["costs"])

    def newest(self) -> list[dict[str, Any]]:
        return episode_rows(*self.last)

    def report(self, history: History) -> dict[str, Any]:
        """The job's part of reports/rl/<domain>.json."""
        raise NotImplementedError

    def gather_weights(self) -> None:
        """Copy sharded weights to where they are saved from. Every process must make this call."""
        self.models.refresh_player()

    def save_values(self, folder: Path) -> None:
        """Save trained models other than the policy, and what playing it needs, in the policy's folder; none by default."""

    def save_tables(self, folder: Path) -> None:
        """Write tables besides the sample episodes to the stage's data folder; none by default."""

    def close(self) -> None:
        """Release what the job holds, such as environments; nothing by default."""


def episode_rows(step: int, episodes: Sequence[Episode], batch: TrajectoryBatch | None) -> list[dict[str, Any]]:
    """Rows of `sample_schema`; `batch`: prepared, with the episodes as its first rows. None, or without advantages: null."""
    advantages = None if batch is None else batch.advantages
    credit = None if batch is None else batch.get(TurnCredit)
    rows = []
    for place, episode in enumerate(episodes):
        row = {**episode_row(episode), "step": step, "advantages": None}
        if advantages is not None:
            row["advantages"] = advantages[place, : len(episode.token_ids)].tolist()
        if credit is not None:
            row["credit"] = credit.values[place, : len(episode.turns)].tolist()
        rows.append(row)
    return rows


def window_means(history: History, column: str) -> dict[str, float]:
    """`<column>_first` and `<column>_last`: means over the first and last fifth of the rows that have the column, if any."""
    values = [row[column] for row in history if column in row]
    if not values:
        return {}
    window = max(1, len(values) // 5)
    return {f"{column}_first": sum(values[:window]) / window, f"{column}_last": sum(values[-window:]) / window}


def distinct_endings(episodes: Sequence[Episode]) -> float:
    """Mean number of different last actions (for some domains, answers) per group."""
    groups: dict[str, set[str]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, set()).add(episode.turns[-1].action_key if episode.turns else "")
    return sum(len(endings) for endings in groups.values()) / max(len(groups), 1)


def steps_budget(rl: Rl, annotated: Path) -> int | None:
    """The budget of environment steps, if there is one."""
    if not rl.add_tree_steps or rl.environment_steps is None:
        return rl.environment_steps
    return rl.environment_steps + int(read_json(annotated / "costs.json")["environment_steps"])


RISE_TOKENS = 20
"""Tokens at the start of a turn that ARPO takes entropy over."""


def entropy_rise(episodes: Sequence[Episode]) -> float:
    """How much more uncertain turns behind an observation are than their episode's first turn: nats per token, the mean over such
    turns, 0 without any. ARPO presumes that this is positive (arXiv 2507.19849). A turn's entropy is estimated by the mean of
    -log p over its first RISE_TOKENS tokens, as sampled."""
    rises: list[float] = []
    for episode in episodes:
        openings = [episode.logprob[turn.start : min(turn.end, turn.start + RISE_TOKENS)] for turn in episode.turns]
        entropies = [-math.fsum(opening) / max(1, len(opening)) for opening in openings]
        rises += [entropy - entropies[0] for entropy in entropies[1:]]
    return math.fsum(rises) / max(1, len(rises))


def restore(own: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Make `own` equal to `saved`, with the same inner dictionaries: a role's algorithm holds its own one."""
    for name in own.keys() - saved.keys():
        del own[name]
    for name, value in saved.items():
        if isinstance(own.get(name), dict) and isinstance(value, Mapping):
            restore(own[name], value)
        else:
            own[name] = value
