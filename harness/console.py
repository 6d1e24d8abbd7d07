"""What the commands of `kdtr` share: options, one way to fail, one way to print a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from harness.devices import Choice
    from harness.spec import Spec

WIDTH = 160  # columns of a table that goes to a file


class Device(StrEnum):
    auto = "auto"
    cuda = "cuda"
    sim = "sim"


# Options are named: typer 0.27 takes the name of an enum's option from its metavar.
Specs = Annotated[
    list[str] | None,
    typer.Option("--spec", metavar="NAME", help="Only this spec, by its stem. Repeatable."),
]
Cases = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="NAME", help="Only this case. Repeatable."),
]
Kernel = Annotated[
    str | None,
    typer.Option(
        "--kernel",
        metavar="MODULE:FUNCTION",
        help="Judge this launcher in place of the one that the spec names; with one --spec.",
    ),
]
OnDevice = Annotated[
    Device,
    typer.Option(
        "--device",
        metavar="auto|cuda|sim",
        help="auto: the GPUs if they are usable, else the simulator.",
    ),
]
Workers = Annotated[
    str, typer.Option("-n", metavar="N", help="Worker processes. auto: one a GPU, or a core.")
]
Folder = Annotated[Path, typer.Option("--report", metavar="DIR", help="Where the report goes.")]
LeaseWait = Annotated[
    float,
    typer.Option(
        "--lease-wait", min=0, metavar="S", help="Seconds to wait for GPUs that others hold."
    ),
]


def worker_count(text: str, *, least: int = 1) -> int | None:
    """A number of workers; None for auto. Leaves with a message for anything else."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < least:
        fail(f"-n takes a number or auto, got {text!r}")
    return int(text)


def one_spec(kernel: str | None, specs: Sequence[str] | None) -> None:
    """Leave with a message if a launcher is given and not the one spec that it stands in for."""
    if kernel and len(specs or ()) != 1:
        fail("--kernel stands in for the kernel of one spec: say which with --spec NAME")


def specs_named(names: Sequence[str] | None) -> list[Spec]:
    """The specs of these names, or all there are. Leaves with a message if there is none, or one
    that cannot be read."""
    from harness import devices, stages

    try:
        every = stages.load_specs(Path.cwd())
        asked = stages.select(every, devices.Choice("sim", (), ""), names=names or ())
    except LookupError as error:
        fail(error)
    if asked.broken:
        fail("\n".join(str(error) for error in asked.broken), 1)
    return list({s.id: s for s, _ in asked.here + asked.elsewhere}.values())


def chosen_device(device: Device) -> Choice:
    """What a run uses. Leaves with a message where a GPU is asked for in vain."""
    from harness import devices

    try:
        return devices.choose(device.value)
    except devices.DeviceError as error:
        fail(error)


# -- what is said ----------------------------------------------------------------------------------


def fail(error: object, code: int = 2) -> NoReturn:
    """One message on stderr, no traceback: 2 for a call that cannot be served, 1 for what is bad
    in itself: a verdict, a file."""
    print(f"kdtr: {error}", file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def told() -> Iterator[None]:
    """Turn the errors that a person can mend into one message."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(error, 1)


def say(line: str = "") -> None:
    print(line, flush=True)


def show(renderable: Any) -> None:
    """Print something of rich's: as wide as the terminal, or as it needs to be in a file."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(renderable)


def columns(title: str, *names: str) -> Table:
    """An empty table; a name that begins with "<" is left aligned, the others right."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in names:
        left = name.startswith("<")
        table.add_column(name.removeprefix("<"), justify="left" if left else "right")
    return table


def row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))  # Text: names are no markup


def size(count: float) -> str:
    """Bytes for a person: 4.7 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def ids(text: str, what: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        fail(f"{what}: expected numbers with commas between, like 1,2,3, got {text!r}")
