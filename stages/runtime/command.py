"""Ends commands (`python -m stages.*`, `python -m flows.*`) cleanly when their output is closed, as by `| head`.

The command ends at the next line that it prints, without a message, with the exit code of a program ended by SIGPIPE.
"""

from __future__ import annotations

import argparse
import functools
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, ParamSpec

P = ParamSpec("P")

OUTPUT_CLOSED = 128 + signal.SIGPIPE
"""Exit code of a command whose output was closed."""


USAGE, RUN_FAILED = 64, 70
"""Exit codes of commands that answer yes, no or undecided with 0, 1 or 2, as in sysexits.h."""


class AnswerParser(argparse.ArgumentParser):
    """For such commands: wrong usage exits with USAGE instead of argparse's 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def whole_number(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """The argparse type of whole numbers from `lowest` to `highest`: a usage error instead of what they would lead to."""
    wanted = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"

    def number(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = lowest - 1
        if found < lowest or (highest is not None and found > highest):
            raise argparse.ArgumentTypeError(f"must be a whole number {wanted}, not {text}")
        return found

    return number


port_number = whole_number(1, 65535)
port_or_any = whole_number(0, 65535)
"""0: any that is free."""


class OutputClosed(SystemExit):
    """Standard output or standard error was closed. A SystemExit, so that handlers of OSError let it pass."""


class _Output(io.TextIOWrapper):
    """An output stream that raises OutputClosed once in place of BrokenPipeError, and discards later output."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        stream.flush()
        options = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        super().__init__(stream.buffer, **options)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            raise self._closed() from None

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            raise self._closed() from None

    def _closed(self) -> OutputClosed:
        logging.disable(logging.CRITICAL)  # messages of Prefect and others about an interrupted run
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return OutputClosed(OUTPUT_CLOSED)

    def release(self) -> None:
        """Detach from the underlying stream without closing it."""
        with suppress(OutputClosed):
            self.flush()
        self.detach()


@contextmanager
def _watched() -> Iterator[None]:
    """Make standard output and error raise OutputClosed."""
    before = sys.stdout, sys.stderr
    # None: closed before this process started. Other types: in a notebook, a test, a cluster's worker.
    now = [_Output(stream) if isinstance(stream, io.TextIOWrapper) else stream for stream in before]
    sys.stdout, sys.stderr = now
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in now:
            if isinstance(stream, _Output):
                stream.release()


def command(main: Callable[P, int]) -> Callable[P, int]:
    """Decorator of a command's main function: its exit code is OUTPUT_CLOSED if its output was closed."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        with _watched():
            try:
                try:
                    code = main(*args, **kwargs)
                except SystemExit:  # argparse has printed its help
                    _flush()
                    raise
                _flush()
                return code
            except OutputClosed:
                return OUTPUT_CLOSED

    return run


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
