"""The rounds of a conversion, S1 to S6: collect, curate, cluster, select, specialise, route, promote.

<log> -> <out>/{router.json, specialist-<k>/, report.json, state.json, dashboard.html}. The same log and settings give the same
bytes. The values of placeholders stay in the log's vault. Calls that fell back are marked in the log, from which the next round
takes them first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from stages.agent.policy import Policy, load_policy, policy_hash
from stages.conversion.call_log import expire, read_calls
from stages.conversion.call_log import today as this_day
from stages.conversion.choice import Scored, Share, calibrated, cost_per_call, promotion, replaceable_share, select
from stages.conversion.clusters import Clusters, answer_shape, fit_clusters
from stages.conversion.curate_calls import Call, Curated, curated, judged
from stages.conversion.masking import Masker, masker_of
from stages.conversion.router import LARGE, CallRouter, Specialist
from stages.conversion.settings import Conversion
from stages.conversion.specialise import Answer, answers, parameters, save, train
from stages.conversion.triggers import (
    CONVERTED,
    NOT_CONVERTIBLE,
    NOTHING_NEW,
    due,
    fallback_rate,
    key_of,
    rights,
    same_answer,
)
from stages.records.card import Card
from stages.records.episode import read_json, write_json
from stages.records.sections import params_hash

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


def quality(calls: Sequence[Call], found: Sequence[Answer]) -> tuple[list[bool], list[bool]]:
    """Whether the large model's and the specialist's answers are right, by call: the former in traces that succeeded, the latter
    where it also gives the same answer. `calls`: only those that are `judged`."""
    large = [call["outcome"] == 1 for call in calls]
    return large, [right and same_answer(call, one) for right, call, one in zip(large, calls, found, strict=True)]


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
        router, valid = self.settings.router, [call for call in parts["valid"] if judged(call)]
        fitted = self.candidates(cluster, parts["train"], valid)
        row: dict[str, Any] = {
            "rows": {name: len(calls) for name, calls in parts.items()},
            "candidates": {one.scored.name: {"score": one.scored.score, "cost": one.scored.cost} for one in fitted},
        }
        chosen = select([one.scored for one in fitted], self.settings.select)
        if chosen is None:
            return None, {**row, "served_by": LARGE, "why": "no candidate meets size, latency and licence"}
        one = next(one for one in fitted if one.scored == chosen)
        shapes = tuple(sorted({answer_shape(call["response"]) for call in parts["train"]}))
        made = Specialist(cluster, chosen.name, 0.0, shapes, chosen.cost)
        large, right = quality(valid, one.valid)
        wanted = float(np.mean(large)) - router.epsilon if any(large) else 1.0
        formed = [not made.refusal(call, answer) for call, answer in zip(valid, one.valid, strict=True)]
        known = [(answer.confidence, same) for answer, same, own in zip(one.valid, right, formed, strict=True) if own]
        threshold = calibrated([pair[0] for pair in known], [pair[1] for pair in known], wanted, router.min_confidence)
        made = replace(made, threshold=threshold if np.isfinite(threshold) else 2.0)
        return self._promote(made, one, [call for call in parts["test"] if judged(call)], row)

    def _promote(
        self, made: Specialist, one: Fitted, test: list[Call], row: dict[str, Any]
    ) -> tuple[Specialist | None, dict[str, Any]]:
        """Promote a specialist if it is not worse on the test calls that it would answer, by the lower bound, and answers enough
        of them to save cost. `test`: the cluster's calls that are `judged`."""
        found = self._answers(one.policy, test)
        large, right = quality(test, found)
        takes = [not made.refusal(call, answer) for call, answer in zip(test, found, strict=True)]
        taken = [place for place, own in enumerate(takes) if own]
        differences = [int(right[place]) - int(large[place]) for place in taken]
        traces, confirmed = [test[place]["trace"] for place in taken], sum(large[place] for place in taken)
        bound, why = promotion(differences, traces, confirmed, self.settings.router, self.settings.seed)
        kept = len(taken) / max(len(test), 1)
        if not why and kept <= made.rho:
            why = f"it keeps {kept:.0%} of its calls, and each costs {made.rho:.0%} of the large model's: it saves nothing"
        row |= {
            "candidate": made.candidate,
            "threshold": made.threshold,
            "kept": kept,
            "confirmed": confirmed,
            "rho": made.rho,
            "quality_large": float(np.mean(large)) if large else None,
            "quality_specialist": float(np.mean(right)) if right else None,
            "difference_lower_bound": bound,
        }
        if why:
            return None, {**row, "served_by": LARGE, "why": why}
        folder = self.out / f"specialist-{made.cluster}"
        save(one.policy, folder)
        return replace(made, policy_hash=policy_hash(folder)), {**row, "served_by": made.candidate}

    def run(self, calls: Sequence[Call], masker: Masker) -> dict[str, Any]:
        """Convert; returns the report. With too few calls, nothing but the report is written."""
        kept = curated(calls, self.settings.curate, masker, self.settings.seed)
        answered = Counter(call["provenance"] + (f", {call['fallback']}" if call["fallback"] else "") for call in calls)
        counts = {"curated": kept.counts, "answered_by": dict(sorted(answered.items()))}
        report: dict[str, Any] = {"round": self.number, "calls": len(calls), **counts}
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
        specialists, rows = self._specialists(clusters, labels, kept)
        limits = self.settings.router.min_similarity, self.settings.max_length, self.settings.max_tokens
        router = CallRouter(self.out, clusters, specialists, *limits)
        router.save()
        return {**report, **self._accounting(router, kept, rows), "status": CONVERTED}

    def _specialists(
        self, clusters: Clusters, labels: np.ndarray, kept: Curated
    ) -> tuple[list[Specialist], dict[str, dict[str, Any]]]:
        """By cluster. Validation and test calls are assigned as the router assigns calls, which have no answers yet."""
        found, rows, floor = [], {}, self.settings.router.min_similarity
        assigned = {name: clusters.resembled(part, floor) for name, part in kept.parts.items() if name != "train"}
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
        return found, rows

    def _accounting(self, router: CallRouter, kept: Curated, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """What a call costs with the router, relative to the large model alone, on test calls: validation calls chose models and
        thresholds. Calls count whatever their outcome; the quality is that of calls whose outcome is known."""
        test = kept.parts["test"]
        routed = router.route(test)
        shares, right = [], rights(test, routed)
        for cluster, specialist in sorted(router.specialists.items()):
            own = [one for one in routed if one.cluster == cluster]
            weight, taken = len(own) / max(len(routed), 1), sum(one.by != LARGE for one in own)
            rows[str(cluster)] |= {"weight": weight, "routed": taken / max(len(own), 1)}
            shares.append(Share(weight, taken / max(len(own), 1), specialist.rho))
        return {
            "clusters": rows,
            "test_calls": len(test),
            "cost_per_call": cost_per_call(shares),
            "replaceable_share": replaceable_share(shares),
            "fallback_rate": fallback_rate(routed),
            "quality": float(np.mean(right)) if right else None,
        }


def convert(settings: Conversion, root: Path, today: date | None = None) -> dict[str, Any]:
    """One round, if there is a reason for one; otherwise no file changes, but for rows of the log that are too old by `today`
    (None: the day in UTC), which are deleted first. Raises FileNotFoundError without a log, LeakError."""
    from stages.conversion.dashboard import write_dashboard

    out, state_file = root / settings.out, root / settings.out / "state.json"
    expire(root / settings.log, settings.collect.retention_days, today or this_day())
    calls = read_calls(root / settings.log)
    masker = masker_of(settings, root)
    state = read_json(state_file) if state_file.exists() else None
    why = due(settings, calls, masker, root, state)
    if not why:
        return {**read_json(out / "report.json"), "status": NOTHING_NEW}
    out.mkdir(parents=True, exist_ok=True)
    history = [] if state is None else state["history"]
    number = 1 if state is None else state["round"] + 1
    report = {"why_now": why, **Round(settings, root, number).run(calls, masker)}
    history = [*history, {key: report[key] for key in ("round", "status", "calls", "cost_per_call", "replaceable_share")}]
    write_json(out / "report.json", report)
    write_dashboard(out / "dashboard.html", report, history)
    seen = [list(key_of(call, masker)) for call in calls]
    made = {"round": number, "seen": seen, "quality": report.get("quality"), "history": history}
    write_json(state_file, {**made, "settings": params_hash(settings)})
    return report
