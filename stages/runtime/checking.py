"""How `python -m stages.<part> check NAME` plays a contract through: each promise on a line, a broken one with file and line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stages.runtime.command import command
from stages.runtime.installed import described, place
from stages.runtime.validation import ParamsError


class MistakeError(Exception):
    """A promise that is not kept; the message says how, and what to do."""


def expect(holds: bool, message: str) -> None:
    """Raise MistakeError with `message` unless it `holds`."""
    if not holds:
        raise MistakeError(message)


@dataclass
class Findings:
    """What was checked so far: promises kept, and mistakes as `file:line: what is wrong`."""

    kept: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def check(self, promise: str, at: Any, test: Callable[[], Any]) -> Any:
        """What `test` returns; None, and a mistake in the code `at`, where it raises."""
        try:
            result = test()
        except MistakeError as error:
            self.mistakes.append(f"{place(at)}: {promise}: {error}")
        except Exception as error:
            self.mistakes.append(f"{place(at)}: {promise}: it raised {described(error)}")
        else:
            self.kept.append(promise)
            return result
        return None


def run_checks(kind: str, checks: Callable[[str, Findings], None]) -> Callable[[], int]:
    """The command of a part: `check NAME` prints what `checks` found. Exit code 1 if anything is wrong, 2 for an unknown name."""

    @command
    def main() -> int:
        parser = argparse.ArgumentParser(description=f"Play the contract of a {kind} through and say what is wrong.")
        parser.add_argument("command", choices=["check"])
        parser.add_argument("name", help=f"the {kind}'s name, as params.yaml gives it")
        name, findings = parser.parse_args().name, Findings()
        try:
            checks(name, findings)
        except ParamsError as error:
            print(error)
            return 2
        for promise in findings.kept:
            print(f"ok     {promise}")
        for mistake in findings.mistakes:
            print(f"wrong  {mistake}")
        print(f"{kind} {name}: {len(findings.kept)} checks passed, {len(findings.mistakes)} failed")
        return 1 if findings.mistakes else 0

    return main
