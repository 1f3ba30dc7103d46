"""One search, step by step, and its results.

Designs are scored on validation tasks. The best few and the default, the design in params.yaml, are confirmed on further
validation tasks; the winner there and the default play the frozen panels once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import spearmanr

from stages.agent.model_names import model_names
from stages.designs.evaluations import DesignEvaluations, DesignScore
from stages.designs.search import Proposal, Search
from stages.designs.settings import DesignSettings
from stages.designs.space import Design
from stages.designs.tree import Node, visits
from stages.designs.value_model import FittedValueModel
from stages.evaluation.summary import compare_models
from stages.records.episode import read_json, write_json
from stages.records.sections import params_hash, seed_of
from stages.runtime.validation import ParamsError

RESULTS = Path("reports") / "design"
DIGITS = 6
NOT_SHAPING = {"budget", "confirm"}
"""Settings that change only the length of a search, and what follows it."""


def best_so_far(scores: Sequence[float]) -> list[float]:
    """The largest of the first 1, 2 ... scores."""
    return [max(scores[: count + 1]) for count in range(len(scores))]


def journal_key(settings: DesignSettings, seed: int) -> str:
    """16 hex digits over the settings that shape a search; without the factor `per_token`, equal to the key of searches from
    before that factor, which so resume."""
    shaping = settings.model_dump(mode="json", exclude=NOT_SHAPING)
    if settings.space.per_token is None:
        del shaping["space"]["per_token"]
    return params_hash({**shaping, "seed": seed})


class Session:
    """The search that, resumed from its journal."""

    def __init__(self, evaluations: DesignEvaluations) -> None:
        self.evaluations, self.settings, self.space = evaluations, evaluations.params.design, evaluations.space
        self.seed = seed_of(evaluations.params, self.settings)
        domains = {name: one["description"] for name, one in evaluations.plan["domains"].items()}
        guided = self.settings.method == "agentswift"
        model = FittedValueModel(self.space, domains, self.settings.value_model) if guided else None
        self.search = Search(self.space, self.settings, self.seed, model)
        self.path = evaluations.folder / f"journal-{journal_key(self.settings, self.seed)}.json"
        saved = read_json(self.path) if self.path.exists() else {"nodes": [], "pending": None}
        nodes = [{**node, "design": self.space.restored(node["design"])} for node in saved["nodes"]]
        self.nodes = [Node.from_json(node) for node in nodes][: self.settings.budget]
        self.pending: dict[str, Any] | None = saved["pending"]

    def _write(self) -> None:
        write_json(self.path, {"nodes": [node.to_json() for node in self.nodes], "pending": self.pending})

    def step(self, seconds: float | None = None, failed: str = "") -> dict[str, Any] | None:
        """Collect the pending evaluation, if it ended after `seconds` (`failed`: why the design was rejected), and return the
        next one with its `folder` and `kind`. None when the search is done. Raises ParamsError if the default design was
        rejected."""
        if self.pending is not None and seconds is not None:
            kind, design = self.pending["kind"], self.space.restored(self.pending["design"])
            if failed and (kind == "panel" or design == self.space.root):
                raise ParamsError(f"the design '{self.space.label(design)}' could not be evaluated: {failed}")
            self.evaluations.collect(kind, design, seconds, failed)
        while (work := self._next()) is not None:
            kind, proposal = work
            found = self.evaluations.result(kind, proposal.design)
            if found is None:
                return self._begin(kind, proposal)
            self._add(proposal, found)
        self.pending = None
        self._write()
        return None

    def _next(self) -> tuple[str, Proposal] | None:
        """Kind and proposal of the next evaluation; finalists only if not evaluated before."""
        proposal = self.search.propose(self.nodes)
        if proposal is not None:
            return "search", proposal
        for kind, designs in (
            ("confirm", self.finalists),
            ("panel", lambda: list(dict.fromkeys([self.space.root, self.winner()]))),
        ):
            for design in designs():
                if self.evaluations.result(kind, design) is None:
                    return kind, Proposal(design, -1, kind)
        return None

    def _begin(self, kind: str, proposal: Proposal) -> dict[str, Any]:
        self.pending = {"kind": kind, "design": list(proposal.design)}
        self._write()
        counted = {"search": (len(self.nodes) + 1, self.settings.budget)}.get(kind)
        return {
            "kind": kind,
            "name": self.space.name(proposal.design),
            "label": self.space.label(proposal.design),
            "origin": proposal.origin,
            "count": f"{counted[0]} of {counted[1]}" if counted else "",
            "folder": str(self.evaluations.prepare(kind, proposal.design)),
        }

    def _add(self, proposal: Proposal, found: DesignScore) -> None:
        self.nodes.append(Node(**proposal.__dict__, **found.__dict__))
        self.pending = None
        self._write()

    def finalists(self) -> list[Design]:
        """The best `confirm.designs` by score, ties to the one evaluated first, and the default."""
        valid = [node for node in self.nodes if not node.failed]
        best = sorted(valid, key=lambda node: -node.score)[: self.settings.confirm.designs]
        return list(dict.fromkeys([*(node.design for node in best), self.space.root]))

    def winner(self) -> Design:
        """The finalist with the best confirmation score, ties to the better search score."""
        scores = {node.design: node.score for node in self.nodes}
        confirmed = {design: self.evaluations.result("confirm", design) for design in self.finalists()}
        return max(confirmed, key=lambda design: (confirmed[design].score if confirmed[design] else -1.0, scores[design]))

    def _panel(self, design: Design) -> dict[str, Any]:
        """Panel success of default and winner, with their paired comparison."""
        evaluate, rows = self.evaluations.params.evaluate, self.evaluations.rows
        domains = self.evaluations.params.domains
        sides = {name: rows("panel", one) for name, one in (("default", self.space.root), ("winner", design))}
        found: dict[str, Any] = {"domains": {}}
        for domain in domains:
            of = {name: [row for row in side if row["domain"] == domain] for name, side in sides.items()}
            values: dict[str, Any] = {
                name: round(sum(row["success"] for row in side) / len(side), DIGITS) for name, side in of.items()
            }
            if design != self.space.root:
                options = (evaluate.confidence, evaluate.resamples, self.evaluations.params.seed)
                values["comparison"] = compare_models(of["winner"], of["default"], *options)
            found["domains"][domain] = values
        found |= {"model": self.space.root[0], "policy_hash": sides["default"][0]["policy_hash"]}
        for name in sides:
            found[name] = round(sum(found["domains"][domain][name] for domain in domains) / len(domains), DIGITS)
        return found

    def _rank_correlation(self) -> float | None:
        """Spearman's correlation of predictions and scores of the tree's designs; None if there are too few."""
        pairs = [(node.predicted, node.score) for node in self.nodes if node.origin == "tree" and node.predicted is not None]
        if len({a for a, _ in pairs}) < 3 or len({b for _, b in pairs}) < 2:
            return None
        return round(float(spearmanr(*zip(*pairs, strict=True)).statistic), DIGITS)

    def _node(self, number: int, visited: int) -> dict[str, Any]:
        node = self.nodes[number]
        fields = {
            key: getattr(node, key) for key in ("parent", "origin", "score", "error", "predicted", "std", "reused", "failed")
        }
        by_domain = {name: list(pair) for name, pair in node.by_domain.items()}
        named = {"name": self.space.name(node.design), "label": self.space.label(node.design)}
        return {**fields, **named, "by_domain": by_domain, "failures": dict(node.failures), "visits": visited}

    def overlay(self, design: Design) -> str:
        """The design as an overlay of params.yaml, as YAML: all models are still evaluated, and a design that chooses among
        draws in addition."""
        values = self.space.overrides(design)
        (player,) = values["evaluate"]["models"]
        models = [*model_names(self.evaluations.params.domains), player] if "+" in player else None
        values["evaluate"]["models"] = models
        return f"# {self.space.label(design)}; played by {player}\n{yaml.safe_dump(values, sort_keys=False)}"

    def results(self) -> dict[str, Any]:
        """The content of reports/design/<method>.json, once `step` returns None."""
        winner = self.winner()
        counts = visits([node.parent for node in self.nodes])
        finalists = []
        for design in self.finalists():
            confirmed = self.evaluations.result("confirm", design)
            assert confirmed is not None
            node = next(one for one in self.nodes if one.design == design)
            finalists.append(
                {
                    "name": self.space.name(design),
                    "label": self.space.label(design),
                    "search": [node.score, node.error],
                    "confirm": [confirmed.score, confirmed.error],
                }
            )
        return {
            "settings": {**self.settings.model_dump(mode="json", exclude={"space"}), "seed": self.seed},
            "space": {name: list(options) for name, options in self.space.factor_options.items()},
            "designs": len(self.search.designs),
            "default": self.space.name(self.space.root),
            "nodes": [self._node(number, count) for number, count in enumerate(counts)],
            "best": best_so_far([node.score for node in self.nodes]),
            "rank_correlation": self._rank_correlation(),
            "finalists": finalists,
            "winner": {"name": self.space.name(winner), "label": self.space.label(winner), **self.space.overrides(winner)},
            "overlay": self.overlay(winner),
            "panel": self._panel(winner),
            **self.evaluations.plan,
        }
