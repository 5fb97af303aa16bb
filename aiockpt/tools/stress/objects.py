"""Speed of the small objects: receipts, manifests, and listings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count, islice

from aiockpt.runtime.tasks import open_tasks
from aiockpt.tools.stress.lab import Lab, Meter, Request, Stopwatch
from aiockpt.tools.stress.plan import LISTED_COUNT, MOST_REQUESTS, RECEIPT_BYTES, SMALL_SIZES

LISTED_FOLDER = "listed"


async def measure_objects(lab: Lab) -> None:
    """Measure every verb of small objects at every concurrency; each removes what it wrote."""
    for size in SMALL_SIZES:
        await _sweep(lab, size, put="put", use="get")
    await _fill_listed(lab)
    await _sweep(lab, RECEIPT_BYTES, put="put_new", use="delete")
    await _sweep(lab, RECEIPT_BYTES, use="stat")
    await _sweep(lab, RECEIPT_BYTES, use="list")


async def _sweep(lab: Lab, size: int, *, use: str, put: str | None = None) -> None:
    """Measure how objects are *put*, then how those, or else the listed ones, are used; until a concurrency fails."""
    for concurrency in lab.plan.concurrency:
        point = _Point(lab, size, concurrency)
        going_on = await point.measure(put) if put is not None else True
        if put is None or point.made:
            going_on = await point.measure(use, len(point.made) if use == "delete" else MOST_REQUESTS) and going_on
        await point.remove()
        if not going_on:
            return


async def _fill_listed(lab: Lab) -> None:
    """Make the folder that is listed and read."""
    keys = iter(range(LISTED_COUNT))

    async def some() -> None:
        for number in keys:
            await lab.backend.put(_listed_key(lab, number), lab.content.document(number, RECEIPT_BYTES))

    async with open_tasks() as tasks:
        for _ in range(lab.plan.concurrency[-1]):
            tasks.start_soon(some)


def _listed_key(lab: Lab, number: int) -> str:
    return lab.key(LISTED_FOLDER, f"r{number:05}.json")


class _Point:
    """The points of one size at one concurrency.

    Attributes:
        made: numbers of the objects that were put.
    """

    def __init__(self, lab: Lab, size: int, concurrency: int) -> None:
        self.made: list[int] = []
        self._lab = lab
        self._size = size
        self._concurrency = concurrency
        self._folder = lab.key("objects", f"{size}-{concurrency}")
        self._tried: list[int] = []

    async def measure(self, operation: str, most: int = MOST_REQUESTS) -> bool:
        """Measure one operation; return whether it is worth going on."""
        make: Callable[[str, Meter, int], Awaitable[None]] = {
            "get": self._get,
            "delete": self._delete,
            "stat": self._stat,
            "list": self._list,
        }.get(operation, self._put)
        meter = Meter(self._lab.clock)
        stopwatch = Stopwatch(self._lab.clock)
        most = min(most, max(self._concurrency, self._lab.plan.most_bytes // self._size))

        def requests() -> Iterator[Request]:
            for number in islice(count(), most):
                if number >= self._concurrency and stopwatch.wall_s >= self._lab.plan.seconds:
                    return
                yield partial(make, operation, meter, number)

        return await self._lab.point(operation, self._size, self._concurrency, requests(), {operation: meter})

    async def remove(self) -> None:
        """Delete what was put."""
        if self._tried:
            await self._lab.backend.delete([self._key(number) for number in self._tried])

    def _key(self, number: int) -> str:
        return f"{self._folder}/{number}"

    async def _put(self, verb: str, meter: Meter, number: int) -> None:
        data = self._lab.content.document(number, self._size)
        self._tried.append(number)
        with meter.request(self._size):
            await getattr(self._lab.backend, verb)(self._key(number), data)
        self.made.append(number)

    async def _get(self, _: str, meter: Meter, number: int) -> None:
        number = self.made[number % len(self.made)]
        with meter.request(self._size):
            found = await self._lab.backend.get(self._key(number), self._size + 1)
        if found != self._lab.content.document(number, self._size):
            meter.wrong.append(f"{self._key(number)}: {len(found)} bytes came that are not what was put")

    async def _delete(self, _: str, meter: Meter, number: int) -> None:
        with meter.request():
            await self._lab.backend.delete([self._key(self.made[number])])

    async def _stat(self, _: str, meter: Meter, number: int) -> None:
        key = _listed_key(self._lab, number % LISTED_COUNT)
        with meter.request():
            found = await self._lab.backend.stat(key)
        if found.size != RECEIPT_BYTES:
            meter.wrong.append(f"{key}: stat returned {found.size} bytes, and {RECEIPT_BYTES} were put")

    async def _list(self, _: str, meter: Meter, __: int) -> None:
        with meter.request():
            found = await self._lab.backend.list(self._lab.key(LISTED_FOLDER))
        if len(found.objects) != LISTED_COUNT:
            meter.wrong.append(f"a list of {LISTED_COUNT} objects showed {len(found.objects)}")
