"""Which files a verdict depends on, and their digest: so that a receipt knows when it is stale.

Read from the source by `ast`: nothing is imported, no GPU library is loaded. Followed are imports
of the engine, of the goldens and of whatever else lies in the project or beside the spec's own
oracle and kernel. A file beside a module that is followed, or in a folder `pinned` there, counts
when the module names it in a string.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness.spec import Case, Spec

# What a case and a spec say that no verdict on a GPU depends on: where a case is run besides, and
# what is drawn and planted around the cases.
_BESIDE = {"sim", "bench", "timeout_s"}
_INSTALLED = {"site-packages", "dist-packages"}
_JUDGED = ("stem", "stage", "reference", "inputs", "outputs", "scratch", "invariant")


def digest(spec: Spec, *, kernel: str | None = None) -> str:
    """sha256 over the spec file and every project file that its oracle and kernel import."""
    return _hash([spec.path, *files(spec, kernel=kernel)])


def case_digest(spec: Spec, case: Case, *, kernel: str | None = None) -> str:
    """sha256 over what the verdict on one case depends on: the case and the spec's tensors as they
    are declared, and the files behind oracle and kernel. Other cases of the spec do not count."""
    return _with_code(spec, case, kernel, _hash(files(spec, [case], kernel=kernel)))


def case_digests(spec: Spec) -> dict[str, str]:
    """`case_digest` of every case by name; the files are read once or twice and not for each."""
    code: dict[bool, str] = {}
    found = {}
    for name, case in spec.cases.items():
        key = bool(case.weights)
        if key not in code:
            code[key] = _hash(files(spec, [case]))
        found[name] = _with_code(spec, case, None, code[key])
    return found


def _with_code(spec: Spec, case: Case, kernel: str | None, code: str) -> str:
    declared = {name: _plain(getattr(spec, name)) for name in _JUDGED}
    declared["kernel"] = kernel or spec.kernel
    declared["case"] = {k: v for k, v in _plain(case).items() if k not in _BESIDE}
    text = json.dumps(declared, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(f"{text}\0{code}".encode()).hexdigest()


def _plain(value: Any) -> Any:
    """As JSON can say it. A field at its default is left out: a new one changes no digest."""
    if dataclasses.is_dataclass(value):
        fields = [(f.name, f.default, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {name: _plain(v) for name, default, v in fields if v != default}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def oracle_digest(spec: Spec) -> str:
    """`digest` without the kernel: what a golden depends on."""
    return _hash([spec.path, *_closure(_root(spec), _oracle_modules(spec, spec.cases.values()))])


def files(
    spec: Spec, cases: Iterable[Case] | None = None, *, kernel: str | None = None
) -> list[Path]:
    """The files behind a spec's oracle and kernel (`kernel`: in place of the spec's), sorted.

    cases: those that count; None: all.
    """
    name = kernel or spec.kernel
    oracle = _oracle_modules(spec, spec.cases.values() if cases is None else cases)
    return _closure(_root(spec), [*oracle, *([name.partition(":")[0]] if name else [])])


def _root(spec: Spec) -> Path:
    return spec.path.resolve().parents[1]


def _oracle_modules(spec: Spec, cases: Iterable[Case]) -> list[str]:
    """The oracle, and what makes the weights if a case has some (harness/golden.py loads them)."""
    return [spec.reference, *(["goldens.bundles"] if any(case.weights for case in cases) else [])]


def _closure(root: Path, modules: list[str]) -> list[Path]:
    """Every file that importing `modules` reads, as far as it is the project's; sorted.

    The project's is what lies under `root`, and beside those of `modules` that do not.
    """
    named = {"engine", "goldens", *(m.partition(".")[0] for m in modules)}
    homes = [root, *(home for m in modules if (home := _home(m)))]
    found: set[Path] = set()
    queue = list(modules)
    seen: set[str] = set()
    while queue:
        name = queue.pop()
        top = name.partition(".")[0]
        if name in seen or not (top in named or _beside(top, homes)):
            continue
        seen.add(name)
        if "." in name:
            queue.append(name.rpartition(".")[0])
        path = file_of(name)
        if path is not None and path not in found:
            found.add(path)
            queue += _imports(path, name, path.stat().st_mtime_ns)
            found.update(_data(path, path.stat().st_mtime_ns))
    return sorted(found)


def _beside(top: str, homes: list[Path]) -> bool:
    """Whether a top-level module lies in one of `homes`; what is installed lies nowhere."""
    if top == "harness" or top in sys.stdlib_module_names:
        return False
    home = _home(top)
    return home is not None and home in homes and home.name not in _INSTALLED


def _home(name: str) -> Path | None:
    """The folder on sys.path that holds a module's package; a package may lack __init__.py."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve().parent
    return Path(spec.origin).resolve().parent if spec.origin else None


def file_of(name: str) -> Path | None:
    """The source of a dotted name, or None where it is not a module (an attribute, a C module)."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


@functools.cache
def _imports(path: Path, name: str, _mtime_ns: int) -> tuple[str, ...]:
    return tuple(_read_imports(_tree(path), path, name))


def _tree(path: Path) -> ast.Module:
    """The parsed file; empty if Python cannot read it, which whoever imports it will hear."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _read_imports(tree: ast.Module, path: Path, name: str) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def _data(path: Path, _mtime_ns: int) -> tuple[Path, ...]:
    """Files beside a module, or in a folder `pinned` beside it, that it names in a string."""
    strings = {
        Path(node.value).name
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200
    }
    files = [*path.parent.glob("*"), *path.parent.joinpath("pinned").rglob("*")]
    return tuple(
        sorted(f for f in files if f.name in strings and f.suffix != ".py" and f.is_file())
    )


def _hash(paths: Iterable[Path]) -> str:
    """sha256 over names and contents; the folder of the checkout does not count."""
    total = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).digest()
        total.update(path.name.encode() + b"\0" + content)
    return total.hexdigest()
