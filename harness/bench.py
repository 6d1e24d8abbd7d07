"""`kdtr bench`: cases with bench = true, timed on a GPU against what the GPU can do at most.

A case is timed only after it passed in the same process, and its outputs are judged again after
the timing. The clock is CUDA events around a CUDA graph of launches that walk through enough copies
of the case's tensors to find the L2 cache cold; pytest-benchmark keeps the statistics
(harness/bench_items.py). The floor of a case is the larger of its bytes over the copy bandwidth and
its operations over the matrix rate, both measured in the same run; what is kept as a baseline is
the share of the floor, not the time.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from harness import golden as goldens
from harness import run, spec
from harness.report import replace_file
from harness.spec import Case, Spec

COLD_BYTES = 256 << 20  # of tensors walked through before one comes again: 4 times an H200's L2
LAUNCHES = 20  # in a graph, at least, so that its own start does not count
ROUNDS = 15
NOISE = 0.12  # sustained runs on a power-limited GPU are up to 13 % slower than bursts
IMPOSSIBLE = 1.05  # share of the floor above which the clock or the work count must be wrong
SELECTION = "KDTR_BENCH_SELECTION"


class Clock:
    """pytest-benchmark's timer: stands still but for what the events measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Ceiling:
    """What the GPU did at most in this run: bytes and bf16 operations a second."""

    copy_bytes_per_s: float
    matrix_flops_per_s: float | None  # None: no library here that multiplies matrices


@dataclass
class Row:
    """One timed case. floor_us, share and peers are of the same run as time_us."""

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
    verdict: str = ""
    note: str = ""


# -- the clock -------------------------------------------------------------------------------------


def _driver(name: str, *arguments: Any) -> Any:
    from cuda.bindings import driver

    status, *values = getattr(driver, name)(*arguments)
    if int(status):
        raise RuntimeError(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else values


class Replay:
    """`launches` calls recorded once as a CUDA graph; `seconds()` is the GPU time of one call."""

    def __init__(self, call: Callable[[int, Any], None], launches: int):
        from cuda.core import Device

        device = Device()
        device.set_current()
        self.launches, self.stream = launches, device.create_stream()
        builder = device.create_graph_builder()
        builder.begin_building()
        for i in range(launches):
            call(i, builder)
        self.graph = builder.end_building().complete()
        self.start, self.end = _driver("cuEventCreate", 0), _driver("cuEventCreate", 0)
        self.seconds()

    def seconds(self) -> float:
        handle = self.stream.handle
        _driver("cuEventRecord", self.start, handle)
        self.graph.launch(self.stream)
        _driver("cuEventRecord", self.end, handle)
        _driver("cuEventSynchronize", self.end)
        return _driver("cuEventElapsedTime", self.start, self.end) * 1e-3 / self.launches


def ceiling() -> Ceiling:
    """Measure the copy bandwidth (bytes read and written) and the bf16 matrix rate of this GPU."""
    from numba import cuda

    size = 1 << 30
    source, target = (cuda.device_array(size, np.uint8) for _ in range(2))
    pointers = [a.device_ctypes_pointer.value for a in (target, source)]
    start, end = _driver("cuEventCreate", 0), _driver("cuEventCreate", 0)
    times = []
    for _ in range(8):
        _driver("cuEventRecord", start, 0)
        _driver("cuMemcpyDtoDAsync", *pointers, size, 0)
        _driver("cuEventRecord", end, 0)
        _driver("cuEventSynchronize", end)
        times.append(_driver("cuEventElapsedTime", start, end) * 1e-3)
    from harness import peers

    return Ceiling(2 * size / median(times[2:]), peers.matrix_rate())


# -- one case --------------------------------------------------------------------------------------


class Timed:
    """A case that has passed, with its launches recorded."""

    def __init__(self, spec: Spec, case: Case):
        self.spec, self.case = spec, case
        verdict = run.run_case(spec, case)
        if not verdict.status.ok:
            raise WrongResult(f"{spec.case_id(case)} is {verdict.status}: {verdict.message}")
        self.golden = goldens.make(spec, case)
        launcher = run.load_launcher(spec)
        one = sum(t.nbytes for t in self.golden.inputs.values())
        self.copies = max(1, min(64, -(-COLD_BYTES // max(one, 1))))
        self.setups = [run.Prepared(spec, case, self.golden) for _ in range(self.copies)]
        keywords = [s.arguments(launcher, second=False) for s in self.setups]

        def call(i: int, stream: Any) -> None:
            launcher(**keywords[i % self.copies], stream=stream)

        launches = self.copies if one > COLD_BYTES else max(self.copies, LAUNCHES)
        self.replay = Replay(call, launches)

    def judge(self) -> None:
        """Judge what the last timed launches wrote, in every copy. Not for tensors in place."""
        from harness.compare import Actual, compare

        if any(o.inout for o in self.spec.outputs.values()):
            return
        for setup in self.setups:
            setup.look_at_guards()
            actual = Actual(setup.outputs(), setup.device)
            results = compare(self.spec, self.case, self.golden, actual)
            verdict = [r for r in results if not r.status.ok]
            if verdict:
                raise WrongResult(
                    f"{self.spec.case_id(self.case)} is {verdict[0].status} after timing: "
                    f"{verdict[0].message or verdict[0].output}"
                )

    def work(self) -> tuple[int, int]:
        """Bytes that must move and operations that must be done.

        The oracle's `work` says so; without one, every input is read once, every output written
        once, and arithmetic is free.
        """
        told: dict[str, Any] = {}
        if hasattr(goldens.oracle(self.spec), "work"):
            told = goldens.reference(self.spec, self.case, self.golden, "work")
        sizes = self.spec.shapes(self.case)
        written = sum(
            int(np.prod(sizes[n])) * o.numpy_dtype.itemsize
            for n, o in self.spec.outputs.items()
            if not o.inout
        )
        read = sum(self.golden.inputs[n].nbytes for n in self.spec.inputs)
        return int(told.get("bytes", read + written)), int(told.get("flops", 0))


class WrongResult(Exception):
    """A case that must not be timed, or whose outputs were wrong after timing."""


def row(timed: Timed, seconds: list[float], top: Ceiling, gpu: tuple[str, str]) -> Row:
    """The measurements of one case against the ceiling of its run."""
    from harness import peers

    moved, flops = timed.work()
    by_bytes = moved / top.copy_bytes_per_s * 1e6
    by_flops = flops / top.matrix_flops_per_s * 1e6 if top.matrix_flops_per_s else 0.0
    time_us = median(seconds) * 1e6
    floor = max(by_bytes, by_flops)
    low, high = np.percentile(np.array(seconds) * 1e6, [10, 90])
    return Row(
        id=timed.spec.case_id(timed.case),
        time_us=round(time_us, 3),
        p10_us=round(float(low), 3),
        p90_us=round(float(high), 3),
        bytes=moved,
        flops=flops,
        floor_us=round(floor, 3),
        limit="flops" if by_flops > by_bytes else "bytes",
        share=round(floor / time_us, 4),
        peers=peers.times(timed.spec.stem, timed.golden.inputs),
        gpu=gpu[0],
        uuid=gpu[1],
    )


# -- verdicts --------------------------------------------------------------------------------------


def judge(row: Row, baseline: dict[str, Any] | None) -> Row:
    """FASTER, SAME or SLOWER than the baseline's share of the floor; MISSING; IMPOSSIBLE."""
    if row.share > IMPOSSIBLE:
        row.verdict, row.note = "IMPOSSIBLE", f"{row.share:.0%} of what this GPU can do"
    elif baseline is None:
        row.verdict, row.note = "MISSING", "no baseline for this case; --record writes one"
    else:
        change = row.share / baseline["share"] - 1
        row.verdict = "SLOWER" if change < -NOISE else "FASTER" if change > NOISE else "SAME"
        row.note = f"{change:+.1%} of the baseline's share of the floor ({baseline['share']:.1%})"
    return row


def call_change(base: list[float], head: list[float]) -> str:
    """SAME, FASTER, SLOWER or UNCLEAR for interleaved medians of two versions of one case.

    A change counts if every pair agrees on its sign and its median is above 3 % and above the
    spread of either version; SAME if the median change is within 3 % and so is the spread.
    """
    changes = [h / b - 1 for b, h in zip(base, head, strict=True)]
    middle = median(changes)
    spread = max((max(v) - min(v)) / median(v) for v in (base, head))
    if abs(middle) <= 0.03:
        return "SAME" if spread <= 0.06 else "UNCLEAR"
    if len({c > 0 for c in changes}) > 1 or abs(middle) <= spread / 2:
        return "UNCLEAR"
    return "SLOWER" if middle > 0 else "FASTER"


FAILING = {"SLOWER", "MISSING", "IMPOSSIBLE", "WRONG"}


# -- the command -----------------------------------------------------------------------------------

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    names: Annotated[
        list[str] | None, typer.Option("--spec", metavar="NAME", help="Only this spec. Repeatable.")
    ] = None,
    cases: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="Only this case. Repeatable.")
    ] = None,
    report: Annotated[
        Path, typer.Option("--report", metavar="DIR", help="Where bench.json goes.")
    ] = Path("report"),
    record: Annotated[
        bool, typer.Option("--record", help="Make these the baseline, ci/baselines/GPU.json.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="BASE", help="Against another commit, interleaved."),
    ] = None,
) -> None:
    """Time cases with bench = true. Exit 0 only if each ran, is right, and is not slower."""
    chosen = selection(names or [], cases or [])
    if not chosen:
        typer.echo("kdtr bench: no case with bench = true is called that", err=True)
        raise typer.Exit(2)
    if compare:
        raise typer.Exit(_compare(chosen, compare))
    rows, code = measure(chosen, Path.cwd(), report)
    if not rows:
        raise typer.Exit(code or 1)
    gpu = rows[0].gpu
    path = Path("ci/baselines") / f"{key(gpu)}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for each in rows:
        if each.verdict != "WRONG":
            judge(each, known.get(each.id))
    if record and not any(r.verdict in ("WRONG", "IMPOSSIBLE") for r in rows):
        fresh = {r.id: {"share": r.share, "time_us": r.time_us, "gpu": r.gpu} for r in rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, _json(dict(sorted({**known, **fresh}.items()))))
        for each in rows:
            each.verdict, each.note = "RECORDED", str(path)
    replace_file(report / "bench.json", _json([asdict(r) for r in rows]))
    show(rows)
    missing = [c for c in chosen if c not in {r.id for r in rows}]
    for absent in missing:
        typer.echo(f"FAILED {absent} was asked for and has no time", err=True)
    raise typer.Exit(1 if missing or any(r.verdict in FAILING for r in rows) else 0)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def key(gpu: str) -> str:
    """NVIDIA H200 -> h200: the name of a GPU's baseline file."""
    return gpu.lower().removeprefix("nvidia ").replace(" ", "-")


def selection(names: list[str], cases: list[str], root: Path | None = None) -> list[str]:
    """Ids of the cases to time, in the order of the specs on disk."""
    found = []
    for path in spec.discover(root or Path.cwd()):
        each = spec.load(path)
        if names and each.stem not in names:
            continue
        found += [
            each.case_id(c)
            for c in each.cases.values()
            if c.bench and (not cases or c.name in cases)
        ]
    return found


def measure(chosen: list[str], root: Path, report: Path) -> tuple[list[Row], int]:
    """Time the cases in a pytest session of its own, in `root`; its rows and exit code."""
    report = report.resolve()
    report.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        items = Path(__file__).with_name("bench_items.py")
        environment = {
            **os.environ,
            SELECTION: json.dumps({"cases": chosen, "out": str(out)}),
            "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            "NUMBA_ENABLE_CUDASIM": "0",
        }
        command = [
            sys.executable, "-m", "pytest", str(items), "-qq", "-n", "0", "-p", "no:kdtree",
            "-p", "no:cacheprovider", "-o", "addopts=", "--no-header", "--tb=short",
            "--rootdir", str(root), "--benchmark-json", str(report / "pytest-benchmark.json"),
            "--benchmark-columns=median,iqr,rounds", "--benchmark-warmup=off",
        ]  # fmt: skip
        try:
            code = subprocess.run(command, cwd=root, env=environment, check=False).returncode
        except KeyboardInterrupt:
            code = 130  # what was timed is in the file; the cases without a time fail
        lines = out.read_text().splitlines() if out.exists() else []
    return [Row(**json.loads(line)) for line in lines], code


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """A worktree of another commit, removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", place, commit], check=True)
        try:
            yield place
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", place], check=True)


def _compare(chosen: list[str], commit: str, pairs: int = 3) -> int:
    """Base and head in turns on one GPU; 1 if any case is slower or has no counterpart."""
    times: dict[str, tuple[list[float], list[float]]] = {c: ([], []) for c in chosen}
    with _checkout(commit) as base, tempfile.TemporaryDirectory() as folder:
        for _ in range(pairs):
            for side, root in enumerate((base, Path.cwd())):
                there = set(selection([], [], root))
                rows, _ = measure([c for c in chosen if c in there], root, Path(folder))
                for each in rows:
                    times[each.id][side].append(each.time_us)
    failed = False
    for case_id, (before, after) in times.items():
        if len(before) != pairs or len(after) != pairs:
            typer.echo(f"{case_id:60} MISSING  {len(before)} and {len(after)} times of {pairs}")
            failed = True
            continue
        verdict = call_change(before, after)
        failed |= verdict == "SLOWER"
        change = median(a / b for a, b in zip(after, before, strict=True)) - 1
        typer.echo(
            f"{case_id:60} {verdict:8} {change:+6.1%}"
            f"  {median(before):.1f} -> {median(after):.1f} us"
            f" (base {min(before):.1f}-{max(before):.1f}, head {min(after):.1f}-{max(after):.1f})"
        )
    return int(failed)


def show(rows: list[Row]) -> None:
    """The table: time, floor, share, peers, verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("case", "us", "floor us", "share", "limit", "peers", "verdict", ""):
        table.add_column(name, justify="right" if name in ("us", "floor us", "share") else "left")
    for each in rows:
        peers = ", ".join(
            f"{n} {t / each.time_us:.2f}x" if isinstance(t, float) else f"{n} absent"
            for n, t in each.peers.items()
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
    console = Console()
    console.print(table)
    if rows:
        console.print(f"{len(rows)} cases on {rows[0].gpu} ({rows[0].uuid})")
