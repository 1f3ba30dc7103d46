"""Pipelines over other domains than the default run's, on the tiny profile."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkout import ROOT, Checkout
from test_named_methods import METHODS, changes

from stages.params import load_params
from stages.runtime.overlay import overlaid, write_params

LONG_EPISODES = {"model": {"max_length": 1024}, "curate": {"noisy_demonstrations": 0}}
"""The tiny tokenizer knows few words, so that the shop's pages and detours in keydoor make long episodes."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.long(200)]


def test_three_domains_merge_three_specialists(source: Path, tmp_path: Path) -> None:
    """Contract: the shipped profile gives a specialist per domain, one merge of all three, panels of all three, and a report."""
    checkout = Checkout.make(tmp_path / "checkout", source)
    write_params(checkout.root / "params.yaml", overlaid(checkout.root / "params.yaml", ROOT / "profiles" / "three-domains.yaml"))
    checkout.edit(LONG_EPISODES)
    ran, restored = checkout.repro()
    assert {"curate@shop", "rollout@shop", "annotate@shop", "rl@textworld", "rl@search", "rl@shop", "merge"} <= set(ran)
    assert restored == []
    evaluation = json.loads((checkout.root / "reports" / "evaluation.json").read_text())
    assert set(evaluation["panels"]) == {"textworld", "search", "shop"}
    assert set(evaluation["models"]) == {"base", "sft", "rl@textworld", "rl@search", "rl@shop", "merged", "merged_linear"}
    assert checkout.repro() == ([], [])


def test_named_methods_train_on_shop_and_keydoor(source: Path, tmp_path: Path) -> None:
    """Contract: any method named in params.yaml trains on any domain."""
    from stages import rl
    from stages.runtime.stage import StageContext

    checkout = Checkout.make(tmp_path / "checkout", source)
    checkout.edit({"domains": ["shop", "keydoor"], **LONG_EPISODES})
    checkout.repro("annotate@shop", "annotate@keydoor")
    nothing = dict.fromkeys(("params", "metric", "artifact", "episodes"), lambda *_, **__: None)
    for name in METHODS:
        checkout.edit({"rl": changes(name)})
        params = load_params(checkout.root / "params.yaml")
        for domain in params.domains:
            rl.run(StageContext("rl", domain, params, checkout.root, SimpleNamespace(**nothing)))
            report = json.loads((checkout.root / "reports" / "rl" / f"{domain}.json").read_text())
            assert report["algorithm"] == name
            assert report["ledger/policy_tokens_trained"] > 0
