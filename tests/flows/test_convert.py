"""A conversion round as a flow, over a small planted log: its files, its numbers, and that it does nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from narrow_calls import logged, small_settings, strange, write_log
from tiny import make_tiny_policy

import flows  # noqa: F401  (configures Prefect, so it comes before Prefect's import)
from flows import convert as module
from flows.convert import ConversionRound, convert_calls
from flows.process import StageFailedError
from stages.agent.policy import load_policy
from stages.conversion.specialise import parameters

MADE = {"dashboard.html", "report.json", "router.json", "specialist-0", "state.json"}


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, float]:
    """A small and a large model, and the ratio of their parameters."""
    folder = tmp_path_factory.mktemp("models")
    small, large = make_tiny_policy(folder / "small"), make_tiny_policy(folder / "large", num_hidden_layers=4)
    return small, large, parameters(load_policy(small)) / parameters(load_policy(large))


@pytest.fixture
def root(tmp_path: Path, sizes: tuple[Path, Path, float], monkeypatch: pytest.MonkeyPatch) -> Path:
    """72 intents, 12 dates, too few for a cluster of their own to be served, and 4 strange test calls."""
    monkeypatch.setattr(module, "logger", lambda: print)
    intents = [{**call, "response": "wish 0"} for call in logged(72, ("intent",))]
    write_log(tmp_path / "calls.jsonl", [*intents, *logged(12, ("date",), 77), *strange(4, "test")])
    small, large, _ = sizes
    router = {"min_confidence": 0.3, "min_calls": 8}
    settings = small_settings(small, teacher=str(large), router=router)
    (tmp_path / "conversion.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def check(root: Path, rho: float, done: str) -> None:
    """Of 16 test calls, 8 intents, 4 dates and 4 strange ones, the specialist takes the intents."""
    cost = 0.5 * rho + 0.5
    assert done == f"converted: replaceable share 50.0%, cost of a call {cost:.1%} of the large model's"
    report = json.loads((root / "out/report.json").read_text())
    assert {path.name for path in (root / "out").iterdir()} == MADE
    assert (report["status"], report["calls"], report["test_calls"], report["answered_by"]) == ("converted", 88, 16, {"llm": 88})
    assert (report["replaceable_share"], report["fallback_rate"], report["quality"]) == (0.5, 0.25, 1.0)
    assert report["cost_per_call"] == pytest.approx(cost)
    own, other = report["clusters"]["0"], report["clusters"]["1"]
    assert (own["served_by"], own["rows"], own["confirmed"]) == ("tiny", {"train": 54, "valid": 10, "test": 8}, 8)
    assert (own["weight"], own["routed"], own["difference_lower_bound"]) == (0.5, 1.0, 0.0)
    assert (other["served_by"], other["rows"]["test"]) == ("llm", 4)
    assert other["why"] == "8 training calls; cluster.min_cluster is 30"
    assert "50.0 %" in (root / "out/dashboard.html").read_text()
    state = json.loads((root / "out/state.json").read_text())
    assert (state["round"], len(state["seen"]), len(state["history"])) == (1, 88, 1)


def test_a_round_of_the_flow_has_the_logs_numbers(root: Path, sizes: tuple[Path, Path, float]) -> None:
    check(root, sizes[2], convert_calls.fn("conversion.yaml", root))
    (root / "conversion.yaml").write_text("select: {}\nclusters: {}\n")
    with pytest.raises(StageFailedError, match=r"(?s)exit code 2.*clusters.*cluster") as failed:
        convert_calls.fn("conversion.yaml", root)
    assert failed.value.bad_parameters


@pytest.mark.slow
def test_the_flow_runs_and_then_finds_nothing_new(root: Path, sizes: tuple[Path, Path, float]) -> None:
    from prefect.testing.utilities import prefect_test_harness  # it imports Prefect's server

    with prefect_test_harness():
        check(root, sizes[2], module.convert(ConversionRound(), str(root)))
        before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        assert module.convert(ConversionRound(), str(root)).startswith("nothing new: replaceable share 50.0%")
        assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
