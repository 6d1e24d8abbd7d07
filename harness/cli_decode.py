"""The command `kdtr decode`: tokens as they come, then what the rounds did and where time went.

The loops are reached by name when the command runs: `goldens.decode` in numpy, `engine.decode` on
a GPU or in the simulator. Both take the same settings and return the same fields. With --tp the
engine runs as so many ranks, on GPUs that are leased here; in the simulator they take turns.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from harness.cli_bundle import BundlePath, listing, open_bundle
from harness.console import columns, fail, ids, row, say, show

app = typer.Typer()

MEASURE = "measure"  # of --costs
ONCE = ("load", "prefill")  # stages before the first round
ORDER = 3  # tokens of context that the ngram drafter matches at most


class Device(StrEnum):
    auto = "auto"
    cuda = "cuda"
    sim = "sim"
    reference = "reference"


class Mode(StrEnum):
    tree = "tree"
    chain = "chain"
    ar = "ar"


class Drafter(StrEnum):
    replay = "replay"
    ngram = "ngram"
    dflash = "dflash"


class Compare(StrEnum):
    ar = "ar"


@dataclass(frozen=True)
class Run:
    """What a loop returned, and how long it took."""

    requests: Sequence[Any]
    times: dict[str, float]
    seconds: float


@app.command("decode")
def decode(
    path: BundlePath,
    prompt_tokens: Annotated[
        list[str] | None,
        typer.Option(metavar="IDS", help="A prompt, like 3,4,5. Repeatable: a batch."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A prompt whose UTF-8 bytes are its token ids. Repeatable."),
    ] = None,
    drafter: Annotated[
        Drafter, typer.Option(metavar="replay|ngram|dflash", help="Where drafts come from.")
    ] = Drafter.ngram,
    accuracy: Annotated[
        str,
        typer.Option(metavar="P[,P..]", help="replay: how often the right token is at rank 0, 1.."),
    ] = "0.8",
    length: Annotated[
        int, typer.Option(metavar="L", help="Positions that a draft covers; dflash has its own.")
    ] = 7,
    budget: Annotated[int, typer.Option(metavar="B", help="Most nodes below the root.")] = 16,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="N:T,..|measure",
            help="Adaptive budget: time T of a round with N nodes, in any unit, linear between; "
            "measure: time the rounds of this model on this device first.",
        ),
    ] = None,
    max_new: Annotated[int, typer.Option(metavar="N", help="Tokens to generate.")] = 32,
    mode: Annotated[
        Mode, typer.Option(metavar="tree|chain|ar", help="ar: one token a round, no drafts.")
    ] = Mode.tree,
    device: Annotated[
        Device,
        typer.Option(metavar="auto|cuda|sim|reference", help="auto: a GPU, else the reference."),
    ] = Device.auto,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most probable token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling and of replay's mistakes.")] = 0,
    eos: Annotated[
        str | None, typer.Option(metavar="IDS", help="Tokens that end a text; none: never.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="Longest text (default: what the model allows).")
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", metavar="N", help="Split the model over N GPUs. The text and its logits stay."
        ),
    ] = None,
    compare: Annotated[
        Compare | None,
        typer.Option(metavar="ar", help="Decode one token at a time too, and compare."),
    ] = None,
) -> None:
    """Decode with draft trees: each round verifies a tree of guesses in one pass of the model.

    The text is the one that --mode ar gives, at every temperature; --compare ar checks it down to
    the bits of the logits and exits 1 if anything differs. `replay` decodes the text first and
    then guesses it with the given accuracy, to see what a drafter of that accuracy would bring.
    `dflash` is the drafter in the bundle: it reads the target's hidden states.
    """
    prompts = [ids(each, "--prompt-tokens") for each in prompt_tokens or ()]
    prompts += [list(each.encode()) for each in text or ()]
    if not prompts:
        fail("give a prompt: --prompt-tokens 3,4,5 or --text TEXT")
    chances = numbers(accuracy, "--accuracy")
    if not all(0 <= chance <= 1 for chance in chances):
        fail(f"--accuracy: expected shares from 0 to 1, got {accuracy!r}")
    ends = None if eos is None else [] if eos == "none" else ids(eos, "--eos")
    opened = open_bundle(path)
    vocabulary = opened.config["vocab_size"]
    for token in [token for each in (*prompts, ends or ()) for token in each]:
        if not 0 <= token < vocabulary:
            fail(f"token {token} is not one of the {vocabulary} of {path}")
    curve = None if costs in (None, MEASURE) else cost_curve(costs or "", budget)
    where = chosen(device, tp)
    if costs == MEASURE and not where.engine:
        fail("--costs measure times the engine: --device cuda or sim")
    settings: dict[str, Any] = {
        "max_new": max_new,
        "eos": ends,
        "context": context,
        "temperature": temperature,
        "seed": seed,
    }

    say(f"{path} on {where}: {mode.value}" + ("" if mode is Mode.ar else f", {drafter.value}"))
    try:
        with loop_at(where, path, opened) as (loop, measure):

            def run(mode: Mode, guesses: Any, **more: Any) -> Run:
                times: dict[str, float] = {}
                if where.engine and not where.ranks:  # ranks compare their logits
                    more["keep"] = compare is not None  # else they need not be copied back
                started = time.perf_counter()
                done = loop(
                    prompts, guesses, budget=budget, mode=mode.value, times=times, **settings,
                    **more,
                )  # fmt: skip
                return Run(done, times, time.perf_counter() - started)

            alone = None
            if compare or (drafter is Drafter.replay and mode is not Mode.ar):
                alone = run(Mode.ar, None)
            guesses = None
            if mode is not Mode.ar:
                guesses = made(
                    drafter, prompts, opened, length, budget, chances, seed, alone, where
                )
            if costs == MEASURE and mode is not Mode.ar:
                curve = measured(measure, prompts, guesses, budget, mode, temperature)
            done = run(mode, guesses, costs=curve, on_token=printer(len(prompts)))
    except typer.Exit:  # a RuntimeError too
        raise
    except (ValueError, OSError, RuntimeError, ArithmeticError) as error:
        fail(error, 1)
    print(flush=True)
    summary(done, len(prompts))
    if compare and alone is not None and not same(done.requests, alone.requests):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Place:
    name: str
    engine: bool  # the engine, on a GPU or in the simulator, or the numpy loop
    ranks: int | None = None

    def __str__(self) -> str:
        return self.name + (f", {self.ranks} ranks" if self.ranks else "")


def chosen(device: Device, ranks: int | None) -> Place:
    """Choose once, before anything loads numba."""
    if ranks is not None and (ranks < 1 or device is Device.reference):
        fail(f"--tp {ranks} on {device.value}: it takes 1 or more, and splits the engine alone")
    devices = importlib.import_module("harness.devices")
    if device in (Device.auto, Device.cuda):
        try:
            usable = devices.choose(device.value).device == "cuda"
        except devices.DeviceError as error:
            fail(error)
        device = Device.cuda if usable else Device.sim if ranks else Device.reference
    if device is Device.reference:
        return Place("reference", False)
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1" if device is Device.sim else "0"
    return Place(device.value, True, ranks)


@contextlib.contextmanager
def loop_at(where: Place, path: Path, opened: Any) -> Iterator[tuple[Callable, Callable]]:
    """decode(prompts, drafter, **settings) of that place, and what measures the costs of its
    rounds. Ranks and their GPUs are held as long."""
    if where.ranks is None:
        module = importlib.import_module("engine.decode" if where.engine else "goldens.decode")
        measure = getattr(module, "measured_costs", module.decode)  # numpy's is never asked
        alone = (opened, opened.config)
        yield partial(module.decode, *alone), partial(measure, *alone)
        return
    ranks = importlib.import_module("engine.ranks")
    if where.name == Device.sim:
        turns = (where.ranks, opened, opened.config)
        yield partial(ranks.decode_in_turns, *turns), partial(ranks.costs_in_turns, *turns)
        return
    devices = importlib.import_module("harness.devices")
    leases = devices.Leases(devices.choose("cuda").gpus, where.ranks)
    try:
        uuids = [gpu.uuid for gpu in leases.take().gpus]
        with importlib.import_module("engine.parallel").Ranks(uuids) as started:
            given = (started, str(path))
            yield partial(ranks.decode_on, *given), partial(ranks.costs_on, *given)
    finally:
        leases.close()


def numbers(text: str, what: str) -> list[float]:
    """ "0.5,0.3" -> [0.5, 0.3]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        fail(f"{what}: expected numbers with commas between, like 0.5,0.3, got {text!r}")


def cost_curve(text: str, budget: int) -> np.ndarray:
    """ "0:1,16:1.2,64:2" -> [budget + 1], linear between the points."""
    try:
        points = sorted(tuple(map(float, part.split(":"))) for part in text.split(","))
        nodes, costs = zip(*points, strict=True)
    except ValueError:
        fail(f"--costs: expected NODES:TIME pairs like 0:1,16:1.2,64:2, got {text!r}")
    if nodes[0] != 0 or nodes[-1] < budget or not all(0 < cost < math.inf for cost in costs):
        fail(f"--costs: need positive times for 0 to {budget} nodes, got {text!r}")
    return np.interp(np.arange(budget + 1), nodes, costs)


def measured(
    measure: Callable[..., dict[int, float]],
    prompts: Sequence[Sequence[int]],
    guesses: Any,
    budget: int,
    mode: Mode,
    temperature: float,
) -> np.ndarray:
    """[budget + 1] seconds of a round on this device, which it says; linear between the sizes that
    rounds have."""
    found = measure(
        prompts, guesses, budget=budget, mode=mode.value, temperature=temperature
    )  # fmt: skip
    points = ", ".join(f"{nodes}:{1e6 * seconds:.0f}" for nodes, seconds in found.items())
    say(f"a round with n nodes below the root takes, in us: {points}")
    return np.interp(np.arange(budget + 1), list(found), list(found.values()))


def made(
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    opened: Any,
    length: int,
    budget: int,
    chances: Sequence[float],
    seed: int,
    answer: Run | None,
    where: Place,
) -> Any:
    """The drafter of that name for the loop of that place."""
    if length < 1:
        fail(f"--length: expected 1 or more, got {length}")
    drafters, vocabulary = importlib.import_module("goldens.drafters"), opened.config["vocab_size"]
    if drafter is Drafter.dflash:
        if where.ranks is not None:
            return drafter.value  # each rank has its own
        place = importlib.import_module("engine.dflash") if where.engine else drafters
        return place.DFlash(opened, opened.config)
    theirs = importlib.import_module("engine.draft") if where.engine else drafters
    if drafter is Drafter.ngram:
        return theirs.Ngram(length, ORDER)
    stream = importlib.import_module("goldens.numerics").Stream("replay", seed)
    k = max(1, min(budget, vocabulary - 1))
    tables = [
        drafters.replay_table(request.tokens, vocabulary, k, chances, stream.fork(number))
        for number, request in enumerate(answer.requests if answer else ())
    ]
    return theirs.Replay(
        [table[0] for table in tables],
        [table[1] for table in tables],
        [len(prompt) for prompt in prompts],
        length,
    )


def printer(count: int) -> Any:
    """Prints each token as it comes; with several requests, whose it is."""

    def on_token(request: int, token: int) -> None:
        print(f"{request}:{token}" if count > 1 else token, end=" ", flush=True)

    return on_token


def summary(run: Run, count: int) -> None:
    """Lengths accepted a round, rounds, nodes verified, time a stage."""
    if count > 1:
        for number, request in enumerate(run.requests):
            say(f"{number}: {listing(request.tokens)}  ({request.ended})")
    tokens = sum(len(request.tokens) for request in run.requests)
    rounds = [done for request in run.requests for done in request.rounds]
    nodes = sum(len(done.tokens) for done in rounds)
    ended = Counter(request.ended for request in run.requests)
    rounds_s = sum(s for stage, s in run.times.items() if stage not in ONCE)
    rate = sum(done.emitted for done in rounds) / rounds_s if rounds else 0.0
    say(
        f"\n{tokens} tokens in {run.seconds:.3f} s, in rounds {rate:.0f} a second; "
        f"ended by {', '.join(f'{why} {n}' if count > 1 else why for why, n in ended.items())}"
    )
    if rounds:
        lengths = [len(done.accepted) for done in rounds]
        say(
            f"{len(rounds)} rounds, {nodes} nodes verified, "
            f"accepted a round: mean {np.mean(lengths):.2f}"
        )
        table = columns("", "accepted", "rounds", "<")
        histogram = Counter(lengths)
        for size in range(1, max(histogram) + 1):
            bar = "#" * -(-40 * histogram[size] // max(histogram.values()))
            row(table, size, histogram[size], bar)
        show(table)
    together = max((len(request.rounds) for request in run.requests), default=0)
    table = columns("", "<stage", "ms", "us a round", "share of rounds")
    for stage, seconds in run.times.items():
        cells = ["", ""]
        if stage not in ONCE and together:
            cells = [f"{1e6 * seconds / together:.1f}", f"{seconds / rounds_s:.0%}"]
        row(table, stage, f"{1e3 * seconds:.2f}", *cells)
    show(table)


def same(requests: Sequence[Any], alone: Sequence[Any]) -> bool:
    """Say how a run compares with the one that took a token at a time, logit by logit."""
    everything = 0
    for number, (one, other) in enumerate(zip(requests, alone, strict=True)):
        for at in range(max(len(one.tokens), len(other.tokens))):
            ours, theirs = one.tokens[at : at + 1], other.tokens[at : at + 1]
            if ours != theirs:
                runner_up, best = np.partition(
                    np.asarray(other.logits[min(at, len(other.logits) - 1)]), -2
                )[-2:]
                say(
                    f"DIFFERENT: request {number}, token {at}: {listing(ours) or 'none'}, one at a "
                    f"time {listing(theirs) or 'none'}; margin there {best - runner_up:.3g}"
                )
                return False
        for at, (ours, theirs) in enumerate(zip(one.logits, other.logits, strict=True)):
            if not np.array_equal(ours, theirs):
                off = np.abs(np.asarray(ours, np.float64) - theirs)
                say(
                    f"NOT STRICT: request {number}: same tokens, but the logits of token {at} "
                    f"differ by up to {off.max():.3g} ({np.count_nonzero(off)} of {off.size})"
                )
                return False
        everything += len(one.tokens)
    say(f"STRICT: {everything} tokens and all bits of their logits as one token at a time gives")
    return True
