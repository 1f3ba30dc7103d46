"""ROVER: values of the uniform random policy, against hand-computed numbers."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from training.toys import make_episode

from stages.agent.logprobs import Vocabulary, score_tokens, token_logprobs
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.batch import TrajectoryBatch, next_token_values
from stages.algorithms.methods.rover import values_and_targets
from stages.algorithms.parts.loss import MeanLogprobs, denominators
from stages.algorithms.settings import Rl
from stages.runtime.resources import Resources
from stages.runtime.validation import ParamsError
from stages.training.common.batches import trajectory_batch
from stages.training.common.loop import make_processes
from stages.training.rl.models import Models

ABSOLUTE = {"advantage": {"mean": "none"}}


def rover(size: int = 4, **settings) -> Algorithm:
    shared = ABSOLUTE if settings.get("form") == "absolute" else {}
    return resolve(Rl(algorithm="rover", group_size=size, minibatches=4, settings=settings, **shared))


def unchanged(batch: TrajectoryBatch) -> Vocabulary:
    """Vocabulary statistics of a policy that has not changed."""
    return Vocabulary(batch.get(MeanLogprobs).old, torch.ones(batch.mask.shape))


def with_means(batch: TrajectoryBatch) -> TrajectoryBatch:
    generator = torch.Generator().manual_seed(5)
    return batch.with_extra(MeanLogprobs(-3 * torch.rand(batch.mask.shape, generator=generator) * batch.mask))


def loss_of(algorithm: Algorithm, logprobs: Tensor, batch: TrajectoryBatch, vocabulary: Vocabulary | None = None) -> Tensor:
    return algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0), vocabulary).loss


class Table:
    """A model whose hidden states are its logits."""

    def get_output_embeddings(self):
        return torch.nn.Identity()


def scores(logits: Tensor, tokens: Tensor):
    """Scores of tokens [B, T] under the logits [B, T, V] that precede them; the first token is the prompt."""
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[:, 0] = False
    return score_tokens(Table(), tokens, mask, states=lambda model, ids, where: logits[where], vocabulary=True)


STRINGS = list(itertools.product("ABCD", repeat=3))
RIGHT = {"ACD", "BDC", "CAB", "DBA"}


def test_absolute_targets_converge_to_q_of_the_uniform_policy(make_batch) -> None:
    """Iterating the absolute form, with its targets over rho as the next logits, converges to Q of the uniform policy."""
    algorithm = rover(64, form="absolute", rho=0.5)
    batch = algorithm.prepare(make_batch([[float("".join(one) in RIGHT) for one in STRINGS]], lengths=[3] * 64))
    batch = batch.with_(mask=batch.mask[:, :4], advantages=batch.advantages[:, :4], turn=batch.turn[:, :4])
    tokens = torch.tensor([[0, *("ABCD".index(letter) for letter in one)] for one in STRINGS])
    q = {prefix: torch.full((4,), 7.0) for count in range(3) for prefix in itertools.product("ABCD", repeat=count)}
    for _ in range(3):
        logits = torch.stack([torch.stack([q[()], *(q[one[:place]] for place in range(3))]) for one in STRINGS]) / 0.5
        scored = scores(logits, tokens)
        values, targets = values_and_targets(scored.logprobs, batch, algorithm.rl, scored.vocabulary)
        for row, one in enumerate(STRINGS):
            for place in range(3):
                assert values[row, place + 1] == pytest.approx(float(q[one[:place]][tokens[row, place + 1]]), abs=1e-5)
        for row, one in enumerate(STRINGS):
            for place in range(3):
                q[one[:place]][tokens[row, place + 1]] = targets[row, place + 1]
    torch.testing.assert_close(q[()], torch.full((4,), 0.0625), atol=1e-6, rtol=0)
    torch.testing.assert_close(q["A",], torch.tensor([0.0, 0.0, 0.25, 0.0]), atol=1e-6, rtol=0)
    assert float(q["A", "C"][3]) == pytest.approx(1.0)
    # The softmax policy covers the four correct strings equally: 12.18 / 15.18 of the second letters, nearly all third ones.
    acting = scores(torch.stack([torch.stack([q[one[:place]] for place in (0, 0, 1, 2)]) for one in STRINGS]) / 0.1, tokens)
    right = torch.tensor([probability for one, probability in zip(STRINGS, acting.logprobs.sum(1).exp().tolist(), strict=True)
                          if "".join(one) in RIGHT])  # fmt: skip
    assert float(right.sum()) == pytest.approx(0.8024 * 0.99986, abs=1e-4)
    share = right / right.sum()
    assert float((-share * share.log()).sum().exp()) == pytest.approx(4.0, abs=1e-3), "effective number of correct strings"
    greedy = scores(torch.stack([torch.stack([q[one[:place]] for place in (0, 0, 1, 2)]) for one in STRINGS]) / 1.0, tokens)
    blunt = sum(float(scored.exp()) for one, scored in zip(STRINGS, greedy.logprobs.sum(1), strict=True) if "".join(one) in RIGHT)
    assert blunt < 0.2, "success needs a low temperature"
    for first in "ABCD":  # theorem: acting greedily on the uniform policy's Q always succeeds
        second = "ABCD"[int(q[first,].argmax())]
        assert first + second + "ABCD"[int(q[first, second].argmax())] in RIGHT


def test_returns_are_centred_within_groups(make_batch) -> None:
    batch = rover().prepare(make_batch([[1, 0, 0, 0], [1, 1, 1, 1]]))
    assert batch.advantages is not None
    assert batch.advantages[:, 1].tolist() == [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0]


def test_first_update_equals_reinforce(make_batch) -> None:
    """At pi_old the loss is the mean of r~^2; its gradient is 2 rho times REINFORCE's with the group's mean."""
    reinforce = resolve(
        Rl(algorithm="reinforce", group_size=4, advantage={"mean": "group"}, loss={"aggregation": "seq_mean_token_mean"})
    )
    for rho in (1.0, 0.3):
        algorithm = rover(rho=rho)
        batch = algorithm.prepare(with_means(make_batch([[1, 0, 0, 0]], lengths=[2, 3, 1, 4])))
        logprobs = batch.logprobs_old.clone().requires_grad_()
        found = loss_of(algorithm, logprobs, batch, unchanged(batch))
        assert float(found.detach()) == pytest.approx((0.75**2 + 3 * 0.25**2) / 4)
        (gradient,) = torch.autograd.grad(found, logprobs)
        (plain,) = torch.autograd.grad(loss_of(reinforce, logprobs, reinforce.prepare(batch)), logprobs)
        torch.testing.assert_close(gradient, 2 * rho * plain)
        assert gradient[0, 1] == pytest.approx(-2 * rho * 0.75 / 2 / 4)


def test_successor_term_of_three_symbols(make_batch) -> None:
    """Three symbols, old logits 0, new logits [1, 0, 0]."""
    new, old = (scores(torch.tensor([[[0.0] * 3] * 2 + [row]]), torch.tensor([[0, 1, 0]])) for row in ([1.0, 0, 0], [0.0] * 3))
    assert old.vocabulary is not None
    ratios = torch.tensor([1.0, 0, 0]).log_softmax(0) - torch.zeros(3).log_softmax(0)
    torch.testing.assert_close(ratios, torch.tensor([0.5472, -0.4528, -0.4528]), atol=5e-5, rtol=0)
    assert float(new.vocabulary.mean[0, 2] - old.vocabulary.mean[0, 2]) == pytest.approx(-0.1195, abs=5e-5)
    algorithm = rover()
    batch = algorithm.prepare(make_batch([[1, 0, 0, 0]], lengths=[2] * 4)).rows(torch.tensor([0]))
    batch = batch.with_(mask=batch.mask[:, :3], turn=batch.turn[:, :3], advantages=batch.advantages[:, :3])
    batch = batch.with_(logprobs_old=old.logprobs).with_extra(MeanLogprobs(old.vocabulary.mean))
    values, targets = values_and_targets(new.logprobs, batch, algorithm.rl, new.vocabulary)
    torch.testing.assert_close(targets[0, 1:], torch.tensor([0.6305, 0.75]), atol=5e-5, rtol=0)
    torch.testing.assert_close(values[0, 1:], torch.tensor([0.0, 0.5472]), atol=5e-5, rtol=0)


def test_successor_term_is_minus_kl_from_uniform() -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    mean = scores(logits, tokens).vocabulary.mean
    torch.testing.assert_close(mean, scores(logits + 3.5, tokens).vocabulary.mean, atol=1e-5, rtol=1e-6)
    from_uniform = (mean + math.log(7))[:, 1:]
    assert bool((from_uniform < 0).all())
    kl = (1 / 7) * (math.log(1 / 7) - logits.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(from_uniform, -kl[:, 1:])


def test_without_successor_term_no_vocabulary_is_needed(make_batch) -> None:
    """A squared regression of the log-ratio on r~."""
    algorithm = rover(beta_next=0.0, rho=2.0)
    assert not algorithm.needs_vocabulary
    batch = algorithm.prepare(make_batch([[1, 0, 0, 1]], lengths=[2, 3, 1, 4]))
    logprobs = (batch.logprobs_old - 0.1) * batch.mask
    found = loss_of(algorithm, logprobs, batch)
    assert float(found) == pytest.approx((2 * (-0.2 - 0.5) ** 2 + 2 * (-0.2 + 0.5) ** 2) / 4, rel=1e-5)
    seen = with_means(batch)
    assert float(loss_of(algorithm, logprobs, seen, unchanged(seen))) == float(found)
    assert rover().needs_vocabulary
    with pytest.raises(ValueError, match="needs means over the vocabulary"):
        loss_of(rover(), logprobs, batch)


@pytest.mark.parametrize("form", ["relative", "absolute"])
def test_tokens_outside_the_mask_do_not_affect_the_loss(make_batch, form: str) -> None:
    """Log-probs, means and normalisers at prompt, padding and environment tokens may have any value."""
    algorithm = rover(2, form=form)
    batch = algorithm.prepare(with_means(make_batch([[1, 0]], turns=[[2, 3], [1]])))
    old, means = (
        torch.where(batch.mask, values, torch.full(batch.mask.shape, other))
        for values, other in ((batch.logprobs_old, -9.0), (batch.get(MeanLogprobs).old, -7.0))
    )
    strange = batch.with_(logprobs_old=old).with_extra(MeanLogprobs(means))
    logprobs = (batch.logprobs_old + 0.2) * batch.mask
    moved = Vocabulary(unchanged(batch).mean - 0.3, torch.ones(batch.mask.shape))
    noisy = Vocabulary(*(torch.where(batch.mask, one, torch.full_like(one, 4.0)) for one in (moved.mean, moved.normaliser)))
    plain = float(loss_of(algorithm, logprobs, batch, moved))
    assert float(loss_of(algorithm, torch.where(batch.mask, logprobs, torch.ones(())), strange, noisy)) == plain


def test_next_token_values_within_or_across_turns(make_batch) -> None:
    """Contract: the successor of a turn's last token is none, or the first token of the next turn."""
    batch = make_batch([[1, 0]], turns=[[2, 3], [1]])
    values = torch.arange(8.0).expand(2, 8)
    assert next_token_values(values, batch.mask, batch.turn).tolist() == [[0, 2, 0, 0, 5, 6, 0, 0], [0] * 8]
    assert next_token_values(values, batch.mask).tolist() == [[0, 2, 4, 0, 5, 6, 0, 0], [0] * 8]
    algorithm = rover(2, form="absolute", rho=1.0)
    batch = algorithm.prepare(batch)
    vocabulary = Vocabulary(torch.zeros(2, 8), values)
    _, targets = values_and_targets(torch.zeros(2, 8), batch, algorithm.rl, vocabulary)
    assert targets[0, batch.mask[0]].tolist() == [2, 4, 5, 6, 1]


@pytest.mark.parametrize(("rho", "most"), [(1.0, 0.5246), (0.1, 1.4e-4)])
def test_softmax_failure_probability(rho: float, most: float) -> None:
    """Three actions of value 0 and one of value 1: Q read from the policy's scores is exact up to a constant, and the softmax
    picks a wrong action with probability 3 / (e^(1/rho) + 3)."""
    algorithm = rover(2, form="absolute", rho=rho)
    batch = algorithm.prepare(trajectory_batch([make_episode(f"{row}", "a", [1], float(row)) for row in range(4)]))
    tokens = torch.tensor([[0, action] for action in range(4)])
    mask = torch.tensor([[False, True]] * 4)
    batch = batch.with_(token_ids=tokens, mask=mask, turn=mask.long() - 1, advantages=torch.zeros(4, 2))
    scored = scores(torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(4, 2, 4) / rho, tokens)
    values, _ = values_and_targets(scored.logprobs, batch, algorithm.rl, scored.vocabulary)
    torch.testing.assert_close(values[:, 1], torch.tensor([1.0, 0.0, 0.0, 0.0]), atol=1e-5, rtol=0)
    failing = -math.expm1(float(scored.logprobs[0, 1]))
    assert failing == pytest.approx(3 / (math.exp(1 / rho) + 3), rel=1e-3)
    assert float(f"{failing:.4g}") <= most


@pytest.mark.parametrize("settings", [{}, {"beta_next": 5.0, "rho": 0.5}, {"form": "absolute"}])
def test_gradient_matches_finite_differences(settings: dict) -> None:
    """Targets are constants; only the tokens' Q has a gradient."""
    algorithm = rover(2, **settings)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 5, (2, 4), generator=generator)
    start = torch.randn(2, 4, 5, generator=generator).double()
    episodes = [make_episode(f"{row}", "a", [2], float(row)) for row in range(2)]
    batch = trajectory_batch(episodes)
    mask = torch.tensor([[False, True, True, True]] * 2)
    before = scores(start * 0.5, tokens)
    batch = batch.with_(token_ids=tokens, mask=mask, turn=mask.long() - 1, logprobs_old=before.logprobs)
    batch = algorithm.prepare(batch.with_extra(MeanLogprobs(before.vocabulary.mean)))
    whole = scores(start, tokens)
    fixed = values_and_targets(whole.logprobs, batch, algorithm.rl, whole.vocabulary)[1]

    def value(logits: Tensor) -> Tensor:
        scored = scores(logits, tokens)
        q, _ = values_and_targets(scored.logprobs, batch, algorithm.rl, scored.vocabulary)
        return (torch.where(mask, q - fixed, torch.zeros(())).square().sum(1) / 3).mean()

    logits = start.clone().requires_grad_()
    scored = scores(logits, tokens)
    (gradient,) = torch.autograd.grad(loss_of(algorithm, scored.logprobs, batch, scored.vocabulary), logits)
    for place in ((0, 1, 2), (1, 3, 0), (0, 2, int(tokens[0, 2]))):
        step = torch.zeros_like(start)
        step[place] = 1e-3
        numeric = float(value(start + step).double() - value(start - step).double()) / 2e-3
        assert float(gradient[place]) == pytest.approx(numeric, rel=2e-2, abs=2e-4)


@pytest.mark.parametrize("share", [True, False])
def test_annotate_scores_the_policy_before_the_step(tiny_policy, share: bool) -> None:
    """Contract: log-probs and vocabulary means are pi_old's; the sampled log-probs are kept for comparison."""
    model = load_policy(tiny_policy, attention="sdpa").model
    algorithm = resolve(Rl(algorithm="rover", group_size=2, share_prefixes=share), 64)
    batch = trajectory_batch([make_episode("0", "a", [3, 2], 0.0), make_episode("1", "a", [1], 1.0)])
    models = Models.make(algorithm, model, None, make_processes(Resources()), 64)
    scored = models.annotate(batch, algorithm)
    with torch.no_grad():
        expected = token_logprobs(model, batch.token_ids, batch.mask)
        logs = model(batch.token_ids).logits.log_softmax(-1).mean(-1)
    torch.testing.assert_close(scored.logprobs_old, expected, rtol=0, atol=1e-5)
    mean = torch.cat([torch.zeros(2, 1), logs[:, :-1]], 1) * batch.mask
    torch.testing.assert_close(scored.get(MeanLogprobs).old, mean, rtol=0, atol=1e-5)
    assert torch.equal(scored.logprobs_drawn, batch.logprobs_old)
    plain = resolve(Rl(algorithm="grpo", group_size=2, share_prefixes=share), 64)
    assert models.annotate(batch, plain).logprobs_drawn is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": {"kind": "ppo_clip"}}, "would replace"),
        ({"loss": {"clip_high": 0.3}}, r"rl\.loss\.clip_high has no effect"),
        ({"advantage": {"estimator": "gae"}}, "mean group and std none apply to estimator: group"),
        ({"minibatches": 1}, r"one update per step .* is REINFORCE.*set rl\.minibatches to null, which is 4"),
        ({"minibatches": 1, "settings": {"beta_next": 5.0}}, r"one update per step .* is REINFORCE"),
        ({"tasks_per_step": 1}, r"one update per step .* is REINFORCE.*raise rl\.tasks_per_step"),
        ({"settings": {"form": "absolute"}}, "set mean and std to none"),
        ({"settings": {"form": "absolute", "beta_next": 1.0}, **ABSOLUTE}, "beta_next has no effect"),
        (
            {"settings": {"form": "absolute"}, **ABSOLUTE, "credit": {"kind": "annotated"}},
            r"rl\.credit\.kind: annotated would replace",
        ),
        ({"settings": {"rho": 0.0}}, r"'rl\.settings\.rho' Input should be greater than 0"),
        ({"group_size": 1}, "group_size"),
    ],
    ids=str,
)
def test_conflicting_settings_are_rejected(values: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate({"algorithm": "rover", **values}))


def test_default_is_four_updates_per_step() -> None:
    """Contract: one update per step is rejected only in the form in which it would be REINFORCE."""
    assert resolve(Rl(algorithm="rover")).rl.minibatches == 4
    for more in ({"minibatches": 2}, {"minibatches": 1, "epochs": 2}):
        assert resolve(Rl(algorithm="rover", settings={"beta_next": 5.0, "rho": 0.5}, **more)).rl.settings.beta_next == 5.0
    absolute = resolve(Rl(algorithm="rover", minibatches=1, settings={"form": "absolute", "rho": 0.1}, **ABSOLUTE)).rl
    assert (absolute.minibatches, absolute.settings.rho) == (1, 0.1)


@pytest.mark.parametrize("beta_next", [0.0, 1.0])
def test_groups_of_equal_returns_regularise_towards_pi_old(make_batch, beta_next: float) -> None:
    """Contract: dead_groups: drop keeps them, since their Q is fitted to the successor term, which is 0 where the vocabulary
    means did not change; GRPO drops them."""
    algorithm = rover(2, beta_next=beta_next)
    batch = algorithm.prepare(with_means(make_batch([[1, 1], [0, 0], [1, 0]], lengths=[2, 3, 1, 2, 2, 2])))
    assert algorithm.rl.dead_groups == "drop"
    assert algorithm.forward_rows(batch).tolist() == list(range(6))
    grpo = resolve(Rl(algorithm="grpo", group_size=2))
    assert grpo.forward_rows(grpo.prepare(batch)).tolist() == [4, 5]
    dead = batch.rows(torch.arange(4))
    moved = torch.tensor([[0.3], [-0.2], [0.1], [-0.4]]) * dead.mask
    logprobs = (dead.logprobs_old + moved).requires_grad_()
    vocabulary = unchanged(dead) if beta_next else None
    (gradient,) = torch.autograd.grad(loss_of(algorithm, logprobs, dead, vocabulary), logprobs)
    per_token = 2 * moved / dead.mask.sum(1, keepdim=True) / 4
    torch.testing.assert_close(gradient, per_token)
    assert bool((gradient[dead.mask].sign() == moved[dead.mask].sign()).all())


def test_methods_without_vocabulary_ignore_it(make_batch) -> None:
    algorithm = resolve(Rl(algorithm="pacs", group_size=2))
    assert not algorithm.needs_vocabulary
    assert not algorithm.needs_rescoring
    batch = algorithm.prepare(make_batch([[1, 0]]))
    given = SimpleNamespace(mean=None, normaliser=None)
    assert torch.isfinite(loss_of(algorithm, batch.logprobs_old, batch, given))
