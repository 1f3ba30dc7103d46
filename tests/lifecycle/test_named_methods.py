"""Methods that consist of more than a composition train on any domain when they are named in params.yaml."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import Checkout
from slow import slow_except

pytestmark = [pytest.mark.timeout(900)]
METHODS = ("archer", "archer_offline", "arpo", "b_coder", "pacs", "rl_plus", "rover", "salt", "scaling_inter", "stored_pg")
QUICK = ("arpo", "b_coder")
"""One that plays, with branches, and one of offline data."""
WITHOUT_ENTROPY = ("b_coder", "stored_pg")
"""Methods for whose losses the tiny profile's entropy bonus is not valid."""
WITHOUT_ROLLOUTS = ("archer_offline", *WITHOUT_ENTROPY)
FEWER_UPDATES = {"replay": {"episodes": 4, "critic_updates": 3}}
"""A step of the methods that learn from replayed episodes has many updates."""


def changes(name: str) -> dict[str, Any]:
    """Changes of section `rl`; null undoes what an earlier test set."""
    replay = FEWER_UPDATES if name.startswith("archer") else {"replay": dict.fromkeys(FEWER_UPDATES["replay"])}
    return {"algorithm": name, "loss": {"entropy_coef": None if name in WITHOUT_ENTROPY else 0.05}, **replay}


@pytest.fixture(scope="module")
def base(undisturbed: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A copy of the whole run for this file."""
    return undisturbed.copy(tmp_path_factory.mktemp("methods") / "run")


@pytest.mark.parametrize("name", slow_except(METHODS, *QUICK))
def test_method_trains_on_every_domain_by_its_name(base: Checkout, name: str) -> None:
    """The rl stage on the outputs of earlier stages, with no change that decides what is done but `rl.algorithm`."""
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
        assert (report["environment_steps"] == 0) == (name in WITHOUT_ROLLOUTS)
        assert (base.root / "data" / "models" / "rl" / domain / "value").exists() == (name == "b_coder")


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_repro_with_another_method_runs_rl_and_its_dependents(done: Checkout, name: str) -> None:
    done.edit({"rl": changes(name)})
    follows = [] if name == "salt" else ["merge", "evaluate"]  # no two steps of so few episodes are equal: as GRPO, bit for bit
    assert done.repro()[0] == ["rl@textworld", "rl@search", *follows, "report"]
