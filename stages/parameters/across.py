"""What makes no sense between sections of params.yaml, of one domain. Light to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from stages.algorithms.registry import composition, learns_token_values
from stages.algorithms.resolve import resolve_section
from stages.annotation.units import is_return, reads_values, value_head
from stages.validation import ParamsError

if TYPE_CHECKING:
    from stages.algorithms.settings import Rl
    from stages.parameters.annotate import Annotate
    from stages.params import Params


def check_sections(params: Params, domain: str, source: str) -> None:
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
    if reads_values(leaves) and leaves.backbone == "policy" and engine != "torch":
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
        if not is_return(annotate.labels):
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
