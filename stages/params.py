"""The shape of params.yaml: the only place that knows it.

`python -m stages.params` checks the file and prints what it resolves to; `--apply FILE` writes an overlay into it.
An unknown key fails with the nearest known name, a bad value with its range, a bad combination with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, ValidationError, model_validator

from stages.agent.model_names import SELECTORS, model_names
from stages.agent.settings import Model, Rollout
from stages.algorithms.parts.horizon import limits
from stages.algorithms.registry import composition, learns_token_values
from stages.algorithms.resolve import resolve_section
from stages.algorithms.settings import Rl
from stages.annotation.settings import Annotate
from stages.annotation.units import q_is_return, uses_value_model, value_head
from stages.curation.settings import Curate
from stages.evaluation.settings import Evaluate
from stages.merging.registry import bind
from stages.merging.section import Merge
from stages.merging.settings import MergeError, MergeSettings
from stages.records.sections import params_hash, section_of
from stages.runtime.command import command
from stages.runtime.overlay import overlaid, write_params
from stages.runtime.resources import Resources
from stages.runtime.validation import ParamsError, Section, explain, parse_yaml
from stages.training.settings import Sft

ROOT = Path(__file__).resolve().parent.parent


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
        players = [*models, *(f"{model}+{choice}" for model in models for choice in SELECTORS)]
        strange = sorted(set(self.evaluate.models or []) - set(players))
        if strange:
            raise ValueError(
                f"evaluate.models names {strange}; there are {', '.join(models)}, each also with "
                f"{', '.join(f'+{choice}' for choice in SELECTORS)}"
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
                f"makes do with text; set it to false, or name models without {', '.join(f'+{choice}' for choice in SELECTORS)}"
            )
        return self

    def section(self, name: str, domain: str) -> Any:
        """Section `name` with the overrides of `domain`: e.g. params.section("rl", "search") -> Rl."""
        return section_of(self, name, domain)


P = TypeVar("P", bound=Params)


def parse_params(values: Mapping[str, Any], source: str = "params.yaml") -> Params:
    """Check a parsed params.yaml, every domain's overrides included. Raises ParamsError with one line per mistake."""
    return parse_as(Params, values, source)


def parse_as(shape: type[P], values: Mapping[str, Any], source: str) -> P:
    """`parse_params` for a subclass of Params, which adds sections."""
    if "design" in values and "design" not in shape.model_fields:
        raise ParamsError(f"{source}: the section 'design' is now the file reports/design/design.yaml; move it there")
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
    for domain in params.domains:
        try:
            resolve_section(params.section("rl", domain), params.model.max_length)
        except ParamsError as error:
            raise ParamsError(f"{source}: in rl as per_domain.{domain} has it: {error}") from error
        cross_checks(params, domain, source)
    check_judges(params, source)
    try:
        bind(params.merge.method, MergeSettings.of(params.merge, params.domains))
    except MergeError as error:
        raise ParamsError(str(error)) from error
    return params


def cross_checks(params: Params, domain: str, source: str) -> None:
    """Raise ParamsError where sections of `domain`, each right for itself, contradict one another."""
    where = f"{source}: in per_domain.{domain}"
    method, rl = resolve_section(params.section("rl", domain), params.model.max_length)
    annotate = params.section("annotate", domain)
    if rl.credit.kind == "progress" and rl.credit.step_reward != "rloo_broadcast" and annotate.progress.kind == "none":
        raise ParamsError(
            f"{where}: rl.credit.kind: progress needs the estimator that annotate fits, and annotate.progress.kind is none: set "
            f"it to spa"
        )
    _check_value_model(rl, annotate, params.model.lora.rank, where)
    if learns_token_values(method) and params.model.lora.rank:
        raise ParamsError(
            f"{where}: rl.algorithm {method.card.slug} trains a whole value network beside the policy, and model.lora.rank is "
            f"{params.model.lora.rank}: set it to 0"
        )
    leaves, engine = annotate.evaluation, params.resources.engine.kind
    whole = method.data == "pairs" and rl.preference.level == "trajectory"
    if whole and not leaves.keep_rollouts and leaves.kind != "value_model":
        raise ParamsError(
            f"{where}: rl.preference.level: trajectory learns from whole episodes, which "
            f"annotate.evaluation.keep_rollouts: false does not keep: set that to true, or level to step"
        )
    if uses_value_model(leaves) and leaves.backbone == "policy" and engine != "torch":
        raise ParamsError(
            f"{where}: annotate.evaluation.backbone 'policy' reads the hidden states of the torch "
            f"engine, and resources.engine.kind is '{engine}': set backbone to own, or kind to torch"
        )
    pairs_of = rl.preference.source
    if pairs_of in ("imported", "all") and not params.section("curate", domain).imports:
        raise ParamsError(
            f"{where}: rl.preference.source is {pairs_of}, and curate.imports names no file that pairs could come from"
        )
    if rl.selection.kind == "model_aware" and params.section("rollout", domain).attempts < 2:
        raise ParamsError(
            f"{where}: rl.selection.kind: model_aware keeps the tasks that are solved sometimes, "
            f"and with rollout.attempts: 1 each is solved always or never; set that to at least 2 (the paper's: 8)"
        )


def check_judges(params: Params, source: str) -> None:
    """Raise ParamsError where a model would choose by what no domain has."""
    there = {
        "q": any(params.section("annotate", domain).q_model.kind != "none" for domain in params.domains),
        "value": any(learns_token_values(composition(params.section("rl", domain).algorithm)) for domain in params.domains),
    }
    algorithms = ", ".join(sorted({params.section("rl", domain).algorithm for domain in params.domains}))
    lacking = {
        "q": "the Q-model of a domain, and in every domain annotate.q_model.kind is none: set it to step_dpo or regression",
        "value": "the values of tokens that rl learns in a domain, and rl.algorithm is "
        f"{algorithms}: set it to b_coder, or leave out the models with +value",
    }
    for model in params.evaluate.models or []:
        choice = model.partition("+")[2]
        if not there.get(choice, True):
            raise ParamsError(f"{source}: evaluate.models: {model} chooses by {lacking[choice]}")


def check_launch(params: Params, root: Path) -> None:
    """Raise ParamsError if the file that `resources.launch` names is not there, or splits networks that must stay whole."""
    config = params.resources.launch
    if config is None:
        return
    if not (root / config).is_file():
        raise ParamsError(
            f"params.yaml: resources.launch: {config} does not exist; name a file of `accelerate config`, such as "
            "profiles/accelerate/ddp.yaml, or null for one process"
        )
    said = yaml.safe_load((root / config).read_text(encoding="utf-8"))
    if not isinstance(said, dict) or said.get("distributed_type") != "FSDP":
        return
    for domain in params.domains:
        if resolve_section(params.section("rl", domain))[1].advantage.estimator == "utterance":
            raise ParamsError(
                f"params.yaml: in per_domain.{domain}: rl.advantage.estimator: utterance keeps a target network beside the "
                f"critic, and under resources.launch: {config} FSDP splits networks over processes: use "
                f"profiles/accelerate/ddp.yaml"
            )


def _check_value_model(rl: Rl, annotate: Annotate, lora_rank: int, where: str) -> None:
    """Raise ParamsError where rl would take the step-value model's word for something that it does not say."""
    _check_meaning(rl, annotate, where)
    critic = rl.critic
    if critic.init != "value_model":
        return
    fitted = value_head(annotate)
    if critic.head != fitted:
        raise ParamsError(
            f"{where}: rl.critic.init: value_model takes over the model that annotate fits with head "
            f"{fitted.model_dump()}, and rl.critic.head is {critic.head.model_dump()}; make them equal"
        )
    if lora_rank:
        raise ParamsError(
            f"{where}: rl.critic.init: value_model is a model with weights of its own, and with "
            f"model.lora.rank {lora_rank} the critic has adapters on the policy's: set init to policy, or rank to 0"
        )


NO_RETURN = {"hard": "whether a success is in reach", "process": "how near one is"}
"""What the values of labels.q say that are no rewards still to come."""


def _check_meaning(rl: Rl, annotate: Annotate, where: str) -> None:
    """Raise ParamsError for a step-value model that is no reward still to come, or a discounted one, where rl adds it up with
    rewards or compares it with returns."""
    readers = {
        "rl.credit.kind: annotated": ("outcome", rl.credit.kind == "annotated"),
        "rl.critic.init: value_model": ("policy", rl.critic.init == "value_model"),
        "rl.curriculum.kind: value": ("difficulty", rl.curriculum.kind == "value"),
    }
    for reader, (other, reads) in readers.items():
        if not reads:
            continue
        instead = f"{reader.split(': ')[0].rpartition('.')[2]} to {other}"
        if not q_is_return(annotate.labels):
            said = NO_RETURN[annotate.labels.q]
            raise ParamsError(
                f"{where}: {reader} takes the step-value model's word for the reward still to come, and with "
                f"annotate.labels.q '{annotate.labels.q}' it says {said}: set that to rollout, tree or best, or {instead}"
            )
        if annotate.gamma != 1.0:
            raise ParamsError(
                f"{where}: {reader} takes the step-value model's word for the undiscounted reward still to come, and "
                f"annotate.gamma is {annotate.gamma:g}: set that to 1, or {instead}"
            )
    returns = annotate.returns
    if rl.curriculum.kind == "value" and returns != [0.0, 1.0]:
        raise ParamsError(
            f"{where}: rl.curriculum.kind: value draws tasks by p (1 - p) of returns p in [0, 1], and annotate.returns is "
            f"{returns}: set kind to difficulty"
        )
    if rl.credit.kind == "annotated" and not rl.reward.environments_own:
        raise ParamsError(
            f"{where}: rl.credit.kind: annotated adds differences of the environment's reward still to come to rewards, and "
            f"rl.reward puts others in the place of the environment's: set rl.reward.kind and density to environment and correct "
            f"and wrong to null, or credit.kind to outcome"
        )


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
    from stages.engine.architectures import check_path

    try:
        check_path(params.model.path, root, params.model.max_length)
    except ValueError as error:
        raise ParamsError(f"params.yaml: model.path: {error}") from error


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
