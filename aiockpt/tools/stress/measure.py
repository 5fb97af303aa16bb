"""One run from start to end: a scratch folder, checks, data files, small objects, the soak, and cleaning.

Guarantees:

- No key outside the scratch folder is touched; its name was never used before.
- A place that cannot be cleaned is refused before anything large is written.
- The folder is emptied however the run ends, and listed to verify that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio

from aiockpt.errors import CheckpointError, ObjectExistsError, ObjectNotFoundError, StorageError, UsageError
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import walk
from aiockpt.tools.stress.files import measure_files, measure_objects
from aiockpt.tools.stress.lab import Lab, Payload
from aiockpt.tools.stress.plan import BLOCK_BYTES, RECEIPT_BYTES, StressPlan
from aiockpt.tools.stress.report import StorageCheck, StressReport
from aiockpt.tools.stress.soak import soak

_ROOM = 1.1
"""Files occupy a little more than their bytes."""
CLEANING_DEADLINE_S = 300.0
_SHOWN = 300
RACES = 5
RACERS = 16


async def measure(
    backend: Backend,
    plan: StressPlan,
    *,
    world: World | None = None,
    watch: Callable[[str], object] = lambda _: None,
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
        content = Payload(plan.seed, BLOCK_BYTES)
        lab = Lab(
            backend=backend, prefix=prefix, plan=plan, clock=world.clock, content=content, report=report, watch=watch
        )
        for part in (check_place, measure_files, measure_objects):
            await part(lab)
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
            await backend.delete([f"{folder}/-" for folder in reversed(folders)])  # removes the empty folders
            return ""
    except CheckpointError as error:
        return _short(error)
    return "; ".join([*problems, f"{len(left)} objects are left, such as {left[0]}"])


def _short(error: CheckpointError) -> str:
    """Return the message of *error*, which may name a thousand keys, cut in its middle."""
    text = str(error)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


async def check_place(lab: Lab) -> None:
    """Check, at the place itself, the guarantees that commits rely on, and add each outcome to the report.

    The conformance suite (`aiockpt.testing.backend_suite`) checks far more of a backend.
    """
    lab.watch("what commits rely on")
    # The names are in the JSON of the report: they stay as they are.
    checks: dict[str, Callable[[Lab], Awaitable[str]]] = {
        "one of rival creates wins": _one_winner,
        "what was written is seen at once": _seen_at_once,
        "what was replaced is seen whole": _replaced,
        "what was deleted is gone at once": _gone_at_once,
    }
    for name, check in checks.items():
        try:
            lab.report.checks.append(StorageCheck(name, True, await check(lab)))
        except CheckpointError as error:
            lab.report.checks.append(StorageCheck(name, False, str(error)))
            lab.report.problems.append(f"{name}: failed. {error}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise StorageError(otherwise)


async def _one_winner(lab: Lab) -> str:
    """Race for a few keys: one caller wins each, and the object has its bytes."""
    for race in range(RACES):
        key = lab.key("checks", f"race-{race}")
        winners: list[int] = []

        async def create(racer: int, key: str = key, winners: list[int] = winners) -> None:
            with suppress(ObjectExistsError):
                await lab.backend.put_new(key, lab.content.document(racer, RECEIPT_BYTES))
                winners.append(racer)

        async with open_tasks() as tasks:
            for racer in range(RACERS):
                tasks.start_soon(create, racer)
        many = f"{len(winners)} of {RACERS} concurrent creates of {key} succeeded: two jobs could commit a step"
        _require(len(winners) == 1, many)
        found = await lab.backend.get(key, RECEIPT_BYTES + 1)
        own = found == lab.content.document(winners[0], RECEIPT_BYTES)
        _require(own, f"{key} does not hold the bytes of the create that succeeded")
    return f"{RACES} races of {RACERS}"


async def _seen_at_once(lab: Lab) -> str:
    """Put, and read back by every verb."""
    for number in range(RACES):
        key = lab.key("checks", "seen", f"{number}")
        data = lab.content.document(number, RECEIPT_BYTES)
        await lab.backend.put(key, data)
        found, size = await lab.backend.get(key, RECEIPT_BYTES + 1), (await lab.backend.stat(key)).size
        _require(found == data, f"{key}: get returned other bytes than were put")
        _require(size == RECEIPT_BYTES, f"{key}: stat returned another size than was put")
        listed = [stat.key for stat in (await lab.backend.list(lab.key("checks", "seen"))).objects]
        _require(key in listed, f"{key}: missing from a list made after the put")
    return "by get, stat and list"


async def _replaced(lab: Lab) -> str:
    """Replace one object repeatedly, and read it meanwhile: each read returns one whole version."""
    key = lab.key("checks", "replaced")
    versions = [lab.content.document(number, RECEIPT_BYTES * (1 + number % 2)) for number in range(RACERS)]
    await lab.backend.put(key, versions[0])
    found: list[bytes] = []

    async def read() -> None:
        found.append(await lab.backend.get(key, 2 * RECEIPT_BYTES + 1))

    for version in versions:
        async with open_tasks() as tasks:
            tasks.start_soon(lab.backend.put, key, version)
            tasks.start_soon(read)
            tasks.start_soon(read)
    torn = sum(data not in versions for data in found)
    _require(not torn, f"{torn} of {2 * RACERS} reads beside a put returned a mixture")
    await read()
    _require(found[-1] == versions[-1], f"{key}: does not hold the last version that was put")
    return f"{2 * RACERS} reads beside {RACERS} puts"


async def _gone_at_once(lab: Lab) -> str:
    """Delete, and check by every verb."""
    key = lab.key("checks", "gone")
    await lab.backend.put(key, b"soon gone")
    await lab.backend.delete([key])
    for verb, find in (("get", lambda: lab.backend.get(key, 1)), ("stat", lambda: lab.backend.stat(key))):
        try:
            await find()
        except ObjectNotFoundError:
            continue
        raise StorageError(f"{key}: {verb} still finds it")
    listed = [stat.key for stat in (await lab.backend.list(lab.key("checks"))).objects]
    _require(key not in listed, f"{key}: still in a list")
    return "by get, stat and list"
