"""Data files for tests: bytes that identify their place, written and read block by block."""

from __future__ import annotations

import mmap
import random

from aiockpt.storage.backend import Backend, Reader


def patterned(size_bytes: int, seed: int = 0) -> memoryview:
    """Return page-aligned memory whose bytes identify their place: no two blocks are equal."""
    memory = memoryview(mmap.mmap(-1, max(1, size_bytes)))[:size_bytes]
    memory[:] = random.Random(seed).randbytes(size_bytes)
    return memory


async def upload(backend: Backend, key: str, data: memoryview, block_bytes: int = 1 << 20) -> None:
    """Write *data* as a data file, block by block in order."""
    file = await backend.create(key, data.nbytes)
    for start in range(0, data.nbytes, block_bytes):
        await file.write(start, [data[start : start + block_bytes]])
    await file.finish()


async def download(reader: Reader, offset: int = 0, size_bytes: int | None = None) -> bytes:
    """Return *size_bytes* from *offset*; by default the rest of the file."""
    data = bytearray(reader.size - offset if size_bytes is None else size_bytes)
    await reader.read(offset, [memoryview(data)])
    return bytes(data)
