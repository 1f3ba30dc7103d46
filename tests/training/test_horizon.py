"""The horizon in training: episodes end at the step's turn limit, and a resumed run continues in its stage."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from stages import rl
from stages.agent.chat import Chat
from stages.agent.policy import load_policy
from stages.params import ROOT, ParamsError, check_domains, parse_params
from stages.records.episode import Owner, read_rows
from training.toys import KilledError, kill_at_step, outputs

RL: dict[str, Any] = {
    "algorithm": "scaling_inter",
    "steps": 4,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}
STAGED: dict[str, Any] = {"rounds": [1, 2], "steps_per_stage": 2}
"""The toy environment's own limit is 2."""


def limits(root: Path) -> list[float]:
    with (root / "reports/rl/toy_history.csv").open() as handle:
        return [float(row["turn_limit"]) for row in csv.DictReader(handle)]


def test_episodes_end_at_the_turn_limit_of_the_step(make_context):
    """Contract: turns <= limit; truncated exactly if the episode was not over at its limit."""
    context = make_context("rl", rl={**RL, "steps": 2, "horizon": {"rounds": [1, 2], "steps_per_stage": 1}})
    rl.run(context)
    assert limits(context.root) == [1, 2]
    rows = read_rows(context.root / "data/rl/toy/samples.parquet")
    assert {row["step"] for row in rows} == {1, 2}
    for row in rows:
        cut = row["step"] == 1
        assert len(row["turns"]) == row["step"]
        assert (row["truncated"], row["terminated"], row["stop_reason"]) == (cut, not cut, "turn_limit" if cut else "terminated")


def test_resumed_run_skips_no_stage(make_context):
    """Contract: resumed within a stage (from step 1) or from its last step (2), a run writes the same bytes."""
    plain = make_context("rl", "plain", rl={**RL, "horizon": STAGED})
    rl.run(plain)
    assert limits(plain.root) == [1, 1, 2, 2]
    for killed_at in (2, 3):
        killed = make_context("rl", f"killed{killed_at}", rl={**RL, "horizon": STAGED})
        kill_at_step(killed, killed_at)
        with pytest.raises(KilledError):
            rl.run(killed)
        rl.run(make_context("rl", f"killed{killed_at}", rl={**RL, "horizon": STAGED}))
        assert outputs(killed.root) == outputs(plain.root)


def test_single_stage_equals_a_fixed_limit(make_context):
    """Contract: bit for bit."""
    staged = make_context("rl", "staged", rl={**RL, "steps": 2, "horizon": {"rounds": [2]}})
    fixed = make_context("rl", "fixed", rl={**RL, "steps": 2, "horizon": {"kind": "fixed", "turns": 2}})
    for context in (staged, fixed):
        rl.run(context)
    models = [load_file(context.root / "data/models/rl/toy/model.safetensors") for context in (staged, fixed)]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    histories = [(context.root / "reports/rl/toy_history.csv").read_bytes() for context in (staged, fixed)]
    assert histories[0] == histories[1]


def test_policy_mask_covers_end_of_turn_and_no_header(tiny_policy):
    """Contract: 3-token action, end marker, 4 observation tokens, 2-token action, end marker -> 1111 0000 111."""
    chat = Chat(load_policy(tiny_policy).tokenizer)
    dialogue = [("user", "you are in a room"), ("assistant", "take the key"), ("user", "look"), ("assistant", "go north")]
    encoded = chat.encode_demonstration([{"role": role, "content": text} for role, text in dialogue])
    start = encoded.spans[0][0]
    assert "".join("01"[owner == Owner.POLICY] for owner in encoded.owner[start:]) == "11110000111"


def test_horizon_beyond_the_environments_limit_is_rejected():
    values = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    values["rl"]["horizon"] = {"kind": "scaling_inter", "rounds": [4, 99]}
    with pytest.raises(ParamsError, match=r"in rl with per_domain.textworld: rl\.horizon\.rounds allows 99"):
        check_domains(parse_params(values))
