"""The paged latent cache: one normed latent and one rotated key a token and layer.

latents [layers, slots, kv_lora_rank + qk_rope_head_dim] and page_table [requests, max_pages] are
allocated once. Slot of the logical position p of request r:
page_table[r, p // page_size] * page_size + p % page_size. Which page belongs to whom is decided on
the host, between rounds; -1 in the table means no page.
"""

from collections.abc import Sequence

import numpy as np

from engine.device import cdiv, copy_to_device, empty, fill_nan, to_device


class CacheFull(RuntimeError):
    """There are not enough free pages for a request, or its page table has no room."""


class LatentCache:
    def __init__(
        self,
        *,
        layers: int,
        width: int,
        dtype: str,
        requests: int,
        pages: int,
        page_size: int,
        max_pages: int,
    ):
        """pages in all; max_pages a request; dtype of the activations. Latents start as NaN: what
        is read before it is written shows."""
        if min(requests, pages, page_size, max_pages) < 1:
            raise ValueError(
                f"cache: {requests} requests, {pages} pages of {page_size}, {max_pages} each"
            )
        self.page_size, self.pages = page_size, pages
        self.latents = empty((layers, pages * page_size, width), dtype)
        fill_nan(self.latents)
        self._table = np.full((requests, max_pages), -1, np.int32)
        self.page_table = to_device(self._table)
        self._free = list(range(pages))[::-1]

    def layer(self, layer: int):
        """[slots, width], the cache of one layer."""
        return self.latents[layer]

    def slots(self, request: int, tokens: int) -> np.ndarray:
        """int64 [tokens]: where the first logical positions of a request lie."""
        page, offset = np.divmod(np.arange(tokens), self.page_size)
        return self._table[request, page].astype(np.int64) * self.page_size + offset

    def reserve(self, request: int, tokens: int) -> None:
        """Give `request` pages for `tokens` logical positions. CacheFull changes nothing."""
        row = self._table[request]
        wanted = cdiv(tokens, self.page_size)
        missing = [i for i in range(min(wanted, len(row))) if row[i] < 0]
        if wanted > len(row) or len(missing) > len(self._free):
            raise CacheFull(
                f"request {request}: {tokens} tokens need {wanted} pages of {self.page_size}; "
                f"a request has at most {len(row)}, {len(self._free)} of {self.pages} are free"
            )
        if missing:
            for i in missing:
                row[i] = self._free.pop()
            copy_to_device(self._table, self.page_table)

    def release(self, request: int) -> None:
        """Take all pages of a request back."""
        row = self._table[request]
        self._free += [int(page) for page in row[row >= 0][::-1]]
        row[:] = -1
        copy_to_device(self._table, self.page_table)

    def map_pages(self, request: int, pages: Sequence[int]) -> None:
        """Give `request` these very pages, in logical order, in place of what it has. ValueError
        for a page twice, CacheFull for one that is another request's; neither changes anything."""
        row, taken = self._table[request], set(pages)
        if len(taken) < len(pages):
            raise ValueError(f"request {request}: pages {list(pages)} are not distinct")
        if len(pages) > len(row) or not taken <= {*self._free, *row[row >= 0].tolist()}:
            raise CacheFull(
                f"request {request}: pages {list(pages)} are not all free, or more than {len(row)}"
            )
        self.release(request)
        self._free = [page for page in self._free if page not in taken]
        row[: len(pages)] = pages
        copy_to_device(self._table, self.page_table)
