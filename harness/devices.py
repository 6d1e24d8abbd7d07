"""GPUs: which there are, which device a run uses, and one lease a worker.

The pytest controller leases every xdist worker one GPU (or k of them) by UUID, out of what the
caller's CUDA_VISIBLE_DEVICES leaves, before the worker collects anything. A worker number modulo
the number of GPUs is not enough: the worker that replaces a dead one has a new number and would
share a neighbour's GPU. A file lock per UUID keeps two runs on one machine apart.

Nothing here creates a CUDA context or imports numba: the driver is asked by `probe.py`, in a
process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from filelock import FileLock, Timeout

VISIBLE = "CUDA_VISIBLE_DEVICES"
FAKE = "KDTR_FAKE_GPUS"  # "GPU-a,GPU-b:bad": pretend; the kernels then run in the simulator
LOCKS = "KDTR_LOCK_DIR"
DEVICES = ("auto", "cuda", "sim")
CUDA_NEEDED = (13, 0)  # what the pinned toolkit compiles for; driver 580 is the first to have it
WHEELS = ("nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
LIBRARIES = ("nvvm/lib*/libnvvm.so*", "lib*/libnvJitLink.so*", "lib*/libnvrtc.so*")
PROBE_S = 60.0  # the first call into the driver of an idle machine can take many seconds
LEASE_WAIT_S = 600.0
PLACES = 8  # cases at a time on a shared GPU: what most of them wait for is the host
LOOK_S = 0.005


class DeviceError(RuntimeError):
    """No device for this run. The text says what is missing and what to do."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it. `fault` is set on a fake one that must fail its self-test."""

    uuid: str
    name: str = "unknown"
    compute: str = ""  # compute capability, "9.0"
    memory: int = 0  # bytes
    driver: str = ""  # driver version, "580.65.06"
    fault: str = ""

    @property
    def slug(self) -> str:
        """The name of its receipt and baseline files: "NVIDIA H200" is h200."""
        words = self.name.lower().replace("nvidia", "").replace("/", " ").split()
        return "-".join(words) or "unknown"


@dataclass(frozen=True)
class Machine:
    """All the GPUs of this machine, and why there are none or why they cannot be used."""

    gpus: tuple[Gpu, ...] = ()
    cuda: tuple[int, int] = (0, 0)  # highest CUDA version of the driver
    problem: str = ""
    fake: bool = False


@dataclass(frozen=True)
class Choice:
    """What a run uses: `device` is cuda or sim, `gpus` what may be leased, `why` a sentence."""

    device: str
    gpus: tuple[Gpu, ...]
    why: str


def survey(environ: Mapping[str, str] = os.environ) -> Machine:
    """Ask the driver (or KDTR_FAKE_GPUS) for every GPU here, whatever CUDA_VISIBLE_DEVICES says."""
    if FAKE in environ:
        return Machine(tuple(_fake(entry) for entry in _entries(environ[FAKE])), fake=True)
    answer = _probe("list", {k: v for k, v in environ.items() if k != VISIBLE})
    if isinstance(answer, str):
        return Machine(problem=answer)
    found = json.loads(answer.decode())
    drivers = _driver_versions()
    gpus = tuple(
        Gpu(g["uuid"], g["name"], g["compute"], g["bytes"], drivers.get(g["uuid"], ""))
        for g in found["gpus"]
    )
    major, minor = (int(part) for part in found["cuda"].split("."))
    problem = "" if gpus else "the driver sees no GPU"
    if (major, minor) < CUDA_NEEDED:
        wanted = ".".join(map(str, CUDA_NEEDED))
        problem = (
            f"the driver speaks CUDA {found['cuda']}, this needs {wanted} (driver 580 or newer)"
        )
    return Machine(gpus, (major, minor), problem)


def narrow(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """What a CUDA_VISIBLE_DEVICES of `visible` leaves of `gpus`, in its order, as CUDA reads it.

    Ordinals or UUID prefixes; the first entry that names no GPU ends the list; an entry named
    twice empties it; None leaves all. A MIG instance, which a survey does not list, is taken as is.
    """
    if visible is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in _entries(visible):
        if entry.startswith("MIG-"):
            found = [Gpu(entry, name="MIG")]
        elif entry.isdecimal():
            found = list(gpus[int(entry) : int(entry) + 1])
        else:
            found = [g for g in gpus if g.uuid.startswith(entry)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen += found
    return chosen


def choose(request: str, environ: Mapping[str, str] = os.environ) -> Choice:
    """The device for `--device request`. Raises DeviceError where cuda is asked for in vain."""
    if request not in DEVICES:
        raise DeviceError(f"device must be one of {', '.join(DEVICES)}, got {request!r}")
    if request == "sim":
        return Choice("sim", (), "asked for")
    if request == "auto" and environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return Choice("sim", (), "NUMBA_ENABLE_CUDASIM is set")
    machine = survey(environ)
    visible = tuple(narrow(machine.gpus, environ.get(VISIBLE)))
    if machine.fake:
        return Choice("sim", visible, f"{len(visible)} fake GPUs")
    problem = machine.problem
    if not problem and not visible:
        problem = f"{VISIBLE}={environ.get(VISIBLE)!r} hides all {len(machine.gpus)} GPUs"
    if not problem and not toolkit():
        problem = "GPUs, but no CUDA toolkit for Numba: pip install 'kdtree-engine[cu13]'"
    if not problem:
        return Choice("cuda", visible, f"{len(visible)} of {len(machine.gpus)} GPUs visible")
    if request == "cuda":
        raise DeviceError(f"--device cuda: {problem}")
    return Choice("sim", (), problem)


def toolkit() -> str:
    """Where Numba will find its compiler and linker: wheels, a CUDA_HOME, or "" for nowhere."""
    try:
        return ", ".join(f"{name} {metadata.version(name)}" for name in WHEELS)
    except metadata.PackageNotFoundError:
        pass
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home and all(any(Path(home).glob(pattern)) for pattern in LIBRARIES):
            return home
    return ""


def self_test(gpu: Gpu) -> str:
    """Run one short kernel on `gpu` in another process: "" if it works, else what went wrong."""
    if gpu.fault:
        return gpu.fault
    if FAKE in os.environ:
        return ""
    answer = _probe("test", {**os.environ, VISIBLE: gpu.uuid})
    return answer if isinstance(answer, str) else ""


@dataclass
class Lease:
    """GPUs handed to one worker. `shared` says that others of this run take turns on them."""

    gpus: tuple[Gpu, ...]
    shared: bool = False

    @property
    def visible(self) -> str:
        return ",".join(g.uuid for g in self.gpus)


@dataclass
class Leases:
    """The GPUs of one run. Lives on the controller; workers get the UUIDs it hands out.

    A GPU is locked from its first lease until `close`, so that another run on this machine waits
    or takes others. It is tested when it is first taken and again after each crash on it; one that
    fails is quarantined with the reason, and the run goes on with the rest. With more workers than
    GPUs the workers share, and `turn` keeps large cases from running at the same time as others.
    """

    gpus: tuple[Gpu, ...]
    per_worker: int = 1
    wait_s: float = LEASE_WAIT_S
    quarantined: dict[str, str] = field(default_factory=dict)  # UUID -> reason
    _locks: dict[str, FileLock] = field(default_factory=dict)  # UUIDs that this run holds
    _users: dict[str, int] = field(default_factory=dict)

    def workers(self) -> int:
        """How many workers can hold GPUs of their own now; 1 if all are in other runs' hands."""
        free = 0
        for gpu in self.gpus:
            held = gpu.uuid in self._locks
            if held or self._lock(gpu):
                free += 1
            if not held:
                self._unlock(gpu)
        return max(1, free // self.per_worker)

    def take(self) -> Lease:
        """GPUs for one worker: free ones if there are any, else shared ones of this run.

        Raises DeviceError if none is left, or if other runs hold all of them for `wait_s`.
        """
        deadline = time.monotonic() + self.wait_s
        while True:
            good: list[Gpu] = []
            for gpu in self.gpus:
                idle = not self._users.get(gpu.uuid) and gpu.uuid not in self.quarantined
                if idle and len(good) < self.per_worker and self._lock(gpu) and self._works(gpu):
                    good.append(gpu)
            if len(good) == self.per_worker:
                return self._lend(good, shared=False)
            for gpu in good:
                self._unlock(gpu)  # two runs that wait for each other's would never end
            usable = [g for g in self.gpus if g.uuid not in self.quarantined]
            if len(usable) < self.per_worker:
                raise DeviceError(self._exhausted())
            held = [g for g in usable if self._users.get(g.uuid)]
            if len(held) >= self.per_worker:
                fewest = sorted(held, key=lambda g: self._users[g.uuid])
                return self._lend(fewest[: self.per_worker], shared=True)
            if time.monotonic() > deadline:
                names = ", ".join(g.uuid for g in usable)
                raise DeviceError(f"other runs hold {names}; gave up after {self.wait_s:g} s")
            time.sleep(0.2)

    def give_back(self, lease: Lease, *, crashed: bool = False) -> list[Gpu]:
        """Return a lease. After a crash its GPUs are tested; the newly quarantined are returned.

        A kernel that poisons its context has not broken the GPU: the next process gets a new
        context. So a crash alone quarantines nothing, a failed test after it does.
        """
        for gpu in lease.gpus:
            self._users[gpu.uuid] -= 1
        return [g for g in lease.gpus if crashed and not self._works(g, again=True)]

    def close(self) -> None:
        """Let other runs have the GPUs."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def _lend(self, gpus: list[Gpu], *, shared: bool) -> Lease:
        for gpu in gpus:
            self._users[gpu.uuid] = self._users.get(gpu.uuid, 0) + 1
        return Lease(tuple(gpus), shared)

    def _lock(self, gpu: Gpu) -> bool:
        if gpu.uuid in self._locks:
            return True
        lock = lock_file(f"{gpu.uuid}.lease")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return False
        self._locks[gpu.uuid] = lock
        return True

    def _unlock(self, gpu: Gpu) -> None:
        if gpu.uuid in self._locks:
            self._locks.pop(gpu.uuid).release()

    def _works(self, gpu: Gpu, *, again: bool = False) -> bool:
        if gpu.uuid in self._users and not again:
            return True
        problem = self_test(gpu)
        if problem:
            self.quarantined[gpu.uuid] = problem
            return False
        self._users.setdefault(gpu.uuid, 0)
        return True

    def _exhausted(self) -> str:
        text = f"{len(self.gpus)} GPUs visible, {self.per_worker} needed for a worker"
        for uuid, reason in self.quarantined.items():
            text += f"; {uuid} is quarantined: {reason}"
        return text


def lock_file(name: str) -> FileLock:
    """The machine-wide lock of that name. Users share the folder, so it is open to all of them."""
    folder = Path(os.environ.get(LOCKS) or Path(tempfile.gettempdir(), "kdtr-locks"))
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o1777)
    return FileLock(folder / name, mode=0o666)


@contextlib.contextmanager
def turn(uuids: str, *, alone: bool = False) -> Iterator[None]:
    """Hold a place on shared GPUs for one case, or all places of them; whoever comes first.

    They are taken in an order that cannot deadlock. Most cases are done in milliseconds, so a look
    at a lock comes sooner than by default.
    """
    with contextlib.ExitStack() as held:
        for uuid in sorted(_entries(uuids)):
            places = [lock_file(f"{uuid}.place{n}") for n in range(PLACES)]
            with lock_file(f"{uuid}.queue").acquire(poll_interval=LOOK_S):
                for lock in places if alone else [_first_free(places)]:
                    held.enter_context(lock.acquire(poll_interval=LOOK_S))
        yield


def _first_free(locks: Sequence[FileLock]) -> FileLock:
    """One that is free while nobody else may take one."""
    while True:
        for lock in locks:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            lock.release()
            return lock
        time.sleep(LOOK_S)


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def longest_first(ids: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """`ids` by falling time in an earlier run; what has none comes first, by name."""
    return sorted(ids, key=lambda i: (-seconds.get(i, float("inf")), i))


def of_shard(case_id: str, index: int, count: int) -> bool:
    """Whether `case_id` belongs to shard `index` of `count` (1-based). Depends on its text only."""
    digest = hashlib.sha256(case_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % count == index - 1


def shard(text: str) -> tuple[int, int]:
    """ "2/3" becomes (2, 3)."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"a shard is I/N with 1 <= I <= N, got {text!r}")
    return int(index), int(count)


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _fake(entry: str) -> Gpu:
    uuid, _, fault = entry.partition(":")
    return Gpu(uuid, "Fake", "9.0", 0, "0", f"fake fault: {fault}" if fault else "")


def _probe(command: str, environ: Mapping[str, str]) -> bytes | str:
    """Output of `probe.py command`, or the reason why there is none."""
    program = [sys.executable, "-I", str(Path(__file__).with_name("probe.py")), command]
    try:
        done = subprocess.run(program, env=environ, capture_output=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return f"the driver did not answer within {PROBE_S:g} s"
    if done.returncode:
        return done.stderr.decode().strip() or f"the driver's process died ({done.returncode})"
    return done.stdout


def _driver_versions() -> dict[str, str]:
    """UUID -> driver version, from nvidia-smi; empty where there is no nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=uuid,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=PROBE_S, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    return {uuid.strip(): version.strip() for uuid, version in rows}
