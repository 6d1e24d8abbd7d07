"""ci/many_gpus.py: a dry run on eight fake GPUs, and what it says of GPUs that disagree."""

import json

import pytest
from throwaway import ROOT, Project

from ci import legs as seen
from ci import many_gpus

SMALL = "".join(f"c{n} = {{ n = {n}, sim = true }}\n" for n in (3, 33))
MANY = "".join(f"c{n} = {{ n = {n}, sim = true }}\n" for n in range(10, 10 + 24))
SLOW = """
    import time
    from mine.twice import twice as fast

    def twice(x, *, y):
        time.sleep(0.2)  # long enough to be killed in the middle
        fast(x, y=y)
"""


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_a_dry_run_on_eight_fake_gpus(project):
    project.environ["KDTR_FAKE_GPUS"] = ",".join(f"GPU-{n}" for n in range(8))
    ranks = "".join(f"on_{n} = {{ n = {n}, gpus = {n}, sim = true }}\n" for n in (2, 8))
    project.spec("twice", cases=SMALL + ranks)
    project.spec("other", cases=MANY)
    project.write("mine/slow.py", SLOW)
    path = project.folder / "specs" / "other.toml"
    path.write_text(path.read_text().replace("mine.twice:twice", "mine.slow:twice"))
    project.environ["PYTHONPATH"] = f"{ROOT}:{project.folder}"
    options = ("--gpus", "8", "--alone", "1", "--on", "2", "--subset", "twice", "--kill", "other")
    done = project.run("-m", "ci.many_gpus", *options, "--out", "out", timeout=280)
    found = json.loads((project.folder / "out" / "many-gpus.json").read_text())
    assert done.returncode == 0, done.stdout
    assert found["problems"] == []
    legs = {leg["name"]: leg for leg in found["legs"]}
    assert {name: leg["cases"] for name, leg in legs.items()} == {
        "alone-0": 2, "on-2": 3, "killed": 24, "whole": 28,
    }  # fmt: skip
    ran_on = legs["whole"]["ran_on"]
    assert [len(ran_on[f"specs/twice.toml::on_{n}"]) for n in (2, 8)] == [2, 8]
    used = {uuid for uuids in legs["whole"]["ran_on"].values() for uuid in uuids}
    assert used == set(legs["whole"]["gpus"]) == {f"GPU-{n}" for n in range(8)}
    assert found["killed"]["status"] == "CRASHED"
    assert found["killed"]["replacement_on_the_same_gpu"]
    assert found["cases_on_several_gpus"] > 13
    text = (project.folder / "out" / "many-gpus.md").read_text()
    assert "8 x Fake" in text
    assert "its verdict is CRASHED" in text


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (("--subset", "twice"), ["whole", "alone-0", "alone-1", "on-2"]),
        (("--subset", "twice", "--no-whole"), ["alone-0", "alone-1", "on-2"]),
        ((), ["alone-0", "alone-1", "on-2"]),
    ],
)
def test_which_runs_there_are(project, monkeypatch, options, runs):
    project.spec("twice", cases=SMALL)
    monkeypatch.chdir(project.folder)
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setenv("KDTR_FAKE_GPUS", "GPU-0,GPU-1")
    asked, receipts = [], []

    def together(self, legs, names, *, receipt=False, share=1.0):
        asked.extend(leg.name for leg in legs)
        receipts.extend(leg.name for leg in legs if receipt)

    monkeypatch.setattr(many_gpus.Runs, "together", together)
    for step in ("prepare", "killed", "split"):
        monkeypatch.setattr(many_gpus.Runs, step, lambda self: None)
    assert many_gpus.main(["--gpus", "2", "--out", "out", *options]) == 0
    assert asked == runs
    assert receipts == ([] if "--no-whole" in options else [runs[0 if options else -1]])


def case(name, status="PASSED", bits="00"):
    return {
        "id": name, "stage": "kernel", "status": status, "ok": status == "PASSED",
        "outputs": [{"output": "y", "bits": bits}],
    }  # fmt: skip


def leg(name, gpu, *cases):
    made = seen.Leg(name, [gpu], 10.0, True)
    made.found = {
        "cases": list(cases),
        "context": {"ran_on": {c["id"]: [gpu] for c in cases}, "seconds": {"a": 4.0}},
    }
    return made


def test_gpus_that_disagree_are_named():
    legs = [
        leg("one", "GPU-a", case("a"), case("b")),
        leg("two", "GPU-b", case("a", bits="11"), case("b")),
    ]
    unlike, several = seen.differences(legs)
    assert several == 2
    assert unlike == ["a differs: PASSED {'y': '00'} on GPU-a; PASSED {'y': '11'} on GPU-b"]
    legs[1] = leg("two", "GPU-b", case("a", "WRONG"))
    assert "a differs: PASSED" in seen.differences(legs)[0][0]


def test_the_case_of_the_killed_worker_is_no_difference():
    legs = [leg("one", "GPU-a", case("a")), leg("killed", "GPU-b", case("a", "CRASHED", ""))]
    assert seen.differences(legs) == ([], 0)


def test_idle_is_what_no_case_took():
    assert leg("one", "GPU-a", case("a")).idle() == {"GPU-a": 0.6}


def test_legs_double_up_to_all_gpus():
    assert [many_gpus._doubling(n) for n in (1, 2, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]
