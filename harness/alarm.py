"""A time limit for Python code that may never end."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from harness.report import Fault, Status


@contextlib.contextmanager
def time_limit(limit_s: float, message: str) -> Iterator[None]:
    """Raise Fault(TIMEOUT) in a block that takes longer.

    Only the main thread of a POSIX process can be interrupted so; elsewhere there is no limit. C
    code is interrupted when it returns. Limits nest; the inner one does not move the outer one.
    """

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise Fault(Status.TIMEOUT, message)

    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
