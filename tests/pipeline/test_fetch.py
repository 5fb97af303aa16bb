"""A bad block, or header, counts as corruption when it was read twice: a network may lie between."""

from collections.abc import Sequence
from contextlib import nullcontext

import msgspec
import pytest

import aiockpt
from aiockpt.format.document import Memo
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import step_id
from aiockpt.pipeline import fetch
from aiockpt.pipeline.discover import StepCopy
from aiockpt.pipeline.fetch import LIKELY_HEADER_BYTES, Fetcher
from aiockpt.pipeline.receipts import read_manifest
from aiockpt.storage.backend import Backend
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.inline_process import Process, local, saved_files, states_equal, tiny_state
from tests.simulated.object_troubles import Planned, PlannedTroubles
from tests.simulated.objects_client import ObjectsBackend
from tests.simulated.simulated_objects import ObjectStore
from tests.simulated.simulation import SimulatedClock, run_inline, simulated_world

DATA = "*.safetensors"
BLOCK = 4096
WIDE = aiockpt.IO(pool_bytes=1 << 16, slab_bytes=BLOCK, block_bytes=BLOCK, read_bytes=1 << 20)
"""All of a tiny data file is one read of several blocks."""

Ranges = list[tuple[int, int]]


def store_with_a_step() -> tuple[ObjectStore, str, int]:
    """Return a store that holds step 1, and the key and size of its one data file."""
    store = ObjectStore(SimulatedClock())

    async def main() -> None:
        (await Process(ObjectsBackend(store), simulated_world()).save(1, tiny_state(1))).result()

    run_inline(main)
    (key,) = (key for key in store.objects if key.endswith(".safetensors"))
    return store, key, len(store.objects[key].body)


def load(backend: Backend, io: aiockpt.IO = WIDE) -> tuple[Ranges, Exception | None]:
    """Load step 1 and look at every tensor; return the ranges read of data files, and how the load failed."""
    recording = RecordingBackend(backend)
    state = tiny_state(-1)

    async def main() -> None:
        await Process(recording, simulated_world(9), io=io).load(state, 1)

    failure: Exception | None = None
    try:
        run_inline(main)
        assert states_equal(state, tiny_state(1))
    except aiockpt.CorruptionError as error:
        failure = error
    reads = [(done.offset, done.size) for done in recording.operations if done.verb == "reader.read"]
    return reads, failure


def test_a_block_damaged_on_its_way_is_read_once_more_and_it_alone() -> None:
    store, _, size = store_with_a_step()
    whole, failure = load(ObjectsBackend(store))
    assert failure is None
    assert whole == [(0, size)]
    troubles = PlannedTroubles([Planned(trouble="wrong_body", verb="GET", match=DATA, at=len(whole))])
    reads, failure = load(ObjectsBackend(store, troubles))
    assert len(troubles.met) == 1
    assert failure is None
    assert reads == [*whole, (size // 2 // BLOCK * BLOCK, BLOCK)]


def test_a_block_damaged_in_the_store_is_corruption_after_a_second_look() -> None:
    store, key, size = store_with_a_step()
    body = bytearray(store.objects[key].body)
    body[-1] ^= 1
    store.objects[key] = msgspec.structs.replace(store.objects[key], body=bytes(body))
    reads, failure = load(ObjectsBackend(store))
    assert isinstance(failure, aiockpt.CorruptionError)
    last = (size - 1) // BLOCK * BLOCK
    assert (failure.key, failure.offset, failure.tensors) == (key, last, ("weight", "bias", "flag"))
    assert reads.count((last, size - last)) == 1


def test_a_block_damaged_on_its_way_again_and_again_is_corruption() -> None:
    store, _, _ = store_with_a_step()
    troubles = PlannedTroubles([Planned(trouble="wrong_body", verb="GET", match=DATA, at=1, times=100)])
    _, failure = load(ObjectsBackend(store, troubles))
    assert isinstance(failure, aiockpt.CorruptionError)
    assert len(troubles.met) == 2


@pytest.mark.parametrize(("likely_bytes", "at"), [(LIKELY_HEADER_BYTES, 1), (16, 1), (16, 2)])
def test_a_header_damaged_on_its_way_is_read_once_more(
    likely_bytes: int, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.pipeline.fetch.LIKELY_HEADER_BYTES", likely_bytes)
    store, _, _ = store_with_a_step()
    troubles = FaultyBackend(ObjectsBackend(store), [Fault(do="flip", verb="reader.read", match=DATA, at=at, bit=60)])
    _, failure = load(troubles, msgspec.structs.replace(WIDE, verify="none"))
    assert troubles.schedule.fired
    assert failure is None


def test_what_a_local_disk_gives_is_read_once_more_too() -> None:
    backend, _ = local(saved_files(1))
    faulty = FaultyBackend(backend, [Fault(do="flip", verb="reader.read", match=DATA, at=1, bit=9)])
    reads, failure = load(faulty)
    assert failure is None
    assert len(reads) == 2


def changed(store: ObjectStore, key: str, body: bytes) -> ObjectStore:
    """Put other bytes in the place of an object's."""
    store.objects[key] = msgspec.structs.replace(store.objects[key], body=body)
    return store


def fetcher_of(
    backend: Backend, *, verify: bool = True, others: Sequence[Backend] = (), read_bytes: int = BLOCK
) -> tuple[Fetcher, list[int]]:
    """Return a fetcher of step 1's data, and how many others there were each time that it asked for them."""
    asked: list[int] = []

    async def manifest_of(place: Backend) -> Manifest:
        return await read_manifest(place, step_id(1), 1)

    manifest = run_inline(lambda: manifest_of(backend))

    async def elsewhere() -> list[StepCopy]:
        asked.append(len(others))
        return [StepCopy(other, manifest) for other in others]

    return Fetcher(backend, manifest, read_bytes=read_bytes, verify=verify, elsewhere=elsewhere), asked


def test_a_data_file_that_is_longer_than_it_was_is_corruption() -> None:
    store, key, size = store_with_a_step()
    _, failure = load(ObjectsBackend(changed(store, key, store.objects[key].body + b"more")))
    assert isinstance(failure, aiockpt.CorruptionError)
    assert f"{size + 4} bytes in storage, {size} were saved" in str(failure)


@pytest.mark.parametrize("verify", [True, False])
def test_a_header_that_says_something_else_is_corruption_whether_or_not_blocks_are_compared(verify: bool) -> None:
    store, key, _ = store_with_a_step()
    body = store.objects[key].body
    other = body.replace(b'"bias"', b'"base"')
    assert other != body
    fetcher, _ = fetcher_of(ObjectsBackend(changed(store, key, other)), verify=verify)
    with pytest.raises(aiockpt.CorruptionError, match="it holds the header" if verify else "base"):
        run_inline(lambda: fetcher.verify_file(0))


@pytest.mark.parametrize(
    ("told", "verify"),
    [
        ("'base'", False),
        ("the payload has", False),
        ("is I32", False),
        ("is I32", True),
        ("shares the bytes", False),
        ("shares the bytes", True),
    ],
)
def test_a_header_that_agreed_before_is_compared_again_with_what_differs(told: str, verify: bool) -> None:
    store, key, size = store_with_a_step()
    fetcher, _ = fetcher_of(ObjectsBackend(store))
    run_inline(lambda: fetcher.verify_file(0))
    again, _ = fetcher_of(ObjectsBackend(store))
    body, manifest = store.objects[key].body, again._manifest
    if told == "'base'":
        changed(store, key, body.replace(b'"bias"', b'"base"'))
    elif told == "the payload has":
        changed(store, key, body + b"more")
        file = msgspec.structs.replace(manifest.files[0], size=size + 4)
        manifest = msgspec.structs.replace(manifest, files=(file,))
    else:
        bias = manifest.tensors["bias"]
        weight = msgspec.structs.replace(manifest.tensors["weight"].pieces[0], sizes=bias.shape)
        other = {"dtype": "I32"} if told == "is I32" else {"pieces": (weight,)}
        changed_bias = msgspec.structs.replace(bias, **other)
        manifest = msgspec.structs.replace(manifest, tensors={**manifest.tensors, "bias": changed_bias})
    later = Fetcher(ObjectsBackend(store), manifest, read_bytes=BLOCK, verify=verify)
    with pytest.raises(aiockpt.CorruptionError, match=told):
        run_inline(lambda: later.verify_file(0))


@pytest.mark.parametrize("bound", ["MEMO_BYTES", "MEMO_PIECES"])
def test_a_header_that_is_large_or_of_many_pieces_is_not_kept(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_agreed", Memo())
    monkeypatch.setattr(fetch, bound, 2)
    store, _, _ = store_with_a_step()
    fetcher, _ = fetcher_of(ObjectsBackend(store))
    run_inline(lambda: fetcher.verify_file(0))
    assert fetch._agreed._last == ()


def test_where_two_blocks_are_damaged_the_other_copies_are_looked_for_once() -> None:
    store, key, _ = store_with_a_step()
    body = bytearray(store.objects[key].body)
    whole, _, _ = store_with_a_step()
    whole.objects[key] = store.objects[key]
    for at in (-1, -BLOCK):
        body[at] ^= 1
    fetcher, asked = fetcher_of(ObjectsBackend(changed(store, key, bytes(body))), others=[ObjectsBackend(whole)])
    run_inline(lambda: fetcher.verify_file(0))
    assert asked == [1]


@pytest.mark.parametrize("both", [False, True], ids=["another block", "the same block"])
def test_where_each_copy_lacks_a_block_of_one_read_the_blocks_come_from_both(both: bool) -> None:
    store, key, size = store_with_a_step()
    other, _, _ = store_with_a_step()
    here, there = bytearray(store.objects[key].body), bytearray(store.objects[key].body)
    here[-1] ^= 1
    there[-1 if both else -BLOCK - 1] ^= 1
    other.objects[key] = msgspec.structs.replace(store.objects[key], body=bytes(there))
    fetcher, asked = fetcher_of(
        ObjectsBackend(changed(store, key, bytes(here))), others=[ObjectsBackend(other)], read_bytes=size + BLOCK
    )
    with pytest.raises(aiockpt.CorruptionError, match="is not what was saved") if both else nullcontext():
        run_inline(lambda: fetcher.verify_file(0))
    assert asked == [1]


def test_a_data_file_that_is_too_short_for_a_header_is_corruption() -> None:
    store, key, _ = store_with_a_step()

    async def verify() -> None:
        manifest = await read_manifest(ObjectsBackend(store), step_id(1), 1)
        stub = msgspec.structs.replace(manifest.files[0], size=4)
        manifest = msgspec.structs.replace(manifest, files=(stub,))
        changed(store, key, b"stub")
        await Fetcher(ObjectsBackend(store), manifest, read_bytes=BLOCK, verify=False).verify_file(0)

    with pytest.raises(aiockpt.CorruptionError, match="which it cannot have"):
        run_inline(verify)
