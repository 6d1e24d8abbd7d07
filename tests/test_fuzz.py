"""The fuzzer finds planted faults, makes them small, prints cases that fail again, and counts."""

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import numpy as np
import pytest
from throwaway import Project

from harness import devices, fuzz, spec

ROOT = Path(__file__).resolve().parents[1]
FUZZED = """
    five = { n = 5, sim = true }
    [fuzz]
    n = { lo = 1, hi = 1000, sim = 200 }
"""
# Bad launchers of the throwaway project's kernel, each in its own way from n = 37 on.
BAD = """
    def late(x, *, y):
        twice(x, y=y)
        if x.size >= 37:
            y[x.size - 1] = 0

    def dies_late(x, *, y):
        twice(x, y=y)
        if x.size >= 37:
            os.abort()

    def hangs_late(x, *, y):
        if x.size >= 37:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            time.sleep(60)
        twice(x, y=y)

    def refuses_late(x, *, y):
        if x.size >= 37:
            raise NotImplementedError("n above 36 is not supported")
        twice(x, y=y)

    def refuses_all(x, *, y):
        raise NotImplementedError("nothing is supported")

    def zero(x, *, y):
        _twice[8, 32](x, y)
        y[0] = 0
"""


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path)
    made.spec("twice", cases=FUZZED)
    kernels = tmp_path / "mine" / "twice.py"
    made.write("mine/twice.py", kernels.read_text() + textwrap.dedent(BAD))
    return made


def run(project, *arguments):
    return project.kdtr("fuzz", "--device", "sim", "-n", "1", *arguments)


# -- what is found ---------------------------------------------------------------------------------


def test_a_planted_fault_is_found_made_small_and_fails_when_pasted(project):
    found = run(project, "--spec", "twice", "--kernel", "mine.twice:late")
    assert found.returncode == 1, found.stdout
    (case,) = re.findall(r"^(fuzz_\w+ = .*)$", found.stdout, re.M)
    ((name, values),) = tomllib.loads(case).items()
    assert values["n"] == 37
    assert "WRONG, 1 of 37 wrong" in found.stdout

    project.spec("twice", cases=FUZZED.replace("[fuzz]", f"{case}\n    [fuzz]"))
    pasted = ("gate", "--spec", "twice", "--case", name, "-n", "0")
    failed = project.kdtr(*pasted, "--kernel", "mine.twice:late")
    assert failed.returncode == 1
    assert "WRONG, 1 of 37 wrong" in failed.stdout
    assert project.kdtr(*pasted).returncode == 0

    (again,) = re.findall(r"^  again   kdtr (.*)$", found.stdout, re.M)
    project.spec("twice", cases=FUZZED)
    assert case in project.kdtr(*again.split()).stdout


def test_a_right_kernel_passes_and_it_is_told_what_was_drawn(project):
    done = run(project)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^twice: 12 judged, \d+\.\d s; n \d+\.\.\d+$", done.stdout, re.M), done.stdout
    assert "12 cases of 1 specs, 0 unsupported, 0 specs failed" in done.stdout


def test_a_refusal_is_unsupported_and_no_pass(project):
    some = run(project, "--kernel", "mine.twice:refuses_late", "--spec", "twice")
    assert some.returncode == 0, some.stdout
    judged, refused = map(int, re.search(r"(\d+) judged, (\d+) unsupp", some.stdout).groups())
    assert judged + refused == 12
    assert judged > 0
    assert refused > 0
    none = run(project, "--kernel", "mine.twice:refuses_all", "--spec", "twice")
    assert none.returncode == 1
    assert "NOTHING JUDGED twice: 0 judged, 12 unsupported" in none.stdout


def test_a_process_that_dies_costs_no_other_spec(project):
    project.spec("twice", cases=FUZZED)
    text = (project.folder / "specs" / "twice.toml").read_text()
    (project.folder / "specs" / "twice.toml").write_text(text.replace(":twice", ":dies_late"))
    project.spec("zebra", cases=FUZZED)
    done = run(project)
    assert done.returncode == 1
    assert "twice CRASHED: its process died; not made smaller" in done.stdout
    assert "zebra: 12 judged" in done.stdout
    (case,) = re.findall(r"^(fuzz_\w+ = .*)$", done.stdout, re.M)
    assert next(iter(tomllib.loads(case).values()))["n"] >= 37


def test_a_process_that_hangs_is_ended(project, monkeypatch):
    monkeypatch.setitem(fuzz.CASE_S, "sim", 1.0)
    monkeypatch.setattr(fuzz, "GRACE_S", 4.0)
    for name, value in project.environ.items():
        monkeypatch.setenv(name, value)
    job = {
        "path": str(project.folder / "specs" / "twice.toml"), "device": "sim", "seed": 1,
        "seconds": None, "examples": 12, "kernel": "mine.twice:hangs_late",
    }  # fmt: skip
    choice = devices.Choice("sim", (), "")
    run = fuzz.Fuzz(project.folder, choice, [job], 1, devices.Leases(()))
    (outcome,) = run.run(lambda one: None)
    assert outcome.status == "TIMEOUT"
    assert "n = " in outcome.case


def test_names_and_options_that_cannot_be_served_are_refused(project):
    for arguments, said in {
        ("--spec", "twise"): "there is twice",
        ("--kernel", "a:b"): "say which with --spec",
        ("--examples", "1", "--seconds", "1"): "not both",
        ("-n", "many"): "a number or auto",
    }.items():
        done = run(project, *arguments)
        assert done.returncode == 2, done.stdout
        assert said in done.stdout
    project.spec("twice")
    assert "no [fuzz] table in any spec" in run(project).stdout


# -- what is drawn ---------------------------------------------------------------------------------


def explored(path, **more):
    cases = []
    options = {"device": "sim", "seed": 7, "examples": 30, "tell": cases.append}
    return cases, fuzz.explore(spec.load(path), **(options | more))


@pytest.fixture
def scale(load):
    """scale(fuzz) writes the spec of broken.scale with that [fuzz] table; returns its path."""
    return lambda table: load(("[cases]", f"[fuzz]\n{table}[cases]")).path


def test_the_same_seed_draws_the_same_cases_whatever_is_loaded(scale, monkeypatch, tmp_path):
    path = scale("rows = [1, 900]\nfactor = [1.0, 2.0, -3.0]\n")
    first, outcome = explored(path)
    assert len(set(first)) == len(first) == outcome.judged == 30
    (tmp_path / "freshly_loaded.py").write_text("NUMBERS = [11, 222, 333, 444, 555, 666, 777, 888]")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("freshly_loaded")
    assert explored(path)[0] == first
    assert explored(path, examples=12)[0] == first[:12]
    assert explored(path, seed=8)[0] != first


def test_ranges_steps_texts_and_the_simulators_share(scale):
    path = scale(
        "rows = { lo = 8, hi = 4096, step = 8, sim = 60 }\n"
        "columns = { values = [1, 7, 99], sim = 9 }\n"
    )
    cases = [next(iter(tomllib.loads(c).values())) for c in explored(path)[0]]
    assert {c["rows"] for c in cases} <= set(range(8, 60, 8))
    assert {c.get("columns", 8) for c in cases} == {1, 7}
    assert all(c["sim"] for c in cases)
    drawn = fuzz.strategy(spec.load(path), simulated=False)
    assert spec.load(path).fuzz["rows"].hi == 4096
    assert drawn is not None


def test_time_is_a_budget_of_which_one_case_is_always_judged(scale):
    cases, outcome = explored(scale("rows = [1, 900]\n"), examples=None, seconds=0.0)
    assert (len(cases), outcome.judged) == (1, 1)
    cases, outcome = explored(scale("rows = [1, 900]\n"), examples=None, seconds=0.5)
    assert len(cases) == outcome.judged > 1


def test_what_no_one_gives_a_value_is_a_spec_error(scale):
    outcome = explored(scale("columns = [1, 9]\n"))[1]
    assert outcome.status == "SPEC_ERROR"
    assert "gives ['rows']" in outcome.text


def test_what_follows_comes_from_the_oracle(scale, monkeypatch):
    from broken import scale as oracle

    monkeypatch.setattr(
        oracle, "derived", lambda *, rows: {"columns": 2 * rows, "unknown": 1}, raising=False
    )
    for case in explored(scale("rows = [1, 900]\n"), examples=9)[0]:
        (values,) = tomllib.loads(case).values()
        assert values.get("columns", 8) == 2 * values["rows"]
        assert "unknown" not in values
    monkeypatch.setattr(oracle, "derived", lambda *, rows: 1 / 0)
    outcome = explored(scale("rows = [1, 900]\n"))[1]
    assert (outcome.status, outcome.judged) == ("GOLDEN_ERROR", 1)


def test_a_failing_case_whose_golden_is_constant_says_so(scale, monkeypatch):
    from broken import scale as oracle

    monkeypatch.setattr(oracle, "reference", lambda *, x, factor: {"y": np.zeros(x.shape)})

    def nothing(x, *, factor, y):
        pass

    outcome = explored(scale("rows = [1, 900]\n"), kernel=nothing)[1]
    assert outcome.status == "UNWRITTEN"
    (values,) = tomllib.loads(outcome.case).values()
    assert values["constant"] == "the golden of y is 0.0 everywhere"
    assert (values["rows"], values["draw"]) == (1, 1)


def test_a_failure_that_does_not_always_come_is_kept(scale):
    calls = []

    def moody(x, *, factor, y):
        from broken.scale import scale

        scale(x, factor=factor, y=y)
        calls.append(1)
        if len(calls) == 9:
            y[0, 0] = 0

    outcome = explored(scale("rows = [1, 900]\n"), kernel=moody)[1]
    assert outcome.status in ("WRONG", "NONDETERMINISTIC")
    assert outcome.case


# -- the specs of this project ---------------------------------------------------------------------


def test_every_kernel_spec_has_a_fuzz_table():
    specs = [spec.load(path) for path in spec.discover(ROOT)]
    assert not {s.stem for s in specs if s.stage == "kernel" and not s.fuzz}


def test_the_command_is_there():
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "fuzz", "--help"],
        cwd=ROOT, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert "--seconds" in done.stdout
