"""One run from start to end: a scratch folder, floors, checks, data files, small objects, the soak, and cleaning.

Guarantees:

- No key outside the scratch folder is touched; its name was never used before.
- A place that cannot be cleaned is refused before anything large is written.
- The folder is emptied however the run ends, and listed to verify that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

import anyio
import numpy as np

from aiockpt.errors import CheckpointError, ObjectExistsError, ObjectNotFoundError, StorageError, UsageError
from aiockpt.format.document import hash_block
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import walk
from aiockpt.testing.disk import measure_disk
from aiockpt.tools.stress.files import measure_files, measure_objects
from aiockpt.tools.stress.lab import Lab, Payload, Watch, new_buffer
from aiockpt.tools.stress.plan import BLOCK_BYTES, RECEIPT_BYTES, StressPlan
from aiockpt.tools.stress.report import Floor, StorageCheck, StressReport
from aiockpt.tools.stress.soak import soak

_ROOM = 1.1
"""Files occupy a little more than their bytes."""


async def measure(
    backend: Backend,
    plan: StressPlan,
    *,
    world: World | None = None,
    watch: Watch = lambda _: None,
    say: Callable[[str], object] = lambda _: None,
) -> StressReport:
    """Measure *backend* by *plan*, and return the report; all written objects are removed.

    Args:
        world: its clock and random bytes.
        watch: called with the name of each point as it begins.
        say: called with messages: the folder, the expected duration, and its removal.

    Raises:
        UsageError: the place has too little space for the plan.
        StorageError: the place cannot be written to, or cannot be cleaned.
    """
    world = world or World()
    await _check_room(backend, plan)
    traits = backend.traits
    async with own_folder(backend, world.token(6), say) as prefix:
        say(plan.announce())
        report = StressReport(
            url=backend.url,
            backend=repr(backend),
            prefix=prefix,
            scope=traits.scope,
            durable=traits.durable,
            plan=plan,
        )
        lab = Lab(
            backend=backend,
            prefix=prefix,
            plan=plan,
            clock=world.clock,
            content=Payload(plan.seed, BLOCK_BYTES),
            report=report,
            watch=watch,
        )
        await measure_floors(lab)
        await check_place(lab)
        await measure_files(lab)
        await measure_objects(lab)
        if plan.soak_s:
            await soak(lab)
        else:
            lab.skip("soak", "not asked for: --soak SECONDS")
    return report


async def _check_room(backend: Backend, plan: StressPlan) -> None:
    """Refuse a plan that does not fit; a place that does not report its free space is accepted."""
    free_bytes = (await backend.space()).free_bytes
    if free_bytes is not None and free_bytes < plan.most_bytes * _ROOM:
        raise UsageError(
            f"{backend.url} has {free_bytes >> 20} MiB free, and up to {plan.most_bytes >> 20} MiB would lie there at once:"
            " lower --bytes (and --sizes)"
        )


_COPIED_BYTES = 64 << 20
_REPEATS = 5
_DISK_BYTES = 256 << 20


async def measure_floors(lab: Lab) -> None:
    """Measure the floors that are cheap to measure; record the others as skipped."""
    lab.watch("floors: memory and disk")
    working = Limiter("floors", 1)
    lab.report.floors.append(Floor("memory copy", await run_blocking(working, _copy_bytes_per_s)))
    lab.report.floors.append(Floor("checksum (xxh3)", await run_blocking(working, _hash_bytes_per_s)))
    scheme, _, path = lab.backend.url.partition("://")
    if scheme != "file":
        lab.skip("raw disk", f"{scheme}:// is not a folder of this machine")
        return
    size = min(_DISK_BYTES, lab.plan.most_bytes)
    try:
        kinds: tuple[Literal["write", "read"], ...] = ("write", "read")
        for kind in kinds:
            found = await run_blocking(working, partial(measure_disk, Path(unquote(path)), size, 2, kind=kind))
            name = f"raw disk, {kind} ({'O_DIRECT' if found.direct else 'page cache'}, one thread)"
            lab.report.floors.append(Floor(name, max(found.bytes_per_s)))
    except OSError as error:
        lab.skip("raw disk", str(error))


def _copy_bytes_per_s() -> float:
    source, target = (np.frombuffer(new_buffer(_COPIED_BYTES), np.uint8) for _ in range(2))
    return _COPIED_BYTES / statistics.median(_time(lambda: np.copyto(target, source)) for _ in range(_REPEATS))


def _hash_bytes_per_s() -> float:
    source = new_buffer(_COPIED_BYTES)
    return _COPIED_BYTES / statistics.median(_time(lambda: hash_block(source)) for _ in range(_REPEATS))


def _time(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


CLEANING_DEADLINE_S = 300.0
_SHOWN = 300


@asynccontextmanager
async def own_folder(backend: Backend, token: bytes, say: Callable[[str], object]) -> AsyncIterator[str]:
    """Yield a folder of *backend* for the length of the block; remove its contents afterwards.

    Args:
        token: random bytes that name it.
        say: called with messages: the folder, and its removal.

    Raises:
        StorageError: objects cannot be deleted here, or some were left at the end.
    """
    prefix = f"aiockpt-bench-{token.hex()}"
    where = backend.url + ("" if backend.url.endswith("/") else "/") + prefix
    await _prove_cleanable(backend, prefix, where)
    say(f"everything goes below {where}, and is removed at the end")
    try:
        yield prefix
    finally:
        # Kept where the deadline cuts the cleaning short, which raises nothing.
        left = f"it was not done after {CLEANING_DEADLINE_S:g} s"
        with anyio.move_on_after(CLEANING_DEADLINE_S, shield=True):
            left = await _clean(backend, prefix)
        if left:
            raise StorageError(f"{where} could not be emptied: {left}. Remove it by hand.", key=prefix)
        say(f"removed all that was below {where}")


async def _prove_cleanable(backend: Backend, prefix: str, where: str) -> None:
    """Write one small object, find it, delete it, and verify that it is gone."""
    key = f"{prefix}/may-be-removed"
    await backend.put(key, b"written by aiockpt bench")
    try:
        await backend.delete([key])
    except StorageError as error:
        raise StorageError(
            f"{where} is not measured, because objects cannot be deleted there: {error}. Grant the right to delete; one"
            f" object of a few bytes is left: {key}",
            key=key,
        ) from error
    try:
        await backend.stat(key)
    except ObjectNotFoundError:
        return
    raise StorageError(
        f"{where} is not measured: {key} was deleted and is still there. A store that keeps deleted objects (a versioned"
        " bucket with delete markers hidden, a cache in front of it) cannot be cleaned.",
        key=key,
    )


async def _clean(backend: Backend, prefix: str) -> str:
    """Remove everything below *prefix* as far as possible; return the problems, or an empty text."""
    problems: list[str] = []
    folders = [prefix]
    # The list grows while it is walked, by the folders below; the deepest come last.
    for folder in folders:
        try:
            listing = await backend.list(folder)
            folders.extend(listing.folders)
            await backend.delete([stat.key for stat in listing.objects])
        except CheckpointError as error:
            problems.append(_short(error))
    try:
        left = [stat.key async for stat in walk(backend, prefix)]
        if not left:
            await backend.delete(
                [f"{folder}/-" for folder in reversed(folders)]
            )  # removes empty folders where they exist
            return ""
    except CheckpointError as error:
        return _short(error)
    return "; ".join([*problems, f"{len(left)} objects are left, such as {left[0]}"])


def _short(error: CheckpointError) -> str:
    """Return the message of *error*, which may name a thousand keys, cut in its middle."""
    text = str(error)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


# Checks of the guarantees that commits rely on, made at the place itself.
#
# The conformance suite (`aiockpt.testing.backend_suite`) checks far more of a backend; this checks one place through it.


RACES = 5
RACERS = 16


async def check_place(lab: Lab) -> None:
    """Run each check, and add its outcome to the report."""
    lab.watch("what commits rely on")
    # The names are in the JSON of the report: they stay as they are.
    tried: tuple[tuple[str, Callable[[Lab], Awaitable[tuple[bool, str]]]], ...] = (
        ("one of rival creates wins", _one_winner),
        ("what was written is seen at once", _seen_at_once),
        ("what was replaced is seen whole", _replaced),
        ("what was deleted is gone at once", _gone_at_once),
    )
    for name, attempt in tried:
        try:
            passed, detail = await attempt(lab)
        except CheckpointError as error:
            passed, detail = False, str(error)
        lab.report.checks.append(StorageCheck(name, passed, detail))
        if not passed:
            lab.report.problems.append(f"{name}: failed. {detail}")


async def _one_winner(lab: Lab) -> tuple[bool, str]:
    """Race for a few keys: one caller wins each, and the object has its bytes."""
    for race in range(RACES):
        key = lab.key("checks", f"race-{race}")
        winners: list[int] = []

        async def create(racer: int, key: str = key, winners: list[int] = winners) -> None:
            try:
                await lab.backend.put_new(key, lab.content.document(racer, RECEIPT_BYTES))
            except ObjectExistsError:
                return
            winners.append(racer)

        async with open_tasks() as tasks:
            for racer in range(RACERS):
                tasks.start_soon(create, racer)
        if len(winners) != 1:
            return (
                False,
                f"{len(winners)} of {RACERS} concurrent creates of {key} succeeded: two jobs could commit a step",
            )
        if await lab.backend.get(key, RECEIPT_BYTES + 1) != lab.content.document(winners[0], RECEIPT_BYTES):
            return False, f"{key} does not hold the bytes of the create that succeeded"
    return True, f"{RACES} races of {RACERS}"


async def _seen_at_once(lab: Lab) -> tuple[bool, str]:
    """Put, and read back by every verb."""
    for number in range(RACES):
        key = lab.key("checks", "seen", f"{number}")
        data = lab.content.document(number, RECEIPT_BYTES)
        await lab.backend.put(key, data)
        if await lab.backend.get(key, RECEIPT_BYTES + 1) != data:
            return False, f"{key}: get returned other bytes than were put"
        if (await lab.backend.stat(key)).size != RECEIPT_BYTES:
            return False, f"{key}: stat returned another size than was put"
        listed = [stat.key for stat in (await lab.backend.list(lab.key("checks", "seen"))).objects]
        if key not in listed:
            return False, f"{key}: missing from a list made after the put"
    return True, "by get, stat and list"


async def _replaced(lab: Lab) -> tuple[bool, str]:
    """Replace one object repeatedly, and read it meanwhile: each read returns one whole version."""
    key = lab.key("checks", "replaced")
    versions = [lab.content.document(number, RECEIPT_BYTES * (1 + number % 2)) for number in range(RACERS)]
    await lab.backend.put(key, versions[0])
    torn = 0

    async def read() -> None:
        nonlocal torn
        torn += await lab.backend.get(key, 2 * RECEIPT_BYTES + 1) not in versions

    for version in versions:
        async with open_tasks() as tasks:
            tasks.start_soon(lab.backend.put, key, version)
            tasks.start_soon(read)
            tasks.start_soon(read)
    if torn:
        return False, f"{torn} of {2 * RACERS} reads beside a put returned a mixture"
    if await lab.backend.get(key, 2 * RECEIPT_BYTES + 1) != versions[-1]:
        return False, f"{key}: does not hold the last version that was put"
    return True, f"{2 * RACERS} reads beside {RACERS} puts"


async def _gone_at_once(lab: Lab) -> tuple[bool, str]:
    """Delete, and check by every verb."""
    key = lab.key("checks", "gone")
    await lab.backend.put(key, b"soon gone")
    await lab.backend.delete([key])
    for verb, find in (("get", lambda: lab.backend.get(key, 1)), ("stat", lambda: lab.backend.stat(key))):
        try:
            await find()
        except ObjectNotFoundError:
            continue
        return False, f"{key}: {verb} still finds it"
    if key in [stat.key for stat in (await lab.backend.list(lab.key("checks"))).objects]:
        return False, f"{key}: still in a list"
    return True, "by get, stat and list"
