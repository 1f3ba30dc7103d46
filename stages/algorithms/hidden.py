"""What a domain hides from rewards: it declares `hidden`, names of reward terms that only experiments and reports read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stages.algorithms.parts.step_values import NO_RETURN
from stages.algorithms.resolve import warm_start_of
from stages.records.task import SUCCESS_TERM
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.algorithms.settings import Rl
    from stages.environments.protocol import Domain

SUCCESSES = {"attempts": "successful attempts", "paths": "correct tree paths"}
"""What methods that clone successes learn from, by `Composition.data`."""


def reads_success(rl: Rl) -> Iterator[tuple[str, str]]:
    """Settings whose training signal depends on an episode's success, each with the remedy."""
    reward = rl.reward
    if reward.density == "single":
        yield "rl.reward.density: single", "set it to environment"
    if reward.density == "dense" and reward.divisor == "reference":
        yield "rl.reward.divisor: reference", "set it to max_total"
    if reward.correct is not None:
        yield "rl.reward.correct and wrong", "set both to null"
    if reward.tool_bonus and (reward.tool_bonus_on == "wrong" or reward.tool_bonus_cap is not None):
        yield "rl.reward.tool_bonus", "set it to 0, or tool_bonus_on to both and tool_bonus_cap to null"
    if rl.imitation.ratio:
        yield f"rl.imitation.ratio: {rl.imitation.ratio:g}", "set it to 0"


def reads_trees(rl: Rl, data: str, annotate: Any) -> Iterator[tuple[str, str]]:
    """The same of what is made of annotate's trees, or of attempts: pairs, and the step-value model's labels. annotate: the
    section."""
    paired = data == "pairs" and rl.preference.source != "imported"
    if paired and rl.preference.source == "guided":
        yield "rl.preference.source: guided", "set it to imported, or choose another algorithm"
        return
    if paired and rl.preference.level == "trajectory":
        yield "rl.preference.level: trajectory, whose pairs go on to a success and a failure,", "set it to step"
    own = rl.reward.kind == "judge" and rl.judge.kind == "local" and not rl.judge.local.path
    if annotate.pairs.outcome_gate and (paired or (own and annotate.judge_model.labels == "trees")):
        yield "annotate.pairs.outcome_gate: true", "set it to false"
    if rl.credit.kind == "annotated" and annotate.labels.q in NO_RETURN:
        yield f"annotate.labels.q: {annotate.labels.q}", "set it to rollout, tree or best"


def check_hidden(rl: Rl, data: str, domain: Domain, annotate: Any = None) -> None:
    """Raise ParamsError, naming the setting and the remedy, if a resolved section `rl` trains on what the domain hides. data: of
    the method's composition; annotate: the section, None: what trees are made into is not checked."""
    hidden = frozenset(getattr(domain, "hidden", ()))
    first = warm_start_of(rl) if hidden else None
    if first is not None:
        method, section = first
        try:
            check_hidden(section, method.data, domain, annotate)
        except ParamsError as error:
            raise ParamsError(f"rl.warm_start: {error}") from error
    found = list(reads_success(rl)) if SUCCESS_TERM in hidden else []
    if SUCCESS_TERM in hidden and annotate is not None:
        found += reads_trees(rl, data, annotate)
    if SUCCESS_TERM in hidden and data in SUCCESSES:
        found.append((f"rl.algorithm: {rl.algorithm}, which learns from {SUCCESSES[data]},", "choose another algorithm"))
    if rl.reward.kind == "prs":
        terms = [stage.term or stage.name for stage in rl.reward.prs]
        found += [(f"rl.reward.prs: {term}", "take it out") for term in terms if term in hidden]
    if found:
        setting, remedy = found[0]
        raise ParamsError(
            f"{setting} would train on what domain {domain.name} hides from rewards ({', '.join(sorted(hidden))}), so that "
            f"experiments can measure by it: {remedy}, and reward by a judge, references or a verifier (rl.reward.kind)"
        )
