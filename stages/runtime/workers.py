"""Process pools that end with their parent process, however that ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any


def worker_pool(workers: int, setup: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()) -> ProcessPoolExecutor:
    """A pool whose processes first call `setup(*arguments)`; both must be picklable.

    Spawned, not forked: a fork would copy locks held by threads of this process (tracking, progress, training libraries).
    """
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (setup, arguments))


def _start(setup: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    # Workers would outlive a killed parent: they wait on a queue whose other end they also hold.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from stages.runtime.parent import die_with_parent

    die_with_parent()  # at once where the kernel supports it, also ending the worker's own children
    if setup is not None:
        setup(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def import_for_good(libraries: Sequence[str]) -> None:
    """Import libraries whose objects live as long as this process and its forks: no collection of garbage looks through them,
    which would take half a second each time, also when a process ends."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        for library in libraries:
            import_module(library)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def quiet_environment(threads: int, local_model: bool = True) -> None:
    """Set thread counts and offline mode; call it before torch or transformers are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads take six times the CPU time on shared cores
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that matrix products on a GPU are the same each time
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # bm25s imports JAX where it is installed, and JAX takes most of a GPU's memory
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if local_model:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
