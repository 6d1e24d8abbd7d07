"""The command `kdtr`: gate, golden, doctor, compile, report, and what other modules add.

Everything heavy is imported by the command that needs it: `kdtr --help` loads no numba, and the
gate runs pytest in a process of its own, because a device is chosen once a process.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness import console
from harness.console import Device, fail, say, show

if TYPE_CHECKING:
    from harness.sources import Snapshot

# Commands that live elsewhere: name, "module:attribute", help. A module that is not there takes
# its own command away and no other.
ELSEWHERE = (
    ("bench", "harness.bench:app", "Time cases with bench = true against floor and baseline."),
    ("mutate", "harness.cli_mutate:app", "Plant faults in kernels: the specs must catch them."),
    ("fuzz", "harness.cli_fuzz:app", "Draw cases inside the specs' [fuzz] ranges and judge them."),
    ("bundle", "harness.cli_bundle:app", "Make, look into and check .kdtr bundles."),
    ("import", "harness.cli_bundle:app", "Make a bundle of a public checkpoint."),
    ("quant", "harness.cli_quant:app", "Choose a 4-bit scheme on evidence."),
    ("forward", "harness.cli_forward:app", "Run a bundle's model over a prompt and a tree."),
    ("decode", "harness.cli_decode:app", "Decode with tree speculation."),
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in a help text are brackets
    help="Judge GPU kernels against numpy goldens: a spec, an oracle, a verdict for each case.",
)
golden_app = typer.Typer(no_args_is_help=True, help="Goldens against their manifest.")
report_app = typer.Typer(no_args_is_help=True, help="Reports of earlier runs.")
app.add_typer(golden_app, name="golden")
app.add_typer(report_app, name="report")


class Stage(StrEnum):
    golden = "golden"
    kernel = "kernel"
    layer = "layer"
    model = "model"
    decode = "decode"


def main() -> None:
    """Entry point of the console script."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the next file that is opened would be it
            setattr(sys, name, Path(os.devnull).open(mode))
            os.set_inheritable(getattr(sys, name).fileno(), True)  # pytest's too
    # A shell starts `kdtr gate &` with SIGINT ignored, and what that starts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run()
    except (OSError, MemoryError) as error:  # a full disk, a folder for a file: it names what
        print(f"kdtr: {error}", file=sys.stderr)
        sys.exit(1)


def _run() -> None:
    sys.path.insert(0, str(Path.cwd()))  # kernels and oracles of the project one stands in
    called = next((a for a in sys.argv[1:] if not a.startswith("-")), "")
    for name, target, text in ELSEWHERE:
        if not _there(target):
            continue
        if name == called:
            mount(name, target, text)
        else:
            app.command(name, help=text)(_imported_when_called)
    app(prog_name="kdtr")


def _there(target: str) -> bool:
    try:
        return importlib.util.find_spec(target.partition(":")[0]) is not None
    except ImportError:
        return False


def _imported_when_called() -> None:
    """Stands in `kdtr --help` for a command of another module."""


def mount(name: str, target: str, text: str) -> None:
    """Put the command `name` of the Typer application `target` ("module:attribute") into ours."""
    module, _, attribute = target.partition(":")
    theirs = getattr(importlib.import_module(module), attribute)
    commands, groups = theirs.registered_commands, theirs.registered_groups
    alone = len(commands) == 1 and not groups and theirs.registered_callback is None
    for command in commands:
        known_as = command.name or command.callback.__name__.strip("_").replace("_", "-")
        if known_as == name or alone:
            command.name = name
            app.registered_commands.append(command)
            return
    for group in groups:
        if group.name == name:
            app.registered_groups.append(group)
            return
    app.add_typer(theirs, name=name, help=text)


# -- gate ------------------------------------------------------------------------------------------


@app.command()
def gate(
    stage: Annotated[
        list[Stage] | None,
        typer.Option(
            "--stage", metavar="STAGE", help="golden, kernel, layer, model or decode. Repeatable."
        ),
    ] = None,
    spec: console.Specs = None,
    case: console.Cases = None,
    kernel: console.Kernel = None,
    device: console.OnDevice = Device.auto,
    workers: console.Workers = "auto",
    report: console.Folder = Path("report"),
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Write ci/receipts/GPU.json; needs a real GPU.")
    ] = False,
    require_receipts: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="Fail unless every case has a fresh receipt of this GPU."),
    ] = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only shard I of N, counted from 1.")
    ] = None,
    out_of_order: Annotated[
        bool, typer.Option("--out-of-order", help="Run a stage though earlier ones did not pass.")
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on with later stages after one failed.")
    ] = False,
    lease_wait: console.LeaseWait = 600.0,
) -> None:
    """Judge kernels. Exit 0 only if every case that was asked for ran and passed.

    Stages run in order, and the first that fails ends the run. Cases that this machine cannot run
    are listed with the state of their GPU receipts; they never count as passed.
    """
    from harness import devices, receipts, stages
    from harness.spec import STAGES

    root = Path.cwd()
    chosen = [s for s in STAGES if not stage or s in [one.value for one in stage]]
    count = console.worker_count(workers, least=0)
    console.one_spec(kernel, spec)
    if kernel and (missing := stages.missing_module(kernel)):
        fail(missing)
    narrowing = {"stages": chosen, "names": spec or [], "cases": case or []}
    try:
        part = devices.shard(shard) if shard else None
        choice = devices.choose(device.value)
        specs = stages.load_specs(root)
        asked = stages.select(specs, choice, shard=part, **narrowing)
        for gpu in receipts.known(root):
            receipts.read(root, gpu)  # a damaged file is told now, not after the run
    except (LookupError, ValueError, devices.DeviceError) as error:
        fail(error)
    if receipt and choice.device != "cuda":
        fail(f"--receipt is evidence from a GPU, and this run is in the simulator ({choice.why})")
    if case and asked.elsewhere:
        names = ", ".join(s.case_id(c) for s, c in asked.elsewhere)
        fail(f"asked for and cannot run here ({choice.why}): {names}", 1)
    try:
        report.mkdir(parents=True, exist_ok=True)
        if not os.access(report, os.W_OK):
            fail(f"--report {report}: cannot be written to; name another folder")
    except OSError as error:
        fail(f"--report {report}: {error}; name another folder")
    say(f"device: {choice.device} ({choice.why})")
    narrowed = bool(spec or case or kernel or shard)
    run = stages.Gate(
        root=root,
        specs=specs,
        asked=asked,
        choice=choice,
        device=device.value,
        workers=count,
        kernel=kernel,
        shard=part,
        lease_wait=lease_wait,
        folder=report,
        narrowing=narrowing,
        whole=not narrowed,
        enforce=bool(stage) and not narrowed and not out_of_order,
        keep_going=keep_going or narrowed,
        require=require_receipts,
        receipt=receipt,
        say=say,
        show=show,
    )
    raise typer.Exit(run.run(chosen))


# -- goldens ---------------------------------------------------------------------------------------

Specs = Annotated[list[str] | None, typer.Argument(help="Stems of specs. None: all of them.")]


@golden_app.command("verify")
def golden_verify(
    specs: Specs = None,
    sim: Annotated[
        bool, typer.Option("--sim", help="Only cases with sim = true: what CI has time for.")
    ] = False,
) -> None:
    """Make the goldens again and compare them with goldens/manifest.toml. Exit 1 if any differs."""
    from harness import manifest

    chosen = console.specs_named(specs)
    pairs = [
        (s, c)
        for s in chosen
        for c in s.cases.values()
        if (c.sim or not sim) and manifest.fits(s, c)
    ]
    try:
        differences = manifest.verify(chosen, select=lambda _, case: case.sim or not sim)
    except ValueError as error:
        fail(error, 1)
    for line in differences:
        say(line)
    if any("not in " in line for line in differences):
        say("kdtr golden generate --reason WHY puts them into the manifest")
    say(f"{len(pairs)} cases of {len(chosen)} specs, {len(differences)} differences")
    raise typer.Exit(1 if differences or not pairs else 0)


@golden_app.command("generate")
def golden_generate(
    specs: Specs = None,
    reason: Annotated[str, typer.Option(help="Why they change; goes into the manifest.")] = "",
) -> None:
    """Rewrite the manifest's entries and print what changed. Needs --reason."""
    from harness import manifest, report

    try:
        changes = manifest.generate(console.specs_named(specs), reason)
    except (ValueError, PermissionError) as error:
        fail(error)
    except report.Fault as fault:
        fail(f"{fault.status}: {fault.message}; nothing was written", 1)
    for line in changes:
        say(line)
    say(f"{len(changes)} changes")


# -- the rest --------------------------------------------------------------------------------------


@app.command("receipts")
def receipts_(
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="GPU", help="Only this one's, as h200. Repeatable."),
    ] = None,
) -> None:
    """Say what is proven: cases that a GPU passed from these sources, and specs that can fail.

    Runs nothing. A receipt is a row of ci/receipts/GPU.json; it is stale when the spec, its oracle
    or its kernel have changed since. Exit 0 whatever it finds: kdtr gate --require-receipts judges.
    """
    from harness import certificates, receipts, sources, stages

    root = Path.cwd()
    try:
        specs = stages.readable(stages.load_specs(root))
        seen = sources.Snapshot()
        for name in gpu or receipts.known(root):
            show_receipts(root, name, specs, seen)
    except (LookupError, ValueError) as error:
        fail(error)
    say(f"certificates: {certificates.total(certificates.summary(root, specs, seen))}")


def show_receipts(root: Path, gpu: str, specs: list, seen: Snapshot) -> None:
    """A row a stage: its cases by the state of their receipts of one GPU; then those not fresh."""
    from harness import receipts, stages
    from harness.spec import STAGES

    table = console.columns(f"receipts of {gpu}", "<stage", "cases", *receipts.State, "sanitized")
    behind: dict[str, list[str]] = {}
    for stage in STAGES:
        pairs = [(s, c) for s in specs if s.stage == stage for c in s.cases.values()]
        found = receipts.standing(root, gpu, pairs, seen)
        states = [one.state for one in found]
        counts = [states.count(state) or "" for state in receipts.State]
        clean = sum("sanitizer" in (one.row or {}) for one in found)
        console.row(table, stage, len(found), *counts, clean or "")
        for one in found:
            if one.state is not receipts.State.FRESH:
                behind.setdefault(one.state, []).append(one.id)
    show(table)
    for state, ids in sorted(behind.items()):
        say(f"{state}: {len(ids)}")
        for line in stages.folded(ids):
            say(f"  {line}")


@app.command()
def doctor() -> None:
    """Say what is on this machine and what follows from it. Exit 1 if the gate cannot run."""
    from harness import doctor

    findings = doctor.examine()
    for finding in findings:
        say(str(finding))
    raise typer.Exit(1 if any(f.level == doctor.BAD for f in findings) else 0)


@app.command(
    "compile",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def compile_(context: typer.Context) -> None:
    """Compile every kernel to SASS, for three architectures and without a GPU."""
    from harness import devices

    if not devices.toolkit() and "--help" not in context.args:
        fail("no CUDA toolkit to compile with: pip install 'kdtree-engine[cu13]'")
    raise typer.Exit(importlib.import_module("engine.compile_gate").main(context.args))


@report_app.command("merge")
def report_merge(
    reports: Annotated[list[Path], typer.Argument(help="Folders or report.json of all shards.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the merged report goes.")] = Path(
        "report"
    ),
    receipt: Annotated[
        bool, typer.Option("--receipt", help="Write ci/receipts/GPU.json from the merged report.")
    ] = False,
) -> None:
    """Join the reports of the shards of one run, made with kdtr gate --shard I/N.

    Fails on a shard that is missing, doubled or made from other sources, and on a case that has
    no verdict or a bad one: the exit code is that of the gate in one piece.
    """
    from harness import merge, receipts, report, stages

    try:
        specs = stages.load_specs(Path.cwd())
        verdicts, context = merge.shards(reports, receipts.sources_digest(specs))
    except (LookupError, merge.MergeError) as error:
        fail(error, 1)
    if receipt and context["device"] != "cuda":
        fail("--receipt is evidence from a GPU, and these runs were in the simulator")
    written = report.write(out / "report.json", verdicts, **context)
    show(report.table(verdicts))
    for case in written["cases"]:
        if not case["ok"]:
            say("\n" + case["text"])
    if receipt:
        for path in receipts.record(Path.cwd(), written, stages.readable(specs)):
            say(f"receipt: {path}")
    gone = stages.unjudged(written, specs)
    for each in gone:
        say(f"FAILED {each} was asked for and has no verdict")
    totals = written["totals"]
    say(f"\n{totals['passed']} passed, {totals['failed']} failed; {out / 'report.html'}")
    raise typer.Exit(0 if totals["ok"] and not gone else 1)


if __name__ == "__main__":
    main()
