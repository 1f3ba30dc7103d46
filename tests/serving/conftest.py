from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import yaml

from stages.agent.policy import load_policy, policy_hash, save_policy
from stages.values.q_model import PreferenceQ, save_none
from stages.values.settings import QModel

MAX_LENGTH = 160


@pytest.fixture(scope="module")
def project(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose merged and sft models are the tiny policy, with a Q-model for one of its two domains."""
    root = tmp_path_factory.mktemp("project")
    values = {
        "domains": ["toy", "other"],
        "resources": {"slots": 16, "threads": 1},
        "model": {"path": str(tiny_policy), "max_length": MAX_LENGTH},
        "evaluate": {"best_of": {"n": 3}, "sampling": {"temperature": 0.0, "max_tokens": 6}},
        "per_domain": {"toy": {}, "other": {}},
    }
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    policy = load_policy(tiny_policy)
    for name in ("merged", "sft"):
        save_policy(policy.model, policy.tokenizer, root / "data/models" / name)
    changed = copy.deepcopy(policy.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    PreferenceQ(changed, policy.model, QModel(kind="step_dpo")).save(
        root / "data/models/q/toy", policy_hash(root / "data/models/sft")
    )
    save_none(root / "data/models/q/other")
    return root
