"""How fast are the small things: receipts, manifests, and looking what is there?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import count, islice

from aiockpt.runtime.tasks import open_tasks
from aiockpt.stress.lab import Lab, Request
from aiockpt.stress.meter import Meter, Stopwatch
from aiockpt.stress.plan import LISTED_COUNT, MOST_REQUESTS, RECEIPT_BYTES, SMALL_SIZES

LISTED_FOLDER = "listed"


async def measure_objects(lab: Lab) -> None:
    """Measure every verb of small objects at every concurrency; each removes what it wrote."""
    for size in SMALL_SIZES:
        await _sweep(lab, size, lambda point: point.put_and_get())
    await _fill_listed(lab)
    await _sweep(lab, RECEIPT_BYTES, lambda point: point.put_new_and_delete())
    await _sweep(lab, RECEIPT_BYTES, lambda point: point.stat())
    await _sweep(lab, RECEIPT_BYTES, lambda point: point.list())


async def _sweep(lab: Lab, size: int, measure: Callable[[_Point], Awaitable[bool]]) -> None:
    for concurrency in lab.plan.concurrency:
        if not await measure(_Point(lab, size, concurrency)):
            return


async def _fill_listed(lab: Lab) -> None:
    """Make the folder that is listed and looked into."""
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
    """The points of one size at one concurrency."""

    def __init__(self, lab: Lab, size: int, concurrency: int) -> None:
        self._lab = lab
        self._size = size
        self._concurrency = concurrency
        self._folder = lab.key("objects", f"{size}-{concurrency}")
        self._tried: list[int] = []
        self._made: list[int] = []

    async def put_and_get(self) -> bool:
        going_on = await self._measure("put", self._put)
        if self._made:
            going_on = await self._measure("get", self._get) and going_on
        await self._remove()
        return going_on

    async def put_new_and_delete(self) -> bool:
        going_on = await self._measure("put_new", self._put_new)
        if self._made:
            going_on = await self._measure("delete", self._delete, len(self._made)) and going_on
        await self._remove()
        return going_on

    async def stat(self) -> bool:
        return await self._measure("stat", self._stat)

    async def list(self) -> bool:
        return await self._measure("list", self._list)

    async def _measure(
        self, operation: str, make: Callable[[Meter, int], Awaitable[None]], most: int = MOST_REQUESTS
    ) -> bool:
        """Measure one operation: *make* is one request, told its number."""
        meter = Meter(self._lab.clock)
        stopwatch = Stopwatch(self._lab.clock)
        most = min(most, max(self._concurrency, self._lab.plan.most_bytes // self._size))

        def requests() -> Iterator[Request]:
            for number in islice(count(), most):
                if number >= self._concurrency and stopwatch.wall_s >= self._lab.plan.seconds:
                    return
                yield partial(make, meter, number)

        return await self._lab.point(operation, self._size, self._concurrency, requests(), {operation: meter})

    async def _remove(self) -> None:
        await self._lab.backend.delete([self._key(number) for number in self._tried])

    def _key(self, number: int) -> str:
        return f"{self._folder}/{number}"

    async def _put(self, meter: Meter, number: int) -> None:
        data = self._lab.content.document(number, self._size)
        self._tried.append(number)
        with meter.request(self._size):
            await self._lab.backend.put(self._key(number), data)
        self._made.append(number)

    async def _get(self, meter: Meter, number: int) -> None:
        number = self._made[number % len(self._made)]
        with meter.request(self._size):
            found = await self._lab.backend.get(self._key(number), self._size + 1)
        if found != self._lab.content.document(number, self._size):
            meter.wrong.append(f"{self._key(number)}: {len(found)} bytes came and they are not what was put")

    async def _put_new(self, meter: Meter, number: int) -> None:
        data = self._lab.content.document(number, self._size)
        self._tried.append(number)
        with meter.request(self._size):
            await self._lab.backend.put_new(self._key(number), data)
        self._made.append(number)

    async def _delete(self, meter: Meter, number: int) -> None:
        with meter.request():
            await self._lab.backend.delete([self._key(self._made[number])])

    async def _stat(self, meter: Meter, number: int) -> None:
        key = _listed_key(self._lab, number % LISTED_COUNT)
        with meter.request():
            found = await self._lab.backend.stat(key)
        if found.size != RECEIPT_BYTES:
            meter.wrong.append(f"{key}: stat says {found.size} bytes, and {RECEIPT_BYTES} were put")

    async def _list(self, meter: Meter, number: int) -> None:
        del number
        with meter.request():
            found = await self._lab.backend.list(self._lab.key(LISTED_FOLDER))
        if len(found.objects) != LISTED_COUNT:
            meter.wrong.append(f"a list of {LISTED_COUNT} objects showed {len(found.objects)}")
