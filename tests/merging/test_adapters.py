"""Merging LoRA adapter folders gives the same as merging the full models that they encode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapters import make_adapter
from tiny import make_tiny_policy

from stages import merge
from stages.agent.policy import load_policy, save_policy
from stages.engine.adapters import Adapter
from stages.merging.contract import MergeError
from stages.merging.diagnostics import measure
from stages.merging.folders import open_folder
from stages.merging.streaming import merge_folders

from .helpers import TENSORWISE, bound
from .test_stage import context


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/models/sft, two adapters for it, and below whole/ the same two specialists as full models."""
    root = tmp_path_factory.mktemp("adapters")
    base = make_tiny_policy(root / "data/models/sft")
    for seed, name in enumerate(("one", "two"), start=1):
        adapter = make_adapter(root / "data/models/rl" / name, base, "data/models/sft", seed, rank=2 * seed)
        policy = load_policy(adapter)
        save_policy(policy.model, policy.tokenizer, root / "whole/data/models/rl" / name)
    shutil.copytree(base, root / "whole/data/models/sft")
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("method", TENSORWISE)
def test_adapters_merge_to_same_bytes_as_full_models(workspace: Path, tmp_path: Path, method: str) -> None:
    """Contract: weights, config and tokenizer are the same bytes whether the specialists are adapters or full models."""
    for name, root in (("adapters", workspace), ("whole", workspace / "whole")):
        models = [root / "data/models/rl" / domain for domain in ("one", "two")]
        merge_folders(method, models, root / "data/models/sft", tmp_path / name, bound(method, 2), seed=3)
    assert contents(tmp_path / "adapters") == contents(tmp_path / "whole")
    load_policy(tmp_path / "adapters")


def test_stage_accepts_adapters(workspace: Path) -> None:
    reports = []
    for root in (workspace, workspace / "whole"):
        merge.run(context(root, ["one", "two"], ram={"eps": 1e-4}))
        reports.append(json.loads((root / "reports/merge.json").read_text()))
    assert reports[0] == reports[1]
    assert 0.1 < reports[0]["diagnostics"]["models"]["one"]["changed_fraction"] < 0.9
    for name in ("merged", "merged_linear"):
        assert contents(workspace / "data/models" / name) == contents(workspace / "whole/data/models" / name)


def test_adapter_merges_with_full_model(workspace: Path, tmp_path: Path) -> None:
    base = workspace / "data/models/sft"
    one, two = workspace / "data/models/rl/one", workspace / "data/models/rl/two"
    merge_folders("linear", [one, two], base, tmp_path / "adapters", bound("linear", 2), seed=0)
    merge_folders("linear", [one, workspace / "whole/data/models/rl/two"], base, tmp_path / "mixed", bound("linear", 2), seed=0)
    assert contents(tmp_path / "mixed") == contents(tmp_path / "adapters")


def test_adapter_deltas_are_computed_one_tensor_at_a_time(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: memory is bounded: a delta is computed when its tensor is read, once per pass."""
    read: list[str] = []
    delta = Adapter.delta

    def counted(self: Adapter, name: str) -> torch.Tensor:
        read.append(name)
        return delta(self, name)

    monkeypatch.setattr(Adapter, "delta", counted)
    models = [workspace / "data/models/rl" / name for name in ("one", "two")]
    measure(["one", "two"], models, workspace / "data/models/sft", [1e-4, 1e-4])
    names = Adapter(models[0]).names
    assert read == [name for name in names for _ in models]


def test_adapter_of_different_base_is_rejected(workspace: Path, tmp_path: Path) -> None:
    make_tiny_policy(tmp_path / "data/models/sft", num_hidden_layers=1)
    adapter = shutil.copytree(workspace / "data/models/rl/one", tmp_path / "data/models/rl/one")
    with pytest.raises(MergeError, match=r"changes model\.layers\.1.* lacks; restore the base"):
        open_folder(adapter)
