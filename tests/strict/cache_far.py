"""Launchers of specs/cache_commit_far.toml and latent_append_far.toml: a cache beyond 32 bits.

The cache is scratch, up to 8.8 GB. Its end holds `tail`; `below` lies where
an address of 32 bits would land instead. Both are looked at afterwards.
"""

from engine.kernels.cache_commit import cache_commit
from engine.kernels.latent_append import latent_append


def _pieces(cache, tail_slots: int, wrap: int) -> tuple[list, object]:
    """The end of each layer of a cache [layers, slots, width], and the rows `wrap` elements below
    the last of these; flat 16-bit views."""
    layers, slots, width = cache.shape
    flat = cache.reshape(layers * slots * width).view("uint16")
    size = tail_slots * width
    ends = [(layer + 1) * slots * width for layer in range(layers)]
    below = ends[-1] - size - wrap
    return [flat[end - size : end] for end in ends], flat[below : below + size]


def _copy(source, target) -> None:
    target.copy_to_device(source.reshape(target.size).view("uint16"))


def cache_commit_far(
    page_table, prefix_len, accepted, accepted_counts, tail, below, *, page_size: int, wrap: int,
    cache, tail_after, below_after, new_prefix_len, status, stream=None,
) -> None:  # fmt: skip
    """tail, tail_after [layers, tail_slots, width], below, below_after [tail_slots, width] bf16;
    the rest as cache_commit has it, the page table's slots counted from the cache's start."""
    ends, under = _pieces(cache, tail.shape[1], wrap)
    for layer, end in enumerate(ends):
        _copy(tail[layer], end)
    _copy(below, under)
    cache_commit(
        page_table, prefix_len, accepted, accepted_counts, page_size=page_size, cache=cache,
        new_prefix_len=new_prefix_len, status=status, stream=stream,
    )  # fmt: skip
    for layer, end in enumerate(ends):
        flat = tail_after[layer].reshape(end.size).view("uint16")
        flat.copy_to_device(end)
    below_after.reshape(under.size).view("uint16").copy_to_device(under)


def latent_append_far(
    qkv, q_weight, kv_weight, cos, sin, position, slot, tail, below, *, eps: float, wrap: int,
    cache, q, tail_after, below_after, status, stream=None,
) -> None:  # fmt: skip
    """tail, tail_after, below, below_after [tail_slots, entry] bf16; the rest as latent_append has
    it, slots counted from the cache's start."""
    (end,), under = _pieces(cache.reshape(1, *cache.shape), tail.shape[0], wrap)
    _copy(tail, end)
    _copy(below, under)
    latent_append(
        qkv, q_weight, kv_weight, cos, sin, position, slot, eps=eps, q=q, cache=cache,
        status=status, stream=stream,
    )  # fmt: skip
    tail_after.reshape(end.size).view("uint16").copy_to_device(end)
    below_after.reshape(under.size).view("uint16").copy_to_device(under)
