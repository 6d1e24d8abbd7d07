"""Loops that are unrolled in the source, before any compiler sees them.

`for i in static_range(4):` in a kernel becomes four copies of its body with `i` replaced by 0..3
and constant expressions folded, so that local arrays indexed by `i` are registers on every target:
NVVM unrolls large bodies for sm_90 but not for sm_100 and sm_120. An `if` on constants loses its
dead branch. The simulator runs the same source.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def static_range(*bounds: int) -> range:
    """`range` whose bounds are known when the kernel is made; unrolled by `unroll`."""
    return range(*bounds)


def _value(node: ast.expr, env: dict[str, Any]) -> Any:
    return eval(compile(ast.fix_missing_locations(ast.Expression(node)), "<static>", "eval"), env)


class _Substitute(ast.NodeTransformer):
    def __init__(self, name: str, value: Any):
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.name and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(self.value), node)
        return node


class _Unroll(ast.NodeTransformer):
    def __init__(self, env: dict[str, Any]):
        self.env = env

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Fold integer arithmetic: Numba wants literals where it slices a tuple."""
        self.generic_visit(node)
        if all(
            isinstance(side, ast.Constant) or self.is_integer(side)
            for side in (node.left, node.right)
        ):
            return ast.copy_location(ast.Constant(_value(node, self.env)), node)
        return node

    def is_integer(self, node: ast.expr) -> bool:
        """Whether it is the name of an integer known when the kernel is made."""
        return isinstance(node, ast.Name) and type(self.env.get(node.id)) is int

    def visit_If(self, node: ast.If) -> Any:
        """Drop the dead branch of an `if` on constants (and on a factory's closure constants)."""
        self.generic_visit(node)
        names = [n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)]
        pure = not any(
            isinstance(n, (ast.Call, ast.Subscript, ast.Attribute)) for n in ast.walk(node.test)
        )
        if pure and all(isinstance(self.env.get(n), (int, bool, str, type(None))) for n in names):
            if any(n not in self.env for n in names):
                return node
            taken = node.body if _value(copy.deepcopy(node.test), self.env) else node.orelse
            return taken or ast.copy_location(ast.Pass(), node)
        return node

    def visit_For(self, node: ast.For) -> Any:
        call = node.iter
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "static_range":
            if node.orelse or not isinstance(node.target, ast.Name):
                raise SyntaxError("static_range: one plain loop variable and no else")
            bounds = [_value(copy.deepcopy(a), self.env) for a in call.args]
            out: list[ast.stmt] = []
            for value in range(*bounds):
                for statement in node.body:
                    body = _Substitute(node.target.id, value).visit(copy.deepcopy(statement))
                    result = self.visit(body)
                    out.extend(result if isinstance(result, list) else [result])
            return out or ast.copy_location(ast.Pass(), node)
        self.generic_visit(node)
        return node


def unroll(fn: Callable) -> tuple[Callable, str]:
    """The function with its static loops unrolled, and the source that was compiled."""
    env = dict(fn.__globals__)
    env.update(inspect.getclosurevars(fn).nonlocals)
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    for argument in definition.args.args:
        argument.annotation = None
    assigned = {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    } | {a.arg for a in definition.args.args}
    static = {k: v for k, v in env.items() if k not in assigned}
    tree = ast.fix_missing_locations(_Unroll(static).visit(tree))
    source = ast.unparse(tree)
    ast.increment_lineno(tree, fn.__code__.co_firstlineno - 1)
    exec(compile(tree, fn.__code__.co_filename, "exec"), env)
    unrolled = env[fn.__name__]
    unrolled.__qualname__ = fn.__qualname__
    return unrolled, source
