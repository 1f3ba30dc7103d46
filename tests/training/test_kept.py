"""Training on tokens drawn under top-p or top-k: the engine's record of them, and the pass that renormalises over it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages import rl
from stages.agent.logprobs import only_kept, score_tokens, token_logprobs
from stages.agent.policy import load_policy
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.records.episode import EPISODE_SCHEMA, Owner, episode_row
from stages.training.common import batches
from stages.training.common.batches import take, trajectory_batch
from stages.training.common.kept import Kept, kept_of
from training.toys import KilledError, kill_at_step, make_episode, outputs

RL: dict[str, Any] = {
    "steps": 3,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3, "top_p": 0.8},
}


def run(context) -> list[dict[str, str]]:
    rl.run(context)
    with (context.root / "reports/rl/toy_history.csv").open() as handle:
        return list(csv.DictReader(handle))


def weights(context) -> dict[str, torch.Tensor]:
    return load_file(context.root / "data/models/rl/toy/model.safetensors")


def test_engine_returns_the_tokens_it_drew_from(tiny_policy: Path) -> None:
    """Contract: log-probabilities are those over the kept tokens, whichever sessions decode beside and change rows."""
    model = load_policy(tiny_policy, attention="sdpa").model
    engine = TorchEngine(model, [1], slots=8, max_length=64)
    prompts = {engine.open([5, 6, 7 + number]): [5, 6, 7 + number] for number in range(8)}
    samplings = [Sampling(0.7, 0.6, 0, 2 + number, kept=number % 2 == 0) for number in range(8)]
    for session, sampling in zip(prompts, samplings, strict=True):
        engine.request(session, 11 * session, sampling)
    turns = {}
    while len(turns) < len(prompts):
        turns |= {turn.session: turn for turn in engine.advance()}
    for (session, prompt), sampling in zip(prompts.items(), samplings, strict=True):
        turn = turns[session]
        assert len(turn.kept) == (len(turn.token_ids) if sampling.kept else 0)
        for place, kept in enumerate(turn.kept):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *turn.token_ids[:place]]])).logits[0, -1].double() / 0.7
            logs = logits[list(kept)].log_softmax(-1)
            assert turn.token_ids[place] in kept
            assert float(logs[kept.index(turn.token_ids[place])]) == pytest.approx(turn.logprobs[place], abs=1e-5)
            assert float(logits.softmax(-1)[list(kept)].sum()) >= 0.6 - 1e-6
    assert min(len(kept) for turn in turns.values() for kept in turn.kept) < model.config.vocab_size


def test_an_unrestricted_or_greedy_turn_keeps_no_record(tiny_policy: Path) -> None:
    engine = TorchEngine(load_policy(tiny_policy).model, [1], slots=4, max_length=64)
    for sampling in (Sampling(kept=True, max_tokens=2), Sampling(0.0, 0.5, kept=True, max_tokens=2)):
        session = engine.open([5, 6])
        engine.request(session, 3, sampling)
        assert engine.advance()[0].kept == ()


def test_probabilities_over_the_kept_tokens() -> None:
    """Worked by hand: of 0.5, 0.3, 0.2 the first two are kept, so they have 0.625 and 0.375; a row of -1 keeps all."""
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]).log()
    found = only_kept(logits, torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32)).softmax(-1)
    assert found.tolist() == [pytest.approx([0.625, 0.375, 0.0]), pytest.approx([0.5, 0.3, 0.2])]


def restricted_batch(sets: list[list[int]]):
    episode = make_episode("a", "a", [2], 1.0)
    episode.kept = [(), (), *sets]
    return trajectory_batch([episode, make_episode("b", "a", [1], 0.0)])


def test_scores_and_their_gradient_equal_those_over_the_gathered_logits(tiny_policy: Path) -> None:
    """Contract: log-probability, entropy and gradient are those of a softmax over the kept logits alone."""
    model = load_policy(tiny_policy, attention="sdpa").model
    batch = restricted_batch([[10, 12, 30], [9, 11]])
    kept = kept_of(batch)
    assert kept is not None
    assert kept.shape == (2, 4, 3)
    scores = score_tokens(model, batch.token_ids, batch.mask, 0.5, entropy=True, kept=kept)
    (gradient,) = torch.autograd.grad(scores.logprobs.sum() + scores.entropy.sum(), [model.get_input_embeddings().weight])
    logits = model(batch.token_ids).logits / 0.5
    total = torch.zeros(())
    for row, column, tokens in ((0, 2, [10, 12, 30]), (0, 3, [9, 11]), (1, 2, range(model.config.vocab_size))):
        logs = logits[row, column - 1, list(tokens)].log_softmax(-1)
        chosen = logs[list(tokens).index(int(batch.token_ids[row, column]))]
        entropy = -(logs.exp() * logs).sum()
        assert scores.logprobs[row, column].item() == pytest.approx(chosen.item(), abs=1e-5)
        assert scores.entropy[row, column].item() == pytest.approx(entropy.item(), abs=1e-5)
        total = total + chosen + entropy
    (expected,) = torch.autograd.grad(total, [model.get_input_embeddings().weight])
    assert torch.allclose(gradient, expected, atol=1e-5)


def test_record_follows_rows_and_cuts() -> None:
    batch = restricted_batch([[10, 12], [11]])
    micro = take(batch, [1, 0])
    assert micro.get(Kept).tokens[1].tolist() == [[-1, -1], [-1, -1], [10, 12], [11, -1]]
    assert bool((micro.get(Kept).tokens[0] == -1).all())
    assert take(batch, [1]).get(Kept).tokens.shape == (1, 3, 2)
    assert kept_of(trajectory_batch([make_episode("b", "a", [1], 0.0)])) is None


def test_record_is_aligned_with_the_tokens_and_no_column_of_the_table() -> None:
    episode = make_episode("a", "a", [1], 1.0)
    episode.append([20, 21], Owner.POLICY, 1, [-0.1, -0.2], [[20, 3], [21]])
    assert episode.kept == [(), (), (), [20, 3], [21]]
    assert "kept" not in episode_row(episode)
    assert set(EPISODE_SCHEMA.names) < set(episode_row(episode))


@pytest.mark.parametrize(
    "section",
    [
        {"algorithm": "grpo", "loss": {"kl_coef": 0.1}},
        {"algorithm": "dapo", "sampling": {"max_tokens": 3, "top_k": 3}},
        {"algorithm": "ppo", "critic": {"warmup_steps": 0}},
        {"algorithm": "arpo"},
        {"algorithm": "grpo", "share_prefixes": False, "minibatches": 3, "epochs": 2},
    ],
    ids=["kl", "dapo", "ppo", "branches", "minibatches"],
)
def test_sampling_and_training_agree(make_context, section: dict[str, Any]) -> None:
    """Contract: the first update's log-probabilities are the engine's to 1e-5, which rl checks in every step, and its importance
    ratios are 1."""
    context = make_context("rl", rl={**RL, **section})
    history = run(context)
    assert float(history[0]["kl"]) == pytest.approx(0.0, abs=1e-6), "the reference is renormalised over the same tokens"
    if "minibatches" not in section:
        assert float(history[0]["ratio_max"]) == pytest.approx(1.0, abs=1e-4)


def test_without_the_record_the_check_of_agreement_fails(make_context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "with_kept", lambda batch, episodes: batch)
    with pytest.raises(ValueError, match="sampling and training log-probs differ"):
        run(make_context("rl", rl=RL))


def test_keeping_the_whole_vocabulary_changes_nothing(make_context) -> None:
    """Contract: top_k of the vocabulary's size is no restriction, to the last bit."""
    plain = make_context("rl", "plain", rl={**RL, "sampling": {"max_tokens": 3}})
    whole = make_context("rl", "whole", rl={**RL, "sampling": {"max_tokens": 3, "top_k": 10_000}})
    assert run(plain) == run(whole)
    first, second = weights(plain), weights(whole)
    assert all(first[name].equal(second[name]) for name in first)


def test_self_imitation_resumes_with_the_stored_record(make_context) -> None:
    section = {**RL, "imitation": {"ratio": 1.0}}
    plain = make_context("rl", "plain", rl=section)
    run(plain)
    killed = make_context("rl", "killed", rl=section)
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", rl=section))
    assert outputs(killed.root) == outputs(plain.root)


def test_reading_probabilities_needs_no_record(tiny_policy: Path) -> None:
    """Contract: an episode without a record is scored over the whole vocabulary, as before."""
    model = load_policy(tiny_policy, attention="sdpa").model
    batch = trajectory_batch([make_episode("b", "a", [2], 0.0)])
    with torch.no_grad():
        plain = token_logprobs(model, batch.token_ids, batch.mask)
        expected = model(batch.token_ids).logits[0, 1:3].log_softmax(-1).gather(-1, batch.token_ids[0, 2:4, None])[:, 0]
    assert torch.allclose(plain[0, 2:4], expected, atol=1e-5)
