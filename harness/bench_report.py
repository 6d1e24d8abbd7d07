"""How cost grows: tables and plots of time against each size, with the floor drawn in.

The sizes are those that a spec's oracle names in `work` (M, T, P, B, V ..). Cases of a spec that
differ in one size alone are a curve; three of them are worth drawing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.report import replace_file, replacing

if TYPE_CHECKING:
    from harness.bench import Row

FEWEST = 3
MEANING = {
    "B": "nodes of the draft tree", "H": "heads", "K": "columns of the weights",
    "L": "draft positions", "M": "tokens", "N": "rows of the weights", "P": "prefix in tokens",
    "R": "requests", "T": "tree nodes", "V": "vocabulary",
}  # fmt: skip
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

Curves = dict[tuple[str, str], dict[str, list["Row"]]]


def curves(rows: Sequence[Row]) -> Curves:
    """(stem, size) -> the other sizes in words -> rows, ascending in that size."""
    found: Curves = {}
    for row in rows:
        stem = Path(row.id.partition("::")[0]).stem
        for size in row.sizes if row.time_us else ():
            others = {n: v for n, v in row.sizes.items() if n != size}
            group = found.setdefault((stem, size), {})
            group.setdefault(_words(others), []).append(row)
    kept: Curves = {}
    for (stem, size), group in sorted(found.items()):
        long = {
            words: sorted(line, key=lambda row: row.sizes[size])
            for words, line in group.items()
            if len({row.sizes[size] for row in line}) >= FEWEST
        }
        if long:
            kept[stem, size] = _shortened(long)
    return kept


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in sizes.items())


def _shortened(group: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Without the sizes that all curves of a picture share."""
    if len(group) == 1:
        return group
    parts = {words: words.split(", ") for words in group}
    shared = set.intersection(*(set(p) for p in parts.values()))
    return {
        ", ".join(p for p in parts[words] if p not in shared): line for words, line in group.items()
    }


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """growth.md and a picture (svg and png) for each curve or bundle of them; what was written."""
    found = curves(rows)
    text = folder / "growth.md"
    replace_file(text, markdown(rows, found).encode())
    written = [text]
    for (stem, size), group in found.items():
        for suffix in ("svg", "png"):
            path = folder / f"{stem}-{size}.{suffix}"
            _draw(stem, size, group, path, rows[0].gpu)
            written.append(path)
    return written


def markdown(rows: Sequence[Row], found: Curves) -> str:
    """The curves as tables, and what the GPU did at most."""
    top = rows[0]
    matrix = f", {top.matrix_flops_per_s / 1e12:.0f} TFLOP/s" if top.matrix_flops_per_s else ""
    lines = [
        f"# How cost grows on {top.gpu}",
        "",
        f"{top.uuid}, driver {top.driver}. At most, in this run: copy "
        f"{top.copy_bytes_per_s / 1e12:.2f} TB/s, read {top.read_bytes_per_s / 1e12:.2f} TB/s"
        f"{matrix}. Medians; the floor is the larger of bytes over the copy bandwidth and "
        "operations over the matrix rate.",
    ]
    for (stem, size), group in found.items():
        lines += ["", f"## {stem}, {size} ({MEANING.get(size, size)})"]
        for words, line in group.items():
            names = sorted({n for row in line for n, t in row.peers.items() if _is_time(t)})
            head = [size, "us", "p10", "p90", "floor us", "share", *(f"{n}, us" for n in names)]
            lines += ["", f"{words}:" if words else "", "", _cells(head)]
            lines.append("|" + "---:|" * len(head))
            for row in line:
                theirs = [f"{t:.1f}" if _is_time(t := row.peers.get(n)) else "-" for n in names]
                lines.append(
                    _cells(
                        [
                            str(row.sizes[size]),
                            f"{row.time_us:.1f}",
                            f"{row.p10_us:.1f}",
                            f"{row.p90_us:.1f}",
                            f"{row.floor_us:.1f}",
                            f"{row.share:.0%}",
                            *theirs,
                        ]
                    )
                )
    return "\n".join(lines) + "\n"


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float))


def _cells(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _draw(stem: str, size: str, group: dict[str, list[Row]], path: Path, gpu: str) -> None:
    """Time solid with its p10 to p90, the floor dashed in the same colour, peers dotted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=(7.2, 4.4), layout="constrained")
    ticks = sorted({row.sizes[size] for line in group.values() for row in line})
    for index, (words, line) in enumerate(group.items()):
        colour = COLOURS[index % len(COLOURS)]
        at = [row.sizes[size] for row in line]
        own = f"{words}: " if len(group) > 1 else ""
        axes.fill_between(
            at, [r.p10_us for r in line], [r.p90_us for r in line], color=colour, alpha=0.15, lw=0
        )
        axes.plot(at, [r.time_us for r in line], "o-", color=colour, label=f"{own}{stem}")
        axes.plot(at, [r.floor_us for r in line], "--", color=colour, label=f"{own}floor", lw=1)
        names = sorted({n for row in line for n, t in row.peers.items() if _is_time(t)})
        for name, marker in zip(names, "xs^dv", strict=False):
            points = [(r.sizes[size], r.peers[name]) for r in line if _is_time(r.peers.get(name))]
            axes.plot(
                *zip(*points, strict=True), marker=marker, ls=":", color=colour, lw=1, ms=4,
                alpha=0.7, label=f"{own}{name}",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"{size}: {MEANING.get(size, size)}")
    axes.set_ylabel("us")
    axes.set_title(f"{stem} on {gpu}{_common(group, size)}", fontsize=10)
    axes.grid(True, which="major", alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    with replacing(path) as temporary:
        date = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(temporary, dpi=110, metadata=date)
    pyplot.close(figure)


def _common(group: dict[str, list[Row]], size: str) -> str:
    """The sizes that all rows of a picture share, in words."""
    rows = [row for line in group.values() for row in line]
    first = {n: v for n, v in rows[0].sizes.items() if n != size}
    shared = {n: v for n, v in first.items() if all(r.sizes.get(n) == v for r in rows)}
    return f", {_words(shared)}" if shared else ""
