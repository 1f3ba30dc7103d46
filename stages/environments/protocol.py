"""The contract between a domain and everything that acts in it.

An `Environment` plays one task at a time and can be copied exactly (`snapshot`/`restore`, random state included), so that tree
search can branch from any step. A `Domain` bundles an environment with its recipes, expert and settings. Both are structural: a
class with these methods is enough; nothing has to be inherited. `base_environment` and `base_domain` have shared parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from stages.constraints.settings import Constraint
from stages.records.task import Task
from stages.runtime.validation import Checked, shortened


@dataclass(frozen=True)
class Observation:
    """What the agent reads. Plain text; the chat template turns it into tokens."""

    text: str
    before: tuple[Mapping[str, str], ...] = ()
    """Where it begins a conversation: messages before it, user first and an assistant's last, that the policy did not write in
    this conversation, such as examples. See `allow_conversations`."""


@dataclass(frozen=True)
class Step:
    """The result of one action.

    `reward` is the reward of this step; an episode's return is the sum over its steps, in [0, 1] for success-or-failure domains.
    `accepted`: False for an invalid action, which changes only the turn counter. `terminated`: the task ended by its own rules.
    `truncated`: the turn limit ended it. `cost`: tool calls, or what they cost where tools have prices (stages.records.tools).
    """

    observation: Observation
    reward: float
    accepted: bool
    terminated: bool
    truncated: bool
    cost: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, e.g. {"exact_match": 1.0, "f1": 1.0}; reported, not summed. See also `SUCCESS_TERM`."""
    forgets: int = 0
    """How many steps ago the observation was made that the policy's turns do not see from now on; 0: they see all."""
    evidence: bool = False
    """The action stood for an observation: the policy wrote the result of its own search. EVIDENCE then owns its tokens."""
    conversation: int | None = None
    """Where an environment holds several conversations (`allow_conversations`): the one that the observation belongs to, if not
    the action's. `reset` begins number 0; a new number begins with the observation, a known one goes on."""

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@runtime_checkable
class Environment(Protocol):
    """One running task."""

    def reset(self, task: Task) -> Observation:
        """Start `task`, always in the same way; returns what the agent sees after `task.prompt` ("" for nothing)."""
        ...

    def step(self, action: str) -> Step:
        """Take `action` (free text). Raises RuntimeError if the episode is over or was never reset."""
        ...

    def snapshot(self) -> Any:
        """An opaque, immutable copy of the entire state, counters and random state included."""
        ...

    def restore(self, state: Any) -> None:
        """Restore a snapshot of an environment on the same task."""
        ...

    def state_key(self) -> str:
        """A canonical string of what the agent can know and change, without the turn counter; equal for equal states."""
        ...

    def admissible(self) -> Sequence[str]:
        """Actions that would be accepted now, sorted; a sample if there are too many, empty if unknown."""
        ...

    def close(self) -> None: ...


Most = Literal["plain", "begun", "several"]
"""What a caller of an environment can follow: plain: one conversation, which begins with one message; begun: one, whose first
observation may have messages `before` it; several: also steps that name another conversation."""


def allow_conversations(environment: Environment, most: Most) -> None:
    """Tell an environment with a method `conversations(most)`, before `reset`, what its caller can follow; others have one plain
    conversation, and so has such an environment until it is told."""
    tell = getattr(environment, "conversations", None)
    if tell is not None:
        tell(most)


def tell_logprobs(environment: Environment, logprobs: Sequence[float]) -> None:
    """Tell an environment with a method `drawn(logprobs)` the log-probabilities of the tokens that the policy drew of the next
    action's argument (of the query in `search <query>`); others are not told. Such an environment depends on how sure the policy
    was of its arguments."""
    drawn = getattr(environment, "drawn", None)
    if drawn is not None:
        drawn(list(logprobs))


def forgets(domain: object) -> bool:
    """Whether steps of the domain's environment hide earlier observations (`Step.forgets`)."""
    told = getattr(domain, "forgets", None)
    return told is not None and bool(told())


class DomainSettings(Checked):
    """Base class of domains' settings (per_domain.<name>.environment in params.yaml): unknown keys and values of other types are
    refused, except lists for tuples, which YAML lacks."""

    model_config = ConfigDict(strict=False)

    replay_invariant: ClassVar[tuple[str, ...]] = ()
    """Settings on which game records do not depend: records made with other values can be reused."""

    max_turns: int = 12

    constraint: Annotated[Constraint | None, Field(exclude_if=lambda constraint: constraint is None)] = None
    """What the policy's turns must look like (docs/constraints.md). null: anything."""

    @model_validator(mode="wrap")
    @classmethod
    def _as_written(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse `true` or "3" for a number, as all of params.yaml does. Keys of mappings may be strings, as in JSON."""
        made = validate(values)
        if (wrong := _other_type(values, made)) is not None:
            raise ValueError(wrong)
        return made


def _other_type(given: Any, made: Any, where: str = "") -> str | None:
    """An error message for a value of `given` that validation converted to another type in `made`; None if there is none."""
    if type(made) in (bool, int, float):
        kind, wanted = (bool, "true or false") if isinstance(made, bool) else ((int, float), "a number")
        fits = isinstance(given, kind) and isinstance(given, bool) == isinstance(made, bool)
        return None if fits else f"{where} must be {wanted}, not {shortened(given)}"
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(given, Mapping) and isinstance(made, BaseModel):
        names = {field.alias or name: name for name, field in type(made).model_fields.items()}
        pairs = [(key, held, getattr(made, str(names.get(key, key)), None)) for key, held in given.items()]
    elif isinstance(given, Mapping) and isinstance(made, Mapping) and len(given) == len(made):
        pairs = list(zip(given, given.values(), made.values(), strict=True))
        if invalid := [key for key, name in zip(given, made, strict=True) if str(key) != str(name)]:
            return f"{where} has the invalid key {shortened(invalid[0])}"
    elif isinstance(given, (list, tuple)) and isinstance(made, (list, tuple)):
        pairs = [(place, *pair) for place, pair in enumerate(zip(given, made, strict=False))]
    found = (_other_type(held, become, f"{where}.{key}" if where else str(key)) for key, held, become in pairs)
    return next((wrong for wrong in found if wrong is not None), None)


@runtime_checkable
class Domain(Protocol):
    """A family of tasks. Found by name through the entry-point group `bellwether.domains`."""

    name: str
    settings: Any
    """An instance of the domain's settings class (a subclass of `DomainSettings`)."""

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records of `count` tasks: the lines of `data/raw/<name>.jsonl`."""
        ...

    def build(self, records: Sequence[Mapping[str, Any]], folder: Path, workers: int) -> list[Task]:
        """The tasks of checked raw records; writes what the environment needs (compiled games, ...) below `folder`.

        Records have their "split" and "task_id" already. Deterministic: the same records give the same bytes. Raises ValueError
        naming a record that can't be built.
        """
        ...

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise ValueError, saying what is wrong, for an invalid raw record."""
        ...

    def make(self, folder: Path) -> Environment:
        """A new environment that uses what `build` wrote below `folder`."""
        ...

    def expert(self, environment: Environment) -> str | None:
        """The best next action in the environment's current state, or None; called in every turn."""
        ...

    def entities(self, task: Task) -> set[str]:
        """Names that identify the task's world; train and test must not share any."""
        ...

    # Optional methods. For evaluation:
    # - `answer(action) -> str | None`, for maj@k: the answer in an episode's last action, normalised so that equal answers are
    #   equal strings; None if it has none;
    # - `solution(task, actions) -> str`, to count distinct solutions: equal for the actions of successes that solved the task in
    #   the same way. Without it, different actions are different solutions.
    # For judges (`rl.reward.kind: judge`): `quality(task, actions) -> float`, the hidden quality of an episode, which no reward
    # may contain; program judges perceive it with planted errors, and judges are measured against it. Default: the return.
    # `attributes(task, actions) -> Mapping[str, float]`: further qualities of an episode, which principles name
    # (annotate.judge_model.principles), in units in which episodes differ by about 1.
    # `checklist(task, actions) -> Mapping[str, bool]`: what a good episode meets, in words that depend on the task alone, and
    # whether this one does (`rl.judge.scheme: checklist`).
    # `hidden`: names of reward terms, "success" among them if it follows from the quality, that no reward may read; metrics do.
    # For self-play (`rl.tasks.source: self_play`), where tasks have `spec["answer"]` and episodes end with `answer <text>`:
    # - `asked(question) -> str`: the prompt of a free question; default: the question;
    # - `topic(task) -> str`: where the answer is found, for the proposer's prompt; default: "";
    # - `read(question, evidence) -> str | None`: the answer by rules from what tools showed, for `gate.reader: rules`;
    # - `proposal(task) -> Sequence[str]`: a scripted proposer's actions, for demonstrations, the last `question <text>`; default:
    #   the expert's, and the task's prompt as the question.
    # For rewards and judges that read references: `references(task) -> Sequence[str]`, good final actions; and
    # `reward_chain(task) -> stages.records.reward_chain.RewardChain`, their key words and style; default: rules on references.
    # `mistakes(task) -> Sequence[str]`: what reads like a reference and is wrong, for verifiers to learn from.
    # For demonstrations with thoughts (curate.thoughts): `thought(task, actions) -> str`, what an expert thinks before the last
    # of the actions.
    # For off-policy methods: `known_actions(task) -> Sequence[tuple[str, float]]`, final actions with their return.
    # For stages that play the domain: `ready() -> None`, called in the stage's own process before it loads a model. It finds what
    # the domain needs on this machine (a sandbox, say), prints it to standard error, and raises ParamsError if it is missing.
    # For domains that nothing can be trained on: `only_tests = True`; they are listed in evaluate.transfer.
    # For results that the policy writes itself: `writes_evidence() -> bool`.
    # For steps that hide earlier observations (`Step.forgets`): `forgets() -> bool`.
    # For costs in rewards (`rl.cost`): `tools() -> Sequence[str]`, the names of priced tools.
    # For critics: `returns() -> tuple[float, float]`, the smallest and largest return, if they are not 0 and 1.
    # For curation:
    # - `record_difficulty(record) -> float` (difficulty of a raw record's task) and `difficulty_weights() -> dict[float, float]`
    #   (the mix of difficulties to take);
    # - `record_kinds(record) -> set[str]` (the settings that a raw record was made with, e.g. "2 hops") and `recipe_kinds() ->
    #   set[str]` (all kinds that `recipes` yields with the current settings): curation warns if they differ;
    # - `world_files(task) -> list[str]`: files that the task is played in, relative to the `folder` of `build`. The panel's hash
    #   covers these, or without this method every file below `folder`;
    # - `players() -> dict[str, float]` (name -> weight) and `player_action(player, environment, rng) -> str` (the player's next
    #   action, which may be invalid): `python -m stages.curation games` writes records of their games;
    # - a keyword parameter `splits: Collection[Split] = SPLITS` of `recipes`, where these take long: of the records of all splits
    #   only those of `splits`;
    # - a keyword parameter `built: Callable[[int], None] | None = None` of `build`, called with the number of records finished
    #   since the last call, for a progress bar.
