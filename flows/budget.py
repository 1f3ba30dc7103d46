"""Ways to split a fixed budget between demonstrations and episodes, as a Prefect flow:
`python -m flows.budget --total 6400 --demo-cost 10 --demos 0 160 320 640`.

A demonstration costs as much as `demo_cost` episodes ("A Practitioner's Guide to Multi-turn Agentic RL", arXiv 2510.01132); the
rest of the total is spent on episodes of reinforcement learning. flows/compare.py compares the splits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field, model_validator

from flows import arguments, forms
from flows.compare import Comparison, Setting, compare, expanded
from flows.pipeline import read_params
from flows.process import ROOT, StageFailedError
from stages.runtime.command import command, whole_number
from stages.runtime.yaml_files import value_at

SIZES = {"tasks_per_step": 16, "group_size": 8}
"""Keys of section rl whose product is the episodes of a training step, with their defaults."""


class Split(BaseModel):
    """One split of the budget."""

    model_config = ConfigDict(extra="forbid")

    demos: int = Field(ge=0, description="Demonstrations per domain; 0: reinforcement learning alone.")
    episodes: int = Field(ge=0, description="Episodes per domain; 0: supervised learning alone.")


class Budget(BaseModel):
    """`total_units` = demos * demo_cost + episodes for every split."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("budget", pattern=r"^[a-z0-9_-]+$", description="Name of the files in reports/comparisons.")
    total_units: int = Field(6400, ge=1, description="The budget per domain, in episodes.")
    demo_cost: int = Field(10, ge=1, description="Episodes that one demonstration costs.")
    splits: list[Split] = Field(default_factory=list, description="Empty: 0, 1/4, 1/2 and all of the budget on demonstrations.")
    seeds: forms.Seeds = Field(default_factory=lambda: list(range(5)))
    overrides: list[str] = Field(default_factory=list, description="Changes of params.yaml for all splits.")
    jobs: int | None = Field(None, ge=1, le=arguments.MOST_RUNS, description="Experiments at a time; empty: one per core.")

    @model_validator(mode="after")
    def _spent(self) -> Budget:
        if not self.splits:
            shares = (0, 1, 2, 4)
            self.splits = [self.split(self.total_units * share // (4 * self.demo_cost)) for share in shares]
        for split in self.splits:
            spent = split.demos * self.demo_cost + split.episodes
            if spent != self.total_units:
                raise ValueError(
                    f"{split.demos} demonstrations * {self.demo_cost} + {split.episodes} episodes are {spent} units, and the "
                    f"budget is {self.total_units}"
                )
        if len({split.demos for split in self.splits}) != len(self.splits) or len(self.splits) < 2:
            raise ValueError("a budget is compared over at least two different splits")
        return self

    def split(self, demos: int) -> Split:
        """`demos` demonstrations, and the rest spent on episodes. Raises ValueError if they exceed the budget."""
        left = self.total_units - demos * self.demo_cost
        if left < 0:
            raise ValueError(f"{demos} demonstrations * {self.demo_cost} units exceed the budget of {self.total_units} units")
        return Split(demos=demos, episodes=left)


def episodes_per_step(params: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, int]:
    """Episodes that a training step plays: of section rl (""), and of every domain that has another number."""
    given = dict(change.split("=", 1) for override in overrides for change in expanded(override, params))

    def episodes(*sections: str) -> int:
        found = 1
        for key, value in SIZES.items():
            for section in sections:
                name = f"{section}.{key}"
                value = given.get(name, value_at(params, name, value))
            found *= int(value)
        return found

    usual = episodes("rl")
    of_domains = {domain: episodes("rl", f"per_domain.{domain}.rl") for domain in params["domains"]}
    return {"": usual, **{domain: count for domain, count in of_domains.items() if count != usual}}


def setting_of(split: Split, overrides: list[str], per_step: Mapping[str, int]) -> Setting:
    """The split as a setting: its episodes rounded to whole training steps, by `episodes_per_step`. Without episodes the SFT
    policy is scored."""
    spent = [f"sft.demonstrations={split.demos}"]
    for domain, episodes in per_step.items():
        key = f"per_domain.{domain}.rl.steps" if domain else "rl.steps"
        spent.append(f"{key}={max(1, round(split.episodes / episodes))}")
    return Setting(overrides=[*overrides, *spent], model="specialist" if split.episodes else "sft")


def comparison_of(budget: Budget, params: Mapping[str, Any]) -> Comparison:
    """The comparison of the budget's splits; `params`: params.yaml."""
    per_step = episodes_per_step(params, budget.overrides)
    settings = {
        f"{split.demos} demos + {split.episodes} episodes": setting_of(split, budget.overrides, per_step)
        for split in budget.splits
    }
    return Comparison(name=budget.name, settings=settings, seeds=budget.seeds, jobs=budget.jobs)


@flow(name="budget")
def budget(budget: Budget = Budget(), root: str = "") -> str:  # noqa: B008
    """Compare ways to spend a fixed budget on demonstrations and episodes; returns the path of the table.

    Args:
        budget: The total, what a demonstration costs, and the splits.
        root: The checkout; empty: that of this flow.
    """
    return compare(comparison_of(budget, read_params(Path(root or ROOT))), root)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.budget", description="Compare ways to spend a fixed budget.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes of params.yaml for all splits")
    parser.add_argument("--total", type=whole_number(1), default=6400, help="units, in episodes per domain")
    parser.add_argument("--demo-cost", type=whole_number(1), default=10, help="episodes that one demonstration costs")
    parser.add_argument("--demos", type=int, nargs="+", help="demonstrations of each split; the rest is spent on episodes")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)), help="values of rl.seed")
    parser.add_argument("--name", default="budget", help="name of the files in reports/comparisons")
    parser.add_argument("--jobs", type=arguments.runs_at_once, help="experiments at a time")
    options = parser.parse_args()
    try:
        units = Budget(total_units=options.total, demo_cost=options.demo_cost)
        splits = [units.split(demos) for demos in options.demos] if options.demos else []
        given = {"name": options.name, "seeds": options.seeds, "overrides": options.overrides, "jobs": options.jobs}
        budget(Budget(total_units=options.total, demo_cost=options.demo_cost, splits=splits, **given))
    except (StageFailedError, ValueError) as error:
        print(f"budget: {forms.mistakes(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
