"""`kdtr bench`: cases with bench = true, timed on a GPU against what the GPU can do at most.

A case is timed only after its outputs were judged right in the same process, and they must have
the same bits after the timing. The clock is CUDA events around a CUDA graph of launches that walk
through enough copies of the case's tensors to find the L2 cache cold (harness/bench_case.py);
pytest-benchmark keeps the statistics (harness/bench_items.py). The floor of a case is the larger of
its bytes over the copy bandwidth and its operations over the matrix rate, both measured in the same
run; what is kept as a baseline is the share of the floor, not the time.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from harness import bench_compare, bench_report, console, devices, spec
from harness.bench_clock import Ceiling
from harness.report import read_object, replace_file

if TYPE_CHECKING:
    from harness.bench_case import Timed

NOISE = 0.12  # sustained runs on a power-limited GPU are up to 13 % slower than bursts
IMPOSSIBLE = 1.05  # times the floor's rate above which the clock or the work count must be wrong
SELECTION = "KDTR_BENCH_SELECTION"


@dataclass
class Row:
    """One timed case. Rates, floor, share and peers are of the same run as time_us."""

    id: str
    time_us: float
    p10_us: float
    p90_us: float
    bytes: int
    flops: int
    floor_us: float
    limit: str  # "bytes" or "flops": which of them the floor is
    share: float  # floor_us / time_us
    peers: dict[str, float | str]  # name -> us, or why it is absent
    gpu: str
    uuid: str
    driver: str = ""
    copy_bytes_per_s: float = 0.0
    read_bytes_per_s: float = 0.0
    matrix_flops_per_s: float | None = None
    of_copy: float = 0.0  # bytes a second over the copy bandwidth
    of_matrix: float | None = None  # operations a second over the matrix rate
    times_faster: dict[str, float] = field(default_factory=dict)  # than each peer that is there
    sizes: dict[str, int] = field(default_factory=dict)  # the oracle's, to draw the cost against
    copies: int = 0  # sets of tensors that the launches walk through
    launches: int = 0  # in the graph
    rounds: int = 0  # replays of it
    prepare_s: float = 0.0  # golden, judging, capture
    whole_s: float = 0.0
    verdict: str = ""
    note: str = ""

    @classmethod
    def wrong(cls, case_id: str, gpu: tuple[str, str, str], note: str) -> Row:
        """A case that has no time, and why."""
        return cls(case_id, 0, 0, 0, 0, 0, 0, "", 0, {}, *gpu, verdict="WRONG", note=note)


def row(
    timed: Timed,
    seconds: list[float],
    top: Ceiling,
    gpu: tuple[str, str, str],
    peers: dict[str, float | str],
) -> Row:
    """The measurements of one case against the ceiling of its run."""
    by_bytes = timed.bytes / top.copy_bytes_per_s * 1e6
    by_flops = timed.flops / top.matrix_flops_per_s * 1e6 if top.matrix_flops_per_s else 0.0
    time_us = median(seconds) * 1e6
    floor = max(by_bytes, by_flops)
    low, high = np.percentile(np.array(seconds) * 1e6, [10, 90])
    return Row(
        id=timed.id,
        time_us=_digits(time_us),
        p10_us=_digits(low),
        p90_us=_digits(high),
        bytes=timed.bytes,
        flops=timed.flops,
        floor_us=_digits(floor),
        limit="flops" if by_flops > by_bytes else "bytes",
        share=_digits(floor / time_us),
        peers=peers,
        gpu=gpu[0],
        uuid=gpu[1],
        driver=gpu[2],
        copy_bytes_per_s=round(top.copy_bytes_per_s),
        read_bytes_per_s=round(top.read_bytes_per_s),
        matrix_flops_per_s=round(top.matrix_flops_per_s) if top.matrix_flops_per_s else None,
        of_copy=_digits(by_bytes / time_us),
        of_matrix=_digits(by_flops / time_us) if top.matrix_flops_per_s else None,
        times_faster={n: _digits(t / time_us) for n, t in peers.items() if isinstance(t, float)},
        sizes=timed.sizes,
        copies=timed.copies,
        launches=timed.launches,
        rounds=len(seconds),
    )


def _digits(value: float) -> float:
    """Five of them: a share of the floor may be small, and must still tell a change."""
    return float(f"{value:.5g}")


# -- verdicts --------------------------------------------------------------------------------------


def judge(row: Row, baseline: Any) -> Row:
    """FASTER, SAME or SLOWER than the baseline's share of the floor; MISSING; IMPOSSIBLE."""
    share = baseline.get("share") if isinstance(baseline, dict) else None
    most = IMPOSSIBLE
    if row.limit == "bytes" and row.copy_bytes_per_s:  # a read alone is a little faster than a copy
        most *= max(1.0, row.read_bytes_per_s / row.copy_bytes_per_s)
    if row.share > most:
        row.verdict, row.note = "IMPOSSIBLE", f"{row.share:.0%} of what this GPU can do"
    elif not isinstance(share, float | int) or not 0 < share < math.inf:
        row.verdict, row.note = "MISSING", "no baseline for this case; --record writes one"
    else:
        change = row.share / share - 1
        row.verdict = "SLOWER" if change < -NOISE else "FASTER" if change > NOISE else "SAME"
        row.note = f"{change:+.1%} of the baseline's share of the floor ({share:.1%})"
    return row


FAILING = {"SLOWER", "MISSING", "IMPOSSIBLE", "WRONG"}
KEPT = ("share", "time_us", "floor_us", "limit", "gpu", "peers")  # of a row, in a baseline


# -- the command -----------------------------------------------------------------------------------

app = typer.Typer()


@app.command()
def bench(
    names: console.Specs = None,
    cases: console.Cases = None,
    report: console.Folder = Path("report"),
    record: Annotated[
        bool, typer.Option("--record", help="Make these the baseline, ci/baselines/GPU.json.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="BASE", help="Against another commit, interleaved."),
    ] = None,
) -> None:
    """Time cases with bench = true. Exit 0 only if each ran, is right, and is not slower."""
    try:
        every = selection([], [])
    except spec.SpecError as error:
        console.fail(error, 1)
    chosen = selection(names or [], cases or [])
    found = {part for c in every for part in (Path(c.partition("::")[0]).stem, c.split("::")[1])}
    if absent := [name for name in [*(names or ()), *(cases or ())] if name not in found]:
        console.fail(f"no case with bench = true is called that: {', '.join(absent)}")
    if not chosen:
        console.fail("no case with bench = true is called that")
    try:
        devices.choose("cuda")
    except devices.DeviceError as error:
        console.fail(f"cases are timed on a GPU: {str(error).removeprefix('--device cuda: ')}")
    if compare:
        raise typer.Exit(bench_compare.compare(chosen, compare, typer.echo, IMPOSSIBLE))
    rows, code = measure(chosen, Path.cwd(), report)
    if not rows:
        raise typer.Exit(code or 1)
    gpu = rows[0].gpu
    path = Path("ci/baselines") / f"{key(gpu)}.json"
    known = read_object(path)  # one that cannot be read: every case is MISSING
    for each in rows:
        if each.verdict != "WRONG":
            judge(each, known.get(each.id))
    sound = [r for r in rows if r.verdict not in ("WRONG", "IMPOSSIBLE")]
    if record and sound:
        fresh = {r.id: {n: getattr(r, n) for n in KEPT} for r in sound}
        kept = {name: value for name, value in known.items() if name in every}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _json(dict(sorted({**kept, **fresh}.items()))))
        for each in sound:
            each.verdict, each.note = "RECORDED", str(path)
    replace_file(report / "bench.json", _json([asdict(r) for r in rows]))
    show(rows)
    written = bench_report.write(rows, report)
    typer.echo(f"{report / 'bench.json'}, and how cost grows: {len(written)} files beside it")
    missing = [c for c in chosen if c not in {r.id for r in rows}]
    for gone in missing:
        typer.echo(f"FAILED {gone} was asked for and has no time", err=True)
    if code and not missing and not any(r.verdict in FAILING for r in rows):
        typer.echo(f"FAILED pytest ended with {code}, though every case has a time", err=True)
    raise typer.Exit(1 if code or missing or any(r.verdict in FAILING for r in rows) else 0)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def key(gpu: str) -> str:
    """NVIDIA H200 -> h200: the name of a GPU's baseline file."""
    return gpu.lower().removeprefix("nvidia ").replace(" ", "-")


def selection(names: list[str], cases: list[str], root: Path | None = None) -> list[str]:
    """Ids of the cases to time; those with the least memory, whose goldens are first, first."""
    from harness.bench_case import input_bytes

    found = []
    for path in spec.discover(root or Path.cwd()):
        each = spec.load(path)
        if names and each.stem not in names:
            continue
        found += [
            (input_bytes(each, c) >> 24, each.case_id(c))
            for c in each.cases.values()
            if c.bench and (not cases or c.name in cases)
        ]
    return [case_id for _, case_id in sorted(found)]


def measure(chosen: list[str], root: Path, report: Path) -> tuple[list[Row], int]:
    """Time the cases in a pytest session of its own, in `root`; its rows and exit code."""
    report = report.resolve()
    report.mkdir(parents=True, exist_ok=True)
    out = report / "bench.jsonl"  # a row as soon as it is there, for whoever ends the run early
    out.unlink(missing_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    environment = {  # under PYTEST_XDIST_* pytest-benchmark would take itself for disabled
        **{name: v for name, v in os.environ.items() if not name.startswith("PYTEST_XDIST")},
        SELECTION: json.dumps({"cases": chosen, "out": str(out)}),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "NUMBA_ENABLE_CUDASIM": "0",
        "OMP_NUM_THREADS": threads,
    }
    command = [
        sys.executable, "-m", "pytest", str(Path(__file__).with_name("bench_items.py")), "-qq",
        "-n", "0", "-p", "no:kdtree", "-p", "no:cacheprovider", "-o", "addopts=", "--no-header",
        "-p", "no:hypothesispytest", "--tb=short", "--rootdir", str(root),
        "--benchmark-json", str(report / "pytest-benchmark.json"),
        "--benchmark-quiet", "--benchmark-warmup=off",
    ]  # fmt: skip
    with _goldens_ahead(chosen, root, environment):
        try:
            code = subprocess.run(command, cwd=root, env=environment, check=False).returncode
        except KeyboardInterrupt:
            code = 130  # what was timed is in the file; the cases without a time fail
    lines = out.read_text().splitlines() if out.exists() else []
    return [Row(**json.loads(line)) for line in lines], code


@contextmanager
def _goldens_ahead(chosen: list[str], root: Path, environment: dict[str, str]) -> Iterator[None]:
    """Small goldens into the cache by other processes, for as long as the session runs."""
    from harness.bench_case import input_bytes
    from harness.golden import CACHE_LIMIT

    small = []
    for case_id in chosen:
        path, _, name = case_id.partition("::")
        one = spec.load(root / path)
        if input_bytes(one, one.cases[name]) <= CACHE_LIMIT:
            small.append(case_id)
    makers = subprocess.Popen(
        [sys.executable, "-m", "harness.bench_goldens"],
        cwd=root, env={**environment, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert makers.stdin is not None  # it is a pipe
        makers.stdin.write("\n".join(small))
        makers.stdin.close()
        yield
    finally:
        if makers.poll() is None:
            os.killpg(makers.pid, signal.SIGTERM)
        makers.wait()


def show(rows: list[Row]) -> None:
    """The table: time, floor, share, peers, verdict."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("case", "us", "floor us", "share", "limit", "faster than", "verdict", ""):
        table.add_column(name, justify="right" if name in ("us", "floor us", "share") else "left")
    for each in sorted(rows, key=lambda row: row.id):
        peers = ", ".join(
            f"{n} {each.times_faster[n]:.2f}x" if n in each.times_faster else f"{n} absent"
            for n in each.peers
        )
        table.add_row(
            each.id.removeprefix("specs/"),
            f"{each.time_us:.1f}",
            f"{each.floor_us:.1f}",
            f"{each.share:.0%}",
            each.limit,
            peers,
            each.verdict,
            each.note,
        )
    console.show(table)
    if rows:
        console.show(f"{len(rows)} cases on {rows[0].gpu} ({rows[0].uuid})")
