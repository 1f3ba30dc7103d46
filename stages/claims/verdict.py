"""`python -m stages.claims verdict SLUG [CLAIM]`: an exit code for a pipeline that depends on a claim."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.claims.entries import with_profile
from stages.claims.experiment import FOLDER, Experiment, load_experiment, slugs
from stages.claims.results import NOT_RUN, OUTDATED, Results, result_path
from stages.claims.session import drop_outdated
from stages.params import load_params
from stages.records.episode import read_json
from stages.runtime.command import AnswerParser
from stages.runtime.validation import ParamsError, guess

YES, NO, UNDECIDED = 0, 1, 2
CODES = {"reproduced": YES, "not reproduced": NO}
"""Any other state is UNDECIDED: no look so far, a gate that failed, or an experiment that changed since it was run, in its
file or in params.yaml."""


def outdated(root: Path, slug: str, experiment: Experiment) -> bool:
    """Whether stored runs have other settings than params.yaml (with the experiment's profile) gives them today. Raises
    ParamsError."""
    params = with_profile(root, experiment.profile, load_params(root / "params.yaml").model_dump())
    return drop_outdated(experiment, params, Results.load(root, slug)) > 0


def states(root: Path, slug: str) -> list[tuple[str, str]]:
    """Each claim of an experiment with its verdict, or why there is none. Raises ParamsError for an invalid experiment or
    params.yaml."""
    experiment = load_experiment(root / FOLDER / f"{slug}.yaml")
    path = result_path(root, slug)
    saved = read_json(path) if path.exists() else None
    if saved is None or saved["fixed"] != experiment.fixed or outdated(root, slug, experiment):
        why = NOT_RUN if saved is None else OUTDATED
        return [(claim.says, why) for claim in experiment.claims]
    return [
        (claim.says, result["verdict"] or f"undecided before the first look at {experiment.looks[0]} seeds")
        for claim, result in zip(experiment.claims, saved["claims"], strict=True)
    ]


def main(arguments: Sequence[str]) -> int:
    """0: all the claims asked for are reproduced. 1: one is not. 2: neither. 64: bad usage."""
    parser = AnswerParser(
        prog="python -m stages.claims verdict", description="Print verdicts; exit with 0, 1 or 2: yes, no, undecided."
    )
    parser.add_argument("slug", metavar="SLUG", help="an experiment in reports/claims")
    parser.add_argument("claim", nargs="?", type=int, metavar="CLAIM", help="a claim's number from 1 on (default: all)")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    known = slugs(root)
    if options.slug not in known:
        parser.error(f"unknown experiment {options.slug}{guess(options.slug, known)}; {FOLDER} has {', '.join(known)}")
    try:
        found = states(root, options.slug)
    except ParamsError as error:
        parser.error(str(error))
    if not found:
        parser.error(f"{options.slug} is a gallery: it has no claims")
    if options.claim is not None and not 1 <= options.claim <= len(found):
        parser.error(f"{options.slug} has claims 1 to {len(found)}, not {options.claim}")
    asked = list(enumerate(found, start=1)) if options.claim is None else [(options.claim, found[options.claim - 1])]
    for number, (says, state) in asked:
        print(f"{options.slug} {number}: {state}: {says}")
    codes = {CODES.get(state, UNDECIDED) for _, (_, state) in asked}
    return NO if NO in codes else max(codes)
