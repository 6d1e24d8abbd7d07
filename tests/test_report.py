"""Verdicts as text, JSON, table and page; and files that are whole or old."""

import dataclasses
import io
import json
import math
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from harness import report
from harness.report import Result, Status, Verdict

ROOT = Path(__file__).parents[1]

RIGHT = Verdict(
    id="specs/scale.toml::small",
    stage="kernel",
    spec="scale",
    case="small",
    status=Status.PASSED,
    device="simulator",
    headroom=0.25,
    time_us=12.5,
    outputs=(Result("y", Status.PASSED, 0, 24, "within 1 ulp of float32", headroom=0.25),),
    digest="0" * 64,
    kernel="broken.scale:scale",
    reference="broken.scale",
)
WRONG = replace(
    RIGHT,
    id="specs/scale.toml::odd_tail",
    case="odd_tail",
    status=Status.WRONG,
    headroom=math.inf,
    outputs=(
        Result(
            "y",
            Status.WRONG,
            9,
            288,
            "within 1 ulp of float32",
            first=(0, 95),
            got=math.nan,
            want=1.5,
            bound=1e-3,
            headroom=math.inf,
            within="[0:3, 95]",
            message="off by 0.107; got is what belongs at (0, 96)",
        ),
    ),
)


def test_a_failure_says_what_where_and_how_to_see_it_again():
    assert report.failure_text(WRONG).splitlines() == [
        "scale::odd_tail WRONG on simulator",
        "  y: WRONG, 9 of 288 wrong, all of them within [0:3, 95]",
        "    first at (0, 95): got nan, want 1.5, bound 0.001",
        "    allowed: within 1 ulp of float32",
        "    off by 0.107",
        "    got is what belongs at (0, 96)",
        "  spec    specs/scale.toml",
        "  oracle  broken.scale",
        "  kernel  broken.scale:scale",
        "  again   pytest specs/scale.toml::odd_tail",
    ]


def test_a_replaced_kernel_is_run_again_as_it_was():
    text = report.failure_text(replace(WRONG, kernel="mine:scale", replaced=True))
    assert "again   kdtr gate --spec scale --kernel mine:scale" in text


def test_only_passed_and_declared_unsupported_are_ok():
    assert [s for s in Status if s.ok] == [Status.PASSED, Status.UNSUPPORTED]


def test_totals_count_every_status():
    totals = report.totals([RIGHT, WRONG, replace(RIGHT, status=Status.UNSUPPORTED)])
    assert totals == {
        "cases": 3,
        "passed": 1,
        "unsupported": 1,
        "failed": 1,
        "by_status": {"PASSED": 1, "UNSUPPORTED": 1, "WRONG": 1},
        "ok": False,
    }


@pytest.mark.parametrize("verdicts", [[], [replace(RIGHT, status=Status.UNSUPPORTED)]])
def test_a_report_in_which_nothing_passed_is_not_ok(verdicts):
    assert not report.totals(verdicts)["ok"]


# -- report.json ---------------------------------------------------------------------------------


def test_a_report_is_valid_json_even_with_nan_and_infinity(tmp_path):
    path = tmp_path / "r" / "report.json"
    report.write(path, [RIGHT, WRONG], device="sim")

    def no_constants(name):
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(path.read_text(), parse_constant=no_constants)
    jsonschema.validate(read, report.schema())
    assert [c["id"] for c in read["cases"]] == [RIGHT.id, WRONG.id]
    assert read["cases"][1]["outputs"][0]["got"] == "nan"
    assert read["cases"][1]["text"] == report.failure_text(WRONG)
    assert read["context"]["device"] == "sim"
    for key in ("id", "stage", "spec", "case", "status", "device", "headroom", "time_us"):
        assert key in read["cases"][0]


def test_the_schema_is_strict_and_knows_every_status():
    jsonschema.Draft202012Validator.check_schema(report.schema())
    assert set(report.schema()["$defs"]["status"]["enum"]) == set(Status)
    broken = report.as_report([RIGHT])
    broken["cases"][0]["status"] = "FINE"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, report.schema())


def test_an_invalid_report_leaves_the_old_one(tmp_path):
    path = tmp_path / "report.json"
    report.write(path, [RIGHT])
    before = path.read_bytes()
    with pytest.raises(jsonschema.ValidationError):
        report.write(path, [replace(RIGHT, id="nowhere")])
    assert path.read_bytes() == before


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    report.replace_file(path, b"old")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        report.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_process_killed_while_it_writes_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    report.replace_file(path, b"old")
    killed = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from harness import report
        report.os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        report.replace_file(Path({str(path)!r}), b"new" * 100000)
    """)
    done = subprocess.run([sys.executable, "-c", killed], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


# -- table and page ------------------------------------------------------------------------------


def test_the_page_shows_failures_and_headroom(tmp_path):
    report.write(tmp_path / "report.json", [RIGHT, WRONG])
    page = (tmp_path / "report.html").read_text()
    assert "1 of 2 passed" in page
    assert "first at (0, 95)" in page
    assert "0.250" in page
    assert 'class="over"' in page


def test_the_page_escapes_what_kernels_say(tmp_path):
    nasty = replace(WRONG, status=Status.CRASHED, message="<script>alert(1)</script>", outputs=())
    report.write(tmp_path / "report.json", [nasty])
    assert "<script>" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("headroom", "percent"),
    [(1.0, 100), (0.1, 66.7), (0.001, 0), (0.0, 0), (5.0, 100), ("inf", 100)],
)
def test_headroom_bars_are_logarithmic(headroom, percent):
    assert report._decades(headroom) == pytest.approx(percent, abs=0.1)


def test_the_table_has_a_row_a_case():
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.table([RIGHT, WRONG]))
    text = console.export_text()
    assert "small" in text
    assert "0.250" in text
    assert "12.5 us" in text
    assert "WRONG" in text


def test_the_table_of_many_has_a_row_a_spec_and_one_for_what_failed():
    from rich.console import Console

    many = [dataclasses.replace(RIGHT, case=f"case{n}", headroom=n / 100) for n in range(50)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.table([*many, WRONG]))
    rows = console.export_text().split("\n")[1:3]
    assert rows[0].split()[:2] == [RIGHT.spec, "50"]
    assert "0.490" in rows[0]
    assert "WRONG" in rows[1]
    assert WRONG.case in rows[1]
