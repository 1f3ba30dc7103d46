"""`python -m stages.claims new SLUG --environment search --arm grpo rl.algorithm=grpo --arm rloo rl.algorithm=rloo`: the file of
an experiment that asks whether each further arm is better than the first."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from stages.claims.experiment import FOLDER, Experiment, Family, nested, sets_key
from stages.records.sections import deep_merge
from stages.runtime.command import AnswerParser
from stages.runtime.files import atomic_text
from stages.runtime.validation import ParamsError, explain

PIPELINE = FOLDER / "dvc.yaml"
Check = Callable[[Experiment, str], None]
"""(experiment, its file) -> None; raises ParamsError."""
TEMPLATE = """\
# Asks whether {question} `python -m stages.claims {slug} --check` prints what the answer will
# cost, `python -m stages.claims {slug}` runs it, and `python -m stages.reporting.documents` writes its page.
family: {family}  # chapter of the index
method: {slug}
paper: ours  # whose claim it is
switch: {switch}
environment: {environment}
looks: [8, 12, 20]  # numbers of seeds after which claims are judged; only open ones get further seeds
budget: {{environment_steps: {steps}}}  # of every run
{tuning}
gate: {{baseline: {baseline}}}  # no seeds are spent unless the start succeeds at 20 to 60 %, and the baseline learns
arms:
{arms}
claims:
{claims}"""
TUNED = "rl.learning_rate"
TUNING = f"tune: {{key: {TUNED}, values: [0.0001, 0.0003, 0.001]}}  # each arm is tried at all of them, on validation tasks"
UNTUNED = f"untuned: The arms set {TUNED}."


def flow(value: Any) -> str:
    """YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def overrides_of(given: Sequence[str]) -> dict[str, Any]:
    """rl.loss.clip_high=0.3 -> {"rl": {"loss": {"clip_high": 0.3}}}. Raises ParamsError for anything that is not KEY=VALUE."""
    values: dict[str, Any] = {}
    for one in given:
        key, separator, value = one.partition("=")
        if not separator or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise ParamsError(f"--arm takes a name and KEY=VALUE pairs, such as rl.algorithm=rloo; {one} is none")
        values = deep_merge(values, nested(key, yaml.safe_load(value)))
    return values


def claim_text(options: Namespace, arm: str, baseline: str) -> str:
    says = options.says or f"{arm} outperforms {baseline} ({options.metric}, {options.environment})."
    lines = [
        f"  - says: {flow(says)}",
        f"    arm: {flow(arm)}",
        f"    against: {flow(baseline)}",
        f"    metric: {options.metric}",
    ]
    lines.append(f"    threshold: {options.threshold:g}  # the smallest difference worth the claim")
    if options.margin is not None:
        lines.append(f"    margin: {options.margin:g}  # smaller differences are equivalent")
    lines.append("    world: null  # could this environment show the effect at all? Say it before the first run")
    return "\n".join(lines) + "\n"


def text_of(options: Namespace) -> str:
    """The experiment's file. Raises ParamsError."""
    arms = {name: overrides_of(overrides) for name, *overrides in options.arm}
    if len(arms) < 2 or len(arms) < len(options.arm):
        raise ParamsError("give --arm at least twice, with different names: the first is what the others are compared with")
    if options.says and len(arms) > 2:
        raise ParamsError("--says is one claim, of two arms; leave it out and edit the claims in the file")
    baseline, *others = arms
    return TEMPLATE.format(
        question=f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} better than {baseline}.",
        slug=options.slug,
        family=options.family,
        switch=flow("; ".join(" ".join(overrides) for _, *overrides in options.arm) or options.slug),
        environment=options.environment,
        steps=options.steps,
        baseline=flow(baseline),
        tuning=UNTUNED if any(sets_key(values, TUNED) for values in arms.values()) else TUNING,
        arms="\n".join(f"  {flow(name)}: {flow(values)}" for name, values in arms.items()),
        claims="".join(claim_text(options, arm, baseline) for arm in others),
    )


def listed(pipeline: str, slug: str) -> str:
    """dvc.yaml of the board with `slug` in the list of its experiments, in its alphabetical place. Raises ParamsError for a file
    without that list."""
    found = re.search(r"(?m)^ +method:\n((?: +- \w+\n)+)", pipeline)
    if found is None:
        raise ParamsError(f"{PIPELINE} has no list `method`; restore it with 'git checkout {PIPELINE}'")
    lines = found[1].splitlines()
    indent = lines[0][: lines[0].index("-")]
    items = sorted({*lines, f"{indent}- {slug}"})
    return pipeline[: found.start(1)] + "\n".join(items) + "\n" + pipeline[found.end(1) :]


def main(arguments: Sequence[str], check: Check, params: Mapping[str, Any]) -> int:
    """Write the experiment and list it; 0. `check`: of an experiment and its file; params: params.yaml with its defaults. Exits
    with 64 and writes nothing if that is not possible."""
    parser = AnswerParser(prog="python -m stages.claims new", description="Write an experiment's file from a question.")
    parser.add_argument("slug", metavar="SLUG", help="name of the experiment: reports/claims/SLUG.yaml")
    parser.add_argument("--environment", required=True, metavar="DOMAIN", help="a domain of params.yaml")
    parser.add_argument(
        *("--arm", "-a"),
        **{"nargs": "+", "action": "append", "required": True, "metavar": "NAME KEY=VALUE"},
        help="a name and its overrides of params.yaml; at least twice, the first is compared with",
    )
    parser.add_argument("--metric", default="panel.success", help="what is compared (default: %(default)s)")
    parser.add_argument("--threshold", type=float, default=0.02, help="smallest difference worth a claim (default: %(default)s)")
    parser.add_argument("--margin", type=float, help="smaller differences are equivalent (default: 0.05 for shares)")
    parser.add_argument("--says", help="the claim in one sentence")
    parser.add_argument("--family", choices=get_args(Family), default="policy_optimisation", help="chapter of the index")
    parser.add_argument("--steps", type=int, default=12000, help="environment steps of each run (default: %(default)s)")
    options = parser.parse_args(arguments)
    path = FOLDER / f"{options.slug}.yaml"
    try:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", options.slug) or options.slug == "dvc":
            raise ParamsError(f"{options.slug}: a name has small letters, digits and underscores, and begins with a letter")
        if path.exists():
            raise ParamsError(f"{path} exists; choose another name, or edit that file")
        if options.environment not in params["per_domain"]:
            raise ParamsError(f"--environment {options.environment}: params.yaml has {', '.join(sorted(params['per_domain']))}")
        text = text_of(options)
        try:
            check(Experiment.model_validate(yaml.safe_load(text)), str(path))
        except ValidationError as error:
            raise ParamsError(explain(error, Experiment, str(path))) from error
        pipeline = listed(PIPELINE.read_text(encoding="utf-8"), options.slug)
    except ParamsError as error:
        parser.error(str(error))
    atomic_text(path, text)
    atomic_text(PIPELINE, pipeline)
    print(
        f"wrote {path} and listed it in {PIPELINE}; edit and commit it, then:\n"
        f"  python -m stages.claims {options.slug} --check    # what it will cost\n"
        f"  python -m stages.claims {options.slug}            # run it; it resumes\n"
        f"  python -m stages.claims verdict {options.slug}    # exit code 0 yes, 1 no, 2 undecided"
    )
    return 0
