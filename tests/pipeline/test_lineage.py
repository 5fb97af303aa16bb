"""Where a new save stands: above what was seen and what was loaded, in the order of the calls; who else's steps are told."""

import itertools
import logging
from typing import Any

import msgspec
import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.format.manifest import Manifest, encode_manifest
from aiockpt.format.names import attempt_folder, manifest_key, step_id
from aiockpt.pipeline.commit import Attempt
from aiockpt.pipeline.discover import StepEntry, scan
from aiockpt.pipeline.lineage import LAST_CLOCK, Lineage, Position
from aiockpt.storage.backend import Backend
from tests.paper import paper_manifest, paper_receipt

MINE, THEIRS, OTHERS = "a" * 12, "b" * 12, "c" * 12


def lineage(*places: Backend, rank: int = 0) -> Lineage:
    """Return the line of saves of a process: its runs are MINE and then numbered."""
    runs = itertools.count(1)
    made = Lineage(rank, 2, lambda: f"{next(runs):012d}")
    made.places.extend(places)
    return made


async def saved(backend: Backend, step: int, run: str, sequence: int, **said: Any) -> Manifest:
    """Put a committed step there."""
    facts = {"id": step_id(step), "step": step, "run": run, "sequence": sequence, "attempt": f"{sequence:012x}"}
    manifest = paper_manifest(paper_receipt(rank, **{"parent": None, **facts, **said}) for rank in (0, 1))
    await backend.put(f"{attempt_folder(manifest.id, manifest.attempt)}/there", b"")
    await backend.put(manifest_key(manifest.id, 1), encode_manifest(manifest))
    return manifest


async def begun(line: Lineage, step: int, number: int | None = None) -> Attempt:
    """Begin the save of a step; its number is the next one unless it is given."""
    entry = StepEntry(step_id(step), step, ())
    return await line.begin_attempt(entry, "f" * 12, line.next_number() if number is None else number)


async def test_a_save_is_newer_than_what_was_loaded_from_a_place_that_is_empty_now() -> None:
    line = lineage(MemoryBackend())
    line.descend_from(await saved(MemoryBackend(), 5, THEIRS, 41))
    attempt = await begun(line, 6)
    assert (attempt.sequence, attempt.parent, attempt.ancestors) == (42, step_id(5), ((THEIRS, 41),))


async def test_what_was_loaded_later_raises_the_clock_and_what_is_older_does_not_lower_it() -> None:
    line, elsewhere = lineage(MemoryBackend()), MemoryBackend()
    assert (await begun(line, 1)).sequence == 1
    line.descend_from(await saved(elsewhere, 5, THEIRS, 41))
    assert (await begun(line, 6)).sequence == 43
    line.descend_from(await saved(elsewhere, 2, THEIRS, 7))
    assert (await begun(line, 3)).sequence == 44
    assert line.position().seen == 41


async def test_each_load_begins_a_run_and_none_is_forgotten() -> None:
    line = lineage(MemoryBackend())
    first = (await begun(line, 1)).run
    line.descend_from(await saved(MemoryBackend(), 5, THEIRS, 41))
    second = (await begun(line, 6)).run
    assert first != second
    assert {first, second} <= line.runs


async def test_saves_stand_in_the_order_of_their_calls_whichever_begins_first() -> None:
    """What was saved here meanwhile is no reason to go higher: an earlier call that begins now would overtake it."""
    place = MemoryBackend()
    line = lineage(place)
    earlier, later = line.next_number(), line.next_number()
    newest = await begun(line, 2, later)
    await saved(place, 2, newest.run, newest.sequence)
    line.see(await scan(place))
    assert (await begun(line, 1, earlier)).sequence < newest.sequence


async def test_what_others_have_saved_since_is_older_than_the_next_save() -> None:
    place = MemoryBackend()
    line = lineage(place)
    await begun(line, 1)
    await saved(place, 2, OTHERS, 500)
    line.see(await scan(place))
    assert (await begun(line, 3)).sequence > 500


async def test_the_clock_ends_where_a_manifest_can_hold_no_more() -> None:
    line = lineage(MemoryBackend())
    line.descend_from(msgspec.structs.replace(await saved(MemoryBackend(), 5, THEIRS, 41), sequence=LAST_CLOCK))
    assert (await begun(line, 6)).sequence == LAST_CLOCK


async def test_a_writer_process_stands_where_its_trainer_does() -> None:
    trainer, writer = lineage(MemoryBackend()), lineage(MemoryBackend())
    assert (await begun(writer, 1)).sequence == 1
    trainer.descend_from(await saved(MemoryBackend(), 5, THEIRS, 41))
    writer.adopt_position(trainer.position())
    attempt = await begun(writer, 6)
    assert (attempt.sequence, attempt.run, attempt.parent) == (43, trainer.position().run, step_id(5))
    writer.adopt_position(Position(MINE, None, 3))  # it saw less
    assert (await begun(writer, 7)).sequence == 44


async def test_a_save_made_before_the_first_one_here_is_told_from_those_after() -> None:
    place = MemoryBackend()
    line = lineage(place)
    assert line.is_earlier(10**6)
    await saved(place, 2, OTHERS, 500)
    attempt = await begun(line, 1)
    assert line.is_earlier(500)
    assert not line.is_earlier(attempt.sequence)


class Told:
    """What the log was told of steps of other runs."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def count(self) -> int:
        return sum("of another run" in record.getMessage() for record in self._caplog.records)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.WARNING, logger="aiockpt")
    return Told(caplog)


async def test_steps_of_another_run_are_told_once_and_by_rank_0(told: Told) -> None:
    near, far = MemoryBackend(), MemoryBackend()
    for place in (near, far):
        await saved(place, 2, OTHERS, 500)
    await begun(lineage(near, far, rank=1), 3)
    assert told.count == 0
    await begun(lineage(near, far), 3)
    assert told.count == 1


async def test_what_is_older_than_what_was_loaded_is_not_told(told: Told) -> None:
    place = MemoryBackend()
    await saved(place, 2, OTHERS, 40)
    line = lineage(place)
    line.descend_from(await saved(MemoryBackend(), 5, THEIRS, 41))
    await begun(line, 6)
    assert told.count == 0


async def test_what_was_there_when_another_was_chosen_is_not_told_and_what_came_since_is(told: Told) -> None:
    place = MemoryBackend()
    chosen = await saved(place, 1, THEIRS, 3)
    await saved(place, 2, OTHERS, 500)
    line = lineage(place)
    line.see(await scan(place))
    line.descend_from(chosen)
    await begun(line, 3)
    assert told.count == 0
    line = lineage(place)
    line.see(await scan(place))
    line.descend_from(chosen)
    await saved(place, 4, OTHERS, 501)
    await begun(line, 3)
    assert told.count == 1


@pytest.mark.parametrize("listed", [False, True])
async def test_what_goes_on_from_a_step_that_was_named_is_left_on_purpose(told: Told, listed: bool) -> None:
    """But where all that was there was looked at, what has come since is news, whatever it goes on from."""
    place = MemoryBackend()
    chosen = await saved(place, 1, THEIRS, 3)
    line = lineage(place)
    if listed:
        line.see(await scan(place))
    line.descend_from(chosen)
    await saved(place, 2, OTHERS, 500, parent=step_id(1), ancestors=((THEIRS, 3),))
    await saved(place, 3, "d" * 12, 501, parent=step_id(2), ancestors=((OTHERS, 500), (THEIRS, 3)))
    await begun(line, 4)
    assert told.count == listed
