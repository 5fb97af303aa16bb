"""What a look at one step believes: each manifest and each vote that is bad, gone, too new or not to be had."""

import uuid

import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import ManifestError, NewerFormatError, ObjectNotFoundError, StorageError
from aiockpt.format.manifest import encode_manifest, encode_receipt
from aiockpt.format.names import attempt_folder, manifest_key, receipt_key
from aiockpt.pipeline.discover import (
    Heads,
    PassedOver,
    StepEntry,
    fall_back,
    find_copy,
    is_news,
    list_step,
    newest_manifest,
    newest_vote,
    scan,
    votes_to_finish,
)
from aiockpt.storage.transfer import delete_below
from tests.gates import Around
from tests.paper import paper_receipt
from tests.pipeline.generations import FIRST, SECOND, STEP, made, refusing, refusing_key, saved_twice


def told_of(entry: StepEntry) -> tuple[int, list[int]]:
    """Return the generation that counts, 0 for none, and those that were passed over."""
    return entry.head.generation if entry.head else 0, [passed.generation for passed in entry.passed]


async def test_a_manifest_that_is_rewritten_is_read_again() -> None:
    backend, heads = await saved_twice(), Heads()
    assert told_of((await scan(backend, heads))[0]) == (2, [])
    await backend.put(manifest_key(STEP, 2), b"nothing like it")
    assert told_of((await scan(backend, heads))[0]) == (1, [2])


async def test_what_was_bad_is_read_again() -> None:
    """Another copy of the manifest may have come within the second of its date."""
    backend, heads, is_bad = await saved_twice(), Heads(), True

    async def before(verb: str, key: str) -> None:
        if is_bad and (verb, key) == ("get", manifest_key(STEP, 2)):
            raise ManifestError("it is damaged", key=key)

    place = Around(backend, before=before)
    assert told_of((await scan(place, heads))[0]) == (1, [2])
    is_bad = False
    assert told_of((await scan(place, heads))[0]) == (2, [])


async def test_what_is_known_of_a_step_that_is_gone_is_forgotten() -> None:
    backend, heads = await saved_twice(), Heads()
    (entry,) = await scan(backend, heads)
    stat = await backend.stat(manifest_key(STEP, 2))
    assert heads.recall(entry, stat) == entry.head
    await delete_below(backend, STEP)
    assert await scan(backend, heads) == []
    assert heads.recall(entry, stat) is None


def test_the_same_news_of_a_place_are_told_once_for_a_process() -> None:
    one, other = (MemoryBackend(f"news-{uuid.uuid4()}") for _ in range(2))
    told = [(one, "a"), (one, "b"), (one, "a"), (MemoryBackend(one.url.removeprefix("memory://")), "b"), (other, "a")]
    assert [is_news(*each) for each in told] == [True, True, False, False, True]


async def test_a_generation_that_is_being_deleted_is_not_told_as_damaged() -> None:
    backend, listings = await saved_twice(), 0

    async def after(verb: str, key: str) -> None:
        nonlocal listings
        listings += (verb, key) == ("list", STEP)
        if (verb, key, listings) == ("get", manifest_key(STEP, 2), 1):
            await backend.delete([manifest_key(STEP, 2)])

    await delete_below(backend, attempt_folder(STEP, SECOND))  # as of a deletion that is under way
    assert told_of(await list_step(Around(backend, after=after), STEP)) == (1, [])


async def test_a_step_is_listed_once_and_a_damaged_one_twice() -> None:
    backend = await saved_twice()
    listings: list[str] = []

    async def before(verb: str, key: str) -> None:
        listings.extend([key] if verb == "list" else [])

    await list_step(Around(backend, before=before), STEP)
    assert listings == [STEP]
    await backend.put(manifest_key(STEP, 2), b"nothing like it")
    await list_step(Around(backend, before=before), STEP)
    assert listings == [STEP] * 3


async def test_a_manifest_that_goes_after_it_was_listed_is_no_generation() -> None:
    gone = refusing(await saved_twice(), 2, ObjectNotFoundError("gone", key=manifest_key(STEP, 2)))
    entry = await list_step(gone, STEP)
    assert (told_of(entry), entry.generations, entry.trouble) == ((1, []), (1,), None)


async def test_of_a_step_that_does_not_say_no_older_generation_is_taken() -> None:
    away = StorageError("the store is away", key=STEP)
    entry = await list_step(refusing(await saved_twice(), 2, away), STEP)
    assert (entry.head, entry.trouble) == (None, away)
    with pytest.raises(StorageError, match="is away"):
        await newest_manifest(MemoryBackend(), entry)


async def test_an_outage_of_the_generation_below_a_bad_one_is_raised() -> None:
    backend = await saved_twice()
    entry = await list_step(backend, STEP)
    await backend.put(manifest_key(STEP, 2), b"nothing like it")
    away = StorageError("the store is away", key=STEP)
    with pytest.raises(StorageError, match="is away"):
        await newest_manifest(refusing(backend, 1, away), entry)


async def test_where_a_newer_program_has_written_no_older_generation_is_taken() -> None:
    backend = await saved_twice()
    entry = await list_step(backend, STEP)
    with pytest.raises(NewerFormatError):
        await newest_manifest(refusing(backend, 2, NewerFormatError("of tomorrow", key=STEP)), entry)


async def test_the_reason_is_that_of_the_highest_generation() -> None:
    backend = await saved_twice()
    entry = await list_step(backend, STEP)
    for generation in (1, 2):
        await backend.put(manifest_key(STEP, generation), b"nothing like it")
    with pytest.raises(ManifestError, match="MANIFEST-2"):
        await newest_manifest(backend, entry)
    for generation, attempt in ((1, FIRST), (2, SECOND)):
        flipped = bytearray(encode_manifest(made(generation, attempt)))
        flipped[-20] ^= 1  # in the seal: the head says still how new it is
        await backend.put(manifest_key(STEP, generation), bytes(flipped))
    with pytest.raises(ManifestError, match="MANIFEST-2"):
        await newest_manifest(backend, entry)
    passed = StepEntry(STEP, 1, (), passed=(PassedOver(2, "the first"), PassedOver(1, "the second")))
    with pytest.raises(ManifestError, match="the first"):
        await newest_manifest(backend, passed)
    with pytest.raises(ManifestError, match="never committed"):
        await newest_manifest(backend, StepEntry(STEP, 1, ()))


async def test_falling_back_leaves_the_generation_that_counted_and_all_above() -> None:
    backend = await saved_twice()
    lower = await fall_back(backend, await list_step(backend, STEP))
    assert (told_of(lower), lower.generations) == ((1, []), (1,))


@pytest.mark.parametrize("error", [ManifestError("bad", key=STEP), ObjectNotFoundError("gone", key=STEP)])
async def test_a_copy_is_found_by_its_attempt_and_past_a_generation_that_cannot_be_read(error: Exception) -> None:
    backend = await saved_twice()
    assert await find_copy(backend, STEP, FIRST) == made(1, FIRST)
    assert await find_copy(refusing(backend, 2, error), STEP, FIRST) == made(1, FIRST)
    assert await find_copy(refusing(backend, 2, error, reads=1), STEP, FIRST) == made(1, FIRST)  # gone since the look
    assert await find_copy(backend, STEP, "3" * 12) is None


async def test_a_copy_whose_data_are_gone_is_none() -> None:
    backend = await saved_twice()
    await delete_below(backend, attempt_folder(STEP, FIRST))
    assert await find_copy(backend, STEP, FIRST) is None


async def voted(backend: MemoryBackend, attempt: str, ranks: int, generation: int, sequence: int = 9) -> None:
    """Leave the votes of the first *ranks* of two."""
    for rank in range(ranks):
        said = {"step": 1, "id": STEP, "generation": generation, "attempt": attempt, "sequence": sequence}
        await backend.put(receipt_key(STEP, attempt, rank), encode_receipt(paper_receipt(rank, **said)))


@pytest.mark.parametrize(
    ("ranks", "generation", "finished"), [(2, 3, True), (1, 3, False), (0, 3, False), (2, 2, False)]
)
async def test_votes_are_finished_when_all_are_there_and_nobody_was_faster(
    ranks: int, generation: int, finished: bool
) -> None:
    backend = await saved_twice()
    attempt = "4" * 12
    await backend.put(f"{attempt_folder(STEP, attempt)}/there", b"")
    await voted(backend, attempt, ranks, generation)
    votes = await votes_to_finish(backend, await list_step(backend, STEP), attempt)
    assert (votes is not None) == finished
    assert votes is None or [vote.rank for vote in votes] == [0, 1]


async def test_the_newest_vote_is_of_what_is_not_committed() -> None:
    backend = await saved_twice()
    await voted(backend, SECOND, 2, 2, sequence=99)  # of the generation that counts
    entry = await list_step(backend, STEP)
    assert await newest_vote(backend, entry) == 0
    await voted(backend, "4" * 12, 1, 3, sequence=42)
    await backend.put(receipt_key(STEP, "5" * 12, 0), b"nothing like a vote")
    await voted(backend, "6" * 12, 1, 3, sequence=77)
    away = refusing_key(backend, receipt_key(STEP, "6" * 12, 0), StorageError("the store is away", key=STEP))
    assert await newest_vote(away, await list_step(backend, STEP)) == 42
