"""Mutants on a GPU: what must die there, what may live, what was not judged. No GPU is needed."""

import dataclasses
import os
import signal
import textwrap
import threading
from concurrent.futures import Future

import pytest
from test_mutate import HALF, HALVES, KERNEL, with_mutants
from throwaway import Project

from harness import cli_mutate, mutants, mutate, mutate_gpu, nursery, spec
from harness.mutants import Planted
from harness.mutate_gpu import DIES, FAILED, NOT_JUDGED, REFUSED, SAME, SIMULATORS
from harness.report import Status

KILLED = {"outcome": "killed", "case": "five", "verdict": "WRONG"}
LIVES = {"outcome": "survived", "why": "3 cases pass"}
FOR_A_GPU = {"outcome": "for a GPU", "why": "minutes"}
EQUIVALENT = {"outcome": "equivalent", "why": "it is the same"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    made = Project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", made.environ["PYTHONPATH"])
    return made


def loaded(project, stem):
    return spec.load(project.folder / "specs" / f"{stem}.toml")


@pytest.mark.parametrize(
    ("row", "now", "group", "why"),
    [
        (KILLED, KILLED, DIES, ""),
        (KILLED, LIVES, FAILED, "five gives WRONG in the simulator; here 3 cases pass"),
        ({**KILLED, "verdict": "UNWRITTEN"}, LIVES, FAILED, "five gives UNWRITTEN"),
        ({**KILLED, "verdict": "MUTATED_INPUT"}, LIVES, FAILED, "five gives MUTATED_INPUT"),
        ({**KILLED, "verdict": "CRASHED"}, LIVES, SIMULATORS, "CRASHED by five; here 3 cases"),
        ({**KILLED, "verdict": "OUT_OF_BOUNDS"}, LIVES, SIMULATORS, "OUT_OF_BOUNDS by five"),
        ({**KILLED, "verdict": "NONDETERMINISTIC"}, LIVES, SIMULATORS, "NONDETERMINISTIC by"),
        ({**KILLED, "verdict": "NONFINITE"}, LIVES, SIMULATORS, "NONFINITE by five"),
        (FOR_A_GPU, KILLED, DIES, ""),
        (FOR_A_GPU, {**KILLED, "verdict": "TIMEOUT"}, NOT_JUDGED, "no verdict in time"),
        (FOR_A_GPU, LIVES, FAILED, "it is for a GPU to kill, and lives on this one: 3 cases pass"),
        (FOR_A_GPU, {"outcome": "INVALID", "why": "no type"}, FAILED, "lives on this one: no type"),
        (EQUIVALENT, EQUIVALENT, SAME, ""),
        (EQUIVALENT, KILLED, FAILED, "five gives WRONG, but it is the same"),
        (KILLED, {"outcome": "INVALID", "why": "no type"}, REFUSED, "no type"),
    ],
)
def test_what_must_die_on_a_gpu_and_what_may_live(row, now, group, why):
    found = mutate_gpu.ruled(row, Planted("m", "comparison", "x", "", 0), now)
    assert found[0] == group
    assert why in found[1]


def test_a_barrier_that_is_missing_is_luck_whatever_the_simulator_said_of_it(project):
    made = Planted("m", "barrier", "x", "", 0, waits=True)
    assert mutate_gpu.ruled(KILLED, made, LIVES)[0] == SIMULATORS

    own = (
        spec.Mutant("gone", "cuda.syncthreads()", "pass"),
        spec.Mutant(
            "beside", "cuda.syncthreads()\n    if i < n", "cuda.syncthreads()\n    if i > n"
        ),
    )
    one, text = dataclasses.replace(loaded(project, "twice"), mutants=own), textwrap.dedent(KERNEL)
    found = mutants.named(one, {"mine.twice": text})
    assert {m.name: m.waits for m in found} == {"gone": True, "beside": False}
    found = mutants.generic(dataclasses.replace(one, mutants=()), "mine.twice", text)
    assert {m.operator for m in found if m.waits} == {"barrier"}


def test_what_a_gpu_need_not_show_is_listed_with_its_reason():
    made = Planted("m", "named", "x", "", 0, sim="it is the stand-in's")
    found = mutate_gpu.ruled(KILLED, made, LIVES)
    assert found == (SIMULATORS, "it is the stand-in's; here 3 cases pass")
    assert mutate_gpu.ruled(KILLED, made, KILLED)[0] == DIES


def test_what_ends_up_in_machine_code_is_told_from_host_code():
    assert mutants.has_device_code(textwrap.dedent(KERNEL))
    assert mutants.has_device_code('exp2 = instruction("ex2.approx.ftz.f32 $0, $1;", [f32], [f32])')
    assert not mutants.has_device_code("def launch(x, *, y):\n    other.launch(x)\n")


# -- the whole way, the simulator standing in for a GPU --------------------------------------------


@pytest.fixture
def certified(project):
    """A project with a certificate, and its one spec."""
    project.write("mine/halves.py", HALVES)
    project.write("mine/half.py", HALF)
    with_mutants(project, only=("a_third", "explained", "timing"))
    assert project.kdtr("mutate", "--spec", "half", "-n", "2").returncode == 0
    return loaded(project, "half")


def found_on(pool, certified, monkeypatch):
    monkeypatch.setattr(mutate, "Pool", pool)
    found = []
    root = certified.path.parents[1]
    mutate_gpu.check(root, [certified], workers=2, show=found.append)
    return found[0]


class Stand_in(mutate.Pool):
    """Judges in processes of their own, as on a GPU, and keeps the jobs."""

    jobs: list

    def _once(self, job):
        self.jobs.append(job)
        return super()._once(job)

    def _start(self, *arguments, **variables):
        return super()._start(*arguments, NUMBA_ENABLE_CUDASIM="1", **variables)


def test_a_survivor_that_is_for_a_gpu_fails_and_the_dead_are_counted(certified, monkeypatch):
    monkeypatch.setattr(Stand_in, "jobs", [], raising=False)
    found = found_on(Stand_in, certified, monkeypatch)
    assert not found.ok
    assert found.counts == {DIES: found.counts[DIES], SAME: 1, FAILED: 1}
    assert found.counts[DIES] == found.verdicts.total() > 5
    (said,) = found.said
    assert said.startswith("FAILED: timing: it is for a GPU to kill, and lives on this one: 2 cas")
    assert str(found).startswith(f"half: {found.counts[DIES]} die (")

    # machine code is kept by the text in the tree, where no mutant is: each has a cache of its own
    own = [job["cache"] for job in Stand_in.jobs if job["module"]]
    assert len({*own}) == len(own) == len(Stand_in.jobs) - 1
    honest = next(job for job in Stand_in.jobs if not job["module"])
    assert "cache" not in honest
    assert {"five", "odd"} >= {*honest["cases"]}


def test_where_the_kernel_as_it_is_fails_no_mutant_counts_as_dead(certified, monkeypatch):
    class Broken(mutate.Pool):
        def _once(self, job):
            return nursery.lost(job, Status.CRASHED, "no driver")

    found = found_on(Broken, certified, monkeypatch)
    assert found.counts.keys() == {NOT_JUDGED}
    assert all("gives CRASHED for the kernel as it is (no driver); " in said for said in found.said)
    for name in ("a_third", "explained", "timing"):
        assert sum(f"; {name}" in said for said in found.said) == 1
    assert not found.ok


def test_a_stale_certificate_is_not_judged(certified, monkeypatch):
    (certified.path.parents[1] / "mine" / "half.py").write_text("# other\n")
    certified = spec.load(certified.path)
    found = found_on(mutate.Pool, certified, monkeypatch)
    assert not found.ok
    assert "not judged: STALE" in str(found)


def test_what_is_killed_with_the_run_is_no_dead_mutant(tmp_path):
    pool = mutate.Pool(tmp_path, 1, "cuda")
    started = threading.Event()

    class Hangs:
        returncode = -9

        def communicate(self, *_, **__):
            started.set()
            while not pool._ended:
                pass
            return "", ""

    pool._start = lambda *_, **__: Hangs()
    verdict: Future = pool.submit({"limits": {}, "cases": ["five"]})
    started.wait()
    pool.close(now=True)
    with pytest.raises(RuntimeError, match="the run ended"):
        verdict.result()


@pytest.fixture
def interrupts():
    """SIGINT as `kdtr` sets it: a shell has it ignored in what it starts with `&`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_what_was_not_judged(certified, monkeypatch, capsys, number):
    done = mutate_gpu.Found("half")
    done.add(DIES)
    other = spec.load(certified.path.with_name("twice.toml"))

    def check(*_, show, **__):
        show(done)
        os.kill(os.getpid(), number)
        threading.Event().wait(5)

    monkeypatch.setattr(mutate_gpu, "check", check)
    before = signal.getsignal(signal.SIGTERM)
    code = cli_mutate._on_gpu(certified.path, [certified, other], "one GPU", 1, 1.0)
    said = capsys.readouterr().out
    assert code == 130
    assert "half: 1 die" in said
    assert said.endswith(
        "interrupted\n1 of 2 specs judged: 1 die\nnot judged to the end: --spec twice\n"
    )
    assert signal.getsignal(signal.SIGTERM) == before
