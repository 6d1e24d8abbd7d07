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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness.spec import Case, Spec

# What a case and a spec say that no verdict on a GPU depends on: where a case is run besides, and
# what is drawn and planted around the cases.
_BESIDE = {"sim", "bench", "timeout_s"}
_INSTALLED = {"site-packages", "dist-packages"}
_JUDGED = ("stem", "stage", "reference", "inputs", "outputs", "scratch", "invariant")


def digest(spec: Spec, *, kernel: str | None = None, seen: "Snapshot | None" = None) -> str:
    """sha256 over the spec file and every project file that its oracle and kernel import."""
    seen = seen or Snapshot()
    return _hash([spec.path, *files(spec, kernel=kernel, seen=seen)], seen)


def case_digest(spec: Spec, case: Case, *, kernel: str | None = None) -> str:
    """sha256 over what the verdict on one case depends on: the case and the spec's tensors as they
    are declared, and the files behind oracle and kernel. Other cases of the spec do not count."""
    seen = Snapshot()
    return _with_code(
        spec, case, kernel, _hash(files(spec, [case], kernel=kernel, seen=seen), seen)
    )


def case_digests(spec: Spec, *, seen: "Snapshot | None" = None) -> dict[str, str]:
    """`case_digest` of every case by name."""
    seen = seen or Snapshot()
    code: dict[bool, str] = {}
    found = {}
    for name, case in spec.cases.items():
        key = bool(case.weights)
        if key not in code:
            code[key] = _hash(files(spec, [case], seen=seen), seen)
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
    seen = Snapshot()
    modules = _oracle_modules(spec, spec.cases.values())
    return _hash([spec.path, *seen.closure(_root(spec), modules)], seen)


def files(
    spec: Spec,
    cases: Iterable[Case] | None = None,
    *,
    kernel: str | None = None,
    seen: "Snapshot | None" = None,
) -> list[Path]:
    """The files behind a spec's oracle and kernel (`kernel`: in place of the spec's), sorted.

    cases: those that count; None: all.
    """
    name = kernel or spec.kernel
    oracle = _oracle_modules(spec, spec.cases.values() if cases is None else cases)
    modules = [*oracle, *([name.partition(":")[0]] if name else [])]
    return (seen or Snapshot()).closure(_root(spec), modules)


def _root(spec: Spec) -> Path:
    return spec.path.resolve().parents[1]


def _oracle_modules(spec: Spec, cases: Iterable[Case]) -> list[str]:
    """The oracle, and what makes the weights if a case has some (harness/golden.py loads them)."""
    return [spec.reference, *(["goldens.bundles"] if any(case.weights for case in cases) else [])]


def _hash(paths: Iterable[Path], seen: "Snapshot") -> str:
    """sha256 over names and contents; the folder of the checkout does not count."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.name.encode() + b"\0" + seen.sha256(path))
    return total.hexdigest()


# -- what imports what ----------------------------------------------------------------------------


class _Package(NamedTuple):
    """Where a top-level module lies."""

    file: Path | None  # its source, if it has one
    folders: tuple[Path, ...]  # where its submodules are looked for; several of a namespace
    home: Path | None  # the folder on sys.path that holds it


class _Module(NamedTuple):
    path: Path
    imports: tuple[str, ...]  # dotted names, some of them of no module but of what is in one
    data: tuple[Path, ...]  # files that it names


class Snapshot:
    """The sources at one moment: a package is looked up, a folder listed, a file read at most once.

    Digests that are asked for together share one. It does not see what changes after it has looked,
    so nobody keeps one.
    """

    def __init__(self) -> None:
        self.content: Callable[[Path], bytes] = functools.cache(Path.read_bytes)
        self.sha256 = functools.cache(self._sha256)
        self.package = functools.cache(_package)
        self.listing = functools.cache(_listing)
        self.data = functools.cache(_data)
        self.modules: dict[str, _Module | None] = {}

    def _sha256(self, path: Path) -> bytes:
        read = self.content if path.suffix == ".py" else Path.read_bytes  # data is not kept
        return hashlib.sha256(read(path)).digest()

    def closure(self, root: Path, modules: list[str]) -> list[Path]:
        """Every file that importing `modules` reads, as far as it is the project's; sorted.

        The project's is what lies under `root`, and beside those of `modules` that do not.
        """
        named = {"engine", "goldens", *(m.partition(".")[0] for m in modules)}
        homes = [root, *(home for m in modules if (home := self._home(m.partition(".")[0])))]
        follows = functools.cache(lambda top: top in named or self._beside(top, homes))
        found: set[Path] = set()
        queue = list(modules)
        passed: set[str] = set()
        while queue:
            name = queue.pop()
            if name in passed or not follows(name.partition(".")[0]):
                continue
            passed.add(name)
            if "." in name:
                queue.append(name.rpartition(".")[0])
            module = self.module(name)
            if module is not None and module.path not in found:
                found.add(module.path)
                found.update(module.data)
                queue += module.imports
        return sorted(found)

    def _beside(self, top: str, homes: list[Path]) -> bool:
        """Whether a top-level module lies in one of `homes`; what is installed lies nowhere."""
        if top == "harness" or top in sys.stdlib_module_names:
            return False
        home = self._home(top)
        return home is not None and home in homes and home.name not in _INSTALLED

    def _home(self, top: str) -> Path | None:
        package = self.package(top)
        return package.home if package else None

    def module(self, name: str) -> _Module | None:
        """The module of a dotted name; None where it is none (an attribute, a C module)."""
        if name not in self.modules:
            path = self._file_of(name)
            self.modules[name] = None if path is None else self._read(path, name)
        return self.modules[name]

    def _file_of(self, name: str) -> Path | None:
        top, *rest = name.split(".")
        package = self.package(top)
        if package is None or not rest:
            return package and package.file
        *between, last = rest
        for top_folder in package.folders:
            folder, names = self.listing(top_folder, *between)
            if f"{last}.py" in names and (path := folder / f"{last}.py").is_file():
                return path
            if last in names and (path := folder / last / "__init__.py").is_file():
                return path
        return None

    def _read(self, path: Path, name: str) -> _Module:
        near = self.data(path.parent)
        imports, strings = _parsed(path, name, self.content(path), bool(near))
        return _Module(path, imports, tuple(f for f in near if f.name in strings))


def _package(top: str) -> _Package | None:
    """Where Python finds a top-level module, which may lack __init__.py; None if nowhere."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    origin = Path(spec.origin) if spec.origin else None
    folders = tuple(Path(folder) for folder in spec.submodule_search_locations or ())
    place = folders[0] if folders else origin
    file = origin if origin and origin.suffix == ".py" else None
    return _Package(file, folders, place.resolve().parent if place else None)


def _listing(top: Path, *between: str) -> tuple[Path, frozenset[str]]:
    """A folder below `top` and the names in it; none where Python can list none either."""
    folder = top.joinpath(*between)
    try:
        return folder, frozenset(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return folder, frozenset()


def _data(folder: Path) -> tuple[Path, ...]:
    """Files that modules in a folder may name: in it, and in a folder `pinned` there."""
    paths = [*folder.glob("*"), *folder.joinpath("pinned").rglob("*")]
    return tuple(path for path in paths if path.suffix != ".py" and path.is_file())


@functools.cache
def _parsed(
    path: Path, name: str, content: bytes, strings: bool
) -> tuple[tuple[str, ...], frozenset[str]]:
    """What a module imports, as dotted names: modules, and what may be some. And the file names in
    its strings, if they are asked for.

    Nothing if Python cannot read it, which whoever imports it will hear.
    """
    try:
        tree = ast.parse(content, str(path))
    except (SyntaxError, ValueError):
        return (), frozenset()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports: list[str] = []
    files = set()
    for node in ast.walk(tree) if strings else statements(tree):
        if isinstance(node, ast.Import):
            imports += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            imports += (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value) < 200:
                files.add(Path(node.value).name)
    return tuple(dict.fromkeys(imports)), frozenset(files)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """`tree`, every statement in it, and what else holds some: handlers of exceptions, cases."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            stack += getattr(node, block, ())
