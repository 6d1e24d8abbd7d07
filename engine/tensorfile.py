"""Safetensors files: a memory-mapped reader that trusts nothing, and an atomic writer.

Format (https://github.com/huggingface/safetensors): eight bytes with the header's length, little
endian; a JSON object that maps each name to {dtype, shape, data_offsets}, and `__metadata__` to an
object of strings; then the tensors' bytes, without gaps.

The safetensors package is not used here because its numpy API copies what it reads, holds all that
it writes in memory, raises KeyError('BF16') from `load` (0.8.0), and its errors name no tensor. The
tests read our files with it and write files for us.
"""

import hashlib
import json
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from engine.files import replacing

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors package
CHUNK = 1 << 24  # bytes hashed and written at a time
ALIGNMENT = 64  # bytes; where the data of our own files begins
DIGEST_KEY = b'"header_sha256":"'
NO_DIGEST = "0" * 64


class InvalidFile(ValueError):
    """A file is not what it should be: the message names the file, the tensor or key, and why."""


class Entry(NamedTuple):
    """Where a tensor lies: dtype as the file spells it, shape, byte range from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile(Mapping[str, np.ndarray]):
    """Name -> read-only array that views the mapped file. Nothing is read before it is touched.

    Raises InvalidFile at once for a file whose header is broken or whose data is cut off, too long
    or overlapping. `entries` tells shapes and dtypes without touching data.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise self.error(f"{size} bytes are too few for a safetensors file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self.error(error.strerror or str(error)) from error
        length = int.from_bytes(self._map[:8], "little")
        if length > MAX_HEADER:
            raise self.error(f"not a safetensors file: its header would be {length} bytes long")
        if 8 + length > size:
            raise self.error(f"truncated in the header: {size} bytes of at least {8 + length}")
        self.header = self._map[8 : 8 + length]
        table = self._parse(self.header)
        self.metadata = self._strings(table.pop("__metadata__", {}))
        self.entries = {name: self._entry(name, table[name], 8 + length) for name in table}
        self._check_extent(8 + length, size)

    def error(self, message: str) -> InvalidFile:
        """The error to raise for this file."""
        return InvalidFile(f"{self.path}: {message}")

    def _parse(self, header: bytes) -> dict[str, Any]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            table: dict[str, Any] = {}
            for name, value in pairs:
                if name in table:
                    raise self.error(f"the header lists {name!r} twice")
                table[name] = value
            return table

        try:
            table = json.loads(header, object_pairs_hook=unique)
        except InvalidFile:
            raise
        except (ValueError, RecursionError) as error:
            raise self.error(f"the header is not JSON ({error})") from error
        if not isinstance(table, dict):
            raise self.error("the header is not a JSON object")
        return table

    def _strings(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self.error("__metadata__ is not an object of strings")
        return metadata

    def _entry(self, name: str, row: Any, start: int) -> Entry:
        def naturals(values: Any) -> bool:
            return isinstance(values, list) and all(
                type(value) is int and value >= 0 for value in values
            )

        if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
            raise self.error(f"tensor {name!r}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
        if not isinstance(dtype, str):
            raise self.error(f"tensor {name!r}: dtype {dtype!r} is not a string")
        if not naturals(shape) or len(shape) > 8:
            raise self.error(f"tensor {name!r}: bad shape {shape!r}")
        if not naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self.error(f"tensor {name!r}: bad data_offsets {offsets!r}")
        begin, end = offsets
        if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
            raise self.error(
                f"tensor {name!r}: {dtype} {shape} is {math.prod(shape) * DTYPES[dtype].itemsize}"
                f" bytes, but its data_offsets span {end - begin}"
            )
        return Entry(dtype, tuple(shape), start + begin, start + end)

    def _check_extent(self, start: int, size: int) -> None:
        position, last = start, "the header"
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1][2:]):
            if entry.begin != position:
                what = "overlaps" if entry.begin < position else "leaves a gap after"
                raise self.error(f"tensor {name!r} {what} {last}")
            if entry.end > size:
                raise self.error(
                    f"truncated: tensor {name!r} ends at byte {entry.end}, the file at {size}"
                )
            position, last = entry.end, repr(name)
        if position != size:
            raise self.error(f"{size - position} bytes follow the last tensor, {last}")

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise self.error(f"tensor {name!r} has dtype {entry.dtype}, which is not read here")
        return np.ndarray(entry.shape, DTYPES[entry.dtype], buffer=self._map, offset=entry.begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def sha256(self, name: str) -> str:
        """Hex digest of the tensor's bytes."""
        _, _, begin, end = self.entries[name]
        with memoryview(self._map)[begin:end] as view:
            return hashlib.sha256(view).hexdigest()

    def check_header(self) -> None:
        """Raise InvalidFile unless the header matches the digest that `write` put into it."""
        at = self.header.find(DIGEST_KEY) + len(DIGEST_KEY)
        digest = self.metadata.get("header_sha256")
        if digest is None or at < len(DIGEST_KEY):
            raise self.error("metadata lacks header_sha256")
        blank = self.header[:at] + NO_DIGEST.encode() + self.header[at + 64 :]
        if hashlib.sha256(blank).hexdigest() != digest:
            raise self.error("corrupted: the header does not match its header_sha256")


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    *,
    watch: Callable[[str, np.ndarray], None] | None = None,
) -> None:
    """Write tensors in order of falling item size and name, all or nothing.

    To `metadata` are added `sha256`, a JSON object of each tensor's hex digest, and
    `header_sha256`, the digest of the header with these 64 digits zero. One tensor at a time is
    looked up, so a mapping that makes or maps its arrays on access is never whole in memory.
    `watch` gets each name and array before its bytes are written; what it raises ends the writing.

    The bytes go to a hidden `.partial` file beside `path` that replaces it after an fsync: a reader
    sees the old file or the new one. OSError (disk full, no such directory) says how far it got.
    """
    path = Path(path)
    table: dict[str, Any] = {}
    for name in tensors:
        array = tensors[name]
        if array.dtype not in NAMES:
            raise InvalidFile(f"{path}: tensor {name!r} has dtype {array.dtype}, not storable")
        table[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape)}
    order = sorted(table, key=lambda name: (-DTYPES[table[name]["dtype"]].itemsize, name))
    total = 0
    for name in order:
        size = math.prod(table[name]["shape"]) * DTYPES[table[name]["dtype"]].itemsize
        table[name]["data_offsets"] = [total, total + size]
        total += size

    def header(digests: Mapping[str, str]) -> bytes:
        keys = {**metadata, "sha256": json.dumps(dict(digests)), "header_sha256": NO_DIGEST}
        rows = {name: table[name] for name in order}
        text = json.dumps({"__metadata__": keys, **rows}, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        digest = hashlib.sha256(text).hexdigest().encode()
        return text.replace(DIGEST_KEY + NO_DIGEST.encode(), DIGEST_KEY + digest)

    digests = dict.fromkeys(order, NO_DIGEST)
    blank = header(digests)
    if len(blank) > MAX_HEADER:
        raise InvalidFile(f"{path}: the header would be {len(blank)} bytes, over {MAX_HEADER}")
    if path.is_dir():
        raise InvalidFile(f"{path}: is a directory")
    if not path.parent.is_dir():
        raise InvalidFile(f"{path}: there is no directory {path.parent}")
    free = shutil.disk_usage(path.parent).free
    if total + len(blank) > free:
        raise OSError(28, f"{path}: needs {total + len(blank)} bytes, the disk has {free} free")

    done = 0
    try:
        with replacing(path) as file:
            file.write(len(blank).to_bytes(8, "little") + blank)
            for name in order:
                array = np.ascontiguousarray(tensors[name])
                if watch is not None:
                    watch(name, array)
                raw = array.reshape(-1).view(np.uint8)
                digest = hashlib.sha256()
                for at in range(0, raw.size, CHUNK):
                    chunk = raw[at : at + CHUNK].data
                    digest.update(chunk)
                    file.write(chunk)
                    done += len(chunk)
                digests[name] = digest.hexdigest()
            file.seek(8)
            file.write(header(digests))
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path}: {error.strerror} after {done} of {total} bytes; nothing was replaced",
        ) from error
