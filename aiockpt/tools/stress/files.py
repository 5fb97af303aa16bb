"""Speed of data files, in blocks as the engine writes and reads them, and of the small objects beside them.

On an object store a file is a multipart upload: create, blocks in any order, finish. Concurrent blocks may belong to
several files: one worker moves a file of one block, and others begin the next files meanwhile.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import cycle, islice

import anyio

from aiockpt.errors import StorageError
from aiockpt.pipeline.upload import ABORT_DEADLINE_S
from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.backend import Reader, Upload
from aiockpt.tools.stress.lab import Lab, Meter, Request, new_buffer
from aiockpt.tools.stress.plan import BLOCK_BYTES, LISTED_COUNT, MOST_REQUESTS, RECEIPT_BYTES, SMALL_SIZES

LISTED_FOLDER = "listed"


class DataFile:
    """One data file on its way to the storage, or back."""

    def __init__(self, key: str, number: int, size: int) -> None:
        self.key = key
        self.number = number
        self.size = size
        self.blocks = self.left = -(-size // BLOCK_BYTES)
        self.whole = False
        self.failed: StorageError | None = None
        self.upload: Upload | None = None
        self.reader: Reader | None = None
        self.opening = anyio.Lock()

    def bytes_of(self, block: int) -> int:
        """Return the bytes of block number *block*."""
        return min(BLOCK_BYTES, self.size - block * BLOCK_BYTES)


async def measure_files(lab: Lab) -> None:
    """Write and read data files of every size at every concurrency; each point removes its files."""
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

    def requests() -> Iterator[Request]:
        for number in lab.in_time(range(max(1, lab.plan.most_bytes // size)), 1):
            file = DataFile(lab.key("files", f"{size}-{concurrency}-{number}"), number, size)
            files.append(file)
            for block in range(file.blocks):
                yield partial(_write_block, lab, file, block, meters)

    try:
        return await lab.point("write", size, concurrency, requests(), meters)
    finally:
        with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
            for file in files:
                if file.upload is not None and not file.whole:
                    await file.upload.abort()


async def _write_block(lab: Lab, file: DataFile, block: int, meters: dict[str, Meter]) -> None:
    """Write one block; the first one creates the file, and the last one that is done finishes it."""
    try:
        async with file.opening:
            if file.failed is not None:
                return  # the failure was already counted
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
    most_reads = max(lab.plan.most_bytes // min(size, BLOCK_BYTES), files[0].blocks)
    again_and_again = cycle([(file, block) for file in files for block in range(file.blocks)])
    blocks = lab.in_time(islice(again_and_again, most_reads), files[0].blocks)
    requests = (partial(_read_block, lab, file, block, free, meters) for file, block in blocks)
    try:
        return await lab.point("read", size, concurrency, requests, meters)
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
            meters["read"].wrong.append(f"{file.key}: block {block} differs from what was written")
    finally:
        free.append(buffer)


async def measure_objects(lab: Lab) -> None:
    """Measure every verb of receipts, manifests and listings at every concurrency; each point removes its objects."""
    for size in SMALL_SIZES:
        await _sweep(lab, size, "put", "get")
    await _fill_listed(lab)
    for verbs in (("put_new", "delete"), ("stat",), ("list",)):
        await _sweep(lab, RECEIPT_BYTES, *verbs)


async def _sweep(lab: Lab, size: int, *verbs: str) -> None:
    """Measure *verbs*, the second one on what the first one has put; stop where one fails."""
    for concurrency in lab.plan.concurrency:
        objects = SmallObjects(lab, size, concurrency)
        going_on = [await objects.measure(verb) for verb in verbs]
        await objects.remove()
        if not all(going_on):
            return


async def _fill_listed(lab: Lab) -> None:
    """Create the folder for lists and reads."""
    keys = iter(range(LISTED_COUNT))

    async def some() -> None:
        for number in keys:
            await lab.backend.put(_listed_key(lab, number), lab.content.document(number, RECEIPT_BYTES))

    async with open_tasks() as tasks:
        for _ in range(lab.plan.concurrency[-1]):
            tasks.start_soon(some)


def _listed_key(lab: Lab, number: int) -> str:
    return lab.key(LISTED_FOLDER, f"r{number:05}.json")


class SmallObjects:
    """The objects of one size, made and used at one concurrency."""

    def __init__(self, lab: Lab, size: int, concurrency: int) -> None:
        self._lab = lab
        self._size = size
        self._concurrency = concurrency
        self._folder = lab.key("objects", f"{size}-{concurrency}")
        self._tried: list[int] = []
        self._made: list[int] = []

    async def measure(self, verb: str) -> bool:
        """Measure one verb; return whether to continue."""
        most = min(MOST_REQUESTS, max(self._concurrency, self._lab.plan.most_bytes // self._size))
        if verb in ("get", "delete"):
            if not self._made:
                return True
            most = min(most, len(self._made)) if verb == "delete" else most
        calls: dict[str, Callable[[Meter, int], Awaitable[None]]] = {
            "put": partial(self._put, self._lab.backend.put),
            "put_new": partial(self._put, self._lab.backend.put_new),
            "get": self._get,
            "delete": self._delete,
            "stat": self._stat,
            "list": self._list,
        }
        meter = Meter(self._lab.clock)
        numbers = self._lab.in_time(range(most), self._concurrency)
        requests = (partial(calls[verb], meter, number) for number in numbers)
        return await self._lab.point(verb, self._size, self._concurrency, requests, {verb: meter})

    async def remove(self) -> None:
        """Delete the objects that were put."""
        if self._tried:
            await self._lab.backend.delete([self._key(number) for number in self._tried])

    def _key(self, number: int) -> str:
        return f"{self._folder}/{number}"

    async def _put(self, put: Callable[[str, bytes], Awaitable[None]], meter: Meter, number: int) -> None:
        data = self._lab.content.document(number, self._size)
        self._tried.append(number)
        with meter.request(self._size):
            await put(self._key(number), data)
        self._made.append(number)

    async def _get(self, meter: Meter, number: int) -> None:
        number = self._made[number % len(self._made)]
        with meter.request(self._size):
            found = await self._lab.backend.get(self._key(number), self._size + 1)
        if found != self._lab.content.document(number, self._size):
            meter.wrong.append(f"{self._key(number)}: {len(found)} bytes came that are not what was put")

    async def _delete(self, meter: Meter, number: int) -> None:
        with meter.request():
            await self._lab.backend.delete([self._key(self._made[number])])

    async def _stat(self, meter: Meter, number: int) -> None:
        key = _listed_key(self._lab, number % LISTED_COUNT)
        with meter.request():
            found = await self._lab.backend.stat(key)
        if found.size != RECEIPT_BYTES:
            meter.wrong.append(f"{key}: stat returned {found.size} bytes, and {RECEIPT_BYTES} were put")

    async def _list(self, meter: Meter, _: int) -> None:
        with meter.request():
            found = await self._lab.backend.list(self._lab.key(LISTED_FOLDER))
        if len(found.objects) != LISTED_COUNT:
            meter.wrong.append(f"a list of {LISTED_COUNT} objects showed {len(found.objects)}")
