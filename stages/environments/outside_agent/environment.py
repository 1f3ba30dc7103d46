"""Runs an outside agent's process for each episode, and turns its requests into observations."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from stages.environments.outside_agent.endpoint import Channel, ChatCall, Outcome, RequestError, outcome
from stages.environments.protocol import Most, Observation, Step
from stages.records.messages import Messages
from stages.records.task import Task

POLL_S = 0.005
"""Between looks whether a process that does not ask has ended."""
SHOWN = 600
"""Characters of an agent's output in messages."""


@dataclass(frozen=True)
class OutsideAgentSnapshot:
    """A program can't be copied: `restore` starts it again and repeats these actions."""

    task: Task
    actions: tuple[str, ...]


class OutsideAgentEnvironment:
    """One running program. An episode ends when the program does, with the reward that it reported.

    A request that continues none of the program's conversations (a sub-agent's, or one whose history was rewritten) begins a new
    one; where the caller can't follow that (`conversations`), it ends the episode.
    """

    name = "outside_agent"

    def __init__(self, command: str, max_turns: int, timeout_s: float) -> None:
        self._command, self._max_turns, self._timeout_s = shlex.split(command), max_turns, timeout_s
        self._task: Task | None = None
        self._actions: tuple[str, ...] = ()
        self._messages: Messages = []
        self._held: list[Messages] = []
        """The conversations so far, with the policy's answers."""
        self._current = 0
        """The number of the newest request's conversation."""
        self._most: Most = "plain"
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._channel = Channel()
        self._call: ChatCall | None = None
        """The request that waits for the next action; None once the episode is over."""

    def conversations(self, most: Most) -> None:
        """See `stages.environments.protocol.allow_conversations`."""
        self._most = most

    def reset(self, task: Task) -> Observation:
        """Start the program and wait for its first request. Raises RuntimeError if it ends without one, is silent for timeout_s,
        or begins with answers that the policy did not give where conversations must be plain."""
        self._end()
        self._task, self._actions = task, ()
        self._channel = Channel()
        self._channel.open()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
        shown = {
            "OPENAI_BASE_URL": self._channel.url,
            "OPENAI_API_KEY": "none",
            "BELLWETHER_TASK": json.dumps(task.spec["input"]),
        }
        try:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **shown},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._end()
            raise RuntimeError(
                f"per_domain.outside_agent.environment.command: {shlex.join(self._command)} can't be started: {error}"
            ) from error
        self._call = self._next_call()
        if self._call is None:
            ended, text = self._process.poll(), self._printed()[-SHOWN:]
            self._end()
            why = f"was silent for {self._timeout_s:g} s" if ended is None else f"ended with exit code {ended}"
            raise RuntimeError(
                f"task {task.task_id}: the agent {shlex.join(self._command)} {why} before its first request for a chat "
                f"completion at OPENAI_BASE_URL; it printed: {text or 'nothing'}"
            )
        self._messages, self._held, self._current = self._call.messages, [self._call.messages], 0
        if len(self._messages) > 1 and self._most == "plain":
            self._end()
            raise RuntimeError(
                f"task {task.task_id}: the agent's first request has {len(self._messages)} messages; it must have one user "
                f"message, with system messages before it, where a team plays, tasks are exported, or evaluate.scaffold adds text"
            )
        return self._observed()

    def _observed(self) -> Observation:
        """The newest request as a conversation begins with it."""
        return Observation(self._messages[-1]["content"], tuple(self._messages[:-1]))

    def step(self, action: str) -> Step:
        """Answer the program's request, and wait for its next one or its end."""
        if self._call is None:
            raise RuntimeError("the episode is over, or was never started; call reset(task) or restore(state)")
        self._actions = (*self._actions, action)
        self._held[self._current] = [*self._messages, {"role": "assistant", "content": action}]
        self._call.answer.put(action)
        self._call = self._next_call()
        if self._call is None:
            return self._last(*self._ending())
        before, number = self._call.messages[:-1], self._current
        if self._held[number] != before:
            if self._most != "several":
                return self._last(Outcome(0.0, {"other_conversation": 1.0}), truncated=True)
            known = [place for place, messages in enumerate(self._held) if messages == before]
            number = known[-1] if known else len(self._held)
        if len(self._actions) >= self._max_turns:
            return self._last(self._channel.outcome or Outcome(0.0, {}), truncated=True)
        self._messages, other = self._call.messages, number != self._current
        begins, self._current = number == len(self._held), number
        if begins:
            self._held.append(self._messages)
        seen = self._observed() if begins else Observation(self._messages[-1]["content"])
        return Step(seen, 0.0, True, terminated=False, truncated=False, conversation=number if other else None)

    def _last(self, found: Outcome, truncated: bool = False) -> Step:
        self._end()
        return Step(Observation(""), found.reward, True, not truncated, truncated, terms=found.terms)

    def _next_call(self) -> ChatCall | None:
        """The program's next request; None if it ended, or was silent for timeout_s."""
        assert self._process is not None
        limit = time.monotonic() + self._timeout_s
        while time.monotonic() < limit:
            with contextlib.suppress(queue.Empty):
                return self._channel.calls.get(timeout=POLL_S)
            if self._process.poll() is not None:
                return None if self._channel.calls.empty() else self._channel.calls.get()
        return None

    def _ending(self) -> tuple[Outcome, bool]:
        """What the program reported, and whether it had to be ended. Its last line of output counts where it posted no reward."""
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return Outcome(0.0, {"agent_silent": 1.0}), True
        if code:
            return Outcome(0.0, {"agent_failed": 1.0}), False
        if self._channel.outcome is not None:
            return self._channel.outcome, False
        lines = self._printed().strip().splitlines()
        try:
            return outcome(json.loads(lines[-1])), False
        except (IndexError, json.JSONDecodeError, RequestError) as error:
            raise RuntimeError(
                f"task {self._task.task_id if self._task else ''}: the agent {shlex.join(self._command)} ended without a reward: "
                f'post {{"reward": 1.0}} to OPENAI_BASE_URL/reward, or print it as the last line; it printed: '
                f"{self._printed()[-SHOWN:] or 'nothing'}"
            ) from error

    def _printed(self) -> str:
        """The program's output."""
        if self._output is None:
            return ""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def _end(self) -> None:
        """End the program and all that it started."""
        self._channel.close()
        if self._call is not None:
            self._call.answer.put(None)
            self._call = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None

    def snapshot(self) -> OutsideAgentSnapshot:
        if self._task is None:
            raise RuntimeError("no task was started; call reset(task)")
        return OutsideAgentSnapshot(self._task, self._actions)

    def restore(self, state: OutsideAgentSnapshot) -> None:
        """Start the program again and repeat its answers; one that behaves differently then is found by its state key."""
        self.reset(state.task)
        for action in state.actions:
            self.step(action)

    def state_key(self) -> str:
        """A hash of the conversation."""
        return hashlib.sha256(json.dumps([self._messages, self._actions[-1:]]).encode()).hexdigest()[:16]

    def admissible(self) -> Sequence[str]:
        return ()

    @property
    def next_actions(self) -> Sequence[str]:
        """The rest of the task's own demonstration, if its actions so far were followed; empty without one."""
        known: Any = self._task.spec.get("actions", ()) if self._task else ()
        done = len(self._actions)
        return known[done:] if list(self._actions) == list(known[:done]) else ()

    def close(self) -> None:
        self._end()
