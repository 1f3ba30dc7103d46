"""stages.engine.sampling: the draw, its support and its log-probability."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from device import DEVICE

from stages import seeding
from stages.engine.sampling import _cumulated, _passed, distribution, draw


def reference(logits, temperature, top_p, top_k, uniform):
    """(token, log-probability, distribution) of one row, in plain Python."""
    if temperature == 0:
        weights = [math.exp(value - max(logits)) for value in logits]
        best = max(range(len(logits)), key=lambda index: (logits[index], -index))
        return best, math.log(weights[best] / sum(weights)), None
    scaled = [value / temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda index: (-scaled[index], index))
    if top_k:
        order = order[:top_k]
    weights = {index: math.exp(scaled[index] - scaled[order[0]]) for index in order}
    kept, reached = [], 0.0
    for index in order:
        kept.append(index)
        reached += weights[index] / sum(weights.values())
        if top_p < 1 and reached >= top_p - 1e-12:
            break
    total = sum(weights[index] for index in kept)
    probability = {index: weights[index] / total for index in sorted(kept)}
    reached = 0.0
    for index, share in probability.items():
        reached += share
        if reached > uniform:
            return index, math.log(share), probability
    return index, math.log(share), probability


def run(rows):
    """rows: (logits, temperature, top_p, top_k, uniform)."""
    ids, logs = draw(
        torch.tensor([row[0] for row in rows], dtype=torch.float32),
        torch.tensor([row[1] for row in rows], dtype=torch.float64),
        torch.tensor([row[2] for row in rows], dtype=torch.float64),
        torch.tensor([row[3] for row in rows], dtype=torch.int64),
        torch.tensor([row[4] for row in rows], dtype=torch.float64),
    )
    assert logs.dtype == torch.float32
    return ids.tolist(), logs.tolist()


def test_draw_equals_reference():
    rng = np.random.default_rng(0)
    rows = []
    for temperature in (0.0, 0.5, 1.0, 2.0):
        for top_p in (1.0, 0.9, 0.5, 0.01):
            for top_k in (0, 1, 3, 50):
                for _ in range(4):
                    logits = rng.normal(0, 3, 17).astype(np.float32).tolist()
                    rows.append((logits, temperature, top_p, top_k, float(rng.random())))
    ids, logs = run(rows)
    for row, token, logprob in zip(rows, ids, logs, strict=True):
        expected, expected_log, _ = reference(*row)
        assert token == expected
        assert logprob == pytest.approx(expected_log, abs=1e-5)


def test_top_p_and_top_k_by_hand():
    """Probabilities 0.5, 0.3, 0.15, 0.05: top-p 0.7 keeps two, so the second has 0.3 / 0.8; top-k 3, then top-p 0.6 of 0.5/0.95,
    0.3/0.95, ..., keeps two as well; the first alone reaches top-p 0.4999."""
    logits = [math.log(share) for share in (0.5, 0.3, 0.15, 0.05)]
    ids, logs = run([(logits, 1.0, 0.7, 0, 0.99), (logits, 1.0, 0.6, 3, 0.99), (logits, 1.0, 0.4999, 0, 0.99)])
    assert ids == [1, 1, 0]
    assert logs == pytest.approx([math.log(0.375), math.log(0.375), 0.0], abs=1e-6)


def test_largest_uniform_stays_in_the_support():
    """A uniform just below 1 must not select a token outside top-k, even if probabilities underflow to 0."""
    edge = 1.0 - 2.0**-53
    ids, logs = run([([0.0, 1.0, 2.0, -900.0], 1.0, 1.0, 0, edge), ([3.0, 2.0, 1.0, 0.0], 1.0, 1.0, 2, edge)])
    assert ids == [2, 1]
    assert all(math.isfinite(value) for value in logs)


def test_frequencies_follow_the_distribution():
    count = 20_000
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0, -2.0]]).expand(count, -1)
    uniforms = seeding.uniform(np.full(count, 7, dtype=np.uint64), np.arange(count, dtype=np.uint64))
    one = torch.ones(count, dtype=torch.float64)
    ids, _ = draw(logits, 0.7 * one, one, torch.zeros(count, dtype=torch.int64), torch.from_numpy(uniforms))
    expected = (logits[0].double() / 0.7).softmax(0)
    share = torch.bincount(ids, minlength=5) / count
    # Five standard errors.
    assert bool((share - expected).abs().le(5 * (expected * (1 - expected) / count).sqrt()).all())


def test_draw_of_a_row_is_independent_of_other_rows():
    """Contract: top-k of another row or another batch size changes nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 1000, generator=generator)
    uniforms = torch.rand(8, generator=generator, dtype=torch.float64)
    one = torch.ones(8, dtype=torch.float64)
    none = torch.zeros(8, dtype=torch.int64)
    ids, logs = draw(logits, one, one, none, uniforms)
    some = none.clone()
    some[3] = 5
    mixed_ids, mixed_logs = draw(logits, one, one, some, uniforms)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(ids[others], mixed_ids[others])
    assert torch.equal(logs[others], mixed_logs[others])
    part_ids, part_logs = draw(logits[4:], one[4:], one[4:], none[4:], uniforms[4:])
    assert torch.equal(part_ids, ids[4:])
    assert torch.equal(part_logs, logs[4:])


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(0.95, 0), (0.3, 0), (1.0, 40), (0.9, 40), (0.9, 5000)])
def test_support_is_that_of_sorting_the_whole_vocabulary(spread, top_p, top_k):
    """The candidates that are sorted include the support, also of flat and of tied distributions; -inf is never in it."""
    generator = torch.Generator().manual_seed(1)
    logits = (spread * torch.randn(3, 5000, generator=generator)).to(torch.bfloat16)  # many ties
    logits[:, ::7] = float("-inf")
    rows = torch.ones(3, dtype=torch.float64)
    kept = distribution(logits, rows, top_p * rows, top_k * rows.long()).kept()
    for row, found in zip(logits.double(), kept, strict=True):
        values, order = torch.sort(row, descending=True, stable=True)
        share = values[: top_k or None].softmax(0)
        count = int((share.cumsum(0) < top_p - 1e-12).sum()) + 1 if top_p < 1 else int((share > 0).sum())
        assert found.tolist() == sorted(order[:count].tolist())


def test_logprobs_are_those_of_the_support():
    """Probabilities 0.5, 0.3, 0.2: top-p 0.7 leaves 0.625 and 0.375, and nothing of the third."""
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]]).expand(3, -1)
    one = torch.ones(3, dtype=torch.float64)
    found = distribution(logits, one, 0.7 * one, 0 * one.long()).logprobs(torch.tensor([0, 1, 2])).tolist()
    assert found == pytest.approx([math.log(0.625), math.log(0.375), -math.inf], abs=1e-6)


@pytest.mark.parametrize("size", [1 << 17, (1 << 16) + 96, (1 << 16) + 1], ids=["blocks of 512", "blocks of 32", "no blocks"])
def test_draw_from_a_large_vocabulary(size):
    """The token is where the cumulative sum of all probabilities passes the uniform number, whether or not sums of blocks are
    cumulated first; also for the first and the last token, and where most tokens have no probability."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, size, generator=generator)
    logits[2, 1000:] = float("-inf")
    logits[3, : size - 3] = float("-inf")
    logits[4, torch.arange(size) % 700 != 699] = float("-inf")
    cumulative = logits.double().softmax(-1).cumsum(-1).numpy()
    edge = 1.0 - 2.0**-53
    one, none = torch.ones(6, dtype=torch.float64, device=DEVICE), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    for uniform in (0.0, 0.25, 0.7071, 0.999, edge):
        ids, logs = draw(logits.to(DEVICE), one, one, none, uniform * one)
        for row, token in enumerate(ids.tolist()):
            assert np.isfinite(logs[row].item())
            assert cumulative[row, token] >= uniform - 1e-12
            assert token == 0 or cumulative[row, token - 1] <= uniform + 1e-12
            assert logs[row].item() == pytest.approx(logits[row].double().log_softmax(-1)[token].item(), abs=1e-5)


def test_weights_of_0_are_never_passed():
    """Also where a cumulative sum after one is larger by rounding, as on a GPU, at the start and at the end of a row."""
    weights = torch.tensor([[0.0, 0.0, 0.25, 0.0, 0.5, 0.0]], dtype=torch.float64)
    sums = _cumulated(weights)
    assert sums.tolist() == [[0.0, 0.0, 0.25, 0.0, 0.75, 0.0]]
    found = [_passed(sums, torch.tensor([[wanted]], dtype=torch.float64)).item() for wanted in (0.0, 0.2, 0.25, 0.7, 0.75, 0.9)]
    assert found == [2, 2, 4, 4, 4, 4]
