"""Settings of `code` and `code_folder` (per_domain.<name>.environment in params.yaml), and raw records of `code`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from stages.environments.base_domain import below_raw, parse_record, some_weight
from stages.environments.code.families import families
from stages.environments.protocol import DomainSettings
from stages.records.task import Split
from stages.runtime.validation import Checked
from stages.sandbox.settings import SandboxSettings

Kind = Literal["list", "number", "word", "choice"]
Style = Literal["expression", "loop", "functional", "steps"]
"""A comprehension or other expression; a body with a loop or branches; map and filter; a body with intermediate variables."""


class Rewards(BaseModel):
    """Reward of an episode, by the result of its last program. CodeRL's (arXiv 2207.01780) are 1, -0.3, -0.6 and -1."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    passed: Annotated[float, Field(alias="pass", ge=1.0, le=1.0)] = 1.0
    fail: Annotated[float, Field(ge=-1.0, lt=1.0)] = 0.0
    """An assertion failed."""
    error: Annotated[float, Field(ge=-1.0, lt=1.0)] = 0.0
    """The program raised an exception or exceeded a limit."""
    compile_error: Annotated[float, Field(ge=-1.0, lt=1.0)] = 0.0

    def of(self, outcome: str) -> float:
        return self.passed if outcome == "pass" else float(getattr(self, outcome))


class ProgramSettings(DomainSettings):
    max_turns: Annotated[int, Field(ge=1, le=16)] = 1
    """Submissions. Above 1: after a program fails a shown test, the agent sees its result and may repair it; the last program, or
    the first that passes all shown tests, is graded."""
    rewards: Rewards = Rewards()
    sandbox: SandboxSettings = SandboxSettings()
    instructions: bool = False
    """Begin the prompt with the answer's format; for models that were not trained on this domain."""


class CodeSettings(ProgramSettings):
    levels: dict[Annotated[int, Field(ge=1, le=3)], Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=lambda: {1: 1.0, 2: 2.0, 3: 1.0}
    )
    """Weights of problems by their number of operations, in recipes and in curation."""
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("list", "number", "word", "choice")
    """Problems about the numbers in a list, about one or two numbers, about a word, and with a condition on a number."""
    largest_constant: Annotated[int, Field(ge=3, le=9)] = 9
    """Largest constant in a problem; the smallest is 2."""
    wording: Literal["words", "signs"] = "words"
    """Of problems: "a times 4, then minus 2", or "a, *4, -2" for small models that know no Python."""
    shown: Annotated[int, Field(ge=1, le=8)] = 2
    """Tests in the prompt."""
    hidden: Annotated[int, Field(ge=1, le=32)] = 4
    styles: Annotated[tuple[Style, ...], Field(min_length=1)] = ("expression",)
    """Styles of demonstrations; one that the task has is drawn per task."""

    _some_weight = field_validator("levels")(some_weight("levels", "{1: 1, 2: 2, 3: 1}"))


class FolderSettings(ProgramSettings):
    folder: str = "data/raw/code_folder"
    """Folder of JSON or JSON Lines files in the format of MBPP or HumanEval, relative to the repository; must be below data/raw,
    where DVC tracks it."""
    shown: Annotated[int, Field(ge=0, le=8)] = 1
    """Maximum number of tests in the prompt; HumanEval's prompts have their own examples."""

    _below_raw = field_validator("folder")(below_raw)


class Recipe(Checked):
    """A raw record of `code`: a family, the constants of its operations, and the seed of its tests."""

    task_id: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")]
    split: Split
    family: str
    constants: list[Annotated[int, Field(ge=0, le=99)]]
    seed: Annotated[int, Field(ge=0, lt=2**63)]

    @field_validator("family")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in families():
            raise ValueError(f"unknown family '{name}'")
        return name


def parse_recipe(record: Mapping[str, Any]) -> Recipe:
    """A validated raw record. Raises ValueError."""
    recipe = parse_record(Recipe, record, "code")
    family = families()[recipe.family]
    if len(recipe.constants) != len(family.pieces):
        raise ValueError(f"code record {recipe.task_id}: family {family.name} needs {len(family.pieces)} constants")
    if recipe.split != family.split:
        raise ValueError(
            f"code record {recipe.task_id}: family {family.name} belongs to split {family.split}, not {recipe.split}"
        )
    return recipe
