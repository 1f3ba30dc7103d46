"""rl.sparse: which weights an update changes, and that a run with it resumes exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import rl
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import LossTerms
from stages.algorithms.parts.sparse import Sparse
from stages.algorithms.settings import Rl
from stages.params import parse_params
from stages.runtime.resources import Resources
from stages.runtime.validation import ParamsError
from stages.training.common.loop import Learner, make_processes
from stages.training.common.optimiser import make_optimiser, warmup_constant
from stages.training.common.sparse_updates import SparseUpdates, largest
from training.toys import KilledError, kill_at_step, outputs, run


def learner(start: list[float], rate: float, **settings: Any) -> Learner:
    """Trains w of loss w . x, whose gradient is x."""
    module = torch.nn.Linear(len(start), 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([start]))
    sparse = SparseUpdates(Sparse(**settings))
    return Learner(module, make_optimiser(module, rate, 0.0), warmup_constant(rate, 0), 1e9, make_processes(Resources()), sparse)


def update(one: Learner, gradient: list[float]) -> list[float]:
    one.update([gradient], lambda x: iter([LossTerms((one.module.weight[0] * torch.tensor(x)).sum(), {})]))
    return one.module.weight[0].tolist()


def test_largest_by_hand() -> None:
    """Contract: int(share n) entries, at least one, by magnitude; of equal ones the earlier."""
    gradient = torch.tensor([[1.0, -3.0], [2.0, -2.0]])
    assert largest(gradient, 0.5).tolist() == [[False, True], [True, False]]
    assert largest(gradient, 0.1).tolist() == [[False, True], [False, False]]


def test_only_the_chosen_weights_ever_change() -> None:
    """Contract: the first update chooses; later gradients of other weights, however large, change nothing, bit for bit."""
    one = learner([1.0, 1.0, 1.0, 1.0], 0.1, share=0.5)
    after = update(one, [3.0, 0.0, -2.0, 1.0])
    assert after == pytest.approx([0.9, 1.0, 1.1, 1.0])
    last = update(one, [0.0, 9.0, 0.0, 9.0])
    assert (last[1], last[3]) == (1.0, 1.0)


def test_an_update_without_a_gradient_chooses_nothing() -> None:
    """Contract: a first update of zeros, as of groups that all end alike, does not choose the first weights."""
    one = learner([1.0, 1.0, 1.0, 1.0], 0.1, share=0.5)
    assert update(one, [0.0, 0.0, 0.0, 0.0]) == [1.0, 1.0, 1.0, 1.0]
    assert one.sparse is not None
    assert one.sparse.masks == [None]
    one.update([], lambda x: iter(()))  # no micro-batch
    after = update(one, [0.0, 1.0, 3.0, -2.0])
    assert after[:2] == [1.0, 1.0]
    assert after[2:] != [1.0, 1.0]
    again = update(one, [9.0, 9.0, 0.0, 0.0])
    assert again[:2] == [1.0, 1.0]


def test_changes_below_bfloat16_are_lost() -> None:
    """Contract: between 1 and 2 bfloat16's values are 2**-7 apart, between 0.25 and 0.5 2**-9: a step of 0.002 moves 0.3 alone,
    and what is lost does not add up."""
    one = learner([1.5, 0.3], 0.002, rounding="bfloat16")
    for _ in range(20):
        after = update(one, [1.0, 1.0])
    assert after[0] == 1.5
    assert after[1] < 0.29
    free = learner([1.5, 0.3], 0.002)
    assert update(free, [1.0, 1.0])[0] == pytest.approx(1.498)


SECTION = {
    "steps": 4,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
    "sparse": {"share": 0.1, "rounding": "bfloat16"},
}


def test_specialist_is_sparse_and_a_killed_run_ends_in_the_same_bytes(make_context) -> None:
    """Contract: at most the share of each tensor's weights differs from the start, and some do; a killed run has them, too."""
    whole = make_context("rl", "whole", rl=SECTION)
    run(whole)
    before = load_file(whole.data / "models/sft/model.safetensors")
    after = load_file(whole.data / "models/rl/toy/model.safetensors")
    changed = {name: int((after[name] != before[name]).sum()) for name in before}
    assert sum(changed.values()) > 0
    assert all(count <= max(1, 0.1 * before[name].numel()) for name, count in changed.items())

    killed = make_context("rl", "killed", rl=SECTION)
    kill_at_step(killed, 2)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", rl=SECTION))
    assert outputs(killed.root) == outputs(whole.root)


def test_a_dense_warm_start_is_refused() -> None:
    """Contract: training before rl that changes all weights would undo what rl.sparse is for."""
    first = {"algorithm": "tree_bc", "steps": 2}
    with pytest.raises(ParamsError, match=r"rl\.warm_start trains without rl\.sparse and changes all weights"):
        resolve(Rl(warm_start=first, sparse=Sparse(share=0.5)), 64)
    assert resolve(Rl(warm_start={**first, "sparse": {"share": 0.5}}, sparse=Sparse(share=0.5)), 64).rl.sparse.active
    assert resolve(Rl(warm_start=first), 64).rl.warm_start == first


def test_methods_that_clone_attempts_can_be_sparse_too() -> None:
    assert resolve(Rl(algorithm="rejection_sft", sparse=Sparse(share=0.5)), 64).rl.sparse.share == 0.5
    with pytest.raises(ParamsError, match=r"has no effect: algorithm b_coder learns from an offline dataset, not"):
        resolve(Rl(algorithm="b_coder", sparse=Sparse(share=0.5)), 64)


def test_weight_decay_and_low_rank_factors_are_refused() -> None:
    with pytest.raises(ParamsError, match=r"rl\.weight_decay changes all weights"):
        resolve(Rl(algorithm="grpo", weight_decay=0.1, sparse=Sparse(share=0.5)), 64)
    text = {
        "domains": ["search"],
        "per_domain": {"search": {}},
        "rl": {"sparse": {"rounding": "bfloat16"}},
        "model": {"lora": {"rank": 4}},
    }
    with pytest.raises(ParamsError, match=r"rl\.sparse selects weights of the full model"):
        parse_params(text, "params.yaml")
