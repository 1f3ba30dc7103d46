"""Schemas of the Parquet tables that stages exchange; `datasets` and pandas can read them.

An episode records exactly what happened, token for token; nothing is ever re-tokenised. Files are byte-deterministic: fixed
column order, rows sorted by their ids, no time stamps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.records.task import Task, succeeded
from stages.runtime.files import atomic_file, atomic_text

EXPERT, NOISY, IMPORTED = "expert", "noisy_expert", "imported"
"""`policy_hash` of demonstrations."""


class Owner(IntEnum):
    """Who wrote a token: a record made when it is written, never found from text afterwards.

    RL trains on POLICY tokens, and on EXTERNAL ones that `rl.external` adds to its groups (`TRAINED`); SFT trains on the POLICY
    tokens of demonstrations. Tokens of the other owners condition what follows and are in no loss and no denominator.
    """

    PROMPT = 0
    POLICY = 1
    ENVIRONMENT = 2
    EXTERNAL = 3
    """Written by another agent, in a demonstration."""
    FORCED = 4
    """In the policy's turn, written by a decoder that left it no other token: its probability is 1 and its gradient 0."""
    EVIDENCE = 5
    """Drawn by the policy in the place of an observation (it answers its own search): has a log-probability."""
    GUIDANCE = 6
    """Advice of a teacher within an episode, which the policy reads and must not imitate."""


TRAINED = (Owner.POLICY, Owner.EXTERNAL)
"""Owners whose tokens RL trains on."""
DRAWN = (Owner.POLICY, Owner.EVIDENCE)
"""Owners whose tokens were drawn from the policy, with their log-probabilities."""


@dataclass
class TurnRecord:
    """One action and its result; `start`:`end` is the span of the action's tokens in the episode (end exclusive)."""

    action: str
    observation: str
    accepted: bool
    reward: float
    cost: float
    state_key: str
    """State before the action."""
    action_key: str
    """The normalised action (lower case, single spaces): equal actions have equal keys."""
    start: int
    end: int
    terms: Mapping[str, float] = field(default_factory=dict, metadata={"stored": False})
    """The step's reward terms, for training. Not a column of the table, which has their sums."""


@dataclass
class Episode:
    """One row per episode. Token lists have the same length; `turn` is -1 for the prompt."""

    episode_id: str
    task_id: str
    domain: str
    group_id: str
    """Episodes of a group start from the same prompt; their rewards are compared with each other."""
    seed: int
    policy_hash: str
    params_hash: str
    temperature: float
    top_p: float
    top_k: int
    token_ids: list[int] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    """Log-probability under the behaviour policy; 0 for tokens the policy did not choose."""
    turn: list[int] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    reward: float = 0.0
    """The episode's return: the sum of its turns' rewards."""
    reward_terms: dict[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    stop_reason: str = ""
    """"terminated", "turn_limit", "context", "length" or "thinking"; see `stages.agent.rollout.collect`."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """The conversation, including the thoughts of a reasoning model; actions alone are in `turns`."""
    parent: str = ""
    """The episode from which this one branched; "" if it did not branch."""
    inherited: int = 0
    """Number of turns inherited from `parent`; they were played, and their cost counted, once."""
    role: str = ""
    """Whose turns these are, such as "proposer" or "solver"; "" where no roles are distinguished. An episode is what one role
    reads and writes."""
    play: str = ""
    """Where several roles act in one run of an environment, or it holds several conversations, each has an episode of its own:
    the id that these share."""
    moves: list[int] = field(default_factory=list)
    """With `play`: the place of each turn among all turns of the play, from 0."""
    forks: list[Episode] = field(default_factory=list, metadata={"stored": False})
    """The play's further conversations, each an episode (stages/agent/conversations.py). Not a column of the table, where each
    has a row of its own."""
    forgotten: list[list[int]] = field(default_factory=list)
    """[turn, by]: the observation of `turn` is hidden from the turns after `by` (stages/agent/forgetting.py)."""
    hidden: list[tuple[int, int, int]] = field(default_factory=list, metadata={"stored": False})
    """Of `forgotten`, the tokens: (start, stop, since). Not a column of the table."""
    kept: list[Sequence[int]] = field(default_factory=list, metadata={"stored": False})
    """Per token, those that it was drawn from where top-k or top-p left only some, for training; empty for other tokens. Shorter
    than `token_ids` if the last ones have none. Not a column of the table."""

    def without_guidance(self) -> Episode:
        """The episode as if it had been played without a hint: the same tokens less those that GUIDANCE owns."""
        kept = [place for place, owner in enumerate(self.owner) if owner != Owner.GUIDANCE]
        removed = len(self.token_ids) - len(kept)
        # Hints are in the first message, before every turn.
        turns = [replace(turn, start=turn.start - removed, end=turn.end - removed) for turn in self.turns]
        return replace(
            self,
            token_ids=[self.token_ids[place] for place in kept],
            owner=[self.owner[place] for place in kept],
            logprob=[self.logprob[place] for place in kept],
            turn=[self.turn[place] for place in kept],
            turns=turns,
            hidden=[(start - removed, stop - removed, since - removed) for start, stop, since in self.hidden],
            kept=self.kept[removed:],
        )

    def append(
        self,
        token_ids: Sequence[int],
        owner: Owner | Sequence[int],
        turn: int,
        logprobs: Sequence[float] | None = None,
        kept: Sequence[Sequence[int]] = (),
    ) -> None:
        """Add tokens. owner: of all, or one for each; `logprobs` is required for tokens drawn from the policy. Raises ValueError
        if there are not as many owners as tokens."""
        owners = [int(owner)] * len(token_ids) if isinstance(owner, Owner) else [int(one) for one in owner]
        if len(owners) != len(token_ids):
            raise ValueError(f"{len(owners)} owners of {len(token_ids)} tokens; name one for each token")
        if kept:
            self.kept += [()] * (len(self.token_ids) - len(self.kept))
            self.kept += kept
        self.token_ids.extend(token_ids)
        self.owner.extend(owners)
        self.logprob.extend(logprobs if logprobs is not None else [0.0] * len(token_ids))
        self.turn.extend([turn] * len(token_ids))

    def own(self, start: int, owner: Owner) -> None:
        """Record another owner of the policy's tokens from `start` on, as the environment that they went to says."""
        self.owner[start:] = [int(owner) if one == Owner.POLICY else one for one in self.owner[start:]]

    @property
    def success(self) -> bool:
        """See `stages.records.task.succeeded`."""
        return succeeded(self.reward, self.reward_terms)

    @property
    def played(self) -> list[TurnRecord]:
        """The turns played for this episode, without inherited ones."""
        return self.turns[self.inherited :]

    @property
    def policy_tokens(self) -> int:
        return sum(owner == Owner.POLICY for owner in self.owner)


def forks_of(played: Iterable[Episode]) -> list[Episode]:
    """The plays' conversations after their first ones, in order."""
    return [fork for episode in played for fork in episode.forks]


def conversations(played: Iterable[Episode]) -> list[Episode]:
    """All conversations of the plays, each play's first one first."""
    return [one for episode in played for one in (episode, *episode.forks)]


def joined(rows: Iterable[Episode]) -> list[Episode]:
    """Episodes as a table has them, with the forks of each play where they were when it was played, sorted by id. Raises
    ValueError for a fork whose play is missing."""
    found = sorted(rows, key=lambda episode: episode.episode_id)
    leads = {episode.episode_id: episode for episode in found if episode.play in ("", episode.episode_id)}
    for episode in found:
        if episode.episode_id not in leads:
            if episode.play not in leads:
                raise ValueError(f"episode {episode.episode_id} is of the play {episode.play}, which the table lacks")
            leads[episode.play].forks.append(episode)
    return list(leads.values())


_TURN = pa.struct(
    [
        ("action", pa.string()),
        ("observation", pa.string()),
        ("accepted", pa.bool_()),
        ("reward", pa.float64()),
        ("cost", pa.float64()),
        ("state_key", pa.string()),
        ("action_key", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
    ]
)
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
EPISODE_SCHEMA = pa.schema(
    [
        ("episode_id", pa.string()),
        ("task_id", pa.string()),
        ("domain", pa.string()),
        ("group_id", pa.string()),
        ("seed", pa.int64()),
        ("policy_hash", pa.string()),
        ("params_hash", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("owner", pa.list_(pa.int8())),
        ("logprob", pa.list_(pa.float32())),
        ("turn", pa.list_(pa.int16())),
        ("turns", pa.list_(_TURN)),
        ("reward", pa.float64()),
        ("reward_terms", pa.string()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("stop_reason", pa.string()),
        ("messages", MESSAGES),
        ("parent", pa.string()),
        ("inherited", pa.int32()),
    ]
)
ROLE_COLUMNS = [("role", pa.string()), ("play", pa.string()), ("moves", pa.list_(pa.int32()))]
"""Columns that a table of episodes has only if one of them has a role or shares a play."""
FORGOTTEN_COLUMN = ("forgotten", pa.list_(pa.list_(pa.int16())))
"""A table of episodes has it only if one of them forgets an observation."""


SAMPLE_COLUMNS = (("step", pa.int32()), ("advantages", pa.list_(pa.float32())))
"""Of the episodes that rl keeps and tells: the step that played them, and the advantage of each token (null: not trained on)."""
CREDIT_COLUMN = ("credit", pa.list_(pa.float32()))
"""What step credit gave each turn; a table has it only if a row does."""


def sample_schema(rows: Sequence[Mapping[str, Any]]) -> pa.Schema:
    """`episode_schema` with SAMPLE_COLUMNS, and CREDIT_COLUMN if a row has it."""
    credited = [CREDIT_COLUMN] if any(row.get("credit") is not None for row in rows) else []
    return episode_schema(rows, *SAMPLE_COLUMNS, *credited)


def episode_schema(rows: Iterable[Mapping[str, Any]], *further: tuple[str, pa.DataType]) -> pa.Schema:
    """EPISODE_SCHEMA, then ROLE_COLUMNS if a row has a role or a play, FORGOTTEN_COLUMN if one forgets, then `further`."""
    rows = list(rows)
    roles = ROLE_COLUMNS if any(row.get("role") or row.get("play") for row in rows) else []
    forgotten = [FORGOTTEN_COLUMN] if any(row.get("forgotten") for row in rows) else []
    return pa.schema([*EPISODE_SCHEMA, *roles, *forgotten, *further])


TASK_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("seed", pa.int64()),
        ("prompt", pa.string()),
        ("spec", pa.string()),
        ("difficulty", pa.float64()),
        ("cluster", pa.string()),
    ]
)
NODE_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("node", pa.int32()),
        ("parent", pa.int32()),
        ("depth", pa.int32()),
        ("action", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprob", pa.list_(pa.float32())),
        ("prior", pa.float64()),
        ("N", pa.int32()),
        ("W", pa.float64()),
        ("n_success", pa.int32()),
        ("n_rollouts", pa.int32()),
        ("reward", pa.float64()),
        ("terminal", pa.bool_()),
        ("truncated", pa.bool_()),
        ("state_key", pa.string()),
        ("iteration", pa.int32()),
        ("observation", pa.string()),
        ("context_ids", pa.list_(pa.int32())),
        ("R", pa.float64()),
        ("R2", pa.float64()),
    ]
)
"""`token_ids` and `logprob` are the action's tokens, `context_ids` the observation tokens after them, so that a node's full
history is the concatenation along its path. `n_success` and `n_rollouts` count the policy's own rollouts from the node,
separately from the tree's `N` and `W`; `R` sums the discounted returns after the node in these rollouts, and `R2` their
squares. The root has parent -1, no action, and the prompt as its context."""


def write_table(path: Path | str, schema: pa.Schema, rows: Iterable[Mapping[str, Any]], *, durable: bool = True) -> None:
    """Write rows to `path` atomically, in the given order; the same rows always give the same bytes. Raises OSError."""
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    with atomic_file(path, durable=durable) as partial:
        pq.write_table(table, partial, compression="zstd", version="2.6", write_statistics=False)


def read_rows(path: Path | str, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Rows of a Parquet file as dicts. Raises FileNotFoundError or ValueError (damaged file) naming the path."""
    with undamaged(path, "delete it and run the stage again"):
        return pq.read_table(path, columns=list(columns) if columns else None).to_pylist()


@contextmanager
def undamaged(path: Path | str, remedy: str) -> Iterator[None]:
    """Turn pyarrow's errors about a damaged file into a ValueError that names `path` and the `remedy`; errors of the file system
    (no such file, no permission) pass unchanged."""
    try:
        yield
    except (pa.ArrowException, OSError, OverflowError) as error:
        if isinstance(error, FileNotFoundError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        detail = " ".join(str(error).split())
        raise ValueError(f"{path} is not a readable Parquet file ({detail}); {remedy}") from error


def write_json(path: Path | str, value: Any) -> None:
    """Write JSON atomically with sorted keys and a final newline. Raises ValueError for non-finite numbers."""
    atomic_text(path, json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n")


def read_json(path: Path | str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def _stored(record: Episode | TurnRecord) -> dict[str, Any]:
    """The fields that are columns."""
    return {item.name: getattr(record, item.name) for item in fields(record) if item.metadata.get("stored", True)}


def episode_row(episode: Episode) -> dict[str, Any]:
    """A row of EPISODE_SCHEMA and further columns, which are written if the table has them (`episode_schema`)."""
    row = _stored(episode)
    row["turns"] = [_stored(turn) for turn in episode.turns]
    row["reward_terms"] = json.dumps(episode.reward_terms, sort_keys=True)
    return row


def episode_from(row: Mapping[str, Any]) -> Episode:
    """The episode of a row of EPISODE_SCHEMA."""
    turns = [TurnRecord(**turn) for turn in row["turns"]]
    return Episode(**{**row, "turns": turns, "reward_terms": json.loads(row["reward_terms"])})


def row_succeeded(row: Mapping[str, Any]) -> bool:
    """`Episode.success` for a row of EPISODE_SCHEMA; its reward terms may be missing or already parsed."""
    terms = row.get("reward_terms") or {}
    return succeeded(row["reward"], json.loads(terms) if isinstance(terms, str) else terms)


def write_episodes(path: Path | str, episodes: Iterable[Episode]) -> None:
    """Write episodes, sorted by id, as rows of `episode_schema`."""
    rows = [episode_row(episode) for episode in sorted(episodes, key=lambda episode: episode.episode_id)]
    write_table(path, episode_schema(rows), rows)


def read_episodes(path: Path | str) -> list[Episode]:
    return [episode_from(row) for row in read_rows(path)]


def write_tasks(path: Path | str, tasks: Iterable[Task]) -> None:
    """Write tasks in the given order (curation sorts them)."""
    rows = ({**asdict(task), "spec": json.dumps(task.spec, sort_keys=True)} for task in tasks)
    write_table(path, TASK_SCHEMA, rows)


def read_tasks(path: Path | str, split: str | None = None) -> list[Task]:
    """All tasks, or those of one split."""
    rows = read_rows(path)
    return [Task(**{**row, "spec": json.loads(row["spec"])}) for row in rows if split in (None, row["split"])]
