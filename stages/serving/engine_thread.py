"""A thread that owns the engine and runs the generation jobs of other threads, all of them at once."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from stages.agent.best_of_n import BestOfEngine
from stages.engine.engine import Sampling, Turn
from stages.serving.variants import Variant


@dataclass
class GenerationJob:
    """Generate one turn after `token_ids` for each of `keys`."""

    token_ids: Sequence[int]
    keys: Sequence[int]
    sampling: Sampling
    variant: Variant
    turns: Future[list[Turn]] = field(default_factory=Future)
    """In the order of `keys`."""
    sessions: list[int] = field(default_factory=list)
    done: dict[int, Turn] = field(default_factory=dict)
    cancelled: bool = False


class EngineThread:
    """Accepts jobs from any thread. With the torch engine, a job's turns depend only on its own tokens and keys."""

    def __init__(self, engine: BestOfEngine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[GenerationJob | None] = queue.SimpleQueue()
        self._jobs: dict[int, GenerationJob] = {}
        """Session -> its job."""
        self._interrupted = threading.Event()
        """A job was cancelled since the thread last checked."""
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: GenerationJob) -> Future[list[Turn]]:
        self._inbox.put(job)
        return job.turns

    def cancel(self, job: GenerationJob) -> None:
        """Do not start the job, or abandon it after the engine's current step."""
        job.cancelled = True
        if not job.turns.cancel() and not job.turns.done():
            self._interrupted.set()

    def close(self) -> None:
        """Finish submitted jobs and end the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_ = True
        while open_ or self._jobs:
            for job in self._new_jobs(wait=open_ and not self._jobs):
                if job is None:
                    open_ = False
                elif job.turns.set_running_or_notify_cancel():
                    self._begin(job)
            try:
                self._advance()
            except Exception as error:
                self._retry(error)

    def _new_jobs(self, wait: bool) -> list[GenerationJob | None]:
        """Newly submitted jobs; at least one if `wait`."""
        found = [self._inbox.get()] if wait else []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def _begin(self, job: GenerationJob) -> None:
        try:
            rank = job.variant.rank()
            job.sessions = [self.engine.open(job.token_ids)]
            if len(job.keys) > 1:
                job.sessions += self.engine.fork(job.sessions[0], len(job.keys) - 1)
            for session, key in zip(job.sessions, job.keys, strict=True):
                self._jobs[session] = job
                self.engine.choose_by(session, job.variant.n, rank)
                self.engine.request(session, key, job.sampling)
        except Exception as error:
            self._fail(job, error)

    def _advance(self) -> None:
        """Run until a turn is finished or a job cancelled. Engine errors propagate."""
        self._interrupted.clear()
        for job in self._running():
            if job.cancelled:
                self._fail(job, CancelledError())
        for turn in self.engine.advance(self._interrupted.is_set):
            self._end(turn)

    def _running(self) -> list[GenerationJob]:
        """Running jobs, oldest first."""
        return list({id(job): job for job in self._jobs.values()}.values())

    def _end(self, turn: Turn) -> None:
        job = self._jobs.pop(turn.session)
        job.done[turn.session] = turn
        if len(job.done) == len(job.sessions):
            job.turns.set_result([job.done[session] for session in job.sessions])
        self.engine.close(turn.session)

    def _retry(self, error: Exception) -> None:
        """After `error`, which any running job may have caused, run each job by itself, so that only the faulty one fails."""
        jobs = self._running()
        for job in jobs:
            self._reset(job)
        if len(jobs) == 1:
            jobs[0].turns.set_exception(error)
            return
        for job in jobs:
            self._begin(job)
            while not job.turns.done():
                try:
                    self._advance()
                except Exception as own:
                    self._fail(job, own)

    def _reset(self, job: GenerationJob) -> None:
        """Close the job's sessions, so that it can start again."""
        for session in job.sessions:
            self._jobs.pop(session, None)
            if session not in job.done:
                with contextlib.suppress(Exception):
                    self.engine.close(session)
        job.sessions, job.done = [], {}

    def _fail(self, job: GenerationJob, error: BaseException) -> None:
        self._reset(job)
        job.turns.set_exception(error)
