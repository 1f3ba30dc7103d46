"""The command `python -m stages.<part> check NAME`: one line per property of a contract, failures with file and line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.runtime.command import command
from stages.runtime.entry_points import described, place
from stages.runtime.validation import ParamsError


class MistakeError(Exception):
    """A violated property; the message says what is wrong and what to do."""


def expect(holds: bool, message: str) -> None:
    """Raise MistakeError with `message` unless it `holds`."""
    if not holds:
        raise MistakeError(message)


@dataclass
class Findings:
    """Results so far: properties that hold, and failures as `file:line: what is wrong`."""

    passed: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def check(self, title: str, at: Any, test: Callable[[], Any]) -> Any:
        """The result of `test`, or None and a failure in the code `at` if it raises."""
        try:
            result = test()
        except (MistakeError, ParamsError) as error:
            self.mistakes.append(f"{place(at)}: {title}: {error}")
        except Exception as error:
            self.mistakes.append(f"{place(at)}: {title}: it raised {described(error, Path(place(at)).parent)}")
        else:
            self.passed.append(title)
            return result
        return None


def run_checks(kind: str, checks: Callable[[str, Findings], None]) -> Callable[[], int]:
    """A part's command, which prints what `checks` found. Exit code 1 after a failure, 2 for an unknown name or invalid class."""

    @command
    def main() -> int:
        part = checks.__module__.rpartition(".")[0]
        parser = argparse.ArgumentParser(
            prog=f"python -m {part}", description=f"Test whether the {kind} NAME keeps its contract."
        )
        parser.add_argument("command", choices=["check"])
        parser.add_argument("name", metavar="NAME", help=f"the {kind}'s name in params.yaml")
        name, findings = parser.parse_args().name, Findings()
        try:
            checks(name, findings)
        except ParamsError as error:
            print(str(error).removeprefix("params.yaml: "))  # the name is the command line's
            return 2
        for title in findings.passed:
            print(f"ok     {title}")
        for mistake in findings.mistakes:
            print(f"wrong  {mistake}")
        print(f"{kind} {name}: {len(findings.passed)} checks passed, {len(findings.mistakes)} failed")
        return 1 if findings.mistakes else 0

    return main
