"""`python -m stages.curation raw DOMAIN --count N --seed S` writes raw records of a domain to standard output, one JSON object a
line. `games` instead of `raw` plays the training tasks that curate draws from data/raw/DOMAIN.jsonl and writes the games;
`self_play` writes conversations of scripted proposers and readers about them, for `curate.imports` (docs/environments.md), and
`team` those of the members of `rl.team` (docs/teams.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from stages.curation.games import make_games
from stages.curation.raw import read_raw, record_line
from stages.curation.selection import order_by_mix
from stages.curation.self_play import conversations
from stages.curation.settings import Curate
from stages.environments.protocol import Domain
from stages.environments.registry import load_domain
from stages.params import Params, load_params
from stages.records.task import Task
from stages.runtime.command import command
from stages.runtime.validation import ParamsError


def configured_domain(name: str, params: Params) -> Domain:
    """The domain with its settings of params.yaml; with its defaults if params.yaml has no entry for it. Raises ValueError."""
    return load_domain(name, params.per_domain[name].environment if name in params.per_domain else None)


def raw_lines(domain: Domain, count: int, seed: int) -> Iterator[str]:
    for record in domain.recipes(count, seed):
        yield record_line(record)


def built_tasks(domain: Domain, curate: Curate, folder: Path) -> list[Task]:
    """The training tasks that curate draws from data/raw."""
    records, _ = read_raw(Path("data/raw") / f"{domain.name}.jsonl", "raw", domain)
    chosen = order_by_mix([record for record in records if record.split == "train"], domain)[: curate.train]
    return domain.build([record.record for record in chosen], folder, 1)


def game_lines(domain: Domain, curate: Curate, count: int, seed: int) -> Iterator[str]:
    with TemporaryDirectory() as folder:
        tasks = built_tasks(domain, curate, Path(folder))
        for game in make_games(domain, Path(folder), tasks, count, seed):
            yield record_line(game)


def self_play_lines(domain: Domain, params: Params, count: int, seed: int) -> Iterator[str]:
    """Raises ParamsError where the domain's method proposes no tasks, and where too few scripted proposals pass its gate."""
    from stages.algorithms.resolve import resolve_section

    _, rl = resolve_section(params.section("rl", domain.name), params.model.max_length)
    if rl.tasks.source != "self_play":
        raise ParamsError(
            f"rl.algorithm {rl.algorithm} of {domain.name} proposes no questions: set it to ssp (profiles/methods/ssp.yaml)"
        )
    written = 0
    with TemporaryDirectory() as folder:
        tasks = built_tasks(domain, params.section("curate", domain.name), Path(folder))
        for record in conversations(domain, Path(folder), tasks, rl.tasks.settings, count, seed):
            written += 1
            yield record_line(record)
    if written < count:
        raise ParamsError(
            f"{domain.name}: scripted proposals about {len(tasks)} training tasks give {written} records, not {count}; lower "
            f"--count, raise curate.train, or relax rl.tasks.settings.gate (min_words, min_queries)"
        )


def team_lines(domain: Domain, params: Params, count: int, seed: int) -> Iterator[str]:
    """Raises ParamsError where the domain's method has no team."""
    from stages.algorithms.resolve import resolve_section
    from stages.curation.team import conversations as of_members

    _, rl = resolve_section(params.section("rl", domain.name), params.model.max_length)
    if not rl.team.members:
        raise ParamsError(f"rl.algorithm {rl.algorithm} of {domain.name} has no team: set it to marft, or list rl.team.members")
    with TemporaryDirectory() as folder:
        tasks = built_tasks(domain, params.section("curate", domain.name), Path(folder))
        for record in of_members(domain, Path(folder), tasks, rl.team.members, count, seed):
            yield record_line(record)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.curation", description=__doc__)
    parser.add_argument("kind", choices=("raw", "games", "self_play", "team"))
    parser.add_argument("domain")
    parser.add_argument("--count", type=int, required=True, help="records or games to make")
    parser.add_argument("--seed", type=int, default=0, help="of the records or games (default: %(default)s)")
    options = parser.parse_args()
    if options.count < 1 or options.seed < 0:
        parser.error("--count must be at least 1 and --seed at least 0")
    try:
        params = load_params()
        domain = configured_domain(options.domain, params)
        if options.kind == "raw":
            lines = raw_lines(domain, options.count, options.seed)
        elif options.kind == "team":
            lines = team_lines(domain, params, options.count, options.seed)
        elif options.kind == "self_play":
            lines = self_play_lines(domain, params, options.count, options.seed)
        else:
            lines = game_lines(domain, params.section("curate", domain.name), options.count, options.seed)
        for line in lines:
            sys.stdout.write(line + "\n")
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
