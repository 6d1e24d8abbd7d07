"""Faults to plant: a module's source in, copies with one fault each out. Nothing is run here.

Two kinds. A spec names its own by text (`[[mutants]]`: find, replace), and says of one that changes
nothing why. The others are made from the syntax tree by a fixed set of operators (`OPERATORS`) and
drawn in an order that depends on their content alone, spread over the operators, so that the same
sources give the same mutants everywhere.

Left alone are: what refuses arguments (an `if` that only raises, `check(...)`), names and messages,
and programmatic dependent launch, which no single launch can show.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.sources import statements
from harness.spec import Spec

OPERATORS = {
    "launcher does nothing": "the launcher returns at once",
    "comparison": "< for <=, > for >=, == for != and back: bounds off by one, ties the other way",
    "arithmetic": "+ for -, // for %, << for >>, & for | and back",
    "constant": "an integer in a kernel is one more",
    "logic": "and for or and back, a not dropped",
    "extremum": "min for max and back",
    "axes": "blockIdx.x for blockIdx.y and back, the launcher's grid transposed",
    "barrier": "a barrier or a wait for an asynchronous copy dropped",
    "call": "a call for its effect dropped: a copy, a store, an atomic",
    "last tile": "the last step of a counted loop dropped",
    "constant output": "zero is stored",
    "shifted store": "what is stored lands one element further",
    "input changed": "the kernel writes to one of its inputs",
}

_COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.FloorDiv: "%", ast.Mod: "//", ast.LShift: ">>",
    ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
_WAIT = re.compile(r"syncthreads|syncwarp|threadfence|wait")
_SILENT = {"check", "pdl_wait", "pdl_launch_dependents", "_require_device_array"}
_SIZES = {"array"}  # of shared and local memory: one more of it changes nothing
_STEPS = {"u16": 2, "u32": 4, "v2": 8, "v4": 16}
_AXES = {"x": "y", "y": "x", "z": "x"}


@dataclass(frozen=True)
class Planted:
    """One mutant: a copy of `module` with one fault, or `flaw`, the reason why it is none."""

    name: str
    operator: str  # "named" for a spec's own
    module: str
    source: str
    line: int  # of the statement that changed; 0: reached by every case
    reason: str | None = None  # why it changes nothing, in the spec's words
    gpu: str | None = None  # why only a GPU can show it
    sim: str | None = None  # why a GPU need not
    waits: bool = False  # what changed is a barrier or a wait for a copy: on a GPU a matter of luck
    flaw: str = ""  # "EQUAL: ...", "STALE: ...", "INVALID: ..."


def default_module(spec: Spec) -> str:
    """What a spec's mutants change: its kernel's file or, in stage golden, its oracle."""
    return spec.kernel.partition(":")[0] if spec.kernel else spec.reference


def named(spec: Spec, sources: dict[str, str]) -> list[Planted]:
    """The mutants that a spec lists, planted in `sources` (by module)."""
    planted = []
    for mutant in spec.mutants:
        module = mutant.module or default_module(spec)
        source = sources[module]
        count = source.count(mutant.find)
        changed = source.replace(mutant.find, mutant.replace)
        flaw, line = "", 0
        if count != 1:
            times = "no longer" if not count else f"{count} times"
            flaw = f"STALE: its text is {times} in {module}"
        else:
            flaw = _flaw(source, changed)
            line = statement_line(source, source[: source.index(mutant.find)].count("\n") + 1)
        one = Planted(mutant.name, "named", module, changed, line)
        waits = any(_WAIT.search(text) for text in _lost(mutant.find, mutant.replace))
        planted.append(
            replace(
                one,
                reason=mutant.equivalent,
                gpu=mutant.gpu,
                sim=mutant.sim,
                waits=waits,
                flaw=flaw,
            )
        )
    return planted


def generic(
    spec: Spec, module: str, source: str, only: Collection[str] | None = None
) -> list[Planted]:
    """Every mutant that the operators make of `source`, in the order in which they are drawn.

    One that equals a named mutant of the spec, or another of this list, is left out. only: names of
    those that are wanted; the others are not made, which is what takes the time.
    """
    tree = ast.parse(source)
    same = {_normal(source)}
    for mutant in spec.mutants:
        if (mutant.module or default_module(spec)) == module and source.count(mutant.find) == 1:
            same.add(_normal(source.replace(mutant.find, mutant.replace)))
    by_operator: dict[str, list[tuple[str, Planted]]] = {}
    names: dict[str, int] = {}
    for edit in _Operators(spec, source, tree).edits():
        name = f"{edit.where}: {edit.said}"
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name} ({names[name]})"
        if only is not None and name not in only:
            continue
        planted = Planted(
            name,
            edit.operator,
            module,
            edit.apply(source),
            edit.line,
            waits=edit.operator == "barrier",
        )
        form = _normal(planted.source)
        if form is None or form in same:
            continue
        same.add(form)
        order = hashlib.sha256(f"{spec.stem}\0{name}".encode()).hexdigest()
        by_operator.setdefault(edit.operator, []).append((order, planted))
    queues = [[p for _, p in sorted(by_operator[o])] for o in OPERATORS if o in by_operator]
    drawn: list[Planted] = []
    while queues:
        drawn += [queue.pop(0) for queue in queues]
        queues = [queue for queue in queues if queue]
    return drawn


def has_kernels(source: str) -> bool:
    """Whether the module holds device code, and not only host code that calls others."""
    tree = ast.parse(source)
    return any(isinstance(n, ast.FunctionDef) and _kind(n) == "kernel" for n in ast.walk(tree))


def has_device_code(source: str) -> bool:
    """Whether something of the module may end up in the machine code of a kernel."""
    tree = ast.parse(source)
    return any(
        (isinstance(n, ast.FunctionDef) and _kind(n))
        or (isinstance(n, ast.Call) and _called(n) == "instruction")
        for n in ast.walk(tree)
    )


def draw(planted: Sequence[Planted], count: int, reached: Collection[int]) -> list[Planted]:
    """The first `count` of those whose statement some case reaches."""
    return [p for p in planted if not p.line or p.line in reached][:count]


def _lost(find: str, replace: str) -> set[str]:
    """Lines of a text that are not in the other."""
    return {line.strip() for line in find.splitlines()} - {
        line.strip() for line in replace.splitlines()
    }


def _flaw(source: str, changed: str) -> str:
    form = _normal(changed)
    if form is None:
        return "INVALID: Python cannot read it"
    return "EQUAL: the code is what it was" if form == _normal(source) else ""


@functools.lru_cache(8)  # of the modules that are changed; a mutant is asked for once
def _normal(source: str) -> str | None:
    """The syntax tree without layout, comments, docstrings and other idle constants; None if there
    is none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    for node in statements(tree):
        body = getattr(node, "body", [])
        body[:] = [s for s in body if not _is_idle(s)]
    return ast.dump(tree)


def _is_idle(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# -- which statements a case reaches ---------------------------------------------------------------

REACHED = "__kdtr_reached__"


def instrumented(source: str) -> str:
    """The source with a call of REACHED(line) before every statement of every function."""
    tree = ast.parse(source)
    for node in _functions(tree):
        _instrument(node.body, first=1 if _is_text(node.body[0]) else 0)
    return ast.unparse(ast.fix_missing_locations(tree))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The outermost functions; what lies inside them is reached through them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        else:
            yield from _functions(node)


def _called_from(tree: ast.AST, start: str) -> set[str]:
    """Names of the functions of a module that `start` uses, itself among them."""
    functions = {function.name: function for function in _functions(tree)}
    found: set[str] = set()
    queue = [start]
    while queue:
        name = queue.pop()
        if name in functions and name not in found:
            found.add(name)
            queue += [n.id for n in ast.walk(functions[name]) if isinstance(n, ast.Name)]
    return found


def _instrument(body: list[ast.stmt], first: int = 0) -> None:
    made: list[ast.stmt] = body[:first]
    for statement in body[first:]:
        call = ast.Call(ast.Name(REACHED, ast.Load()), [ast.Constant(statement.lineno)], [])
        made.append(ast.Expr(call))
        made.append(statement)
        for part in ("body", "orelse", "finalbody"):
            inner = getattr(statement, part, None)
            if isinstance(inner, list) and inner and not isinstance(statement, ast.ClassDef):
                is_function = isinstance(statement, ast.FunctionDef) and part == "body"
                _instrument(inner, 1 if is_function and _is_text(inner[0]) else 0)
        for handler in getattr(statement, "handlers", ()):
            _instrument(handler.body)
    body[:] = made


def statement_line(source: str, line: int) -> int:
    """First line of the innermost statement of a function that `line` lies in; 0 outside."""
    return max((first for first, last in _spans(source) if first <= line <= last), default=0)


@functools.lru_cache(8)
def _spans(source: str) -> list[tuple[int, int]]:
    """First and last line of every statement within a function."""
    return [
        (node.lineno, node.end_lineno or node.lineno)
        for function in _functions(ast.parse(source))
        for node in statements(function)
        if isinstance(node, ast.stmt) and node is not function
    ]


# -- the operators ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Edit:
    operator: str
    where: str  # the function
    said: str  # "i < n -> i <= n"
    line: int
    start: int  # characters of the source that are replaced
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


class _Operators:
    """All edits of one module."""

    def __init__(self, spec: Spec, source: str, tree: ast.Module):
        self.spec, self.source, self.tree = spec, source, tree
        lines = source.splitlines(keepends=True)
        self.starts, at = [0], 0
        for line in lines:
            at += len(line)
            self.starts.append(at)
        self.lines = lines
        self.parent: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }
        self.launcher = spec.kernel.partition(":")[2] if spec.kernel else "reference"

    def edits(self) -> Iterator[_Edit]:
        judged = None if self.spec.kernel else _called_from(self.tree, "reference")
        for function in _functions(self.tree):
            if judged is not None and function.name not in judged:
                continue  # not what an oracle says, but what it is asked or compared with
            if function.name == self.launcher:
                yield from self.nothing(function)
            yield from self.within(function)

    def nothing(self, function: ast.FunctionDef) -> Iterator[_Edit]:
        if not self.spec.kernel:
            return  # an oracle that returns None is not a fault that anybody makes
        first = function.body[1] if _is_text(function.body[0]) else function.body[0]
        yield self.insert("launcher does nothing", function.name, first, "return None", line=0)

    def within(self, function: ast.FunctionDef) -> Iterator[_Edit]:
        for node in ast.walk(function):
            if self.is_left_alone(node, function):
                continue
            kernel = self.kernel_around(node)
            if isinstance(node, ast.Compare):
                yield from self.comparison(node)
            elif isinstance(node, ast.BinOp):
                yield from self.arithmetic(node)
            elif isinstance(node, ast.Constant) and kernel:
                yield from self.constant(node)
            elif isinstance(node, ast.BoolOp | ast.UnaryOp):
                yield from self.logic(node)
            elif isinstance(node, ast.Attribute):
                yield from self.axis(node)
            elif isinstance(node, ast.Call):
                yield from self.call(node)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and kernel:
                yield from self.dropped(node.value)
            elif isinstance(node, ast.Assign) and kernel:
                yield from self.stored(node)
            elif isinstance(node, ast.FunctionDef) and _kind(node) == "kernel":
                yield from self.input_changed(node)

    def is_left_alone(self, node: ast.AST, function: ast.FunctionDef) -> bool:
        """Whether it is an argument check, a message, a decorator, an annotation or a default."""
        child, above = node, self.parent.get(node)
        while above is not None and child is not function:
            if isinstance(above, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments | ast.arg):
                return True
            if isinstance(above, ast.If) and child is above.test and _only_raises(above.body):
                return True
            if isinstance(above, ast.Call) and _called(above) in _SILENT | _SIZES:
                return True
            if isinstance(above, ast.FunctionDef) and child not in above.body:
                return True
            child, above = above, self.parent.get(above)
        return isinstance(node, ast.Call) and _called(node) in _SILENT

    # -- one operator each

    def comparison(self, node: ast.Compare) -> Iterator[_Edit]:
        if len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            new = _COMPARE[type(node.ops[0])]
            yield self.infix("comparison", node, node.left, node.comparators[0], new)

    def arithmetic(self, node: ast.BinOp) -> Iterator[_Edit]:
        texts = (node.left, node.right)
        if any(isinstance(t, ast.Tuple | ast.List | ast.JoinedStr) for t in texts):
            return
        if type(node.op) in _ARITHMETIC:
            new = _ARITHMETIC[type(node.op)]
            yield self.infix("arithmetic", node, node.left, node.right, new)

    def constant(self, node: ast.Constant) -> Iterator[_Edit]:
        if type(node.value) is not int or node.value > 255:
            return
        around = self.parent[node]
        if isinstance(around, ast.Call) and _called(around) == "f32":
            return
        yield self.replace("constant", node, str(node.value + 1), said=around)

    def logic(self, node: ast.BoolOp | ast.UnaryOp) -> Iterator[_Edit]:
        if isinstance(node, ast.BoolOp):
            new = "or" if isinstance(node.op, ast.And) else "and"
            yield self.infix("logic", node, node.values[0], node.values[1], new)
        elif isinstance(node.op, ast.Not):
            yield self.replace("logic", node, self.text(node.operand))

    def axis(self, node: ast.Attribute) -> Iterator[_Edit]:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "blockIdx":
            new = f"{self.text(node.value)}.{_AXES[node.attr]}"
            yield self.replace("axes", node, new)

    def call(self, node: ast.Call) -> Iterator[_Edit]:
        name = _called(node)
        if name in ("min", "max") and not node.keywords:
            new = "max" if name == "min" else "min"
            text = self.text(node.func)
            yield self.replace("extremum", node.func, text[: -len(name)] + new, said=node)
        if name in ("static_range", "range") and len(node.args) == 1:
            text = self.text(node.args[0])
            yield self.replace("last tile", node.args[0], f"({text}) - 1", said=node)
        if name == "launch" and node.args and isinstance(node.args[0], ast.Tuple):
            grid = node.args[0].elts
            if len(grid) > 1 and ast.dump(grid[0]) != ast.dump(grid[1]):
                texts = [self.text(e) for e in grid]
                texts[:2] = texts[1::-1]
                yield self.replace("axes", node.args[0], f"({', '.join(texts)})")

    def dropped(self, node: ast.Call) -> Iterator[_Edit]:
        name = _called(node)
        if name in _SILENT:
            return
        waits = name in ("syncthreads", "syncwarp", "threadfence") or "wait" in name
        yield self.replace("barrier" if waits else "call", node, "None")
        if name.startswith("store") and len(node.args) > 1:
            place = node.args[1] if name == "store" else node.args[0]
            value = node.args[2] if name == "store" else node.args[1]
            step = _STEPS.get(name.rpartition("_")[2], 1)  # bytes from an address, or elements
            yield self.replace("shifted store", place, f"({self.text(place)}) + {step}", said=node)
            yield from self.zeroed(value, node)

    def stored(self, node: ast.Assign) -> Iterator[_Edit]:
        target = node.targets[0]
        outputs = {*self.spec.outputs, *self.spec.scratch}
        if (
            isinstance(target, ast.Subscript)
            and isinstance(target.value, ast.Name)
            and target.value.id in outputs
        ):
            at = self.text(target.slice)
            yield self.replace("shifted store", target.slice, f"({at}) + 1", said=node)
            yield from self.zeroed(node.value, node)

    def zeroed(self, value: ast.expr, statement: ast.AST) -> Iterator[_Edit]:
        """Zero of the value's own type: NaN less NaN would be no change."""
        text = self.text(value)
        if "nan" not in text.lower() and "inf" not in text.lower():
            yield self.replace("constant output", value, f"({text}) - ({text})", said=statement)

    def input_changed(self, node: ast.FunctionDef) -> Iterator[_Edit]:
        inputs = [
            a.arg
            for a in node.args.args
            if a.arg in self.spec.inputs
            and isinstance(a.annotation, ast.Subscript)
            and self.text(a.annotation.value) == "ptr"
        ]
        first = node.body[1] if _is_text(node.body[0]) else node.body[0]
        for name in inputs:
            text = f"{name}[0] = {name}[0] + {name}[0] + 1"
            yield self.insert("input changed", node.name, first, text)

    # -- text

    def kernel_around(self, node: ast.AST) -> bool:
        """Whether it is part of a kernel or of a device function."""
        above: ast.AST | None = node
        while above is not None:
            if isinstance(above, ast.FunctionDef) and _kind(above) in ("kernel", "function"):
                return True
            above = self.parent.get(above)
        return False

    def function_around(self, node: ast.AST) -> str:
        above: ast.AST | None = node
        while above is not None and not isinstance(above, ast.FunctionDef):
            above = self.parent.get(above)
        return above.name if above is not None else ""

    def statement_around(self, node: ast.AST) -> int:
        above: ast.AST = node
        while not isinstance(above, ast.stmt):
            above = self.parent[above]
        return above.lineno

    def place(self, line: int, column: int) -> int:
        """Index into the source of a position as `ast` gives it: bytes of UTF-8 in a line."""
        before = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(before)

    def span(self, node: ast.AST) -> tuple[int, int]:
        at = node  # every node that is asked about has a place
        start = self.place(at.lineno, at.col_offset)  # type: ignore[attr-defined]
        return start, self.place(at.end_lineno, at.end_col_offset)  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def infix(
        self, operator: str, node: ast.expr, left: ast.expr, right: ast.expr, new: str
    ) -> _Edit:
        """Another operator between two operands, brackets and blanks left as they are."""
        start, end = self.span(left)[1], self.span(right)[0]
        between = self.source[start:end]
        text = between.replace(between.strip("() \n"), new, 1)
        said = f"{_short(self.text(node))} with {new}"
        return _Edit(
            operator,
            self.function_around(node),
            said,
            self.statement_around(node),
            start,
            end,
            text,
        )

    def replace(
        self, operator: str, node: ast.AST, text: str, *, said: ast.AST | None = None
    ) -> _Edit:
        start, end = self.span(node)
        told = f"{_short(self.source[start:end])} -> {_short(text)}"
        if said is not None:
            told += f" in {_short(self.text(said))}"
        return _Edit(
            operator,
            self.function_around(node),
            told,
            self.statement_around(node),
            start,
            end,
            text,
        )

    def insert(
        self, operator: str, where: str, before: ast.stmt, text: str, line: int | None = None
    ) -> _Edit:
        at = self.place(before.lineno, before.col_offset)
        line = before.lineno if line is None else line
        indent = " " * before.col_offset
        return _Edit(operator, where, text, line, at, at, f"{text}\n{indent}")


def _kind(node: ast.FunctionDef) -> str:
    """kernel, function or "": by the decorator."""
    for decorator in node.decorator_list:
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(name, ast.Name) and name.id in ("kernel", "function"):
            return name.id
        if isinstance(name, ast.Attribute) and name.attr == "jit":
            return "kernel"
    return ""


def _called(node: ast.Call) -> str:
    """Last part of the name of what is called."""
    function = node.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def _only_raises(body: Sequence[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Raise) for statement in body)


def _short(text: str) -> str:
    """On one line and not long; two that are cut alike get numbers."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
