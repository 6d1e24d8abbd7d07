"""Programmatic dependent launch: what a kernel reads before the kernels ahead of it are done.

The simulator runs launches one after another and a GPU may be lucky, so the source is read instead.
In every kernel with `dependent_launch` each path reaches `pdl_wait`, and until then no pointer
parameter is touched that is not in EARLY: those hold what no kernel of the same graph writes, or
what a kernel made that is known to be done. `address` and `advance` touch nothing.
"""

import ast
import textwrap
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[1] / "engine"
EARLY = {
    "add_rms_norm": {"weight"},
    # gate_up waits before it lets `down` start, so what is ahead of gate_up is done.
    "down": {"qw", "sc", "block_expert", "block_slot"},
    "gemm_bf16": {"w"},
    "gemm_resident": {"w"},
    "latent_append": {"q_weight", "kv_weight"},
    "rms_norm": {"weight"},
    "router": {"bias"},
    "tree_verify_mla_bf16": {"row_start", "prefix_len"},
    "w4a16_gemm": {"qw", "sc"},
    "w4a16_wgmma": {"qw", "sc"},
}
PLAIN = {"join_columns"}  # kernels without it
ADDRESSES = {"address", "advance", "u32", "u64"}
ALWAYS = {"m > u32(0)"}  # conditions that hold in every launch
# multiply_rows waits for its caller if it was made so.
INNER = ast.parse((ENGINE / "int4.py").read_text())


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def has_dependent_launch(function, tree):
    """None for a function that is no kernel."""
    for made in function.decorator_list:
        if isinstance(made, ast.Call) and ast.unparse(made.func) == "kernel":
            said = ast.unparse(made)
            for keyword in made.keywords:
                if keyword.arg is None:  # of a function that makes the options
                    (maker,) = [
                        f for f in functions(tree) if f.name == ast.unparse(keyword.value.func)
                    ]
                    said += ast.unparse(maker).replace("'dependent_launch': ", "dependent_launch=")
            return "dependent_launch=True" in said
    return None


class Audit:
    """One function read statement by statement, in the order in which it runs."""

    def __init__(self, pointers, constants=(), waits=None, tuples=()):
        self.tuples = set(tuples)  # names of several pointers: taking one touches nothing
        self.of = {name: {name} for name in pointers}  # pointers that a variable is made of
        self.constants = dict(constants)
        self.waits = waits or {}  # functions that wait: which arguments they touch before
        self.touched = set()
        self.late = []  # ends that are reached without a wait

    def run(self, body):
        if self.block(body, waited=False) is False:
            self.late.append("the end")
        return self

    def block(self, body, waited):
        """Whether all has waited behind these statements; None if nothing gets there."""
        for statement in body:
            if waited is None:
                return None
            waited = self.statement(statement, waited)
        return waited

    def statement(self, node, waited):
        if isinstance(node, ast.If):
            return self.branch(node, waited)
        if isinstance(node, (ast.While, ast.For)):
            made = self.value(node.test if isinstance(node, ast.While) else node.iter, waited)
            if isinstance(node, ast.For):
                self.of[node.target.id] = made
            self.block(node.body, waited)
            self.block(node.body, waited)  # again, with what the first turn made of the variables
            return waited
        if isinstance(node, ast.Return):
            waited = self.call_waits(node.value, waited)
            if not waited:
                self.late.append(f"line {node.lineno}")
            return None
        if isinstance(node, ast.Expr) and ast.unparse(node.value) == "pdl_wait()":
            return True
        value = getattr(node, "value", None)
        made = self.value(value, waited)
        waited = self.call_waits(value, waited)
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                for name in names:
                    if isinstance(name, ast.Name):
                        self.of[name.id] = self.of.get(name.id, set()) | made
                    else:
                        self.value(name, waited)
        return waited

    def branch(self, node, waited):
        self.value(node.test, waited)
        said = ast.unparse(node.test)
        known = True if said in ALWAYS else self.constants.get(said)
        if known is not None:
            return self.block(node.body if known else node.orelse, waited)
        ends = [self.block(body, waited) for body in (node.body, node.orelse)]
        ends = [end for end in ends if end is not None]
        return all(ends) if ends else None

    def call_waits(self, value, waited):
        calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)] if value else []
        return waited or any(ast.unparse(call.func) in self.waits for call in calls)

    def value(self, node, waited):
        """The pointers that this expression is an address in; notes those that it reads."""
        if node is None or isinstance(node, ast.Constant):
            return set()
        if isinstance(node, ast.Name):
            return self.of.get(node.id, set())
        if isinstance(node, ast.Subscript):
            self.value(node.slice, waited)
            if isinstance(node.value, ast.Tuple) or ast.unparse(node.value) in self.tuples:
                return self.value(node.value, waited)
            return self.touch(self.value(node.value, waited), waited)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            made = [self.value(argument, waited) for argument in node.args]
            if name in ADDRESSES:
                return set().union(*made)
            for i, pointers in enumerate(made):
                if name not in self.waits or i in self.waits[name]:
                    self.touch(pointers, waited)
            return set()
        made = [self.value(child, waited) for child in ast.iter_child_nodes(node)]
        return set().union(*made)

    def touch(self, pointers, waited):
        if not waited:
            self.touched |= pointers
        return set()


def inner_waits(tree):
    """Names in a file of functions that wait: which of their arguments they touch before."""
    (inner,) = [f for f in functions(INNER) if f.name == "multiply_rows"]
    names = [argument.arg for argument in inner.args.args]
    waits = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            given = {k.arg: ast.unparse(k.value) for k in node.value.keywords}
            maker = ast.unparse(node.value.func)
            if maker == "dense_rows" or (maker == "expert_rows" and given["matrices"] == "1"):
                audit = Audit(names, {"waits": True}, tuples=names).run(inner.body)
                assert not audit.late
                waits[ast.unparse(node.targets[0])] = {names.index(n) for n in audit.touched}
    return waits


def audited(tree):
    """{kernel: (pointers touched before the wait, ends without one)} of a file's kernels."""
    found = {}
    for function in functions(tree):
        if has_dependent_launch(function, tree):
            pointers = [
                a.arg for a in function.args.args if ast.unparse(a.annotation).startswith("ptr[")
            ]
            around = [f for f in functions(tree) if function in f.body]
            audit = Audit(pointers, waits=inner_waits(around[0]) if around else {})
            audit.run(function.body)
            found[function.name.strip("_")] = (audit.touched, audit.late)
    return found


FILES = sorted((ENGINE / "kernels").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_that_a_pass_makes_is_touched_before_the_wait(path):
    tree = ast.parse(path.read_text())
    for name, (touched, late) in audited(tree).items():
        assert touched == EARLY.get(name, set()), f"{name}: touched before pdl_wait"
        assert not late, f"{name}: no pdl_wait on a path to {late}"


def test_every_kernel_is_in_the_chain():
    trees = [ast.parse(path.read_text()) for path in FILES]
    with_it = {name for tree in trees for name in audited(tree)}
    without = {
        f.name.strip("_") for t in trees for f in functions(t)
        if has_dependent_launch(f, t) is False
    }  # fmt: skip
    assert without == PLAIN
    assert set(EARLY) <= with_it
    assert len(with_it) > 30


def test_gate_up_waits_before_it_lets_down_start():
    tree = ast.parse((ENGINE / "kernels" / "moe_w4a16.py").read_text())
    (gate_up,) = [f for f in functions(tree) if f.name == "gate_up"]
    text = ast.unparse(gate_up)
    assert text.index("pdl_wait()") < text.index("pdl_launch_dependents()")


@pytest.mark.parametrize(
    ("body", "touched", "late"),
    [
        ("pdl_wait()\ny[0] = x[0]", set(), 0),
        ("a = x[0]\npdl_wait()", {"x"}, 0),
        ("y[0] = n\npdl_wait()", {"y"}, 0),
        ("at = address(x, u64(4))\npdl_wait()\nload(at)", set(), 0),
        ("at = u64(address(x, u64(4)) + u64(8))\nload(at)\npdl_wait()", {"x"}, 0),
        ("if n > x[0]:\n    return\npdl_wait()", {"x"}, 1),
        ("if n:\n    pdl_wait()\nx[0]", {"x"}, 1),
        ("if n:\n    pdl_wait()\nelse:\n    pdl_wait()\nx[0]", set(), 0),
        ("if n:\n    return\nelse:\n    pdl_wait()\nx[0]", set(), 1),
        ("while n:\n    pdl_wait()", set(), 1),
        ("while n:\n    at = later\n    load(at)\n    later = x\npdl_wait()", {"x"}, 0),
        ("pdl_launch_dependents()", set(), 1),
        ("pdl_wait()\nreturn x[0]", set(), 0),
        ("multiply(address(w, 0), address(x, 0))\nx[0]", {"w"}, 0),
    ],
)
def test_the_reader_sees_what_is_wrong(body, touched, late):
    made = f"def k(x, w, n, y):\n{textwrap.indent(body, '    ')}"
    (function,) = functions(ast.parse(made))
    audit = Audit(["x", "w", "y"], waits={"multiply": {0}}).run(function.body)
    assert (audit.touched, len(audit.late)) == (touched, late)
