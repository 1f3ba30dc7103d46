"""The alias `champion` moves only if the paired test on the frozen panels shows an improvement."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from spooling import ROOT, attach, spooled

from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.evaluation.promotion import decide
from stages.records.episode import write_table
from stages.runtime.lineage import dvc_hash
from stages.tracking import write_pointer
from stages.tracking.registry import champion, number, retire, versions
from stages.tracking.sender import Sender
from stages.tracking.server import Server

SETTINGS = {"confidence": 0.95, "resamples": 500, "seed": 0}
SAMPLING = {"temperature": 0.5}


def played(model: str, successes: dict[str, int], panel: str = "p1") -> list[dict[str, Any]]:
    """Rows of 40 tasks per domain, the first `successes[domain]` of which succeed."""
    blank = {"attempt": 0, "policy_hash": "", "turns": 1, "tokens": 1, "accepted": 1.0, "cost": 0.0, "difficulty": 1.0}
    return [
        {
            **blank,
            "model": model,
            "domain": domain,
            "task_id": f"{domain}-{task:02d}",
            "cluster": f"{domain}-{task:02d}",
            "panel": f"{panel}-{domain}",
            "success": task < count,
            "reward": float(task < count),
            "stop_reason": "terminated",
        }
        for domain, count in successes.items()
        for task in range(40)
    ]


@pytest.mark.parametrize(
    ("challenger", "holder", "promoted", "why"),
    [
        ({"a": 30, "b": 20}, {"a": 10, "b": 20}, True, "better than X on a and worse on no panel"),
        ({"a": 30, "b": 5}, {"a": 10, "b": 25}, False, "worse than X on b"),
        ({"a": 21, "b": 20}, {"a": 20, "b": 20}, False, "no significant difference from X on any panel"),
        ({"a": 10}, {"a": 30}, False, "worse than X on a"),
    ],
)
def test_promotion_needs_better_somewhere_and_worse_nowhere(challenger: dict, holder: dict, promoted: bool, why: str) -> None:
    decision = decide(played("m", challenger), played("n", holder), "X", SETTINGS)
    assert decision.promoted is promoted
    assert why in decision.conclusion
    assert len(decision.lines) == len(challenger) + 1


def test_different_panels_are_not_compared() -> None:
    decision = decide(played("m", {"a": 40}, "new"), played("n", {"a": 0}), "X", SETTINGS)
    assert not decision.promoted
    assert "a new-a here, p1-a there" in decision.conclusion
    assert "cannot be compared" in decision.conclusion
    assert not decide(played("m", {"a": 40, "b": 40}), played("n", {"a": 0}), "X", SETTINGS).promoted


def evaluated(server: Server, digest: str, merged: dict[str, int], panel: str = "p1", sampling: dict | None = None) -> None:
    """Send the events of an evaluate stage: `merged` successes by a model of hash `digest`."""
    spool = spooled(server.root, "evaluate", None)
    settings = {**SETTINGS, "model": "merged", "sampling": sampling or SAMPLING}
    event = {"kind": "model", "name": "bellwether", "path": "data/models/merged", "md5": digest, "settings": settings}
    attach(spool, event, "model/merged.dvc", f"outs:\n- md5: {digest}\n")
    rows = [*played("sft", dict.fromkeys(merged, 10), panel), *played("merged", merged, panel)]
    write_table(spool.files_path / "0000" / "model" / "rows.parquet", EVALUATION_SCHEMA, rows)
    spool.append({"kind": "end", "status": "FINISHED"})
    assert Sender(server, spool).send()


def holder(server: Server) -> int | None:
    found = champion(server, "bellwether")
    return number(found) if found is not None else None


def test_champion_is_replaced_only_by_a_better_version(root: Path, server: Server) -> None:
    """The first version must beat sft, later ones the champion; the decision is a tag of version and run."""
    assert holder(server) is None
    evaluated(server, "11.dir", {"a": 11})
    assert holder(server) is None
    evaluated(server, "22.dir", {"a": 25})
    assert holder(server) == 2
    evaluated(server, "33.dir", {"a": 24})
    assert holder(server) == 2
    evaluated(server, "44.dir", {"a": 40}, sampling={"temperature": 1.0})
    assert holder(server) == 2
    evaluated(server, "44.dir", {"a": 40})
    assert holder(server) == 5
    found = versions(server, "bellwether")
    assert [version.tags["dvc.md5"] for version in found] == ["11.dir", "22.dir", "33.dir", "44.dir", "44.dir"]
    decisions = [version.tags["champion.decision"] for version in found]
    assert re.search("not promoted: .*sft", decisions[0])
    assert "; promoted: better than sft on a" in decisions[1]
    assert "sampling settings differ" in decisions[3]
    assert "promoted: better than champion version 2 on a" in decisions[4]
    # The same bytes make no new version; they are compared with the current champion.
    evaluated(server, "22.dir", {"a": 25})
    assert holder(server) == 5
    again = versions(server, "bellwether")
    assert len(again) == 5
    assert "not promoted: worse than champion version 5 on a" in again[1].tags["champion.decision"]
    assert {run.data.tags["model.version"] for run in server.runs(stage="evaluate")} == {f"bellwether/{n}" for n in range(1, 6)}
    retired = retire(server, "bellwether")
    assert retired is not None
    assert number(retired) == 5
    assert holder(server) is None


@pytest.mark.slow
def test_promote_command_explains_its_decision(root: Path, server: Server) -> None:
    (root / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())

    def promote(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "stages.tracking.promote", *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, output = promote()
    assert code == 2
    assert "there is no version of bellwether" in output
    evaluated(server, "11.dir", {"a": 25})
    evaluated(server, "22.dir", {"a": 25, "b": 30}, panel="p2")
    code, output = promote()
    assert code == 1
    assert "bellwether version 2: data/models/merged, DVC hash 22.dir" in output
    assert "cannot be compared" in output
    assert output.endswith("champion: version 1\n")


@pytest.mark.slow
def test_version_pointer_can_be_checked_out_with_dvc(tmp_path: Path) -> None:
    """The version's file is an ordinary DVC file: `dvc checkout` of it restores the same folder."""

    def dvc(*arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "dvc", *arguments, "--quiet"], cwd=tmp_path, check=True)

    model = tmp_path / "data" / "merged"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    dvc("init", "--no-scm")
    dvc("add", "data/merged")
    digest = dvc_hash(model)
    path = write_pointer(tmp_path / "champion", model, digest)
    written = yaml.safe_load((tmp_path / "data" / "merged.dvc").read_text())["outs"][0]
    assert yaml.safe_load(path.read_text())["outs"][0] == written
    dvc("checkout", "champion/merged.dvc")
    assert dvc_hash(tmp_path / "champion" / "merged") == digest
