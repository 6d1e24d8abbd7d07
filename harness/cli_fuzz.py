"""The command `kdtr fuzz`: cases drawn inside the [fuzz] ranges of specs, failures made small."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness import console, devices, orphans, sources
from harness.console import Device, fail, say
from harness.fuzz import EXAMPLES, Fuzz, Outcome, number

app = typer.Typer()


@app.command()
def fuzz(
    spec: console.Specs = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="How long to draw in all, first cases not counted."),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(min=1, help=f"How many cases of each spec. {EXAMPLES} if neither is given."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="None: from spec, oracle and kernel, so that other code gets other cases."
        ),
    ] = None,
    kernel: console.Kernel = None,
    device: console.OnDevice = Device.auto,
    workers: console.Workers = "auto",
    lease_wait: console.LeaseWait = devices.LEASE_WAIT_S,
) -> None:
    """Draw cases inside the specs' [fuzz] ranges and judge them as the gate does.

    A case that fails is made smaller and printed as a line for the spec's [cases]. Exit 0 only if
    every spec was judged at least once and no case failed.
    """
    if seconds is not None and examples is not None:
        fail("--seconds or --examples, not both")
    count = console.worker_count(workers)
    console.one_spec(kernel, spec)
    named, choice = console.specs_named(spec), console.chosen_device(device)
    chosen = [s for s in named if s.fuzz]
    if not chosen:
        where = ", ".join(spec or ["any spec"])
        fail(f"no [fuzz] table in {where}: specs/README.md says what to write")
    leases = devices.Leases(choice.gpus, wait_s=lease_wait)
    count = count or (leases.workers() if choice.gpus else devices.cores())
    each = None if seconds is None else seconds * min(count, len(chosen)) / len(chosen)
    jobs = [
        {
            "path": str(one.path),
            "device": choice.device,
            "seed": number(sources.digest(one, kernel=kernel)) >> 32 if seed is None else seed,
            "seconds": each,
            "examples": EXAMPLES if seconds is None and examples is None else examples,
            "kernel": kernel,
        }
        for one in chosen
    ]
    without = len(named) - len(chosen)
    say(f"device: {choice.device} ({choice.why}); {len(chosen)} specs, {without} without [fuzz]")
    outcomes: list[Outcome] = []

    def show(one: Outcome) -> None:
        outcomes.append(one)
        say(line(one))

    try:
        with orphans.ended():
            Fuzz(Path.cwd(), choice, jobs, count, leases).run(show)
    except KeyboardInterrupt:
        say(f"interrupted: {len(chosen) - len(outcomes)} specs were not explored to the end")
    except devices.DeviceError as error:
        say(f"FAILED {error}")
    bad = conclude(outcomes)
    raise typer.Exit(130 if len(outcomes) < len(chosen) else 1 if bad else 0)


def line(one: Outcome) -> str:
    """A spec's outcome, and what was drawn for it."""
    drawn = "; ".join(f"{name} {text}" for name, text in one.seen.items())
    refused = f", {one.refused} unsupported" if one.refused else ""
    mark = "" if one.ok else "FAILED " if one.case or one.text else "NOTHING JUDGED "
    return f"{mark}{one.spec}: {one.judged} judged{refused}, {one.seconds:.1f} s; {drawn}"


def conclude(outcomes: list[Outcome]) -> int:
    """Say each failure with the line for its spec, and the totals; how many specs are not ok."""
    for one in outcomes:
        if one.case or one.text:
            say(f"\n{one.text}\n  again   {one.again}")
            say(f"\nfor [cases] of specs/{one.spec}.toml, under the name of the hazard:")
            say(one.case)
    judged, refused = (sum(getattr(o, name) for o in outcomes) for name in ("judged", "refused"))
    bad = sum(not o.ok for o in outcomes)
    say(f"\n{judged} cases of {len(outcomes)} specs, {refused} unsupported, {bad} specs failed")
    return bad
