"""Cloning of correct tree paths, and training on annotate's trees before rl."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from slow import slow_except

from stages import rl
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import load_policy
from stages.algorithms.resolve import resolve_section, warm_start_of
from stages.algorithms.settings import Rl
from stages.annotation.correct_paths import correct_episodes, correct_paths
from stages.annotation.pairs import PAIR_SCHEMA
from stages.params import parse_params
from stages.records.episode import NODE_SCHEMA, Owner, read_rows, write_table
from stages.runtime.validation import ParamsError
from training.toys import PAIRS, KilledError, kill_at_step, outputs, read_history, store_pairs

CLONING: dict[str, Any] = {"algorithm": "tree_bc", "steps": 4, "learning_rate": 0.01, "warmup_steps": 0, "checkpoint_every": 2}
PLAY: dict[str, Any] = {
    "steps": 3,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}


def run(context) -> tuple[list[dict[str, float]], dict[str, Any]]:
    rl.run(context)
    history = read_history(context.root)
    return history, json.loads((context.root / "reports/rl/toy.json").read_text())


def with_trees(make_context, name: str = "run", **section: Any):
    context = make_context("rl", name, rl=section)
    store_pairs(context)
    return context


def node(number: int, parent: int, depth: int, success: bool | None) -> dict[str, Any]:
    """A row of a tree; success: of an end, None for a node that is none."""
    return {
        **dict.fromkeys(NODE_SCHEMA.names),
        **{"task_id": "t", "node": number, "parent": parent, "depth": depth, "action": f"Go {number}", "observation": "seen"},
        **{"token_ids": [10 + number] if number else [], "context_ids": [7] if success is None else [], "logprob": [-0.5]},
        **{"n_success": int(bool(success)), "n_rollouts": 1, "reward": float(bool(success)), "state_key": str(number)},
        **{"terminal": success is not None, "truncated": False, "N": 1},
    }


TREE = [
    *(node(0, -1, 0, None), node(1, 0, 1, None), node(2, 1, 2, True), node(3, 0, 1, False)),
    *(node(4, 0, 1, True), node(5, 1, 2, True), node(6, 1, 2, False)),
]


def test_correct_paths_are_the_shortest_first() -> None:
    assert correct_paths(TREE, 9) == [[0, 4], [0, 1, 2], [0, 1, 5]]
    assert correct_paths(TREE, 2) == [[0, 4], [0, 1, 2]]


def test_path_is_the_episode_token_for_token() -> None:
    _, episode, _ = correct_episodes(TREE, 9, "toy")
    assert episode.token_ids == [7, 11, 7, 12]
    assert episode.owner == [Owner.PROMPT, Owner.POLICY, Owner.ENVIRONMENT, Owner.POLICY]
    assert episode.turn == [-1, 0, 0, 1]
    assert [(turn.action, turn.action_key, turn.state_key, turn.start, turn.end) for turn in episode.turns] == [
        ("Go 1", "go 1", "0", 1, 2),
        ("Go 2", "go 2", "1", 3, 4),
    ]
    assert (episode.reward, episode.success, episode.terminated) == (1.0, True, True)


def test_paths_succeed_whatever_the_domain_rewards() -> None:
    """Contract: a path to a success is a success where the return is below 1 (wordle's reward lmrl)."""
    tree = [{**row, "reward": -0.25} for row in TREE]
    assert [(episode.reward, episode.success) for episode in correct_episodes(tree, 1, "toy")] == [(-0.25, True)]


def test_loss_is_the_mean_over_the_paths_tokens(make_context):
    """Contract: only correct paths are trained, each of their policy tokens once a step, and no other token."""
    context = with_trees(make_context, **CLONING)
    history, report = run(context)
    paths = correct_episodes(read_rows(context.root / "data/annotated/toy/nodes.parquet"), 4, "toy")
    model = load_policy(context.root / "data/models/sft", attention="sdpa").model
    total, count = 0.0, 0
    for path in paths:
        mask = torch.tensor([[owner == Owner.POLICY for owner in path.owner]])
        with torch.no_grad():
            total += float(token_logprobs(model, torch.tensor([path.token_ids]), mask, 1.0).sum())
        count += int(mask.sum())
    assert len(paths) == PAIRS
    assert history[0]["loss"] == pytest.approx(-total / count, rel=1e-4)
    assert history[-1]["loss"] < history[0]["loss"] - 0.1
    assert (report["paths"], report["trees"], report["passes"], report["environment_steps"]) == (PAIRS, PAIRS, 4.0, 0)
    assert report["ledger/policy_tokens_trained"] == 4 * count
    assert report["ledger/environment_tokens_trained"] == 0


def test_trees_without_success_are_refused(make_context):
    context = with_trees(make_context, **CLONING)
    rows = [{**row, "n_success": 0} for row in read_rows(context.root / "data/annotated/toy/nodes.parquet")]
    write_table(context.root / "data/annotated/toy/nodes.parquet", NODE_SCHEMA, rows)
    with pytest.raises(ValueError, match=r"has no path to a success to clone; raise annotate\.tasks"):
        rl.run(context)


@pytest.mark.parametrize("algorithm", slow_except(("tree_bc", "step_dpo"), "tree_bc"))
@pytest.mark.parametrize("kill", [1, 5], ids=["before rl", "in rl"])
def test_warm_start_trains_first_and_resumes_to_the_same_bytes(make_context, algorithm: str, kill: int):
    """Contract: rl plays with the policy that warm_start trained; a kill in either training changes no byte."""
    section = {**PLAY, "warm_start": {**CLONING, "algorithm": algorithm, "steps": 3, "checkpoint_every": 1}}
    plain = with_trees(make_context, "plain", **section)
    history, report = run(plain)
    assert report["warm_start"]["algorithm"] == algorithm
    assert (report["warm_start"]["steps"], report["steps"], len(history)) == (3, 3, 3)
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-6), "the reference is the policy after warm_start"
    cold, _ = run(with_trees(make_context, "cold", **PLAY))
    assert history[0] != cold[0]
    killed = with_trees(make_context, "killed", **section)
    kill_at_step(killed, kill)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(with_trees(make_context, "killed", **section))
    assert outputs(killed.root) == outputs(plain.root)


def test_warm_start_keeps_the_seed_and_is_resolved() -> None:
    method, first = warm_start_of(Rl(seed=5, warm_start={"algorithm": "step_dpo", "steps": 7}))
    assert (method.card.slug, first.seed, first.steps, first.preference.level) == ("step_dpo", 5, 7, "step")
    assert warm_start_of(Rl()) is None


@pytest.mark.parametrize(
    ("warm_start", "message"),
    [
        ({"steps": 3}, "trees or the rollout stage's attempts before rl, which algorithm grpo"),
        ({"algorithm": "tree_bc", "warm_start": {"algorithm": "step_dpo"}}, "nothing below it to warm_start"),
        ({"algorithm": "tree_bc", "stepss": 3}, "rl.warm_start: unknown key 'stepss'"),
        ({"algorithm": "tree_bc", "settings": {"per_treee": 3}}, "per_treee"),
        ({"algorithm": "tree_bc", "group_size": 4}, "rl.warm_start.group_size has no effect: tree_bc learns from annotate's"),
        ({"algorithm": "rejection_sft", "group_size": 4}, "learns from the rollout stage's attempts, not from groups"),
        ({"algorithm": "tree_bc", "environment_steps": 3}, "rl.environment_steps has no effect: algorithm tree_bc plays no"),
        ({"algorithm": "tree_bc", "loss": {"kl_coef": 0.1}}, "learns from correct tree paths, not from what it plays"),
    ],
)
def test_invalid_warm_starts_are_refused(warm_start: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError) as error:
        resolve_section(Rl(warm_start=warm_start))
    assert message in str(error.value)


def test_warm_start_contradicting_another_section_is_refused() -> None:
    section = {"warm_start": {"algorithm": "dpo", "preference": {"source": "imported"}}}
    with pytest.raises(ParamsError, match=r"rl\.warm_start: rl\.preference\.source: imported needs imported pairs"):
        parse_params({"domains": ["toy"], "per_domain": {"toy": {"rl": section}}})


def test_pairs_of_other_trees_are_not_needed(make_context):
    """Contract: tree_bc reads the nodes alone."""
    context = with_trees(make_context, **CLONING)
    write_table(context.root / "data/annotated/toy/pairs.parquet", PAIR_SCHEMA, [])
    assert run(context)[1]["paths"] == PAIRS
