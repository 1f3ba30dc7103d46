"""Q-models: losses by hand, scores, learning from trees; on tiny models."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.agent.logprobs import States, predicting_states
from stages.agent.policy import load_policy
from stages.agent.shared_prefixes import make_layout, sharing_states
from stages.annotation.decisions import Decision, Rows, sibling_decisions, step_pairs, trajectory_pairs
from stages.annotation.pairs import pair_rows
from stages.annotation.q_fitting import evaluate, fit_preferences, fit_regression, logprobs, preference_loss
from stages.annotation.settings import Annotate
from stages.values.fitting import token_batches
from stages.values.q_model import PreferenceQ, load_q_model, save_none
from stages.values.settings import QModel


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(tiny_policy, attention="sdpa")


def node(index: int, parent: int, n: int, c: int, tokens: list[int], context: list[int], **changes: Any) -> dict[str, Any]:
    base = {"task_id": "t", "node": index, "parent": parent, "depth": 0, "N": n, "W": float(c)}
    base |= {"reward": float(c > 0 and not context), **dict.fromkeys(("R", "R2"), float(c) if context else 0.0)}
    base |= {"n_success": c, "n_rollouts": n, "terminal": not context, "truncated": False, "action": str(tokens)}
    return {**base, "token_ids": tokens, "context_ids": context, **changes}


def tree(task_id: str = "t") -> list[dict[str, Any]]:
    """The root's children: 1 (Q 2/3) and 2 (Q 0, terminal); below 1: 3 (terminal, a success) and 4 (terminal, a failure)."""
    rows = [
        node(0, -1, 4, 2, [], [1, 2, 3]),
        node(1, 0, 3, 2, [4, 5], [6]),
        node(2, 0, 1, 0, [7, 8], []),
        node(3, 1, 2, 2, [10], []),
        node(4, 1, 1, 0, [12, 13], []),
    ]
    return [{**row, "task_id": task_id} for row in rows]


PARAMS = Annotate(pairs={"min_visits": 1})


def test_loss_by_hand() -> None:
    """ln 2 if both log-ratios are 0; beta 0.1, h 0.5 and -1: 0.6210; its gradient by finite differences."""
    assert preference_loss(torch.zeros(1), torch.zeros(1), 0.1).item() == pytest.approx(math.log(2))
    assert preference_loss(torch.tensor([0.5]), torch.tensor([-1.0]), 0.1).item() == pytest.approx(0.6210, abs=5e-5)
    win = torch.tensor([0.5, -2.0], requires_grad=True, dtype=torch.float64)
    lose = torch.tensor([-1.0, 3.0], dtype=torch.float64)
    preference_loss(win, lose, 0.7).sum().backward()
    slope = (preference_loss(win + 1e-6, lose, 0.7) - preference_loss(win - 1e-6, lose, 0.7)) / 2e-6
    torch.testing.assert_close(win.grad, slope.detach(), atol=1e-6, rtol=0)


def test_summed_and_per_token_scores_choose_differently() -> None:
    """A with h -2.0 over 4 tokens, B with h -1.8 over 2: sums pick B, means pick A."""
    h, tokens = torch.tensor([-2.0, -1.8]), torch.tensor([4, 2])
    plain, mean = (PreferenceQ(torch.nn.Identity(), None, QModel(kind="step_dpo", length_normalise=on)) for on in (False, True))
    assert plain.normalised(h, tokens).argmax() == 1
    assert mean.normalised(h, tokens).argmax() == 0
    torch.testing.assert_close(mean.normalised(h, tokens), torch.tensor([-0.5, -0.9]))


def test_untrained_scores_are_zero(policy: Any) -> None:
    """While policy and reference are equal; accuracy counts ties as half."""
    model = PreferenceQ(policy.model, policy.model, QModel(kind="step_dpo"))
    assert model.scores([1, 2, 3], [[4, 5], [6], [7, 8, 9]]).tolist() == [0.0, 0.0, 0.0]
    judged = evaluate(model, sibling_decisions(tree(), PARAMS), 0.25)
    assert judged == {"pairs": 2, "accuracy": 0.5, "correlation": 0.0}


def test_scores_equal_those_of_full_forward_passes(policy: Any) -> None:
    """Contract: encoding the history once gives the log-ratios of full forward passes; only the action's tokens count; an
    action's score is the same alone and beside others (bit for bit beside the same ones)."""
    other = copy.deepcopy(policy.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    model = PreferenceQ(other, policy.model, QModel(kind="step_dpo", beta=0.5))
    history, actions = (5, 6, 7, 8), ((9, 10, 11), (12,), (13, 14))
    decision = Decision("t", history, actions, tuple((True,) * len(one) for one in actions), (0.0,) * 3, (1.0,) * 3)
    rows = Rows.of([decision])
    with torch.no_grad():
        h, reference = (model.logprobs(one, rows.token_ids, rows.mask, predicting_states) for one in (other, policy.model))
        h -= reference
    found = model.scores(history, actions)
    torch.testing.assert_close(found, 0.5 * h, atol=1e-5, rtol=1e-5)
    assert found.abs().min() > 0
    alone = torch.cat([model.scores(history, [action]) for action in actions])
    torch.testing.assert_close(alone, found, atol=1e-5, rtol=1e-5)
    assert model.scores(history, actions).equal(found)
    # However large beta is, the same action is best.
    for beta in (1e-3, 1e4):
        bold = PreferenceQ(other, policy.model, QModel(kind="step_dpo", beta=beta)).scores(history, actions)
        torch.testing.assert_close(bold, beta / 0.5 * found)
        assert bold.argmax() == found.argmax()


def test_decisions_of_a_tree() -> None:
    """Q of a step is its node's own value; a sibling's weight is the number of rollouts that its Q averages."""
    first, second = sibling_decisions(tree(), PARAMS)
    assert (first.history, first.actions) == ((1, 2, 3), ((4, 5), (7, 8)))
    assert (first.q, first.weight) == ((2 / 3, 0.0), (3.0, 1.0))
    assert second.history == (1, 2, 3, 4, 5, 6)
    assert (second.q, second.weight) == ((1.0, 0.0), (2.0, 1.0))
    rows = Rows.of([first, second])
    assert rows.token_ids.tolist()[0] == [1, 2, 3, 4, 5, 0, 0, 0]
    assert rows.token_ids.tolist()[3] == [1, 2, 3, 4, 5, 6, 12, 13]
    assert rows.last.tolist() == [4, 4, 6, 7]
    assert rows.mask.sum(1).tolist() == [2, 2, 1, 2]


def test_step_pairs_and_trajectory_pairs() -> None:
    """A trajectory pair is a winner and a loser from the task's start, scored over all their actions."""
    pairs = step_pairs(tree(), pair_rows(tree(), PARAMS))
    assert [(pair.actions, pair.total) for pair in pairs] == [(((4, 5), (7, 8)), 1.0), (((10,), (12, 13)), 1.0)]
    whole = trajectory_pairs(tree(), PARAMS)
    assert [pair.actions for pair in whole] == [((4, 5, 6, 10), (7, 8)), ((4, 5, 6, 10), (4, 5, 6, 12, 13))]
    assert whole[0].policy == ((True, True, False, True), (True, True))
    assert sum(pair.total for pair in whole) == 1.0
    assert whole[0].history == (1, 2, 3)


def test_token_batches_hold_whole_decisions_within_the_budget() -> None:
    decisions = sibling_decisions(tree("a") + tree("b"), PARAMS)
    assert [[one.task_id for one in run] for run in token_batches(decisions, 40)] == [["a", "a"], ["b", "b"]]
    assert [len(run) for run in token_batches(decisions, 10)] == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["step_dpo", "trajectory_dpo"])
def test_preferences_are_learned_without_changing_the_policy(policy: Any, kind: str, tmp_path: Path) -> None:
    rows = [row for task in "abcd" for row in tree(task)]
    pairs = step_pairs(rows, pair_rows(rows, PARAMS)) if kind == "step_dpo" else trajectory_pairs(rows, PARAMS)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    params = QModel(kind=kind, epochs=6, learning_rate=2e-3, batch_tokens=256, beta=0.5)
    model, report = fit_preferences(policy.model, pairs, params, 0, 64)
    assert report.history[0] == pytest.approx(math.log(2), abs=1e-6), "the first loss is not that before any update"
    assert report.history[-1] < report.history[0]
    assert evaluate(model, sibling_decisions(rows, PARAMS), 0.25)["accuracy"] == 1.0
    assert all(before[name].equal(value) for name, value in policy.model.state_dict().items())
    whole, _ = fit_preferences(policy.model, pairs, params, 0, 100_000)
    for name, value in whole.policy.state_dict().items():
        torch.testing.assert_close(value, model.policy.state_dict()[name], atol=2e-5, rtol=1e-4)

    model.save(tmp_path / "q", policy.hash)
    loaded = load_q_model(tmp_path / "q", policy.folder)
    action = ((4, 5), (7, 8))
    torch.testing.assert_close(loaded.scores((1, 2, 3), action), model.scores((1, 2, 3), action))
    model.save(tmp_path / "other", "another")
    with pytest.raises(ValueError, match="was made from a different policy"):
        load_q_model(tmp_path / "other", policy.folder)


@pytest.mark.parametrize("loss", ["mse", "hl_gauss", "two_hot", "c51"])
def test_regression_learns_the_labels(policy: Any, loss: str, tmp_path: Path) -> None:
    """Contract: with any head, scores approach the labels' Q; a saved model gives the same scores."""
    decisions = sibling_decisions([row for task in "abcd" for row in tree(task)], PARAMS)
    params = QModel(kind="regression", epochs=40, learning_rate=3e-3, batch_tokens=256, head={"loss": loss})
    model, report = fit_regression(policy.model.base_model, decisions, params, 0, 10_000)
    assert report.clamped == 0.0
    scores = model.scores((1, 2, 3), ((4, 5), (7, 8)))
    assert scores.tolist() == pytest.approx([2 / 3, 0.0], abs=0.15)
    assert evaluate(model, decisions, 0.25)["accuracy"] == 1.0
    model.save(tmp_path, policy.hash)
    assert load_q_model(tmp_path, policy.folder).scores((1, 2, 3), ((4, 5), (7, 8))).equal(scores)


@pytest.mark.parametrize("kind", ["regression", "step_dpo"])
def test_reading_a_history_once_changes_nothing_but_the_time(policy: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a model fitted on shared histories is the one fitted on whole rows, and reads fewer tokens."""
    rows = [row for task in "abcd" for row in tree(task)]
    params = QModel(kind=kind, epochs=3, learning_rate=1e-3, batch_tokens=256)
    read: list[int] = []

    def counted(model: Any, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        read.append(len(make_layout(token_ids, mask).ids))
        return sharing_states(model, token_ids, mask)

    def dense(model: Any, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        read.append(token_ids.numel())
        return predicting_states(model, token_ids, mask)

    found = []
    for states in (counted, dense):
        monkeypatch.setattr("stages.annotation.q_fitting.fastest_states", lambda _, states=states: states)
        read.clear()
        if kind == "regression":
            model, report = fit_regression(policy.model.base_model, sibling_decisions(rows, PARAMS), params, 0, 10_000)
        else:
            pairs = step_pairs(rows, pair_rows(rows, PARAMS))
            model, report = fit_preferences(policy.model, pairs, params, 0, 10_000)
        found.append((sum(read), report, model.scores((1, 2, 3), ((4, 5), (7, 8)))))
    (fewer, once, scores), (more, whole, expected) = found
    assert fewer < 0.7 * more
    assert once.steps == whole.steps
    torch.testing.assert_close(torch.tensor(once.history), torch.tensor(whole.history), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=1e-3)


def test_conservative_term_pulls_scores_towards_the_policy(policy: Any) -> None:
    """Contract: with labels all equal, a large weight makes softmax(Q) the policy's shares: 3 to 1 is a difference of ln 3."""
    decision = sibling_decisions(tree(), PARAMS)[0]
    flat = Decision(**{**decision.__dict__, "q": (0.5, 0.5)})
    params = QModel(kind="regression", epochs=60, learning_rate=1e-2, conservative=50.0, head={"loss": "mse"})
    model, _ = fit_regression(policy.model.base_model, [flat] * 4, params, 0, 10_000)
    scores = model.scores(flat.history, flat.actions)
    assert (scores[0] - scores[1]).item() == pytest.approx(math.log(3), abs=0.1)


def test_evaluation_ignores_constants_per_history(policy: Any) -> None:
    """Q is known up to a term per history; evaluation compares only actions of one history."""

    class Shifted:
        def scores(self, history: Any, actions: Any) -> torch.Tensor:
            return torch.tensor([float(len(action)) for action in actions]) + 1000.0 * len(history)

    class Plain:
        def scores(self, history: Any, actions: Any) -> torch.Tensor:
            return torch.tensor([float(len(action)) for action in actions])

    decisions = sibling_decisions(tree(), PARAMS)
    assert evaluate(Shifted(), decisions, 0.0) == pytest.approx(evaluate(Plain(), decisions, 0.0))


def test_missing_q_model_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"q_model\.json is missing; run the annotate stage"):
        load_q_model(tmp_path / "toy", tmp_path)
    save_none(tmp_path / "toy")
    with pytest.raises(ValueError, match=r"set annotate\.q_model\.kind to step_dpo"):
        load_q_model(tmp_path / "toy", tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"kind": "step_dpo", "conservative": 0.1},
            r"q_model\.conservative has no effect: it needs kind: regression; set it to 0\.0",
        ),
        (
            {"kind": "none", "init": "value_model"},
            r"q_model\.init has no effect: it needs kind: regression; set it to sft",
        ),
        (
            {"kind": "regression", "length_normalise": True},
            r"q_model\.length_normalise has no effect: it needs kind: step_dpo or tr",
        ),
        ({"kind": "regression", "head": {"v_max": 0.9}}, r"set v_min to at most"),
    ],
)
def test_inapplicable_q_model_settings_are_rejected(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Annotate(tasks=48, q_model=changes)


@pytest.mark.parametrize("states", [predicting_states, sharing_states])
def test_logprobs_of_pairs_are_winners_then_losers(policy: Any, states: States) -> None:
    (pair, *_) = trajectory_pairs(tree(), PARAMS)
    model = PreferenceQ(policy.model, policy.model, QModel(kind="trajectory_dpo"))
    with torch.no_grad():
        found = logprobs(model, policy.model, [pair, pair], states)
        ids = torch.tensor([[*pair.history, *pair.actions[0]]])
        logits = torch.log_softmax(policy.model(input_ids=ids).logits, -1)[0]
    expected = sum(logits[place - 1, ids[0, place]] for place, own in enumerate([*[False] * 3, *pair.policy[0]]) if own)
    torch.testing.assert_close(found[:, 0], expected.expand(2), atol=1e-5, rtol=1e-5)
