"""Splits drawn with their own seed (curate.seeds): disjoint from all other tasks, which do not change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from stages.claims.tuning import SEEDS, VALID
from stages.curation.__main__ import configured_domain
from stages.curation.cleaning import task_faults
from stages.curation.raw import content
from stages.curation.settings import Curate
from stages.curation.source import SPARE, draw, read_source
from stages.environments.protocol import Domain
from stages.environments.search import SearchDomain
from stages.params import load_params
from stages.records.sections import params_hash
from stages.records.task import Split, Task

ROOT = Path(__file__).resolve().parents[2]
PARAMS = load_params(ROOT / "params.yaml")
SHIPPED = ("calculator", "code", "factbook", "keydoor", "search", "shop", "wordle")
TRAINING_SEEDS = (0, 3)
REQUESTED: dict[Split, int] = {"train": 8, "valid": 4, "test": 10}


def entities(domain: Domain, tasks: Iterable[Task]) -> set[str]:
    return set().union(*map(domain.entities, tasks))


@pytest.mark.parametrize("name", SHIPPED)
def test_drawn_panel_is_disjoint_from_training_tasks(name: str, tmp_path: Path) -> None:
    """Contract: no name or world of a panel drawn with one seed is in training or validation tasks of another, and none of its
    tasks is in the raw file."""
    domain = configured_domain(name, PARAMS)
    lines = (ROOT / f"data/raw/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    known = {content(json.loads(line)) for line in lines}
    drawn, rejections, _ = draw(domain, "test", 24, 7, known)
    assert len(drawn) == 24
    assert not rejections
    assert not known & {record.content for record in drawn}
    panel = domain.build([dict(record.record) for record in drawn], tmp_path / "panel", 1)
    for seed in TRAINING_SEEDS:
        records = [record for record in domain.recipes(120, seed) if record["split"] != "test"]
        others = domain.build(records, tmp_path / str(seed), 1)
        faults = task_faults([*panel, *others], domain, 640)
        assert not faults.keys() & {task.task_id for task in panel}
        assert not faults or name == "code", "different families of code may compute the same function"
        kept = [task for task in others if task.task_id not in faults]
        assert len(kept) > 50
        assert not entities(domain, panel) & entities(domain, kept)


@pytest.mark.parametrize("name", ["keydoor", "search", "shop"])
def test_validation_tasks_to_tune_on_are_enough_where_the_raw_file_has_fewer(name: str) -> None:
    shipped = (ROOT / f"data/raw/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum(json.loads(line)["split"] == "valid" for line in shipped) < VALID
    drawn, rejections, _ = draw(configured_domain(name, PARAMS), "valid", VALID + VALID // SPARE, SEEDS["valid"], ())
    assert len(drawn) == VALID + VALID // SPARE
    assert not rejections


def test_textworld_generates_only_the_drawn_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: they differ from the shipped games, equal those drawn for all splits together, and no other split's games are
    generated, which takes long. (Names of textworld's splits differ by construction.)"""
    domain = configured_domain("textworld", PARAMS)
    shipped = [json.loads(line) for line in (ROOT / "data/raw/textworld.jsonl").read_text(encoding="utf-8").splitlines()]
    assert list(domain.recipes(len(shipped), 0, {"valid"})) == [record for record in shipped if record["split"] == "valid"]
    generate, generated = domain._game_records, []
    monkeypatch.setattr(
        domain, "_game_records", lambda values, *rest: generated.append(values["split"]) or generate(values, *rest)
    )
    drawn, _, _ = draw(domain, "valid", 3, 7, ())
    assert not {record.record["seed"] for record in drawn} & {record["seed"] for record in shipped}
    assert [record.split for record in drawn] == ["valid"] * 3
    assert generated == ["valid"]


def raw_file(folder: Path, lines: list[str]) -> Path:
    path = folder / "search.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_other_splits_do_not_change(domain: SearchDomain, lines: list[str], tmp_path: Path) -> None:
    path = raw_file(tmp_path, lines)
    before, after = read_source(domain, path, REQUESTED, 0, {}), read_source(domain, path, REQUESTED, 0, {"test": 7})
    other = read_source(domain, path, REQUESTED, 5, {"test": 7})

    def of(source: Any, split: str) -> list[str]:
        return [record.task_id for record in source.records if record.split == split]

    for split in ("train", "valid"):
        assert of(before, split) == of(after, split)
    assert of(after, "test") == of(other, "test"), "the panel does not depend on the seed of the lifecycle"
    assert len(of(after, "test")) == 13, "with three spare ones"
    assert not set(of(before, "test")) & set(of(after, "test"))
    assert "drawn" not in before.summary(0, [])
    assert after.summary(0, [])["drawn"] == {"test": {"seed": 7, "records": 13, "repeated": 0}}
    assert after.labels == {**before.labels, "test": "recipes of domain search with seed 7"}


def test_tasks_of_the_raw_file_are_skipped(domain: SearchDomain, lines: list[str], tmp_path: Path) -> None:
    """Contract: the file's own seed draws its tasks again; they are skipped and counted."""
    source = read_source(domain, raw_file(tmp_path, lines), REQUESTED, 0, {"valid": 0})
    shipped = [record for record in map(json.loads, lines) if record["split"] == "valid"]
    assert source.drawn["valid"] == {"seed": 0, "records": 6, "repeated": len(shipped)}
    assert not {record.task_id for record in source.records} & {record["task_id"] for record in shipped}


def test_recipes_that_ignore_the_seed_are_rejected(lines: list[str], tmp_path: Path) -> None:
    """Contract: a setting without effect is an error, with and without a raw file."""

    class Fixed(SearchDomain):
        def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
            return islice(super().recipes(120, 0), count)

    message = r"curate\.seeds\.test: 7: the recipes of domain search make no test task that .* lacks"
    for path in (raw_file(tmp_path, lines), tmp_path / "none.jsonl"):
        with pytest.raises(ValueError, match=message):
            read_source(Fixed(), path, REQUESTED, 0, {"test": 7})


def test_unset_seeds_do_not_change_the_hash() -> None:
    """Contract: demonstrations carry the section's hash, so their bytes are those from before the key existed."""
    assert params_hash(Curate()) == "71b407f40566aca8"
    assert params_hash(Curate(seeds={"test": 1})) != params_hash(Curate(seeds={"test": 2})) != params_hash(Curate())
