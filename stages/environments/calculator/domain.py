"""The calculator domain: settings, recipes and tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.environments.base_domain import SHARES, GradedDomain, check_fields, hashed_split, levels_in_turn, some_weight
from stages.environments.calculator.environment import CalculatorEnvironment
from stages.environments.calculator.expression import (
    Expression,
    Operation,
    apply,
    canonical,
    needed,
    operations,
    parse,
    value,
    write,
)
from stages.environments.calculator.scoring import normalize
from stages.environments.protocol import DomainSettings
from stages.records.task import SPLITS, Split, Task
from stages.seeding import stream

MAX_OPERATIONS = 5
INSTRUCTIONS = (
    "Work it out. Each turn, write one action: key <number><operator><number>, which asks the calculator, or answer <number>.\n"
)
_DRAWS = 20_000
"""Attempts to draw an expression that is new before `recipes` gives up."""
_FIELDS: dict[str, type] = {"task_id": str, "split": str, "expression": str}


class CalculatorSettings(DomainSettings):
    """Settings of the calculator domain (per_domain.calculator.environment)."""

    max_turns: Annotated[int, Field(ge=1, le=64)] = 6
    operations: dict[Annotated[int, Field(ge=0, le=MAX_OPERATIONS)], Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=lambda: {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}
    )
    """Weights of items by the number of operations that need the tool, in recipes and in curation. 0: trivial items (47*1)."""
    operators: list[Literal["+", "-", "*"]] = Field(default=["+", "-", "*"], min_length=1)
    brackets: bool = True
    smallest: Annotated[int, Field(ge=2, le=10**6)] = 2
    """Smallest operand, and smallest result of an operation; below 2, operations may be trivial."""
    largest_operand: Annotated[int, Field(ge=9, le=10**9)] = 99
    largest_result: Annotated[int, Field(ge=9, le=10**12)] = 999
    """Largest result of any operation of an item."""
    show_rest: bool = False
    """After an operation of the item, show the rest of the expression with its result (= 85-12), so that a small model need not
    look back at the question."""
    reward: Literal["exact_match", "digits", "progress"] = "exact_match"
    """`exact_match`: 1 for the correct answer. `digits`: the share of correct digits. `progress`: up to half for the operations,
    in equal shares as each is first calculated, and the rest of 1 for the correct answer."""
    instructions: bool = False
    """Begin the prompt with the available actions; for models that were not trained on this domain."""

    _some_weight = field_validator("operations")(some_weight("operations", "{0: 1, 1: 1, 2: 2, 3: 1}"))

    @model_validator(mode="after")
    def _room(self) -> CalculatorSettings:
        if self.largest_result < self.largest_operand:
            raise ValueError(f"largest_result ({self.largest_result}) is below largest_operand ({self.largest_operand})")
        if self.largest_operand < self.smallest:
            raise ValueError(f"largest_operand ({self.largest_operand}) is below smallest ({self.smallest})")
        return self


def split_of(expression: Expression) -> Split:
    """The split whose tasks may use `expression`, whatever the order of its operands."""
    return hashed_split(SHARES, "calculator.split", canonical(expression))


class CalculatorDomain(GradedDomain[CalculatorSettings]):
    name = "calculator"
    Settings = CalculatorSettings
    levels_key = "operations"

    def level(self, record: Mapping[str, Any]) -> int:
        return len(needed(parse(record["expression"])))

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records. Raises ValueError if the settings allow fewer different expressions."""
        levels = list(self.levels())
        weights = {split: [self.weights[level] for level in levels] for split in SPLITS}
        rng = stream("calculator.recipes", seed)
        seen: set[str] = set()
        for split, index, place in levels_in_turn(count, weights):
            expression = self._new_expression(levels[place], split, seen, rng)
            yield {"task_id": f"calculator-{split}-{index:06d}", "split": split, "expression": write(expression)}

    def _new_expression(self, level: int, split: Split, seen: set[str], rng: Random) -> Expression:
        for _ in range(_DRAWS):
            expression = self._draw_easy(rng) if level == 0 else self._draw(level, rng)
            if expression is None or split_of(expression) != split or canonical(expression) in seen:
                continue
            if len(needed(expression)) == level and (self.settings.brackets or "(" not in write(expression)):
                seen.add(canonical(expression))
                return expression
        raise ValueError(
            f"calculator: no more different {split} items of {level} operations; request fewer, or change "
            "per_domain.calculator.environment (largest_operand, largest_result, operators or operations)"
        )

    def _operand(self, rng: Random) -> int:
        return rng.randint(self.settings.smallest, self.settings.largest_operand)

    def _draw_easy(self, rng: Random) -> Expression:
        """A number under one or two trivial operations: the question contains the answer."""
        expression: Expression = self._operand(rng)
        for _ in range(rng.randint(1, 2)):
            operator = rng.choice(self.settings.operators)
            neutral = 1 if operator == "*" else 0
            first = operator != "-" and rng.random() < 0.5
            sides = (neutral, expression) if first else (expression, neutral)
            expression = Operation(operator, *sides)
        return expression

    def _draw(self, count: int, rng: Random) -> Expression | None:
        """A random tree of `count` operations; None if one has a result outside [smallest, largest_result]."""
        if count == 0:
            return self._operand(rng)
        split = rng.randrange(count) if self.settings.brackets else count - 1
        left, right = self._draw(split, rng), self._draw(count - 1 - split, rng)
        if left is None or right is None:
            return None
        operator = rng.choice(self.settings.operators)
        result = apply(operator, value(left), value(right))
        in_range = self.settings.smallest <= result <= self.settings.largest_result
        return Operation(operator, left, right) if in_range else None

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, _FIELDS)
        count = len(list(operations(parse(record["expression"]))))
        if not 1 <= count <= MAX_OPERATIONS:
            raise ValueError(f"'expression' must have 1 to {MAX_OPERATIONS} operations, not {count}")

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        expression = parse(record["expression"])
        prompt = f"what is {write(expression)}?"
        return Task(
            task_id=record["task_id"],
            domain=self.name,
            split=record["split"],
            seed=0,
            prompt=INSTRUCTIONS + prompt if self.settings.instructions else prompt,
            spec={"expression": write(expression), "answer": str(value(expression))},
            difficulty=float(len(needed(expression))),
            cluster=f"calculator-{canonical(expression)}",
        )

    def make(self, folder: Path) -> CalculatorEnvironment:
        return CalculatorEnvironment(self.settings.reward, self.settings.max_turns, show_rest=self.settings.show_rest)

    def answer(self, action: str) -> str | None:
        verb, _, text = action.strip().partition(" ")
        return normalize(text) if verb.lower() == "answer" and text.strip() else None

    def entities(self, task: Task) -> set[str]:
        """The expression, whatever the order of its operands."""
        return {canonical(parse(task.spec["expression"]))}
