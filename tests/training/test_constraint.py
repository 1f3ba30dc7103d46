"""rl under a constraint: forced tokens are never trained, and the policy learns among what is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from constraints.spec_files import spec_file

from stages import rl
from stages.constraints.settings import Constraint
from stages.environments.constrained import ConstrainedDomain
from stages.records.episode import Owner, read_rows
from training.toys import FirstLetterEnvironment, KilledError, kill_at_step, outputs, run

SPEC = """(states (room env) (go "go" turn) (zap "zap" turn) (key env))
(behaviour (next room (or go zap) key (or go zap)))"""
SECTION: dict[str, Any] = {
    "algorithm": "grpo",
    "steps": 10,
    "tasks_per_step": 4,
    "group_size": 6,
    "learning_rate": 0.03,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 8},
}


GO_LAST = """(states (room env) (go "go") (zap "zap") (key env))
(behaviour (next room (or go zap) key go))"""


@pytest.fixture
def constrained_toy(make_context: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """`make_context` with two actions under SPEC, or the specification of the test's parameter."""
    spec = spec_file(tmp_path, getattr(request, "param", SPEC), monkeypatch)
    constraint = Constraint(spec=spec, max_state_tokens=1)
    toy = SimpleNamespace(
        name="toy", make=FirstLetterEnvironment.in_folder, settings=SimpleNamespace(max_turns=2, constraint=constraint)
    )
    for opened in ("load_domain", "open_domain"):
        monkeypatch.setattr(rl, opened, lambda name, settings: ConstrainedDomain(toy, constraint))  # type: ignore[arg-type]
    return make_context


def test_policy_learns_among_the_allowed_states_and_resumes_to_the_same_bytes(constrained_toy: Any):
    """Contract: sampling and training log-probabilities agree under a mask (the loop asserts it), every token that the policy
    chose is trained once, and a killed run ends with the same bytes."""
    plain = constrained_toy("rl", "plain", rl=SECTION)
    history = run(plain)
    assert history[0]["success"] < 0.8
    assert history[-1]["success"] > history[0]["success"]
    report = json.loads((plain.root / "reports/rl/toy.json").read_text())
    rows = read_rows(plain.root / "data/rl/toy/samples.parquet")
    owners = [owner for row in rows for owner in row["owner"]]
    assert {int(Owner.POLICY), int(Owner.FORCED)} <= set(owners)
    assert report["ledger/forced_tokens_untrained"] > 0
    assert report["ledger/environment_tokens_trained"] == 0
    assert all(json.loads(row["reward_terms"])["violations"] == 0 for row in rows)
    killed = constrained_toy("rl", "killed", rl=SECTION)
    kill_at_step(killed, 3)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(constrained_toy("rl", "killed", rl=SECTION))
    assert outputs(killed.root) == outputs(plain.root)


@pytest.mark.parametrize("constrained_toy", [GO_LAST], indirect=True)
def test_a_teams_advantages_are_those_of_trained_tokens(constrained_toy: Any):
    """Contract: the history's mean advantages of members are over their texts, whose normalised advantages sum to 0, also where
    the decoder forces a text's first token, which has none."""
    team = {"algorithm": "marft", "steps": 1, "minibatches": 1}
    (row,) = run(constrained_toy("rl", rl={**SECTION, **team}))
    assert row["planner/turns"] == row["solver/turns"] == 2
    assert abs(row["solver/advantage"]) > 0.01
    assert row["planner/advantage"] + row["solver/advantage"] == pytest.approx(0.0, abs=1e-5)
