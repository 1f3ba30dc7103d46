"""Any Gymnasium environment that speaks text as a domain: subclass `GymnasiumTextDomain`, name the environment, register it.

    class GuessDomain(GymnasiumTextDomain):
        name = "guess"
        env_id = "my_package/Guess-v0"          # or: factory = staticmethod(make_environment)
        prompt = "guess the number."

    # pyproject.toml of the package that brings it
    [project.entry-points."bellwether.domains"]
    guess = "my_package:GuessDomain"

Observations are text (or made so by overriding `describe`). Actions are text, or names of a `Discrete` space's numbers. What the
unwrapped environment offers is used: `state_key()`, `admissible()`, `expert_action()`, `action_names`; so are `info["accepted"]`
and `info["action_mask"]`. Needs the extra `gymnasium`.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
from gymnasium.spaces import Discrete, Text
from pydantic import Field

from stages.environments.protocol import DomainSettings, Observation, Step
from stages.records.task import SPLITS, Split, Task
from stages.seeding import key64

SHARES: dict[Split, int] = {"train": 192, "valid": 24, "test": 200}
_RECORD_KEYS = {"task_id", "split", "seed", "options"}


class GymnasiumTextSettings(DomainSettings):
    """Subclass to add keys of your own; `kwargs` go to `gymnasium.make` or the factory."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    reward_scale: float = 1.0
    """Multiplies every reward; an episode counts as a success if the sum reaches 1."""


@dataclass(frozen=True)
class GymnasiumSnapshot:
    """`copied` holds a deep copy of the environment, or None where it can't be copied: then `actions` are played again."""

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
            raise RuntimeError("the episode is over: call reset(task) or restore(state)")
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
        """The environment's own key if it has one, else 16 hex digits of the observation."""
        self._running()
        offered = getattr(self._env.unwrapped, "state_key", None)
        if callable(offered):
            return str(offered())
        return hashlib.blake2b(self._text.encode(), digest_size=8).hexdigest()

    def admissible(self) -> Sequence[str]:
        self._running()
        if self._done:
            return ()
        offered = getattr(self._env.unwrapped, "admissible", None)
        if callable(offered):
            return tuple(sorted(offered()))
        mask = self._mask or (True,) * len(self._names)
        return tuple(sorted(name for name, allowed in zip(self._names, mask, strict=True) if allowed))

    def expert_action(self) -> str | None:
        """The next action of the environment's own expert; None if it has none or the episode is over."""
        self._running()
        offered = getattr(self._env.unwrapped, "expert_action", None)
        return offered() if callable(offered) and not self._done else None

    def close(self) -> None:
        self._env.close()

    def _running(self) -> Task:
        if self._task is None:
            raise RuntimeError("no episode is running: call reset(task) first")
        return self._task

    def _note(self, observation: Any, info: Mapping[str, Any]) -> None:
        self._text = self.domain.describe(observation)
        mask = info.get("action_mask")
        self._mask = None if mask is None else tuple(bool(allowed) for allowed in mask)

    def _native(self, action: str) -> Any:
        """The action as the environment's space has it; None if it is not in the space."""
        if not self._names:
            return action if self._env.action_space.contains(action) else None
        name = " ".join(action.split())
        if name not in self._names or (self._mask is not None and not self._mask[self._names.index(name)]):
            return None
        return int(getattr(self._env.action_space, "start", 0)) + self._names.index(name)

    def _refusal(self) -> str:
        return f"not an action. actions: {'; '.join(self.admissible())}." if self._names else "not an action."

    def _copy(self, env: Any) -> Any:
        """A deep copy, or None for an environment that holds something that can't be copied (a lock, a process, a file)."""
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
                f"task {state.task.task_id}: the environment can't be copied, and playing its {len(state.actions)} actions again "
                "led elsewhere; make it deterministic under reset(seed=...) or copyable with copy.deepcopy"
            )


class GymnasiumTextDomain:
    """Subclass it, set `name`, `prompt` and `env_id` or `factory`; override `describe`, `map_reward` or `entities` as needed."""

    name: ClassVar[str] = "gymnasium"
    Settings: ClassVar[type[GymnasiumTextSettings]] = GymnasiumTextSettings
    env_id: ClassVar[str] = ""
    factory: ClassVar[Callable[..., gymnasium.Env] | None] = None
    prompt: ClassVar[str] = ""
    action_names: ClassVar[Sequence[str]] = ()
    """Names of a `Discrete` space's actions, in order; else the unwrapped environment's `action_names`."""

    def __init__(self, settings: GymnasiumTextSettings) -> None:
        self.settings = settings

    def make_gymnasium(self) -> gymnasium.Env:
        """A new environment. Raises ValueError if the class names neither an id nor a factory."""
        factory = type(self).factory
        if factory is not None:
            return factory(**self.settings.kwargs)
        if not self.env_id:
            raise ValueError(f"{type(self).__name__} must set env_id (a registered Gymnasium id) or factory (a callable)")
        return gymnasium.make(self.env_id, **self.settings.kwargs)

    def names_of(self, env: gymnasium.Env) -> tuple[str, ...]:
        """Action names of a `Discrete` action space; empty for `Text`. Raises TypeError for other spaces and missing names."""
        space = env.action_space
        if isinstance(space, Text):
            return ()
        if not isinstance(space, Discrete):
            raise TypeError(f"domain '{self.name}': action space {space} is neither Text nor Discrete; wrap it so that it is")
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
        """Seeds, in an order of splits that keeps their proportions at every length."""
        made = dict.fromkeys(SHARES, 0)
        for index in range(count):
            split = max(SHARES, key=lambda name: SHARES[name] * (sum(made.values()) + 1) - made[name] * sum(SHARES.values()))
            made[split] += 1
            task_seed = key64(self.name, seed, index) % 2**31
            yield {"task_id": f"{self.name}-{split}-{made[split] - 1:04d}", "split": split, "seed": task_seed, "options": {}}

    def check(self, record: Mapping[str, Any]) -> None:
        name = f"{self.name} record {record.get('task_id', 'without task_id')}"
        if set(record) - _RECORD_KEYS or not {"task_id", "split", "seed"} <= set(record):
            raise ValueError(f"{name}: has the keys {sorted(record)}; needs task_id, split, seed and may have options")
        if not isinstance(record["task_id"], str) or not record["task_id"]:
            raise ValueError(f"{name}: task_id must be a text that is not empty")
        if record["split"] not in SPLITS:
            raise ValueError(f"{name}: split is {record['split']!r}; must be one of {', '.join(SPLITS)}")
        seed = record["seed"]
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"{name}: seed is {seed!r}; must be a whole number from 0")
        if not isinstance(record.get("options", {}), Mapping):
            raise ValueError(f"{name}: options must be a mapping; it goes to the environment's reset()")

    def build(self, records: Sequence[Mapping[str, Any]], folder: Path, workers: int) -> list[Task]:
        """Nothing is built; `folder` only comes to exist. Raises ValueError naming a record that is not well formed."""
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
        """No names: seeds make the worlds. Override it if tasks have names that train and test must not share."""
        return set()
