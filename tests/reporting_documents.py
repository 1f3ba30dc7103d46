"""Reports of the stages of a small run: curation, training, annotation, merging and evaluation."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from stages.records.episode import write_json

DOMAINS = ("textworld", "search")
ATTEMPTS = 2
TRUE_SUCCESS = {
    "base": {"textworld": 0.02, "search": 0.01},
    "sft": {"textworld": 0.44, "search": 0.38},
    "rl@textworld": {"textworld": 0.71, "search": 0.33},
    "rl@search": {"textworld": 0.40, "search": 0.66},
    "merged": {"textworld": 0.68, "search": 0.62},
    "merged_linear": {"textworld": 0.59, "search": 0.55},
}


def evaluation_report() -> dict[str, Any]:
    def row(p: float) -> dict[str, Any]:
        half = 1.96 * math.sqrt(max(p * (1 - p), 0.01) / 200)
        return {
            "success": {"mean": p, "low": max(0.0, p - half), "high": min(1.0, p + half), "n": 200},
            "reward": {"mean": p, "low": max(0.0, p - half), "high": min(1.0, p + half), "n": 200},
            "turns": 9.3 - 5 * p,
            "tokens": 310.5 - 100 * p,
            "pass_at_k": {"1": p, "2": 1 - (1 - p) ** 1.6},
            "by_difficulty": {
                str(level): {"success": max(0.0, p * (1.3 - 0.15 * level)), "attempts": 100} for level in (1, 2, 3, 4)
            },
            "policy_hash": f"{int(p * 1e9):016x}",
        }

    def comparison(a: str, b: str, domain: str) -> dict[str, Any]:
        difference = TRUE_SUCCESS[a][domain] - TRUE_SUCCESS[b][domain]
        low, high = difference - 0.06, difference + 0.06
        verdict = "better" if low > 0 else "worse" if high < 0 else "undecided"
        return {
            "a": a,
            "b": b,
            "domain": domain,
            "difference": difference,
            "low": low,
            "high": high,
            "p": 0.0004 if verdict != "undecided" else 0.21,
            "verdict": verdict,
        }

    pairs = [("sft", "base"), ("merged", "sft"), ("merged", "merged_linear")]
    return {
        "panels": {domain: f"{domain[0]}0ffee{index}0c0ffee" for index, domain in enumerate(DOMAINS)},
        "models": {model: {domain: row(p) for domain, p in by.items()} for model, by in TRUE_SUCCESS.items()},
        "comparisons": [
            comparison(a, b, domain)
            for domain in DOMAINS
            for a, b in [*pairs, (f"rl@{domain}", "sft"), ("merged", f"rl@{domain}")]
        ],
        "attempts": ATTEMPTS,
    }  # fmt: skip


def curate_report(domain: str, rng: random.Random) -> dict[str, Any]:
    levels = {"textworld": ("2", "3", "4", "5", "10"), "search": ("1", "2", "3")}[domain]
    return {
        "domain": domain,
        "source": {"file": f"data/raw/{domain}.jsonl", "records": 431, "unused": 9},
        "splits": {
            split: {
                "asked": n,
                "kept": n,
                "clusters": n // 2,
                "difficulty": {level: n // len(levels) + rng.randrange(6) for level in levels},
            }
            for split, n in (("train", 192), ("valid", 24), ("test", 200))
        },
        "rejected": {"malformed": 2, "duplicate": 3, "overlap_with_test": 1},
        "rejections": [
            {"reason": "malformed", "where": f"data/raw/{domain}.jsonl:17", "task_id": "", "detail": "no field 'seed'"}
        ],
        "demonstrations": {
            "kept": {"expert": 216, "noisy": 203},
            "rejected": {"noisy:near_duplicate": 11, "noisy:unsolved": 2},
            "turns": {str(turns): 70 - 6 * turns for turns in range(2, 11)},
        },
        "panel": {"hash": "abc", "n": 200},
    }


def history_table(domain: str, rng: random.Random) -> str:
    lines = ["step,reward_mean,success,loss,kl,entropy,clip_fraction,grad_norm,dead_groups,turns,tokens"]
    start, end = (0.44, 0.72) if domain == "textworld" else (0.38, 0.67)
    for step in range(1, 21):
        success = start + (end - start) * step / 20 + rng.gauss(0, 0.04)
        values = (
            success,
            success,
            rng.gauss(0, 0.01),
            0.002 * step,
            0.6 - 0.015 * step,
            0.01,
            0.9 + rng.random(),
            rng.randrange(2, 9),
            7 - step / 8,
            300 - 3 * step,
        )
        lines.append(",".join([str(step), *(f"{value:.6g}" for value in values)]))
    return "\n".join(lines) + "\n"


def merge_report(rng: random.Random) -> dict[str, Any]:
    groups = ["embed_tokens", *(f"layers.{layer}.{part}" for layer in range(4) for part in ("self_attn", "mlp", "norm")), "norm"]
    a, b = DOMAINS
    vector = {
        "changed": 900_000,
        "changed_fraction": 0.75,
        "unique_fraction": 0.2,
        "sparsity": 0.013,
        "norm": 2.31,
        "largest": 0.01,
    }
    diagnostics = {
        "eps": 1e-5,
        "entries": 1_200_000,
        "models": {name: {**vector, "changed_by_eps": {"1e-05": 0.75, "0.001": 0.02}} for name in DOMAINS},
        "pairs": [{"a": a, "b": b, "overlap": 700_000, "jaccard": 0.64, "sign_agreement": 0.53, "cosine": 0.08}],
        "histogram": [100_000, 400_000, 700_000],
        "groups": [
            {
                "group": group,
                "entries": 1000,
                "changed_fraction": {name: rng.random() ** 0.5 for name in DOMAINS},
                "shared_fraction": rng.random() * 0.6,
            }
            for group in groups
        ],
    }
    return {
        "method": "ram_plus",
        "requested": "ram_plus",
        "base": "sft",
        "domains": list(DOMAINS),
        "parameters": {"lam": 1.0},
        "scan": {a: {"shared": 400, "unique": 200, "enlargement": 1.1}},
        "distance_to_linear": 0.41,
        "diagnostics": diagnostics,
    }


def annotate_report(rng: random.Random) -> dict[str, Any]:
    bins = []
    for number in range(10):
        middle = (number + 0.5) / 10
        bins.append(
            {"predicted": middle, "observed": min(1.0, max(0.0, middle + rng.gauss(0, 0.05))), "count": rng.randrange(3, 90)}
        )
    calibration = {"ece": 0.03, "brier": 0.14, "explained_variance": 0.52, "explainable": 0.8, "correlation": 0.73, "bins": bins}
    return {
        "trees": 6,
        "nodes": 198,
        "ends": {"correct": 20, "wrong": 9, "truncated": 4},
        "root_success": 0.45,
        "root_tree_value": 0.52,
        "labels": {"count": 140},
        "pairs": {"count": 61, "task_share": 0.83},
        "value_model": {"held_out_tasks": 2, "calibration": calibration},
    }


def write_sft_reports(reports: Path) -> None:
    write_json(reports / "sft.json", {"best_step": 100, "steps": 150, "best_valid_loss": 0.21, "policy_tokens": 41_230})
    lines = ["step,train_loss,valid_loss,lr"]
    for i in range(7):
        fall = math.exp(-i / 3)
        lines.append(f"{25 * i},{1.6 * fall + 0.2:.4f},{1.5 * fall + 0.26 + 0.08 * max(0, i - 4):.4f},{5e-4 * (1 - i / 8):.3g}")
    (reports / "sft").mkdir()
    (reports / "sft" / "history.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
