"""The stem is the identity: specs/X.toml, goldens/X.py, engine/kernels/X.py belong together."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def specs() -> dict[str, dict]:
    return {
        path.stem: tomllib.loads(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "specs").glob("*.toml"))
    }


def belongs(stem: str, to: str) -> bool:
    """gemm_bf16_heads belongs to gemm_bf16 and to gemm_heads: a variant adds words to the stem."""
    words = iter(stem.split("_"))
    return all(word in words for word in to.split("_"))


@pytest.mark.parametrize(("stem", "spec"), specs().items(), ids=specs())
def test_a_kernel_spec_names_the_oracle_and_the_kernel_of_its_stem(stem, spec):
    if spec.get("stage") == "kernel":
        assert belongs(stem, spec["reference"].removeprefix("goldens."))
        module, _, launcher = spec["kernel"].partition(":")  # a file may hold two launchers
        assert belongs(stem, launcher) or belongs(stem, module.rpartition(".")[2])


def test_every_kernel_file_has_a_spec():
    named = {spec.get("kernel", "").partition(":")[0] for spec in specs().values()}
    kernels = {
        f"engine.kernels.{p.stem}"
        for p in (ROOT / "engine" / "kernels").glob("*.py")
        if p.stem != "__init__"
    }
    assert kernels <= named


def test_every_oracle_has_a_spec():
    named = {spec.get("reference") for spec in specs().values()}
    oracles = {
        f"goldens.{path.stem}"
        for path in (ROOT / "goldens").glob("*.py")
        if {"inputs", "reference"} <= _functions(path)
    }
    assert oracles <= named


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
