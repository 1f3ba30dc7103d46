"""The names under which a model is served, and what each selects by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.agent.best_of_n import by_logprob, by_scorer, per_token
from stages.agent.policy import load_policy, save_policy
from stages.engine.engine import Turn
from stages.params import load_params
from stages.runtime.validation import ParamsError
from stages.serving.variants import find_served_model, variants
from stages.values.token_q import Scale, TokenQ, load_token_q


def test_variants_use_the_settings_of_evaluate(project: Path, tmp_path: Path) -> None:
    """Contract: evaluate.best_of.per_token normalises log-probabilities and values, not a Q-model's scores; a specialist's
    `+value` is its own; votes have no ranking."""
    params = load_params(project / "params.yaml")
    turns = [Turn(0, (5, 6), (-1.0, -2.0), "stop"), Turn(0, (7,), (-2.0,), "stop")]
    backbone, heads = load_policy(project / "data/models/sft").model, [torch.nn.Linear(32, 1) for _ in range(2)]
    for domain in ("toy", "other"):
        policy, folder = load_policy(project / "data/models/sft"), tmp_path / "data/models/rl" / domain
        save_policy(policy.model, policy.tokenizer, folder)
        TokenQ(policy.model, backbone.model, *heads, Scale(1.0, 1.0, 1.0)).save(folder)
    for scaled in (False, True):
        best_of = params.evaluate.best_of.model_copy(update={"per_token": scaled})
        changed = params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"best_of": best_of})})
        ways = variants(tmp_path, changed, "rl@toy")
        assert list(ways) == ["", "+logprob", "+vote", "+value", "+value@toy", "+value@other"]
        assert "+value" not in variants(tmp_path, changed, "merged")
        assert ways["+value"] is ways["+value@toy"]
        assert ways["+vote"].rank() is None
        own = by_scorer(load_token_q(tmp_path / "data/models/rl/toy"))
        for how, rank in (("+logprob", by_logprob), ("+value", own)):
            expected = (per_token(rank) if scaled else rank)([3, 4], turns)
            assert ways[how].n == 3
            assert ways[how].rank()([3, 4], turns) == expected
            assert expected != (rank if scaled else per_token(rank))([3, 4], turns)


def test_a_reward_model_ranks_no_actions(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what evaluate selects among finished episodes, a server refuses, and says why."""
    params = load_params(project / "params.yaml")
    monkeypatch.setattr("stages.values.reward_model.has_reward_model", lambda folder: True)
    assert [name for name in variants(tmp_path, params, "merged") if "reward" in name] == []
    with pytest.raises(ParamsError, match=r"unknown model 'merged\+reward'.*A reward model ranks whole episodes"):
        find_served_model("merged+reward", project, params)
