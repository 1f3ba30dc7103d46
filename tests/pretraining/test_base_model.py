"""The shipped base model: its size, and what its pre-training text may contain."""

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


def test_base_model_is_small_enough_for_git() -> None:
    """Contract: 1 to 4 M parameters in a stock architecture, at most 12 MB for the entire folder."""
    facts = json.loads((BASE / "corpus.json").read_text())
    assert 1_000_000 <= facts["parameters"] <= 4_000_000
    assert sum(path.stat().st_size for path in BASE.iterdir() if path.is_file()) <= 12_000_000
    assert json.loads((BASE / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_corpus_contains_no_entity_of_the_evaluation_panels(words: set[str]) -> None:
    """Contract: no name that a test task can contain occurs in the base model's pre-training text."""
    assert not words & set(names_of("test"))
    nouns = ("room", "box", "stand", "thing", "snack", "key")
    assert not words & {f"{noun}{number}" for noun in nouns for number in NAME_NUMBERS["test"]}


@pytest.mark.parametrize("name", ["keydoor", "shop", "wordle"])
def test_corpus_contains_no_entity_of_later_domains(words: set[str], name: str, tmp_path: Path) -> None:
    """Contract: the same holds for every test task in the raw files of domains added after the base model."""
    domain = configured_domain(name, load_params(ROOT / "params.yaml"))
    records = [json.loads(line) for line in (ROOT / f"data/raw/{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    tasks = domain.build([record for record in records if record["split"] == "test"], tmp_path, 1)
    assert len(tasks) >= 200
    entities = set().union(*(domain.entities(task) for task in tasks))
    assert not words & entities


def test_corpus_contains_entities_of_training_worlds(words: set[str]) -> None:
    """Contract: the word list is the corpus's; with an empty one the leakage tests above could not fail."""
    assert len(words & set(names_of("train"))) > 500
    assert {f"room{number}" for number in NAME_NUMBERS["train"]} <= words


def test_shipped_word_list_covers_the_generator(words: set[str]) -> None:
    """Contract: the shipped list contains every word that the generator produces today."""
    settings = load_settings(BASE / "params.yaml")
    for chat in lookups(200, settings.seed, settings.phases[0].families):
        for _, text in chat.messages:
            for word in text.replace(",", " ").replace(".", " ").replace(";", " ").replace("?", " ").replace(":", " ").split():
                assert word in words


def test_samples_are_not_environment_tasks() -> None:
    """Contract: questions are about the given text; no sample searches, moves or asks a multi-page question."""
    for chat in lookups(300, 7, WEIGHTS, 0.2, 0.5, 0.3):
        for role, text in chat.messages:
            if role == "assistant":
                assert text.split()[0] not in {"search", "answer", "go", "take", "open", "put", "insert", "unlock"}
            assert " of the " not in text or "exits of the" in text


def test_answers_occur_in_the_preceding_text() -> None:
    """Contract: every look-up can be answered from its own chat."""
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


def test_samples_depend_only_on_their_index() -> None:
    """Contract: sample n is the same whatever the number of samples."""
    assert lookups(5, 3, WEIGHTS) == lookups(50, 3, WEIGHTS)[:5]
