"""`python -m stages.algorithms check NAME` for every kind of method."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from stages.algorithms import check as checking
from stages.algorithms.batch import Extra
from stages.algorithms.card import OfflineLosses
from stages.algorithms.registry import composition, names
from stages.runtime.checking import Findings
from stages.training.common.batches import take


@pytest.mark.parametrize("name", names())
def test_every_method_passes_the_check(name: str) -> None:
    found = Findings()
    checking.check(name, found)
    assert found.mistakes == []
    assert len(found.passed) >= 3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("una", lambda one: {"pieces": {"preference": lambda pairs, rl: pairs.difference.sum()}}, "not [P]"),
        ("stored_pg", lambda one: {"offline": OfflineLosses(lambda scores, batch, rl: scores.logprobs.sum())}, "LossTerms"),
        ("stored_pg", lambda one: {"offline": None}, "OfflineLosses"),
        ("archer_offline", lambda one: {"pieces": {"loss": lambda logprobs, batch, rl: logprobs / 0}}, "not finite"),
        ("gpg", lambda one: {"parts": {"loss.kin": "gspo"}}, "algorithm gpg: unknown key 'rl.loss.kin'. Did you mean 'kind'?"),
        ("gpg", lambda one: {"parts": {"los.kind": "gspo"}}, "`parts` has the unknown part 'los'. Did you mean 'loss'?"),
        ("gpg", lambda one: {"parts": {"loss.kind": "gpso"}}, "algorithm gpg: 'rl.loss.kind' Input should be 'policy_gradient'"),
        ("gpg", lambda one: {"pieces": {"advantges": print}}, "`pieces` has the unknown part 'advantges'. Did you mean 'advan"),
        ("una", lambda one: {"settings": dict}, "`settings` must be a subclass of stages.plugins.Section"),
        ("gpg", lambda one: {"state": lambda: {"seen": {1, 2}}, "pieces": {"advantage": ignoring_state(one)}}, "it has a set"),
    ],
)
def test_check_reports_mistakes(name, change, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = composition(name)
    broken = replace(method, **change(method))
    for module in (checking, pytest.importorskip("stages.algorithms.resolve")):
        monkeypatch.setattr(module, "composition", lambda _: broken)
    found = Findings()
    checking.check(name, found)
    assert message in "\n".join(found.mistakes)


def ignoring_state(method):
    return lambda batch, rl, state: method.pieces["advantage"](batch, rl)


@dataclass(frozen=True)
class Marks(Extra):
    PER_TOKEN = ("tokens",)

    rows_: torch.Tensor
    tokens: torch.Tensor
    name: str = "marks"


def test_micro_batch_selects_rows_of_extras_and_task_ids(make_batch) -> None:
    """Contract: a micro-batch has its rows of every extra, per-token tensors cut to its width."""
    batch = make_batch([[1, 0], [0, 1]], lengths=[2, 5, 1, 3]).with_(task_ids=("a", "a", "b", "b"))
    width = batch.mask.shape[1]
    tokens = torch.arange(4 * width).view(4, width)
    batch = batch.with_extra(Marks(torch.arange(4), tokens))
    micro = take(batch, [3, 0])
    marks = micro.get(Marks)
    assert (micro.task_ids, marks.rows_.tolist(), marks.name) == (("b", "a"), [3, 0], "marks")
    assert marks.tokens.equal(tokens[[3, 0], : micro.mask.shape[1]])
    assert micro.mask.shape[1] == 4 < width
    assert batch.rows(torch.tensor([1])).get(Marks).tokens.shape == (1, width)
