"""How the specs of ranks run them: in turns on one device, or over NCCL on the worker's GPUs."""

import atexit
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from engine.parallel import VISIBLE, Ranks, in_turns


def together(ranks: int, nccl: bool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(group, *arguments) of every rank."""
    if not nccl:
        return in_turns(ranks, lambda group: function(group, *arguments))
    started = _processes(ranks)
    try:
        return started.call(f"{function.__module__}:{function.__name__}", *arguments)
    except BaseException:  # a time limit too: what they do now, the next case must not wait for
        started.close()
        _processes.cache_clear()
        raise


@cache
def _processes(ranks: int) -> Ranks:
    """Started for the first case that needs them, and kept for the next."""
    visible = os.environ.get(VISIBLE)
    devices = visible.split(",") if visible else [str(rank) for rank in range(ranks)]
    started = Ranks(devices[:ranks])
    atexit.register(started.close)
    return started


def unlike(made: np.ndarray, one: np.ndarray) -> np.ndarray:
    """int64 [rows]: elements of a row that differ in their bits."""
    rows = len(one)
    bits = f"u{one.dtype.itemsize}"
    pairs = (np.ascontiguousarray(a).view(bits).reshape(rows, -1) for a in (made, one))
    ours, theirs = pairs
    return (ours != theirs).sum(1)
