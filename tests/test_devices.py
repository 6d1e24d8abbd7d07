"""Which device a run uses, and leases: no GPU needed, the GPUs are fake."""

import subprocess
import sys
import textwrap

import pytest

from harness import devices
from harness.devices import DeviceError, Gpu, Leases, narrow

FOUR = tuple(Gpu(f"GPU-{letter}00") for letter in "abcd")


@pytest.fixture(autouse=True)
def fake_machine(monkeypatch, tmp_path):
    monkeypatch.setenv(devices.LOCKS, str(tmp_path / "locks"))
    monkeypatch.setenv(devices.FAKE, "GPU-a00,GPU-b00,GPU-c00,GPU-d00")
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)


@pytest.fixture
def leases():
    """Makes Leases and gives their GPUs back at the end."""
    made = []

    def make(gpus=FOUR, **options):
        made.append(Leases(tuple(gpus), **{"wait_s": 0, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def uuids(gpus):
    return [g.uuid for g in gpus]


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        (None, "abcd"),
        ("", ""),
        ("2,0", "ca"),
        ("GPU-d, GPU-b00", "db"),
        ("1,7,2", "b"),  # the first entry that names nothing ends the list
        ("1,1", ""),  # as CUDA: a double entry leaves none
        ("GPU-", ""),  # a prefix of several is none
        ("-1", ""),
    ],
)
def test_visible_devices_is_read_as_cuda_reads_it(visible, left):
    assert uuids(narrow(FOUR, visible)) == [f"GPU-{letter}00" for letter in left]


def test_a_mig_instance_is_taken_as_it_is():
    assert uuids(narrow(FOUR, "MIG-1234")) == ["MIG-1234"]


def test_the_callers_list_is_honoured(monkeypatch):
    monkeypatch.setenv(devices.VISIBLE, "GPU-c00,GPU-a00")
    assert uuids(devices.choose("auto").gpus) == ["GPU-c00", "GPU-a00"]


def test_fake_gpus_run_in_the_simulator():
    assert devices.choose("auto").device == "sim"


def test_an_unknown_device_names_the_known_ones():
    with pytest.raises(DeviceError, match="auto, cuda, sim, got 'gpu'"):
        devices.choose("gpu")


def test_sim_leases_nothing():
    assert devices.choose("sim").gpus == ()


def test_no_driver_means_the_simulator_or_a_reason(monkeypatch):
    monkeypatch.setattr(devices, "_probe", lambda command, environ: "no NVIDIA driver library")
    environ = {}
    assert devices.choose("auto", environ).device == "sim"
    assert "no NVIDIA driver" in devices.choose("auto", environ).why
    with pytest.raises(DeviceError, match="no NVIDIA driver library"):
        devices.choose("cuda", environ)


def machine_with(monkeypatch, cuda="13.0", toolkit="nvidia-nvvm 13.0"):
    answer = f'{{"cuda": "{cuda}", "gpus": [{{"uuid": "GPU-1", "name": "NVIDIA H200", '
    answer += '"compute": "9.0", "bytes": 150}]}'
    monkeypatch.setattr(devices, "_probe", lambda command, environ: answer.encode())
    monkeypatch.setattr(devices, "_driver_versions", lambda: {"GPU-1": "580.1"})
    monkeypatch.setattr(devices, "toolkit", lambda: toolkit)


def test_a_usable_gpu_is_used(monkeypatch):
    machine_with(monkeypatch)
    choice = devices.choose("auto", {})
    assert (choice.device, uuids(choice.gpus)) == ("cuda", ["GPU-1"])
    assert choice.gpus[0].driver == "580.1"
    assert choice.gpus[0].slug == "h200"


def test_an_old_driver_is_no_gpu(monkeypatch):
    machine_with(monkeypatch, cuda="12.4")
    assert devices.choose("auto", {}).device == "sim"
    with pytest.raises(DeviceError, match=r"CUDA 12\.4, this needs 13\.0"):
        devices.choose("cuda", {})


def test_a_gpu_without_a_toolkit_says_what_to_install(monkeypatch):
    machine_with(monkeypatch, toolkit="")
    assert devices.choose("auto", {}).device == "sim"
    with pytest.raises(DeviceError, match="cu13"):
        devices.choose("cuda", {})


def test_a_caller_who_hides_all_gpus_gets_the_simulator(monkeypatch):
    machine_with(monkeypatch)
    assert devices.choose("auto", {devices.VISIBLE: ""}).device == "sim"
    with pytest.raises(DeviceError, match="hides all 1 GPUs"):
        devices.choose("cuda", {devices.VISIBLE: ""})


def test_each_worker_gets_a_gpu_of_its_own(leases):
    run = leases()
    taken = [run.take() for _ in FOUR]
    assert [lease.visible for lease in taken] == uuids(FOUR)
    assert not any(lease.shared for lease in taken)


def test_the_replacement_of_a_dead_worker_gets_the_freed_gpu(leases):
    run = leases()
    taken = [run.take() for _ in FOUR]
    run.give_back(taken[1], crashed=True)
    assert run.take().visible == "GPU-b00"


def test_more_workers_than_gpus_take_turns(leases):
    run = leases(FOUR[:2])
    taken = [run.take() for _ in range(4)]
    assert [(t.visible, t.shared) for t in taken] == [
        ("GPU-a00", False),
        ("GPU-b00", False),
        ("GPU-a00", True),
        ("GPU-b00", True),
    ]


def test_a_worker_can_lease_several(leases):
    run = leases(per_worker=2)
    assert run.workers() == 2
    assert [run.take().visible, run.take().visible] == ["GPU-a00,GPU-b00", "GPU-c00,GPU-d00"]


def test_too_few_gpus_for_a_worker_is_an_error(leases):
    with pytest.raises(DeviceError, match="1 GPUs visible, 2 needed"):
        leases(FOUR[:1], per_worker=2).take()


def test_a_gpu_that_fails_its_self_test_is_quarantined_and_named(leases):
    run = leases((Gpu("GPU-sick", fault="wrong sum"), *FOUR[:1]))
    assert run.take().visible == "GPU-a00"
    assert run.quarantined == {"GPU-sick": "wrong sum"}


def test_a_run_without_a_working_gpu_says_why(leases):
    with pytest.raises(DeviceError, match="GPU-sick is quarantined: wrong sum"):
        leases((Gpu("GPU-sick", fault="wrong sum"),)).take()


def test_a_gpu_that_breaks_under_a_worker_is_quarantined(leases, monkeypatch):
    run = leases(FOUR[:2])
    first, _ = run.take(), run.take()
    monkeypatch.setattr(devices, "self_test", lambda gpu: "GPU is lost")
    assert uuids(run.give_back(first, crashed=True)) == ["GPU-a00"]
    assert run.take().visible == "GPU-b00"


def test_a_crash_that_the_gpu_survives_quarantines_nothing(leases):
    run = leases(FOUR[:1])
    assert run.give_back(run.take(), crashed=True) == []
    assert run.take().visible == "GPU-a00"


def test_two_runs_at_once_do_not_share(leases):
    one, two = leases(), leases()
    assert [one.take().visible, two.take().visible, one.take().visible] == uuids(FOUR[:3])
    assert (one.workers(), two.workers()) == (3, 2)


def test_a_run_that_waits_in_vain_names_the_gpus(leases):
    one, two = leases(FOUR[:1]), leases(FOUR[:1])
    one.take()
    assert two.workers() == 1
    with pytest.raises(DeviceError, match="other runs hold GPU-a00"):
        two.take()
    one.close()
    assert two.take().visible == "GPU-a00"


def test_a_run_that_cannot_get_enough_keeps_none(leases):
    one, two = leases(FOUR[:2]), leases(FOUR[:2], per_worker=2)
    one.take()
    with pytest.raises(DeviceError, match="other runs hold"):
        two.take()
    assert one.take().visible == "GPU-b00"


def test_a_killed_run_leaves_no_lock(leases):
    program = f"""
        import os
        from harness.devices import Gpu, Leases
        print(Leases(({FOUR[0]!r},)).take().visible, flush=True)
        os.abort()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True)
    assert done.stdout.split() == [b"GPU-a00"]
    assert leases(FOUR[:1]).take().visible == "GPU-a00"


def test_longest_cases_come_first_and_unknown_ones_before_them():
    assert devices.longest_first("cbad", {"a": 1.0, "b": 9.0, "c": 1.0}) == ["d", "b", "a", "c"]


def test_shards_split_by_content_and_cover_everything_once():
    ids = [f"specs/x.toml::case_{i}" for i in range(200)]
    shards = [[i for i in ids if devices.of_shard(i, k, 3)] for k in (1, 2, 3)]
    assert sorted(i for shard in shards for i in shard) == sorted(ids)
    assert min(map(len, shards)) > 40


def test_surveying_imports_no_numba_and_makes_no_context():
    program = "import sys; from harness import devices; devices.choose('auto'); "
    program += "assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
