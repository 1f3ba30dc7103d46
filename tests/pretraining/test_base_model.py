"""The shipped base model: what it is, what it can do, and what it must not have read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.curation.__main__ import configured_domain
from stages.environments.search.world import names_of
from stages.environments.textworld.settings import NAME_NUMBERS
from stages.params import load_params
from stages.pretraining.corpus import FAMILIES, lookups
from stages.pretraining.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "data" / "base"
WEIGHTS = dict.fromkeys(FAMILIES, 1.0)


@pytest.fixture(scope="module")
def words() -> set[str]:
    return set(json.loads((BASE / "corpus.json").read_text())["words"])


def test_the_base_model_is_small_enough_for_git() -> None:
    """Contract: 1-4 M parameters in a stock architecture, at most 12 MB with all that belongs to it."""
    facts = json.loads((BASE / "corpus.json").read_text())
    assert 1_000_000 <= facts["parameters"] <= 4_000_000
    assert sum(path.stat().st_size for path in BASE.iterdir() if path.is_file()) <= 12_000_000
    assert json.loads((BASE / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_no_entity_of_the_evaluation_panels_was_read(words: set[str]) -> None:
    """Contract: no name that a test task can hold occurs in the text that the base model was trained on."""
    assert not words & set(names_of("test"))
    nouns = ("room", "box", "stand", "thing", "snack", "key")
    assert not words & {f"{noun}{number}" for noun in nouns for number in NAME_NUMBERS["test"]}


@pytest.mark.parametrize("name", ["keydoor", "shop", "wordle"])
def test_no_entity_of_a_later_domains_panel_was_read(words: set[str], name: str, tmp_path: Path) -> None:
    """Contract: the same of every test task that the raw file of a domain made after the base model holds."""
    domain = configured_domain(name, load_params(ROOT / "params.yaml"))
    records = [json.loads(line) for line in (ROOT / f"data/raw/{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    tasks = domain.build([record for record in records if record["split"] == "test"], tmp_path, 1)
    assert len(tasks) >= 200
    entities = set().union(*(domain.entities(task) for task in tasks))
    assert not words & entities


def test_training_worlds_were_read_so_the_leak_test_can_fail(words: set[str]) -> None:
    """Contract: the word list really is the corpus's: it holds names and rooms of training worlds."""
    assert len(words & set(names_of("train"))) > 500
    assert {f"room{number}" for number in NAME_NUMBERS["train"]} <= words


def test_shipped_words_are_those_the_generator_makes(words: set[str]) -> None:
    """Contract: the shipped list was not made by hand: what the generator writes today is in it."""
    settings = load_settings(BASE / "params.yaml")
    for chat in lookups(200, settings.seed, settings.phases[0].families):
        for _, text in chat.messages:
            for word in text.replace(",", " ").replace(".", " ").replace(";", " ").replace("?", " ").replace(":", " ").split():
                assert word in words


def test_no_sample_is_a_task_of_an_environment() -> None:
    """Contract: look-ups are asked of text that is there; nothing searches, moves or answers a question over several pages."""
    for chat in lookups(300, 7, WEIGHTS, 0.2, 0.5, 0.3):
        for role, text in chat.messages:
            if role == "assistant":
                assert text.split()[0] not in {"search", "answer", "go", "take", "open", "put", "insert", "unlock"}
            assert " of the " not in text or "exits of the" in text


def test_answers_stand_in_the_text_before_them() -> None:
    """Contract: every look-up can be answered from its own chat alone."""
    for chat in lookups(300, 11, WEIGHTS, 0.0, 0.5, 0.5):
        before = ""
        counted = iter(chat.answers or ())
        for role, text in chat.messages:
            if role == "assistant":
                words = text.split(" ")
                answer = [word for word in words if chat.answers is None or next(counted)]
                parts = " ".join(answer).split(", ") if chat.answers is None else [word.rstrip(",") for word in answer]
                assert all(part in before for part in parts)
            before += " " + text
        assert next(counted, None) is None


def test_samples_depend_on_their_own_index_alone() -> None:
    """Contract: sample n is the same however many are made."""
    assert lookups(5, 3, WEIGHTS) == lookups(50, 3, WEIGHTS)[:5]
