"""Compile every kernel for every target without a GPU, and look at the machine code.

A kernel passes when, on each target, it has no stack frame and no local-memory instruction, no
64-bit floating point (an untyped literal next to a float32 is one), no more registers than its
ceiling, no more shared memory than a block may have, and every instruction that it claims to use.
`kdtr compile` runs this.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.files import replacing

if TYPE_CHECKING:
    from engine.device import Kernel

# Bytes of shared memory that a block may have.
TARGETS = {"sm_90a": 227 * 1024, "sm_100": 227 * 1024, "sm_120": 99 * 1024}
# Need more, and no others: the launcher takes another there, or refuses (tests/test_simulator.py).
LARGE = {
    ("sm_120", "gemm_bf16_rows64_tokens64_ring4_groups4"),
    ("sm_120", "gemm_bf16_rows96_tokens64_ring4_groups4"),
    ("sm_120", "tree_verify_mla_bf16_heads_tile64_rank512_rope64"),
    ("sm_120", "tree_verify_mla_bf16_heads_tile32_rank512_rope64"),
    ("sm_120", "tree_verify_mla_bf16_heads_tile16_rank512_rope64"),
}
RESERVED = 1024  # bytes of a block that are the system's, and counted as the kernel's
DOUBLE = re.compile(
    r"\b(DADD|DMUL|DFMA|DSETP|DMNMX|MUFU\.\w*64H|[FI]2F\.F64\S*|F2F\.\S*F64|I2F\.F64)"
)
OPCODE = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)[^;]*;", re.M)
LOCAL = ("LDL", "STL")


@dataclass
class Compiled:
    """What one kernel is on one target; `faults` is empty when it passes."""

    kernel: str
    target: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    code_bytes: int
    instructions: dict[str, int]
    seconds: float
    faults: list[str]


def kernel_modules() -> list[str]:
    """Dotted names of the kernel files, sorted."""
    folder = Path(__file__).parent / "kernels"
    return [f"engine.kernels.{p.stem}" for p in sorted(folder.glob("*.py")) if p.stem != "__init__"]


def kernels(module: str) -> Iterator[tuple[str, dict | None]]:
    """(attribute, constants) of every specialisation that a kernel file lists."""
    from engine.device import Family, Kernel

    for attribute, value in sorted(vars(importlib.import_module(module)).items()):
        if isinstance(value, Kernel) and value.module == module:
            yield attribute, None
        elif isinstance(value, Family) and value.make.__module__ == module:
            yield from ((attribute, constants) for constants in value.listed)


def disassemble(cubin: bytes) -> tuple[str, dict[str, int]]:
    """SASS text, and registers, stack and shared bytes of the one kernel in a cubin."""
    from cuda import pathfinder

    tools = {}
    for tool in ("nvdisasm", "cuobjdump"):
        tools[tool] = pathfinder.find_nvidia_binary_utility(tool)
        if tools[tool] is None:
            raise RuntimeError(f"{tool} is not installed: pip install 'kdtree-engine[cu13]'")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        sass = _output(tools["nvdisasm"], "-c", f.name)
        usage = _output(tools["cuobjdump"], "-res-usage", f.name)
    found = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    if "REG" not in found:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage[:200]}")
    return sass, found


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def inspect_kernel(module: str, attribute: str, constants: dict | None, target: str) -> Compiled:
    """Compile one specialisation for one target and judge its machine code."""
    entry = getattr(importlib.import_module(module), attribute)
    kernel = entry if constants is None else entry(**constants)
    started = time.perf_counter()
    cubin, _ = kernel.cubin(target)
    seconds = time.perf_counter() - started
    sass, usage = disassemble(cubin)
    opcodes = Counter(OPCODE.findall(sass))
    faults = []
    if usage["STACK"]:
        faults.append(f"{usage['STACK']} B of stack")
    local = sum(n for op, n in opcodes.items() if op.startswith(LOCAL))
    if local:
        faults.append(f"{local} local-memory instructions")
    doubles = sorted(set(DOUBLE.findall(sass)))
    if doubles:
        faults.append(f"64-bit floating point: {', '.join(doubles)}")
    if usage["REG"] > kernel.registers:
        faults.append(f"{usage['REG']} registers, ceiling {kernel.registers}")
    shared = max(usage.get("SHARED", 0) - RESERVED, 0) + kernel.dynamic_shared
    if (shared > TARGETS[target]) != ((target, kernel.name) in LARGE):
        faults.append(f"{shared} B of shared memory, a block may have {TARGETS[target]}")
    faults += [f"no {want}" for want in kernel.sass if not any(o.startswith(want) for o in opcodes)]
    families: Counter[str] = Counter()
    for op, n in opcodes.items():
        families[op.split(".")[0]] += n
    return Compiled(
        kernel=f"{module.removeprefix('engine.kernels.')}:{kernel.name}",
        target=target,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        shared_bytes=shared,
        code_bytes=len(cubin),
        instructions=dict(families.most_common()),
        seconds=round(seconds, 3),
        faults=faults,
    )


@dataclass(frozen=True)
class Job:
    """One specialisation for one target; what a process can be handed."""

    module: str
    attribute: str
    constants: dict | None
    target: str

    def kernel(self) -> "Kernel":
        entry = getattr(importlib.import_module(self.module), self.attribute)
        return entry if self.constants is None else entry(**self.constants)


def jobs(modules: Iterable[str], targets: Iterable[str]) -> list[Job]:
    """All that there is to compile. Raises ValueError for a file without a kernel for a target."""
    found, targets = [], tuple(targets)
    for module in modules:
        every = [Job(module, *entry, target) for entry in kernels(module) for target in targets]
        mine = [j for j in every if j.target in (j.kernel().archs or (j.target,))]
        if not mine:
            raise ValueError(f"kernel file without a kernel for {targets}: {module}")
        found += mine
    return found


def inspect_job(job: Job) -> Compiled:
    """The row of a job; a kernel that does not compile is one with that fault."""
    try:
        return inspect_kernel(job.module, job.attribute, job.constants, job.target)
    except Exception as error:  # the table must show the rest
        fault = f"does not compile: {type(error).__name__}: {error}".splitlines()[0]
        name = f"{job.module.removeprefix('engine.kernels.')}:{job.kernel().name}"
        return Compiled(name, job.target, 0, 0, 0, 0, {}, 0.0, [fault])


def fill_cache(job: Job) -> str | None:
    """Compile into the cubin cache that launches read, without a look; what went wrong, or None."""
    try:
        job.kernel().cubin(job.target)
    except Exception as error:
        return f"{job.module}:{job.kernel().name} for {job.target}: {error}".splitlines()[0]
    return None


def for_all(
    work: Callable[[Job], Any],
    targets: Iterable[str] = TARGETS,
    *,
    only: str | None = None,
    workers: int | None = None,
) -> list:
    """`work` of every job, in order, in parallel. only: the name of one kernel file."""
    modules = [m for m in kernel_modules() if only is None or m.rsplit(".", 1)[1] == only]
    if not modules:
        raise ValueError(f"no kernel file is called {only!r}")
    every = jobs(modules, targets)
    workers = min(workers or len(os.sched_getaffinity(0)), len(every))
    if workers == 1:
        return [work(job) for job in every]
    # spawn: a forked child of a process that holds a CUDA context cannot compile
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(work, every))


def compile_all(
    targets: Iterable[str] = TARGETS, *, only: str | None = None, workers: int | None = None
) -> list[Compiled]:
    """One row a kernel and target. only: the name of one kernel file. Empty is an error."""
    return for_all(inspect_job, targets, only=only, workers=workers)


def table(rows: list[Compiled], *, wide: bool = False) -> str:
    """The rows as text, failures last so that they are what the terminal shows."""
    lines = [f"{'kernel':58} {'target':7} regs  shared   code  seconds  verdict"]
    for row in sorted(rows, key=lambda r: (bool(r.faults), r.kernel, r.target)):
        verdict = "; ".join(row.faults) or "ok"
        lines.append(
            f"{row.kernel:58} {row.target:7} {row.registers:4d} {row.shared_bytes:7d}"
            f" {row.code_bytes:6d} {row.seconds:8.2f}  {verdict}"
        )
        if wide:
            lines.append("    " + " ".join(f"{op}:{n}" for op, n in row.instructions.items()))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 when every kernel passes, 1 when one fails, 2 when nothing could run."""
    parser = argparse.ArgumentParser(prog="kdtr compile", description=__doc__.split("\n")[0])
    parser.add_argument("kernel", nargs="?", help="one kernel file, e.g. rms_norm (default: all)")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all three")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--wide", action="store_true", help="count the instructions of each kernel")
    parser.add_argument("-n", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument(
        "--only-cache",
        action="store_true",
        help="fill the cache that launches load from, without looking at the machine code",
    )
    options = parser.parse_args(arguments)
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        print("kdtr compile: unset NUMBA_ENABLE_CUDASIM; the simulator has no compiler")
        return 2
    started = time.perf_counter()
    targets = options.target or TARGETS
    try:
        if options.only_cache:
            said = for_all(fill_cache, targets, only=options.kernel, workers=options.n)
            bad = [fault for fault in said if fault]
            print("\n".join([*bad, f"{len(said) - len(bad)} kernels are in the cache"]))
            return 1 if bad else 0
        rows = compile_all(targets, only=options.kernel, workers=options.n)
    except (ValueError, RuntimeError) as error:
        print(f"kdtr compile: {error}")
        return 2
    print(table(rows, wide=options.wide))
    bad = [r for r in rows if r.faults]
    seconds = time.perf_counter() - started
    print(f"{len(rows) - len(bad)} passed, {len(bad)} failed in {seconds:.1f} s")
    if options.report:
        with replacing(options.report) as file:
            file.write((json.dumps([asdict(r) for r in rows], indent=1) + "\n").encode())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
