"""`kdtr bench --compare BASE`: two commits in turns on one GPU, replay by replay.

Each side is a process of its own with the kernels, specs and oracles of its commit and this
commit's judge and clock. Both prepare the same case, then time it in turns (base, head, head,
base, ..), so that clocks and temperature drift for both alike. Each pair gives one ratio, and the
verdict comes from an interval that holds the median ratio, whatever the ratios' distribution.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from harness import spec

MARGIN = 0.03  # of time that nobody needs to look at
PAIRS, MOST_PAIRS = 11, 55  # before the first verdict, and while it is UNCLEAR
REPLAYS = 3  # timed each turn, after one that brings the context back
CONFIDENCE = 0.98  # of the interval


@dataclass(frozen=True)
class Call:
    """SAME, FASTER, SLOWER or UNCLEAR, and the evidence."""

    verdict: str
    change: float  # median of head / base - 1 over the pairs
    low: float  # the interval that holds the true median at CONFIDENCE
    high: float
    pairs: int


def call_change(base: Sequence[float], head: Sequence[float]) -> Call:
    """The verdict on paired times.

    SLOWER or FASTER if the whole interval lies beyond MARGIN, SAME if all of it lies within,
    UNCLEAR otherwise. The interval is between two order statistics of the ratios: of n pairs
    Binomial(n, 1/2) lie below the true median.
    """
    ratios = sorted(h / b - 1 for b, h in zip(base, head, strict=True))
    outside = _outside(len(ratios))
    low, high = ratios[outside], ratios[-1 - outside]
    if outside == 0 and 2 ** -len(ratios) * 2 > 1 - CONFIDENCE:
        verdict = "UNCLEAR"  # too few for any interval of that confidence
    elif low > MARGIN:
        verdict = "SLOWER"
    elif high < -MARGIN:
        verdict = "FASTER"
    elif -MARGIN <= low and high <= MARGIN:
        verdict = "SAME"
    else:
        verdict = "UNCLEAR"
    return Call(verdict, median(ratios), low, high, len(ratios))


def _outside(pairs: int) -> int:
    """How many ratios on either side of the interval."""
    below, outside = 2.0**-pairs, 0
    while True:
        following = below + math.comb(pairs, outside + 1) * 2.0**-pairs
        if 2 * following > 1 - CONFIDENCE or 2 * (outside + 1) >= pairs:
            return outside
        below, outside = following, outside + 1


def in_turns(base: Callable[[], float], head: Callable[[], float]) -> tuple[Call, list[float]]:
    """Time two sides in turns until the verdict is clear or MOST_PAIRS; and their median times."""
    times: tuple[list[float], list[float]] = ([], [])
    while True:
        first = len(times[0]) % 2
        for side in (first, 1 - first):
            times[side].append((base, head)[side]())
        pairs = len(times[0])
        if pairs >= PAIRS and (pairs - PAIRS) % 4 == 0:
            call = call_change(*times)
            if call.verdict != "UNCLEAR" or pairs >= MOST_PAIRS:
                return call, [median(each) for each in times]


# -- the two sides ---------------------------------------------------------------------------------


class Side:
    """A process that prepares, times and judges cases of one checkout when it is told to."""

    def __init__(self, root: Path):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "NUMBA_ENABLE_CUDASIM": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "harness.bench_compare"], cwd=root, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, what: str, case_id: str = "") -> None:
        assert self.process.stdin is not None  # it is a pipe
        print(json.dumps([what, case_id]), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """RuntimeError with what the process said, or that it is gone."""
        assert self.process.stdout is not None  # it is a pipe
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with {self.process.wait()}")
        kind, value = json.loads(line)
        if kind != "ok":
            raise RuntimeError(value)
        return value

    def ask(self, what: str, case_id: str = "") -> Any:
        self.tell(what, case_id)
        return self.answer()

    def seconds(self) -> float:
        return self.ask("time")

    def close(self) -> None:
        assert self.process.stdin is not None  # it is a pipe
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def serve(commands: TextIO, answers: TextIO) -> None:
    """The other end of Side: one answer a command, until the commands end."""
    from harness import bench_case, bench_clock, golden

    timed: Any = None
    for line in commands:
        what, case_id = json.loads(line)
        value: Any = None
        try:
            if what == "prepare":
                path, _, name = case_id.partition("::")
                judged = spec.load(Path(path))
                case = judged.cases[name]
                timed = bench_case.Timed(judged, case, golden.make(judged, case))
                value = [timed.bytes, timed.flops]
            elif what == "time":
                timed.replay.seconds()
                value = median(timed.replay.seconds() for _ in range(REPLAYS))
            elif what == "judge":
                timed.judge()
                timed.release()
            elif what == "ceiling":
                top = bench_clock.ceiling()
                most = max(top.copy_bytes_per_s, top.read_bytes_per_s)
                value = [most, top.matrix_flops_per_s, *bench_clock.gpu()]
            answer = ["ok", value]
        except Exception as error:
            said = (str(error).splitlines() or [""])[0]
            answer = ["error", f"{type(error).__name__}: {said}"]
        print(json.dumps(answer), file=answers, flush=True)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of another commit with this commit's judge, removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(place), commit], check=True)
        try:
            shutil.rmtree(place / "harness", ignore_errors=True)
            shutil.copytree(Path(__file__).parent, place / "harness")
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(place)], check=True)


def compare(
    chosen: Sequence[str], commit: str, say: Callable[[str], None], impossible: float
) -> int:
    """Print a verdict a case; 1 if any is slower, wrong, impossible or has no counterpart."""
    failed = False
    with ExitStack() as stack:
        base_root = stack.enter_context(checkout(commit))
        sides = [Side(base_root), Side(Path.cwd())]
        for side in sides:
            stack.callback(side.close)
        bytes_per_s, flops_per_s, *gpu = sides[1].ask("ceiling")
        say(f"{commit} and this checkout in turns on {gpu[0]} ({gpu[1]})")
        for case_id in chosen:
            try:
                call, times, work = _one(case_id, sides)
            except RuntimeError as error:
                say(f"{case_id:60} {error}")
                failed = True
                continue
            floor = max(work[0] / bytes_per_s, work[1] / flops_per_s if flops_per_s else 0.0)
            verdict = call.verdict
            if times[1] * impossible < floor:
                verdict = "IMPOSSIBLE"
            failed |= verdict in ("SLOWER", "IMPOSSIBLE")
            say(
                f"{case_id:60} {verdict:10} {call.change:+6.1%} in [{call.low:+.1%}, "
                f"{call.high:+.1%}] of {call.pairs} pairs, "
                f"{times[0] * 1e6:.2f} -> {times[1] * 1e6:.2f} us"
            )
    return int(failed)


def _one(case_id: str, sides: Sequence[Side]) -> tuple[Call, list[float], list[float]]:
    """RuntimeError, whose text begins with MISSING or WRONG, for a case that cannot be compared."""
    work: list[float] = []
    faults = []
    for side in sides:  # both prepare at the same time
        side.tell("prepare", case_id)
    for name, side in zip(("base", "head"), sides, strict=True):
        try:
            work = side.answer()
        except RuntimeError as error:
            kind = "MISSING" if name == "base" else "WRONG"
            faults.append(f"{kind:10} {name}: {error}")
    if faults:
        raise RuntimeError("; ".join(faults))
    call, times = in_turns(sides[0].seconds, sides[1].seconds)
    for name, side in zip(("base", "head"), sides, strict=True):
        try:
            side.ask("judge")
        except RuntimeError as error:
            faults.append(f"WRONG      {name}: {error}")
    if faults:
        raise RuntimeError("; ".join(faults))
    return call, times, work


if __name__ == "__main__":
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
