"""The lifecycle with methods that bring more than a composition: named in params.yaml they train on any domain."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import Checkout

pytestmark = [pytest.mark.timeout(900)]
METHODS = ("archer", "archer_offline", "arpo", "b_coder", "pacs", "rl_plus", "rover", "salt", "scaling_inter", "stored_pg")
OFTEN = ("archer", "arpo", "b_coder", "rl_plus")
"""One for each thing that a step may do: play and replay, branch, learn from what is stored, mix the two."""
STORED = ("b_coder", "stored_pg")
"""Those for whose losses the tiny profile's entropy bonus has no meaning."""
PLAY_NOTHING = ("archer_offline", *STORED)
SMALLER = {"replay": {"episodes": 4, "critic_updates": 3}}
"""A step of the methods that learn from replayed episodes is many updates; fewer will do."""


def changes(name: str) -> dict[str, Any]:
    """Of section `rl`; null undoes what an earlier test set."""
    replay = SMALLER if name.startswith("archer") else {"replay": dict.fromkeys(SMALLER["replay"])}
    return {"algorithm": name, "loss": {"entropy_coef": None if name in STORED else 0.05}, **replay}


@pytest.fixture(scope="module")
def base(undisturbed: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A copy of the whole run for this file."""
    return undisturbed.copy(tmp_path_factory.mktemp("methods") / "run")


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in METHODS])
def test_a_method_trains_on_every_domain_by_its_name_alone(base: Checkout, name: str) -> None:
    """The rl stage on what the lifecycle made before it, with `rl.algorithm` changed and nothing that decides what is done."""
    from stages import rl
    from stages.params import load_params
    from stages.runtime.stage import StageContext

    base.edit({"rl": changes(name)})
    params = load_params(base.root / "params.yaml")
    nothing = dict.fromkeys(("params", "metric", "artifact", "episodes"), lambda *_, **__: None)
    for domain in params.domains:
        rl.run(StageContext("rl", domain, params, base.root, SimpleNamespace(**nothing)))
        report = json.loads((base.root / "reports" / "rl" / f"{domain}.json").read_text())
        assert report["algorithm"] == name
        assert report["ledger/environment_tokens_trained"] == 0
        assert report["ledger/policy_tokens_trained"] > 0
        assert ("ledger/external_tokens_trained" in report) == (name == "rl_plus")
        assert (report["environment_steps"] == 0) == (name in PLAY_NOTHING)
        assert (base.root / "data" / "models" / "rl" / domain / "value").exists() == (name == "b_coder")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_lifecycle_runs_to_its_end_with_a_method(done: Checkout, name: str) -> None:
    """`dvc repro` after the edit: rl of every domain and what follows, and nothing before."""
    done.edit({"rl": changes(name)})
    follows = [] if name == "salt" else ["merge", "evaluate"]  # no two steps of these few episodes are equal: GRPO, bit for bit
    assert done.repro()[0] == ["rl@textworld", "rl@search", *follows, "report"]
