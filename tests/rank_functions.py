"""Ranks without a GPU: how they connect, and what tests/test_parallel.py tells them to do."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace


def connect(rank, world, agree, tell):
    return SimpleNamespace(rank=rank, world=world, tell=tell, agreed=agree(f"of rank {rank}"))


def refuses(rank, world, agree, tell):
    raise ImportError("no such library")


def add(group, amount):
    group.tell(f"rank {group.rank} of {group.world}")
    return group.rank + amount


def visible(group):
    return os.environ["CUDA_VISIBLE_DEVICES"], group.agreed


def fails(group):
    if group.rank == 1:
        raise ValueError("cannot do this")
    time.sleep(60)


def runs_out(group):
    if group.rank == 1:
        raise EOFError("the file is cut short")
    time.sleep(60)


def loses_a_pipe(group):
    if group.rank == 1:
        raise BrokenPipeError("its own")
    time.sleep(60)


def dies(group):
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def hangs(group):
    if group.rank == 1:
        time.sleep(60)


def sleeps(group, folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)
