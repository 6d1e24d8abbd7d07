"""An intrinsic has two halves, PTX and a stand-in, and somebody who calls it."""

import ast
from pathlib import Path

import pytest

PTX = Path(__file__).parents[1] / "engine" / "ptx"
FILES = sorted(p for p in PTX.glob("*.py") if p.stem != "__init__")


def defined(statements: list[ast.stmt], *, imported: bool) -> set[str]:
    """What the statements define, but for what begins with an underscore."""
    found: set[str] = set()
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and imported:
            found |= {alias.asname or alias.name for alias in node.names}
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_both_branches_of_a_file_define_the_same_names(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "SIMULATED"
            simulated, gpu = defined(node.body, imported=True), defined(node.orelse, imported=False)
            assert gpu == simulated


def test_the_engine_uses_every_intrinsic():
    exported = {
        alias.name
        for node in ast.parse((PTX / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    files = [p for p in PTX.parent.rglob("*.py") if p.parent != PTX]
    used = {
        alias.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "engine.ptx"
        for alias in node.names
    }
    assert used == exported
