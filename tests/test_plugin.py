"""Specs as pytest items: collection, verdicts, lost workers, leases. Fake GPUs, the simulator."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jsonschema
import pytest
from throwaway import CASES, ROOT, SHORT, Project

from harness import devices, plugin, report, spec
from harness.seat import Seat

TWO = "odd = { n = 33, sim = true }\n"


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_cases_are_items_and_those_for_a_gpu_are_left_out(project):
    done = project.pytest("--collect-only", "-q")
    assert done.stdout.splitlines()[:2] == ["specs/twice.toml::five", "specs/twice.toml::odd"]
    assert "big" not in done.stdout


def test_a_case_that_cannot_run_here_fails_when_it_is_named(project):
    done = project.pytest("specs/twice.toml::big", "-q")
    assert done.returncode == 1
    assert "VACUOUS specs/twice.toml::big" in done.stdout
    assert "needs a GPU (it has no sim = true)" in done.stdout


@pytest.mark.parametrize("broken", ["stage = ", "stage = 'kernel'\nspeed = 3"])
def test_a_broken_spec_fails_every_stage(project, broken):
    project.write("specs/broken.toml", broken)
    done = project.pytest("-m", "layer", "-q")
    assert done.returncode == 1
    assert "SPEC_ERROR specs/broken.toml::spec" in done.stdout


def test_a_stage_without_cases_is_not_a_pass(project):
    assert project.pytest("-m", "model", "-q").returncode == 5


def test_a_pass_is_reported_and_what_did_not_run_is_said(project):
    done = project.pytest("-q", "--kdtr-report", "out")
    assert done.returncode == 0
    assert "1 cases in specs/ are not for this machine" in done.stdout
    found = project.report("out")
    jsonschema.validate(found, report.schema())
    assert project.statuses("out") == {"odd": "PASSED", "five": "PASSED"}
    assert found["context"]["device"] == "sim"
    assert (project.folder / "out" / "report.html").exists()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_wrong_kernel_is_told_in_plain_words(project, workers):
    arguments = ("-n", workers, "--kernel", "mine.twice:wrong", "--kdtr-report", "out")
    done = project.pytest(*arguments)
    assert done.returncode == 1
    assert "y: WRONG, 1 of 5 wrong" in done.stdout
    assert "first at (4,): got 0, want" in done.stdout
    assert "kdtr gate --spec twice --kernel mine.twice:wrong" in done.stdout
    assert "Traceback" not in done.stdout
    assert project.statuses("out") == {"odd": "PASSED", "five": "WRONG"}
    wrong = next(c for c in project.report("out")["cases"] if c["case"] == "five")
    assert wrong["outputs"][0]["first"] == [4]


def test_a_declared_refusal_is_neither_passed_nor_failed(project):
    project.spec("twice", cases='five = { n = 5, sim = true, unsupported = "tiny" }\n')
    done = project.pytest("--kernel", "mine.twice:refuses", "--kdtr-report", "out", "-rs")
    assert "1 skipped" in done.stdout
    assert project.statuses("out") == {"five": "UNSUPPORTED"}
    assert not project.report("out")["totals"]["ok"]


def test_a_case_that_kills_its_worker_crashes_alone(project):
    done = project.pytest(*"-n 1 --kernel mine.twice:dies --kdtr-report out".split())
    assert done.returncode == 1
    assert project.statuses("out") == {"odd": "PASSED", "five": "CRASHED"}
    assert "Fatal Python error: Aborted" in done.stdout
    assert "in dies" in done.stdout


def test_a_hang_that_no_signal_reaches_ends_its_worker_alone(project):
    project.write("conftest.py", SHORT)
    project.spec("twice", cases="five = { n = 5, sim = true, timeout_s = 0.2 }\n" + TWO)
    done = project.pytest(*"-n 1 --kernel mine.twice:hangs --kdtr-report out".split())
    assert done.returncode == 1
    assert project.statuses("out") == {"odd": "PASSED", "five": "TIMEOUT"}
    assert "twice.py:" in done.stdout


def test_a_hang_without_workers_ends_the_run_with_a_report(project):
    project.write("conftest.py", SHORT)
    project.spec("twice", cases="five = { n = 5, sim = true, timeout_s = 0.2 }\n" + TWO)
    done = project.pytest(*"--kernel mine.twice:hangs --kdtr-report out".split())
    assert done.returncode not in (0, 5)
    assert project.statuses("out") == {"five": "TIMEOUT"}
    assert "with -n 1 a new one would go on" in done.stdout


def test_a_poisoned_context_costs_the_worker_and_no_neighbour(project):
    project.write(
        "conftest.py",
        """
        from dataclasses import replace
        from harness import report, run
        judge = run.run_case
        def run_case(spec, case, **options):
            verdict = judge(spec, case, **options)
            if case.name != "five":
                return verdict
            message = "CUDA_ERROR_ILLEGAL_ADDRESS"
            return replace(verdict, status=report.Status.CRASHED, message=message, lost=True)
        run.run_case = run_case
        """,
    )
    done = project.pytest(*"-n 1 --kdtr-report out".split())
    assert done.returncode == 1
    assert project.statuses("out") == {"odd": "PASSED", "five": "CRASHED"}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout
    assert "1 failed, 1 passed" in done.stdout

    alone = project.pytest("--kdtr-report", "out")
    assert alone.returncode == 2
    assert project.statuses("out") == {"five": "CRASHED"}  # and nothing is said of the other
    assert "cost the process its GPU; use -n 1" in alone.stdout


def test_the_device_is_chosen_before_anything_imports_numba(project):
    project.write(
        "conftest.py",
        """
        import os, sys
        assert "numba" not in sys.modules
        assert os.environ["NUMBA_ENABLE_CUDASIM"] == "1"
        """,
    )
    assert project.pytest("--device", "sim", "--collect-only").returncode == 0


def test_cuda_without_a_gpu_is_an_error_and_no_pass(project):
    project.environ["CUDA_VISIBLE_DEVICES"] = ""
    done = project.pytest("--device", "cuda")
    assert done.returncode == 4
    assert "--device cuda: " in done.stdout


def test_a_session_without_specs_is_left_alone(project):
    (project.folder / "specs" / "twice.toml").unlink()
    project.write(
        "test_plain.py",
        "import os\ndef test_plain():\n    assert 'NUMBA_ENABLE_CUDASIM' not in os.environ\n",
    )
    done = project.pytest("-q")
    assert done.returncode == 0
    assert "kdtr" not in done.stdout


# -- leases: each worker writes down which GPUs it was given ---------------------------------------


def told(project):
    """(process, GPUs, n) of each launch, in order."""
    lines = (project.folder / "told").read_text().splitlines()
    return [tuple(line.split()) for line in lines]


def twelve():
    return "".join(f"c{n:02} = {{ n = {n}, sim = true }}\n" for n in range(4, 16))


def test_auto_is_a_worker_a_gpu_and_each_has_its_own(project):
    project.environ["KDTR_FAKE_GPUS"] = "GPU-a,GPU-b,GPU-c"
    project.environ["CUDA_VISIBLE_DEVICES"] = "GPU-c,GPU-a"
    project.spec("twice", cases=twelve())
    done = project.pytest(*"-n auto --maxschedchunk 1 --kernel mine.twice:tells -q".split())
    assert done.returncode == 0, done.stdout
    gpu_of = {process: gpu for process, gpu, _ in told(project)}
    assert sorted(gpu_of.values()) == ["GPU-a", "GPU-c"]


def test_the_replacement_of_a_dead_worker_gets_its_gpu(project):
    project.environ["KDTR_FAKE_GPUS"] = "GPU-a,GPU-b"
    project.write("die", "")
    sizes = [6, 6, 5, *9 * [4]]  # larger ones come first, and 5 dies: there is work left
    cases = [f"c{i:02} = {{ n = {n}, sim = true }}\n" for i, n in enumerate(sizes)]
    project.spec("twice", cases="".join(cases))
    arguments = "-n 2 --maxschedchunk 1 --kernel mine.twice:tells --kdtr-report out"
    project.pytest(*arguments.split())
    launches = told(project)
    died = next(process for process, _, n in launches if n == "5")
    gpu = {process: gpu for process, gpu, _ in launches}
    after = [p for p in gpu if p not in list(gpu)[:2]]
    assert [gpu[p] for p in after] == [gpu[died]]
    assert sorted(project.statuses("out").values()) == ["CRASHED"] + 11 * ["PASSED"]


def test_a_sick_gpu_is_left_out_and_named(project):
    project.environ["KDTR_FAKE_GPUS"] = "GPU-a:bad,GPU-b"
    done = project.pytest(*"-n 2 --kernel mine.twice:tells --kdtr-report out".split())
    assert done.returncode == 0, done.stdout
    assert {gpu for _, gpu, _ in told(project)} == {"GPU-b"}  # two workers take turns
    assert "GPU-a was quarantined: fake fault: bad" in done.stdout
    assert project.report("out")["context"]["quarantined"] == {"GPU-a": "fake fault: bad"}


def test_a_run_without_a_working_gpu_fails(project):
    project.environ["KDTR_FAKE_GPUS"] = "GPU-a:bad"
    done = project.pytest("-n", "1")
    assert done.returncode == 3
    assert "GPU-a is quarantined" in done.stdout


def test_a_run_without_workers_leases_too(project):
    project.environ["KDTR_FAKE_GPUS"] = "GPU-a:bad,GPU-b,GPU-c"
    assert project.pytest("--kernel", "mine.twice:tells").returncode == 0
    assert {gpu for _, gpu, _ in told(project)} == {"GPU-b"}


def test_cases_for_two_gpus_get_two(project):
    project.environ["KDTR_FAKE_GPUS"] = "GPU-a,GPU-b,GPU-c,GPU-d"
    project.spec("twice", cases=TWO + "pair = { n = 7, sim = true, gpus = 2 }\n")
    arguments = "-n auto --kdtr-gpus 2 --kernel mine.twice:tells --kdtr-report out"
    done = project.pytest(*arguments.split())
    assert done.returncode == 0, done.stdout
    assert project.statuses("out") == {"pair": "PASSED"}
    assert {gpus for _, gpus, _ in told(project)} <= {"GPU-a,GPU-b", "GPU-c,GPU-d"}


def test_the_longest_of_an_earlier_run_come_first(project):
    seconds = '{"sim": {"specs/twice.toml::odd": 9, "specs/twice.toml::quick": 1}}'
    project.write(".cache/kdtr/seconds.json", seconds)
    project.spec("twice", cases="quick = { n = 4, sim = true }\n" + CASES)
    done = project.pytest(*"-n 1 --kernel mine.twice:tells".split())
    assert done.returncode == 0
    order = list(dict.fromkeys(n for _, _, n in told(project)))
    assert order == ["33", "4", "5"]  # what was never seen before goes by its size


def test_a_turn_on_a_shared_gpu_begins_where_the_device_is_used(tmp_path, monkeypatch):
    """A golden must not be made with the GPU in hand, nor may the wait for it count as time."""
    monkeypatch.setenv(devices.LOCKS, str(tmp_path))
    seat = Seat("sim", (devices.Gpu("GPU-a"),))
    seat.shared = True
    overran, taken, done = [], threading.Event(), threading.Event()

    def neighbour(seconds, alone):
        with devices.turn("GPU-a", alone=alone):
            taken.set()
            time.sleep(seconds)
        done.set()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(neighbour, 0.6, True)
        taken.wait()
        with seat.watch("specs/x.toml::y", 0.3, lambda: overran.append(1)) as turn:
            with turn():  # waits longer than the limit
                assert done.is_set()
                pool.submit(neighbour, 0, False).result()  # there is room for another
                done.clear()
                large = pool.submit(neighbour, 0, True)  # but not for one that must be alone
                time.sleep(0.1)
                assert not done.is_set()
            large.result()
    assert not overran


def test_what_nobody_has_timed_is_ordered_by_size():
    loaded = spec.load(ROOT / "specs" / "argmax.toml")
    items = [
        SimpleNamespace(nodeid=name, spec=loaded, case=loaded.cases[name])
        for name in ("tiny", "k26", "k26_ties")
    ]
    assert devices.longest_first(*[plugin.expected(items)] * 2) == ["k26", "k26_ties", "tiny"]
