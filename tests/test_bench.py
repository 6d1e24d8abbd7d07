"""The speed gate without a GPU: its verdicts, its clock, and a whole run on a fake GPU."""

import dataclasses
import io
import itertools
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from harness import bench, bench_case, bench_clock, bench_compare, bench_report, devices, peers

ROOT = Path(__file__).resolve().parents[1]
ROW = bench.Row(
    id="specs/x.toml::big",
    time_us=100.0,
    p10_us=99.0,
    p90_us=101.0,
    bytes=400_000_000,
    flops=0,
    floor_us=90.0,
    limit="bytes",
    share=0.9,
    peers={},
    gpu="NVIDIA H200",
    uuid="GPU-0",
    copy_bytes_per_s=4.2e12,
    read_bytes_per_s=4.2e12,
)


def row(**changes):
    return dataclasses.replace(ROW, **changes)


# -- against a baseline ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.9, "SAME"), (0.80, "SAME"), (0.78, "SLOWER"), (0.3, "SLOWER"), (1.02, "FASTER")],
)
def test_share_of_the_floor_is_compared_with_the_baseline(share, verdict):
    assert bench.judge(row(share=share), {"share": 0.9}).verdict == verdict


@pytest.mark.parametrize("share", [None, "0.9", 0, -1.0, math.nan, math.inf])
def test_missing_baseline_fails(share):
    assert bench.judge(row(), None).verdict == "MISSING"
    assert bench.judge(row(), {"share": share}).verdict == "MISSING"
    assert "MISSING" in bench.FAILING


@pytest.mark.parametrize("baseline", [None, {"share": 0.9}, {"share": 1.2}])
def test_faster_than_the_floor_is_impossible_whatever_the_baseline(baseline):
    assert bench.judge(row(share=1.06), baseline).verdict == "IMPOSSIBLE"


def test_a_kernel_that_reads_alone_may_be_as_fast_as_reading():
    faster = row(share=1.06, read_bytes_per_s=4.4e12)
    assert bench.judge(faster, {"share": 1.05}).verdict == "SAME"
    assert bench.judge(row(share=1.11, read_bytes_per_s=4.4e12), None).verdict == "IMPOSSIBLE"
    by_operations = row(share=1.06, read_bytes_per_s=4.4e12, limit="flops")
    assert bench.judge(by_operations, None).verdict == "IMPOSSIBLE"


def test_row_has_the_rates_of_its_run_and_the_ratio_to_each_peer():
    class Timed:
        id, bytes, flops, sizes, copies, launches = "specs/x.toml::a", 2_000_000, 10**9, {}, 3, 21

    top = bench_clock.Ceiling(4e12, 4.4e12, 8e14)
    made = bench.row(
        Timed, [2e-6, 1e-6, 1e-6], top, ("NVIDIA H200", "GPU-0", "13000"),
        {"cuBLAS": 3.0, "humming": "absent: no module"},
    )  # fmt: skip
    assert made.time_us == 1.0
    assert (made.floor_us, made.limit, made.share) == (1.25, "flops", 1.25)
    assert (made.of_copy, made.of_matrix) == (0.5, 1.25)
    assert made.times_faster == {"cuBLAS": 3.0}
    assert made.peers["humming"] == "absent: no module"


# -- base and head in turns ------------------------------------------------------------------------


def noise(seed, count, size=0.01):
    return 1 + size * np.random.Generator(np.random.PCG64(seed)).standard_normal(count)


@pytest.mark.parametrize(
    ("change", "verdict"), [(1.0, "SAME"), (1.2, "SLOWER"), (0.8, "FASTER"), (1.06, "SLOWER")]
)
def test_paired_times_are_called(change, verdict):
    base, head = 100 * noise(1, 21), 100 * change * noise(2, 21)
    call = bench_compare.call_change(base, head)
    assert call.verdict == verdict
    assert call.low <= change - 1 <= call.high


@pytest.mark.parametrize(("change", "size"), [(1.03, 0.01), (1.0, 0.2), (1.1, 0.4)])
def test_what_the_evidence_does_not_settle_is_unclear(change, size):
    base, head = 100 * noise(3, 21, size), 100 * change * noise(4, 21, size)
    assert bench_compare.call_change(base, head).verdict == "UNCLEAR"


def test_a_few_pairs_settle_nothing():
    assert bench_compare.call_change([1.0] * 4, [2.0] * 4).verdict == "UNCLEAR"


def test_drift_that_both_sides_share_is_no_change():
    clock = itertools.count()

    def side(speed):
        return lambda: speed * (1 + 0.002 * next(clock))  # it gets 2 % slower each ten readings

    call, times = bench_compare.in_turns(side(1.0), side(1.0))
    assert call.verdict == "SAME"
    assert times[1] > 1.0
    call, _ = bench_compare.in_turns(side(1.0), side(1.1))
    assert call.verdict == "SLOWER"


def test_an_unclear_pair_is_measured_longer_but_not_for_ever():
    flips = itertools.cycle([1.0, 1.0, 2.0, 1.0])
    call, _ = bench_compare.in_turns(lambda: next(flips), lambda: next(flips))
    assert (call.verdict, call.pairs) == ("UNCLEAR", bench_compare.MOST_PAIRS)


def test_interval_misses_the_median_as_rarely_as_it_says():
    draws = np.random.Generator(np.random.PCG64(5))
    missed = 0
    for _ in range(2000):
        call = bench_compare.call_change(np.ones(15), 1 + draws.standard_normal(15))
        missed += not call.low <= 0 <= call.high
    assert missed < 2000 * (1 - bench_compare.CONFIDENCE) * 1.3


class Side:
    """A side of a comparison that takes so many seconds, or fails."""

    def __init__(self, seconds=1e-4, prepare=None, judge=None):
        self.seconds, self.faults = lambda: seconds, {"prepare": prepare, "judge": judge}
        self.told = []

    def tell(self, what, case_id=""):
        self.told.append(what)

    def answer(self):
        if fault := self.faults.get(self.told[-1]):
            raise RuntimeError(fault)
        return [400_000_000, 0] if self.told[-1] == "prepare" else [4.2e12, None, "H200", "GPU-0"]

    def ask(self, what, case_id=""):
        self.tell(what, case_id)
        return self.answer()

    def close(self):
        pass


@pytest.mark.parametrize(
    ("base", "head", "code", "said"),
    [
        (Side(), Side(), 0, "SAME"),
        (Side(), Side(1.2e-4), 1, "SLOWER"),
        (Side(2e-4), Side(), 0, "FASTER"),
        (Side(), Side(1e-5), 1, "IMPOSSIBLE"),
        (Side(prepare="KeyError: 'big'"), Side(), 1, "MISSING    base: KeyError"),
        (Side(), Side(prepare="it is WRONG"), 1, "WRONG      head: it is WRONG"),
        (Side(), Side(judge="other bits after timing"), 1, "WRONG      head: other bits"),
    ],
)
def test_comparison(monkeypatch, tmp_path, base, head, code, said):
    class NoCheckout:
        def __enter__(self):
            return tmp_path

        def __exit__(self, *_):
            pass

    sides = iter([base, head])
    monkeypatch.setattr(bench_compare, "checkout", lambda commit: NoCheckout())
    monkeypatch.setattr(bench_compare, "Side", lambda root: next(sides))
    lines = []
    assert bench_compare.compare(["specs/x.toml::big"], "main", lines.append, 1.05) == code
    assert said in lines[-1]


def test_a_side_answers_each_command_with_a_line():
    answers = io.StringIO()
    asked = [["prepare", "specs/none.toml::a"], ["time", ""]]
    bench_compare.serve(map(json.dumps, asked), answers)
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert first[0] == second[0] == "error"
    assert "none.toml" in first[1]


def test_base_gets_its_own_kernels_and_this_judge():
    with bench_compare.checkout("HEAD") as place:
        assert (place / "engine").is_dir()
        ours = (ROOT / "harness" / "bench_compare.py").read_text()
        assert (place / "harness" / "bench_compare.py").read_text() == ours
    assert not place.exists()


# -- the clock and the copies ----------------------------------------------------------------------


def test_clock_stands_still_between_measurements():
    clock = bench_clock.Clock()
    assert clock() == clock() == 0.0
    clock.now += 1e-6
    assert clock() == 1e-6


@pytest.mark.parametrize(
    ("moved", "held", "copies"),
    [
        (1 << 10, 1 << 10, 64),  # small: as many as are allowed
        (16 << 20, 16 << 20, 16),
        (256 << 20, 256 << 20, 1),
        (198 << 20, 9 << 30, 2),  # touches little of what it holds
        (8 << 30, 9 << 30, 1),
    ],
)
def test_copies_outgrow_the_cache_and_fit_the_memory(moved, held, copies):
    assert bench_case.copies(moved, held) == copies


def test_gpu_key():
    assert bench.key("NVIDIA H200") == "h200"
    assert bench.key("NVIDIA RTX PRO 6000") == "rtx-pro-6000"


# -- peers -----------------------------------------------------------------------------------------


def test_a_peer_that_cannot_be_imported_is_absent():
    def missing(given):
        import a_library_that_nobody_has  # noqa: F401

    rival = peers.Rival(missing, {})
    rival.once(1.0)
    assert rival.told() == "absent: No module named 'a_library_that_nobody_has'"


def test_a_peer_is_timed_until_its_time_is_up():
    rival = peers.Rival(lambda given: lambda: 2e-6, {})
    for _ in range(5):
        rival.once(1.0)
    assert rival.told() == 2.0
    rival.spent_s = 2.0
    rival.once(1.0)
    assert len(rival.seconds) == 5


def test_host_heap_grows_the_best_first_tree():
    log_probs = [[-0.1, -1.0, -3.0], [-0.2, -2.0, -2.5]]
    parents, visible = peers._heap(log_probs, 5)
    # -0.1, then -0.3 below it, -1.0 beside it, -1.2 below that, -2.1 below the first
    assert parents == [-1, 0, 1, 0, 3, 1]
    assert visible.sum(1).tolist() == [1, 2, 3, 2, 3, 3]


# -- how cost grows --------------------------------------------------------------------------------


def grown():
    return [
        row(
            id=f"specs/gemm.toml::m{m}_n{n}", sizes={"M": m, "N": n}, time_us=n * (10.0 + m),
            floor_us=9.0 * n, peers={"cuBLAS": 20.0 * n, "humming": "absent: no"},
        )
        for n in (1, 2)
        for m in (16, 1, 4)
    ]  # fmt: skip


def test_cases_that_differ_in_one_size_are_a_curve():
    found = bench_report.curves(grown())
    assert list(found) == [("gemm", "M")]  # two N are too few to draw
    assert list(found["gemm", "M"]) == ["N = 1", "N = 2"]
    assert [r.sizes["M"] for r in found["gemm", "M"]["N = 2"]] == [1, 4, 16]


def test_report_has_tables_and_pictures(tmp_path):
    written = bench_report.write(grown(), tmp_path)
    assert [p.name for p in written] == ["growth.md", "gemm-M.svg", "gemm-M.png"]
    text = (tmp_path / "growth.md").read_text()
    assert "| 16 | 52.0 | 99.0 | 101.0 | 18.0 | 90% | 40.0 |" in text
    assert (tmp_path / "gemm-M.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "gemm-M.svg").read_text()


# -- the command -----------------------------------------------------------------------------------

SPEC = """
stage     = "kernel"
kernel    = "mine:x"
reference = "mine"
[inputs]
a = { shape = ["n"], dtype = "float32" }
[outputs]
y = { shape = ["n"], dtype = "float32", match = "exact" }
[cases]
small = { n = 1, sim = true }
big   = { n = 100, bench = true }
"""
# Doubles its input; `x` is what the specs above call. The others are what a bench must not time.
MINE = """
import numpy as np

calls = [0]

def inputs(rng, *, n):
    return {"a": rng.integers(1, 9, (n,)).astype("float32")}

def reference(*, a):
    return {"y": a.astype("float64") * 2}

def work(*, a):
    return {"M": a.size}

def x(a, *, y, stream=None):
    y._ary[:] = a._ary * 2

def wrong(a, *, y, stream=None):
    y._ary[:] = a._ary

def tires(a, *, y, stream=None):
    calls[0] += 1
    y._ary[:] = a._ary * (2 if calls[0] < 3 else 3)
"""
FAKE_GPU = """
    import os
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    from harness import bench_case, bench_clock
    from numba.cuda.simulator.cudadrv.devices import FakeCUDAContext

    FakeCUDAContext.deallocations = {}

    class Replay:
        made = []

        def __init__(self, call, launches):
            self.launches, self.readings = launches, 0
            self.made.append(self)
            for i in range(launches):
                call(i, None)

        def seconds(self):
            self.readings += 1
            fault = os.environ.get("FAKE_FAULT")
            if fault is None or len(self.made) < 2 or self.readings < 8:  # of the first case: none
                return 5e-6
            if fault == "lost":
                raise RuntimeError("cuEventSynchronize: CUDA_ERROR_LAUNCH_FAILED")
            if fault == "died":
                os.kill(os.getpid(), 9)
            return float(fault)

    bench_clock.ceiling = lambda: bench_clock.Ceiling(4e12, 4.4e12, None)
    bench_clock.gpu = lambda: ("NVIDIA H200", "GPU-0", "13000")
    bench_case.Replay, bench_case.MOST_COPIES = Replay, 3
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "x.toml").write_text(SPEC)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(devices.FAKE, "GPU-0")
    return tmp_path


def bench_command(monkeypatch, rows, *arguments):
    monkeypatch.setattr(bench, "measure", lambda chosen, root, report: (rows, 0))
    return CliRunner().invoke(bench.app, list(arguments))


def on_a_fake_gpu(checkout, kernel, *arguments):
    """`kdtr bench` in processes of its own, as it runs on a GPU but for the graph."""
    (checkout / "fake_gpu.py").write_text(textwrap.dedent(FAKE_GPU))
    (checkout / "specs" / "x.toml").write_text(SPEC.replace("mine:x", f"mine:{kernel}"))
    environment = {
        **os.environ,
        "PYTEST_PLUGINS": "fake_gpu",
        "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)]),
    }
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", "bench", *arguments], cwd=checkout, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_whole_run_records_a_baseline_and_compares_with_it(checkout):
    done = on_a_fake_gpu(checkout, "x", "--record")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((checkout / "ci/baselines/h200.json").read_text())
    assert kept["specs/x.toml::big"]["time_us"] == 5.0
    (made,) = json.loads((checkout / "report/bench.json").read_text())
    assert made["sizes"] == {"M": 100}
    assert (made["copies"], made["launches"], made["rounds"]) == (3, 21, 15)
    statistics = json.loads((checkout / "report/pytest-benchmark.json").read_text())
    (item,) = statistics["benchmarks"]
    assert item["extra_info"]["uuid"] == "GPU-0"
    assert item["extra_info"]["bytes"] == 800
    assert item["stats"]["median"] == pytest.approx(5e-6)
    assert on_a_fake_gpu(checkout, "x").returncode == 0


@pytest.mark.parametrize(
    ("kernel", "said"), [("wrong", "is WRONG"), ("tires", "other bits after timing")]
)
def test_what_is_wrong_before_or_after_is_not_recorded(checkout, kernel, said):
    done = on_a_fake_gpu(checkout, kernel, "--record")
    assert done.returncode == 1
    assert said in " ".join(done.stdout.split())
    assert not (checkout / "ci/baselines/h200.json").exists()


@pytest.mark.parametrize("fault", ["lost", "died", "nan"])
def test_gpu_or_clock_lost_in_the_middle_costs_the_case_and_no_other(checkout, monkeypatch, fault):
    monkeypatch.setitem(globals(), "SPEC", SPEC + "huge = { n = 1000, bench = true }\n")
    baseline = checkout / "ci" / "baselines" / "h200.json"
    baseline.parent.mkdir(parents=True)
    known = {"share": 0.5, "time_us": 9.0}
    baseline.write_text(json.dumps({"specs/x.toml::huge": known}))
    monkeypatch.setenv("FAKE_FAULT", fault)
    done = on_a_fake_gpu(checkout, "x", "--record")
    assert done.returncode != 0, done.stdout + done.stderr
    rows = {r["id"]: r for r in json.loads((checkout / "report/bench.json").read_text())}
    assert rows["specs/x.toml::big"]["time_us"] == 5.0
    if fault in ("lost", "died"):
        assert "FAILED specs/x.toml::huge was asked for and has no time" in done.stderr
    else:
        assert rows["specs/x.toml::huge"]["verdict"] == "WRONG"
        assert "the clock says" in rows["specs/x.toml::huge"]["note"]
    kept = json.loads(baseline.read_text())
    assert kept["specs/x.toml::huge"] == known
    assert kept["specs/x.toml::big"]["time_us"] == 5.0


def test_only_cases_with_bench_are_timed(checkout):
    assert bench.selection([], []) == ["specs/x.toml::big"]
    assert bench.selection(["y"], []) == []
    assert bench.selection([], ["small"]) == []


def test_nothing_to_time_is_an_error(checkout, monkeypatch):
    assert bench_command(monkeypatch, [], "--spec", "nothing").exit_code == 2


def test_a_machine_without_a_gpu_is_told_so(checkout, monkeypatch):
    monkeypatch.delenv(devices.FAKE)
    monkeypatch.setattr(devices, "survey", lambda environ: devices.Machine(problem="no driver"))
    done = bench_command(monkeypatch, [row()])
    assert done.exit_code == 2
    assert "cases are timed on a GPU: no driver" in done.output


def test_no_rows_is_a_failure(checkout, monkeypatch):
    assert bench_command(monkeypatch, []).exit_code == 1


def test_first_run_fails_until_it_is_recorded_and_a_slower_one_fails_after(checkout, monkeypatch):
    (checkout / "report").mkdir()
    assert bench_command(monkeypatch, [row()]).exit_code == 1
    assert bench_command(monkeypatch, [row()], "--record").exit_code == 0
    kept = json.loads((checkout / "ci/baselines/h200.json").read_text())
    assert kept["specs/x.toml::big"]["share"] == 0.9
    assert kept["specs/x.toml::big"]["gpu"] == "NVIDIA H200"
    assert bench_command(monkeypatch, [row(share=0.88)]).exit_code == 0
    slower = bench_command(monkeypatch, [row(share=0.6)])
    assert slower.exit_code == 1
    assert "SLOWER" in slower.output


def test_wrong_and_impossible_rows_are_never_recorded(checkout, monkeypatch):
    (checkout / "report").mkdir()
    for bad in (row(verdict="WRONG"), row(share=2.0)):
        assert bench_command(monkeypatch, [bad], "--record").exit_code == 1
        assert not (checkout / "ci/baselines/h200.json").exists()


def test_a_bad_row_does_not_cost_the_others_their_baseline(checkout, monkeypatch):
    (checkout / "report").mkdir()
    (checkout / "ci/baselines").mkdir(parents=True)
    path = checkout / "ci/baselines/h200.json"
    path.write_text(json.dumps({"specs/gone.toml::a": {"share": 0.5}}))
    bad = row(id="specs/x.toml::small", verdict="WRONG")
    assert bench_command(monkeypatch, [row(), bad], "--record").exit_code == 1
    assert list(json.loads(path.read_text())) == ["specs/x.toml::big"]


def test_names_that_nothing_has_and_a_damaged_baseline_are_no_pass(checkout, monkeypatch):
    (checkout / "report").mkdir()
    for call in (["--spec", "x", "--spec", "y"], ["--spec", "x", "--case", "bigger"]):
        result = bench_command(monkeypatch, [row()], *call)
        assert result.exit_code == 2
        assert f"is called that: {call[-1]}" in result.output
    (checkout / "ci/baselines").mkdir(parents=True)
    for text in ("{", "[]", '{"specs/x.toml::big": 3}'):
        (checkout / "ci/baselines/h200.json").write_text(text)
        result = bench_command(monkeypatch, [row()])
        assert result.exit_code == 1
        assert "MISSING" in result.output
    (checkout / "specs/z.toml").write_text("stage = 3")
    assert "z.toml: stage: expected" in bench_command(monkeypatch, [row()]).output


def test_case_without_a_time_fails(checkout, monkeypatch):
    (checkout / "report").mkdir()
    other = row(id="specs/x.toml::other")
    result = bench_command(monkeypatch, [other], "--record")
    assert result.exit_code == 1
    assert "specs/x.toml::big was asked for and has no time" in result.output
