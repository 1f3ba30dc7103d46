"""The shape of params.yaml: the only place that knows it.

`python -m stages.params` checks the file and prints what it resolves to; `--apply FILE` writes an overlay into it.
An unknown key fails with the nearest known name, a bad value with its range, a bad combination with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from stages.agent.named import CHOICES, model_names
from stages.agent.thinking import Thinking
from stages.algorithms.parts.horizon import limits
from stages.algorithms.resolve import resolve_section
from stages.algorithms.settings import Rl
from stages.command import command
from stages.files import atomic_file
from stages.merging.methods import dare, ram, slerp, ties
from stages.merging.registry import bind, check_method, own_settings
from stages.merging.settings import MergeError, MergeSettings
from stages.parameters.across import check_judges, check_launch, check_sections
from stages.parameters.annotate import Annotate
from stages.parameters.design import Design
from stages.parameters.shared import SamplingParams
from stages.resources import Resources
from stages.sections import params_hash, section_of
from stages.validation import Count, NonNegative, ParamsError, Positive, Section, Share, explain, parse_yaml, watched

ROOT = Path(__file__).resolve().parent.parent


class Lora(Section):
    """Low-rank factors are trained beside frozen weights, through peft. Without dropout: sampling and training log-probs would
    part."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    """0: no LoRA, all weights are trained."""
    alpha: Count = 32
    """Factors' product is scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers that get factors: all linear ones but the output layer, or those whose names end so."""

    @model_validator(mode="after")
    def _peft(self) -> Lora:
        if self.rank and importlib.util.find_spec("peft") is None:
            raise ValueError(
                f"rank {self.rank} needs peft, which is not installed: pip install 'bellwether[lora]', or set rank to 0"
            )
        return self


class Model(Section):
    path: str = "data/base"
    """A local `save_pretrained` folder, or a hub name (`hub:org/name`), the only thing that may download."""
    max_length: Annotated[int, Field(ge=64)] = 640
    """Longest episode in tokens."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, more time in training, the same gradient."""
    lora: Lora = Lora()
    thinking: Thinking | None = None
    """For models that reason before they act: marks around the thought, which the environment does not get. null: none, a turn is
    the action."""


class Curate(Section):
    train: Count = 192
    valid: Count = 24
    test: Annotated[int, Field(ge=2)] = 200
    expert_demonstrations: Annotated[int, Field(ge=0)] = 1
    """Per training task."""
    noisy_demonstrations: Annotated[int, Field(ge=0)] = 1
    noise: Share = 0.25
    """Chance that a noisy demonstration's action is a random admissible one."""
    near_duplicate: Share = 0.97
    """Demonstrations of one task at least this similar (token sequence ratio) count as duplicates."""
    imports: list[str] = []
    """Conversations and preference pairs from elsewhere: files below data/raw, which is what DVC watches for curate."""

    @field_validator("imports")
    @classmethod
    def _watched(cls, value: list[str]) -> list[str]:
        for name in value:
            if not watched(name) or PurePosixPath(name).suffix not in (".jsonl", ".parquet"):
                raise ValueError(f"names {name}; imports are .jsonl or .parquet files below data/raw, where DVC sees them change")
        if len(set(value)) != len(value):
            raise ValueError(f"lists a file twice: {value}")
        return value


class Sft(Section):
    demonstrations: Annotated[int, Field(ge=0)] | None = None
    """Of each domain's training tasks, drawn at random; 0: none, so that rl starts from the base model; null: all there are."""
    epochs: Positive = 4.0
    batch_tokens: Annotated[int, Field(ge=256)] = 2048
    """Tokens of whole demonstrations in one optimiser step, about."""
    learning_rate: Positive = 5e-4
    warmup: Share = 0.1
    weight_decay: NonNegative = 0.01
    max_grad_norm: Positive = 1.0
    eval_every: Count = 50
    patience: Count = 4
    checkpoint_every: Count = 100


class Rollout(Section):
    attempts: Annotated[int, Field(ge=1, le=256)] = 4
    tasks: Count = 96
    """Training tasks to try (all, if there are fewer)."""
    chunk: Count = 192
    """Episodes between checkpoints."""
    sampling: SamplingParams = SamplingParams()


class Merge(ties.Settings, dare.Settings, slerp.Settings, ram.Settings):
    """How the specialists become one model: what all methods have, and the keys of those shipped here."""

    method: str = "ram_plus"
    """A module of stages/merging/methods, or a method of another package (docs/extending.md)."""
    base: Literal["sft", "base"] = "sft"
    """What deltas are taken against."""
    weights: dict[str, Positive] = {}
    """Per domain; 1 where not given."""
    settings: dict[str, Any] = {}
    """Keys of a method that have no place in this section: those of methods from other packages."""
    out_dtype: Literal["float32", "bfloat16"] = "float32"
    shard_bytes: Annotated[int, Field(ge=1_000_000)] = 5_000_000_000

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        check_method(value)
        return value

    @model_validator(mode="after")
    def _own_keys(self) -> Merge:
        own_settings(self.method, self.model_dump(exclude={"settings"}), self.settings)
        return self


class BestOf(Section):
    n: Annotated[int, Field(ge=2, le=64)] = 5
    """Actions drawn at each turn of the models in evaluate.models that choose."""
    per_token: bool = False
    """+value, +logprob: scores per token in place of sums, which favour short actions."""


class ScaffoldParams(Section):
    """What surrounds the model while it is evaluated: stages/agent/scaffold.py."""

    window: Annotated[int, Field(ge=1)] | None = None
    """Newest turns that the model sees, with the task; null: all."""
    recall: Literal["none", "action", "task", "both"] = "none"
    """What observations end with: the action that they answer, the task, or both."""
    think: Literal["none", "plan", "reflect", "both"] = "none"
    """Turns in which the model writes and nothing is played: one at the start, one after each action that was refused, or
    both."""
    note: str = ""
    """What stands before every task."""
    max_turns: Count | None = None
    """Turns that the agent allows itself, thoughts included; null: as many as the environment does."""


class Evaluate(Section):
    models: Annotated[list[str], Field(min_length=1)] | None = None
    """Which of base, sft, rl@<domain>, merged and merged_linear play the panels; null: all of them. `<model>+q`, `<model>+value`,
    `<model>+logprob` and `<model>+vote` (see CHOICES) play the best of `best_of.n` actions that the model draws at each turn; the
    first two on the panels of those domains that have a Q-model or values."""
    best_of: BestOf = BestOf()
    attempts: Annotated[int, Field(ge=1, le=256)] = 2
    """Attempts per panel task; success is their mean, pass@k is taken from them."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    resamples: Annotated[int, Field(ge=100, le=1_000_000)] = 2000
    chunk: Count = 400
    sampling: SamplingParams = SamplingParams(temperature=0.5, top_p=0.95)
    scaffold: ScaffoldParams = ScaffoldParams()
    split: Literal["test", "valid"] = "test"
    """valid: the validation tasks in place of the frozen panels; for choosing settings without a look at the panels."""


class Report(Section):
    episodes: Annotated[int, Field(ge=0, le=1000)] = 24
    """Sample episodes per domain in the browser."""
    trees: Annotated[int, Field(ge=0, le=100)] = 3
    """Search trees per domain in the viewer."""


class PerDomain(Section):
    """One domain's settings: its environment's own keys, and what it overrides in the shared sections."""

    environment: dict[str, Any] = {}
    curate: dict[str, Any] = {}
    rollout: dict[str, Any] = {}
    annotate: dict[str, Any] = {}
    rl: dict[str, Any] = {}


class Params(Section):
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    domains: Annotated[list[str], Field(min_length=1)]
    resources: Resources = Resources()
    model: Model = Model()
    curate: Curate = Curate()
    sft: Sft = Sft()
    rollout: Rollout = Rollout()
    annotate: Annotate = Annotate()
    rl: Rl = Rl()
    merge: Merge = Merge()
    evaluate: Evaluate = Evaluate()
    design: Design = Design()
    report: Report = Report()
    per_domain: dict[str, PerDomain] = {}

    @model_validator(mode="after")
    def _domains(self) -> Params:
        if len(set(self.domains)) != len(self.domains):
            raise ValueError(f"domains lists one twice: {self.domains}")
        for domain in self.domains:
            if domain not in self.per_domain:
                raise ValueError(
                    f"domain '{domain}' has no entry in per_domain; add "
                    f"'{domain}: {{environment: {{}}, curate: {{}}, rollout: {{}}, annotate: {{}}, rl: {{}}}}' there"
                )
        if self.merge.method == "slerp" and len(self.domains) != 2:
            raise ValueError(f"merge.method slerp joins two models, and domains lists {len(self.domains)}")
        unknown = sorted(set(self.merge.weights) - set(self.domains))
        if unknown:
            raise ValueError(f"merge.weights names {unknown}, not among domains {self.domains}")
        models = model_names(self.domains)
        players = [*models, *(f"{model}+{choice}" for model in models for choice in CHOICES)]
        strange = sorted(set(self.evaluate.models or []) - set(players))
        if strange:
            raise ValueError(
                f"evaluate.models names {strange}; there are {', '.join(models)}, each also with "
                f"{', '.join(f'+{choice}' for choice in CHOICES)}"
            )
        choosing = [model for model in self.evaluate.models or [] if "+" in model]
        sampling = self.evaluate.sampling
        if choosing and (sampling.temperature == 0.0 or sampling.top_k == 1):
            raise ValueError(
                f"evaluate.models: {choosing[0]} chooses among {self.evaluate.best_of.n} actions, and evaluate.sampling with "
                f"temperature {sampling.temperature:g} and top_k {sampling.top_k} draws the same one each time: let temperature "
                f"be above 0 and top_k other than 1"
            )
        if self.evaluate.scaffold.window is not None and self.resources.engine.text:
            raise ValueError(
                "evaluate.scaffold.window cuts an episode's tokens, and resources.engine.text makes do with text; set one to "
                "null or the other to false"
            )
        if choosing and self.resources.engine.text:
            raise ValueError(
                "evaluate.models: choosing among actions needs their tokens and log-probabilities, and resources.engine.text "
                f"makes do with text; set it to false, or name models without {', '.join(f'+{choice}' for choice in CHOICES)}"
            )
        return self

    def section(self, name: str, domain: str) -> Any:
        """Section `name` with the overrides of `domain`: e.g. params.section("rl", "search") -> Rl."""
        return section_of(self, name, domain)


def parse_params(values: Mapping[str, Any], source: str = "params.yaml") -> Params:
    """Check a parsed params.yaml, every domain's overrides included. Raises ParamsError with one line per mistake."""
    try:
        params = Params.model_validate(values)
    except ValidationError as error:
        raise ParamsError(explain(error, Params, source)) from error
    for domain in params.per_domain:
        for name in ("curate", "rollout", "annotate", "rl"):
            try:
                params.section(name, domain)
            except ValidationError as error:
                raise ParamsError(explain(error, Params, f"{source}: in per_domain.{domain}", f"{name}.")) from error
    for domain in params.domains:
        try:
            resolve_section(params.section("rl", domain), params.model.max_length)
        except ParamsError as error:
            raise ParamsError(f"{source}: in rl as per_domain.{domain} has it: {error}") from error
        check_sections(params, domain, source)
    check_judges(params, source)
    try:
        bind(params.merge.method, MergeSettings.of(params.merge, params.domains))
    except MergeError as error:
        raise ParamsError(str(error)) from error
    return params


def load_params(path: Path | str = ROOT / "params.yaml") -> Params:
    """Read and check params.yaml. Raises ParamsError for a missing file, one that is no text, bad YAML or bad values."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ParamsError(f"{path} does not exist; restore it with 'git checkout params.yaml'") from error
    return parse_params(parse_yaml(data, path), path.name)


def check_domains(params: Params) -> None:
    """Raise ParamsError if a domain is not installed, its environment settings are wrong, rl.horizon goes beyond its turn limit,
    the critic has no room for its returns or annotate counts on others (needs the domain's package). Domains of `per_domain`
    that are not among `domains` are checked for all that needs no run: their names, environments and sections."""
    from stages.algorithms.parts.critic import check_returns
    from stages.environments.registry import load_domain, returns_of

    for name in params.domains:
        domain = load_domain(name, params.per_domain[name].environment)
        try:
            rl = resolve_section(params.section("rl", name))[1]
            limits(rl.horizon, domain.settings.max_turns)
            check_returns(rl, *returns_of(domain))
        except ValueError as error:
            raise ParamsError(f"params.yaml: in rl as per_domain.{name} has it: {error}") from error
        given, own = params.section("annotate", name).returns, list(returns_of(domain))
        if given != own:
            raise ParamsError(
                f"params.yaml: in per_domain.{name}: its episodes' returns lie in {own}, and annotate.returns is {given}: set "
                f"per_domain.{name}.annotate.returns to {own}"
            )
    for name in sorted(set(params.per_domain) - set(params.domains)):
        load_domain(name, params.per_domain[name].environment)


def check_model(params: Params) -> None:
    """Raise ParamsError if `model.path` is a folder that lacks what a model needs, or a model that the torch engine, which rl
    plays with, does not serve at `model.max_length`."""
    from stages.agent.policy import HUB, check_folder

    try:
        if not params.model.path.startswith(HUB):
            check_folder(ROOT / params.model.path)
    except ValueError as error:
        raise ParamsError(f"params.yaml: model.path: {error}") from error
    check_architecture(params, ROOT)


def check_architecture(params: Params, root: Path) -> None:
    """Raise ParamsError if the torch engine does not serve the model of `model.path`, as far as its configuration is at hand."""
    from stages.agent.architectures import check_path

    try:
        check_path(params.model.path, root, params.model.max_length)
    except ValueError as error:
        raise ParamsError(f"params.yaml: model.path: {error}") from error


def overlaid(path: Path, overlay: Path) -> str:
    """The text of `path` with the values of `overlay` in it, comments kept. Raises ParamsError for a file that can't be read."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    yaml_io = YAML()
    # Nothing but what was overlaid is to look different afterwards.
    yaml_io.width, yaml_io.preserve_quotes = 4096, True
    yaml_io.representer.add_representer(type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null"))

    def write_over(target: Any, values: Any) -> None:
        for key, value in values.items():
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                write_over(target[key], value)
            else:
                target[key] = value

    try:
        for file in (path, overlay):
            parse_yaml(file.read_bytes(), file, may_be_empty=file == overlay)
        values = yaml_io.load(path.read_bytes())
        write_over(values, yaml_io.load(overlay.read_bytes()) or {})
    except OSError as error:
        raise ParamsError(f"{error.filename} can't be read: {error.strerror}") from error
    except YAMLError as error:
        raise ParamsError(f"{overlay} can't be written into {path}: {error}") from error
    text = io.StringIO()
    yaml_io.dump(values, text)
    return text.getvalue()


def write_params(path: Path, text: str) -> None:
    """Replace params.yaml by `text`, all of it or nothing. A link stays a link, and the file's permissions stay as they are."""
    target = path.resolve()
    with atomic_file(target) as partial:
        partial.write_text(text, encoding="utf-8")
        shutil.copymode(target, partial)


def apply_overlay(path: Path, overlay: Path) -> None:
    """Write the values of `overlay` into params.yaml, keeping its comments. Raises ParamsError; checks no values."""
    write_params(path, overlaid(path, overlay))


def check_all(params: Params) -> None:
    """What a stage would find wrong on this machine. Raises ParamsError."""
    check_domains(params)
    check_model(params)
    check_launch(params, ROOT)


@command
def main() -> int:
    parser = argparse.ArgumentParser(description="Check params.yaml and print what it resolves to.")
    parser.add_argument("--file", type=Path, default=ROOT / "params.yaml")
    parser.add_argument(
        "--apply", type=Path, help="write an overlay, e.g. profiles/one-gpu.yaml, into the file if the result is valid"
    )
    options = parser.parse_args()
    try:
        if options.apply:
            text = overlaid(options.file, options.apply)
            params = parse_params(parse_yaml(text.encode(), options.file), f"{options.file.name} with {options.apply}")
            check_all(params)
            write_params(options.file, text)
        else:
            params = load_params(options.file)
            check_all(params)
    except (ParamsError, OSError) as error:
        unchanged = f"\n{options.file} is unchanged" if options.apply else ""
        print(f"{error}{unchanged}", file=sys.stderr)
        return 2 if isinstance(error, ParamsError) else 1
    resolved = params.model_dump(mode="json", exclude={"per_domain"})
    for domain in params.domains:
        resolved[f"per_domain.{domain}"] = {
            "environment": params.per_domain[domain].environment,
            **{name: params.section(name, domain).model_dump(mode="json") for name in ("curate", "rollout", "annotate")},
            "rl": resolve_section(params.section("rl", domain), params.model.max_length)[1].model_dump(mode="json"),
        }
    print(yaml.safe_dump(resolved, sort_keys=False, width=130), end="")
    print(f"# params hash {params_hash(params)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
