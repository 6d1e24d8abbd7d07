"""How an intrinsic is made: PTX or LLVM for the GPU and a stand-in for the simulator, in one place.

`instruction` is one PTX statement, `composed` a function that writes LLVM, with `assembly` where it
wants PTX. A type is u32, i32, u64 or f32; `(f32, 8)` is a tuple of eight, which lives in registers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from engine.device import SIMULATED, f32, i32, u32, u64

LITERAL = object()  # an operand that must be a literal; `emit` gets its value

if SIMULATED:
    from engine import simulator

    LLVM: dict[Any, Any] = {}
else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    simulator = None
    LLVM = {u32: ir.IntType(32), i32: ir.IntType(32), u64: ir.IntType(64), f32: ir.FloatType()}
    _CONSTRAINT = {u32: "r", i32: "r", u64: "l", f32: "f"}


def instruction(
    text: str,
    outs: Sequence[Any],
    ins: Sequence[Any],
    stand_in: Callable,
    *,
    volatile: bool = False,
    memory: bool = False,
) -> Callable:
    """An intrinsic that is one PTX text: $0.. are the outputs, then the inputs, in order.

    No output returns nothing, one returns the value, several return a tuple of one type.
    volatile: must not be moved or merged; memory: also orders other memory accesses.
    """
    if SIMULATED:
        return stand_in
    call = assembly(text, outs, ins, volatile=volatile, memory=memory)

    def emit(builder: Any, *operands: Any) -> Any:
        results = call(builder, operands)
        return results[0] if len(outs) == 1 else results

    result = (outs[0], len(outs)) if len(outs) > 1 else outs[0] if outs else None
    return composed(result, ins, emit, stand_in)


def composed(
    result: Any,
    operands: Sequence[Any],
    emit: Callable,
    stand_in: Callable,
    *,
    unpacked: bool = True,
) -> Callable:
    """An intrinsic whose LLVM `emit(builder, *values)` writes.

    A tuple comes as a list of its values and is returned as one; `unpacked=False`: as the LLVM
    struct that it is, which costs nothing where few of many values change.
    """
    if SIMULATED:
        return stand_in
    wanted = [t if t is LITERAL else _numba(t) for t in operands]
    returned = _numba(result)

    def typing(given: Sequence[Any]) -> Any:
        for want, have in zip(wanted, given, strict=True):
            if want is LITERAL and not isinstance(have, types.IntegerLiteral):
                return None
            if isinstance(want, types.UniTuple) and want != have:
                return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values = list(args)
            for i, (want, have) in enumerate(zip(wanted, given, strict=True)):
                if want is LITERAL:
                    values[i] = have.literal_value
                elif unpacked and isinstance(want, types.UniTuple):
                    values[i] = cgutils.unpack_tuple(builder, values[i])
            value = emit(builder, *values)
            if result is None:
                return context.get_dummy_value()
            if unpacked and isinstance(returned, types.UniTuple):
                return context.make_tuple(builder, signature.return_type, value)
            return value

        arguments = [h if w is LITERAL else w for w, h in zip(wanted, given, strict=True)]
        return returned(*arguments), codegen

    # Numba wants the exact arity in the signature of an intrinsic.
    names = "".join(f"a{i}, " for i in range(len(wanted)))
    scope: dict[str, Any] = {"of": typing}
    exec(f"def typing(context, {names}): return of(({names}))", scope)
    return intrinsic(scope["typing"])


def assembly(
    text: str,
    outs: Sequence[Any],
    ins: Sequence[Any],
    *,
    early: bool = False,
    volatile: bool = False,
    memory: bool = False,
) -> Callable:
    """(builder, operands) -> list of results: a call of inline PTX, for `emit` of `composed`.

    An input that is a number shares the register of the output of that number. early: outputs are
    written before all inputs are read, so that they need registers of their own.
    """
    at_first = "=&" if early else "="
    constraints = [at_first + _CONSTRAINT[t] for t in outs]
    constraints += [str(t) if isinstance(t, int) else _CONSTRAINT[t] for t in ins]
    constraints += ["~{memory}"] if memory else []
    results = [LLVM[t] for t in outs]
    result = (
        results[0] if len(outs) == 1 else ir.LiteralStructType(results) if outs else ir.VoidType()
    )
    operands = [results[t] if isinstance(t, int) else LLVM[t] for t in ins]

    def call(builder: Any, values: Sequence[Any]) -> list:
        asm = ir.InlineAsm(
            ir.FunctionType(result, operands),
            text,
            ",".join(constraints),
            side_effect=volatile or memory,
        )
        value = builder.call(asm, values)
        if len(outs) < 2:
            return [value] * len(outs)
        return [builder.extract_value(value, i) for i in range(len(outs))]

    return call


def constant(kind: Any, value: int) -> Any:
    """An LLVM constant, for `emit` of `composed`."""
    return ir.Constant(LLVM[kind], value)


def registers(first: int, count: int) -> str:
    """{$first, ..} of PTX: `count` operands."""
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


def _numba(kind: Any) -> Any:
    if kind is None:
        return types.void
    return types.UniTuple(*kind) if isinstance(kind, tuple) else kind
