"""Soak test of a place: a mixed workload for a while, with faults injected below the retries; every byte must survive.

Workers write, read back, replace, list and delete, each in a folder of its own, so that its expected contents are known.
Acknowledged data is compared whenever it is read, and once more at the end. A read that returns damaged bytes is repeated,
as a load does; data that is damaged every time is wrong. So is an object that is missing, a list that lacks one, a
create that succeeds although the object exists, and a deleted one that is found.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from aiockpt.errors import ObjectNotFoundError, StorageError
from aiockpt.pipeline.upload import ABORT_DEADLINE_S
from aiockpt.runtime.limits import open_tasks
from aiockpt.storage.backend import Backend
from aiockpt.storage.retry import Retrying, RetryPolicy
from aiockpt.storage.retry_calls import classify
from aiockpt.storage.transfer import put_once
from aiockpt.testing.faults import Action, Fault, FaultSchedule, FaultyBackend
from aiockpt.tools.stress.lab import Lab, new_buffer
from aiockpt.tools.stress.plan import BLOCK_BYTES, RECEIPT_BYTES
from aiockpt.tools.stress.report import Soak

MOST_WORKERS = 8
MOST_FILE_BYTES = 64 << 20
READS_OF_DAMAGED = 12
"""Reads of damaged bytes before they count as wrong: as many as the attempts of a failing call. With fewer, bits that the
soak itself flips would in the end count as damage."""

POLICY = RetryPolicy(first_wait_s=0.01, longest_wait_s=2.0, throttled_first_wait_s=0.1)
"""Short waits: most of these faults are injected."""


async def soak(lab: Lab) -> None:
    """Run the workload, and add the outcome to the report."""
    lab.watch(f"soak of {lab.plan.soak_s:g} s")
    faults = DrawnFaults(lab.plan.seed, lab.plan.faults)
    faulty = FaultyBackend(lab.backend.inner if isinstance(lab.backend, Retrying) else lab.backend)
    faulty.schedule = faults
    attempts: list[int] = []
    backend = Retrying(faulty, POLICY, on_retry=lambda event: attempts.append(event.attempt))
    tally = Soak(seed=lab.plan.seed, fraction=lab.plan.faults)
    passed_s = lab.stopwatch()
    workers = min(MOST_WORKERS, lab.plan.concurrency[-1])
    async with open_tasks() as tasks:
        for number in range(workers):
            worker = _Worker(lab, backend, number, tally, lab.plan.most_bytes // workers)
            tasks.start_soon(worker.run, lambda: passed_s() < lab.plan.soak_s)
    seen, failed_count = backend.statistics(), sum(tally.errors.values())
    tally.wall_s, tally.calls, tally.attempts = passed_s(), seen.calls, seen.attempts
    tally.retried = attempts.count(2)
    tally.recovered = max(0, tally.retried - failed_count)
    tally.injected = dict(faults.injected.most_common())
    lab.report.soak = tally
    lab.report.problems.extend(f"soak: {problem}" for problem in tally.wrong)
    if tally.errors:
        counts = ", ".join(f"{number} × {name}" for name, number in tally.errors.items())
        lab.report.problems.append(f"soak: calls failed after all retries: {counts}")


class _Worker:
    """One worker that writes and reads, in a folder of its own."""

    def __init__(self, lab: Lab, backend: Backend, number: int, tally: Soak, most_bytes: int) -> None:
        self._lab = lab
        self._backend = backend
        self._number = number
        self._tally = tally
        self._most_bytes = most_bytes
        self._dice = random.Random(f"{lab.plan.seed}-{number}")
        self._buffer = new_buffer(BLOCK_BYTES)
        self._files: dict[str, tuple[int, int]] = {}
        self._objects: dict[str, int] = {}
        self._next = number << 20  # small objects of two workers differ; blocks of their files may not (`Payload`)

    async def run(self, is_time: Callable[[], bool]) -> None:
        """Do every action once, then random ones until the time is over; then read all remaining objects again."""
        actions: tuple[tuple[Callable[[], Awaitable[None]], int], ...] = (
            (self._write_file, 30),
            (self._read_some_file, 30),
            (self._put, 15),
            (self._get_some, 15),
            (self._create_taken, 5),
            (self._list, 5),
            (self._delete_file, 5),
        )
        makes, weights = zip(*actions, strict=True)
        for make in makes:
            await self._try(make)
        while is_time():
            await self._try(self._dice.choices(makes, weights)[0])
        for key in list(self._files):
            await self._try(partial(self._read_file, key))
        for key in list(self._objects):
            await self._try(partial(self._get, key))

    async def _try(self, action: Callable[[], Awaitable[None]]) -> None:
        """Run *action*; an error is counted, and a missing object that must exist is wrong."""
        try:
            await action()
        except ObjectNotFoundError as error:
            self._tally.wrong.append(f"an acknowledged object is missing: {error}")
        except StorageError as error:
            kind = classify(error)
            self._tally.errors[kind] = self._tally.errors.get(kind, 0) + 1

    def _key(self, kind: str) -> tuple[str, int]:
        self._next += 1
        return self._lab.key("soak", f"w{self._number}", kind, str(self._next)), self._next

    async def _write_file(self) -> None:
        size = min(self._dice.choice(self._lab.plan.sizes), MOST_FILE_BYTES, max(1, self._most_bytes // 2))
        while self._files and sum(size for _, size in self._files.values()) + size > self._most_bytes:
            await self._delete_file()
        key, number = self._key("files")
        upload = await self._backend.create(key, size)
        try:
            starts = list(range(0, size, BLOCK_BYTES))
            self._dice.shuffle(starts)
            async with open_tasks() as tasks:
                for start in starts:
                    data = self._lab.content.block(number, start // BLOCK_BYTES, min(BLOCK_BYTES, size - start))
                    tasks.start_soon(upload.write, start, [data])
            await upload.finish()
        except BaseException:
            with anyio.move_on_after(ABORT_DEADLINE_S, shield=True):
                await upload.abort()
            raise
        self._files[key] = number, size
        self._tally.files += 1
        self._tally.bytes_written += size

    async def _read_some_file(self) -> None:
        if self._files:
            await self._read_file(self._dice.choice(list(self._files)))

    async def _read_file(self, key: str) -> None:
        number, size = self._files[key]
        reader = await self._backend.open(key)
        try:
            if reader.size != size:
                self._tally.wrong.append(f"{key} has {reader.size} bytes, and {size} were written")
                return
            for start in range(0, size, BLOCK_BYTES):
                found = self._buffer[: min(BLOCK_BYTES, size - start)]

                async def read(start: int = start, found: memoryview = found) -> bool:
                    await reader.read(start, [found])
                    self._tally.bytes_read += found.nbytes
                    return self._lab.content.is_block(number, start // BLOCK_BYTES, found)

                await self._read_until_right(f"{key}, bytes {start}..{start + found.nbytes}", read)
        finally:
            with anyio.CancelScope(shield=True):
                await reader.close()

    async def _read_until_right(self, what: str, read: Callable[[], Awaitable[bool]]) -> None:
        for again in range(READS_OF_DAMAGED):
            if await read():
                self._tally.reread += again > 0
                return
        self._tally.wrong.append(f"{what}: not what was written, {READS_OF_DAMAGED} times")

    async def _put(self) -> None:
        """Put an object, or replace one."""
        key, number = self._key("objects")
        if len(self._objects) > MOST_WORKERS:
            key = self._dice.choice(list(self._objects))
        before = self._objects.pop(key, None)  # during a replacement, or if it fails, either may be there
        await self._backend.put(key, self._lab.content.document(number, RECEIPT_BYTES))
        self._objects[key] = number
        self._tally.objects += before is None
        self._tally.bytes_written += RECEIPT_BYTES

    async def _get_some(self) -> None:
        if self._objects:
            await self._get(self._dice.choice(list(self._objects)))

    async def _get(self, key: str) -> None:
        async def read() -> bool:
            found = await self._backend.get(key, RECEIPT_BYTES + 1)
            self._tally.bytes_read += len(found)
            return found == self._lab.content.document(self._objects[key], RECEIPT_BYTES)

        await self._read_until_right(key, read)

    async def _create_taken(self) -> None:
        """Create an object as a commit does, then once more with other bytes: the second must be refused."""
        key, number = self._key("objects")
        created = await put_once(self._backend, key, self._lab.content.document(number, RECEIPT_BYTES))
        self._objects[key] = number
        self._tally.objects += 1
        self._tally.bytes_written += RECEIPT_BYTES
        if not created:
            await self._get(key)  # the read that identifies the owner may be damaged: wrong only if it is not ours
        if await put_once(self._backend, key, self._lab.content.document(number + 1, RECEIPT_BYTES)):
            self._tally.wrong.append(f"{key} was created twice")

    async def _list(self) -> None:
        known = set(self._objects)
        found = await self._backend.list(self._lab.key("soak", f"w{self._number}", "objects"))
        if missing := known - {stat.key for stat in found.objects}:
            self._tally.wrong.append(f"a list lacks {len(missing)} of {len(known)} objects, such as {min(missing)}")

    async def _delete_file(self) -> None:
        if not self._files:
            return
        key = next(iter(self._files))
        del self._files[key]
        await self._backend.delete([key])
        try:
            await self._backend.stat(key)
        except ObjectNotFoundError:
            return
        self._tally.wrong.append(f"{key} was deleted and is there")


ERRNOS = (errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ESTALE)
"""Those after which the same call may succeed."""

_POSSIBLE: dict[str, tuple[Action, ...]] = {
    "put": ("fail", "lose_answer"),
    "put_new": ("fail", "lose_answer"),
    "delete": ("fail", "lose_answer"),
    "get": ("fail", "flip"),
    "reader.read": ("fail", "flip"),
    "create": ("fail",),
    "upload.write": ("fail",),
    "upload.finish": ("fail",),
    "open": ("fail",),
    "stat": ("fail",),
    "list": ("fail",),
}


class DrawnFaults(FaultSchedule):
    """A random schedule: *fraction* of the calls get a fault that a correct backend may have and a caller can repair.

    - *fail* without effect, at every verb.
    - *lose the answer* after the effect, where a repeated call is distinguished from another writer's: ``put``, ``put_new``,
      ``delete``. (For ``create``, ``Upload.write`` and ``Upload.finish``, an answer is lost below a backend, which
      detects that; lost above one, the backend would rightly report that this block, or file, exists.)
    - *flip* a bit of read data. A bit flipped in written data would be damage that no reader can repair.

    Attributes:
        injected: number of faults, by kind and verb.
    """

    def __init__(self, seed: int, fraction: float) -> None:
        super().__init__((), FaultyBackend.ACTIONS)
        self._dice = random.Random(seed)
        self._fraction = fraction
        self.injected: Counter[str] = Counter()

    def due(self, verb: str, name: str) -> Fault | None:
        """Count a call of *verb* and draw its fault."""
        super().due(verb, name)
        if verb not in _POSSIBLE or self._dice.random() >= self._fraction:
            return None
        action = self._dice.choice(_POSSIBLE[verb])
        self.injected[f"{action} {verb}"] += 1
        return Fault(do=action, error=self._dice.choice(ERRNOS), bit=self._dice.getrandbits(40))
