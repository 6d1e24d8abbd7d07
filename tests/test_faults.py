"""What must survive when a process is killed, the disk is full, or two runs do the same thing."""

import ast
import contextlib
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda import pathfinder
from throwaway import Project

from harness import devices, fuzz, golden, manifest, spec

ROOT = Path(__file__).resolve().parents[1]

# -- every file is replaced whole ------------------------------------------------------------------

# Each writes `folder`/NAME from scratch, and prints nothing.
WRITERS = {
    "report.json": """
        from harness import report
        report.write(folder / "report.json", [])
    """,
    "report.html": """
        from harness import report
        dying.skip += 1  # the first is report.json
        report.write(folder / "report.json", [])
    """,
    "golden.safetensors": """
        import numpy as np
        from harness import golden
        made = golden.Golden({"x": np.arange(9.0)}, {}, {})
        golden._write_cache(folder / "golden.safetensors", made, "")
    """,
    "goldens/manifest.toml": """
        from harness import manifest, spec
        manifest.generate([spec.load(folder / "specs" / "twice.toml")], "a reason")
    """,
    "ci/receipts/h200.json": """
        from harness import receipts, report, sources, spec
        each = spec.load(folder / "specs" / "twice.toml")
        verdicts = [
            report.Verdict(
                each.case_id(case), each.stage, each.stem, case.name, report.Status.PASSED,
                "NVIDIA H200", digest=sources.case_digest(each, case),
            )
            for case in each.cases.values()
        ]
        gpus = [{"uuid": "GPU-1", "name": "NVIDIA H200", "slug": "h200", "driver": "580.1"}]
        ran_on = {v.id: ["GPU-1"] for v in verdicts}
        found = report.as_report(verdicts, device="cuda", gpus=gpus, ran_on=ran_on)
        receipts.record(folder, found, [each])
    """,
    "model.kdtr": """
        import numpy as np
        from engine import tensorfile
        tensorfile.write(folder / "model.kdtr", {"x": np.arange(9.0)}, {})
    """,
    "run.npz": """
        import numpy as np
        from harness import cli_forward
        cli_forward.save_arrays(folder / "run.npz", {"x": np.arange(9.0)})
    """,
    "sweep.csv": """
        from harness import cli_quant
        cli_quant.write_csv(folder / "sweep.csv", [])
    """,
}
KILLED = """
    import os, signal, sys
    from pathlib import Path
    folder = Path(sys.argv[1])
    os.chdir(folder)

    def dying(handle):
        if dying.skip == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # all is written, nothing has been replaced
        dying.skip -= 1

    dying.skip = 0
    os.fsync = dying
"""


def run(project, script):
    text = textwrap.dedent(KILLED) + textwrap.dedent(script)
    environ = {**project.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{project.folder}"}
    return subprocess.run(
        [sys.executable, "-c", text, project.folder],
        env=environ, text=True, capture_output=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_a_process_killed_before_it_renames_leaves_the_old_file(tmp_path, name):
    project = Project(tmp_path)
    old = project.write(name, "[old]\n" if name.endswith("toml") else '{"cases": {}}')
    if name.startswith("ci/"):
        (tmp_path / name).unlink()
        assert run(project, "dying.skip = 9\n" + textwrap.dedent(WRITERS[name])).returncode == 0
    before = old.read_bytes()
    done = run(project, WRITERS[name])
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert old.read_bytes() == before
    assert run(project, "dying.skip = 9\n" + textwrap.dedent(WRITERS[name])).returncode == 0


@pytest.mark.parametrize("name", [n for n in WRITERS if n != "report.html"])
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, name):
    project = Project(tmp_path)
    folder = (tmp_path / name).parent
    full = """
        import errno

        def full(handle):
            raise OSError(errno.ENOSPC, "No space left on device")

        os.fsync = full
    """
    old = project.write(name, "[old]\n" if name.endswith("toml") else "{}")
    if name.startswith("ci/"):
        old.unlink()
    there, before = sorted(folder.iterdir()), old.read_bytes() if old.exists() else None
    done = run(project, textwrap.dedent(full) + textwrap.dedent(WRITERS[name]))
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert sorted(p for p in folder.iterdir() if p.name != ".cache") == there
    assert (old.read_bytes() if old.exists() else None) == before


# What else opens files to write: (file, function), and why a half-written one does no harm.
WRITES = {
    ("engine/files.py", "replacing"): "the way of the engine",
    ("harness/report.py", "replace_file"): "inside `replacing`, the way of the harness",
    ("harness/cli_forward.py", "save_arrays"): "inside `replacing`",
    ("harness/cli_quant.py", "write_csv"): "inside `replacing`",
    ("harness/cli_quant.py", "sweep_plot"): "inside `replacing`",
    ("harness/bench_report.py", "_draw"): "inside `replacing`",
    ("harness/seat.py", "watch"): "last words, read when the writer is dead",
    ("harness/seat.py", "leave"): "last words",
    ("harness/bench_items.py", "write"): "rows of a run, appended and read by the same run",
    ("ci/same_sass.py", "dump"): "in a temporary folder, read by the process that asked for it",
    ("harness/mutate.py", "file"): "a mutant in a folder of this run",
    ("goldens/calibrate.py", "main"): "beside the file, which it then replaces",
}
WRITING = {"write_text", "write_bytes", "savefig", "savez", "savez_compressed", "tofile"}


def writes(path):
    """Functions of a file in which something is opened for writing by name.

    `with ... as log` is what another process prints.
    """
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        nodes = list(ast.walk(function))
        opened = [item for node in nodes if isinstance(node, ast.With) for item in node.items]
        logs = [
            item.context_expr for item in opened if getattr(item.optional_vars, "id", 0) == "log"
        ]
        for call in nodes:
            if not isinstance(call, ast.Call) or call in logs:
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            mode = [a.value for a in call.args if isinstance(a, ast.Constant)]
            opens = name == "open" and any(isinstance(m, str) and set(m) & set("wax") for m in mode)
            if name in WRITING or opens:
                yield function.name


def test_every_writer_goes_through_the_one_way():
    tops = ("engine", "harness", "goldens", "ci")
    files = [path for top in tops for path in ROOT.glob(f"{top}/**/*.py")]
    found = {(str(path.relative_to(ROOT)), name) for path in files for name in writes(path)}
    assert found == set(WRITES)


# -- two runs at once ------------------------------------------------------------------------------


def generate(path, barrier):
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    loaded = spec.load(path)
    barrier.wait(30)
    manifest.generate([loaded], "at once")


def test_runs_that_bless_goldens_at_the_same_time_lose_none(tmp_path, monkeypatch):
    project = Project(tmp_path)
    (tmp_path / "goldens").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    stems = [f"twice{i}" for i in range(4)]
    paths = [project.spec(stem, cases="five = { n = 5, sim = true }\n") for stem in stems]
    (tmp_path / "specs" / "twice.toml").unlink()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(paths))
    runs = [context.Process(target=generate, args=(path, barrier)) for path in paths]
    for each in runs:
        each.start()
    for each in runs:
        each.join(60)
        assert each.exitcode == 0
    known = manifest._read(tmp_path / "goldens" / "manifest.toml")
    assert sorted(known) == stems
    assert manifest.verify([spec.load(path) for path in paths]) == []
    for name in [n for n in sys.modules if n.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_a_golden_whose_maker_was_killed_is_made_by_the_next(tmp_path):
    """The lock goes with the process that held it; what it left half-written is not read."""
    project = Project(tmp_path)
    make = """
        from harness import golden, spec
        each = spec.load(folder / "specs" / "twice.toml")
        made = golden.make(each, each.cases["five"], cache_dir=folder / "c")
        assert made.notes == (), made.notes
    """
    assert run(project, make).returncode == -signal.SIGKILL
    left = [p.name for p in (tmp_path / "c").iterdir() if p.suffix == ".safetensors"]
    assert all(name.startswith(".") for name in left)
    done = run(project, "dying.skip = 9\n" + textwrap.dedent(make))
    assert done.returncode == 0, done.stderr
    kept = [p for p in (tmp_path / "c").glob("*.safetensors") if not p.name.startswith(".")]
    assert len(kept) == 1
    assert golden._read_cache(kept[0])[0] is not None


# -- fuzzing ---------------------------------------------------------------------------------------


def children(pid):
    """Process ids of the children of all its threads, of which some may end meanwhile."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += task.read_text().split()
    return found


IN_THE_BACKGROUND = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]  # as a shell starts `kdtr fuzz &`


def interrupted(process: subprocess.Popen) -> str:
    """What a process says that is sent SIGINT; one that does not hear it is ended all the same."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it went on after SIGINT; until then it said {process.communicate()[0]!r}")


@pytest.mark.parametrize("shell", [[], IN_THE_BACKGROUND], ids=["", "background"])
def test_an_interrupted_fuzz_ends_its_workers_and_is_no_pass(tmp_path, shell):
    project = Project(tmp_path)
    project.spec("twice", cases="five = { n = 5, sim = true }\n[fuzz]\nn = [1, 500]\n")
    process = subprocess.Popen(
        [*shell, sys.executable, "-m", "harness.cli", "fuzz", "--device", "sim", "--seconds", "60"],
        cwd=tmp_path, env=project.environ, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert "device: sim" in process.stdout.readline()
    while not (workers := children(process.pid)):  # threads start them
        time.sleep(0.01)
    said = interrupted(process)
    assert process.returncode == 130, said
    assert "interrupted: 1 specs were not explored to the end" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize("shell", [[], IN_THE_BACKGROUND], ids=["", "background"])
def test_an_interrupted_mutate_does_not_wait_for_what_is_being_judged(tmp_path, shell):
    project = Project(tmp_path)
    project.write("mine/twice.py", "import time\ndef twice(x, *, y):\n    time.sleep(99)\n")
    process = subprocess.Popen(
        [*shell, sys.executable, "-m", "harness.cli", "mutate", "--device", "sim"],
        cwd=tmp_path, env=project.environ, text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    while not children(process.pid):
        time.sleep(0.01)
    said = interrupted(process)
    assert process.returncode == 130, said
    assert "CERTIFIED" not in said


def test_a_fuzz_worker_that_starts_while_the_run_ends_is_ended(tmp_path, monkeypatch):
    stop, jobs, done = threading.Event(), queue.SimpleQueue(), queue.SimpleQueue()
    jobs.put({"path": "x.toml", "device": "sim", "seed": 0})
    seen = []

    class Late:
        def __init__(self, *_):
            stop.set()

        def explore(self, job):
            seen.append(job)

        def close(self):
            seen.append("closed")

    monkeypatch.setattr(fuzz, "_Worker", Late)
    run = fuzz.Fuzz(tmp_path, devices.Choice("sim", [], ""), [], 1, devices.Leases([], 1))
    run.serve(jobs, done, stop)
    assert seen == ["closed"]
    assert done.empty()


def test_a_signal_that_wakes_nobody_still_interrupts_a_fuzz_run(tmp_path, monkeypatch):
    """As when Ctrl-C comes just before the wait for an outcome: that wait is not cut short."""
    ended, heard = threading.Event(), []

    class Unheard:
        def __init__(self, *_):
            self.process = self

        def explore(self, job):
            signal.raise_signal(signal.SIGINT)  # in a thread, so the main one sleeps on
            heard.append(ended.wait(5))
            raise RuntimeError("it was killed")

        def kill(self):
            ended.set()

        def poll(self):
            return 0

        def close(self):
            pass

    monkeypatch.setattr(fuzz, "_Worker", Unheard)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background
    jobs = [{"path": "x.toml", "device": "sim", "seed": 0}]
    run = fuzz.Fuzz(tmp_path, devices.Choice("sim", [], ""), jobs, 1, devices.Leases([], 1))
    try:
        with pytest.raises(KeyboardInterrupt):
            run.run(lambda outcome: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [True]


# -- the cache of machine code ---------------------------------------------------------------------


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """compiled() asks a kernel for its machine code: the answer, and how often it was compiled."""
    from engine import device

    monkeypatch.setenv("KDTR_CACHE", str(tmp_path))
    calls = []

    def compile_(self, arch):
        calls.append(arch)
        return b"machine code", "entry"

    monkeypatch.setattr(device.Kernel, "_compile", compile_)

    @device.kernel(threads=32)
    def nothing(x: device.ptr[device.u32]):
        pass

    return lambda: (nothing.cubin("sm_90a"), len(calls))


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty"])
def test_damaged_machine_code_is_found_by_its_hash_and_made_again(
    compiled, tmp_path, capsys, damage
):
    right = (b"machine code", "entry")
    assert compiled() == compiled() == (right, 1)
    (path,) = tmp_path.rglob("*.cubin")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    elif damage == "truncate":
        del content[-3:]
    else:
        content.clear()
    path.write_bytes(bytes(content))
    assert compiled() == (right, 2)
    assert "was damaged, and is made again" in capsys.readouterr().err
    assert compiled() == (right, 2)


TOOLS = {"nvidia-nvvm": "nvvm", "nvidia-nvjitlink": "nvJitLink"}  # wheel: library


@pytest.mark.parametrize("changed", ["numba-cuda", *TOOLS])
def test_another_compiler_or_linker_makes_machine_code_again(compiled, monkeypatch, changed):
    versions = dict.fromkeys(("numba", "numpy", "numba-cuda", *TOOLS), "1.2.3")
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    assert compiled()[1] == compiled()[1] == 1
    versions[changed] = "1.2.4"
    assert compiled()[1] == compiled()[1] == 2


@pytest.fixture
def no_wheels(monkeypatch):
    """The toolkit is not installed as wheels."""

    def version(name, known=metadata.version):
        if name in TOOLS:
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("changed", TOOLS.values())
def test_a_toolkit_that_is_no_wheel_counts_by_its_files(
    compiled, no_wheels, tmp_path, monkeypatch, changed
):
    for library in TOOLS.values():
        (tmp_path / library).touch()
    monkeypatch.setattr(
        pathfinder, "load_nvidia_dynamic_lib",
        lambda library: SimpleNamespace(abs_path=str(tmp_path / library)),
    )  # fmt: skip
    assert compiled()[1] == compiled()[1] == 1
    os.utime(tmp_path / changed, (1, 1))
    assert compiled()[1] == compiled()[1] == 2


def test_without_a_toolkit_the_cache_is_still_asked(compiled, no_wheels, monkeypatch):
    def nothing(library):
        raise pathfinder.DynamicLibNotFoundError(library)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", nothing)
    assert compiled()[1] == compiled()[1] == 1


def test_a_cache_that_is_no_folder_costs_the_compiler_time_and_no_launch(compiled, monkeypatch):
    monkeypatch.setenv("KDTR_CACHE", os.devnull)
    assert compiled() == ((b"machine code", "entry"), 1)
    assert compiled() == ((b"machine code", "entry"), 2)


def test_machine_code_that_may_not_be_read_is_made_again(compiled, monkeypatch):
    right = (b"machine code", "entry")
    assert compiled() == (right, 1)

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    assert compiled() == (right, 2)


def test_a_full_disk_costs_the_compiler_time_and_no_launch(compiled, tmp_path, monkeypatch):
    from engine import files

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    assert compiled() == ((b"machine code", "entry"), 1)
    assert compiled() == ((b"machine code", "entry"), 2)
    assert not list(tmp_path.rglob("*.cubin"))
    assert not list(tmp_path.rglob("*.partial"))
