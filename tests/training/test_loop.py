"""The learner and the loop: updates by hand, split invariance, non-finite gradients, history files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils import deterministic as filling

from stages.agent.logprobs import score_tokens
from stages.agent.policy import load_policy
from stages.algorithms.batch import LossTerms
from stages.runtime.resources import Resources
from stages.training.common.loop import Learner, make_processes, merge_sums, write_history
from stages.training.common.optimiser import COSINE_FLOOR, make_optimiser, warmup_constant, warmup_cosine
from stages.training.common.repeatable import Backward


def make_learner(seed: int = 0, max_grad_norm: float = 1.0) -> Learner:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimiser = make_optimiser(module, 1e-2, 0.1)
    return Learner(module, optimiser, warmup_constant(1e-2, 1), max_grad_norm, make_processes(Resources()))


def squared(learner: Learner, inputs: torch.Tensor):
    def loss(rows: list[int]) -> Iterator[LossTerms]:
        share = learner.module(inputs[rows]).square().sum() / len(inputs)
        yield LossTerms(share, {"loss": share.detach(), "max_input": inputs[rows].max()})

    return loss


@pytest.mark.parametrize("plan", [[[0, 1], [2, 3]], [[3], [1], [0], [2]]])
def test_weights_and_statistics_are_independent_of_micro_batches(plan: list[list[int]]):
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(7))
    whole, split = make_learner(), make_learner()
    for _ in range(3):
        sums = whole.update([[0, 1, 2, 3]], squared(whole, inputs))
        parts = split.update(plan, squared(split, inputs))
        assert parts == pytest.approx(sums, rel=1e-5)
    for one, other in zip(whole.module.parameters(), split.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_update_is_adamw_on_the_clipped_gradient():
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(7))
    learner, twin = make_learner(max_grad_norm=0.05), make_learner()
    sums = learner.update([[0, 1, 2, 3]], squared(learner, inputs))
    next(squared(twin, inputs)([0, 1, 2, 3])).loss.backward()
    gradients = [parameter.grad for parameter in twin.module.parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    assert sums["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for before, gradient, after in zip(twin.module.parameters(), gradients, learner.module.parameters(), strict=True):
        clipped = gradient * 0.05 / norm
        decay = 0.1 if before.dim() >= 2 else 0.0
        rate = 1e-2 / 2
        expected = before * (1 - rate * decay) - rate * clipped / (clipped.abs() + 1e-8)
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6)


def test_non_finite_gradient_is_an_error_and_keeps_the_weights():
    learner = make_learner()
    before = [parameter.clone() for parameter in learner.module.parameters()]
    with pytest.raises(ValueError, match="not finite"):
        learner.update([[0]], squared(learner, torch.full((1, 3), float("nan"))))
    assert all(torch.equal(one, other) for one, other in zip(before, learner.module.parameters(), strict=True))


def test_bfloat16_keeps_weights_loss_and_gradient_in_float32(tiny_policy, other_precision):
    """Contract: resources.precision bfloat16 is autocast: layers compute in bfloat16, log-probabilities and loss in float32."""
    model = load_policy(tiny_policy, attention="sdpa").model
    optimiser = make_optimiser(model, 1e-3, 0.0)
    learner = Learner(model, optimiser, warmup_constant(1e-3, 0), 1.0, make_processes(Resources(precision="bfloat16")))
    ids = torch.arange(5, 25).reshape(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool).index_fill(1, torch.tensor([0]), False)
    seen = {}
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: seen.update(layer=output.dtype))

    def loss(rows: list[int]) -> Iterator[LossTerms]:
        scores = score_tokens(model, ids[rows], mask[rows], 0.7, entropy=True)
        logprobs, entropy = scores.logprobs, scores.entropy
        share = -logprobs.sum() / int(mask.sum())
        seen.update(logprobs=logprobs.dtype, entropy=entropy.dtype, loss=share.dtype)
        yield LossTerms(share, {"loss": share.detach()})

    learner.update([[0], [1]], loss)
    assert seen == {"layer": torch.bfloat16, "logprobs": torch.float32, "entropy": torch.float32, "loss": torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_merge_adds_sums_and_keeps_maxima():
    sums: dict[str, float] = {}
    merge_sums(sums, {"loss": 1.0, "max_ratio": 2.0})
    merge_sums(sums, {"loss": 0.5, "max_ratio": 1.0})
    assert sums == {"loss": 1.5, "max_ratio": 2.0}


def test_learning_rate_schedules():
    cosine = warmup_cosine(1.0, 100, 0.1)
    assert cosine(0) == pytest.approx(0.1)
    assert cosine(9) == cosine(10) == pytest.approx(1.0)
    assert cosine(55) == pytest.approx((1 + COSINE_FLOOR) / 2)
    assert cosine(100) == pytest.approx(COSINE_FLOOR)
    constant = warmup_constant(1.0, 3)
    assert [constant(update) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert warmup_constant(1.0, 0)(0) == 1.0


def test_history_leaves_missing_cells_empty(tmp_path):
    write_history(tmp_path / "h.csv", [{"step": 1.0, "loss": 0.5}, {"step": 2.0, "loss": 0.25, "valid_loss": 1 / 3}])
    assert (tmp_path / "h.csv").read_text() == "step,loss,valid_loss\n1,0.5,\n2,0.25,0.3333333\n"


def switches() -> tuple[bool, bool, bool, bool]:
    """PyTorch's: deterministic operations, only warned of, memory filled, cuDNN's attention."""
    enabled = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return *enabled, filling.fill_uninitialized_memory, torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("device", "sharded", "expected"),
    [("cpu", False, None), ("cuda", False, (True, False, False, False)), ("cuda", True, (True, True, False, False))],
)
def test_backward_passes_are_repeatable_on_a_gpu_alone(device: str, sharded: bool, expected: tuple[bool, ...] | None) -> None:
    """Contract: torch's switches are set during a backward pass alone, and on a CPU not at all."""
    before, found = switches(), []
    backward = Backward(torch.device(device), sharded)
    backward(lambda loss: found.append(switches()), torch.zeros(()))
    assert found == [expected or before]
    assert switches() == before


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_update_that_cannot_be_repeated_starts_anew(
    fails_at: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: whichever micro-batch has the operation, the gradient is the whole update's, once; it is said once."""
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(7))
    plain, learner = make_learner(), make_learner()
    strict = []

    class OnGpu(Backward):
        def __call__(self, run, loss) -> None:
            run(loss)
            strict.append(self.strict)
            if self.strict and len(strict) == fails_at + 1:
                raise RuntimeError("cumsum does not have a deterministic implementation\nbut you set ...")

    learner.backward = OnGpu(torch.device("cuda"))
    for _ in range(2):
        expected = plain.update([[0, 1], [2, 3]], squared(plain, inputs))
        assert learner.update([[0, 1], [2, 3]], squared(learner, inputs)) == expected
    assert strict == [True] * (fails_at + 1) + [False] * 4
    assert (
        capsys.readouterr().err.count("may differ in the last bits: cumsum does not have a deterministic implementation\n") == 1
    )


def test_another_error_of_a_backward_pass_is_raised() -> None:
    backward = Backward(torch.device("cuda"))
    assert not backward.relents(RuntimeError("out of memory"))
    assert not Backward(torch.device("cpu")).relents(RuntimeError("not deterministic"))
    assert backward.strict
