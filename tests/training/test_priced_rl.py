"""rl with priced tools: costs reach rewards, the history and checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stages import rl
from stages.environments.protocol import Step
from stages.records.tools import call_terms
from training.toys import SHORT_RUN, FirstLetterEnvironment, KilledError, kill_at_step, outputs, read_history

RL = {**SHORT_RUN, "algorithm": "router_r1", "critic": {"warmup_steps": 0}, "cost": {"weight": 0.6, "window": 20}}


class PricedEnvironment(FirstLetterEnvironment):
    """The first action calls a tool that costs more the later in the alphabet it starts; every answer is right."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        first = self.actions == 1
        cost = float(ord(action[:1].lower() or "a") % 26) if first else 0.0
        terms = {**call_terms(["tool"], "tool" if first else None), "well_formed": float(step.terminated)}
        terms["exact_match"] = float(step.terminated)
        return Step(step.observation, terms["exact_match"], True, step.terminated, False, cost, terms)


def test_costs_are_in_the_history_and_the_window_resumes_to_the_same_bytes(
    make_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: a run that was killed compares costs with the same earlier episodes as one that was not."""
    made = SimpleNamespace(make=lambda folder: PricedEnvironment(), settings=SimpleNamespace(max_turns=2))
    monkeypatch.setattr(rl, "open_domain", lambda *_: made)
    plain, killed = (make_context("rl", name, rl=RL) for name in ("plain", "killed"))
    rl.run(plain)
    kill_at_step(killed, 2)
    with pytest.raises(KilledError):
        rl.run(killed)
    rl.run(make_context("rl", "killed", rl=RL))
    assert outputs(killed.root) == outputs(plain.root)
    rows = read_history(plain.root)
    assert all(row["calls_tool"] == 1.0 and row["tool_calls"] == row["episodes"] for row in rows)
    assert all(row["spent"] > 0 and row["well_formed"] == 1.0 for row in rows)
    assert all(row["success"] == 1.0 and 0.4 <= row["shaped_reward"] < 1.0 for row in rows)
