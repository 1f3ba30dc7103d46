"""What can be set for `code` and `code_folder` (params.yaml, per_domain.<name>.environment), and what raw records must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from stages.environments.base_domain import parse_record, some_weight
from stages.environments.code.families import families
from stages.environments.protocol import DomainSettings
from stages.records.task import Split
from stages.runtime.validation import Checked, watched
from stages.sandbox.settings import SandboxSettings

Kind = Literal["list", "number", "word", "choice"]
Style = Literal["expression", "loop", "functional", "steps"]


class Rewards(BaseModel):
    """Of an episode, by what its last program came to on all tests. CodeRL's (arXiv 2207.01780) are 1, -0.3, -0.6 and -1."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    passed: Annotated[float, Field(alias="pass", ge=1.0, le=1.0)] = 1.0
    """1: what counts as success."""
    fail: Annotated[float, Field(ge=-1.0, lt=1.0)] = 0.0
    """Some test's assert did not hold."""
    error: Annotated[float, Field(ge=-1.0, lt=1.0)] = 0.0
    """On some test the program raised something, or took too much of something."""
    compile_error: Annotated[float, Field(ge=-1.0, lt=1.0)] = 0.0

    def of(self, outcome: str) -> float:
        return self.passed if outcome == "pass" else float(getattr(self, outcome))


class ProgramSettings(DomainSettings):
    """What both domains have in common."""

    max_turns: Annotated[int, Field(ge=1, le=16)] = 1
    """Programs that may be handed in. Above 1: after a program that fails a test that is shown, the agent reads what it did there
    and may repair it; what it hands in last, or what passes all shown tests first, counts."""
    rewards: Rewards = Rewards()
    sandbox: SandboxSettings = SandboxSettings()
    instructions: bool = False
    """Say what to write before the problem; for models that were not trained on this domain."""


class CodeSettings(ProgramSettings):
    """Settings of the `code` domain, and of the recipes it writes (`python -m stages.curation raw code`)."""

    levels: dict[Annotated[int, Field(ge=1, le=3)], Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=lambda: {1: 1.0, 2: 2.0, 3: 1.0}
    )
    """Weights of problems by the operations they are made of, in recipes and among the tasks that curation takes."""
    kinds: Annotated[tuple[Kind, ...], Field(min_length=1)] = ("list", "number", "word", "choice")
    """Of problems: about the numbers in a list, about one or two numbers, about a word, about what depends on a number."""
    largest_constant: Annotated[int, Field(ge=3, le=9)] = 9
    """Of the numbers that problems name; they begin at 2."""
    wording: Literal["words", "signs"] = "words"
    """Of problems: "a times 4, then minus 2", or "a, *4, -2". Small models that never read any Python work with what they are
    shown; to know the signs of words is another skill."""
    shown: Annotated[int, Field(ge=1, le=8)] = 2
    """Tests in the prompt."""
    hidden: Annotated[int, Field(ge=1, le=32)] = 4
    styles: Annotated[tuple[Style, ...], Field(min_length=1)] = ("expression",)
    """Of demonstrations; each task's is drawn among those of these that it has. Tasks hold solutions in all styles anyway."""

    _some_weight = field_validator("levels")(some_weight("levels", "{1: 1, 2: 2, 3: 1}"))


class FolderSettings(ProgramSettings):
    """Settings of the `code_folder` domain."""

    folder: str = "data/raw/code_folder"
    """Of JSON or JSON lines files in the shape of MBPP or HumanEval, relative to the repository. Below data/raw, so that DVC sees
    when it changes."""
    shown: Annotated[int, Field(ge=0, le=8)] = 1
    """Tests in the prompt, at most; of HumanEval's problems the examples in the prompt."""

    @field_validator("folder")
    @classmethod
    def _watched(cls, name: str) -> str:
        if not watched(name):
            raise ValueError(f"is {name}; problems come from a folder below data/raw, where DVC sees them change")
        return name


class Recipe(Checked):
    """One raw record of `code`: a family, the constants of its operations, and the seed that draws its tests."""

    task_id: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")]
    split: Split
    family: str
    constants: list[Annotated[int, Field(ge=0, le=99)]]
    seed: Annotated[int, Field(ge=0, lt=2**63)]

    @field_validator("family")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in families():
            raise ValueError(f"there is no family '{name}'")
        return name


def parse_recipe(record: Mapping[str, Any]) -> Recipe:
    """A raw record, checked. Raises ValueError with one line per mistake."""
    recipe = parse_record(Recipe, record, "code")
    family = families()[recipe.family]
    if len(recipe.constants) != len(family.pieces):
        raise ValueError(f"code record {recipe.task_id}: family {family.name} has {len(family.pieces)} constants")
    if recipe.split != family.split:
        raise ValueError(
            f"code record {recipe.task_id}: family {family.name} belongs to split {family.split}, not {recipe.split}"
        )
    return recipe
