"""The episodes of a run by domain and source: what the viewer shows and the patterns are counted in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stages.agent.model_names import evaluated_domains
from stages.evaluation.stored_episodes import FILE, played_groups
from stages.reporting.inputs import ROLLOUTS, Inputs
from stages.reporting.kept import Run, episodes_path, newest
from stages.reporting.results import model_order
from stages.reporting.this_run import this_run

Row = Mapping[str, Any]
Kind = Literal["panel", "rollout", "training", "kept"]
"""Who played: a model on the frozen panel, the SFT policy on training tasks, RL in one of its steps, or a model of the kept run
that this one is compared with."""


@dataclass(frozen=True)
class KeptRun:
    """A kept run and its number in reports/runs.jsonl."""

    number: int
    run: Run

    def models(self, domain: str) -> list[str]:
        """Its models on the domain's panel, in order."""
        return model_order(
            [model for model, domains in self.run.success.items() if domain in domains], self.run.params["domains"]
        )

    def source(self, model: str) -> str:
        return f"{model}, run {self.number}"


@dataclass(frozen=True)
class Group:
    """Episodes of one domain and source. `source`: a model of the evaluation, or a name such as "rl step 1"."""

    domain: str
    source: str
    kind: Kind
    rows: Sequence[Row]
    """Of EPISODE_SCHEMA and further columns of the source, sorted by episode."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Task -> cluster; tasks that are absent are clusters of their own."""

    @property
    def key(self) -> str:
        """Names the group in links and files: a-z, A-Z, 0-9, '.', '_' and '-'."""
        return group_key(self.domain, self.source)


def file_name(text: str) -> str:
    """`text` with each character that is unsafe in a file name or address replaced by its code, so that names stay distinct."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_") else f"-{ord(letter):x}" for letter in text)


def group_key(domain: str, source: str) -> str:
    return f"{file_name(domain)}.{file_name(source)}"


def run_before(inputs: Inputs, domain: str) -> KeptRun | None:
    """The kept run that this one is compared with (see the chapter on changes), if its episodes on the same panel are here."""
    found = newest(this_run(inputs), inputs.kept, identical=False)
    if found is None or episodes_path(Path(), found[1]).name not in inputs.kept_episodes:
        return None
    same = found[1].panels.get(domain) == inputs.evaluation["panels"].get(domain)
    return KeptRun(*found) if same else None


def groups_of(root: Path, inputs: Inputs) -> Iterator[Group]:
    """All groups of the run, one in memory at a time: per domain the SFT rollouts, the stored steps of RL in order, and the
    evaluated models."""
    clusters: dict[str, dict[str, str]] = {}
    for row in inputs.outcomes:
        clusters.setdefault(row["domain"], {})[row["task_id"]] = row["cluster"]
    models = model_order(list(inputs.evaluation["models"]), inputs.params.domains)
    for domain in evaluated_domains(inputs.params):
        sources = inputs.domains[domain].episodes if domain in inputs.domains else {}
        for source, rows in sources.items():
            if rows:
                kind: Kind = "rollout" if source == ROLLOUTS else "training"
                yield Group(domain, source, kind, sorted(rows, key=lambda row: row["episode_id"]))
        for model, played in played_groups(root / FILE, domain, models):
            ordered = sorted(played, key=lambda row: (row["task_id"], row["attempt"]))
            yield Group(domain, model, "panel", ordered, clusters.get(domain, {}))
        if (before := run_before(inputs, domain)) is not None:
            yield from kept_groups(root, before, domain, clusters.get(domain, {}))


def kept_groups(root: Path, before: KeptRun, domain: str, clusters: Mapping[str, str]) -> Iterator[Group]:
    """The kept run's models on the same panel; nothing where its episodes are not stored."""
    for model, played in played_groups(episodes_path(root, before.run), domain, before.models(domain)):
        ordered = sorted(played, key=lambda row: (row["task_id"], row["attempt"]))
        yield Group(domain, before.source(model), "kept", ordered, clusters)


def group_count(root: Path, inputs: Inputs) -> int:
    """Number of groups that `groups_of` yields."""
    sources = sum(bool(rows) for given in inputs.domains.values() for rows in given.episodes.values())
    domains = evaluated_domains(inputs.params)
    played = sum(domain in by_domain for by_domain in inputs.evaluation["models"].values() for domain in domains)
    kept = [(before, domain) for domain in domains if (before := run_before(inputs, domain)) is not None]
    return sources + (played if (root / FILE).exists() else 0) + sum(len(before.models(domain)) for before, domain in kept)
