"""The rounds of a conversion, S1 to S6: collect, curate, cluster, select, specialise, route, promote.

<log> -> <out>/{router.json, specialist-<k>/, report.json, hard.jsonl, vault.json, dashboard.html}. The same log and settings give
the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.agent.policy import Policy, load_policy
from stages.conversion.call_log import read_calls
from stages.conversion.choice import Scored, Share, calibrated, cost_per_call, lower_bound, replaceable_share, select
from stages.conversion.clusters import Clusters, answer_shape, fit_clusters
from stages.conversion.curate_calls import Call, Curated, curated
from stages.conversion.masking import Masker, load_key
from stages.conversion.router import LARGE, CallRouter, Specialist, queued
from stages.conversion.settings import Conversion
from stages.conversion.specialise import Answer, answers, parameters, save, train
from stages.records.card import Card
from stages.records.episode import read_json, write_json
from stages.records.sections import params_hash
from stages.runtime.files import atomic_text
from stages.runtime.progress import Progress

CARD = Card(
    slug="slm_conversion",
    title="Small models for narrow calls",
    paper="Belcak et al., Small Language Models are the Future of Agentic AI, arXiv 2506.02153",
    equation="S1 collect, S2 curate, S3 cluster, S4 select, S5 specialise: (1 - l) mean -log p(y) + l tau^2 mean KL(p_T || p_S), "
    "S6 route; a call costs sum_k w_k [rho_k + (1 - a_k)] + the weight of clusters that are not served, w_k the cluster's share, "
    "a_k the share of it that the specialist keeps, rho_k the ratio of parameters; sum_k w_k a_k of the calls are replaced",
    assumptions="calls are narrow enough for clusters, and logged with outcomes. The paper names the steps and has no formulas: "
    "features, selection, router and the promotion by a paired lower bound are ours. Only answers of the large model in traces "
    "that succeeded are trained on; failures stay in validation and test",
    reduces_to="one cluster and no router: distillation; every cluster rejected: the large model, with the same answers",
    tested_by="tests/conversion/test_conversion.py",
    switch="python -m stages.conversion conversion.yaml",
)
NOT_CONVERTIBLE, CONVERTED, NOTHING_NEW = "not convertible", "converted", "nothing new"


def quality(calls: Sequence[Call], found: Sequence[Answer]) -> tuple[list[bool], list[bool]]:
    """Whether the large model's and the specialist's answers are right, by call: the former in traces that succeeded, the latter
    where it also gives the same answer."""
    large = [call["outcome"] == 1 for call in calls]
    same = [" ".join(call["response"].split()) == " ".join(one.text.split()) for call, one in zip(calls, found, strict=True)]
    return large, [right and equal for right, equal in zip(large, same, strict=True)]


@dataclass(frozen=True)
class Fitted:
    """A candidate, trained on a cluster, with its answers to the validation calls."""

    scored: Scored
    policy: Policy
    valid: list[Answer]


class Round:
    """One round. `root`: paths of the settings are relative to it."""

    def __init__(self, settings: Conversion, root: Path, number: int) -> None:
        self.settings, self.root, self.number = settings, root, number
        self.out = root / settings.out
        self._teacher: Policy | None = None

    @property
    def teacher(self) -> Policy:
        if self._teacher is None:
            self._teacher = load_policy(self.root / self.settings.teacher)
        return self._teacher

    def _answers(self, policy: Policy, calls: Sequence[Call]) -> list[Answer]:
        return answers(policy, calls, self.settings.max_length, self.settings.max_tokens)

    def candidates(self, cluster: int, train_calls: Sequence[Call], valid_calls: Sequence[Call]) -> list[Fitted]:
        """Every candidate, trained on the cluster's calls."""
        import time

        settings, found = self.settings, []
        for name, candidate in sorted(settings.select.candidates.items()):
            policy = load_policy(self.root / candidate.path)
            if parameters(policy) > settings.select.max_params or candidate.licence not in settings.select.licence_allow:
                continue
            teacher = self.teacher if settings.specialise.kd_weight else None
            train(
                policy, teacher, train_calls, settings.specialise, settings.max_length, settings.seed, "conversion", cluster, name
            )
            began = time.monotonic()
            valid = self._answers(policy, valid_calls)
            latency = 1000 * (time.monotonic() - began) / max(len(valid_calls), 1)
            _, right = quality(valid_calls, valid)
            score = float(np.mean(right)) if right else 0.0
            size = parameters(policy)
            scored = Scored(name, score, size / parameters(self.teacher), size, latency, candidate.licence)
            found.append(Fitted(scored, policy, valid))
        return found

    def specialist(self, cluster: int, parts: dict[str, list[Call]]) -> tuple[Specialist | None, dict[str, Any]]:
        """The cluster's specialist, saved, and the report's row; None: the cluster stays with the large model."""
        router = self.settings.router
        fitted = self.candidates(cluster, parts["train"], parts["valid"])
        row: dict[str, Any] = {
            "rows": {name: len(calls) for name, calls in parts.items()},
            "candidates": {one.scored.name: {"score": one.scored.score, "cost": one.scored.cost} for one in fitted},
        }
        chosen = select([one.scored for one in fitted], self.settings.select)
        if chosen is None:
            return None, {**row, "served_by": LARGE, "why": "no candidate meets size, latency and licence"}
        one = next(one for one in fitted if one.scored == chosen)
        large, right = quality(parts["valid"], one.valid)
        wanted = float(np.mean(large)) - router.epsilon if large else 1.0
        threshold = calibrated([answer.confidence for answer in one.valid], right, wanted, router.min_confidence)
        shapes = tuple(sorted({answer_shape(call["response"]) for call in parts["train"]}))
        made = Specialist(cluster, chosen.name, round(threshold, 9) if np.isfinite(threshold) else 2.0, shapes, chosen.cost)
        return self._promote(made, one, parts["test"], row)

    def _promote(
        self, made: Specialist, one: Fitted, test: list[Call], row: dict[str, Any]
    ) -> tuple[Specialist | None, dict[str, Any]]:
        """Promote a specialist if it is not worse on the test calls that it would answer, by the lower bound."""
        router = self.settings.router
        found = self._answers(one.policy, test)
        large, right = quality(test, found)
        takes = [answer.confidence >= made.threshold and answer_shape(answer.text) in made.shapes for answer in found]
        pairs = [
            (int(ours) - int(theirs), call["trace"])
            for ours, theirs, call, own in zip(right, large, test, takes, strict=True)
            if own
        ]
        bound = (
            lower_bound([pair[0] for pair in pairs], [pair[1] for pair in pairs], router, self.settings.seed) if pairs else None
        )
        row |= {
            "candidate": made.candidate,
            "threshold": made.threshold,
            "kept": sum(takes) / max(len(takes), 1),
            "rho": made.rho,
            "quality_large": float(np.mean(large)) if large else None,
            "quality_specialist": float(np.mean(right)) if right else None,
            "difference_lower_bound": bound,
        }
        if bound is None or bound < -router.epsilon - 1e-12:
            why = "no test call is answered with enough confidence" if bound is None else "worse than the large model"
            return None, {**row, "served_by": LARGE, "why": why}
        save(one.policy, self.out / f"specialist-{made.cluster}")
        return made, {**row, "served_by": made.candidate}

    def run(self, calls: Sequence[Call], masker: Masker, bar: Progress | None = None) -> dict[str, Any]:
        """Convert; returns the report. With too few calls, nothing but the report is written."""
        kept = curated(calls, self.settings.curate, masker, self.settings.seed)
        report: dict[str, Any] = {"round": self.number, "calls": len(calls), "curated": kept.counts}
        if len(kept.parts["train"]) < self.settings.curate.min_examples:
            why = f"{len(kept.parts['train'])} training calls; curate.min_examples is {self.settings.curate.min_examples}"
            return {
                **report,
                "status": NOT_CONVERTIBLE,
                "why": why,
                "cost_per_call": 1.0,
                "replaceable_share": 0.0,
                "clusters": {},
            }
        clusters, labels = fit_clusters(kept.parts["train"], self.settings.cluster)
        report |= {"silhouette": clusters.silhouette, "cluster_sizes": clusters.sizes}
        specialists, rows = self._specialists(clusters, labels, kept, bar)
        router = CallRouter(self.out, clusters, specialists, self.settings.router.min_similarity)
        router.save()
        return {**report, **self._accounting(router, kept, rows), "status": CONVERTED}

    def _specialists(
        self, clusters: Clusters, labels: np.ndarray, kept: Curated, bar: Progress | None
    ) -> tuple[list[Specialist], dict[str, dict[str, Any]]]:
        found, rows = [], {}
        assigned = {name: clusters.nearest(part, answered=True)[0] if part else [] for name, part in kept.parts.items()}
        assigned["train"] = labels
        for cluster in range(clusters.count):
            parts = {
                name: [call for call, own in zip(calls, assigned[name], strict=True) if own == cluster]
                for name, calls in kept.parts.items()
            }
            shapes = sorted({answer_shape(call["response"]) for call in parts["train"]})
            if cluster in clusters.served:
                made, row = self.specialist(cluster, parts)
                found += [made] if made is not None else []
            else:
                why = f"{clusters.sizes[cluster]} training calls; cluster.min_cluster is {self.settings.cluster.min_cluster}"
                row = {"rows": {name: len(part) for name, part in parts.items()}, "served_by": LARGE, "why": why}
            rows[str(cluster)] = {"answers": shapes[:6], **row}
            if bar is not None:
                bar.advance(1, f"cluster {cluster}: {row['served_by']}")
        return found, rows

    def _accounting(self, router: CallRouter, kept: Curated, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What a call costs with the router, on held-out calls, relative to the large model alone."""
        held_out = kept.parts["valid"] + kept.parts["test"]
        routed = router.route(held_out, self.settings.max_length, self.settings.max_tokens)
        shares = []
        for cluster, specialist in sorted(router.specialists.items()):
            own = [one for one in routed if one.cluster == cluster]
            weight, taken = len(own) / max(len(routed), 1), sum(one.by != LARGE for one in own)
            rows[str(cluster)] |= {"weight": weight, "routed": taken / max(len(own), 1)}
            shares.append(Share(weight, taken / max(len(own), 1), specialist.rho))
        atomic_text(self.out / "hard.jsonl", queued(held_out, routed))
        return {
            "clusters": rows,
            "held_out_calls": len(held_out),
            "cost_per_call": cost_per_call(shares),
            "replaceable_share": replaceable_share(shares),
            "fallback_rate": 1 - replaceable_share(shares),
        }


def due(settings: Conversion, calls: Sequence[Call], masker: Masker, root: Path, state: dict[str, Any] | None) -> str:
    """Why a round starts; "": nothing is new."""
    iterate = settings.iterate
    if state is None or state["settings"] != params_hash(settings):
        return "first round" if state is None else "settings changed"
    new = len(calls) - state["calls"]
    if new <= 0 or state["round"] >= iterate.max_rounds:
        return ""
    if new >= iterate.every_n_calls:
        return f"{new} new calls"
    if not (root / settings.out / "router.json").exists():
        return ""
    names = {(call["trace"], call["call"]) for call in state["newest"]}
    fresh = [masker.mask_call(call) for call in calls if (call["trace"], call["call"]) not in names]
    routed = CallRouter.load(root / settings.out).route(fresh[-iterate.every_n_calls :], settings.max_length, settings.max_tokens)
    rate = sum(one.by == LARGE for one in routed) / max(len(routed), 1)
    return f"fallback rate {rate:.0%}" if rate > max(iterate.fallback_rate_above, state["fallback_rate"]) else ""


def convert(settings: Conversion, root: Path, bar: Progress | None = None) -> dict[str, Any]:
    """One round, if there is a reason for one; otherwise no file changes. Raises FileNotFoundError without a log, LeakError."""
    from stages.conversion.dashboard import write_dashboard

    out, state_file = root / settings.out, root / settings.out / "state.json"
    calls = read_calls(root / settings.log)
    masker = Masker(load_key(root / settings.key), settings.curate.pii, settings.curate.names)
    state = read_json(state_file) if state_file.exists() else None
    why = due(settings, calls, masker, root, state)
    if not why:
        return {**read_json(out / "report.json"), "status": NOTHING_NEW}
    out.mkdir(parents=True, exist_ok=True)
    history = [] if state is None else state["history"]
    number = 1 if state is None else state["round"] + 1
    report = {"why_now": why, **Round(settings, root, number).run(calls, masker, bar)}
    history = [*history, {key: report[key] for key in ("round", "status", "calls", "cost_per_call", "replaceable_share")}]
    write_json(out / "report.json", report)
    write_dashboard(out / "dashboard.html", report, history)
    newest = [{"trace": call["trace"], "call": call["call"]} for call in calls]
    fallback = report.get("fallback_rate", 1.0)
    made = {"round": number, "calls": len(calls), "newest": newest, "fallback_rate": fallback, "history": history}
    write_json(state_file, {**made, "settings": params_hash(settings)})
    return report
