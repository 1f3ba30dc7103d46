"""Checks of value supports, and the conservative regulariser."""

from __future__ import annotations

import pytest
import torch

from stages.algorithms.parts.critic import check_returns
from stages.algorithms.resolve import resolve_section
from stages.algorithms.settings import Rl
from stages.annotation.settings import Annotate
from stages.runtime.validation import ParamsError
from stages.values.conservative import conservative
from stages.values.heads import make_head
from stages.values.settings import HeadParams
from stages.values.supports import check_support, decoded


@pytest.mark.parametrize("loss", ["mse", "two_hot", "hl_gauss", "c51"])
def test_decoded_target_is_what_the_head_decodes(loss: str) -> None:
    params = HeadParams(loss=loss, v_min=0.0, v_max=1.0, bins=5)
    head = make_head(params)
    for target in (-2.0, 0.0, 0.3, 0.6, 1.0, 1e6):
        encoded = head.encode(torch.tensor(target))
        got = float(encoded) if loss == "mse" else float(head.decode(encoded.log()))
        assert decoded(params, target) == pytest.approx(got, abs=1e-5)
    if loss == "hl_gauss":
        assert decoded(params, 1.0) == pytest.approx(0.862, abs=5e-4)
        assert decoded(params, 0.6) == pytest.approx(0.5981, abs=5e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"v_min": 0.0, "v_max": 1.0},
            r"would predict 0\.0.* for 0; set v_min to at most -0.0\d+ and v_max to at least 1\.0\d+ \(4 sigma",
        ),
        ({"loss": "two_hot", "v_min": -1.0, "v_max": 0.5}, r"would predict 0\.500 for 1; .*v_max to at least 1"),
        ({"loss": "c51", "v_min": 0.5}, r"would predict 0\.500 for 0"),
        ({"bins": 9, "sigma_ratio": 0.05}, r"bins are too wide for sigma_ratio 0\.05"),
    ],
)
def test_support_that_cannot_represent_the_targets_is_rejected(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_support(HeadParams(**changes), 0.0, 1.0, "shares of success")
    with pytest.raises(ValueError, match=reason):
        Annotate(value_model={"head": changes})
    with pytest.raises(ParamsError, match=rf"rl\.critic\.head: returns are .*{reason}"):
        check_returns(resolve_section(Rl(algorithm="ppo", critic={"head": changes}))[1], 0.0, 1.0)


@pytest.mark.parametrize(
    "head", [{}, {"loss": "mse", "v_min": 5.0, "v_max": 6.0}, {"loss": "two_hot", "v_min": 0.0, "v_max": 1.0}, {"bins": 21}]
)
def test_support_that_represents_the_targets_is_accepted(head: dict) -> None:
    check_support(HeadParams(**head), 0.0, 1.0, "shares of success")


def test_critic_support_must_cover_shaped_returns() -> None:
    """Contract: if shaping makes failures worth -1, the default support, which ends at -0.2, is rejected."""
    shaped = {"reward": {"correct": 1.0, "wrong": -1.0}}
    with pytest.raises(ParamsError, match=r"rl\.critic\.head: returns are in \[-1, 1\].*would predict -0\.1\d+ for -1"):
        resolve_section(Rl(algorithm="ppo", **shaped))
    resolve_section(Rl(algorithm="ppo", **shaped, critic={"head": {"v_min": -1.2, "v_max": 1.2, "bins": 61}}))
    resolve_section(Rl(algorithm="grpo", **shaped))


def test_conservative_by_hand_and_by_brute_force() -> None:
    """Contract: ln(e^1 + e^2 + e^0) - (0.25 * 1 + 0.75 * 2); its gradient is softmax(Q) - data; -inf means no action."""
    q, data = torch.tensor([1.0, 2.0, 0.0], requires_grad=True), torch.tensor([0.25, 0.75, 0.0])
    found = conservative(q, data)
    assert found.item() == pytest.approx(2.407606 - 1.75, abs=1e-5)
    found.backward()
    torch.testing.assert_close(q.grad, torch.softmax(q.detach(), -1) - data)
    with torch.no_grad():
        for place in range(3):
            step = torch.zeros(3)
            step[place] = 1e-2
            slope = (conservative(q + step, data) - conservative(q - step, data)) / 2e-2
            assert slope.item() == pytest.approx(q.grad[place].item(), abs=1e-3)
    gone = torch.tensor([[1.0, 2.0, -torch.inf]], requires_grad=True)
    alone = conservative(gone, torch.tensor([[0.5, 0.5, 0.0]]))
    torch.testing.assert_close(alone, conservative(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, 0.5]])))
    alone.sum().backward()
    assert bool(torch.isfinite(gone.grad).all())


def test_conservative_on_tokens_is_next_token_cross_entropy() -> None:
    q = torch.randn(4, 7, 11, generator=torch.Generator().manual_seed(0))
    token = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(1))
    one_hot = torch.nn.functional.one_hot(token, 11).float()
    expected = torch.nn.functional.cross_entropy(q.flatten(0, 1), token.flatten(), reduction="none").view(4, 7)
    torch.testing.assert_close(conservative(q, one_hot), expected)
