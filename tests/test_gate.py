"""The gate in one piece: stages in order, receipts, shards, exit codes. All in the simulator."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from throwaway import CASES, Project

from harness import controller, devices, merge, receipts, report, spec, stages

sys.path.insert(0, str(stages.Path(__file__).resolve().parents[1] / "ci"))
import gate as ci_gate


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def importable(project, monkeypatch):
    """The project, with its modules importable here, for what needs no process of its own."""
    monkeypatch.syspath_prepend(str(project.folder))
    yield project
    for name in [n for n in sys.modules if n == "mine" or n.startswith("mine.")]:
        del sys.modules[name]


def verdict(each, case, status=report.Status.PASSED, **more):
    from harness import sources

    return report.Verdict(
        id=each.case_id(case),
        stage=each.stage,
        spec=each.stem,
        case=case.name,
        status=status,
        device="NVIDIA H200",
        digest=sources.case_digest(each, case),
        time_us=12.5,
        **more,
    )


def one_spec(project):
    return spec.load(project.folder / "specs" / "twice.toml")


# -- a run -----------------------------------------------------------------------------------------


def test_a_pass_prints_progress_a_table_and_what_did_not_run(project):
    project.environ["PYTEST_ADDOPTS"] = "-k nothing"
    done = project.gate(workers=1)
    assert done.returncode == 0, done.stdout
    assert "stage kernel: 2 cases on the simulator" in done.stdout
    assert "1/2 PASSED" in done.stdout
    assert "missing receipt of any GPU: 1\n    twice.toml: big" in done.stdout
    assert "2 passed, 0 failed, 1 not for this machine" in done.stdout
    found = project.report()
    assert [set(c) >= {"id", "stage", "spec", "case", "status", "device", "headroom", "time_us"}
            for c in found["cases"]] == [True, True]  # fmt: skip
    assert ci_gate_of(project) == 0


def ci_gate_of(project):
    """Exit code of ci/gate.py on the report that the project has."""
    return project.run(str(stages.Path(ci_gate.__file__)), "report/report.json").returncode


def test_the_first_stage_that_fails_ends_the_run(project):
    project.spec("twice", cases='five = { n = 5, sim = true, unsupported = "no" }\n')
    project.spec("block", stage="layer")
    done = project.gate()
    assert done.returncode == 1
    assert "specs/twice.toml::five SPEC_ERROR" in done.stdout
    assert "stage layer did not run: stage kernel failed" in done.stdout
    assert ci_gate_of(project) == 1
    assert project.gate("--keep-going").returncode == 1
    assert project.statuses()["block.odd"] == "PASSED"


def test_a_stage_refuses_without_the_earlier_ones_receipt(project):
    project.spec("block", stage="layer", cases="five = { n = 5, sim = true }\n")
    refused = project.gate("--stage", "layer")
    assert refused.returncode == 1
    assert "layer refused: stage kernel has not passed here on sim" in refused.stdout
    assert project.gate("--stage", "kernel").returncode == 0
    assert project.gate("--stage", "layer").returncode == 0
    project.write("mine/oracle.py", (project.folder / "mine/oracle.py").read_text() + "\n# new\n")
    stale = project.gate("--stage", "layer")
    assert stale.returncode == 1
    assert "stage kernel passed on sim with other sources" in stale.stdout
    assert project.gate("--stage", "layer", "--out-of-order").returncode == 0


JUNK = ["[]", '{"sim": 3}', '{"sim": []}', '{"sim": {"sources": 3}}', '{"sim": {"a": "b"}}', "{"]


@pytest.mark.parametrize("content", JUNK)
def test_what_a_cache_says_in_no_way_that_is_known_it_does_not_say(importable, content):
    importable.spec("block", stage="layer")
    importable.write(".cache/stages/kernel.json", content)
    (said,) = receipts.unmet(
        importable.folder, "layer", "sim", stages.load_specs(importable.folder)
    )
    assert "stage kernel has not passed here on sim" in said
    importable.write(str(controller.SECONDS), content.replace("sources", "specs/x.toml::y"))
    run = object.__new__(controller.Run)
    run.config = SimpleNamespace(rootpath=importable.folder)
    run.choice = devices.Choice("sim", (), "")
    assert run.earlier() == ({"specs/x.toml::y": 3} if "sources" in content else {})


def test_a_broken_spec_fails_a_stage_that_is_not_its_own(project):
    project.write("specs/broken.toml", "stage = 'layer'\n")
    done = project.gate("--stage", "kernel")
    assert done.returncode == 1
    assert "specs/broken.toml::spec SPEC_ERROR" in done.stdout


def test_a_spec_that_pytest_cannot_be_asked_for_costs_no_other_its_verdict(project):
    (project.folder / "specs" / "folder.toml").mkdir()
    (project.folder / "specs" / "dangling.toml").symlink_to("nowhere")
    for name in ("a[b].toml", "a::b.toml", "a b.toml", os.fsdecode(b"\xff.toml")):
        (project.folder / "specs" / name).write_text("")
    done = project.gate()
    assert done.returncode == 1
    assert done.stdout.count("SPEC_ERROR on none") == 6
    assert "specs/folder.toml::spec SPEC_ERROR" in done.stdout
    assert "a name of letters" in done.stdout
    found = project.statuses()
    assert len(found) == 6, found

    kept = project.gate("--keep-going")
    assert "2 passed, 6 failed" in kept.stdout, kept.stdout


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkout_that_cannot_be_written_to_costs_time_alone(project, tmp_path_factory, workers):
    (project.folder / ".cache").write_text("in the way, as root may write everywhere")
    reports = tmp_path_factory.mktemp("reports")
    done = project.gate("--report", str(reports), workers=workers)
    assert done.returncode == 0, done.stdout
    assert "2 passed, 0 failed" in done.stdout
    assert "is not kept for later stages" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_report_folder_that_cannot_be_made_is_told_before_anything_runs(project):
    project.write("taken", "")
    done = project.gate("--report", "taken/report")
    assert done.returncode == 2
    assert "name another folder" in done.stdout
    assert "stage" not in done.stdout


def test_a_case_that_vanishes_on_the_way_fails(project):
    project.write(
        "conftest.py",
        """
        def pytest_collection_modifyitems(items):
            items[:] = [i for i in items if i.name != "odd"]
        """,
    )
    done = project.gate()
    assert done.returncode == 1
    assert "specs/twice.toml::odd was asked for and has no verdict" in done.stdout


def test_a_session_that_breaks_fails(project):
    project.write("conftest.py", "raise RuntimeError('no session')")
    done = project.gate()
    assert done.returncode == 1
    assert "left no report" in done.stdout
    assert "0 passed, 0 failed" in done.stdout


def test_a_gate_that_is_killed_takes_its_workers_with_it(project):
    process = subprocess.Popen(
        [
            sys.executable,
            *"-m harness.cli gate -n 1 --spec twice --kernel mine.twice:hangs".split(),
        ],
        cwd=project.folder,
        env=project.environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    while "stage kernel" not in (line := process.stdout.readline()):
        assert line
    time.sleep(2)
    process.kill()
    process.communicate(timeout=50)  # ends when nobody holds the pipe any more; it hangs for 60 s


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_what_a_launcher_leaves_running_does_not_outlive_the_gate(project):
    """A thread keeps pytest from ending, a process holds the output: each of them for 100 s."""
    project.write(
        "mine/leaves.py",
        """
        import os, threading, time
        from mine.twice import twice

        def leaves(x, *, y):
            threading.Thread(target=time.sleep, args=(100,)).start()
            if os.fork() == 0:
                time.sleep(100)
            twice(x, y=y)
        """,
    )
    impatient = "from harness import cli, stages; stages.LINGER_S = 0.1; cli.main()"
    call = "gate -n 0 --case five --spec twice --kernel mine.leaves:leaves".split()
    done = project.run("-c", impatient, *call, timeout=60)
    assert done.returncode == 1
    assert "pytest did not end: a launcher left a thread running" in done.stdout
    assert "1 passed, 0 failed" in done.stdout


def test_a_missing_kernel_module_is_told_once_before_anything_runs(project):
    for run in (project.gate, project.pytest):
        done = run(*(["--spec", "twice"] if run == project.gate else []), "--kernel", "nowhere:f")
        assert done.returncode not in (0, 1)
        assert done.stdout.count("no module 'nowhere' in this folder") == 1
        assert "CRASHED" not in done.stdout


@pytest.mark.parametrize("background", [False, True])
def test_an_interrupt_leaves_a_partial_report_and_no_pass(project, background):
    """SIGINT to the gate alone, or SIGTERM to all of a gate that a shell started with & and so
    with SIGINT ignored."""
    seconds = '{"sim": {"specs/twice.toml::odd": 9, "specs/twice.toml::five": 1}}'
    project.write(".cache/kdtr/seconds.json", seconds)
    command = [sys.executable, "-m", "harness.cli", "gate", "-n", "1"]
    command += ["--spec", "twice", "--kernel", "mine.twice:hangs"]
    if background:
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    process = subprocess.Popen(
        command,
        cwd=project.folder,
        env=project.environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = ""
    while "1/2" not in said:  # the case that passes is over, the one that hangs is next
        line = process.stdout.readline()
        assert line, said
        said += line
    time.sleep(0.5)
    if background:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        os.kill(process.pid, signal.SIGINT)
    said += process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert "interrupted: the report is partial" in said
    assert project.statuses() == {"odd": "PASSED"}


# -- receipts --------------------------------------------------------------------------------------


def cuda_report(project, *, uuid="GPU-1", status=report.Status.PASSED, device="cuda", **more):
    """A report as a run on one H200 would leave it."""
    each = one_spec(project)
    verdicts = [verdict(each, case, status, **more) for case in each.cases.values()]
    return report.as_report(
        verdicts,
        device=device,
        gpus=[{"uuid": uuid, "name": "NVIDIA H200", "slug": "h200", "driver": "580.1"}],
        ran_on={v.id: [uuid] for v in verdicts},
    )


def states(project):
    each = one_spec(project)
    pairs = [(each, case) for case in each.cases.values()]
    return {
        s.id.partition("::")[2]: str(s.state)
        for s in receipts.standing(project.folder, "h200", pairs)
    }


def test_a_receipt_is_fresh_until_a_source_changes(importable):
    assert states(importable) == dict.fromkeys(("five", "odd", "big"), "missing")
    each = one_spec(importable)
    (file,) = receipts.record(importable.folder, cuda_report(importable), [each])
    assert file.name == "h200.json"
    assert states(importable) == dict.fromkeys(("five", "odd", "big"), "fresh")
    row = receipts.read(importable.folder, "h200")["specs/twice.toml::big"]
    assert row["gpu"] == "NVIDIA H200"
    assert (row["uuid"], row["driver"], row["time_us"]) == ("GPU-1", "580.1", 12.5)
    assert row["versions"]["numpy"]
    source = importable.folder / "mine" / "oracle.py"
    source.write_text(source.read_text() + "\n# changed\n")
    assert states(importable) == dict.fromkeys(("five", "odd", "big"), "stale")


def test_receipts_are_merged_and_rows_of_vanished_cases_go(importable):
    each = one_spec(importable)
    receipts.record(importable.folder, cuda_report(importable), [each])
    importable.spec("twice", cases="five = { n = 5, sim = true }\nnew = { n = 6 }\n")
    receipts.record(
        importable.folder, cuda_report(importable, uuid="GPU-2"), [one_spec(importable)]
    )
    rows = receipts.read(importable.folder, "h200")
    assert sorted(rows) == ["specs/twice.toml::five", "specs/twice.toml::new"]
    assert rows["specs/twice.toml::five"]["uuid"] == "GPU-2"


def test_a_failed_case_is_no_evidence(importable):
    failed = cuda_report(importable, status=report.Status.WRONG)
    receipts.record(importable.folder, failed, [one_spec(importable)])
    assert set(states(importable).values()) == {"failed"}


def test_an_edited_row_is_no_evidence_and_goes(importable):
    each = one_spec(importable)
    (file,) = receipts.record(
        importable.folder, cuda_report(importable, status=report.Status.WRONG), [each]
    )
    file.write_text(file.read_text().replace('"WRONG"', '"PASSED"', 1))
    assert sorted(states(importable).values()) == ["edited", "failed", "failed"]
    rows = receipts.read(importable.folder, "h200")
    (left,) = (i for i, row in rows.items() if row["status"] == "PASSED")
    clean = {i: {"digest": row["digest"], "tools": ["memcheck"]} for i, row in rows.items()}
    assert receipts.note_sanitizer(importable.folder, {"gpu": "h200", "clean": clean}) == 2
    assert states(importable)[left.partition("::")[2]] == "missing"


def test_another_kernel_and_the_simulator_make_no_receipt(importable):
    each = one_spec(importable)
    assert receipts.record(importable.folder, cuda_report(importable, replaced=True), [each]) == []
    with pytest.raises(ValueError, match="in the simulator"):
        receipts.record(importable.folder, cuda_report(importable, device="sim"), [each])


def test_a_damaged_receipt_file_is_an_error_and_not_a_missing_row(importable):
    importable.write("ci/receipts/h200.json", '{"cases": [')
    with pytest.raises(ValueError, match=r"h200\.json: not a receipt file"):
        receipts.read(importable.folder, "h200")
    done = importable.gate()
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith("kdtr: ")


def test_required_receipts_fail_the_gate_until_they_are_there(importable):
    done = importable.gate("--require-receipts", "h200")
    assert done.returncode == 1
    assert "specs/twice.toml::big: missing receipt of h200" in done.stdout
    receipts.record(importable.folder, cuda_report(importable), [one_spec(importable)])
    done = importable.gate("--require-receipts", "h200")
    assert done.returncode == 0, done.stdout
    assert "fresh receipt of h200: 1" in done.stdout


# -- shards ----------------------------------------------------------------------------------------


def test_shards_join_to_the_whole(project):
    project.spec("more")
    for i in (1, 2, 3):
        done = project.gate("--shard", f"{i}/3", "--report", f"out/{i}")
        assert done.returncode == 0, done.stdout
    paths = [f"out/{i}" for i in (1, 2, 3)]
    joined = project.kdtr("report", "merge", *paths)
    assert joined.returncode == 0, joined.stdout
    assert "4 passed, 0 failed" in joined.stdout
    assert ci_gate_of(project) == 0

    missing = project.kdtr("report", "merge", "out/1", "out/3")
    assert (missing.returncode, "missing: 2" in missing.stdout) == (1, True)
    doubled = project.kdtr("report", "merge", *paths, "out/1")
    assert (doubled.returncode, "shard 1 is also in" in doubled.stdout) == (1, True)

    edited = project.folder / "out" / "2" / "report.json"
    kept, text = edited.read_text(), json.loads(edited.read_text())
    text["cases"], text["totals"]["cases"] = [], 0
    edited.write_text(json.dumps(text))
    forged = project.kdtr("report", "merge", *paths)
    assert (forged.returncode, "not as it was written" in forged.stdout) == (1, True)
    edited.write_text(json.dumps({**text, "seal": report.seal(text)}))
    gone = project.kdtr("report", "merge", *paths)
    assert (gone.returncode, "was asked for and has no verdict" in gone.stdout) == (1, True)
    edited.write_text(kept)
    nowhere = project.kdtr("report", "merge", *paths, "--out", "specs/twice.toml")
    assert nowhere.returncode == 1
    assert nowhere.stdout.splitlines()[-1].startswith("kdtr: [Errno 17] File exists")

    project.spec("more", cases=CASES + "later = { n = 9, sim = true }\n")
    stale = project.kdtr("report", "merge", *paths)
    assert (stale.returncode, "stale: made from other sources" in stale.stdout) == (1, True)


def test_reports_that_are_none_are_named(tmp_path):
    (tmp_path / "report.json").write_text('{"version": 1}')
    with pytest.raises(merge.MergeError, match="not a report: 'created' is a required property"):
        merge.read(tmp_path)
    with pytest.raises(merge.MergeError, match=r"not a report: .*No such file"):
        merge.read(tmp_path / "gone")


def test_a_verdict_survives_the_way_through_json(importable):
    result = report.Result(
        output="y",
        status=report.Status.NONFINITE,
        wrong=1,
        total=9,
        match="exact",
        first=(2, 1),
        got=float("nan"),
        want=1.0,
        headroom=float("inf"),
    )
    each = one_spec(importable)
    bad = verdict(
        each, each.cases["five"], report.Status.NONFINITE, outputs=(result,), notes=("n",)
    )
    (case,) = json.loads(json.dumps(report.as_report([bad])))["cases"]
    back = merge.restore(case)
    assert repr(back) == repr(bad)  # NaN is not equal to itself


# -- selection -------------------------------------------------------------------------------------


def test_names_that_nothing_has_are_answered_with_the_nearest(importable):
    specs = stages.load_specs(importable.folder)
    sim = devices.Choice("sim", (), "")
    with pytest.raises(LookupError, match=r"no spec 'twise'; there is twice"):
        stages.select(specs, sim, names=["twise"])
    with pytest.raises(LookupError, match=r"no case 'od'; there is odd"):
        stages.select(specs, sim, cases=["od"])


def test_a_gpu_runs_every_case_that_fits(importable):
    importable.spec("twice", cases=CASES + "pair = { n = 4, gpus = 2 }\n")
    specs = stages.load_specs(importable.folder)
    one = stages.select(specs, devices.Choice("cuda", (devices.Gpu("GPU-1"),), ""))
    assert [c.name for _, c in one.here] == ["five", "odd", "big"]
    assert [c.name for _, c in one.elsewhere] == ["pair"]


def test_a_report_of_other_sources_does_not_pass_ci(project):
    assert project.gate().returncode == 0
    project.write("mine/twice.py", (project.folder / "mine/twice.py").read_text() + "\n# new\n")
    assert ci_gate_of(project) == 1
    shutil.rmtree(project.folder / "report")
    assert ci_gate_of(project) == 1
