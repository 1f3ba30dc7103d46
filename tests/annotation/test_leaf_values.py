"""Training data of the value model that evaluates leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from tabular import ROOT

from stages.agent.policy import load_policy
from stages.annotation.derived import value_head
from stages.annotation.fit_models import rollout_paths
from stages.annotation.leaf_values import episode_paths, fit_leaf_model
from stages.annotation.paths import value_paths
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree
from stages.records.episode import EPISODE_SCHEMA, write_table
from stages.values.step_value import StepValueModel


def row(rewards: list[float], starts: list[int], inherited: int = 0) -> dict:
    turns = [{"start": start, "end": start + 2, "reward": reward} for start, reward in zip(starts, rewards, strict=True)]
    return {"task_id": "a", "turns": turns, "token_ids": list(range(20)), "reward": sum(rewards), "inherited": inherited}


def test_leaf_targets_are_rewards_to_go() -> None:
    """Contract: the target before a turn is the discounted reward from that turn on; inherited turns count only in the parent
    episode."""
    episodes = [row([0.5, 0.0, 0.25], [3, 8, 13]), row([0.0, 0.0, 1.0], [3, 8, 13], inherited=2), row([], [])]
    first, branch = episode_paths(episodes, 1.0)
    assert (first.boundaries, first.returns, first.rollouts) == ([2, 7, 12], [0.75, 0.25, 0.25], [1.0] * 3)
    assert first.token_ids == list(range(13))
    assert (branch.boundaries, branch.returns) == ([12], [1.0])
    assert episode_paths(episodes[:1], 0.5)[0].returns == [0.5 + 0.25 * 0.25, 0.5 * 0.25, 0.25]


def test_episodes_and_trees_give_the_value_model_one_target(tmp_path: Path) -> None:
    """Contract: an episode is learnt with the same discounted targets as the tree of that one rollout."""
    params = Annotate(gamma=0.5)
    tree = Tree("a", ROOT, params)
    rewards = [0.5, 0.0, 0.25]
    turns = [
        Edge(str(at), (at,), (0.0,), "", () if at == 2 else (9,), reward, at == 2, False, "") for at, reward in enumerate(rewards)
    ]
    tree.insert(0, turns, 1)
    (known,) = value_paths(tree.rows(), params)
    schema = pa.schema([field for field in EPISODE_SCHEMA if field.name in ("task_id", "token_ids", "turns", "inherited")])
    write_table(tmp_path / "data/rollouts/toy/episodes.parquet", schema, [row(rewards, [1, 3, 5])])
    (played,) = rollout_paths(SimpleNamespace(data=tmp_path / "data", domain="toy"), params)  # type: ignore[arg-type]
    assert played.returns == known.returns == [0.5 + 0.25 * 0.25, 0.5 * 0.25, 0.25]


def test_the_policy_s_own_weights_stay_as_they_are(tiny_policy: Path) -> None:
    """Contract: with backbone: policy, the head alone learns, and what was trainable before is so after."""
    policy = load_policy(tiny_policy).model
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    params = Annotate(expansion={"kind": "eager"}, labels={"q": "tree"}, evaluation={"kind": "value_model"})
    model = StepValueModel(policy.base_model, value_head(params))
    head = model.output.weight.clone()
    paths = episode_paths([row([0.5, 0.0, 0.25], [3, 8, 13]), row([0.0, 0.0, 1.0], [3, 8, 13])], 1.0)
    fit_leaf_model(model, paths, params, 0, 64)
    assert not torch.equal(model.output.weight, head)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert all(parameter.requires_grad for parameter in policy.parameters())


def test_returns_outside_the_head_are_rejected() -> None:
    """Contract: returns outside the head's bins are an error that names the keys, not clipped targets."""
    paths = episode_paths([row([-6.0], [3])], 1.0)
    with pytest.raises(ValueError, match=r"head covers -0\.2 to 1\.2.*from -6 to -6: widen v_min and v_max"):
        fit_leaf_model(None, paths, Annotate(), 0, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"raise rollout\.tasks"):
        fit_leaf_model(None, [], Annotate(), 0, 64)  # type: ignore[arg-type]
