"""What a stage records of its speed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stages import params
from stages.runtime import spans
from stages.runtime import stage as runtime
from stages.runtime.costs import read_cost
from stages.runtime.speed import speed
from stages.runtime.stage import StageContext, stage_run
from stages.runtime.tracker import Tracker


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_stage_logs_its_speed(project: Path, monkeypatch: pytest.MonkeyPatch, forked: bool, asked: bool) -> None:
    """Contract: speed/... are metrics of the run, summed over the processes that share a stage's work."""
    logged: dict[str, float] = {}

    class Recording(Tracker):
        def metric(self, name: str, value: float, step: int | None = None) -> None:
            logged[name] = value

    def run(context: StageContext) -> None:
        if context.shard or not forked:
            with spans.span("engine"):
                spans.count("sampled_tokens", 10)
                time.sleep(0.05)

    (project / "params.yaml").write_text("domains: [search]\nper_domain: {search: {}}\nresources: {workers: 3, device: cpu}\n")
    monkeypatch.setattr(runtime, "input_hashes", lambda *_, **__: {})
    monkeypatch.setattr(runtime, "output_hashes", lambda *_: {})
    assert stage_run("rollout", run, params, lambda *_: Recording(), forked=(lambda _: forked) if asked else forked) == 0
    cost = read_cost(project, "rollout")
    assert cost is not None
    assert cost.counts == {"sampled_tokens": 30 if forked else 10}
    assert cost.spans["engine"] >= (0.15 if forked else 0.05)
    assert logged == {f"speed/{name}": value for name, value in speed(cost).items()}
    assert 0 < logged["speed/share/engine"] < 1


@pytest.mark.parametrize("slow", [0, 1])
def test_the_wait_for_the_last_process_counts(project: Path, monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """Contract: what a process waits at the end, because others got more or slower work, is in its share of waiting."""

    def run(context: StageContext) -> None:
        if context.team and context.team.index == slow:
            time.sleep(0.4)

    (project / "params.yaml").write_text("domains: [search]\nper_domain: {search: {}}\nresources: {workers: 2}\n")
    monkeypatch.setattr(runtime, "LIBRARIES", ())
    assert stage_run("rollout", run, params, lambda *_: Tracker(), forked=True) == 0
    cost = read_cost(project, "rollout")
    assert cost is not None
    assert cost.spans["waiting"] > 0.3
