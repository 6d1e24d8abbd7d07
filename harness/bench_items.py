"""The pytest items of `kdtr bench`; collected only by it, one a case."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from harness import bench, bench_case, bench_clock, golden, peers, spec

SELECTION = json.loads(os.environ.get(bench.SELECTION, '{"cases": [], "out": ""}'))
CLOCK = bench_clock.Clock()
ROUNDS, SECONDS = 15, 0.4  # replays of a case, fewer where they take longer than that in all
PEER_SECONDS = 0.4  # of replays of each peer


@pytest.fixture(scope="session")
def ceiling() -> bench_clock.Ceiling:
    return bench_clock.ceiling()


@pytest.fixture(scope="session", autouse=True)
def kernels_ahead() -> Iterator[None]:
    """Many cases: all kernels compile in other processes while the first cases run. A launch that
    wants one of them waits for it."""
    if len(SELECTION["cases"]) < 20 or not Path("engine/compile_gate.py").exists():
        yield
        return
    command = [
        sys.executable,
        "-m",
        "engine.compile_gate",
        "--only-cache",
        "--target",
        bench_clock.architecture(),
    ]
    compiler = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    yield
    if compiler.poll() is None:
        os.killpg(compiler.pid, signal.SIGTERM)
    compiler.wait()


@pytest.fixture(scope="session")
def gpu() -> tuple[str, str, str]:
    return bench_clock.gpu()


@pytest.fixture(scope="session")
def ahead() -> Iterator[bench_case.Ahead]:
    pairs = [_pair(case_id) for case_id in SELECTION["cases"]]
    large = [p for p in pairs if bench_case.input_bytes(*p) > golden.CACHE_LIMIT]
    made = bench_case.Ahead(large, 3 if (os.cpu_count() or 1) >= 8 else 1)
    yield made
    made.pool.shutdown(wait=False, cancel_futures=True)


def _pair(case_id: str) -> tuple[spec.Spec, spec.Case]:
    path, _, name = case_id.partition("::")
    judged = spec.load(Path(path))
    return judged, judged.cases[name]


def write(row: bench.Row) -> None:
    with Path(SELECTION["out"]).open("a", encoding="utf-8") as out:
        out.write(json.dumps(asdict(row)) + "\n")


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("case_id", SELECTION["cases"])
def test_time(
    case_id: str,
    benchmark,
    ceiling: bench_clock.Ceiling,
    gpu: tuple[str, str, str],
    ahead: bench_case.Ahead,
) -> None:
    """Passed, then timed in turns with its peers, then judged again."""
    started = time.monotonic()
    judged, case = _pair(case_id)
    try:
        timed = bench_case.Timed(judged, case, ahead.golden(judged, case))
        prepared = time.monotonic()
        rivals = peers.rivals(judged.stem, {**timed.golden.inputs, **case.scalars})
        seconds: list[float] = []

        def once() -> None:
            seconds.append(timed.replay.seconds())
            if not 0 < seconds[-1] < math.inf:  # nor NaN: no baseline is slower than that
                raise bench_case.WrongResult(f"the clock says {seconds[-1]} s")
            CLOCK.now += seconds[-1]
            for rival in rivals.values():
                rival.once(PEER_SECONDS)

        first = timed.replay.seconds() * timed.launches
        rounds = max(5, min(ROUNDS, int(SECONDS / max(first, 1e-6))))
        benchmark.pedantic(once, rounds=rounds, iterations=1, warmup_rounds=2)
        timed.judge()
    except (bench_case.WrongResult, golden.Fault) as error:
        row = bench.Row.wrong(case_id, gpu, str(error).splitlines()[0])
        write(row)
        raise
    theirs = {name: rival.told() for name, rival in rivals.items()}
    row = bench.row(timed, seconds[2:], ceiling, gpu, theirs)
    row.prepare_s, row.whole_s = (round(t - started, 2) for t in (prepared, time.monotonic()))
    benchmark.extra_info.update(asdict(row))
    write(row)
    timed.release()
    peers.release()
