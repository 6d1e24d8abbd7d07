"""Embedding gather: x[i] = fp32(table[tokens[i]]), the start of the residual stream.

One block a row. status[i] is 0, or 1 for a token id outside the vocabulary; that row is zero.
"""

from engine import activation
from engine.device import check, cuda, f32, family, i32, kernel, ptr, u32, u64
from engine.ptx import advance, pdl_launch_dependents, pdl_wait

THREADS = 256
OUT_OF_VOCABULARY = 1


@family({"bf16": True}, {"bf16": False})
def _embedding(*, bf16: bool):
    load = activation.load(bf16)

    @kernel(threads=THREADS, registers=32, dependent_launch=True)
    def embedding(
        tokens: ptr[i32],  # [rows]
        table: ptr[activation.element(bf16)],  # [vocabulary, hidden]
        vocabulary: u32,
        hidden: u32,
        x: ptr[f32],  # [rows, hidden], out
        status: ptr[i32],  # [rows], out
    ):
        pdl_launch_dependents()
        pdl_wait()
        row = u32(cuda.blockIdx.x)
        token = u32(tokens[row])  # a negative id is a large one
        known = token < vocabulary
        source = advance(table, u64(u64(token if known else u32(0)) * u64(hidden)))
        into = advance(x, u64(u64(row) * u64(hidden)))
        i = u32(cuda.threadIdx.x)
        if i == u32(0):
            status[row] = i32(0) if known else i32(OUT_OF_VOCABULARY)
        while i < hidden:
            into[i] = load(source, i) if known else f32(0)
            i = u32(i + u32(THREADS))

    return embedding


def embedding(tokens, table, *, x, status, stream=None) -> None:
    """tokens [rows] int32; table [vocabulary, hidden] bf16 or fp32; x [rows, hidden] fp32;
    status [rows] int32."""
    dims = check(
        "embedding",
        tokens=(tokens, "rows", "int32"),
        table=(table, "vocabulary hidden", activation.ACTIVATIONS),
        x=(x, "rows hidden", "float32"),
        status=(status, "rows", "int32"),
    )
    _embedding(bf16=activation.is_bf16(table)).launch(
        dims["rows"], tokens, table, dims["vocabulary"], dims["hidden"], x, status, stream=stream
    )
