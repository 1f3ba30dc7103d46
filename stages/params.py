"""params.yaml: its sections, and the checks that need more than one of them.

`python -m stages.params` checks the file and prints what it resolves to; `--explain rl.loss` explains a key or a section,
`--apply FILE` writes an overlay into the file, and `--migrate` updates a file of an earlier release.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from stages.agent.model_names import ENVIRONMENTS, SEARCH, SELECTORS, VARIANTS, evaluated_domains, model_names
from stages.agent.settings import Model, Rollout
from stages.algorithms.card import Composition
from stages.algorithms.domains import check_domain
from stages.algorithms.parts.horizon import limits
from stages.algorithms.registry import composition, learns_token_values
from stages.algorithms.resolve import contradictions, resolve_section, turn_contradictions
from stages.algorithms.settings import Rl
from stages.annotation.derived import backbone_contradictions
from stages.annotation.settings import Annotate
from stages.constraints.checks import contradiction
from stages.curation.settings import Curate
from stages.curation.thoughts import thought_contradictions
from stages.evaluation.scorers import variant_domains
from stages.evaluation.search_returns import check_search
from stages.evaluation.settings import Evaluate, check_attribution, reader_of_histories
from stages.merging.contract import MergeError
from stages.merging.settings import Merge
from stages.records.sections import params_hash, section_of
from stages.runtime.command import command
from stages.runtime.files import atomic_text
from stages.runtime.listed_keys import check_listed
from stages.runtime.overlay import migrate, overlaid, write_params
from stages.runtime.resources import Resources
from stages.runtime.schema import explain_key, json_schema, page
from stages.runtime.unshardable import LORA
from stages.runtime.validation import ParamsError, Section, explain, guess, parse_yaml, read_settings
from stages.training.sft.settings import Sft

ROOT = Path(__file__).resolve().parent.parent
P = TypeVar("P", bound="Params")

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PREDICATE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

SHIPPED_PATTERNS = ("loop", "repeated_query", "refused_in_a_row", "gave_up", "ran_out", "answer_without_search")
"""Names of the shipped patterns; see stages/reporting/viewer/patterns.py."""


class OwnPattern(Section):
    """What to look for in every episode: either `regex` or `predicate`."""

    regex: str | None = None
    """A Python regular expression, searched for in the text of each turn; (?i) at its start ignores case."""
    where: Literal["action", "observation", "message"] = "action"
    """regex: the text that is searched; `message` is the policy's whole message with its thoughts."""
    predicate: str | None = None
    """`module:function`, importable from the checkout. It gets an episode as a mapping with the columns of the episodes table
    (`turns`, `messages`, `reward_terms`, ...) and returns True or False, or the numbers of the turns, from 1."""
    domains: list[str] = []
    """Domains in which it is looked for; empty: all."""
    about: str = ""
    """One line for readers of the report."""

    @model_validator(mode="after")
    def _one_of_two(self) -> OwnPattern:
        if (self.regex is None) == (self.predicate is None):
            raise ValueError("needs either regex or predicate")
        if self.regex is not None:
            try:
                re.compile(self.regex)
            except re.error as error:
                raise ValueError(f"regex is not a regular expression of Python: {error}") from error
        if self.predicate is not None and not _PREDICATE.fullmatch(self.predicate):
            raise ValueError(f"predicate must be module:function, such as my_patterns:asks_twice, not {self.predicate!r}")
        return self


class Report(Section):
    """What reports/report.html and the viewer of episodes beside it show."""

    episodes: Annotated[int, Field(ge=0, le=1000)] = 24
    """Sample episodes per domain on the page itself; reports/episodes has all."""
    trees: Annotated[int, Field(ge=0, le=100)] = 3
    """Search trees per domain in the viewer."""
    patterns: Annotated[dict[str, OwnPattern], Field(exclude_if=lambda patterns: not patterns)] = {}
    """Own patterns by name, which are counted in all episodes besides the shipped ones: docs/results.md."""
    state_values: Annotated[bool, Field(exclude_if=lambda on: on)] = True
    """Whether the step-value model of annotate values the states of all episodes, for the viewer."""

    @model_validator(mode="after")
    def _names(self) -> Report:
        for name in self.patterns:
            if not _NAME.fullmatch(name):
                raise ValueError(f"patterns: {name!r} must be lower-case letters, digits and underscores, starting with a letter")
            if name in SHIPPED_PATTERNS:
                raise ValueError(f"patterns: {name!r} is a shipped pattern; choose another name")
        return self


class PerDomain(Section):
    """Settings of one domain: of its environment, and overrides of the sections of the same name."""

    environment: dict[str, Any] = {}
    """The environment's own keys: docs/environments.md."""
    curate: dict[str, Any] = {}
    """Overrides of `curate`."""
    rollout: dict[str, Any] = {}
    """Overrides of `rollout`."""
    annotate: dict[str, Any] = {}
    """Overrides of `annotate`."""
    rl: dict[str, Any] = {}
    """Overrides of `rl`, such as {steps: 40}."""


class Params(Section):
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of all random draws; `rl.seed` can replace it for rl."""
    domains: Annotated[list[str], Field(min_length=1)]
    """Environments that are trained and evaluated; each needs an entry in `per_domain`."""
    resources: Resources = Resources()
    model: Model = Model()
    curate: Curate = Curate()
    sft: Sft = Sft()
    rollout: Rollout = Rollout()
    annotate: Annotate = Annotate()
    rl: Rl = Rl()
    merge: Merge = Merge()
    evaluate: Evaluate = Evaluate()
    report: Report = Report()
    per_domain: dict[str, PerDomain] = {}

    @model_validator(mode="after")
    def _domains(self) -> Params:
        if len(set(self.domains)) != len(self.domains):
            raise ValueError(f"domains lists one twice: {self.domains}")
        if both := sorted(set(self.evaluate.transfer) & set(self.domains)):
            raise ValueError(f"evaluate.transfer lists {both[0]}, which is trained on; take it out of one of them")
        for domain in (*self.domains, *self.evaluate.transfer):
            if domain not in self.per_domain:
                raise ValueError(
                    f"domain '{domain}' has no entry in per_domain{guess(domain, self.per_domain)}; add "
                    f"'{domain}: {{environment: {{}}, curate: {{}}, rollout: {{}}, annotate: {{}}, rl: {{}}}}' there"
                )
        unknown = sorted(set(self.merge.weights) - set(self.domains))
        if unknown:
            raise ValueError(f"merge.weights names {unknown}, which domains does not list: {self.domains}")
        return self

    @model_validator(mode="after")
    def _models(self) -> Params:
        models, selectors = model_names(self.domains), ", ".join(f"+{name}" for name in SELECTORS)
        known = [*models, *(f"{model}+{name}" for model in models for name in VARIANTS)]
        unknown = sorted(set(self.evaluate.models or []) - set(known))
        if unknown:
            raise ValueError(
                f"evaluate.models names {unknown}; there are {', '.join(models)}, each also with "
                f"{selectors}, {', '.join(f'+{name}' for name in VARIANTS if name not in SELECTORS)}"
            )
        how = {model: model.partition("+")[2] for model in self.evaluate.models or []}
        best_of, chosen = (next((model for model in how if how[model] in of), None) for of in (SELECTORS, (*SELECTORS, SEARCH)))
        sampling, text = self.evaluate.sampling, self.resources.engine.text
        if best_of and (sampling.temperature == 0.0 or sampling.top_k == 1):
            raise ValueError(
                f"evaluate.models: {best_of} chooses among {self.evaluate.best_of.n} actions, and evaluate.sampling with "
                f"temperature {sampling.temperature:g} and top_k {sampling.top_k} draws the same one each time: set temperature "
                f"above 0 and top_k other than 1"
            )
        if self.evaluate.scaffold.window is not None and text:
            needs = "evaluate.scaffold.window needs token ids, which resources.engine.text: true does without"
            raise ValueError(f"{needs}; set window to null or text to false")
        if chosen and text:
            raise ValueError(
                f"evaluate.models: {chosen} needs token ids and log-probabilities, which resources.engine.text: true does "
                f"without; set text to false, or list models without {selectors}, +{SEARCH}"
            )
        return self

    def section(self, name: str, domain: str) -> Any:
        """Section `name` with the overrides of `domain`: e.g. params.section("rl", "search") -> Rl."""
        return section_of(self, name, domain)


def parse_params(values: Mapping[str, Any], source: str = "params.yaml") -> Params:
    """Check a parsed params.yaml, every domain's overrides included. Raises ParamsError with one line per mistake."""
    return parse_as(Params, values, source)


def parse_as(shape: type[P], values: Mapping[str, Any], source: str) -> P:
    """`parse_params` for a subclass of Params, which adds sections."""
    try:
        params = shape.model_validate(values)
    except ValidationError as error:
        raise ParamsError(explain(error, shape, source)) from error
    for domain in params.per_domain:
        for name in ("curate", "rollout", "annotate", "rl"):
            try:
                params.section(name, domain)
            except ValidationError as error:
                raise ParamsError(explain(error, Params, f"{source}: in per_domain.{domain}", f"{name}.")) from error
    teams = {}
    for domain in params.domains:
        try:
            method, rl = resolve_section(params.section("rl", domain), params.model.max_length)
        except ParamsError as error:
            raise ParamsError(f"{source}: in rl with per_domain.{domain}: {error}") from error
        cross_checks(params, domain, source, method, rl)
        teams[domain] = [member.role for member in rl.team.members]
    check_attribution(params.evaluate.attribution, teams, source)
    check_selectors(params, source)
    try:
        params.merge.bind(params.domains)
    except MergeError as error:
        raise ParamsError(f"{source}: {error}") from error
    return params


def cross_checks(params: Params, domain: str, source: str, method: Composition, rl: Rl) -> None:
    """Raise ParamsError where sections of `domain`, each valid by itself, contradict one another. `rl`: resolved."""
    section, merge, own = partial(_section, params, domain), params.merge, params.per_domain[domain]
    problems = [
        *contradictions(method, rl, section),
        *(turn_contradictions(method, rl, merge.method) if merge.takes_turns and len(params.domains) > 1 else ()),
        *backbone_contradictions(section("annotate"), params.resources.engine.kind),
        *thought_contradictions(section("curate").thoughts, params.model.thinking, domain, own.environment),
    ]
    for problem in problems:
        raise ParamsError(f"{source}: in per_domain.{domain}: {problem}")


def _section(params: Params, domain: str, name: str) -> Any:
    return params.section(name, domain) if name in PerDomain.model_fields else getattr(params, name)


def check_selectors(params: Params, source: str) -> None:
    """Raise ParamsError where a model of evaluate.models chooses actions by a model that no domain trains."""
    sections = [(params.section("annotate", domain), params.section("rl", domain).algorithm) for domain in params.domains]
    algorithms = ", ".join(sorted({algorithm for _, algorithm in sections}))
    lacking = {}
    if all(annotate.q_model.kind == "none" for annotate, _ in sections):
        lacking["q"] = "a Q-model, and annotate.q_model.kind is none: set it to step_dpo or regression, and tasks above 0"
    if not any(learns_token_values(composition(algorithm)) for _, algorithm in sections):
        lacking["value"] = f"token values, and rl.algorithm is {algorithms}: set it to b_coder, or leave out models with +value"
    if not any(params.section("rl", domain).preference.reward_model for domain in params.domains):
        lacking["reward"] = "a reward model, and rl.preference.reward_model is false: set it to true, with a method of pairs"
    for model in params.evaluate.models or []:
        selector = model.partition("+")[2]
        if selector in ENVIRONMENTS and not variant_domains(params.domains, selector):
            (key,) = ENVIRONMENTS[selector]
            raise ParamsError(
                f"{source}: evaluate.models: {model} plays with {key}: {ENVIRONMENTS[selector][key]}, and none of "
                f"{', '.join(params.domains)} has a setting {key}: add search to domains, or leave it out"
            )
        if selector in lacking:
            raise ParamsError(f"{source}: evaluate.models: {model} needs {lacking[selector]}")


def check_launch(params: Params, root: Path) -> None:
    """Raise ParamsError if the file that `resources.launch` names does not exist, or is FSDP's and rl can't use it."""
    config = params.resources.launch
    if config is None:
        return
    if not (root / config).is_file():
        raise ParamsError(
            f"params.yaml: resources.launch: {config} does not exist; name a file of `accelerate config`, such as "
            "profiles/accelerate/ddp.yaml, or null for one process"
        )
    values = yaml.safe_load((root / config).read_text(encoding="utf-8"))
    if not isinstance(values, dict) or values.get("distributed_type") != "FSDP":
        return
    for domain in params.domains:
        if problem := LORA if params.model.lora.rank else resolve_section(params.section("rl", domain))[1].unshardable:
            raise ParamsError(f"params.yaml: in per_domain.{domain}, with resources.launch: {config}: {problem}")


def load_params(path: Path | str = ROOT / "params.yaml") -> Params:
    """Read and check params.yaml. Raises ParamsError for a missing file, one that is no text, bad YAML or bad values."""
    return parse_params(read_settings(Path(path)), Path(path).name)


def check_domains(params: Params) -> None:
    """Raise ParamsError if a domain is not installed or its environment's settings are wrong, or if rl.horizon, the critic's head
    or annotate.returns do not fit the environment. Domains that only `per_domain` lists are checked as far as they go without."""
    from stages.algorithms.hidden import check_hidden
    from stages.algorithms.parts.critic import check_returns
    from stages.annotation.derived import check_trees
    from stages.environments.registry import load_domain, returns_of
    from stages.evaluation.own_patterns import check_patterns

    check_patterns(params.report.patterns, evaluated_domains(params))
    for name in params.domains:
        domain = load_domain(name, params.per_domain[name].environment)
        if problem := contradiction(params, domain.settings.constraint, name):
            raise ParamsError(f"params.yaml: in per_domain.{name}: {problem}")
        try:
            method, rl = resolve_section(params.section("rl", name))
            check_domain(method, rl, domain, reader_of_histories(params.evaluate, params.resources.engine.text))
            limits(rl.horizon, domain.settings.max_turns)
            check_hidden(rl, method.data, domain, params.section("annotate", name))
            check_returns(rl, *returns_of(domain))
        except ValueError as error:
            raise ParamsError(f"params.yaml: in rl with per_domain.{name}: {error}") from error
        check_search(params.evaluate, name, returns_of(domain))
        check_trees(params.section("annotate", name), name, domain, list(returns_of(domain)))
    for name in sorted(set(params.per_domain) - set(params.domains)):
        load_domain(name, params.per_domain[name].environment)


def check_model(params: Params) -> None:
    """Raise ParamsError if `model.path` is an incomplete folder, or the torch engine can't serve it at `model.max_length`."""
    from stages.agent.policy import HUB, check_folder

    try:
        if not params.model.path.startswith(HUB):
            check_folder(ROOT / params.model.path)
    except ValueError as error:
        raise ParamsError(f"params.yaml: model.path: {error}") from error
    check_architecture(params, ROOT)


def check_architecture(params: Params, root: Path) -> None:
    """Raise ParamsError if the torch engine does not serve the model of `model.path`, as far as its configuration is at hand."""
    from stages.engine.architectures import check_path

    try:
        check_path(params.model.path, root, params.model.max_length)
    except ValueError as error:
        raise ParamsError(f"params.yaml: model.path: {error}") from error


def print_resolved(params: Params) -> None:
    """Print what the file resolves to, for every domain, and its hash."""
    resolved = params.model_dump(mode="json", exclude={"per_domain"})
    for domain in params.domains:
        resolved[f"per_domain.{domain}"] = {
            "environment": params.per_domain[domain].environment,
            **{name: params.section(name, domain).model_dump(mode="json") for name in ("curate", "rollout", "annotate")},
            "rl": resolve_section(params.section("rl", domain), params.model.max_length)[1].model_dump(mode="json"),
        }
    print(f"{yaml.safe_dump(resolved, sort_keys=False, width=130)}# params hash {params_hash(params)}")


def run(options: argparse.Namespace) -> None:
    """What the command line asks for. Raises ParamsError."""
    from stages.environments.registry import settings_of

    path: Path = options.file
    if options.explain:
        print(explain_key(Params, options.explain, ROOT, settings_of))
    elif options.docs:
        atomic_text(ROOT / "params.schema.json", json_schema(Params))
        atomic_text(ROOT / "docs" / "params.md", page(Params))
    elif options.migrate:
        defaults = Params(domains=["any"], per_domain={"any": PerDomain()}).model_dump()
        migrate(path, defaults, ROOT / "dvc.yaml", parse_params)
    else:
        text = overlaid(path, options.apply) if options.apply else None
        values = read_settings(path) if text is None else parse_yaml(text.encode(), path)
        params = parse_params(values, path.name if text is None else f"{path.name} with {options.apply}")
        check_listed(values, params.model_dump(mode="json"), path)
        check_domains(params)
        check_model(params)
        check_launch(params, ROOT)
        if text is None:
            print_resolved(params)
        else:
            write_params(path, text)
            print(f"{path.name} now has the values of {options.apply}; 'git diff {path.name}' shows the changes")


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.params", description="Check params.yaml; print what it resolves to.")
    parser.add_argument("--file", type=Path, default=ROOT / "params.yaml")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--apply", type=Path, metavar="OVERLAY", help="write an overlay, such as a profile, into the file")
    other.add_argument("--explain", metavar="KEY", help="print values, defaults and readers of a key or section, such as rl.loss")
    other.add_argument("--migrate", action="store_true", help="update a file of an earlier release, and print what changed")
    other.add_argument("--docs", action="store_true", help="write docs/params.md and params.schema.json")
    options = parser.parse_args()
    try:
        run(options)
    except (ParamsError, OSError) as error:
        unchanged = f"\n{options.file} is unchanged" if options.apply or options.migrate else ""
        print(f"{error}{unchanged}", file=sys.stderr)
        return 2 if isinstance(error, ParamsError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
