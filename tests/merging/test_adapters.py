"""Merging LoRA adapter folders: the same as merging the whole models that they stand for."""

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
from stages.merging.diagnostics import measure
from stages.merging.folders import open_folder
from stages.merging.registry import shipped
from stages.merging.settings import MergeError
from stages.merging.streaming import merge_folders

from .helpers import settings
from .test_stage import context


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/models/sft, two adapters on it, and the same two specialists as whole models below whole/."""
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


@pytest.mark.parametrize("method", shipped())
def test_adapters_merge_as_the_models_they_stand_for(made: Path, tmp_path: Path, method: str) -> None:
    """Contract: weights, config and tokenizer are the same bytes whether the specialists come as adapters or whole."""
    for name, root in (("adapters", made), ("whole", made / "whole")):
        models = [root / "data/models/rl" / domain for domain in ("one", "two")]
        merge_folders(method, models, root / "data/models/sft", tmp_path / name, settings(2), seed=3)
    assert contents(tmp_path / "adapters") == contents(tmp_path / "whole")
    load_policy(tmp_path / "adapters")


def test_the_stage_takes_adapters(made: Path) -> None:
    reports = []
    for root in (made, made / "whole"):
        merge.run(context(root, ["one", "two"], ram={"eps": 1e-4}))
        reports.append(json.loads((root / "reports/merge.json").read_text()))
    assert reports[0] == reports[1]
    assert 0.1 < reports[0]["diagnostics"]["models"]["one"]["changed_fraction"] < 0.9
    for name in ("merged", "merged_linear"):
        assert contents(made / "data/models" / name) == contents(made / "whole/data/models" / name)


def test_an_adapter_and_a_whole_model_merge(made: Path, tmp_path: Path) -> None:
    base = made / "data/models/sft"
    one, two = made / "data/models/rl/one", made / "data/models/rl/two"
    merge_folders("linear", [one, two], base, tmp_path / "adapters", settings(2), seed=0)
    merge_folders("linear", [one, made / "whole/data/models/rl/two"], base, tmp_path / "mixed", settings(2), seed=0)
    assert contents(tmp_path / "mixed") == contents(tmp_path / "adapters")


def test_one_tensor_of_each_specialist_is_made_at_a_time(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: memory is bounded: a change is computed when its tensor is read, and read once in each pass."""
    read: list[str] = []
    delta = Adapter.delta

    def counted(self: Adapter, name: str) -> torch.Tensor:
        read.append(name)
        return delta(self, name)

    monkeypatch.setattr(Adapter, "delta", counted)
    models = [made / "data/models/rl" / name for name in ("one", "two")]
    measure(["one", "two"], models, made / "data/models/sft", 1e-4)
    names = Adapter(models[0]).names
    assert read == [name for name in names for _ in models]


def test_an_adapter_of_another_base_is_refused(made: Path, tmp_path: Path) -> None:
    make_tiny_policy(tmp_path / "data/models/sft", num_hidden_layers=1)
    adapter = shutil.copytree(made / "data/models/rl/one", tmp_path / "data/models/rl/one")
    with pytest.raises(MergeError, match=r"changes model\.layers\.1.* lacks; restore the base"):
        open_folder(adapter)
