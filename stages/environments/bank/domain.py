"""The bank domain: tasks and their one world, the bank's documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.environments.bank.environment import BankEnvironment
from stages.environments.bank.settings import BankSettings
from stages.environments.bank.source import read_documents
from stages.environments.base_domain import RecipeDomain, check_fields
from stages.environments.pages.index import PageIndex
from stages.environments.pages.world import Page, World
from stages.records.task import Task

REPOSITORY = Path(__file__).resolve().parents[3]
WORLD = "documents"
_FIELDS: dict[str, type] = {"task_id": str, "split": str, "situation": str, "required": list}


class BankDomain(RecipeDomain[BankSettings]):
    name = "bank"
    Settings = BankSettings
    only_tests = True

    @cached_property
    def _documents(self) -> dict[str, Page]:
        return read_documents(REPOSITORY / self.settings.folder)

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """None: the requests are imported. Raises FileNotFoundError, which says how."""
        read_documents(REPOSITORY / self.settings.folder)
        yield from ()

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, _FIELDS)
        if record["split"] != "test":
            raise ValueError(f"'split' must be test, since nothing is trained on this domain, not {record['split']!r}")
        unknown = [name for name in record["required"] if name not in self._documents]
        if unknown or not record["required"]:
            raise ValueError(f"'required' must name documents of {self.settings.folder}; got {unknown[:1] or record['required']}")

    def task(self, record: Mapping[str, Any], worlds: dict[str, World]) -> Task:
        worlds.setdefault(WORLD, World(tuple(self._documents.values())))
        words, shown = record["situation"].split(), self.settings.prompt_words
        return Task(
            task_id=record["task_id"],
            domain=self.name,
            split=record["split"],
            seed=0,
            prompt=" ".join(words[:shown]) + (" ..." if len(words) > shown else ""),
            spec={"world": WORLD, "required": [self._documents[name].title for name in record["required"]]},
            difficulty=float(len(record["required"])),
            cluster=record["task_id"],
        )

    def world_files(self, task: Task) -> list[str]:
        return [f"{task.spec['world']}.json"]

    def make(self, folder: Path) -> BankEnvironment:
        return BankEnvironment(lambda world: self._index(folder / f"{world}.json"), self.settings)

    def _index(self, path: Path) -> PageIndex:
        return self.load_world(path, "world", lambda text: PageIndex(World.from_json(text)))

    def entities(self, task: Task) -> set[str]:
        """The request itself: all tasks are played over the same documents."""
        return {task.task_id}
