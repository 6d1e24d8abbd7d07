"""The pytest items of `kdtr bench`; collected only by it, one a case."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from harness import bench, spec

SELECTION = json.loads(os.environ.get(bench.SELECTION, '{"cases": [], "out": ""}'))
CLOCK = bench.Clock()


@pytest.fixture(scope="session")
def ceiling() -> bench.Ceiling:
    return bench.ceiling()


@pytest.fixture(scope="session")
def gpu() -> tuple[str, str]:
    from numba import cuda

    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    return name, str(device.uuid)


def write(row: bench.Row) -> None:
    with Path(SELECTION["out"]).open("a", encoding="utf-8") as out:
        out.write(json.dumps(asdict(row)) + "\n")


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("case_id", SELECTION["cases"])
def test_time(case_id: str, benchmark, ceiling: bench.Ceiling, gpu: tuple[str, str]) -> None:
    """Passed, then timed, then judged again."""
    path, _, name = case_id.partition("::")
    judged = spec.load(Path(path))
    case = judged.cases[name]
    wrong = bench.Row(case_id, 0, 0, 0, 0, 0, 0, "", 0, {}, *gpu, verdict="WRONG")
    try:
        timed = bench.Timed(judged, case)
    except bench.WrongResult as error:
        wrong.note = str(error).splitlines()[0]
        write(wrong)
        raise
    seconds: list[float] = []

    def once() -> None:
        seconds.append(timed.replay.seconds())
        CLOCK.now += seconds[-1]

    benchmark.pedantic(once, rounds=bench.ROUNDS, iterations=1, warmup_rounds=3)
    seconds = seconds[3:]
    try:
        timed.judge()
    except bench.WrongResult as error:
        wrong.note = str(error).splitlines()[0]
        write(wrong)
        raise
    row = bench.row(timed, seconds, ceiling, gpu)
    benchmark.extra_info.update(asdict(row))
    write(row)
