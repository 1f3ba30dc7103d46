"""Any text-based Gymnasium environment as a domain: subclass `GymnasiumTextDomain`, name the environment, register it.

    class GuessDomain(GymnasiumTextDomain):
        name = "guess"
        env_id = "my_package/Guess-v0"          # or: factory = staticmethod(make_environment)
        prompt = "guess the number."

    # pyproject.toml of the package that brings it
    [project.entry-points."bellwether.domains"]
    guess = "my_package:GuessDomain"

Observations are text, or converted by overriding `describe`. Actions are text, or names of the actions of a `Discrete` space. If
the unwrapped environment has `state_key()`, `admissible()`, `expert_action()` or `action_names`, they are used; so are
`info["accepted"]` and `info["action_mask"]`. Needs the extra `gymnasium`.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import gymnasium
from gymnasium.spaces import Discrete, Text
from pydantic import Field

from stages.environments.base_domain import parse_record
from stages.environments.protocol import DomainSettings, Observation, Step
from stages.records.task import Split, Task
from stages.runtime.validation import Checked
from stages.seeding import key64

SHARES: dict[Split, int] = {"train": 192, "valid": 24, "test": 200}


class GymnasiumTextSettings(DomainSettings):
    """Subclass to add keys; `kwargs` are passed to `gymnasium.make` or the factory."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    reward_scale: float = 1.0
    """Multiplies every reward; an episode counts as a success if the sum reaches 1."""


class GymnasiumRecord(Checked):
    """A raw record: `seed` and `options` are passed to the environment's reset()."""

    task_id: Annotated[str, Field(min_length=1)]
    split: Split
    seed: Annotated[int, Field(ge=0)]
    options: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class GymnasiumSnapshot:
    """`copied`: a deep copy of the environment, or None if it can't be copied; `actions` are then replayed."""

    task: Task
    copied: Any
    actions: tuple[str, ...]
    text: str
    mask: tuple[bool, ...] | None
    turn: int
    done: bool


class GymnasiumTextEnvironment:
    """One Gymnasium environment behind this project's protocol."""

    def __init__(self, domain: GymnasiumTextDomain) -> None:
        self.domain = domain
        self._env = domain.make_gymnasium()
        self._names = domain.names_of(self._env)
        self._copyable = True
        self._task: Task | None = None
        self._actions: tuple[str, ...] = ()
        self._text = ""
        self._mask: tuple[bool, ...] | None = None
        self._turn = 0
        self._done = False

    def reset(self, task: Task) -> Observation:
        observation, info = self._env.reset(seed=task.seed, options=dict(task.spec.get("options", {})))
        self._task, self._actions, self._turn, self._done = task, (), 0, False
        self._note(observation, info)
        return Observation(self._text)

    def step(self, action: str) -> Step:
        self._running()
        if self._done:
            raise RuntimeError("the episode is over; call reset(task) or restore(state)")
        self._turn += 1
        last = self._turn >= self.domain.settings.max_turns
        native = self._native(action)
        if native is None:
            self._done = last
            return Step(Observation(self._refusal()), 0.0, False, False, last, cost=1.0)
        observation, reward, terminated, truncated, info = self._env.step(native)
        self._actions = (*self._actions, action)
        self._note(observation, info)
        truncated = not terminated and (truncated or last)
        self._done = bool(terminated or truncated)
        return Step(
            observation=Observation(self._text),
            reward=self.domain.map_reward(float(reward)),
            accepted=bool(info.get("accepted", True)),
            terminated=bool(terminated),
            truncated=bool(truncated),
            cost=1.0,
        )

    def snapshot(self) -> GymnasiumSnapshot:
        task = self._running()
        return GymnasiumSnapshot(task, self._copy(self._env), self._actions, self._text, self._mask, self._turn, self._done)

    def restore(self, state: GymnasiumSnapshot) -> None:
        """Raises RuntimeError if the environment can't be copied and does not replay to the same observation."""
        if state.copied is not None:
            self._env = copy.deepcopy(state.copied)
        else:
            self._replay(state)
        self._task, self._actions, self._text, self._mask = state.task, state.actions, state.text, state.mask
        self._turn, self._done = state.turn, state.done

    def state_key(self) -> str:
        """The environment's own key, or else a hash of the observation."""
        self._running()
        if own := self._method("state_key"):
            return str(own())
        return hashlib.blake2b(self._text.encode(), digest_size=8).hexdigest()

    def admissible(self) -> Sequence[str]:
        self._running()
        if self._done:
            return ()
        if own := self._method("admissible"):
            return tuple(sorted(own()))
        mask = self._mask or (True,) * len(self._names)
        return tuple(sorted(name for name, allowed in zip(self._names, mask, strict=True) if allowed))

    def expert_action(self) -> str | None:
        """The next action of the environment's own expert; None if it has none or the episode is over."""
        self._running()
        own = self._method("expert_action")
        return own() if own and not self._done else None

    def close(self) -> None:
        self._env.close()

    def _method(self, name: str) -> Callable[[], Any] | None:
        """The unwrapped environment's method of this name, if it has one."""
        method = getattr(self._env.unwrapped, name, None)
        return method if callable(method) else None

    def _running(self) -> Task:
        if self._task is None:
            raise RuntimeError("no episode is running; call reset(task) first")
        return self._task

    def _note(self, observation: Any, info: Mapping[str, Any]) -> None:
        self._text = self.domain.describe(observation)
        mask = info.get("action_mask")
        self._mask = None if mask is None else tuple(bool(allowed) for allowed in mask)

    def _native(self, action: str) -> Any:
        """The action as an element of the environment's action space; None if it is not in it."""
        if not self._names:
            return action if self._env.action_space.contains(action) else None
        name = " ".join(action.split())
        if name not in self._names or (self._mask is not None and not self._mask[self._names.index(name)]):
            return None
        return int(getattr(self._env.action_space, "start", 0)) + self._names.index(name)

    def _refusal(self) -> str:
        return f"not an action. actions: {'; '.join(self.admissible())}." if self._names else "not an action."

    def _copy(self, env: Any) -> Any:
        """A deep copy, or None if the environment has a lock, process or file, which can't be copied."""
        if self._copyable:
            try:
                return copy.deepcopy(env)
            except (TypeError, NotImplementedError, pickle.PickleError):
                self._copyable = False
        return None

    def _replay(self, state: GymnasiumSnapshot) -> None:
        self.reset(state.task)
        for action in state.actions:
            observation, _, _, _, info = self._env.step(self._native(action))
            self._note(observation, info)
        if self._text != state.text:
            raise RuntimeError(
                f"task {state.task.task_id}: the environment can't be copied, and replaying its {len(state.actions)} actions "
                "gave another observation; make it deterministic under reset(seed=...) or copyable with copy.deepcopy"
            )


class GymnasiumTextDomain:
    """Subclass it, set `name`, `prompt` and `env_id` or `factory`; override `describe`, `map_reward` or `entities` as needed."""

    name: ClassVar[str] = "gymnasium"
    Settings: ClassVar[type[GymnasiumTextSettings]] = GymnasiumTextSettings
    env_id: ClassVar[str] = ""
    factory: ClassVar[Callable[..., gymnasium.Env] | None] = None
    prompt: ClassVar[str] = ""
    action_names: ClassVar[Sequence[str]] = ()
    """Names of a `Discrete` space's actions, in order; default: the unwrapped environment's `action_names`."""

    def __init__(self, settings: GymnasiumTextSettings) -> None:
        self.settings = settings

    def make_gymnasium(self) -> gymnasium.Env:
        """A new environment. Raises ValueError if the class sets neither `env_id` nor `factory`."""
        factory = type(self).factory
        if factory is not None:
            return factory(**self.settings.kwargs)
        if not self.env_id:
            raise ValueError(f"{type(self).__name__} must set env_id (a registered Gymnasium id) or factory (a callable)")
        return gymnasium.make(self.env_id, **self.settings.kwargs)

    def names_of(self, env: gymnasium.Env) -> tuple[str, ...]:
        """Action names of a `Discrete` space; empty for `Text`. Raises TypeError for other spaces and for missing names."""
        space = env.action_space
        if isinstance(space, Text):
            return ()
        if not isinstance(space, Discrete):
            raise TypeError(f"domain '{self.name}': action space {space} is neither Text nor Discrete; wrap the environment")
        names = tuple(self.action_names or getattr(env.unwrapped, "action_names", ()))
        if len(names) != int(space.n) or len(set(names)) != len(names):
            raise TypeError(
                f"domain '{self.name}': {space} needs {int(space.n)} different action_names, not {names}; "
                f"set action_names on {type(self).__name__}"
            )
        return names

    def describe(self, observation: Any) -> str:
        """The observation as text. Raises TypeError if it is not text already."""
        if not isinstance(observation, str):
            raise TypeError(
                f"domain '{self.name}': the observation is a {type(observation).__name__}, not text; "
                f"override describe() in {type(self).__name__}"
            )
        return observation

    def map_reward(self, reward: float) -> float:
        return reward * self.settings.reward_scale

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records; every prefix keeps the proportions of the splits."""
        made = dict.fromkeys(SHARES, 0)
        for index in range(count):
            split = max(SHARES, key=lambda name: SHARES[name] * (sum(made.values()) + 1) - made[name] * sum(SHARES.values()))
            made[split] += 1
            task_seed = key64(self.name, seed, index) % 2**31
            yield {"task_id": f"{self.name}-{split}-{made[split] - 1:04d}", "split": split, "seed": task_seed, "options": {}}

    def check(self, record: Mapping[str, Any]) -> None:
        parse_record(GymnasiumRecord, record, self.name)

    def build(self, records: Sequence[Mapping[str, Any]], folder: Path, workers: int) -> list[Task]:
        """Tasks; only creates `folder`. Raises ValueError naming an invalid record."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for record in records:
            self.check(record)
        return [
            Task(
                task_id=record["task_id"],
                domain=self.name,
                split=record["split"],
                seed=record["seed"],
                prompt=self.prompt,
                spec={"options": dict(record.get("options", {}))},
                difficulty=1.0,
                cluster=record["task_id"],
            )
            for record in records
        ]

    def make(self, folder: Path) -> GymnasiumTextEnvironment:
        return GymnasiumTextEnvironment(self)

    def expert(self, environment: GymnasiumTextEnvironment) -> str | None:
        return environment.expert_action()

    def entities(self, task: Task) -> set[str]:
        """Nothing: worlds differ by seed. Override it if tasks have names that train and test must not share."""
        return set()
