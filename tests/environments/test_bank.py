"""The bank domain: import from a wheel, requests, and what counts as found."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from stages.environments.bank import BankDomain, BankSettings
from stages.environments.bank import domain as bank_domain
from stages.environments.bank.environment import INSTRUCTIONS
from stages.environments.bank.source import DOCUMENTS as DOCUMENTS_FILE
from stages.environments.bank.source import INSIDE, document_lines, plain, read_documents, read_wheel
from stages.environments.pages.environment import NO_HIT, USAGE
from stages.environments.pages.world import Page
from stages.params import check_domains, parse_params
from stages.records.task import SUCCESS_TERM
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    {"id": "doc_b", "title": "Fees", "content": "The **green** card has no annual fee."},
    {"id": "doc_a", "title": "Fees", "content": "A wire transfer costs 20 dollars."},
    {"id": "doc_c", "title": "Closing an account", "content": "Only an empty account is closed. " + "More words. " * 40},
]
REQUESTS = [
    {"id": "task_002", "user_scenario": {"instructions": "Close   my account."}, "required_documents": ["doc_c", "doc_a"]},
    {"id": "task_001", "user_scenario": {"instructions": "Which card is *free*?"}, "required_documents": ["doc_b"]},
]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "inspect_evals-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{INSIDE}documents.json.gz", gzip.compress(json.dumps(DOCUMENTS).encode()))
        archive.writestr(f"{INSIDE}tasks.json", json.dumps(REQUESTS))
    return path


def imported(wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stages.environments.bank", str(wheel), "--to", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def raw(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the import."""
    monkeypatch.setattr(bank_domain, "REPOSITORY", tmp_path)
    done = imported(wheel, tmp_path / "data" / "raw" / "bank")
    assert (done.returncode, "3 documents, 2 requests of inspect_evals 1.2" in done.stdout) == (0, True), done.stderr
    return tmp_path / "data" / "raw"


def records(raw: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (raw / "bank.jsonl").read_text().splitlines()]


def opened(raw: Path, **settings: Any) -> tuple[BankDomain, Any, list[Any]]:
    """The domain, an environment, and the tasks."""
    domain = BankDomain(BankSettings(**settings))
    tasks = domain.build(records(raw), raw.parent / "worlds", 1)
    return domain, domain.make(raw.parent / "worlds"), tasks


def test_import_is_plain_sorted_and_names_its_source(raw: Path) -> None:
    """Contract: documents with one title are told apart; requests are test tasks; the wheel's hash is kept."""
    assert records(raw)[0] == {
        "task_id": "bank-task_001",
        "split": "test",
        "situation": "Which card is free ?",
        "required": ["doc_b"],
    }
    rows = [json.loads(line) for line in (raw / "bank" / "documents.jsonl").read_text().splitlines()]
    titles = {"doc_a": "Fees (1)", "doc_b": "Fees (2)", "doc_c": "Closing an account"}
    assert [(row["id"], row["title"]) for row in rows] == list(titles.items())
    source = json.loads((raw / "bank" / "source.json").read_text())
    assert (source["package"], source["version"], source["licence"], len(source["sha256"])) == ("inspect_evals", "1.2", "MIT", 64)
    assert plain("**a**\n\n# b  `c`") == "a b c"


def test_documents_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Contract: only a line feed ends a line of JSON, not the separators of Unicode inside a text."""
    pages = {"doc\u2028a": Page("Fees\u2029", "one\x85two"), "doc_b": Page("Cards", "three")}
    (tmp_path / DOCUMENTS_FILE).write_text(document_lines(pages), encoding="utf-8")
    assert read_documents(tmp_path) == pages


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.whl").write_text("no archive")
    done = imported(tmp_path / "other.whl", tmp_path / "bank")
    assert done.returncode == 2
    assert "is not a wheel with tau2's domain banking_knowledge" in done.stderr


@pytest.mark.parametrize(
    ("documents", "requests"), [(DOCUMENTS, [{"id": "task_001"}]), ([{"id": "doc_a"}], REQUESTS), (DOCUMENTS, ["task_001"])]
)
def test_requests_and_documents_of_another_layout_are_refused(tmp_path: Path, documents: list[Any], requests: list[Any]) -> None:
    """Contract: what a later version of the package may hold gives a message, not a traceback."""
    path = tmp_path / "renamed.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{INSIDE}documents.json.gz", gzip.compress(json.dumps(documents).encode()))
        archive.writestr(f"{INSIDE}tasks.json", json.dumps(requests))
    with pytest.raises(ValueError, match=r"renamed\.whl is not a wheel with tau2's domain banking_knowledge"):
        read_wheel(path)


def test_a_renamed_wheel_is_read(wheel: Path) -> None:
    _, records_of_it, source = read_wheel(wheel.rename(wheel.with_name("renamed.whl")))
    assert (len(records_of_it), source["package"], source["version"]) == (2, "renamed", "")


def test_without_the_import_the_message_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_domain, "REPOSITORY", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"python -m stages\.environments\.bank WHEEL"):
        list(BankDomain().recipes(1, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "train"}, "'split' must be test"),
        ({"required": ["doc_z"]}, "must name documents of data/raw/bank"),
        ({"required": []}, "must name documents"),
        ({"situation": 3}, "'situation' must be str"),
    ],
)
def test_wrong_records_are_refused(raw: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BankDomain().check({**records(raw)[0], **change})


def test_request_is_shortened_and_pages_are_found(raw: Path) -> None:
    _, environment, tasks = opened(raw, prompt_words=20, page_words=20)
    assert tasks[0].prompt == "Which card is free ?"
    assert environment.reset(tasks[1]).text == INSTRUCTIONS
    assert environment.step("search nothing here").observation.text == NO_HIT
    assert environment.step("search close account").observation.text == "1 Closing an account"
    assert environment.step("open 2").observation.text == USAGE
    assert environment.step("open 1").observation.text.endswith(" ...")


@pytest.mark.parametrize(("needed", "success"), [("any", 1.0), ("all", 0.0)])
def test_success_is_by_documents_opened(raw: Path, needed: str, success: float) -> None:
    """Contract: the reward is the share of required documents opened, of an episode that ends with an answer."""
    _, environment, tasks = opened(raw, needed=needed, max_turns=4)
    environment.reset(tasks[1])
    for action in ("search closing", "open 1"):
        environment.step(action)
    step = environment.step("answer it must be empty")
    assert (step.reward, step.terms) == (0.5, {"evidence": 0.5, SUCCESS_TERM: success})
    environment.reset(tasks[1])
    for action in ("search closing", "open 1", "search fees", "search fees"):
        step = environment.step(action)
    assert (step.truncated, step.reward, step.terms[SUCCESS_TERM]) == (True, 0.0, 0.0)


def test_expert_opens_what_its_turns_allow(raw: Path) -> None:
    domain, environment, tasks = opened(raw, max_turns=4)
    for task, expected in zip(tasks, (1.0, 0.5), strict=True):
        environment.reset(task)
        reward = 0.0
        while (action := domain.expert(environment)) is not None:
            assert action in environment.admissible()
            step = environment.step(action)
            assert step.accepted
            reward += step.reward
        assert reward == expected


def test_nothing_can_be_trained_on_it() -> None:
    values = {"domains": ["bank"], "per_domain": {"bank": {}}}
    with pytest.raises(ParamsError, match=r"domains lists bank, which has test tasks alone; list it in evaluate\.transfer"):
        check_domains(parse_params(values))
