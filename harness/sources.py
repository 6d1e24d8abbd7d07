"""Which files a verdict depends on, and their digest: so that a receipt knows when it is stale.

Read from the source by `ast`: nothing is imported, no GPU library is loaded. Followed are imports
of the engine, of the goldens and of the packages that hold the spec's own oracle and kernel. A
file under goldens/pinned/ counts when a module that is followed names it in a string.
"""

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from harness.spec import Spec


def digest(spec: Spec, *, kernel: str | None = None) -> str:
    """sha256 over the spec file and every project file that its oracle and kernel import."""
    return _hash([spec.path, *files(spec, kernel=kernel)])


def oracle_digest(spec: Spec) -> str:
    """The same without the kernel: what a golden depends on."""
    return _hash([spec.path, *_closure(_oracle_modules(spec))])


def files(spec: Spec, *, kernel: str | None = None) -> list[Path]:
    """The files behind a spec's oracle and kernel (`kernel`: in place of the spec's), sorted."""
    name = kernel or spec.kernel
    return _closure([*_oracle_modules(spec), *([name.partition(":")[0]] if name else [])])


def _oracle_modules(spec: Spec) -> list[str]:
    """The oracle, and what makes the weights if a case has some (harness/golden.py loads them)."""
    weights = any(case.weights for case in spec.cases.values())
    return [spec.reference, *(["goldens.bundles"] if weights else [])]


def _closure(modules: list[str]) -> list[Path]:
    """Every file that importing `modules` reads, as far as it is the project's; sorted."""
    packages = {"engine", "goldens", *(m.partition(".")[0] for m in modules)}
    found: set[Path] = set()
    queue = list(modules)
    seen: set[str] = set()
    while queue:
        name = queue.pop()
        if name in seen or name.partition(".")[0] not in packages:
            continue
        seen.add(name)
        if "." in name:
            queue.append(name.rpartition(".")[0])
        path = file_of(name)
        if path is not None and path not in found:
            found.add(path)
            queue += _imports(path, name, path.stat().st_mtime_ns)
            found.update(_pinned(path, path.stat().st_mtime_ns))
    return sorted(found)


def file_of(name: str) -> Path | None:
    """The source of a dotted name, or None where it is not a module (an attribute, a C module)."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    origin = Path(spec.origin)
    if not rest:
        return origin
    if origin.name != "__init__.py":
        return None
    base = origin.parent.joinpath(*rest)
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
def _pinned(path: Path, _mtime_ns: int) -> tuple[Path, ...]:
    folder = path.parent / "pinned"
    if path.parent.name != "goldens" or not folder.is_dir():
        return ()
    names = {file.name: file for file in folder.rglob("*") if file.is_file()}
    strings = {
        Path(node.value).name
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200
    }
    return tuple(sorted(names[name] for name in strings & names.keys()))


def _hash(paths: list[Path]) -> str:
    """sha256 over names and contents; the folder of the checkout does not count."""
    total = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).digest()
        total.update(path.name.encode() + b"\0" + content)
    return total.hexdigest()
