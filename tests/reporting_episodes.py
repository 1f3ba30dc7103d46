"""Episodes of a small run, and its search trees, as the stages store them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reporting_documents import ATTEMPTS, TRUE_SUCCESS

from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.evaluation.stored_episodes import packed, write_played
from stages.records.episode import EPISODE_SCHEMA, sample_schema, write_table

CREDITED = "search"
"""The domain whose method credits steps."""
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


def drawn_outcomes(rng: random.Random) -> list[dict[str, Any]]:
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
                    "panel": f"panel of {domain}",
                    "success": rng.random() < p,
                }
                rows.append({field.name: outcome.get(field.name) for field in EVALUATION_SCHEMA})
    return rows


def drawn_nodes(domain: str, rng: random.Random, trees: int = 6, iterations: int = 16) -> list[dict[str, Any]]:
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


def write_tokenizer(path: Path) -> Any:
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


def drawn_episode(
    domain: str, number: int, attempt: int, tokenizer: Any, rng: random.Random, p: float, source: str
) -> dict[str, Any]:
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


def write_rollouts_and_samples(root: Path, domain: str, rng: random.Random, tokenizer: Any) -> None:
    rollouts = [
        drawn_episode(domain, task, attempt, tokenizer, rng, task / 24, "sft") for task in range(24) for attempt in range(4)
    ]
    write_table(root / "data" / "rollouts" / domain / "episodes.parquet", EPISODE_SCHEMA, rollouts)
    samples = []
    for task in range(12):
        row = drawn_episode(domain, task, 0, tokenizer, rng, 0.6, "rl")
        sign = 1.0 if row["reward"] else -1.0
        values = [sign * (0.6 + 0.1 * turn) if owner == 1 else 0.0 for owner, turn in zip(row["owner"], row["turn"], strict=True)]
        samples.append({**row, "step": 1 if task < 6 else 20, "advantages": values})
        if domain == CREDITED:
            samples[-1]["credit"] = [sign * 0.25 * turn for turn in range(len(row["turns"]))]
    write_table(root / "data" / "rl" / domain / "samples.parquet", sample_schema(samples), samples)


def write_played_episodes(root: Path, outcomes: Sequence[Mapping[str, Any]], tokenizer: Any) -> None:
    """The episodes behind the evaluation's rows; half of the tasks are played alike by all models, up to their ends."""
    parts = []
    for (model, domain), rows in itertools.groupby(outcomes, key=lambda row: (row["model"], row["domain"])):
        played = []
        for row in rows:
            number = int(row["task_id"].rpartition("-")[2])
            rng = random.Random(f"{domain} {number} {row['attempt']} {model if number % 2 else ''}")
            episode = drawn_episode(domain, number, row["attempt"], tokenizer, rng, float(row["success"]), "test")
            name = f"{row['task_id']}/{row['attempt']:04d}"
            played.append({**episode, "episode_id": name, "task_id": row["task_id"], "attempt": row["attempt"]})
        parts.append((model, packed(played)))
    write_played(root / "data" / "evaluation" / "episodes.parquet", parts)
