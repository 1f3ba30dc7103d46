"""What packages outside this repository import: the names that authors of environments, methods and merge methods need. Stable.

**Environments** (entry points of `bellwether.domains`): a class with `name`, `Settings` (a `DomainSettings`) and the methods of
`Domain`, called with an instance of its settings; it makes `Environment`s, which play `Task`s and answer with `Observation` and
`Step`. `RecipeDomain`, `ValueEnvironment` and `AnsweringEnvironment` have what most of them share; `splits_in_turn`, `Mix` and
`check_fields` help with recipes; random numbers come from `stream`, `key64` and `permutation`. Check: `python -m
stages.environments check NAME`.

**Methods** (`bellwether.algorithms`): a module with a `COMPOSITION` (`Composition`), which opens with a `Card`. Pieces work on a
`TrajectoryBatch`; `settings` is a `Section`. Check: `python -m stages.algorithms check NAME`.

**Merge methods** (`bellwether.mergers`): a class like `Merger`, with a `Card` and its `Settings`. `DeltaMethod` works on
differences to the base; `MergeParams` is what it gets, and `combine` adds task vectors up. Check: `python -m stages.merging check
NAME`.

**Task sources** (`bellwether.task_sources`): a subclass of `TaskSource`, made with `SourceInputs`; it plays `EpisodeRequest`s.

**All**: `Section` (settings: unknown keys are refused), `Count`, `Positive`, `NonNegative` and `Share` (ranges), `ParamsError`.
Importing this imports neither torch nor transformers; import them inside functions.
"""

from __future__ import annotations

from stages.agent.active_episode import EpisodeRequest
from stages.algorithms.batch import (
    Extra,
    LossTerms,
    TrajectoryBatch,
    is_last_token,
    masked_mean,
    masked_whiten,
    next_token_values,
)
from stages.algorithms.card import Composition, OfflineLosses
from stages.algorithms.parts.advantage import episode_advantages
from stages.algorithms.parts.offline import OfflineBatch, OfflineSettings, Scores
from stages.algorithms.parts.preference import PairScores
from stages.algorithms.task_source import SourceInputs, TaskSource
from stages.environments.base_domain import Mix, RecipeDomain, check_fields, parse_record, splits_in_turn, world_by_world
from stages.environments.base_environment import AnsweringEnvironment, AnswerState, ValueEnvironment
from stages.environments.protocol import Domain, DomainSettings, Environment, Observation, Step
from stages.merging.contract import MergeError, MergeParams, Merger
from stages.merging.deltas import DeltaMethod, combine, kept_count, task_vectors
from stages.records.card import Card
from stages.records.task import SPLITS, SUCCESS_TERM, Split, Task
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive, Section, Share
from stages.seeding import key64, permutation, stream

__all__ = [
    "SPLITS",
    "SUCCESS_TERM",
    "AnswerState",
    "AnsweringEnvironment",
    "Card",
    "Composition",
    "Count",
    "DeltaMethod",
    "Domain",
    "DomainSettings",
    "Environment",
    "EpisodeRequest",
    "Extra",
    "LossTerms",
    "MergeError",
    "MergeParams",
    "Merger",
    "Mix",
    "NonNegative",
    "Observation",
    "OfflineBatch",
    "OfflineLosses",
    "OfflineSettings",
    "PairScores",
    "ParamsError",
    "Positive",
    "RecipeDomain",
    "Scores",
    "Section",
    "Share",
    "SourceInputs",
    "Split",
    "Step",
    "Task",
    "TaskSource",
    "TrajectoryBatch",
    "ValueEnvironment",
    "check_fields",
    "combine",
    "episode_advantages",
    "is_last_token",
    "kept_count",
    "key64",
    "masked_mean",
    "masked_whiten",
    "next_token_values",
    "parse_record",
    "permutation",
    "splits_in_turn",
    "stream",
    "task_vectors",
    "world_by_world",
]
