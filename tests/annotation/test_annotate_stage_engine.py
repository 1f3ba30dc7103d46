"""Trees that the torch engine grows: independent of other trees, with the log-probabilities of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_annotation import Toy, tasks

from stages.annotation.nodes import node_schema
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.records.episode import NODE_SCHEMA, write_table
from stages.records.task import Task


def test_torch_engine_trees_do_not_depend_on_other_trees(tiny_policy: Path, tmp_path: Path):
    """Contract: a tree grown alone and one grown among 16 in few slots have the same bytes."""
    from stages.agent.chat import Chat
    from stages.agent.environment_pool import EnvironmentPool
    from stages.agent.policy import load_policy
    from stages.engine.torch_engine import TorchEngine

    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer)
    params = Annotate(iterations=12, expand_k=3, sampling={"max_tokens": 3, "top_k": 4}, evaluation={"rollouts": 2})

    def grow(part: list[Task], slots: int) -> list[Any]:
        engine = TorchEngine(policy.model, [chat.end_of_turn], slots, 300)
        with EnvironmentPool(Toy) as pool:
            return Search(engine, chat, pool, params, 0, 300).grow(part)

    everything = tasks(16)
    together = grow(everything, slots=8)
    for index in (0, 7):
        alone = grow(everything[index : index + 1], slots=4)
        for name, trees in (("alone", alone), ("together", together[index : index + 1])):
            write_table(tmp_path / name, NODE_SCHEMA, trees[0].rows())
        assert (tmp_path / "alone").read_bytes() == (tmp_path / "together").read_bytes()
    for tree in together:
        for node in tree.nodes[1:]:
            assert node.edge.action == chat.action_text(node.edge.token_ids)
            assert len(node.edge.logprobs) == len(node.edge.token_ids)


@pytest.mark.parametrize("backbone", ["policy", "own"])
def test_torch_engine_values_do_not_depend_on_other_trees(tiny_policy: Path, tmp_path: Path, backbone: str):
    """Contract: also when values are read and actions drawn in the same passes, a tree alone and one among 16 have the same
    bytes."""
    from stages.agent.chat import Chat
    from stages.agent.environment_pool import EnvironmentPool
    from stages.agent.policy import load_policy
    from stages.annotation.leaf_values import HeadEvaluator, leaf_model
    from stages.engine.torch_engine import TorchEngine

    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer)
    params = Annotate(
        iterations=10,
        expand_k=3,
        leaves_per_tree=2,
        expansion={"kind": "eager"},
        evaluation={"kind": "value_model", "backbone": backbone},
        labels={"q": "tree"},
        sampling={"max_tokens": 3, "top_k": 4},
    )
    model = leaf_model(policy.model, params)
    with torch.no_grad():  # an untrained head is constant
        torch.manual_seed(0)
        model.output.weight.normal_(0.0, 1.0)

    def grow(part: list[Task], slots: int) -> list[Any]:
        engine = TorchEngine(policy.model, [chat.end_of_turn], slots, 300)
        own = TorchEngine(model.backbone, [], slots, 300) if backbone == "own" else engine
        with EnvironmentPool(Toy) as pool:
            return Search(engine, chat, pool, params, 0, 300, reader=HeadEvaluator(own, model)).grow(part)

    everything = tasks(16)
    together = grow(everything, slots=8)
    for index in (0, 7):
        alone = grow(everything[index : index + 1], slots=4)
        for name, trees in (("alone", alone), ("together", together[index : index + 1])):
            write_table(tmp_path / name, node_schema(params), trees[0].rows())
        assert (tmp_path / "alone").read_bytes() == (tmp_path / "together").read_bytes()
    assert len({node.model_value for tree in together for node in tree.nodes if node.model_value is not None}) > 20


def test_node_logprobs_equal_training_logprobs(tiny_policy: Path):
    """Contract: a stored action's log-probabilities equal those of a forward pass over the node's whole history, to 1e-5."""
    import torch

    from stages.agent.chat import Chat
    from stages.agent.environment_pool import EnvironmentPool
    from stages.agent.logprobs import token_logprobs
    from stages.agent.policy import load_policy
    from stages.engine.torch_engine import TorchEngine

    policy = load_policy(tiny_policy)
    chat = Chat(policy.tokenizer)
    engine = TorchEngine(policy.model, [chat.end_of_turn], 8, 300)
    params = Annotate(iterations=10, expand_k=2, sampling={"max_tokens": 3})
    with EnvironmentPool(Toy) as pool:
        (tree,) = Search(engine, chat, pool, params, 0, 300).grow(tasks(1))
    for node in tree.nodes[1:]:
        history = [
            token
            for index in tree.path(node.index)[:-1]
            for token in tree.nodes[index].edge.token_ids + tree.nodes[index].edge.context_ids
        ]
        ids = torch.tensor([history + list(node.edge.token_ids)])
        mask = torch.arange(ids.shape[1])[None] >= len(history)
        with torch.no_grad():
            logs = token_logprobs(policy.model, ids, mask)
        assert logs[0, len(history) :].tolist() == pytest.approx(list(node.edge.logprobs), abs=1e-5)
