"""Processes that a judged launcher leaves behind: they end with the run that judged it.

One that outlives its run holds the run's output open, and a CI job waits for it for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def prctl() -> Callable[..., Any] | None:
    """Linux's way to ask for signals and for orphans; None on other systems."""
    return getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """Adopt what children of this process leave behind in the block, and kill it afterwards."""
    call = prctl()
    if call is None:
        yield
        return
    before = _children()
    call(SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        while left := _children() - before:  # whose children come to us in turn
            for pid in left:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        call(SET_CHILD_SUBREAPER, 0)


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found.update(map(int, task.read_text().split()))
    return found
