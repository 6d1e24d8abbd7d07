"""The seat: what one process of a session may use, and what it leaves behind when it is lost.

One process a worker, and the worker may be lost: a case that overruns its time, that poisons the
GPU context or that kills its process ends the worker. What the worker knew of it stands in a file,
its last words, which the controller turns into the verdict; a new worker goes on with the rest.

Imports no numba: the GPUs of a seat are chosen before anything does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from harness import devices

if TYPE_CHECKING:
    from harness.report import Verdict
    from harness.spec import Case, Spec

CHOICE = pytest.StashKey[devices.Choice]()  # of a session: the device
SEAT = pytest.StashKey["Seat"]()  # of a process
GRACE_S = 5.0  # between one time limit and the next
LOST = 70  # exit status of a worker that ends itself
OURS = ("harness/launch.py", "harness/run.py", "harness/plugin.py")  # no frames of the judged


class Seat:
    """What one process may use: its device, its GPUs, and a file for its last words."""

    def __init__(self, device: str, gpus: tuple[devices.Gpu, ...]):
        self.device, self.uuids = device, [g.uuid for g in gpus]
        self.shared = False
        self.worker = ""  # "" for a session without workers
        self.words: Path | None = None
        self.stderr = os.dup(2)  # the terminal: while a test runs, 2 is pytest's capture
        self.seconds: dict[str, float] = {}
        self.each: int | None = None  # run only the cases that need so many GPUs

    @classmethod
    def of_worker(cls, told: dict[str, Any], worker: str) -> Seat:
        """The seat that the controller leased for this worker. Sets CUDA_VISIBLE_DEVICES."""
        seat = cls(told["device"], ())
        seat.uuids, seat.shared, seat.each = told["uuids"], told["shared"], told["each"]
        seat.seconds, seat.worker = told["seconds"], worker
        seat.words = Path(told["folder"], worker)
        os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(".cache", "numba", worker).absolute()))
        seat.see()
        return seat

    def see(self) -> None:
        """Show this process the GPUs of the seat alone; before it initialises CUDA."""
        if self.uuids:
            os.environ[devices.VISIBLE] = ",".join(self.uuids)

    def takes(self, spec: Spec, case: Case) -> bool:
        """Whether `case` can run here."""
        if spec.stage == "golden":
            return self.each in (None, 1)  # host code, on every machine
        if self.device == "sim" and not self.uuids:
            return case.sim
        if self.device == "sim" and not case.sim:  # fake GPUs
            return False
        return case.gpus == self.each if self.each else case.gpus <= max(1, len(self.uuids))

    @contextlib.contextmanager
    def watch(
        self, case_id: str, limit_s: float, on_timeout: Callable[[], None], *, alone: bool = False
    ) -> Iterator[Callable[[], AbstractContextManager]]:
        """End the process if the block takes longer than `limit_s`.

        `run_case` has a limit for a launch, which costs no process. This one is for what that
        cannot interrupt; the last, which faulthandler keeps, for what never lets go of Python.
        Yields what to enter while the GPU is used: a turn on a shared one, `alone` or beside
        others. The wait for it does not count, and the limit starts again with it.
        """
        with contextlib.ExitStack() as stack:
            words = stack.enter_context(self.words.open("w")) if self.words else None
            if words:
                print(json.dumps({"id": case_id, "pid": os.getpid()}), file=words, flush=True)
                faulthandler.enable(words)
            stop = alarm(limit_s, on_timeout, words)

            @contextlib.contextmanager
            def turn() -> Iterator[None]:
                nonlocal stop
                with contextlib.ExitStack() as held:
                    if self.shared:
                        stop()
                        held.enter_context(devices.turn(",".join(self.uuids), alone=alone))
                        stop = alarm(limit_s, on_timeout, words)
                    yield

            try:
                yield turn
            finally:
                stop()
                if words:
                    faulthandler.enable(sys.__stderr__ or 2)

    def leave(self, verdict: Verdict) -> None:
        """End this worker; `verdict` is what the controller will read about its last case."""
        assert self.words is not None
        with self.words.open("a") as words:
            print(json.dumps(as_json(verdict)), file=words, flush=True)
        os._exit(LOST)


def limit_s(case: Case) -> float:
    """For all of a case: its golden and two launches of at most `timeout_s` each."""
    return 2 * case.timeout_s + GRACE_S


def alarm(
    limit_s: float, on_timeout: Callable[[], None], words: TextIO | None
) -> Callable[[], None]:
    """Call `on_timeout` after `limit_s`, end the process a little later; returns what stops it."""
    timer = threading.Timer(limit_s, on_timeout)
    timer.daemon = True
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=words or sys.stderr)
    timer.start()

    def stop() -> None:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    return stop


# -- last words ------------------------------------------------------------------------------------


def as_json(verdict: Verdict) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(verdict)


def lost_verdict(
    case_id: str, status: Any, message: str, config: pytest.Config, spec: Spec | None = None
) -> Verdict:
    """The verdict on a case whose process is lost."""
    from harness import report
    from harness.spec import SpecError, load

    with contextlib.suppress(SpecError):
        spec = spec or load(config.rootpath / case_id.partition("::")[0])
    choice, replaced = config.stash.get(CHOICE, None), config.option.kernel
    return report.Verdict(
        id=case_id,
        stage=spec.stage if spec else None,
        spec=Path(case_id.partition("::")[0]).stem,
        case=case_id.partition("::")[2],
        status=status,
        device="simulator" if choice is None or choice.device == "sim" else choice.gpus[0].name,
        message=message,
        kernel=replaced or (spec and spec.kernel) or "",
        reference=spec.reference if spec else "",
        replaced=bool(replaced),
        lost=True,
    )


def last_verdict(case_id: str, words: Path, config: pytest.Config) -> Verdict:
    """The verdict on a case whose worker died, from the file that the worker left."""
    from harness.merge import restore
    from harness.report import Status

    try:
        head, _, rest = words.read_text(errors="replace").partition("\n")
    except OSError:
        head, rest = "", ""
    if not head or json.loads(head)["id"] != case_id:
        return lost_verdict(case_id, Status.CRASHED, "its process died between two cases", config)
    if rest.startswith("{"):
        return restore(json.loads(rest))
    if rest.startswith("Timeout ("):
        message = "not done in time, and it never let go of the interpreter"
        return lost_verdict(case_id, Status.TIMEOUT, message + "\n" + stack(rest), config)
    message = f"its process died\n{stack(rest)}".rstrip()
    return lost_verdict(case_id, Status.CRASHED, message, config)


def stack(text: str) -> str:
    """What faulthandler wrote, cut down to the error and the frames below the judge."""
    lines = text.splitlines()
    first = next((line for line in lines if line.startswith("Fatal")), "")
    start = next((i for i, line in enumerate(lines) if "(most recent call first)" in line), None)
    for i, line in enumerate(lines):
        if line.startswith("Current thread"):
            start = i
    frames: list[str] = []
    for line in lines[start + 1 :] if start is not None else []:
        if not line.strip() or any(file in line for file in OURS):
            break
        frames.append(line)
    return "\n".join([first, *frames[:12]]).strip("\n")
