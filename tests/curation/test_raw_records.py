"""Reading and making raw records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slow import slow_except

from stages.curation.__main__ import configured_domain
from stages.curation.raw import RawRecord, check_lines, make_raw, read_raw, unlike_settings
from stages.curation.selection import order_by_mix
from stages.environments.search import SearchDomain, SearchSettings
from stages.environments.textworld.domain import TextWorldDomain
from stages.environments.textworld.settings import Level, TextWorldSettings
from stages.params import load_params, parse_params

ROOT = Path(__file__).resolve().parents[2]


def test_malformed_lines_are_rejected_with_file_and_line(domain: SearchDomain, lines: list[str], tmp_path: Path) -> None:
    """No line is dropped silently, and valid ones are kept."""
    broken = [lines[0], '{"task_id": "x"', "[1]", lines[1].replace('"hops": ', '"hops": 1'), "", '{"task_id": "y"}', lines[2]]
    path = tmp_path / "raw.jsonl"
    path.write_bytes("\n".join(broken).encode() + b"\n\xff\xfe\n")
    records, rejections = read_raw(path, "data/raw/search.jsonl", domain)
    assert [record.line for record in records] == [1, 7]
    assert [rejection.line for rejection in rejections] == [2, 3, 4, 5, 6, 8]
    assert {rejection.reason for rejection in rejections} == {"malformed"}
    assert str(rejections[0]).startswith("data/raw/search.jsonl:2: malformed: not JSON")
    assert "must be a JSON object" in str(rejections[1])
    assert "'hops'" in str(rejections[2])
    assert "'split'" in str(rejections[4])
    assert "not UTF-8" in str(rejections[5])


@pytest.mark.parametrize("name", slow_except(("calculator", "code", "factbook", "keydoor", "search", "shop", "wordle"), "search"))
def test_command_line_writes_the_shipped_file(name: str) -> None:
    """data/raw/<domain>.jsonl is exactly what the documented command writes."""
    shipped = (ROOT / f"data/raw/{name}.jsonl").read_bytes()
    command = [sys.executable, "-m", "stages.curation", "raw", name, "--count", str(shipped.count(b"\n")), "--seed", "0"]
    made = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    assert made.stdout == shipped


def test_recipes_use_the_settings_of_params() -> None:
    """Contract: settings that shape recipes come from params.yaml; an unlisted domain has its defaults."""
    params = parse_params({"domains": ["search"], "per_domain": {"search": {"environment": {"hops": {1: 1.0}}}}})
    assert {record["hops"] for record in configured_domain("search", params).recipes(24, 0)} == {1}
    assert configured_domain("textworld", params).settings == TextWorldSettings()


def test_records_of_other_settings_are_reported(domain: SearchDomain, records: list[RawRecord]) -> None:
    """Contract: a raw file whose levels differ from the settings is reported with the difference and the remedy."""
    file = "data/raw/search.jsonl"
    assert unlike_settings(records, domain, file) == []
    (line,) = unlike_settings(records, SearchDomain(SearchSettings(hops={1: 1.0, 2: 1.0, 3: 0.0})), file)
    assert "records have hops 3, which the settings lack" in line
    assert line.endswith("regenerate it with 'python -m stages.curation raw search --count 120 --seed 0 > data/raw/search.jsonl'")
    easy = [record for record in records if record.record["hops"] == 1]
    (line,) = unlike_settings(easy, domain, file)
    assert "no record has hops 2, hops 3; regenerate it" in line


def test_shipped_files_fit_the_settings() -> None:
    """Contract: curating the shipped files with the shipped settings gives no warning; other levels of textworld would."""
    params = load_params(ROOT / "params.yaml")
    for name in ("calculator", "code", "factbook", "keydoor", "search", "shop", "wordle", "textworld"):
        domain = configured_domain(name, params)
        records, _ = read_raw(ROOT / f"data/raw/{name}.jsonl", "raw", domain)
        assert unlike_settings(records, domain, "raw") == []
    other = TextWorldDomain(TextWorldSettings(levels=(Level(rooms=3, objects=3, quest_length=3),), goals=("take", "eat")))
    (line,) = unlike_settings(records, other, "raw")
    assert "no record has goal eat;" in line
    assert "level 5 rooms 5 objects 5 commands" in line


def test_unknown_domain_error_suggests_a_known_one() -> None:
    command = [sys.executable, "-m", "stages.curation", "raw", "serch", "--count", "1"]
    made = subprocess.run(command, capture_output=True, cwd=ROOT, text=True)
    assert made.returncode == 2
    assert "did you mean 'search'?" in made.stderr


def test_recipes_replace_a_missing_raw_file(domain: SearchDomain) -> None:
    requested = {"train": 8, "valid": 8, "test": 8}
    records, rejections = make_raw(domain, requested, 0)
    assert not rejections
    assert all(sum(record.split == split for record in records) >= count for split, count in requested.items())


def test_difficulty_mix_of_a_prefix_follows_the_settings(lines: list[str]) -> None:
    records, _ = check_lines([line.encode() for line in lines], "raw.jsonl", SearchDomain())
    for hops, expected in (({1: 1.0, 2: 2.0, 3: 1.0}, [10, 20, 10]), ({1: 1.0, 3: 3.0}, [10, 0, 30])):
        ordered = order_by_mix(records, SearchDomain(SearchSettings(hops=hops)))
        first = [record.record["hops"] for record in ordered[:40]]
        assert [first.count(level) for level in (1, 2, 3)] == expected


def test_domain_without_difficulties_keeps_the_file_order(lines: list[str]) -> None:
    records, _ = check_lines([line.encode() for line in lines], "raw.jsonl", SearchDomain())

    class Plain:
        name = "plain"

    assert order_by_mix(records, Plain()) == records  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["null", "1", '"text"'])
def test_json_other_than_an_object_is_malformed(domain: SearchDomain, line: str) -> None:
    records, rejections = check_lines([line.encode()], "raw.jsonl", domain)
    assert not records
    assert "JSON object" in rejections[0].detail
