"""The command `kdtr mutate`: kill certificates, made and checked."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness import console, orphans
from harness.console import Device, fail, say

if TYPE_CHECKING:
    from harness.spec import Spec

app = typer.Typer()


@app.command()
def mutate(
    spec: console.Specs = None,
    device: Annotated[
        Device,
        typer.Option(
            "--device",
            metavar="sim|cuda",
            help="sim makes certificates; cuda judges their mutants again on a GPU.",
        ),
    ] = Device.sim,
    workers: console.Workers = "auto",
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing: certificates must be fresh and their mutants dead."
        ),
    ] = False,
    part: Annotated[
        float, typer.Option(metavar="SHARE", help="Check this share of the mutants, 0 to 1.")
    ] = 1.0,
    stale: Annotated[
        bool, typer.Option("--stale", help="Only specs whose certificate is missing or stale.")
    ] = False,
) -> None:
    """Plant faults in kernels: the specs must catch them.

    Each spec gets a certificate, ci/certificates/NAME.json. Exit 1 if a spec is VACUOUS: a mutant
    survives and nobody says why, none was killed, or one that was dead lives again.

    On a GPU the mutants of the certificates are judged again, -n at a time. One that the simulator
    killed by its values and one that is for a GPU must die; those that the simulator alone can
    kill are listed. What was not judged is no pass.
    """
    from harness import certificates, devices, mutate, stages
    from harness.spec import STAGES

    root = Path.cwd()
    count = console.worker_count(workers)
    if not 0 <= part <= 1:
        fail(f"--part takes a share from 0 to 1, got {part}")
    chosen, choice = console.specs_named(spec), console.chosen_device(device)
    chosen.sort(key=lambda s: (-STAGES.index(s.stage), s.id))  # whole passes take longest
    if stale:
        chosen = [s for s in chosen if certificates.is_stale(root, s)]
    count = count or (1 if choice.gpus else devices.cores())
    if choice.device == "cuda":
        raise typer.Exit(_on_gpu(root, chosen, choice.why, count, part))
    try:
        with orphans.ended():
            if check:
                problems = mutate.check(root, chosen, workers=count, part=part, say=say)
                bad = len({problem.partition(": ")[0] for problem in problems})
            else:
                every = stages.readable(stages.load_specs(root))
                made = mutate.examine(root, chosen, everything=every, workers=count, say=say)
                bad = sum(c["verdict"] != certificates.CERTIFIED for c in made)
    except (LookupError, OSError, RuntimeError) as error:
        fail(error, 1)
    say(certificates.total(certificates.summary(root, chosen)))
    if bad:
        say(f"{bad} of {len(chosen)} specs fail")
    raise typer.Exit(1 if bad else 0)


def _on_gpu(root: Path, chosen: Sequence[Spec], why: str, workers: int, part: float) -> int:
    """Judge the mutants of certificates on a GPU, and say of each spec at once; the exit code."""
    from harness import mutate_gpu
    from harness.spec import STAGES

    kernels = [spec for spec in chosen if spec.stage != "golden"]
    kernels.sort(key=lambda s: (not any(m.gpu for m in s.mutants), STAGES.index(s.stage), s.id))
    say(
        f"device: cuda ({why}); {len(kernels)} specs, {len(chosen) - len(kernels)} without a kernel"
    )
    found: list[mutate_gpu.Found] = []

    def show(one: mutate_gpu.Found) -> None:
        found.append(one)
        say(str(one))

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` sends it
    try:
        with orphans.ended():
            mutate_gpu.check(root, kernels, workers=workers, part=part, show=show)
        code = 0 if all(one.ok for one in found) else 1
    except KeyboardInterrupt:
        say("interrupted")
        code = 130
    except (LookupError, OSError, RuntimeError) as error:
        say(f"FAILED {error}")
        code = 1
    finally:
        signal.signal(signal.SIGTERM, before)
    say(mutate_gpu.total(found, kernels))
    return code
