"""The command `kdtr mutate`: kill certificates, made and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness import console, orphans
from harness.console import Device, fail, say

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
    on_gpu = choice.device == "cuda"
    try:
        with orphans.ended():
            if check or on_gpu:
                problems = mutate.check(
                    root, chosen, workers=count, device=choice.device, part=part, say=say
                )
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
