"""merge.method joint_rl: one policy continues reinforcement learning on all domains in turn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import merge, rl
from stages.agent.policy import load_policy
from stages.params import parse_params
from stages.reporting.blocks import Table
from stages.reporting.sections.merging import merge_section
from stages.runtime.stage import StageContext
from stages.runtime.validation import ParamsError
from stages.training.common.loop import Update
from stages.training.rl import joint
from stages.training.rl.joint import JointJob
from training.toys import SHORT_RUN, FirstLetterEnvironment, KilledError, kill_at_step, outputs

Make = Callable[..., StageContext]


@pytest.fixture
def make(make_context: Make, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """make(name, lora, **rl): two toy domains, of which the second has two steps."""
    domain = SimpleNamespace(make=FirstLetterEnvironment.in_folder, settings=SimpleNamespace(max_turns=2, constraint=None))
    monkeypatch.setattr(joint, "open_domain", lambda name, settings: domain)

    def made(name: str = "run", lora: int = 0, **changes: Any) -> StageContext:
        context = make_context(
            "merge",
            name,
            domains=["toy", "other"],
            per_domain={"toy": {}, "other": {"rl": {"steps": 2}}},
            rl={**SHORT_RUN, **changes},
            merge={"method": "joint_rl"},
            model={"path": str(tiny_policy), "max_length": 128, "lora": {"rank": lora}},
        )
        if not (context.data / "curated/other").exists():
            for folder in ("curated", "rollouts"):
                shutil.copytree(context.data / folder / "toy", context.data / folder / "other")
            for folder in ("sft", "rl/toy", "rl/other"):
                shutil.copytree(tiny_policy, context.data / "models" / folder)
        return context

    return made


def test_all_domains_are_played_in_turn_and_learnt(make: Make) -> None:
    """Contract: every domain gets the steps of its own settings; one policy learns them all."""
    context = make(steps=16, tasks_per_step=6, group_size=8)
    merge.run(context)
    report = json.loads((context.reports / "merge.json").read_text())
    assert report["method"] == "joint_rl"
    found = report["joint_rl"]
    print("CURVE", [round(x, 2) for x in context.tracker.metrics["joint_rl/toy/success"]])
    assert found["steps"] == 18
    assert {name: of_domain["steps"] for name, of_domain in found["domains"].items()} == {"toy": 16, "other": 2}
    for of_domain in found["domains"].values():
        assert of_domain["episodes"] == of_domain["steps"] * 6 * 8
        assert of_domain["environment_steps"] == 2 * of_domain["episodes"], "two actions each"
    assert found["domains"]["toy"]["success_last"] > found["domains"]["toy"]["success_first"] + 0.2
    assert [len(context.tracker.metrics[f"joint_rl/{name}/success"]) for name in ("toy", "other")] == [16, 2]
    assert load_policy(context.data / "models/merged").hash != load_policy(context.data / "models/sft").hash


def test_the_report_shows_what_each_domain_gained() -> None:
    found = {"steps": 20, "episodes": 640, "environment_steps": 1900, "success_first": 0.254, "success_last": 0.611}
    merged = {"method": "joint_rl", "joint_rl": {"steps": 20, "domains": {"search": found}}}
    blocks = merge_section(
        SimpleNamespace(merge=merged, params=SimpleNamespace(domains=["search"], merge=SimpleNamespace(method="joint_rl")))
    ).blocks  # type: ignore[arg-type]
    (table,) = [block for block in blocks if isinstance(block, Table) and block.title.startswith("Joint")]
    assert table.rows == [["search", "20", "640", "1,900", "25 %", "61 %"]]


BUDGET = {"environment_steps": 20, "steps": 4, "tasks_per_step": 6, "group_size": 1}
CRITIC = {"algorithm": "ppo", "critic": {"warmup_steps": 1}, **BUDGET}
"""A critic for each domain; both budgets end before their steps do: the first after its second step."""


@pytest.mark.parametrize(
    ("step", "lora", "changes"), [(3, 0, CRITIC), pytest.param(3, 0, {}, marks=pytest.mark.slow), (4, 4, {})]
)
def test_resume_after_kill_writes_the_same_bytes(make: Make, step: int, lora: int, changes: dict[str, Any]) -> None:
    plain = make("plain", lora, **changes)
    merge.run(plain)
    merged = load_policy(plain.data / "models/merged")
    assert merged.hash != load_policy(plain.data / "models/sft").hash
    if changes:
        found = json.loads((plain.reports / "merge.json").read_text())["joint_rl"]["domains"]
        assert {name: of_domain["steps"] for name, of_domain in found.items()} == {"toy": 2, "other": 2}
    killed = make("killed", lora, **changes)
    of_others = killed.progress
    kill_at_step(killed, step)
    dying = killed.progress
    killed.progress = lambda label, *rest: (dying if "jointly" in label else of_others)(label, *rest)  # type: ignore[method-assign]
    with pytest.raises(KilledError):
        merge.run(killed)
    merge.run(make("killed", lora, **changes))
    assert "data/models/merged/model.safetensors" in outputs(plain.root)
    assert outputs(killed.root) == outputs(plain.root)


def test_with_one_domain_it_is_the_stage_rl(make_context: Make, make: Make) -> None:
    """Contract: the same bytes as the specialist's."""
    alone = make_context("rl", "alone", rl=SHORT_RUN)
    rl.run(alone)
    context = make_context("merge", "joint", rl=SHORT_RUN, merge={"method": "joint_rl"})
    joint.train(context, alone.data / "models/sft", None)
    weights = [root / "model.safetensors" for root in (alone.data / "models/rl/toy", context.data / "models/merged")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


class CountedJob:
    """A job of `steps` steps that may end earlier, with learners of two names."""

    def __init__(self, steps: int, ends: int = 99) -> None:
        self.rl, self.ends, self.done, self.seen = SimpleNamespace(steps=steps), ends, 0, []
        self.models = SimpleNamespace(reference=object())
        self.learners = {name: SimpleNamespace(optimiser=object()) for name in ("policy", "critic")}

    def updates(self, step: int) -> Any:
        assert step == self.done
        yield Update("policy", [], lambda _: iter(()))
        yield Update("critic", [], lambda _: iter(()), role="reader")

    def finish(self, step: int, sums: Any) -> dict[str, float]:
        self.done += 1
        self.seen.append(sums)
        return {"success": 0.5}

    def finished(self) -> bool:
        return self.done >= self.ends

    def report(self, rows: Any) -> dict[str, Any]:
        return {"rows": len(rows)}


def test_turns_skip_domains_that_have_ended() -> None:
    jobs = {"a": CountedJob(3), "b": CountedJob(5, ends=1), "c": CountedJob(4)}
    job, order = JointJob(jobs), []  # type: ignore[arg-type]
    while not job.finished():
        updates = list(job.updates(len(order)))
        order.append(job.played)
        assert [one.learner for one in updates] == [f"policy/{job.played}", f"critic/{job.played}"]
        row = job.finish(len(order) - 1, {one.label: {"loss": 1.0} for one in updates})
        assert row == {f"{job.played}/success": 0.5}
    assert order == ["a", "b", "c", "a", "c", "a", "c", "c"]
    assert jobs["c"].seen[0] == {"policy": {"loss": 1.0}, "critic@reader": {"loss": 1.0}}
    counts = {name: {"steps": count, "rows": count} for name, count in (("a", 3), ("b", 1), ("c", 4))}
    assert job.report() == {"steps": 8, "domains": counts}


def test_domains_share_the_reference_and_have_their_own_optimisers() -> None:
    first, second = CountedJob(1), CountedJob(1)
    job = JointJob({"a": first, "b": second})  # type: ignore[dict-item]
    assert sorted(job.learners) == ["critic/a", "critic/b", "policy/a", "policy/b"]
    assert len({id(learner.optimiser) for learner in job.learners.values()}) == 4
    assert second.models.reference is first.models.reference


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "rejection_sft"}, "rejection_sft learns from stored data and plays nothing"),
        ({"warm_start": {"algorithm": "tree_bc"}}, "rl.warm_start trains before the policy's first turn"),
        ({"algorithm": "ssp"}, "rl.tasks.source self_play makes tasks or instructions of its own"),
        ({"algorithm": "marft"}, "marft plays in a team, which one policy does without"),
    ],
)
def test_algorithms_that_cannot_take_turns_are_refused(changes: dict[str, Any], reason: str) -> None:
    stages = {"rollout": {"tasks": 96}, "annotate": {"tasks": 48}, "rl": changes}
    values = {"domains": ["toy", "other"], "per_domain": {"toy": {}, "other": {}}, **stages}
    joint = {"merge": {"method": "joint_rl"}}
    assert parse_params(values).rl
    assert parse_params({**values, **joint, "domains": ["toy"]}).rl, "one domain: the merge is its specialist"
    with pytest.raises(ParamsError, match=f"in per_domain.toy: merge.method joint_rl trains one policy .*{reason}"):
        parse_params({**values, **joint})


def test_it_starts_where_the_specialists_do() -> None:
    values = {"domains": ["toy"], "per_domain": {"toy": {}}, "merge": {"method": "joint_rl", "base": "base"}}
    with pytest.raises(ParamsError, match="method joint_rl starts where the specialists do: set base to sft"):
        parse_params(values)
