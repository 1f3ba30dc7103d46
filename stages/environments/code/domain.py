"""The domains `code` (problems made by seed) and `code_folder` (problems from files): settings, recipes, tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from stages.environments.base_domain import Mix, RecipeDomain, check_fields, splits_in_turn
from stages.environments.code.behaviour import behaviour
from stages.environments.code.environment import CodeEnvironment, Judge, unfenced
from stages.environments.code.families import Family, families
from stages.environments.code.fingerprint import canonical, fingerprint, phrases
from stages.environments.code.folder import FIELDS, check_problem, folder_records
from stages.environments.code.problems import Problem, make_problem, stored_programs
from stages.environments.code.settings import CodeSettings, FolderSettings, ProgramSettings, parse_recipe
from stages.records.task import SPLITS, Split, Task
from stages.runtime.validation import ParamsError
from stages.sandbox import Sandbox, SandboxError
from stages.seeding import stream

INSTRUCTIONS = "Answer with the Python function {entry}({parameters}) alone: all of it, its body, or the expression it returns.\n"
REPOSITORY = Path(__file__).resolve().parents[3]
_DRAWS = 2000
"""Tries for one more problem that is new, before the recipes give up."""
S = TypeVar("S", bound=ProgramSettings)


class ProgramDomain(RecipeDomain[S]):
    """What both domains have in common."""

    @cached_property
    def _judge(self) -> Judge:
        return Judge(Sandbox(self.settings.sandbox))

    def ready(self) -> None:
        """Finds and announces where programs will run. Raises ParamsError if that is nowhere."""
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
        """The smallest and the largest return of an episode."""
        rewards = self.settings.rewards
        return min(rewards.fail, rewards.error, rewards.compile_error), rewards.passed

    def known_actions(self, task: Task) -> list[tuple[str, float]]:
        """The programs that come with the task, in all styles and with all mistakes, and their returns: the off-policy set. Where
        there are turns to repair in, a mistake is no end, and only solutions are given."""
        whole = self.settings.max_turns == 1
        rewards = self.settings.rewards
        return [(source, rewards.of(told)) for source, told in stored_programs(task.spec) if whole or told == "pass"]

    def players(self) -> dict[str, float]:
        """Who has written the programs that come with the tasks -> weight of their games."""
        return {"expert": 1.0, "learner": 2.0, "novice": 1.0}

    def player_action(self, player: str, environment: CodeEnvironment, rng: Random) -> str:
        """The next program of a player: experts hand in a solution of any style, novices near misses of any kind, and learners a
        near miss first and then, where there are turns to repair it in, a solution."""
        spec = environment.task.spec
        near = [one["source"] for one in spec["near_misses"]]
        erring = player == "novice" or (player == "learner" and environment.snapshot().turns == 0)
        return rng.choice(near if erring and near else [one["source"] for one in spec["references"]])

    def _prompt(self, problem: Problem, text: str) -> str:
        if not self.settings.instructions:
            return text
        return INSTRUCTIONS.format(entry=problem.entry, parameters=", ".join(problem.parameters)) + text

    def solution(self, task: Task, actions: Sequence[str]) -> str:
        """The last program, but for names and layout: what it was repaired from is no part of a solution."""
        return canonical(unfenced(actions[-1]), task.spec["entry"], tuple(task.spec["parameters"]))

    def entities(self, task: Task) -> set[str]:
        """Fingerprints of the solutions in all styles, and the words of the description: what train and test must not share."""
        parameters = tuple(task.spec["parameters"])
        prints = {fingerprint(one["source"], parameters) for one in task.spec["references"]}
        return {f"solution {one}" for one in prints} | {f"text {one}" for one in self._phrases(task)}

    def _phrases(self, task: Task) -> set[str]:
        return set()


class CodeDomain(ProgramDomain[CodeSettings]):
    """See stages.environments.protocol.Domain."""

    name = "code"
    Settings = CodeSettings

    def difficulty_weights(self) -> dict[float, float]:
        """Difficulty (operations of a problem) -> weight among the tasks that curation takes."""
        return {float(level): weight for level, weight in sorted(self.settings.levels.items())}

    def record_difficulty(self, record: Mapping[str, Any]) -> float:
        return float(families()[record["family"]].level)

    def recipe_kinds(self) -> set[str]:
        return {kind for split in SPLITS for level, found in self._families(split).items() for kind in map(_kind, found) if level}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        return {_kind(families()[record["family"]])}

    def _families(self, split: Split) -> dict[int, list[Family]]:
        """Level -> families of a split that the settings ask for."""
        levels = [level for level, weight in sorted(self.settings.levels.items()) if weight > 0]
        chosen = [one for one in families().values() if one.split == split and one.kind in self.settings.kinds]
        found = {level: [one for one in chosen if one.level == level] for level in levels}
        return {level: named for level, named in found.items() if named}

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records; splits take turns in the proportion 192 : 24 : 200, and levels within each by weight.

        Raises ValueError where the settings do not give so many different problems.
        """
        choice = {split: self._families(split) for split in SPLITS}
        empty = [split for split in SPLITS if not choice[split]]
        if empty:
            raise ValueError(
                f"code: no family of {', '.join(empty)} has the levels and kinds of per_domain.code.environment; name more"
            )
        mixes = {split: Mix([self.settings.levels[level] for level in choice[split]]) for split in SPLITS}
        rng = stream("code.recipes", seed)
        seen: set[str] = set()
        owners: dict[str, Split] = {}
        for split, index in splits_in_turn(count):
            level = list(choice[split])[mixes[split].next()]
            yield {
                "task_id": f"code-{split}-{index:06d}",
                "split": split,
                **self._new_problem(split, choice[split][level], seen, owners, rng),
            }

    def _new_problem(
        self, split: Split, known: Sequence[Family], seen: set[str], owners: dict[str, Split], rng: Random
    ) -> dict[str, Any]:
        """The rest of a raw record: a problem whose prompt is not in `seen`, and whose function no other split owns; both learn
        of it. Raises ValueError if there seems to be none."""
        for _ in range(_DRAWS):
            family = rng.choice(known)
            constants, seed = family.constants(rng, self.settings.largest_constant), rng.randrange(2**31)
            try:
                problem = self._problem(family, constants, seed)
            except ValueError:  # some constants make a problem of one answer: a modulo 3, then divided by 3
                continue
            prompt = prompt_of(problem)
            does = behaviour(family.kind, problem.parameters, problem.references[0][1])
            if prompt not in seen and owners.setdefault(does, split) == split:
                seen.add(prompt)
                return {"family": family.name, "constants": constants, "seed": seed}
        raise ValueError(
            f"code: no more different problems like those of family {known[0].name}; ask for fewer, or name more levels "
            "and kinds in per_domain.code.environment"
        )

    def _problem(self, family: Family, constants: Sequence[int], seed: int) -> Problem:
        settings = self.settings
        return make_problem(family, constants, seed, settings.shown, settings.hidden, signs=settings.wording == "signs")

    def check(self, record: Mapping[str, Any]) -> None:
        parse_recipe(record)

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        """Specs hold all there is. Raises ValueError where the constants leave too few different tests."""
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
        """Beside those of all programs the family, and what the solution gives, which another form of it gives too."""
        found = {f"family {task.spec['family']}", *super().entities(task)}
        family = families().get(task.spec["family"])
        if family:
            found.add(f"function {behaviour(family.kind, task.spec['parameters'], task.spec['references'][0]['source'])}")
        return found


class CodeFolderDomain(ProgramDomain[FolderSettings]):
    """See stages.environments.protocol.Domain."""

    name = "code_folder"
    Settings = FolderSettings

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """The folder's problems, `count` at most, in the order of files and lines. Raises ValueError or FileNotFoundError."""
        yield from folder_records(REPOSITORY / self.settings.folder, self.settings.shown)[:count]

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, FIELDS)
        check_problem(record)

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        """Raises ValueError for a problem whose own solution does not pass its tests in the sandbox."""
        references = (("given", record["solution"]),)
        problem = Problem(
            entry=record["entry"],
            parameters=tuple(record["parameters"]),
            text=record["text"],
            shown=tuple(record["shown"]),
            hidden=tuple(record["hidden"]),
            references=references,
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
