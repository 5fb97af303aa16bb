"""Checks of the guarantees that commits rely on, made at the place itself.

The conformance suite (`aiockpt.testing.backend_suite`) checks far more of a backend; this checks one place through it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiockpt.errors import CheckpointError, ObjectExistsError, ObjectNotFoundError
from aiockpt.runtime.tasks import open_tasks
from aiockpt.tools.stress.lab import Lab
from aiockpt.tools.stress.plan import RECEIPT_BYTES
from aiockpt.tools.stress.report import StorageCheck

RACES = 5
RACERS = 16


async def check_place(lab: Lab) -> None:
    """Try each, and add the outcome to the report."""
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
    """Race for a few keys: one caller wins each, and its bytes are there."""
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
    """Replace one object again and again, and read it meanwhile: always one of the versions, whole."""
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
