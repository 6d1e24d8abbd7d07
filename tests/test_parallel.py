"""Ranks: processes that fail, are lost or hang, and ranks that take turns. No GPU needed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from engine.parallel import RankError, Ranks, in_turns

ROOT = Path(__file__).parents[1]
CONNECT = "tests.rank_functions:connect"


def start(**options):
    return Ranks(["GPU-a", "GPU-b"], connect=CONNECT, **options)


def test_ranks_answer_in_order_see_one_gpu_each_and_agree_on_what_rank_0_says():
    words = []
    with start() as ranks:
        told = ranks.call("tests.rank_functions:add", 5, on_word=lambda *word: words.append(word))
        seen = ranks.call("tests.rank_functions:visible")
    assert told == [5, 6]
    assert sorted(words) == [(0, "rank 0 of 2"), (1, "rank 1 of 2")]
    assert seen == [("GPU-a", "of rank 0"), ("GPU-b", "of rank 0")]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != "GPU-b"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", "rank 1 on GPU-b failed: ValueError: cannot do this"),
        ("runs_out", "rank 1 on GPU-b failed: EOFError: the file is cut short"),
        ("loses_a_pipe", "rank 1 on GPU-b failed: BrokenPipeError: its own"),
        ("dies", "rank 1 on GPU-b ended with exit code -9"),
        ("hangs", r"ranks \[1\] said nothing for 2 s; \[0\] had done their part"),
    ],
)
def test_a_rank_that_is_no_use_ends_all_of_them_with_its_name(function, said):
    ranks = start(silence_s=2.0)
    processes = list(ranks._processes)
    since = time.monotonic()
    with pytest.raises(RankError, match=said):
        ranks.call(f"tests.rank_functions:{function}")
    assert time.monotonic() - since < 30
    assert not any(process.is_alive() for process in processes)


def test_ranks_that_cannot_connect_say_why():
    with pytest.raises(RankError, match=r"rank . on GPU-. failed: ImportError: no such library"):
        Ranks(["GPU-a", "GPU-b"], connect="tests.rank_functions:refuses")


def test_ranks_end_with_the_process_that_started_them(tmp_path):
    script = f"""
import threading, time
from engine.parallel import Ranks
from pathlib import Path
if __name__ == "__main__":
    ranks = Ranks(["0", "1"], connect={CONNECT!r})
    call = threading.Thread(
        target=ranks.call, args=("tests.rank_functions:sleeps", {str(tmp_path)!r}), daemon=True
    )
    call.start()
    while len(list(Path({str(tmp_path)!r}).iterdir())) < 2:
        time.sleep(0.05)
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path.parent / "starts.py").write_text(script)
    subprocess.run(
        [sys.executable, str(tmp_path.parent / "starts.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, timeout=60, check=False,
    )  # fmt: skip
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.05)


# -- turns: host arrays that copy as device arrays do ---------------------------------------------


class Array(np.ndarray):
    def copy_to_device(self, source):
        self[...] = source

    def copy_to_host(self):
        return np.array(self)


def array(*shape, value=0):
    return np.full(shape, value, np.float32).view(Array)


def test_turns_gather_and_exchange():
    def rank(group):
        part, whole = array(2, value=group.rank), array(3, 2)
        group.all_gather(part, whole)
        parts, others = array(3, 1), array(3, 1)
        parts[:, 0] = 10 * group.rank + np.arange(3)
        group.exchange(parts, others)
        return whole[:, 0].tolist(), others[:, 0].tolist()

    assert in_turns(3, rank) == [
        ([0, 1, 2], [0, 10, 20]), ([0, 1, 2], [1, 11, 21]), ([0, 1, 2], [2, 12, 22]),
    ]  # fmt: skip


def test_what_nobody_wrote_does_not_move():
    def rank(group):
        part, whole = array(2, 1, value=group.rank), array(3, 2, 1, value=-1)
        rows = 2 - group.rank
        part[rows:] = np.nan
        group.all_gather(part, whole, rows=rows)

        experts = np.array([[0, 3], [4, 5], [-1, 6]], np.int32).view(Array)  # two a rank
        parts, others = array(3, 2, 1, value=np.nan), array(3, 2, 1, value=-1)
        mine = experts.ravel() // 2 == group.rank
        parts.reshape(6)[mine] = experts.ravel()[mine]
        group.exchange(parts, others, experts=experts, share=2)
        return whole[..., 0].tolist(), others[..., 0].tolist()

    gathered = [[0, 0], [1, -1], [-1, -1]]
    assert in_turns(3, rank) == [
        (gathered, [[0, -1], [-1, 3], [-1, -1]]),
        (gathered, [[-1, -1], [-1, -1], [4, 5]]),
        (gathered, [[-1, -1], [-1, -1], [-1, -1]]),
    ]


def test_a_turn_that_never_comes_is_an_error_and_not_a_hang():
    def rank(group):
        if group.rank:
            group.all_gather(array(1), array(2, 1))

    with pytest.raises(RankError, match=r"ranks \[1\] wait for \[0\], which have ended"):
        in_turns(2, rank)


def test_turns_that_meet_for_different_things_are_an_error():
    def rank(group):
        size = 2 - group.rank
        group.all_gather(array(size), array(2, size))

    with pytest.raises(RankError, match="different things"):
        in_turns(2, rank)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"all_gather: float32\[2\] of 2 ranks into float32\[2\]"):
        in_turns(2, lambda group: group.all_gather(array(2), array(2)))
    with pytest.raises(ValueError, match=r"exchange: float32\[3\] of 2 ranks"):
        in_turns(2, lambda group: group.exchange(array(3), array(3)))


def test_a_rank_that_fails_in_its_turn_raises():
    def rank(group):
        raise KeyError(group.rank)

    with pytest.raises(KeyError, match="0"):
        in_turns(2, rank)
