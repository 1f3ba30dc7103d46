"""A small, realistic run generated from a seed: every file the report reads, in the stages' formats."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stages.annotation.labels import LABEL_SCHEMA, label_rows
from stages.annotation.pairs import PAIR_SCHEMA, pair_rows
from stages.annotation.settings import Annotate
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.evaluation.stored_episodes import packed, write_played
from stages.params import Params, parse_params
from stages.records.episode import EPISODE_SCHEMA, NODE_SCHEMA, sample_schema, write_json, write_table
from stages.reporting.inputs import load_inputs
from stages.reporting.kept import Run, append
from stages.reporting.this_run import this_run

DOMAINS = ("textworld", "search")
CREDITED = "search"
"""The domain whose method credits steps."""
ATTEMPTS = 2
TRUE_SUCCESS = {
    "base": {"textworld": 0.02, "search": 0.01},
    "sft": {"textworld": 0.44, "search": 0.38},
    "rl@textworld": {"textworld": 0.71, "search": 0.33},
    "rl@search": {"textworld": 0.40, "search": 0.66},
    "merged": {"textworld": 0.68, "search": 0.62},
    "merged_linear": {"textworld": 0.59, "search": 0.55},
}
WORDS = {
    "textworld": ("go east", "take the brass key", "open the oak chest", "put the lamp on the shelf", "go west"),
    "search": (
        "search Ilvara Tem",
        "search river Osk mouth",
        "answer Port Calder",
        "search mayor of Denholm",
        "answer <1742> & more",
    ),
}


def _evaluation() -> dict[str, Any]:
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


def _outcomes(rng: random.Random) -> list[dict[str, Any]]:
    """Rows of data/evaluation/rows.parquet: ATTEMPTS attempts of every model at 40 tasks of each domain, four to a cluster."""
    rows = []
    for model, by_domain in TRUE_SUCCESS.items():
        for domain, p in by_domain.items():
            for task, attempt in itertools.product(range(40), range(ATTEMPTS)):
                outcome = {
                    "model": model,
                    "domain": domain,
                    "task_id": f"{domain}-test-{task:04d}",
                    "attempt": attempt,
                    "cluster": f"{domain}-{task // 4}",
                    "success": rng.random() < p,
                }
                rows.append({field.name: outcome.get(field.name) for field in EVALUATION_SCHEMA})
    return rows


def _measured_spans(stage: str) -> dict[str, Any]:
    """Costs of a stage of 83.4 s in two processes, half of their time in the stage's main work."""
    most = {"curate": "environment", "sft": "training", "rl": "training.forward", "merge": "other"}.get(
        stage.split("@")[0], "engine"
    )
    spans = {"start": 6.0, "environment": 20.0, "engine": 30.0, "training": 12.0, "waiting": 9.0, "files": 2.0, "other": 4.4}
    spans[most] = spans.get(most, 0.0) + 83.4
    counts = {"sampled_tokens": 81_000, "fed_tokens": 402_290, "environment_steps": 14_990}
    return {"peak_tree_bytes": 1_400_000_000, "cores": 2, "spans": spans, "beside": {"environment": 21.0}, "counts": counts}


def _write_earlier_run(root: Path, params: Params) -> None:
    """Write reports/runs.jsonl with one earlier run: PPO instead of GRPO, half the success on search, another machine."""
    now = this_run(load_inputs(root, params))
    values = now.model_dump()
    values["params"]["rl"]["algorithm"] = "ppo"
    values["solved"]["merged"]["search"] = [count // 2 for count in values["solved"]["merged"]["search"]]
    values["success"]["merged"]["search"]["mean"] /= 2
    took = {
        "seconds": 83.4,
        "cpu_seconds": 150.0,
        "peak_bytes": 1_100_000_000,
        "peak_gpu_bytes": 0,
        "machine": "Test CPU, 2 cores",
    }
    values["measured"] = {stage: {**took, "runs": 1, **_measured_spans(stage)} for stage in values["work"]}
    append(root, Run(**{**values, "note": "PPO first", "commit": "0123456789ab"}))


def _curate(domain: str, rng: random.Random) -> dict[str, Any]:
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


def _history(domain: str, rng: random.Random) -> str:
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


def _nodes(domain: str, rng: random.Random, trees: int = 6, iterations: int = 16) -> list[dict[str, Any]]:
    rows = []
    for tree in range(trees):
        quality = (tree + 0.5) / trees
        nodes = [{"node": 0, "parent": -1, "depth": 0, "N": 0, "W": 0.0, "terminal": False}]
        for _ in range(iterations * 2):
            parent = rng.choice([node for node in nodes if not node["terminal"]])
            ends = parent["depth"] >= 2 and rng.random() < 0.3
            nodes.append(
                {"node": len(nodes), "parent": parent["node"], "depth": parent["depth"] + 1, "N": 0, "W": 0.0, "terminal": ends}
            )
            value, current = float(rng.random() < quality), nodes[-1]
            while True:
                current["N"] += 1
                current["W"] += value
                if current["parent"] < 0:
                    break
                current = nodes[current["parent"]]
        for node in nodes:
            solved = round(node["W"])
            rows.append(
                {
                    **node,
                    "task_id": f"{domain}-train-{tree:04d}",
                    "action": "" if node["parent"] < 0 else rng.choice(WORDS[domain]),
                    "token_ids": [1, 2],
                    "logprob": [-0.1, -0.2],
                    "prior": 0.3,
                    "n_success": solved,
                    "n_rollouts": node["N"],
                    "reward": float(node["terminal"] and solved > 0),
                    "truncated": False,
                    "state_key": f"s{node['node']}",
                    "iteration": node["node"],
                    "observation": "",
                    "context_ids": [3],
                    **dict.fromkeys(("R", "R2"), 0.0 if node["terminal"] else float(solved)),
                }
            )
    return rows


def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    texts = [word for words in WORDS.values() for word in words] * 3 + ["You are in a kitchen.", "You see nothing special here."]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def _episode(domain: str, number: int, attempt: int, tokenizer: Any, rng: random.Random, p: float, source: str) -> dict[str, Any]:
    """One episode in EPISODE_SCHEMA: a prompt, then actions and observations until success, failure or the turn limit."""
    prompt = f"Your task in {domain}: find what is asked.\nYou are in a kitchen."
    messages = [{"role": "user", "content": prompt}]
    row: dict[str, Any] = {"token_ids": [], "owner": [], "logprob": [], "turn": [], "turns": []}

    def add(text: str, owner: int, turn: int) -> tuple[int, int]:
        ids = tokenizer.encode(text).ids
        start = len(row["token_ids"])
        row["token_ids"] += ids
        row["owner"] += [owner] * len(ids)
        row["logprob"] += [-rng.expovariate(2.5) if owner == 1 else 0.0 for _ in ids]
        row["turn"] += [turn] * len(ids)
        return start, start + len(ids)

    add(f"<|user|>{prompt}<|end|><|assistant|>", 0, -1)
    succeeds, count = rng.random() < p, rng.randrange(2, 7)
    for turn in range(count):
        action, last = rng.choice(WORDS[domain]), turn == count - 1
        start, end = add(f"{action}<|end|>", 1, turn)
        observation = "Done." if last else "You see nothing special here."
        reward = float(last and succeeds)
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        if not last:
            add(f"<|user|>{observation}<|end|><|assistant|>", 2, turn)
        key, accepted = f"k{turn}", rng.random() < 0.9
        step = {"action": action, "observation": observation, "accepted": accepted, "reward": reward, "cost": 1.0}
        row["turns"].append({**step, "state_key": key, "action_key": action, "start": start, "end": end})
    truncated = not succeeds and rng.random() < 0.5
    return {
        **row,
        "episode_id": f"{domain}-{source}-{number:04d}-{attempt}",
        "task_id": f"{domain}-train-{number:04d}",
        "domain": domain,
        "group_id": f"{domain}-{number:04d}",
        "seed": number,
        "policy_hash": "5f7a11c0ffee" if source == "sft" else f"a1b2c3{domain[0]}",
        "params_hash": "0123456789abcdef",
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "reward": float(succeeds),
        "reward_terms": json.dumps({"exact_match": float(succeeds)}),
        "terminated": not truncated,
        "truncated": truncated,
        "stop_reason": "turn_limit" if truncated else "terminated",
        "messages": messages,
    }


def _write_episodes(root: Path, domain: str, rng: random.Random, tokenizer: Any) -> None:
    rollouts = [_episode(domain, task, attempt, tokenizer, rng, task / 24, "sft") for task in range(24) for attempt in range(4)]
    write_table(root / "data" / "rollouts" / domain / "episodes.parquet", EPISODE_SCHEMA, rollouts)
    samples = []
    for task in range(12):
        row = _episode(domain, task, 0, tokenizer, rng, 0.6, "rl")
        sign = 1.0 if row["reward"] else -1.0
        values = [sign * (0.6 + 0.1 * turn) if owner == 1 else 0.0 for owner, turn in zip(row["owner"], row["turn"], strict=True)]
        samples.append({**row, "step": 1 if task < 6 else 20, "advantages": values})
        if domain == CREDITED:
            samples[-1]["credit"] = [sign * 0.25 * turn for turn in range(len(row["turns"]))]
    write_table(root / "data" / "rl" / domain / "samples.parquet", sample_schema(samples), samples)


def _write_played(root: Path, outcomes: Sequence[Mapping[str, Any]], tokenizer: Any) -> None:
    """The episodes behind the evaluation's rows; half of the tasks are played alike by all models, up to their ends."""
    parts = []
    for (model, domain), rows in itertools.groupby(outcomes, key=lambda row: (row["model"], row["domain"])):
        played = []
        for row in rows:
            number = int(row["task_id"].rpartition("-")[2])
            rng = random.Random(f"{domain} {number} {row['attempt']} {model if number % 2 else ''}")
            episode = _episode(domain, number, row["attempt"], tokenizer, rng, float(row["success"]), "test")
            name = f"{row['task_id']}/{row['attempt']:04d}"
            played.append({**episode, "episode_id": name, "task_id": row["task_id"], "attempt": row["attempt"]})
        parts.append((model, packed(played)))
    write_played(root / "data" / "evaluation" / "episodes.parquet", parts)


def _merge(rng: random.Random) -> dict[str, Any]:
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


def _annotate(rng: random.Random) -> dict[str, Any]:
    bins = []
    for number in range(10):
        middle = (number + 0.5) / 10
        bins.append(
            {"predicted": middle, "observed": min(1.0, max(0.0, middle + rng.gauss(0, 0.05))), "count": rng.randrange(3, 90)}
        )
    calibration = {"ece": 0.03, "brier": 0.14, "explained_variance": 0.52, "correlation": 0.73, "bins": bins}
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


def _write_sft(reports: Path) -> None:
    write_json(reports / "sft.json", {"best_step": 100, "steps": 150, "best_valid_loss": 0.21, "policy_tokens": 41_230})
    lines = ["step,train_loss,valid_loss,lr"]
    for i in range(7):
        fall = math.exp(-i / 3)
        lines.append(f"{25 * i},{1.6 * fall + 0.2:.4f},{1.5 * fall + 0.26 + 0.08 * max(0, i - 4):.4f},{5e-4 * (1 - i / 8):.3g}")
    (reports / "sft").mkdir()
    (reports / "sft" / "history.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_run(root: Path, seed: int = 0) -> Params:
    """Write a complete run below `root`; returns its parameters (also written to params.yaml)."""
    rng = random.Random(seed)
    values = {"domains": list(DOMAINS), "per_domain": {domain: {} for domain in DOMAINS}, "report": {"episodes": 12}}
    root.mkdir(parents=True, exist_ok=True)
    (root / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    reports = root / "reports"
    write_json(reports / "evaluation.json", _evaluation())
    _write_sft(reports)
    write_json(reports / "merge.json", _merge(rng))
    tokenizer = _tokenizer(root / "data" / "models" / "sft" / "tokenizer.json")
    (reports / "rl").mkdir()
    for domain in DOMAINS:
        base = 0.3 + 0.2 * rng.random()
        pass_at_k = {str(k): 1 - (1 - base) ** (k**0.6) for k in (1, 2, 4)}
        rollout = {"episodes": 96, "success": base, "pass_at_k": pass_at_k, "turns": {"mean": 4.2, "max": 9}}
        write_json(reports / "curate" / f"{domain}.json", _curate(domain, rng))
        write_json(reports / "rollout" / f"{domain}.json", rollout)
        write_json(reports / "annotate" / f"{domain}.json", _annotate(rng))
        (reports / "rl" / f"{domain}_history.csv").write_text(_history(domain, rng), encoding="utf-8")
        write_json(reports / "rl" / f"{domain}.json", {"algorithm": "grpo", "episodes": 2560, "success_last": 0.7})
        nodes = _nodes(domain, rng)
        annotated, settings = root / "data" / "annotated" / domain, Annotate()
        write_table(annotated / "nodes.parquet", NODE_SCHEMA, nodes)
        write_table(annotated / "labels.parquet", LABEL_SCHEMA, label_rows(nodes, settings))
        write_table(annotated / "pairs.parquet", PAIR_SCHEMA, pair_rows(nodes, settings))
        _write_episodes(root, domain, rng, tokenizer)
    outcomes = _outcomes(rng)
    write_table(root / "data" / "evaluation" / "rows.parquet", EVALUATION_SCHEMA, outcomes)
    _write_played(root, outcomes, tokenizer)
    params = parse_params(values)
    _write_earlier_run(root, params)
    return params


def add_value_model(root: Path, domain: str) -> Path:
    """Write a random step-value model for a domain of a run; its folder."""
    import torch
    from tiny import make_tiny_model

    from stages.values.settings import HeadParams
    from stages.values.step_value import StepValueModel

    model = StepValueModel(make_tiny_model(512).base_model, HeadParams(loss="mse"))
    torch.nn.init.normal_(model.output.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    folder = root / "data" / "annotated" / domain / "value_model"
    model.save(folder)
    return folder
