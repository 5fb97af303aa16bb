"""Speed of data files: blocks as the engine writes and reads them, so many at once, from as many files as needed.

A multipart upload is what a file is to an object store: create, blocks in any order, finish. Blocks under way at once
may belong to several files: a file of one block is moved by one worker, and others begin the next files meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

import anyio

from aiockpt.errors import StorageError
from aiockpt.pipeline.upload import ABORT_DEADLINE_S
from aiockpt.storage.backend import Reader, Upload
from aiockpt.tools.stress.lab import Lab, Meter, Request, Stopwatch, new_buffer
from aiockpt.tools.stress.plan import BLOCK_BYTES


class DataFile:
    """One data file on its way to the storage, or back."""

    def __init__(self, key: str, number: int, size: int) -> None:
        self.key = key
        self.number = number
        self.size = size
        self.blocks = -(-size // BLOCK_BYTES)
        self.left = self.blocks
        self.whole = False
        self.failed: StorageError | None = None
        self.upload: Upload | None = None
        self.reader: Reader | None = None
        self.opening = anyio.Lock()

    def bytes_of(self, block: int) -> int:
        """Return the bytes of block number *block*."""
        return min(BLOCK_BYTES, self.size - block * BLOCK_BYTES)


async def measure_files(lab: Lab) -> None:
    """Write and read data files of every size at every concurrency; each point removes what it wrote."""
    for size in lab.plan.sizes:
        for concurrency in lab.plan.concurrency:
            files: list[DataFile] = []
            writing = await _write(lab, size, concurrency, files)
            whole = [file for file in files if file.whole]
            reading = await _read(lab, size, concurrency, whole) if whole else False
            await lab.backend.delete([file.key for file in files])
            if not (writing and reading):
                break


async def _write(lab: Lab, size: int, concurrency: int, files: list[DataFile]) -> bool:
    meters = {name: Meter(lab.clock) for name in ("write", "create", "finish")}
    stopwatch = Stopwatch(lab.clock)
    most_files = max(1, lab.plan.most_bytes // size)

    def requests() -> Iterator[Request]:
        for number in range(most_files):
            if number and stopwatch.wall_s >= lab.plan.seconds:
                return
            file = DataFile(lab.key("files", f"{size}-{concurrency}-{number}"), number, size)
            files.append(file)
            for block in range(file.blocks):
                yield partial(_write_block, lab, file, block, meters)

    try:
        return await lab.point("write", size, concurrency, requests(), meters)
    finally:
        await _abort(files)


async def _abort(files: list[DataFile]) -> None:
    """Give up the uploads that were not finished."""
    with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
        for file in files:
            if file.upload is not None and not file.whole:
                await file.upload.abort()


async def _write_block(lab: Lab, file: DataFile, block: int, meters: dict[str, Meter]) -> None:
    """Write one block; the first one creates the file, and the last one that is done finishes it."""
    try:
        async with file.opening:
            if file.failed is not None:
                return  # it was counted once
            if file.upload is None:
                with meters["create"].request():
                    file.upload = await lab.backend.create(file.key, file.size)
        data = lab.content.block(file.number, block, file.bytes_of(block))
        with meters["write"].request(data.nbytes):
            await file.upload.write(block * BLOCK_BYTES, [data])
        file.left -= 1
        if not file.left and file.failed is None:
            with meters["finish"].request():
                await file.upload.finish()
            file.whole = True
    except StorageError as error:
        file.failed = error
        raise


async def _read(lab: Lab, size: int, concurrency: int, files: list[DataFile]) -> bool:
    meters = {"read": Meter(lab.clock), "open": Meter(lab.clock)}
    free = [new_buffer(min(size, BLOCK_BYTES)) for _ in range(concurrency)]
    stopwatch = Stopwatch(lab.clock)
    most_reads = max(lab.plan.most_bytes // min(size, BLOCK_BYTES), files[0].blocks)

    def requests() -> Iterator[Request]:
        done = count()
        while True:
            for file in files:
                for block in range(file.blocks):
                    number = next(done)
                    if number >= most_reads or (number >= files[0].blocks and stopwatch.wall_s >= lab.plan.seconds):
                        return
                    yield partial(_read_block, lab, file, block, free, meters)

    try:
        return await lab.point("read", size, concurrency, requests(), meters)
    finally:
        with anyio.CancelScope(shield=True):
            for file in files:
                if file.reader is not None:
                    await file.reader.close()


async def _read_block(lab: Lab, file: DataFile, block: int, free: list[memoryview], meters: dict[str, Meter]) -> None:
    """Read one block and compare it; the first one opens the file."""
    async with file.opening:
        if file.reader is None:
            with meters["open"].request():
                file.reader = await lab.backend.open(file.key)
    buffer = free.pop()
    try:
        found = buffer[: file.bytes_of(block)]
        with meters["read"].request(found.nbytes):
            await file.reader.read(block * BLOCK_BYTES, [found])
        if not lab.content.is_block(file.number, block, found):
            meters["read"].wrong.append(f"{file.key}: block {block} is not what was written")
    finally:
        free.append(buffer)
