"""The speed gate: what it calls slower, faster, impossible or missing, without a GPU."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from harness import bench

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
)


def row(**changes):
    return dataclasses.replace(ROW, **changes)


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.9, "SAME"), (0.80, "SAME"), (0.78, "SLOWER"), (0.3, "SLOWER"), (1.02, "FASTER")],
)
def test_share_of_the_floor_is_compared_with_the_baseline(share, verdict):
    assert bench.judge(row(share=share), {"share": 0.9}).verdict == verdict


def test_missing_baseline_fails():
    assert bench.judge(row(), None).verdict == "MISSING"
    assert "MISSING" in bench.FAILING


@pytest.mark.parametrize("baseline", [None, {"share": 0.9}, {"share": 1.2}])
def test_faster_than_the_floor_is_impossible_whatever_the_baseline(baseline):
    assert bench.judge(row(share=1.06), baseline).verdict == "IMPOSSIBLE"


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        ([100, 101, 100], [100, 100, 101], "SAME"),
        ([100, 101, 100], [120, 121, 119], "SLOWER"),
        ([100, 101, 100], [80, 81, 82], "FASTER"),
        ([100, 130, 100], [105, 110, 120], "UNCLEAR"),  # pairs disagree
        ([100, 100, 100], [101, 92, 99], "UNCLEAR"),  # same in the middle, but it scatters
        ([100, 120, 100], [106, 127, 106], "UNCLEAR"),  # steady change within the spread
    ],
)
def test_two_versions_in_turns(base, head, verdict):
    assert bench.call_change(base, head) == verdict


def test_clock_stands_still_between_measurements():
    clock = bench.Clock()
    assert clock() == clock() == 0.0
    clock.now += 1e-6
    assert clock() == 1e-6


def test_gpu_key():
    assert bench.key("NVIDIA H200") == "h200"
    assert bench.key("NVIDIA RTX PRO 6000") == "rtx-pro-6000"


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


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "x.toml").write_text(SPEC)
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def bench_command(monkeypatch, rows, *arguments):
    monkeypatch.setattr(bench, "measure", lambda chosen, root, report: (rows, 0))
    return CliRunner().invoke(bench.app, list(arguments))


def test_only_cases_with_bench_are_timed(checkout):
    assert bench.selection([], []) == ["specs/x.toml::big"]
    assert bench.selection(["y"], []) == []
    assert bench.selection([], ["small"]) == []


def test_nothing_to_time_is_an_error(checkout, monkeypatch):
    assert bench_command(monkeypatch, [], "--spec", "nothing").exit_code == 2


def test_no_rows_is_a_failure(checkout, monkeypatch):
    assert bench_command(monkeypatch, []).exit_code == 1


def test_first_run_fails_until_it_is_recorded_and_a_slower_one_fails_after(checkout, monkeypatch):
    (checkout / "report").mkdir()
    assert bench_command(monkeypatch, [row()]).exit_code == 1
    assert bench_command(monkeypatch, [row()], "--record").exit_code == 0
    kept = json.loads((checkout / "ci/baselines/h200.json").read_text())
    assert kept["specs/x.toml::big"]["share"] == 0.9
    assert bench_command(monkeypatch, [row(share=0.88)]).exit_code == 0
    slower = bench_command(monkeypatch, [row(share=0.6)])
    assert slower.exit_code == 1
    assert "SLOWER" in slower.output


def test_wrong_and_impossible_rows_are_never_recorded(checkout, monkeypatch):
    (checkout / "report").mkdir()
    for bad in (row(verdict="WRONG"), row(share=2.0)):
        assert bench_command(monkeypatch, [bad], "--record").exit_code == 1
        assert not (checkout / "ci/baselines/h200.json").exists()


def test_case_without_a_time_fails(checkout, monkeypatch):
    (checkout / "report").mkdir()
    other = row(id="specs/x.toml::other")
    result = bench_command(monkeypatch, [other], "--record")
    assert result.exit_code == 1
    assert "specs/x.toml::big was asked for and has no time" in result.output
