"""Methods whose rewards come from judges, references, or verifiers, each by its name on briefs: from curate to the report, on the
tiny profile. A random model plays, so that this is about running, not about learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkout import Checkout

from stages.params import Params, load_params
from stages.records.episode import read_rows
from stages.reporting.inputs import load_inputs
from stages.reporting.sections.judges import judges_section
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker

pytestmark = [pytest.mark.timeout(600)]

JUDGE_MODEL = {"kind": "reward", "epochs": 1.0, "pairs": 6}
PRINCIPLES = [{"name": "correct", "text": "right", "negative": "wrong"}, {"name": "short", "text": "short", "negative": "long"}]
METHODS: dict[str, dict[str, Any]] = {
    "arena_rl": {},
    "rlvrr": {},
    "rlvr_cross_domain": {"rl": {"verifier": {"fit_steps": 2}}},
    "salmon": {
        "annotate": {"judge_model": {**JUDGE_MODEL, "principles": {"items": PRINCIPLES}}},
        "rl": {"judge": {"principles": {"items": PRINCIPLES}}},
    },
    "rlmt": {"model": {"thinking": {}}, "curate": {"thoughts": "expert"}, "annotate": {"judge_model": JUDGE_MODEL}},
}
"""Method -> what docs/ tells a user to set beside its name."""
COLUMNS = {
    **dict.fromkeys(("arena_rl", "salmon", "rlmt"), "judge_gold"),
    **{"rlvrr": "references_gold", "rlvr_cross_domain": "verifier_gap"},
}
"""What the method's history has."""
WHOLE_REPORT = "salmon"
"""The method whose run gets all of the report, and whose SFT policy is controlled and asked for its preferences
(utility_engineering); those of the others get the report's chapter on judges."""
OUTCOMES = {"key": 2.0, "lamp": 1.0, "box": 0.0, "door": -1.0, "room": -2.0}
PREFERENCES: dict[str, Any] = {
    "sft": {"control": {"kind": "soft", "outcomes": OUTCOMES, "epochs": 1.0}},
    "evaluate": {"utilities": {"outcomes": list(OUTCOMES), "epochs": 20, "lotteries": 5}},
}
SIZES: dict[str, Any] = {
    "domains": ["briefing"],
    "model": {"max_length": 256},
    "curate": {"train": 10, "noisy_demonstrations": 0},
    "rollout": {"attempts": 4},
    "evaluate": {"models": ["sft"]},
}
PER_DOMAIN = {"per_domain": {"briefing": {"environment": {}, "curate": {}, "rollout": {}, "annotate": {}, "rl": {}}}}


LONG = ("arena_rl", "rlmt", "rlvrr")
"""Methods whose mechanisms others here share; they run with --slow."""


@pytest.fixture(scope="module")
def base(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout.make(tmp_path_factory.mktemp("judged") / "run", source)


def method_params(base: Checkout, original: str, method: str) -> Params:
    path = base.root / "params.yaml"
    path.write_text(original)
    base.edit({**SIZES, **PER_DOMAIN})
    base.edit({"rl": {"algorithm": method}})
    base.edit(METHODS[method])
    if method == WHOLE_REPORT:
        base.edit(PREFERENCES)
    return load_params(path)


def stage(base: Checkout, name: str, params: Params) -> None:
    from stages import annotate, curate, evaluate, report, rl, rollout, sft

    modules = {"curate": curate, "sft": sft, "rollout": rollout, "annotate": annotate, "rl": rl, "evaluate": evaluate}
    run = {**modules, "report": report}[name].run
    run(StageContext(name, None if name in ("sft", "evaluate", "report") else "briefing", params, base.root, Tracker()))


@pytest.mark.parametrize("method", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in METHODS])
def test_method_runs_from_curate_to_the_report(base: Checkout, original: str, made: dict[str, str], method: str) -> None:
    """Contract: rl trains policy tokens and no others on rewards that the environment does not give, its history has the gold
    quality that no reward contained, judgments are stored beside the episodes, and the report has the chapter on judges."""
    params, key = method_params(base, original, method), ""
    for name in ("curate", "sft", "rollout", "evaluate", "annotate"):
        own = params.section(name, "briefing") if name in ("curate", "rollout", "annotate") else getattr(params, name)
        key += repr([own, params.model])
        if made.get(name) != key:
            stage(base, name, params)
            made[name] = key
    (base.root / "data/rl/briefing/judgments.parquet").unlink(missing_ok=True)
    stage(base, "rl", params)
    report = json.loads((base.root / "reports/rl/briefing.json").read_text())
    assert report["algorithm"] == method
    assert report["ledger/environment_tokens_trained"] == 0
    assert report["ledger/policy_tokens_trained"] + report["ledger/policy_tokens_dropped"] > 0
    history = (base.root / "reports/rl/briefing_history.csv").read_text().splitlines()
    assert COLUMNS[method] in history[0].split(",")
    assert len(history) == 1 + 3
    judged = COLUMNS[method] == "judge_gold"
    assert (base.root / "data/rl/briefing/judgments.parquet").exists() == judged
    if judged:
        assert {row["status"] for row in read_rows(base.root / "data/rl/briefing/judgments.parquet")} == {"ok"}
    if method == WHOLE_REPORT:
        stage(base, "report", params)
        page = (base.root / "reports/report.html").read_text()
        assert "Who scored episodes that no program can call right or wrong" in page
        assert "Models were asked which of two outcomes is better" in page
        assert "Control (soft): after fine-tuning on 8 pairs" in page
        asked = json.loads((base.root / "reports/evaluation.json").read_text())["utilities"]
        assert (asked["outcomes"], asked["models"]["sft"]["pairs"]) == (list(OUTCOMES), 9), "of ten pairs one is held out"
    else:
        assert judges_section(load_inputs(base.root, params)) is not None
    fitted = json.loads((base.root / "reports/annotate/briefing.json").read_text()).get("judge_model")
    assert (fitted is not None) == ("annotate" in METHODS[method])
