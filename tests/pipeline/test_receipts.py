"""Votes of a large world, gathered by groups that die, lie or are late: none is lost, none is made up."""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import CommitTimeoutError, StorageError
from aiockpt.format.document import ALGORITHM, BLOCK_BYTES
from aiockpt.format.gathered import encode_gathered
from aiockpt.format.manifest import FileEntry, Piece, Receipt, TensorEntry
from aiockpt.format.names import data_path, gathered_key, receipt_key
from aiockpt.pipeline.commit import Attempt, cast_vote, wait_votes
from aiockpt.pipeline.discover import list_step, read_receipts, votes_to_finish
from aiockpt.pipeline.receipts import PATIENCE_S, gather
from aiockpt.planning import groups
from aiockpt.planning.groups import groups_of
from tests.paper import paper_receipt
from tests.simulated.virtual_time import run_virtually

ATTEMPT = "3f9c21d07b44"
STEP_ID = "step-00000007"
RANKS = 10
DEADLINE_S = 600.0
LOOK_EVERY_S = 2.0


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ten ranks be many: groups of four."""
    monkeypatch.setattr(groups, "GATHER_ABOVE", 4)
    monkeypatch.setattr(groups, "MIN_GROUP", 4)


def receipt(rank: int) -> Receipt:
    path = data_path(ATTEMPT, rank, 0)
    return paper_receipt(
        rank,
        id=STEP_ID,
        step=7,
        parent=None,
        world_size=RANKS,
        scalars_digest="same",
        files=(FileEntry.of(path, size=4096 + 8, rank=rank, algo=ALGORITHM, block=BLOCK_BYTES, sums=bytes(8)),),
        tensors={"w": TensorEntry("F32", (RANKS, 2), (Piece(0, 4096, 4104, (rank, 0), (1, 2)),))},
        state={"step": 7},
    )


class Asked(MemoryBackend):
    """Remembers which objects were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    async def get(self, key: str, max_bytes: int) -> bytes:
        self.read.append(key.rpartition("/")[2])
        return await super().get(key, max_bytes)


async def cast(backend: MemoryBackend, ranks: Iterable[int] = range(RANKS)) -> None:
    for rank in ranks:
        await cast_vote(backend, receipt(rank))


async def gather_all(backend: MemoryBackend, but: Iterable[int] = ()) -> None:
    for number, group in enumerate(groups_of(RANKS)):
        if number not in set(but):
            await gather(backend, receipt(group[-1]), group)


def gathered(*, but: Iterable[int] = (), silent: Iterable[int] = ()) -> Asked:
    """Return a place where all but the *silent* ranks have voted, and all groups but *but* are gathered."""
    backend = Asked()

    async def main() -> None:
        await cast(backend, set(range(RANKS)) - set(silent))
        await gather_all(backend, but)

    run_virtually(main)
    backend.read.clear()
    return backend


def waited(
    backend: MemoryBackend, meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> tuple[list[Receipt], float]:
    """Wait for all votes as rank 0 does; return them and the seconds that took."""
    attempt = Attempt(STEP_ID, 7, ATTEMPT, 1, 1, "c0ffee00c0de", None, 0, RANKS)

    async def main() -> tuple[list[Receipt], float]:
        found, seconds = list[Receipt](), 0.0
        async with anyio.create_task_group() as tasks:
            if meanwhile is not None:
                tasks.start_soon(meanwhile)
            found = await wait_votes(backend, attempt, receipt(0), DEADLINE_S, lambda: anyio.sleep(LOOK_EVERY_S))
            seconds = anyio.current_time()
        return found, seconds

    try:
        return run_virtually(main)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


ALL = [receipt(rank) for rank in range(RANKS)]
BUT_ONE_GROUP = ["r00000-r00003.jsonl", "r00008-r00009.jsonl", *(f"r{rank:05d}.json" for rank in range(4, 8))]


def test_gathered_votes_are_all_that_is_read() -> None:
    backend = gathered()
    assert waited(backend) == (ALL, LOOK_EVERY_S)
    assert backend.read == ["r00000-r00003.jsonl", "r00004-r00007.jsonl", "r00008-r00009.jsonl"]


def test_whoever_gathers_reads_its_group_only() -> None:
    backend = Asked()

    async def prepare() -> None:
        await cast(backend)
        await gather(backend, receipt(6), groups_of(RANKS)[1])

    run_virtually(prepare)
    assert backend.read == ["r00004.json", "r00005.json", "r00007.json"]


def test_a_group_whose_gatherer_died_is_read_receipt_by_receipt_after_a_patience() -> None:
    backend = gathered(but=[1])
    found, seconds = waited(backend)
    assert found == ALL
    assert PATIENCE_S <= seconds <= 2 * (PATIENCE_S + LOOK_EVERY_S + 0.2)
    assert backend.read == BUT_ONE_GROUP


def test_a_gatherer_that_is_late_is_not_waited_for_and_does_no_harm() -> None:
    backend = MemoryBackend()

    async def late() -> None:
        await cast(backend)
        await gather_all(backend, but=[2])
        await anyio.sleep(5 * PATIENCE_S)
        await gather_all(backend, but=[0, 1])

    found, seconds = waited(backend, late)
    assert found == ALL
    assert seconds < 5 * PATIENCE_S
    assert run_virtually(lambda: read_receipts(backend, STEP_ID, ATTEMPT)) == dict(enumerate(ALL))


@pytest.mark.parametrize("damage", ["torn", "flipped", "of other votes", "short of a vote"])
def test_what_was_gathered_badly_is_no_vote_and_costs_no_patience(damage: str) -> None:
    backend = MemoryBackend()
    group = groups_of(RANKS)[1]
    good = encode_gathered([receipt(rank) for rank in group])
    bad = {
        "torn": good[:-5],
        "flipped": good[:100] + bytes([good[100] ^ 1]) + good[101:],
        "of other votes": encode_gathered([receipt(rank) for rank in groups_of(RANKS)[0]]),
        "short of a vote": encode_gathered([receipt(rank) for rank in group[:-1]]),
    }[damage]

    async def prepare() -> None:
        await cast(backend)
        await backend.put_new(gathered_key(STEP_ID, ATTEMPT, group), bad)
        await gather_all(backend, but=[1])

    run_virtually(prepare)
    assert waited(backend) == (ALL, LOOK_EVERY_S)


def test_without_any_gathering_the_receipts_are_found() -> None:
    backend = MemoryBackend()
    run_virtually(lambda: cast(backend))
    found, seconds = waited(backend)
    assert found == ALL
    assert seconds < DEADLINE_S / 10


def test_ranks_that_never_vote_are_named_and_nobody_gathers_for_them() -> None:
    backend = gathered(silent=[5])
    with pytest.raises(CommitTimeoutError, match="no receipt from rank 5 ") as caught:
        waited(backend)
    assert caught.value.missing_ranks == (5,)
    listing = run_virtually(lambda: backend.list(f"{STEP_ID}/a-{ATTEMPT}/g"))
    assert [stat.key.rpartition("/")[2] for stat in listing.objects] == ["r00000-r00003.jsonl", "r00008-r00009.jsonl"]


def test_a_vote_that_seems_likely_and_does_not_come_is_not_asked_for_without_a_pause() -> None:
    backend, looks = Asked(), 0

    async def likely() -> None:
        nonlocal looks
        looks += 1
        await anyio.lowlevel.checkpoint()

    attempt = Attempt(STEP_ID, 7, ATTEMPT, 1, 1, "c0ffee00c0de", None, 0, RANKS)
    with pytest.raises(CommitTimeoutError):
        run_virtually(lambda: wait_votes(backend, attempt, receipt(0), 10, likely))
    assert looks <= 60


def test_a_vote_that_comes_late_is_found_with_those_of_its_group() -> None:
    backend = MemoryBackend()

    async def late() -> None:
        await cast(backend, set(range(RANKS)) - {9})
        await gather_all(backend, but=[2])
        await anyio.sleep(100)
        await cast(backend, [9])
        await gather_all(backend, but=[0, 1])

    found, seconds = waited(backend, late)
    assert found == ALL
    assert 100 <= seconds <= 100 + 2 * LOOK_EVERY_S


def test_a_damaged_receipt_is_not_gathered() -> None:
    backend = MemoryBackend()

    async def main() -> None:
        await cast(backend, set(range(RANKS)) - {5})
        await backend.put_new(receipt_key(STEP_ID, ATTEMPT, 5), b"{}\n")
        await gather_all(backend)
        assert set(await read_receipts(backend, STEP_ID, ATTEMPT)) == set(range(RANKS)) - {5}
        assert not [stat for stat in (await backend.list(f"{STEP_ID}/a-{ATTEMPT}/g")).objects if "r00004" in stat.key]

    run_virtually(main)


def test_a_vote_that_was_withdrawn_is_not_counted_because_it_was_gathered() -> None:
    backend = gathered()

    async def main() -> None:
        entry = await list_step(backend, STEP_ID)
        assert await votes_to_finish(backend, entry, ATTEMPT) == ALL
        await backend.delete([receipt_key(STEP_ID, ATTEMPT, 5)])
        assert await votes_to_finish(backend, entry, ATTEMPT) is None
        assert set(await read_receipts(backend, STEP_ID, ATTEMPT)) == set(range(RANKS)) - {5}

    run_virtually(main)


def test_rolling_forward_reads_what_was_gathered() -> None:
    backend = gathered(but=[1])

    async def main() -> None:
        assert await votes_to_finish(backend, await list_step(backend, STEP_ID), ATTEMPT) == ALL

    run_virtually(main)
    assert backend.read == BUT_ONE_GROUP


def test_what_is_known_is_not_read_again() -> None:
    backend = Asked()

    async def main() -> None:
        await cast(backend)
        backend.read.clear()
        assert set(await read_receipts(backend, STEP_ID, ATTEMPT, known=range(1, RANKS))) == {0}

    run_virtually(main)
    assert backend.read == ["r00000.json"]


def test_gathering_that_fails_is_told_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryBackend):
        async def put_new(self, key: str, data: bytes) -> None:
            if "/g/" in key:
                raise StorageError("the disk is full", key=key)
            await super().put_new(key, data)

    async def main() -> None:
        backend = Full()
        await cast(backend)
        await gather_all(backend)

    run_virtually(main)
    assert "ranks 0–3 of step-00000007 are not gathered: the disk is full" in caplog.text


def test_gathering_from_a_storage_that_hangs_is_given_up() -> None:
    class Hanging(MemoryBackend):
        async def get(self, key: str, max_bytes: int) -> bytes:
            await anyio.sleep_forever()
            return b""

    async def main() -> float:
        backend = Hanging()
        await cast(backend)
        await gather(backend, receipt(0), groups_of(RANKS)[0])
        return anyio.current_time()

    assert run_virtually(main) == PATIENCE_S
