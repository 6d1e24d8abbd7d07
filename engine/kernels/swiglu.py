"""SwiGLU: y = silu(gate) * up for gate and up side by side; silu(g) = g / (1 + exp(-g)).

gate_up comes in parts (ranges of K), added in ascending order in fp32; y is rounded once.
"""

from engine import activation
from engine.activation import silu
from engine.device import cdiv, check, cuda, f32, family, kernel, ptr, static_range, u32
from engine.ptx import pdl_launch_dependents, pdl_wait

THREADS = 128


@family(*({"bf16": True, "parts": parts} for parts in (1, 2, 4)), {"bf16": False, "parts": 1})
def _swiglu(*, bf16: bool, parts: int):
    store = activation.store(bf16)

    @kernel(threads=THREADS, registers=32, dependent_launch=True)
    def swiglu(
        gate_up: ptr[f32],  # [parts, rows, 2 inner]: gate, then up
        part_size: u32,  # rows * 2 inner
        inner: u32,
        y: ptr[activation.element(bf16)],  # [rows, inner], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        row = u32(cuda.blockIdx.y)
        i = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
        if i < inner:
            at = u32(u32(u32(row * u32(2)) * inner) + i)
            gate = gate_up[at]
            up = gate_up[u32(at + inner)]
            for _ in static_range(1, parts):
                at = u32(at + part_size)
                gate = f32(gate + gate_up[at])
                up = f32(up + gate_up[u32(at + inner)])
            activated = silu(gate)
            store(y, u32(u32(row * inner) + i), f32(activated * up))

    return swiglu


def swiglu(gate_up, *, y, stream=None) -> None:
    """gate_up [parts, rows, 2 inner] fp32, parts >= 1: gate in the first half of a row, up in the
    second; y [rows, inner] bf16 or fp32."""
    dims = check(
        "swiglu",
        gate_up=(gate_up, "parts rows both", "float32"),
        y=(y, "rows inner", activation.ACTIVATIONS),
    )
    parts, rows, inner = dims["parts"], dims["rows"], dims["inner"]
    if not parts or dims["both"] != 2 * inner:
        raise ValueError(
            f"swiglu: gate_up is [{parts}, {rows}, {dims['both']}], "
            f"expected [parts >= 1, {rows}, {2 * inner}] for y [{rows}, {inner}]"
        )
    if gate_up.size >= 2**32:
        raise NotImplementedError(f"swiglu: gate_up {gate_up.shape} has 2^32 elements or more")
    _swiglu(bf16=activation.is_bf16(y), parts=parts).launch(
        (cdiv(inner, THREADS), rows), gate_up, rows * 2 * inner, inner, y, stream=stream
    )
