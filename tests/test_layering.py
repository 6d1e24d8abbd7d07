"""The arrows of the house: who may import whom. Read from the source, nothing is imported."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"engine", "goldens", "harness", "ci", "tests"}
ORACLE_IMPORTS = {"numpy", "ml_dtypes", "safetensors", "goldens"}
STANDARD = sys.stdlib_module_names


def imports(path: Path, *, anywhere: bool = True) -> set[str]:
    """Top-level names of what a file imports; with anywhere=False at module level only."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found = set()
    for node in ast.walk(tree) if anywhere else _module_level(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(
                node.module.partition(".")[0] if node.module and not node.level else path.parts[-2]
            )
    return found


def _module_level(tree: ast.Module):
    """Every node that runs at import: all but the bodies of functions."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            stack += ast.iter_child_nodes(node)


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_the_engine_imports_nothing_of_ours_but_itself():
    for path in files("engine"):
        assert imports(path) & OURS <= {"engine"}, path


def test_goldens_import_numpy_and_themselves_only():
    for path in files("goldens"):
        assert imports(path) - STANDARD <= ORACLE_IMPORTS, path


def test_the_judge_does_not_import_the_judged():
    for path in files("harness"):
        assert imports(path) & OURS <= {"harness"}, path


def test_no_harness_module_loads_a_gpu_library_when_imported():
    """A GPU must be chosen before numba sees the driver."""
    for path in files("harness"):
        assert not imports(path, anywhere=False) & {"numba", "cuda", "torch", "cupy"}, path


@pytest.mark.parametrize("planted", ["import numba", "from engine import ptx", "import torch as t"])
def test_a_planted_import_in_an_oracle_is_caught(tmp_path, planted):
    oracle = tmp_path / "goldens" / "x.py"
    oracle.parent.mkdir()
    oracle.write_text(f"import numpy as np\ndef reference():\n    {planted}\n")
    assert imports(oracle) - STANDARD - ORACLE_IMPORTS


def test_specs_are_data():
    assert not list((ROOT / "specs").rglob("*.py"))


def test_the_map_of_the_judge_names_every_file():
    text = ast.get_docstring(ast.parse((ROOT / "harness" / "__init__.py").read_text()))
    missing = [p.stem for p in files("harness") if not re.search(rf"\b{p.stem}\b", text)]
    assert missing == ["__init__"]
