"""ci.sanitize around a stand-in for compute-sanitizer: what counts as clean, and what is noted."""

import json
import os
import sys
from pathlib import Path

import pytest

from harness import receipts, report, sources, spec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ci"))
import sanitize

ROOT = Path(__file__).parents[1]

TOOL = """\
#!/usr/bin/env bash
[ "$1" = --version ] && {{ echo "Version 2025.3.1.0 (build 1)"; exit; }}
while [ "$1" != -m ]; do [ "$1" = --log-file ] && log=$2; python=$1; shift; done
"$python" "$@"; echo "{summary}" > $log; exit {code}
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a compute-sanitizer on PATH that runs the command and ends with this summary."""

    def put(summary="========= ERROR SUMMARY: 0 errors", code=0):
        file = tmp_path / "compute-sanitizer"
        file.write_text(TOOL.format(summary=summary, code=code))
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
        return str(file)

    return put


def run(tool_path, ids, workers=2, tools=("memcheck",)):
    return sanitize.run_tools(tool_path, list(tools), ids, workers)


IDS = ["specs/argmax.toml::tiny", "specs/rms_norm.toml::one_column"]


def test_cases_that_pass_without_errors_are_clean(tool):
    found = run(tool(), IDS)["memcheck"]
    assert found.clean
    assert sorted(found.cases) == IDS


@pytest.mark.parametrize(
    ("summary", "code", "errors"),
    [
        ("========= ERROR SUMMARY: 3 errors", 86, 3),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 86, 2),
        ("", 0, 0),  # it never came to its summary
    ],
)
def test_what_a_tool_finds_is_not_clean(tool, summary, code, errors):
    found = run(tool(summary, code), IDS[:1])["memcheck"]
    assert not found.clean
    assert found.errors == errors
    assert IDS[0] in found.text[0]


def test_a_case_without_a_verdict_fails(tool):
    found = run(tool(), ["specs/argmax.toml::no_such_case"])["memcheck"]
    assert not found.clean
    assert "no verdict" in found.failed["specs/argmax.toml::no_such_case"]


def test_small_cases_are_those_of_the_simulator():
    every = sanitize.small_cases([])
    assert set(IDS) <= set(every)
    assert "specs/argmax.toml::k26" not in every
    assert all(i.startswith("specs/argmax.toml::") for i in sanitize.small_cases(["argmax"]))


def test_every_case_is_in_one_chunk_of_at_most_so_many():
    ids = [f"specs/{stem}.toml::{n}" for stem, count in (("a", 7), ("b", 2)) for n in range(count)]
    parts = sanitize.chunks(ids, 3)
    assert sorted(i for part in parts for i in part) == ids
    assert all(len(part) <= 3 for part in parts)


def test_a_clean_run_is_noted_in_the_rows_of_the_same_sources(tmp_path):
    argmax = sources.case_digests(spec.load(ROOT / "specs" / "argmax.toml"))["tiny"]
    rows = [
        {"id": IDS[0], "status": "PASSED", "digest": argmax},
        {"id": IDS[1], "status": "PASSED", "digest": "of other sources"},
    ]
    file = tmp_path / "ci" / "receipts" / "h200.json"
    file.parent.mkdir(parents=True)
    rows = [{**row, "seal": report.seal(row)} for row in rows]
    file.write_text(json.dumps({"version": 1, "gpu": "h200", "cases": rows}))
    clean = {i: {"digest": argmax, "tools": ["memcheck", "racecheck"]} for i in IDS}
    assert receipts.note_sanitizer(tmp_path, {"gpu": "h200", "clean": clean}) == 1
    noted = receipts.read(tmp_path, "h200")
    assert noted[IDS[0]]["sanitizer"] == ["memcheck", "racecheck"]
    assert "sanitizer" not in noted[IDS[1]]
    assert receipts.note_sanitizer(tmp_path, {"gpu": "b200", "clean": clean}) == 0
