"""Prove that a change of source left the machine code of the kernels as it was.

    python -m ci.same_sass BASE [KERNEL_FILE ...] [--target sm_90a] [--show] [-n PROCESSES]

BASE is a commit. It is checked out beside this tree, and all kernels (or those of some files) are
compiled there and here, without a GPU; what the cubin cache holds is not compiled again. Two
kernels are the same if every section of their cubins is, byte for byte: code, constants, launch
bounds, registers, shared memory, parameters. Names of symbols and debug lines are left out. A
kernel that changed its name and nothing else is found by its bytes. Of the others the table tells
registers and instructions by opcode; --show prints how the disassembly differs, without addresses.

Exit status: 0 nothing changed, 1 some kernel did, 2 nothing could be compared.
"""

import argparse
import difflib
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES_AND_LINES = (".strtab", ".shstrtab", ".symtab", ".debug", ".rela.debug", ".note")
NO_BITS = 8  # a section that has a size, and no bytes in the file


def sections(cubin: bytes, entry: str) -> dict[str, bytes | int]:
    """Bytes (size, where there are none) of each section that has to do with the code."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    found: dict[str, bytes | int] = {}
    rows = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    for name, kind, _, _, at, length in rows:
        start = rows[names][4] + name
        label = cubin[start : cubin.index(b"\0", start)].decode()
        if label and not label.startswith(NAMES_AND_LINES):
            label = label.replace(entry, "kernel")
            found[label] = length if kind == NO_BITS else cubin[at : at + length]
    return found


def disassembled(cubin: bytes, entry: str) -> tuple[int, list[str]]:
    """Registers, and the lines of the code without addresses and without the entry's name."""
    from engine.compile_gate import disassemble

    sass, usage = disassemble(cubin)
    text = re.sub(r"/\*[0-9a-f]{4,}\*/", "", sass).replace(entry, "kernel")
    return usage["REG"], [line.strip() for line in text.splitlines() if line.strip()]


def opcodes(lines: list[str]) -> Counter[str]:
    found = (re.match(r"(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)[^;]*;", line) for line in lines)
    return Counter(match[1] for match in found if match)


def compiled(job: Any) -> tuple[str, bytes, str]:
    """Name, cubin and entry of one specialisation."""
    kernel = job.kernel()
    return f"{job.module.removeprefix('engine.kernels.')}:{kernel.name}", *kernel.cubin(job.target)


def dump(path: str, target: str, processes: int | None, files: list[str]) -> None:
    """Write what `compiled` gives for the tree that `engine` is imported from."""
    from engine.compile_gate import for_all, kernel_modules

    known = {module.rsplit(".", 1)[1] for module in kernel_modules()}
    chosen: list[str | None] = [file for file in files if file in known]
    rows = []
    for only in chosen if files else [None]:
        rows += for_all(compiled, [target], only=only, workers=processes)
    Path(path).write_bytes(pickle.dumps({name: rest for name, *rest in rows}))


def in_tree(tree: Path, target: str, processes: int | None, files: list[str]) -> dict[str, tuple]:
    """`dump` of the engine of another tree, by this file."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels"
        code = "import sys; from same_sass import dump; dump(*eval(sys.argv[1]))"
        subprocess.run(
            [sys.executable, "-c", code, repr((str(out), target, processes, files))],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{Path(__file__).parent}"},
            check=True,
        )
        return pickle.loads(out.read_bytes())


def compare(before: dict[str, tuple], after: dict[str, tuple], *, show: bool) -> Iterator[str]:
    """A line, or several with `show`, for every kernel that is not what it was under its name."""
    was = {name: sections(*kernel) for name, kernel in before.items()}
    now = {name: sections(*kernel) for name, kernel in after.items()}
    gone = {name for name in was if name not in now}
    for name in sorted(now):
        if was.get(name) == now[name]:
            continue
        twin = min((old for old in gone if was[old] == now[name]), default=None)
        if name not in was:
            yield f"{name}: " + (f"the same code as {twin} was" if twin else "NEW")
            gone.discard(twin or name)
            continue
        (old_registers, old), (registers, new) = (
            disassembled(*side[name]) for side in (before, after)
        )
        first, second = opcodes(old), opcodes(new)
        changed = [
            f"{op} {first[op]} -> {second[op]}"
            for op in sorted(first | second)
            if first[op] != second[op]
        ]
        parts = sorted(k for k in was[name] | now[name] if was[name].get(k) != now[name].get(k))
        yield (
            f"{name}: DIFFERS in {', '.join(parts)}; registers {old_registers} -> {registers}; "
            + (", ".join(changed) or "the same number of each instruction")
        )
        if show:
            yield from difflib.unified_diff(old, new, "before", "after", lineterm="", n=2)
    yield from (f"{name}: GONE" for name in sorted(gone))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.same_sass",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("file", nargs="*", help="kernel files, e.g. rms_norm (default: all)")
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--show", action="store_true", help="print differences of the SASS")
    parser.add_argument("-n", type=int, help="processes (default: one a core)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        try:
            subprocess.run([*git, "add", "-q", "--detach", str(tree), options.base], check=True)
            rest = (options.target, options.n, options.file)
            before, after = in_tree(tree, *rest), in_tree(ROOT, *rest)
        except subprocess.CalledProcessError as error:
            print(f"same_sass: {error}")
            return 2
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True, check=False)
    if not before and not after:
        print("same_sass: no kernel file of that name")
        return 2
    lines = list(compare(before, after, show=options.show))
    print(*lines, sep="\n", end="\n" if lines else "")
    said = {line.partition(": ")[0] for line in lines}
    print(f"{options.target}: {len(set(after) - said)} of {len(after)} kernels are the same")
    return 1 if any(re.match(r"\S+: (DIFFERS|NEW|GONE)", line) for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
