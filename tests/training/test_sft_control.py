"""sft.control: preferences are fine-tuned after the demonstrations, and a killed run ends with the same bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stages import sft
from training.toys import KilledError, kill_at_step, outputs

CONTROL: dict[str, Any] = {
    "kind": "soft",
    "outcomes": {"key": 2.0, "lamp": 1.0, "box": 0.0, "door": -1.0, "room": -2.0},
    **{"options": ["a", "b"], "epochs": 4.0, "learning_rate": 0.003, "batch_tokens": 1024},
}
SFT = {"epochs": 1.0, "batch_tokens": 256, "learning_rate": 3e-3, "eval_every": 2, "checkpoint_every": 1}


def report(context) -> dict[str, Any]:
    return json.loads((context.root / "reports/sft.json").read_text())


def weights(context) -> bytes:
    return (context.root / "data/models/sft/model.safetensors").read_bytes()


def test_it_follows_the_demonstrations_and_resumes_to_the_same_bytes(make_context) -> None:
    plain, whole = make_context("sft", "plain", sft=SFT), make_context("sft", "whole", sft={**SFT, "control": CONTROL})
    sft.run(plain)
    sft.run(whole)
    assert "control" not in report(plain)
    found = report(whole)
    assert found["steps"] == report(plain)["steps"]
    assert (found["control"]["kind"], found["control"]["questions"], found["control"]["held_out"]) == ("soft", 8, 2)
    assert found["control"]["loss_after"] < found["control"]["loss_before"]
    assert weights(whole) != weights(plain)
    alone = make_context("sft", "alone", sft={**SFT, "control": {**CONTROL, "rehearsal": 0.0}})
    sft.run(alone)
    assert weights(alone) != weights(whole), "the stage gives its demonstrations to rehearse"
    cut = make_context("sft", "cut", sft={**SFT, "control": CONTROL})
    kill_at_step(cut, 2)
    with pytest.raises(KilledError):
        sft.run(cut)
    cut = make_context("sft", "cut", sft={**SFT, "control": CONTROL})
    sft.run(cut)
    assert outputs(cut.root) == outputs(whole.root)


def test_the_base_model_is_controlled_without_demonstrations(make_context, tiny_policy) -> None:
    context = make_context("sft", sft={"demonstrations": 0, "control": {**CONTROL, "rehearsal": 0.0}})
    sft.run(context)
    assert report(context)["steps"] == 0
    assert report(context)["control"]["questions"] == 8
    assert weights(context) != (tiny_policy / "model.safetensors").read_bytes()


def test_lora_controls_the_full_model(make_context, tiny_policy) -> None:
    model = {"path": str(tiny_policy), "max_length": 128, "lora": {"rank": 2}}
    context = make_context("sft", sft={**SFT, "control": CONTROL}, model=model)
    sft.run(context)
    assert report(context)["control"]["loss_after"] < report(context)["control"]["loss_before"]
