"""The block of a DFlash drafter: slot 0 is the root token, every other slot the mask token.

Slot i of request r stands at position prefix_len[r] + i: the root's place is the first that is not
in the cache yet. One thread a slot.
"""

from engine.device import cdiv, check, cuda, i32, kernel, ptr, u32
from engine.ptx import pdl_launch_dependents, pdl_wait

THREADS = 64


@kernel(threads=THREADS, registers=32, dependent_launch=True)
def _draft_block(
    root_tokens: ptr[i32],  # [requests]
    prefix_len: ptr[i32],  # [requests]
    mask_token: i32,
    slots: u32,
    count: u32,  # requests * slots
    tokens: ptr[i32],  # [requests, slots], out
    position: ptr[i32],  # [requests, slots], out
):
    pdl_launch_dependents()
    pdl_wait()
    i = u32(u32(u32(cuda.blockIdx.x) * u32(THREADS)) + u32(cuda.threadIdx.x))
    if i < count:
        request, slot = u32(i // slots), u32(i % slots)
        tokens[i] = i32(root_tokens[request]) if slot == u32(0) else mask_token
        position[i] = i32(i32(prefix_len[request]) + i32(slot))


def draft_block(
    root_tokens, prefix_len, *, mask_token: int, block_size: int, tokens, position, stream=None
) -> None:
    """root_tokens, prefix_len [requests] int32; tokens, position [requests, block_size] int32.
    2^32 elements are NotImplementedError."""
    dims = check(
        "draft_block",
        root_tokens=(root_tokens, "requests", "int32"),
        prefix_len=(prefix_len, "requests", "int32"),
        tokens=(tokens, f"requests {block_size}", "int32"),
        position=(position, f"requests {block_size}", "int32"),
    )
    count = dims["requests"] * block_size
    if count >= 2**32:
        raise NotImplementedError(f"draft_block: tokens {tokens.shape} has 2^32 elements or more")
    _draft_block.launch(
        cdiv(count, THREADS), root_tokens, prefix_len, mask_token, block_size, count, tokens,
        position, stream=stream,
    )  # fmt: skip
