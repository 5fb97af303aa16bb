"""Which uploads of dead writers are aborted, and which are somebody else's, or may still be finished."""

from collections.abc import Sequence

import pytest

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.events import GarbageDeleted
from aiockpt.format.names import data_path, receipt_key, step_id
from aiockpt.pipeline.collect import DeadUploads, abort_leftovers, find_leftovers
from aiockpt.storage.backend import UnfinishedUpload
from aiockpt.storage.retry import Retrying
from tests.inline_process import Process, tiny_state
from tests.simulated.objects_client import ObjectsBackend
from tests.simulated.simulated_objects import ObjectStore
from tests.simulated.simulation import SimulatedClock, SimulatedWorld, simulated_world
from tests.simulated.virtual_time import run_virtually
from tests.watch import Watch

DAY_S = 24 * 3600.0
DEAD, BUSY = "00112233aabb", "99112233aabb"


class Place:
    """An object store in which a day passes when it is told to."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.store = ObjectStore(self.clock)
        self.backend = ObjectsBackend(self.store)

    def leave(self, *keys: str) -> None:
        for key in keys:
            self.store.start_upload(key)

    async def find(self, grace_s: float = DAY_S) -> list[str]:
        found = await find_leftovers(self.backend, grace_s=grace_s, nonce="aa", busy={BUSY})
        assert found.problem is None
        return [upload.key for upload in found.uploads]

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)


def run(place: Place, main: object) -> None:
    run_virtually(main, place.clock)  # type: ignore[arg-type]


def test_what_a_dead_save_began_is_aborted_once_it_is_old_enough() -> None:
    place = Place()
    keys = [f"{step_id(2)}/{data_path(DEAD, rank, 0)}" for rank in (0, 1)]

    async def main() -> None:
        place.leave(*keys)
        assert await place.find() == []
        place.wait(DAY_S + 1)
        assert await place.find() == keys
        done = await abort_leftovers(
            place.backend, await find_leftovers(place.backend, grace_s=DAY_S, nonce="", busy=())
        )
        assert [upload.key for upload in done.uploads] == keys
        assert not place.store.uploads

    run(place, main)


def test_what_is_not_ours_or_not_dead_is_left_alone() -> None:
    place = Place()
    others = [
        "somebody/elses.bin",
        f"{step_id(2)}/a-{DEAD}/d/notes.txt",
        f"{step_id(2)}/data.safetensors",
        f"inner/{step_id(2)}/{data_path(DEAD, 0, 0)}",
        f"{step_id(2)}/a-DEADBEEF0000/d/r00000-0000.safetensors",
        f"{step_id(2)}/{data_path(BUSY, 0, 0)}",
    ]

    async def main() -> None:
        place.leave(*others)
        place.wait(2 * DAY_S)
        assert await place.find() == []

    run(place, main)


def test_a_rank_that_voted_has_finished_and_the_others_of_its_attempt_have_not() -> None:
    place = Place()

    async def main() -> None:
        place.leave(*(f"{step_id(2)}/{data_path(DEAD, rank, 0)}" for rank in (0, 1)))
        place.store.put(receipt_key(step_id(2), DEAD, 0), b"a vote")
        place.wait(2 * DAY_S)
        assert await place.find() == [f"{step_id(2)}/{data_path(DEAD, 1, 0)}"]

    run(place, main)


class Refusing(ObjectsBackend):
    """A store whose credentials may write objects, and not everything that concerns uploads."""

    may_list = True

    async def leftover_uploads(self, prefix: str = "") -> tuple[UnfinishedUpload, ...]:
        if not self.may_list:
            raise aiockpt.StorageAccessError("s3:ListBucketMultipartUploads is not allowed")
        return await super().leftover_uploads(prefix)

    async def abort_uploads(self, uploads: Sequence[UnfinishedUpload]) -> None:
        raise aiockpt.StorageAccessError("s3:AbortMultipartUpload is not allowed")


@pytest.mark.parametrize("may_list", [True, False])
def test_missing_rights_are_told_and_fail_neither_a_prune_nor_a_save(may_list: bool) -> None:
    place = Place()
    backend = Refusing(place.store)
    backend.may_list = may_list
    drawn = simulated_world(1)
    world = SimulatedWorld(drawn.files, place.clock, drawn.token)

    async def main() -> None:
        place.leave(f"{step_id(9)}/{data_path(DEAD, 0, 0)}")
        place.wait(2 * DAY_S)
        job = Process(Retrying(backend, world=world), world, retention=aiockpt.Retention(last=1))
        assert (await job.save(1, tiny_state(1.0))).exception() is None
        pruned = await job.ckpt.prune(aiockpt.Retention())
        assert pruned.note is not None
        assert "is not allowed" in pruned.note
        assert pruned.uploads == ()

    run(place, main)


def test_retention_looks_for_them_after_a_save_and_then_each_hour() -> None:
    place = Place()
    drawn, watch = simulated_world(1), Watch()
    world = SimulatedWorld(drawn.files, place.clock, drawn.token)
    key = f"{step_id(9)}/{data_path(DEAD, 0, 0)}"

    async def main() -> None:
        job = Process(Retrying(place.backend, world=world), world, (watch,), retention=aiockpt.Retention(last=1))
        place.leave(key)
        for step, waited_s, left in ((1, 0, 1), (2, 1800, 1), (3, DAY_S, 0)):
            place.wait(waited_s)
            assert (await job.save(step, tiny_state(1.0))).exception() is None
            assert len(place.store.uploads) == left, step
        assert key in [event.key for event in watch.of(GarbageDeleted)]

    run(place, main)


async def test_a_place_whose_unfinished_files_are_files_has_none() -> None:
    assert await find_leftovers(MemoryBackend(), grace_s=0, nonce="aa", busy=()) == DeadUploads()
    retrying = Retrying(MemoryBackend())
    assert await retrying.leftover_uploads() == ()
    await retrying.abort_uploads(())
