"""The domains `code` (problems drawn by seed) and `code_folder` (problems from files): recipes and tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from stages.environments.base_domain import GradedDomain, RecipeDomain, check_fields, levels_in_turn
from stages.environments.code.behaviour import behaviour
from stages.environments.code.environment import CodeEnvironment, Judge, unfenced
from stages.environments.code.families import Family, families
from stages.environments.code.fingerprint import canonical, fingerprint, phrases
from stages.environments.code.folder import FIELDS, check_problem, folder_records
from stages.environments.code.problems import Problem, known_programs, make_problem
from stages.environments.code.settings import CodeSettings, FolderSettings, ProgramSettings, parse_recipe
from stages.records.task import SPLITS, Split, Task
from stages.runtime.validation import ParamsError
from stages.sandbox import Sandbox, SandboxError
from stages.seeding import stream

INSTRUCTIONS = "Answer with the Python function {entry}({parameters}) alone: all of it, its body, or the expression it returns.\n"
REPOSITORY = Path(__file__).resolve().parents[3]
_DRAWS = 2000
"""Attempts to draw a problem that is new before `recipes` gives up."""
S = TypeVar("S", bound=ProgramSettings)


class ProgramDomain(RecipeDomain[S]):
    """The shared part of both domains."""

    @cached_property
    def _judge(self) -> Judge:
        return Judge(Sandbox(self.settings.sandbox))

    def ready(self) -> None:
        """Find a sandbox and print which. Raises ParamsError if there is none."""
        try:
            self._judge.sandbox.find()
        except SandboxError as error:
            raise ParamsError(str(error)) from error

    def make(self, folder: Path) -> CodeEnvironment:
        settings = self.settings
        return CodeEnvironment(self.name, self._judge, settings.rewards, settings.max_turns, self._styles())

    def _styles(self) -> tuple[str, ...]:
        return ()

    def returns(self) -> tuple[float, float]:
        rewards = self.settings.rewards
        return min(rewards.fail, rewards.error, rewards.compile_error), rewards.passed

    def known_actions(self, task: Task) -> list[tuple[str, float]]:
        """The task's programs and their returns; with repair only its solutions, since a mistake does not end the episode."""
        rewards, repair = self.settings.rewards, self.settings.max_turns > 1
        return [(source, rewards.of(result)) for source, result in known_programs(task.spec) if result == "pass" or not repair]

    def players(self) -> dict[str, float]:
        return {"expert": 1.0, "learner": 2.0, "novice": 1.0}

    def player_action(self, player: str, environment: CodeEnvironment, rng: Random) -> str:
        """Experts submit a solution in any style, novices near misses, and learners first a near miss and then a solution."""
        spec = environment.task.spec
        near = [one["source"] for one in spec["near_misses"]]
        erring = player == "novice" or (player == "learner" and environment.snapshot().turns == 0)
        return rng.choice(near if erring and near else [one["source"] for one in spec["references"]])

    def _prompt(self, problem: Problem, text: str) -> str:
        if not self.settings.instructions:
            return text
        return INSTRUCTIONS.format(entry=problem.entry, parameters=", ".join(problem.parameters)) + text

    def solution(self, task: Task, actions: Sequence[str]) -> str:
        """The last program, up to names and layout."""
        return canonical(unfenced(actions[-1]), task.spec["entry"], tuple(task.spec["parameters"]))

    def entities(self, task: Task) -> set[str]:
        """Fingerprints of the solutions in all styles, and phrases of the description."""
        parameters = tuple(task.spec["parameters"])
        prints = {fingerprint(one["source"], parameters) for one in task.spec["references"]}
        return {f"solution {one}" for one in prints} | {f"text {one}" for one in self._phrases(task)}

    def _phrases(self, task: Task) -> set[str]:
        return set()


class CodeDomain(ProgramDomain[CodeSettings], GradedDomain[CodeSettings]):
    name = "code"
    Settings = CodeSettings
    levels_key = "levels"

    def level(self, record: Mapping[str, Any]) -> int:
        return families()[record["family"]].level

    def recipe_kinds(self) -> set[str]:
        return {_kind(family) for split in SPLITS for found in self._families(split).values() for family in found}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        return {_kind(families()[record["family"]])}

    def _families(self, split: Split) -> dict[int, list[Family]]:
        """Level -> families of a split that the settings allow."""
        chosen = [one for one in families().values() if one.split == split and one.kind in self.settings.kinds]
        found = {level: [one for one in chosen if one.level == level] for level in self.levels()}
        return {level: some for level, some in found.items() if some}

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records. Raises ValueError if the settings allow fewer different problems."""
        choice = {split: self._families(split) for split in SPLITS}
        empty = [split for split in SPLITS if not choice[split]]
        if empty:
            raise ValueError(
                f"code: no family of {', '.join(empty)} has the levels and kinds of per_domain.code.environment; add some"
            )
        weights = {split: [self.weights[level] for level in choice[split]] for split in SPLITS}
        rng = stream("code.recipes", seed)
        seen: set[str] = set()
        owners: dict[str, Split] = {}
        for split, index, place in levels_in_turn(count, weights):
            problem = self._new_problem(split, list(choice[split].values())[place], seen, owners, rng)
            yield {"task_id": f"code-{split}-{index:06d}", "split": split, **problem}

    def _new_problem(
        self, split: Split, known: Sequence[Family], seen: set[str], owners: dict[str, Split], rng: Random
    ) -> dict[str, Any]:
        """The rest of a raw record: a problem whose prompt is not in `seen` and whose function no other split owns; adds to both.
        Raises ValueError if none is found."""
        for _ in range(_DRAWS):
            family = rng.choice(known)
            constants, seed = family.constants(rng, self.settings.largest_constant), rng.randrange(2**31)
            try:
                problem = self._problem(family, constants, seed)
            except ValueError:  # all results are equal, as for a modulo 3, then divided by 3
                continue
            prompt = prompt_of(problem)
            function = behaviour(family.kind, problem.parameters, problem.references[0][1])
            if prompt not in seen and owners.setdefault(function, split) == split:
                seen.add(prompt)
                return {"family": family.name, "constants": constants, "seed": seed}
        raise ValueError(
            f"code: no more different problems like those of family {known[0].name}; request fewer, or add levels "
            "and kinds in per_domain.code.environment"
        )

    def _problem(self, family: Family, constants: Sequence[int], seed: int) -> Problem:
        settings = self.settings
        return make_problem(family, constants, seed, settings.shown, settings.hidden, signs=settings.wording == "signs")

    def check(self, record: Mapping[str, Any]) -> None:
        parse_recipe(record)

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        """Raises ValueError if the constants allow too few different tests."""
        recipe = parse_recipe(record)
        family = families()[recipe.family]
        try:
            problem = self._problem(family, recipe.constants, recipe.seed)
        except ValueError as error:
            raise ValueError(f"record {recipe.task_id}: {error}") from error
        return Task(
            task_id=recipe.task_id,
            domain=self.name,
            split=recipe.split,
            seed=recipe.seed,
            prompt=self._prompt(problem, prompt_of(problem)),
            spec={"family": family.name, **problem.to_spec()},
            difficulty=float(family.level),
            cluster=f"code-{family.name}",
        )

    def _styles(self) -> tuple[str, ...]:
        return self.settings.styles

    def entities(self, task: Task) -> set[str]:
        """Also the family, and the solution's behaviour, which other forms of it share."""
        found = {f"family {task.spec['family']}", *super().entities(task)}
        family = families().get(task.spec["family"])
        if family:
            found.add(f"function {behaviour(family.kind, task.spec['parameters'], task.spec['references'][0]['source'])}")
        return found


class CodeFolderDomain(ProgramDomain[FolderSettings]):
    name = "code_folder"
    Settings = FolderSettings

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """The folder's first `count` problems. Raises ValueError or FileNotFoundError."""
        yield from folder_records(REPOSITORY / self.settings.folder, self.settings.shown)[:count]

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, FIELDS)
        check_problem(record)

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        """Raises ValueError if the problem's own solution fails its tests in the sandbox."""
        problem = Problem(
            entry=record["entry"],
            parameters=tuple(record["parameters"]),
            text=record["text"],
            shown=tuple(record["shown"]),
            hidden=tuple(record["hidden"]),
            references=(("given", record["solution"]),),
            context=record["context"],
        )
        task = Task(
            task_id=record["task_id"],
            domain=self.name,
            split=record["split"],
            seed=0,
            prompt=self._prompt(problem, record["prompt"]),
            spec=problem.to_spec(),
            difficulty=1.0,
            cluster=f"code-{fingerprint(record['solution'], problem.parameters)}",
        )
        outcome = self._judge.outcome(task, record["solution"])
        if not outcome.passed:
            failed = next((one for one in outcome.results if one.verdict != "pass"), None)
            why = f"{failed.verdict}: {failed.message}" if failed else f"{outcome.status}: {outcome.message}"
            raise ValueError(f"record {record['task_id']}: its own solution does not pass its tests ({why})")
        return task

    def _phrases(self, task: Task) -> set[str]:
        return phrases(task.spec["text"])


def _kind(family: Family) -> str:
    return f"{family.kind} of level {family.level}"


def prompt_of(problem: Problem) -> str:
    """ "f(a): the sum of the numbers in a above 3; f([1, 4, 5]) is 9, f([2]) is 0"."""
    shown = ", ".join(test.removeprefix("assert ").replace(" == ", " is ") for test in problem.shown)
    return f"{problem.entry}({', '.join(problem.parameters)}): {problem.text}; {shown}"
