"""Every inline-PTX intrinsic of the engine, each with its stand-in for the simulator.

A name means the same in both: the GPU branch emits one PTX statement through LLVM inline assembly,
the simulator branch does in Python what the PTX ISA says that statement does. bfloat16 values are
their 16 bits in a u32. Addresses (`address`, `shared_address`) are integers on the GPU and objects
in the simulator; adding bytes to one works in both.

Source of the semantics: PTX ISA 9.0, sections "mma.m16n8k16", "ldmatrix", "wgmma", "cp.async",
"cp.async.bulk", "mbarrier", "redux.sync", "cvt", "ex2", "prmt", "lop3", "griddepcontrol". Not alike
to the bit: ex2.approx is within 2 ulp, the simulator's exp2 is correctly rounded as good as always;
a tensor core adds sixteen products in an order and width of its own, the simulator exactly and with
one rounding.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numba.cuda import types

from engine.device import SIMULATED, f32, i32, u32, u64

__all__ = [
    "add_f32", "address", "advance", "atomic_add", "bf16_to_f32", "bf16x2_high", "bf16x2_low",
    "bits_to_f32", "copy_bulk", "cp_async_16", "cp_async_16_zfill", "cp_async_commit",
    "cp_async_wait", "exp2", "f32_to_bf16", "f32_to_bits", "fence_async", "fma", "fma_dot4",
    "has_wgmma", "int4_factors", "ldmatrix_x2", "ldmatrix_x4", "ldmatrix_x4_trans",
    "load_global_nc_v4", "load_global_ro_v4", "load_global_u16", "load_global_u32",
    "load_global_v2", "load_global_v4", "load_global_v4_or_zero", "load_rows", "load_rows_u16",
    "load_shared_u32", "load_shared_v2", "load_shared_v4", "lop3", "matrix_descriptor",
    "mbarrier_arrive", "mbarrier_expect", "mbarrier_init", "mbarrier_init_fence", "mbarrier_wait",
    "mma_bf16", "mma_bf16_slice", "mma_bf16_tiles", "mma_int4", "mul_high_u64", "pack_bf16x2",
    "pdl_launch_dependents", "pdl_wait", "popc", "prmt", "reciprocal", "scale_rows",
    "shared_address", "store_global_u16", "store_global_u32", "store_global_v2", "store_global_v4",
    "store_shared_u32", "store_shared_v2", "store_shared_v4", "warp_max_u32", "warp_min_u32",
    "warp_sum_u32", "wgmma_bf16", "wgmma_int4", "zeros_f32", "zeros_u32",
]  # fmt: skip


@cache
def has_wgmma() -> bool:
    """Hopper alone has it; the GPUs of a machine are taken to be alike."""
    if SIMULATED:
        return True
    from cuda.core import Device

    return Device().compute_capability[0] == 9


if not SIMULATED:
    from llvmlite import ir
    from numba.cuda import cgutils
    from numba.cuda.extending import intrinsic

    _I32, _I64, _F32, _VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()
    _LLVM = {u32: _I32, i32: _I32, u64: _I64, f32: _F32}
    _CONSTRAINT = {u32: "r", i32: "r", u64: "l", f32: "f"}

    def _ptx(
        text: str,
        outs: Sequence[Any],
        ins: Sequence[Any],
        *,
        volatile: bool = False,
        memory: bool = False,
    ) -> Callable:
        """An intrinsic that is one PTX text: $0.. are the outputs, then the inputs, in order.

        No output returns nothing, one returns the value, several return a tuple of one type.
        volatile: must not be moved or merged; memory: also orders other memory accesses.
        """
        count = len(outs)
        constraints = ["=" + _CONSTRAINT[t] for t in outs] + [_CONSTRAINT[t] for t in ins]
        constraints += ["~{memory}"] if memory else []
        if count == 0:
            result, llvm = types.void, _VOID
        elif count == 1:
            result, llvm = outs[0], _LLVM[outs[0]]
        else:
            result = types.UniTuple(outs[0], count)
            llvm = ir.LiteralStructType([_LLVM[t] for t in outs])

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            asm = ir.InlineAsm(
                ir.FunctionType(llvm, [_LLVM[t] for t in ins]),
                text,
                ",".join(constraints),
                side_effect=volatile or memory,
            )
            value = builder.call(asm, args)
            if count == 0:
                return context.get_dummy_value()
            if count == 1:
                return value
            parts = [builder.extract_value(value, i) for i in range(count)]
            return context.make_tuple(builder, signature.return_type, parts)

        # Numba wants the exact arity in the signature of an intrinsic.
        names = ", ".join(["context", *(f"a{i}" for i in range(len(ins)))])
        scope: dict[str, Any] = {"result": result, "ins": tuple(ins), "codegen": codegen}
        exec(f"def typing({names}):\n    return result(*ins), codegen", scope)
        return intrinsic(scope["typing"])

    def _registers(first: int, count: int) -> str:
        return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"

    @intrinsic
    def address(context: Any, pointer: Any, index: Any) -> Any:
        """Global address (u64) of element `index` of a pointer parameter."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            wide = builder.zext(args[1], _I64) if args[1].type != _I64 else args[1]
            place = builder.gep(args[0], [wide])
            place = builder.addrspacecast(place, ir.PointerType(place.type.pointee, 1))
            return builder.ptrtoint(place, _I64)

        if not isinstance(index, types.Integer) or index.signed:
            return None
        return types.uint64(pointer, index), codegen

    @intrinsic
    def advance(context: Any, pointer: Any, count: Any) -> Any:
        """The pointer moved by `count` elements; with a u64 count, past 2^32 of them."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            wide = builder.zext(args[1], _I64) if args[1].type != _I64 else args[1]
            return builder.gep(args[0], [wide])

        if not isinstance(count, types.Integer) or count.signed:
            return None
        return pointer(pointer, count), codegen

    @intrinsic
    def shared_address(context: Any, array: Any, index: Any) -> Any:
        """Address (u32, in the shared window) of element `index` of a shared array."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            place = builder.gep(data, [builder.zext(args[1], _I64)])
            place = builder.addrspacecast(place, ir.PointerType(place.type.pointee, 3))
            return builder.ptrtoint(place, _I32)

        return types.uint32(array, types.uint32), codegen

    @intrinsic
    def atomic_add(context: Any, pointer: Any, index: Any, value: Any) -> Any:
        """Add to a u32 in global memory, relaxed; returns what was there."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = builder.gep(args[0], [builder.zext(args[1], _I64)])
            return builder.atomic_rmw("add", place, args[2], "monotonic")

        return types.uint32(pointer, types.uint32, types.uint32), codegen

    load_global_u16 = _ptx(
        "{ .reg .b16 h; ld.global.b16 h, [$1]; cvt.u32.u16 $0, h; }", [u32], [u64], memory=True
    )
    load_global_u32 = _ptx("ld.global.b32 $0, [$1];", [u32], [u64], memory=True)
    load_global_v2 = _ptx("ld.global.v2.b32 {$0, $1}, [$2];", [u32] * 2, [u64], memory=True)
    load_global_v4 = _ptx("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", [u32] * 4, [u64], memory=True)
    load_global_ro_v4 = _ptx(
        "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", [u32] * 4, [u64], volatile=True
    )
    load_global_v4_or_zero = _ptx(
        "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;"
        " mov.b32 $3, 0; @p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        [u32] * 4,
        [u64, u32],
        volatile=True,
    )
    load_global_nc_v4 = _ptx(
        "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];",
        [u32] * 4,
        [u64],
        volatile=True,
    )
    store_global_u16 = _ptx(
        "{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0], h; }", [], [u64, u32], memory=True
    )
    store_global_u32 = _ptx("st.global.b32 [$0], $1;", [], [u64, u32], memory=True)
    store_global_v2 = _ptx("st.global.v2.b32 [$0], {$1, $2};", [], [u64, u32, u32], memory=True)
    store_global_v4 = _ptx(
        "st.global.v4.b32 [$0], {$1, $2, $3, $4};", [], [u64] + [u32] * 4, memory=True
    )
    load_shared_u32 = _ptx("ld.shared.b32 $0, [$1];", [u32], [u32], memory=True)
    load_shared_v2 = _ptx("ld.shared.v2.b32 {$0, $1}, [$2];", [u32] * 2, [u32], memory=True)
    load_shared_v4 = _ptx("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [u32] * 4, [u32], memory=True)
    store_shared_u32 = _ptx("st.shared.b32 [$0], $1;", [], [u32, u32], memory=True)
    store_shared_v2 = _ptx("st.shared.v2.b32 [$0], {$1, $2};", [], [u32] * 3, memory=True)
    store_shared_v4 = _ptx("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", [], [u32] * 5, memory=True)

    cp_async_16 = _ptx("cp.async.cg.shared.global [$0], [$1], 16;", [], [u32, u64], memory=True)
    cp_async_16_zfill = _ptx(
        "cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [u32, u64, u32], memory=True
    )
    cp_async_commit = _ptx("cp.async.commit_group;", [], [], memory=True)

    def cp_async_wait(pending: int) -> Callable:
        """Makes an intrinsic that waits until at most `pending` groups of this thread are open."""
        return _ptx(f"cp.async.wait_group {pending};", [], [], memory=True)

    def _ldmatrix(count: int, suffix: str) -> Callable:
        shape = f"ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16"
        text = f"{shape} {_registers(0, count)}, [${count}];"
        return _ptx(text, [u32] * count, [u32], memory=True)

    ldmatrix_x2 = _ldmatrix(2, "")
    ldmatrix_x4 = _ldmatrix(4, "")
    ldmatrix_x4_trans = _ldmatrix(4, ".trans")
    mma_bf16 = _ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        [f32] * 4,
        [u32] * 6 + [f32] * 4,
    )

    def zeros_f32(count: int) -> Callable:
        """Makes an intrinsic that returns `count` zeros in a tuple, which live in registers."""

        @intrinsic
        def zeros(context: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                zero = ir.Constant(_F32, 0.0)
                return context.make_tuple(builder, signature.return_type, [zero] * count)

            return types.UniTuple(f32, count)(), codegen

        return zeros

    def mma_bf16_tiles(rows: int, columns: int) -> Callable:
        """Makes an intrinsic: `rows` A fragments times `columns` B fragments, in one call.

        (sums, a, b) -> sums; tuples of 4 rows columns f32, 4 rows u32, 2 columns u32. The sums of
        tile (i, j) start at 4 (i columns + j). One call instead of rows x columns keeps Numba's
        compile time linear in their number.
        """
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        llvm = ir.FunctionType(ir.LiteralStructType([_F32] * 4), [_I32] * 6 + [_F32] * 4)
        asm = ir.InlineAsm(llvm, text, ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4))

        @intrinsic
        def tiles(context: Any, sums: Any, a: Any, b: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                sums, a, b = (cgutils.unpack_tuple(builder, v) for v in args)
                for i in range(rows):
                    for j in range(columns):
                        at = 4 * (i * columns + j)
                        operands = a[4 * i : 4 * i + 4] + b[2 * j : 2 * j + 2] + sums[at : at + 4]
                        result = builder.call(asm, operands)
                        sums[at : at + 4] = [builder.extract_value(result, n) for n in range(4)]
                return context.make_tuple(builder, signature.return_type, sums)

            wanted = (
                types.UniTuple(f32, 4 * rows * columns),
                types.UniTuple(u32, 4 * rows),
                types.UniTuple(u32, 2 * columns),
            )
            return (wanted[0](*wanted), codegen) if (sums, a, b) == wanted else None

        return tiles

    def mma_bf16_slice(total: int, columns: int) -> Callable:
        """Makes an intrinsic: one A fragment times `columns` B fragments, into some of the sums.

        (place, sums, a, b) -> sums; a literal, and tuples of 4 total f32, 4 u32 and 2 columns u32.
        Tile place columns + j of the sums gets the product of a with fragment j.
        """
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        llvm = ir.FunctionType(ir.LiteralStructType([_F32] * 4), [_I32] * 6 + [_F32] * 4)
        asm = ir.InlineAsm(llvm, text, ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4))

        @intrinsic
        def product(context: Any, place: Any, sums: Any, a: Any, b: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                first = columns * place.literal_value
                _, sums, a, b = args
                a, b = cgutils.unpack_tuple(builder, a), cgutils.unpack_tuple(builder, b)
                for j in range(columns):
                    at = range(4 * (first + j), 4 * (first + j) + 4)
                    before = [builder.extract_value(sums, n) for n in at]
                    result = builder.call(asm, a + b[2 * j : 2 * j + 2] + before)
                    for i, n in enumerate(at):
                        sums = builder.insert_value(sums, builder.extract_value(result, i), n)
                return sums

            wanted = (
                types.UniTuple(f32, 4 * total),
                types.UniTuple(u32, 4),
                types.UniTuple(u32, 2 * columns),
            )
            if not isinstance(place, types.IntegerLiteral) or (sums, a, b) != wanted:
                return None
            return wanted[0](place, *wanted), codegen

        return product

    def scale_rows(tiles: int) -> Callable:
        """Makes an intrinsic: (sums, low, high) -> sums of `tiles` m16n8 tiles, each lane's upper
        row times `low` and its lower row (8 below) times `high`."""

        @intrinsic
        def scale(context: Any, sums: Any, low: Any, high: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                parts = cgutils.unpack_tuple(builder, args[0])
                parts = [builder.fmul(v, args[1 + (n >> 1 & 1)]) for n, v in enumerate(parts)]
                return context.make_tuple(builder, signature.return_type, parts)

            wanted = (types.UniTuple(f32, 4 * tiles), f32, f32)
            return (wanted[0](*wanted), codegen) if (sums, low, high) == wanted else None

        return scale

    def fma_dot4(rows: int, columns: int) -> Callable:
        """Makes an intrinsic that extends rows x columns dot products by four terms each.

        (sums, a, b) -> sums; a and b hold f32 bits, four consecutive terms a row or column:
        sums[i columns + j] = fma(a[4i+3], b[4j+3], ... fma(a[4i], b[4j], sums[i columns + j])).
        """
        asm = ir.InlineAsm(
            ir.FunctionType(_F32, [_I32, _I32, _F32]),
            "{ .reg .f32 x, y; mov.b32 x, $1; mov.b32 y, $2; fma.rn.f32 $0, x, y, $3; }",
            "=f,r,r,f",
        )

        @intrinsic
        def dot4(context: Any, sums: Any, a: Any, b: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                sums, a, b = (cgutils.unpack_tuple(builder, v) for v in args)
                for term in range(4):
                    for n in range(rows * columns):
                        x, y = a[4 * (n // columns) + term], b[4 * (n % columns) + term]
                        sums[n] = builder.call(asm, [x, y, sums[n]])
                return context.make_tuple(builder, signature.return_type, sums)

            wanted = (
                types.UniTuple(f32, rows * columns),
                types.UniTuple(u32, 4 * rows),
                types.UniTuple(u32, 4 * columns),
            )
            return (wanted[0](*wanted), codegen) if (sums, a, b) == wanted else None

        return dot4

    def load_rows(rows: int, stride: int) -> Callable:
        """Makes an intrinsic: 16 bytes from each of `rows` places `stride` bytes apart, past L1.

        (address, wanted, old) -> tuple of 4 rows u32, word j of row r at j rows + r; where wanted
        is 0 nothing is read and `old` comes back. The old value is an operand because a register
        that a predicated load only half defines would stay live around its loop.
        """
        count = 4 * rows
        load = "@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32"
        places = [[f"${j * rows + r}" for j in range(4)] for r in range(rows)]
        text = "".join(
            f" {load} {{{', '.join(registers)}}}, [${count} + {r * stride}];"
            for r, registers in enumerate(places)
        )
        return _predicated(text, count)

    def load_rows_u16(rows: int, stride: int) -> Callable:
        """Makes an intrinsic like `load_rows`: one u16 from each place, in a u32."""
        text = "".join(f" @p ld.global.nc.u16 ${r}, [${rows} + {r * stride}];" for r in range(rows))
        return _predicated(text, rows)

    def _predicated(text: str, count: int) -> Callable:
        """(address, wanted, old) -> old, where `text` has changed it under predicate p."""
        text = f"{{ .reg .pred p; setp.ne.u32 p, ${count + 1}, 0;{text} }}"
        constraints = ["=r"] * count + ["l", "r"] + [str(i) for i in range(count)]
        result = ir.LiteralStructType([_I32] * count) if count > 1 else _I32
        llvm = ir.FunctionType(result, [_I64, _I32] + [_I32] * count)
        asm = ir.InlineAsm(llvm, text, ",".join(constraints), side_effect=True)

        @intrinsic
        def load(context: Any, place: Any, wanted: Any, old: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                result = builder.call(asm, [*args[:2], *cgutils.unpack_tuple(builder, args[2])])
                parts = [result]
                if count > 1:
                    parts = [builder.extract_value(result, i) for i in range(count)]
                return context.make_tuple(builder, signature.return_type, parts)

            want = types.UniTuple(u32, count)
            return (want(u64, u32, want), codegen) if old == want else None

        return load

    def zeros_u32(count: int) -> Callable:
        """Makes an intrinsic that returns `count` zeros in a tuple."""

        @intrinsic
        def zeros(context: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                zero = ir.Constant(_I32, 0)
                return context.make_tuple(builder, signature.return_type, [zero] * count)

            return types.UniTuple(u32, count)(), codegen

        return zeros

    def int4_factors(rows: int) -> Callable:
        """Makes an intrinsic: bf16 scales s of `rows` rows -> what `mma_int4` dequantises with.

        tuple of rows u32 -> 3 rows u32: the bf16 pairs s 2^113, s 2^109 and -8 s 2^-20.
        """
        text = (
            "{ .reg .b32 s, a, b, c; prmt.b32 s, $3, $3, 0x1010; mov.b32 a, 0x78007800;"
            " mov.b32 b, 0x76007600; mov.b32 c, 0xB700B700; mul.rn.bf16x2 $0, s, a;"
            " mul.rn.bf16x2 $1, s, b; mul.rn.bf16x2 $2, s, c; }"
        )
        llvm = ir.FunctionType(ir.LiteralStructType([_I32] * 3), [_I32])
        asm = ir.InlineAsm(llvm, text, "=r,=r,=r,r")

        @intrinsic
        def factors(context: Any, scales: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                parts = []
                for scale in cgutils.unpack_tuple(builder, args[0]):
                    result = builder.call(asm, [scale])
                    parts += [builder.extract_value(result, i) for i in range(3)]
                return context.make_tuple(builder, signature.return_type, parts)

            want = types.UniTuple(u32, rows)
            return (types.UniTuple(u32, 3 * rows)(want), codegen) if scales == want else None

        return factors

    def mma_int4(tiles: int, columns: int, plain: bool) -> Callable:
        """Makes an intrinsic: `tiles` x 16 rows of INT4 weights times `columns` x 8 tokens, k 32.

        (words, factors, x, sums) -> sums. words: 2 tiles u32, a packed word of row g and of row
        g + 8 of each tile; factors: of these rows, from `int4_factors`; x: 4 columns u32, the
        token's eight values for the same k; sums: 4 tiles columns f32, tile (i, j) at
        4 (i columns + j), laid out as mma.m16n8k16 does, 2^-20 of the true sums. x is in pairs
        (k, k+4) or, if `plain`, in the order of k.

        A nibble in bits 0-3 (4-7) of a half is the subnormal bf16 number code 2^-133 (code 2^-129),
        so one AND and one fma a pair give weights: fma(code 2^-133, s 2^113, -8 s 2^-20) is
        (code - 8) s 2^-20 rounded once. Exact scaling if s is 0 or 2^-106 <= |s| < 2^14.
        """
        fma_text = "fma.rn.bf16x2"
        text = (
            "{ .reg .b32 h, n; shr.b32 h, $4, 8;"
            f" and.b32 n, $4, 0x000f000f; {fma_text} $0, n, $5, $7;"
            f" and.b32 n, $4, 0x00f000f0; {fma_text} $1, n, $6, $7;"
            f" and.b32 n, h, 0x000f000f; {fma_text} $2, n, $5, $7;"
            f" and.b32 n, h, 0x00f000f0; {fma_text} $3, n, $6, $7; }}"
        )
        four = ir.LiteralStructType([_I32] * 4)
        dequantise = ir.InlineAsm(
            ir.FunctionType(four, [_I32] * 4), text, "=&r,=&r,=&r,=&r,r,r,r,r"
        )
        text = (
            "{ prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632;"
            " prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632; }"
        )
        pair = ir.InlineAsm(ir.FunctionType(four, [_I32] * 4), text, "=&r,=&r,=&r,=&r,r,r,r,r")
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$0, $1, $2, $3};"
        )
        llvm = ir.FunctionType(ir.LiteralStructType([_F32] * 4), [_I32] * 6 + [_F32] * 4)
        multiply = ir.InlineAsm(llvm, text, "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3")

        def call(builder: Any, asm: Any, operands: list) -> list:
            result = builder.call(asm, operands)
            return [builder.extract_value(result, i) for i in range(4)]

        @intrinsic
        def mma(context: Any, words: Any, factors: Any, x: Any, sums: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                words, factors, x, sums = (cgutils.unpack_tuple(builder, a) for a in args)
                if plain:
                    for j in range(columns):
                        x[4 * j : 4 * j + 4] = call(builder, pair, x[4 * j : 4 * j + 4])
                for i in range(tiles):
                    low, high = (
                        call(builder, dequantise, [words[r], *factors[3 * r : 3 * r + 3]])
                        for r in (2 * i, 2 * i + 1)
                    )
                    for half in (0, 2):
                        a = [low[half], high[half], low[half + 1], high[half + 1]]
                        for j in range(columns):
                            b = x[4 * j + half : 4 * j + half + 2]
                            at = 4 * (i * columns + j)
                            sums[at : at + 4] = call(builder, multiply, a + b + sums[at : at + 4])
                return context.make_tuple(builder, signature.return_type, sums)

            wanted = (
                types.UniTuple(u32, 2 * tiles),
                types.UniTuple(u32, 6 * tiles),
                types.UniTuple(u32, 4 * columns),
                types.UniTuple(f32, 4 * tiles * columns),
            )
            return (wanted[3](*wanted), codegen) if (words, factors, x, sums) == wanted else None

        return mma

    fence_async = _ptx("fence.proxy.async.shared::cta;", [], [], memory=True)

    @intrinsic
    def matrix_descriptor(context: Any, place: Any, leading: Any, stride: Any) -> Any:
        """What wgmma calls a matrix: rows of 128 bytes, swizzled (16-byte unit ^ row % 8).

        place: shared address, on 1024 bytes but for the offset of a step. stride: bytes from 8 rows
        to the next 8. leading: bytes from 64 columns to the next 64, of a transposed B; else 0.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def field(value: Any, mask: int, shift: int) -> Any:
                value = builder.lshr(builder.and_(value, ir.Constant(_I32, mask)), four)
                return builder.shl(builder.zext(value, _I64), ir.Constant(_I64, shift))

            four = ir.Constant(_I32, 4)
            parts = [field(v, 0x3FFFF, s) for v, s in zip(args, (0, 16, 32), strict=True)]
            swizzled = ir.Constant(_I64, 1 << 62)
            return builder.or_(builder.or_(parts[0], parts[1]), builder.or_(parts[2], swizzled))

        return types.uint64(u32, u32, u32), codegen

    def wgmma_bf16(
        columns: int, steps: Sequence[tuple[int, int]], *, accumulate: bool, transposed: bool
    ) -> Callable:
        """Makes an intrinsic: a chain of wgmma m64n<columns>k16, waited for.

        (a, b) -> sums, or (sums, a, b) -> sums; sums are columns / 2 f32 in a tuple, as of m16n8
        tiles of a warp's 16 rows. a, b: descriptors; `steps` lists what each step adds to their
        addresses, in bytes. transposed: rows of B are k and its columns n.
        """
        count = columns // 2
        first = 2 * count if accumulate else count
        lines = ["{", ".reg .b64 a, b;", ".reg .b32 one;", ".reg .pred p;"]
        lines += ["mov.b32 one, 1;", f"setp.ne.b32 p, one, {int(not accumulate)};"]
        lines += ["wgmma.fence.sync.aligned;"]
        for i, (a_bytes, b_bytes) in enumerate(steps):
            lines += [
                f"add.s64 a, ${first}, {a_bytes // 16};",
                f"add.s64 b, ${first + 1}, {b_bytes // 16};",
                f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
                f"{_registers(0, count)}, a, b, p, 1, 1, 0, {int(transposed)};",
            ]
            if i == 0 and not accumulate:
                lines += ["setp.ne.b32 p, one, 0;"]
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
        constraints = ["=f"] * count + [str(i) for i in range(count) if accumulate] + ["l", "l"]
        constraints += ["~{memory}"]
        struct = ir.LiteralStructType([_F32] * count)
        operands = [_F32] * (first - count) + [_I64] * 2
        text = "\n".join(lines)

        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            asm = ir.InlineAsm(
                ir.FunctionType(struct, operands), text, ",".join(constraints), side_effect=True
            )
            result = builder.call(asm, values)
            parts = [builder.extract_value(result, i) for i in range(count)]
            return context.make_tuple(builder, signature.return_type, parts)

        sums_type = types.UniTuple(f32, count)

        if accumulate:

            @intrinsic
            def product(context: Any, sums: Any, a: Any, b: Any) -> Any:
                def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                    values = [*cgutils.unpack_tuple(builder, args[0]), args[1], args[2]]
                    return emit(context, builder, signature, values)

                return sums_type(sums_type, u64, u64), codegen
        else:

            @intrinsic
            def product(context: Any, a: Any, b: Any) -> Any:
                def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                    return emit(context, builder, signature, list(args))

                return sums_type(u64, u64), codegen

        return product

    mbarrier_init = _ptx("mbarrier.init.shared::cta.b64 [$0], $1;", [], [u32, u32], memory=True)
    mbarrier_init_fence = _ptx("fence.mbarrier_init.release.cluster;", [], [], memory=True)
    mbarrier_arrive = _ptx(
        "{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [$0]; }", [], [u32], memory=True
    )
    mbarrier_expect = _ptx(
        "{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [$0], $1; }",
        [],
        [u32, u32],
        memory=True,
    )
    mbarrier_wait = _ptx(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
        " @!p bra again; }",
        [],
        [u32, u32],
        memory=True,
    )
    copy_bulk = _ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        [],
        [u32, u64, u32, u32],
        memory=True,
    )

    def wgmma_int4(columns: int) -> Callable:
        """Makes an intrinsic: 64 rows of INT4 weights times `columns` tokens, 128 columns of k.

        (words, factors, x, keep, sums) -> sums, by a warpgroup whose warps have 16 rows each.
        words: 8 u32, four words of rows g and g + 8 in turn (`load_rows`); factors: of the two
        rows, from `int4_factors`; x: descriptor of the tokens, rows of 128 bytes, the second 64
        columns behind the first; keep: 0 starts from zero in place of sums, columns / 2 f32 as of
        m16n8 tiles. Weights as in `mma_int4`; step 2 j + h has word j, pairs 2 h and 2 h + 1.
        """
        count = columns // 2
        word, factor, x = 2 * count, 2 * count + 8, 2 * count + 14
        fma_text = "fma.rn.bf16x2"
        lines = [
            "{",
            ".reg .b32 h, n, one, a<32>;",
            ".reg .b64 b;",
            ".reg .b32 low, high;",
            ".reg .pred p;",
        ]
        lines += [f"setp.ne.u32 p, ${x + 1}, 0;", "mov.b32 one, 1;"]
        lines += [f"mov.b64 {{low, high}}, ${x};"]

        def dequantise(j: int) -> list[str]:
            out = []
            for r in range(2):
                f = factor + 3 * r
                source = f"${word + 2 * j + r}"
                for i in range(4):  # pair i of row r is register 2 (i % 2) + r of step 2 j + i // 2
                    mask, of = ("0x000f000f", f) if i % 2 == 0 else ("0x00f000f0", f + 1)
                    if i == 2:
                        out += [f"shr.b32 h, {source}, 8;"]
                    target = f"a{8 * j + 4 * (i // 2) + 2 * (i % 2) + r}"
                    out += [f"and.b32 n, {source if i < 2 else 'h'}, {mask};"]
                    out += [f"{fma_text} {target}, n, ${of}, ${f + 2};"]
            return out

        for j in range(4):
            if j >= 2:  # the registers of word j - 2 are free again
                lines += ["wgmma.wait_group.sync.aligned 1;"]
            lines += dequantise(j)
            lines += ["wgmma.fence.sync.aligned;"]
            for step in range(2 * j, 2 * j + 2):
                skip = step // 4 * columns * 128 + step % 4 * 32
                a = ", ".join(f"a{4 * step + i}" for i in range(4))
                lines += [
                    f"add.u32 n, low, {skip // 16};",
                    "mov.b64 b, {n, high};",
                    f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
                    f"{_registers(0, count)}, {{{a}}}, b, p, 1, 1, 0;",
                ]
                if step == 0:
                    lines += ["setp.ne.b32 p, one, 0;"]
            lines += ["wgmma.commit_group.sync.aligned;"]
        lines += ["wgmma.wait_group.sync.aligned 0;", "}"]
        constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 14 + ["l", "r"]
        constraints += ["~{memory}"]
        llvm = ir.FunctionType(
            ir.LiteralStructType([_F32] * count), [_F32] * count + [_I32] * 14 + [_I64, _I32]
        )
        asm = ir.InlineAsm(llvm, "\n".join(lines), ",".join(constraints), side_effect=True)

        @intrinsic
        def product(context: Any, words: Any, factors: Any, x: Any, keep: Any, sums: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                words, factors, sums = (cgutils.unpack_tuple(builder, args[i]) for i in (0, 1, 4))
                result = builder.call(asm, [*sums, *words, *factors, args[2], args[3]])
                parts = [builder.extract_value(result, i) for i in range(count)]
                return context.make_tuple(builder, signature.return_type, parts)

            wanted = (types.UniTuple(u32, 8), types.UniTuple(u32, 6), u64, u32)
            wanted += (types.UniTuple(f32, count),)
            return (wanted[4](*wanted), codegen) if sums == wanted[4] else None

        return product

    def add_f32(count: int) -> Callable:
        """Makes an intrinsic: the sums of two tuples of `count` f32, element by element."""

        @intrinsic
        def add(context: Any, a: Any, b: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                a, b = (cgutils.unpack_tuple(builder, v) for v in args)
                parts = [builder.fadd(x, y) for x, y in zip(a, b, strict=True)]
                return context.make_tuple(builder, signature.return_type, parts)

            want = types.UniTuple(f32, count)
            return (want(want, want), codegen) if (a, b) == (want, want) else None

        return add

    bits_to_f32 = _ptx("mov.b32 $0, $1;", [f32], [u32])
    f32_to_bits = _ptx("mov.b32 $0, $1;", [u32], [f32])
    bf16_to_f32 = _ptx("shl.b32 $0, $1, 16;", [f32], [u32])
    bf16x2_low = bf16_to_f32
    bf16x2_high = _ptx("and.b32 $0, $1, 0xffff0000;", [f32], [u32])
    f32_to_bf16 = _ptx("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }", [u32], [f32])
    pack_bf16x2 = _ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", [u32], [f32, f32])
    exp2 = _ptx("ex2.approx.ftz.f32 $0, $1;", [f32], [f32])
    reciprocal = _ptx("rcp.rn.f32 $0, $1;", [f32], [f32])
    fma = _ptx("fma.rn.f32 $0, $1, $2, $3;", [f32], [f32] * 3)
    popc = _ptx("popc.b32 $0, $1;", [u32], [u32])
    mul_high_u64 = _ptx("mul.hi.u64 $0, $1, $2;", [u64], [u64, u64])
    warp_max_u32 = _ptx("redux.sync.max.u32 $0, $1, 0xffffffff;", [u32], [u32], volatile=True)
    warp_min_u32 = _ptx("redux.sync.min.u32 $0, $1, 0xffffffff;", [u32], [u32], volatile=True)
    warp_sum_u32 = _ptx("redux.sync.add.u32 $0, $1, 0xffffffff;", [u32], [u32], volatile=True)
    prmt = _ptx("prmt.b32 $0, $1, $2, $3;", [u32], [u32] * 3)

    def lop3(table: int) -> Callable:
        """Makes an intrinsic for one three-input truth table (0xEA is (a & b) | c)."""
        return _ptx(f"lop3.b32 $0, $1, $2, $3, {table};", [u32], [u32] * 3)

    pdl_launch_dependents = _ptx("griddepcontrol.launch_dependents;", [], [], memory=True)
    pdl_wait = _ptx("griddepcontrol.wait;", [], [], memory=True)

else:
    from engine import simulator

    _MASK = 0xFFFFFFFF

    def address(pointer: np.ndarray, index: int) -> simulator.Address:
        return simulator.Address(pointer.view(np.uint8), int(index) * pointer.itemsize)

    shared_address = address

    def advance(pointer: np.ndarray, count: int) -> np.ndarray:
        if int(count) > len(pointer):
            raise IndexError(f"a pointer to {len(pointer)} elements was advanced by {int(count)}")
        return pointer[int(count) :]

    def atomic_add(pointer: np.ndarray, index: int, value: int) -> int:
        before = int(pointer[index])
        pointer[index] = (before + int(value)) & _MASK
        return before

    def _load(count: int, dtype: Any = np.uint32) -> Callable:
        def load(place: simulator.Address) -> Any:
            values = tuple(place.view(dtype, count).tolist())
            return values if count > 1 else values[0]

        return load

    def _store(count: int, dtype: Any = np.uint32) -> Callable:
        mask = (1 << 8 * np.dtype(dtype).itemsize) - 1

        def store(place: simulator.Address, *values: int) -> None:
            place.view(dtype, count)[:] = [int(v) & mask for v in values]

        return store

    load_global_u16 = _load(1, np.uint16)
    load_global_u32 = load_shared_u32 = _load(1)
    load_global_v2 = load_shared_v2 = _load(2)
    load_global_v4 = load_global_nc_v4 = load_global_ro_v4 = load_shared_v4 = _load(4)

    def load_global_v4_or_zero(place: simulator.Address, wanted: int) -> tuple:
        return load_global_v4(place) if wanted else (0, 0, 0, 0)

    store_global_u16 = _store(1, np.uint16)
    store_global_u32 = store_shared_u32 = _store(1)
    store_global_v2 = store_shared_v2 = _store(2)
    store_global_v4 = store_shared_v4 = _store(4)

    def cp_async_16(shared: simulator.Address, source: simulator.Address) -> None:
        cp_async_16_zfill(shared, source, 16)

    def cp_async_16_zfill(
        shared: simulator.Address, source: simulator.Address, nbytes: int
    ) -> None:
        """Copy `nbytes` and fill the rest of the 16 with zeros; bytes are read when they land."""
        target = shared.view(np.uint8, 16)
        taken = source.view(np.uint8, 16)[: int(nbytes)] if nbytes else np.empty(0, np.uint8)

        def land() -> None:
            target[: len(taken)] = taken
            target[len(taken) :] = 0

        target.fill(0xFF)  # what is read before the wait is NaN, never the old tile
        simulator.current().async_copies[-1].append(land)

    def cp_async_commit() -> None:
        simulator.current().async_copies.append([])

    def cp_async_wait(pending: int) -> Callable:
        def wait() -> None:
            groups = simulator.current().async_copies
            while len(groups) - 1 > pending:
                for land in groups.pop(0):
                    land()

        return wait

    def _fragment(rows: list[np.ndarray], lane: int) -> int:
        pair = rows[lane >> 2][2 * (lane & 3) : 2 * (lane & 3) + 2]
        return int(pair[0]) | int(pair[1]) << 16

    def _ldmatrix(count: int, transposed: bool) -> Callable:
        def combine(rows: dict[int, np.ndarray]) -> dict[int, tuple]:
            tiles = [np.stack([rows[8 * m + r] for r in range(8)]) for m in range(count)]
            tiles = [t.T if transposed else t for t in tiles]
            return {lane: tuple(_fragment(t, lane) for t in tiles) for lane in rows}

        def ldmatrix(row: simulator.Address) -> tuple:
            """Lane l gives the address of row l % 8 of tile l // 8, eight 16-bit values."""
            lane = simulator.current().thread_id % 32
            # Lanes past the last tile pass an address that the hardware ignores.
            values = row.view(np.uint16, 8).copy() if lane < 8 * count else None
            return simulator.collective(_MASK, values, combine)

        return ldmatrix

    ldmatrix_x2, ldmatrix_x4 = _ldmatrix(2, False), _ldmatrix(4, False)
    ldmatrix_x4_trans = _ldmatrix(4, True)

    _LANE = np.arange(32)
    _G, _T = _LANE >> 2, _LANE & 3

    def _unpack(words: np.ndarray) -> np.ndarray:
        """u32 [...] -> two bfloat16 values [..., 2] as float64."""
        pairs = np.stack([words << 16, words & np.uint32(0xFFFF0000)], axis=-1)
        return pairs.astype(np.uint32).view(np.float32).astype(np.float64)

    def _mma(rows: int, columns: int) -> Callable:
        """Fragments of m16n8k16 in the ISA's layout; products exact, one rounding of each sum."""
        places = ((0, 0), (0, 1), (8, 0), (8, 1))

        def combine(slots: dict[int, tuple]) -> dict[int, tuple]:
            sums, fragments_a, fragments_b = zip(*(slots[n] for n in range(32)), strict=True)
            a_values = _unpack(np.array(fragments_a, np.uint32))  # [lane, register, 2]
            b_values = _unpack(np.array(fragments_b, np.uint32))
            c_values = np.array(sums, np.float32)  # [lane, register]
            a, b = np.empty((16 * rows, 16)), np.empty((16, 8 * columns))
            c = np.empty((16 * rows, 8 * columns))
            for i in range(rows):
                for register, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                    for half in range(2):
                        a[16 * i + _G + row, 2 * _T + column + half] = a_values[
                            :, 4 * i + register, half
                        ]
            for j in range(columns):
                for register, row in enumerate((0, 8)):
                    for half in range(2):
                        b[2 * _T + row + half, 8 * j + _G] = b_values[:, 2 * j + register, half]
            tiles = [(i, j) for i in range(rows) for j in range(columns)]
            spots = [
                (16 * i + _G + row, 8 * j + 2 * _T + column)
                for i, j in tiles
                for row, column in places
            ]
            for register, spot in enumerate(spots):
                c[spot] = c_values[:, register]
            d = (np.einsum("ik,kj->ij", a, b) + c).astype(np.float32)
            return dict(enumerate(map(tuple, np.stack([d[spot] for spot in spots], axis=-1))))

        return combine

    def mma_bf16_tiles(rows: int, columns: int) -> Callable:
        combine = _mma(rows, columns)

        def tiles(sums: tuple, a: tuple, b: tuple) -> tuple:
            return simulator.collective(_MASK, (sums, a, b), combine)

        return tiles

    _mma_tile = mma_bf16_tiles(1, 1)

    def mma_bf16(*registers: Any) -> tuple:
        return _mma_tile(registers[6:], registers[:4], registers[4:6])

    def mma_bf16_slice(total: int, columns: int) -> Callable:
        tiles = mma_bf16_tiles(1, columns)

        def product(place: int, sums: tuple, a: tuple, b: tuple) -> tuple:
            low, high = 4 * columns * place, 4 * columns * (place + 1)
            return sums[:low] + tiles(sums[low:high], a, b) + sums[high:]

        return product

    def scale_rows(tiles: int) -> Callable:
        def scale(sums: tuple, low: np.float32, high: np.float32) -> tuple:
            return tuple(np.float32(v * (high if n & 2 else low)) for n, v in enumerate(sums))

        return scale

    def fence_async() -> None:
        """One memory here."""

    def matrix_descriptor(place: simulator.Address, leading: int, stride: int) -> tuple:
        return place, int(leading), int(stride)

    def _matrix(descriptor: tuple, skip: int, rows: range, columns: range, by_rows: bool) -> Any:
        """[rows, columns] float64 of a swizzled matrix; by_rows: columns run along its rows."""
        place, leading, stride = descriptor
        row, column = np.array(rows)[:, None], np.array(columns)
        if not by_rows:
            row, column = column, row
        at = place.offset + skip + row // 8 * stride + row % 8 * 128
        at = at + column // 64 * leading + column % 64 * 2
        at = at ^ (at >> 7 & 7) << 4
        if at.max() + 2 > len(place.base):
            raise IndexError(f"wgmma reads {at.max() + 2} of {len(place.base)} bytes")
        low, high = place.base[at].astype(np.uint32), place.base[at + 1].astype(np.uint32)
        return (low << 16 | high << 24).view(np.float32).astype(np.float64)

    def wgmma_bf16(
        columns: int, steps: Sequence[tuple[int, int]], *, accumulate: bool, transposed: bool
    ) -> Callable:
        tiles = columns // 8
        spots = [
            (_G + row, 8 * j + 2 * _T + column)
            for j in range(tiles)
            for row, column in ((0, 0), (0, 1), (8, 0), (8, 1))
        ]

        def combine(slots: dict[int, tuple]) -> dict[int, tuple]:
            warp, _, a, b = slots[0]
            own = range(16 * (warp % 4), 16 * (warp % 4) + 16)
            sums = np.zeros((16, columns))
            if accumulate:
                values = np.array([slots[n][1] for n in range(32)], np.float64)
                for register, spot in enumerate(spots):
                    sums[spot] = values[:, register]
            for a_skip, b_skip in steps:
                left = _matrix(a, a_skip, own, range(16), True)
                right = _matrix(b, b_skip, range(16), range(columns), transposed)
                sums = (np.einsum("ik,kj->ij", left, right) + sums).astype(np.float32)
            return dict(enumerate(map(tuple, np.stack([sums[s] for s in spots], axis=-1))))

        def product(*arguments: Any) -> tuple:
            sums = arguments[0] if accumulate else None
            warp = simulator.current().thread_id // 32
            return simulator.collective(_MASK, (warp, sums, *arguments[-2:]), combine)

        return product

    def mbarrier_init(place: simulator.Address, count: int) -> None:
        """A barrier of 8 bytes in shared memory for `count` arrivals."""
        block = simulator.current().block
        block.transfers[place.offset] = simulator.Transfer(block, int(count))

    def _transfer(place: simulator.Address) -> simulator.Transfer:
        return simulator.current().block.transfers[place.offset]

    def mbarrier_init_fence() -> None:
        """One memory here."""

    def mbarrier_arrive(place: simulator.Address) -> None:
        _transfer(place).arrive()

    def mbarrier_expect(place: simulator.Address, nbytes: int) -> None:
        """Arrive, and announce so many bytes of this phase."""
        _transfer(place).arrive(int(nbytes))

    def mbarrier_wait(place: simulator.Address, parity: int) -> None:
        _transfer(place).wait(int(parity))

    def copy_bulk(
        shared: simulator.Address, source: simulator.Address, nbytes: int, barrier: Any
    ) -> None:
        """Bytes, a multiple of 16, from global to shared memory; they arrive at the barrier."""
        count = int(nbytes)
        if count % 16 or shared.offset % 16 or source.offset % 16:
            raise ValueError(f"copy_bulk: {count} bytes, {source.offset} to {shared.offset}")
        target = shared.base[shared.offset : shared.offset + count]
        taken = source.base[source.offset : source.offset + count]
        if len(target) != count or len(taken) != count:
            raise IndexError(f"copy_bulk: {count} bytes reach outside their arrays")

        def land() -> None:
            target[:] = taken

        target.fill(0xFF)  # what is read before the wait is NaN, never the old tile
        _transfer(barrier).copy(count, land)

    def wgmma_int4(columns: int) -> Callable:
        pairs = np.array([0, 4, 1, 5, 2, 6, 3, 7])
        shifts = np.uint32(4) * np.arange(8, dtype=np.uint32)
        unit = np.array([2.0**-133, 2.0**-129] * 4)
        tiles = columns // 8

        def combine(slots: dict[int, tuple]) -> dict[int, tuple]:
            words, factors, x, keep, sums = zip(*(slots[n] for n in range(32)), strict=True)
            codes = (np.array(words, np.uint32)[..., None] >> shifts & np.uint32(15)) * unit
            f = _unpack(np.array(factors, np.uint32)).reshape(32, 2, 3, 2)[..., 0]
            codes = codes.reshape(32, 4, 2, 8)  # lane, word, row, nibble
            multiplier = np.tile(f[..., :2], 4)[:, None]  # of even and odd nibbles
            weights = _round_bf16(codes * multiplier + f[:, None, :, 2:])[..., pairs]
            # Lane t has slots 2t, 2t + 1 of the step's first half of 8 and of its second.
            a = weights.reshape(8, 4, 4, 2, 2, 2, 2)  # g, t, word, row, h, q, e
            a = a.transpose(2, 4, 3, 0, 5, 1, 6).reshape(8, 16, 16)  # step; row g; q, t, e
            c = np.array(sums, np.float64).reshape(8, 4, tiles, 2, 2)  # g t tile row column
            c = c.transpose(3, 0, 2, 1, 4).reshape(16, columns) * (keep[0] != 0)
            for step in range(8):
                skip = step // 4 * columns * 128 + step % 4 * 32
                b = _matrix(x[0], skip, range(16), range(columns), False)
                c = (np.einsum("ik,kj->ij", a[step], b) + c).astype(np.float32)
            c = c.reshape(2, 8, tiles, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, -1)
            return dict(enumerate(map(tuple, c)))

        def product(words: tuple, factors: tuple, x: tuple, keep: int, sums: tuple) -> tuple:
            return simulator.collective(_MASK, (words, factors, x, keep, sums), combine)

        return product

    def add_f32(count: int) -> Callable:
        return lambda a, b: tuple(np.float32(x + y) for x, y in zip(a, b, strict=True))

    def zeros_f32(count: int) -> Callable:
        return lambda: (np.float32(0),) * count

    def fma_dot4(rows: int, columns: int) -> Callable:
        def dot4(sums: tuple, a: tuple, b: tuple) -> tuple:
            x, y = (np.array(v, np.uint32).view(np.float32).reshape(-1, 4) for v in (a, b))
            total = np.array(sums, np.float32).reshape(rows, columns)
            products = x.astype(np.float64)[:, None] * y.astype(np.float64)  # exact
            for term in range(4):
                total = (products[..., term] + total).astype(np.float32)
            return tuple(total.ravel())

        return dot4

    def load_rows(rows: int, stride: int) -> Callable:
        def load(place: simulator.Address, wanted: int, old: tuple) -> tuple:
            if not wanted:
                return old
            words = [(place + r * stride).view(np.uint32, 4).tolist() for r in range(rows)]
            return tuple(words[r][j] for j in range(4) for r in range(rows))

        return load

    def load_rows_u16(rows: int, stride: int) -> Callable:
        def load(place: simulator.Address, wanted: int, old: tuple) -> tuple:
            if not wanted:
                return old
            return tuple(int((place + r * stride).view(np.uint16, 1)[0]) for r in range(rows))

        return load

    def zeros_u32(count: int) -> Callable:
        return lambda: (0,) * count

    def _round_bf16(exact: np.ndarray) -> np.ndarray:
        """float64 values that fit a float32 -> the nearest bf16, as float64."""
        bits = exact.astype(np.float32).view(np.uint32)
        bits = bits + (np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(exact), np.nan, bits.view(np.float32).astype(np.float64))

    def int4_factors(rows: int) -> Callable:
        def factors(scales: tuple) -> tuple:
            s = _unpack(np.array(scales, np.uint32))[..., :1]
            low = _round_bf16(s * [2.0**113, 2.0**109, -(2.0**-17)]).astype(np.float32)
            bits = low.view(np.uint32)
            return tuple((bits | bits >> 16).ravel().tolist())

        return factors

    def mma_int4(tiles: int, columns: int, plain: bool) -> Callable:
        pairs = np.array([0, 4, 1, 5, 2, 6, 3, 7])
        nibbles = np.arange(0, 32, 4, dtype=np.uint32)
        unit = np.array([2.0**-133, 2.0**-129] * 4)

        def combine(slots: dict[int, tuple]) -> dict[int, tuple]:
            words, factors, x, sums = zip(*(slots[n] for n in range(32)), strict=True)
            codes = (np.array(words, np.uint32)[..., None] >> nibbles & np.uint32(15)) * unit
            f = _unpack(np.array(factors, np.uint32)).reshape(32, 2 * tiles, 3, 2)[..., 0]
            multiplier = np.tile(f[..., :2], 4)  # of even and odd nibbles
            weights = _round_bf16(codes * multiplier + f[..., 2:])  # [lane, row, k]
            a = weights.reshape(8, 4, 2 * tiles, 8).transpose(2, 0, 1, 3).reshape(-1, 4, 8)
            tokens = _unpack(np.array(x, np.uint32)).reshape(32, columns, 8)  # [lane, column, k]
            if not plain:
                tokens[..., pairs] = tokens.copy()
            b = tokens.reshape(8, 4, columns, 8).transpose(1, 3, 2, 0).reshape(4, 8, -1)
            c = np.array(sums, np.float32).reshape(8, 4, tiles, columns, 2, 2)  # g t i j row column
            c = c.transpose(2, 4, 0, 3, 1, 5).reshape(16 * tiles, 8 * columns)
            for k in pairs[:4], pairs[4:]:
                c = np.einsum("rtk,tkc->rc", a[:, :, k], b[:, k]) + c
                c = c.astype(np.float32)
            c = c.reshape(tiles, 2, 8, columns, 4, 2).transpose(2, 4, 0, 3, 1, 5).reshape(32, -1)
            return dict(enumerate(map(tuple, c)))

        def mma(words: tuple, factors: tuple, x: tuple, sums: tuple) -> tuple:
            return simulator.collective(_MASK, (words, factors, x, sums), combine)

        return mma

    def bits_to_f32(bits: int) -> np.float32:
        return np.uint32(bits).view(np.float32)

    def f32_to_bits(value: np.float32) -> int:
        return int(np.float32(value).view(np.uint32))

    def bf16_to_f32(bits: int) -> np.float32:
        return np.uint32(int(bits) << 16 & _MASK).view(np.float32)

    bf16x2_low = bf16_to_f32

    def bf16x2_high(bits: int) -> np.float32:
        return np.uint32(int(bits) & 0xFFFF0000).view(np.float32)

    def f32_to_bf16(value: np.float32) -> int:
        bits = f32_to_bits(value)
        if bits & 0x7FFFFFFF > 0x7F800000:
            return 0x7FFF  # the canonical NaN of cvt
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    def pack_bf16x2(low: np.float32, high: np.float32) -> int:
        return f32_to_bf16(low) | f32_to_bf16(high) << 16

    def exp2(x: np.float32) -> np.float32:
        return np.exp2(np.float32(x))

    def reciprocal(x: np.float32) -> np.float32:
        return np.float32(1) / np.float32(x)

    def fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
        """One rounding: the float64 sum is rounded to odd, so that no tie is made on the way."""
        product, addend = float(a) * float(b), float(c)
        total = product + addend
        back = total - product
        rest = (product - (total - back)) + (addend - back)  # what the sum lost, exactly
        if rest and not math.isnan(rest) and not int(np.float64(total).view(np.uint64)) & 1:
            total = math.nextafter(total, math.copysign(math.inf, rest))
        return np.float32(total)

    def popc(bits: int) -> int:
        return int(bits).bit_count()

    def mul_high_u64(a: int, b: int) -> int:
        return int(a) * int(b) >> 64

    def _redux(fold: Callable) -> Callable:
        def redux(value: int) -> int:
            return simulator.collective(
                _MASK, int(value), lambda s: dict.fromkeys(s, fold(s.values()) & _MASK)
            )

        return redux

    warp_max_u32, warp_min_u32, warp_sum_u32 = _redux(max), _redux(min), _redux(sum)

    def prmt(a: int, b: int, selector: int) -> int:
        source = int(a).to_bytes(4, "little") + int(b).to_bytes(4, "little")
        result = 0
        for i in range(4):
            pick = int(selector) >> 4 * i & 0xF
            byte = source[pick & 7]
            if pick & 8:
                byte = 0xFF if byte & 0x80 else 0
            result |= byte << 8 * i
        return result

    def lop3(table: int) -> Callable:
        def apply(a: int, b: int, c: int) -> int:
            a, b, c, result = int(a), int(b), int(c), 0
            for i in range(8):
                if table >> i & 1:
                    result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            return result & _MASK

        return apply

    def pdl_launch_dependents() -> None:
        """Launches run one after the other here."""

    def pdl_wait() -> None:
        """Launches run one after the other here."""
