"""kdtr quant sweep|drafter: what a 4-bit scheme costs, for the model and for its drafter.

Reached by name when a command runs: `goldens.quantise`, `goldens.acceptance`, `goldens.numerics`.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from harness.cli_bundle import PROMPT_TOKENS, STEPS, BundlePath, open_bundle, some_prompts
from harness.console import columns, fail, ids, row, say, show, told
from harness.report import replacing

app = typer.Typer(no_args_is_help=True, help="Choose a 4-bit scheme on evidence.")


@app.command("sweep")
def sweep(
    path: BundlePath,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", help="The plot: .png, .svg or .pdf.")
    ] = Path("report", "quant_sweep.svg"),
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="The table as CSV.")
    ] = None,
    group: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Only this group size. Repeatable.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Greedy tokens after a prompt.")] = STEPS,
) -> None:
    """Quantise a model in every way and measure what each costs.

    Group size, symmetric or asymmetric codes, how the scale is found and which matrices are
    quantised, against bits a weight, weight error, KL divergence of the logits from the unquantised
    model's and the first greedy token that differs. All in float64: the activations are not
    rounded, so what differs is due to the weights. A star marks the rows that no other beats in
    both bits of the model and KL divergence.
    """
    quantise = importlib.import_module("goldens.quantise")
    if plot.suffix not in (".png", ".svg", ".pdf"):
        fail(f"--plot: expected .png, .svg or .pdf, got {plot}")
    opened = open_bundle(path)
    prompts = opened.prompts or some_prompts(opened.config)
    packed = sum(name.endswith(".qw") for name in opened)
    if packed:
        say(
            f"note: {packed} matrices of {path} are INT4 already; the sweep quantises their INT4 "
            "values again and takes these for the truth"
        )
    if not opened.prompts:
        say(f"note: {path} has no prompts; {len(prompts)} from a fixed seed stand in")
    groups = []
    for each in group or quantise.GROUPS:
        if each < 1:
            fail(f"--group: expected a size >= 1, got {each}")
        why = quantise.undivided(opened, each)
        if why:
            say(f"group {each} left out: {why}")
        else:
            groups.append(each)
    if not groups:
        fail("no group size divides the matrices of this model", 1)
    console = Console(stderr=True)
    rows = []
    with told(), console.status("quantising") as status:
        for each in quantise.sweep(opened, opened.config, prompts, steps=steps, groups=groups):
            rows.append(each)
            status.update(f"quantised {each.matrices}, group {each.scheme.group}")
    show_sweep(path, rows, steps)
    if table is not None:
        with told():
            write_csv(table, rows)
        say(f"table: {table}")
    with told():
        sweep_plot(plot, opened.name or path.stem, rows)
    say(f"plot: {plot}")


@app.command("drafter")
def drafter_on_int4(
    path: BundlePath,
    budgets: Annotated[
        str, typer.Option(metavar="B,..", help="Most nodes of a tree below its root.")
    ] = "0,1,7,16,64,256",
    texts: Annotated[int, typer.Option(metavar="N", help="Prompts, from a fixed seed.")] = 32,
    new: Annotated[int, typer.Option(metavar="N", help="Greedy tokens after a prompt.")] = 64,
) -> None:
    """What a drafter loses when its target is quantised: accepted tokens a round, FP32 and INT4.

    The bundle is a float32 model with a drafter that was calibrated on it; its INT4 model is made
    here. Each target drafts from its own hidden states and verifies its own greedy text. Rounds are
    played along these texts, in float64 and without a GPU; only the weights differ.
    """
    acceptance = importlib.import_module("goldens.acceptance")
    numerics = importlib.import_module("goldens.numerics")
    wanted = ids(budgets, "--budgets")
    opened = open_bundle(path)
    if "drafter" not in opened.config:
        fail(f"{path} has no drafter: kdtr bundle make NAME --drafter adds one", 1)
    if opened["model.embed_tokens.weight"].dtype != np.float32:
        fail(f"{path} is no float32 model: its INT4 model would be no other", 1)
    slots = opened.config["drafter"]["block_size"]
    if texts < 2 or new <= slots or min(wanted) < 0:
        fail(f"--texts at least 2, --new more than {slots}, --budgets not below 0")
    stream = numerics.Stream("quant drafter")
    prompts = stream.integers(2, opened.config["vocab_size"], (texts, PROMPT_TOKENS))
    with told(), Console(stderr=True).status("decoding with both targets"):
        plain, packed, rows = acceptance.compare(opened, opened.config, prompts, new, wanted)
        parting = acceptance.agreement(plain, packed)
    names = ("budget", "FP32 target", "", "INT4 target", "", "change", "")
    table = columns(f"accepted tokens a round, drafter of {path}", *names)
    for one, other in rows:
        change, error = one.change(other)
        row(
            table,
            one.budget,
            f"{one.mean:.2f}",
            f"± {one.error:.2f}",
            f"{other.mean:.2f}",
            f"± {other.error:.2f}",
            f"{change:+.1%}",
            f"± {error:.1%}",
        )
    show(table)
    rounds = [sum(map(len, one.lengths)) for one, _ in rows]
    say(
        f"{texts} prompts of {PROMPT_TOKENS} tokens that no training saw, {new} greedy tokens after"
    )
    say(f"each, {min(rounds)} to {max(rounds)} rounds a row. The root counts; ± standard error.")
    first = f"FP32 {plain.first_slot():.1%}, INT4 {packed.first_slot():.1%}"
    say(f"Best guess at the first slot is right: {first}. Both targets' texts")
    say(
        f"agree for {np.median(parting):.0f} tokens in the median, for all {new} in "
        f"{(parting == new).sum()} of {texts}."
    )


def unbeaten(rows: Sequence[Any]) -> set[int]:
    """Indices of the rows that no other beats in both bits of the model and KL divergence."""
    return {
        i
        for i, one in enumerate(rows)
        if not any(
            other.model_bits <= one.model_bits
            and other.kl <= one.kl
            and (other.model_bits, other.kl) != (one.model_bits, one.kl)
            for other in rows
        )
    }


def show_sweep(path: Path, rows: Sequence[Any], steps: int) -> None:
    names = ("<matrices", "count", "group", "<scheme", "bits", "model bits", "weight error")
    table = columns(f"4-bit schemes for {path}", *names, "KL, nats", "", "<first difference", "")
    stars, last = unbeaten(rows), None
    for at, each in sorted(enumerate(rows), key=lambda pair: (pair[1].count, pair[0])):
        if last not in (None, each.matrices):
            table.add_section()
        last = each.matrices
        row(
            table,
            each.matrices,
            each.count,
            each.scheme.group,
            each.scheme.name,
            f"{each.scheme.bits:.3f}",
            f"{each.model_bits:.2f}",
            f"{each.weight_error:.2%}",
            f"{each.kl:.4f}",
            f"± {each.kl_error:.4f}",
            " ".join("none" if where is None else str(where) for where in each.differs),
            "*" if at in stars else "",
        )
    show(table)
    say("bits: of a quantised weight with its scale; model bits: mean over all weights, 16 for")
    say("one that is not quantised. KL: mean over all positions, ± its standard error. First")
    say(f"difference: of {steps} greedy tokens, a number for each prompt. *: no other row has")
    say("both fewer model bits and less KL.")


def write_csv(path: Path, rows: Sequence[Any]) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            "matrices count group symmetric scale bits model_bits weight_error kl kl_error "
            "first_difference".split()
        )
        for each in rows:
            scheme = each.scheme
            differs = " ".join("none" if where is None else str(where) for where in each.differs)
            writer.writerow(
                [
                    *(each.matrices, each.count, scheme.group, scheme.symmetric, scheme.scale),
                    *(scheme.bits, each.model_bits, each.weight_error, each.kl, each.kl_error),
                    differs,
                ]
            )


def sweep_plot(path: Path, name: str, rows: Sequence[Any]) -> None:
    """KL divergence against bits a quantised weight, a panel a set; weight error in the last."""
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(each.matrices for each in rows))
    kinds = list(dict.fromkeys(each.scheme.name for each in rows))
    colours = ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#cc79a7")
    styles = {
        kind: {"color": colour, "marker": marker, "ms": 5, "lw": 1.2, "label": kind}
        for kind, colour, marker in zip(kinds, colours, "os^Dv", strict=False)
    }
    figure = Figure(figsize=(3.5 * (len(sets) + 1), 4.2), layout="constrained")
    axes = figure.subplots(1, len(sets) + 1, sharex=True)
    for axis, matrices in zip(axes, [*sets, sets[-1]], strict=True):
        for kind in kinds:
            line = [r for r in rows if (r.matrices, r.scheme.name) == (matrices, kind)]
            bits = [r.scheme.bits for r in line]
            if axis is axes[-1]:
                axis.plot(bits, [100 * r.weight_error for r in line], **styles[kind])
            else:
                kl, error = [r.kl for r in line], [r.kl_error for r in line]
                axis.errorbar(bits, kl, error, elinewidth=0.7, capsize=2, **styles[kind])
            if kind == kinds[0] and axis is axes[0]:
                for each in line:
                    axis.annotate(
                        f"group {each.scheme.group}",
                        (each.scheme.bits, each.kl),
                        xytext=(6, 5),
                        textcoords="offset points",
                        fontsize=8,
                        color=styles[kind]["color"],
                    )
        count = next(r.count for r in rows if r.matrices == matrices)
        axis.set_title(f"{matrices} ({count} matrices)", fontsize=10)
        axis.set_xlabel("bits a quantised weight")
        axis.grid(alpha=0.3, lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    top = 1.08 * max(r.kl + r.kl_error for r in rows)
    for axis in axes[:-1]:
        axis.set_ylim(0, top)
    axes[-1].set_ylim(bottom=0)
    axes[0].set_ylabel("KL divergence of the logits, nats")
    axes[-1].set_ylabel("weight error, % of RMS")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(kinds), frameon=False)
    figure.suptitle(f"{name}: what a 4-bit scheme costs")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
