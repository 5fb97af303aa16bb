"""Who has voted, and with what? Receipts, read one by one or many at once where a group has gathered them.

Guarantees:

- A receipt is the vote. What a group has gathered is a copy, read because it is quicker, and believed only while it is
  whole (`aiockpt.format.gathered`); one that is damaged, late or missing costs time and no checkpoint.
- Nothing is gathered before every rank of the group has voted, so a gathered object never stands for a missing vote.
- What is damaged or belongs to another attempt is no vote, and left out.
- A reader asks the storage a few things at once, and for nothing that it knows.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

import anyio

from aiockpt.errors import CheckpointError, ManifestError, ObjectNotFoundError
from aiockpt.format.gathered import decode_gathered, encode_gathered
from aiockpt.format.manifest import Receipt, decode_receipt
from aiockpt.format.names import (
    gathered_folder,
    gathered_key,
    parse_gathered,
    parse_receipt,
    receipt_folder,
    receipt_key,
)
from aiockpt.format.validate import check_receipt
from aiockpt.planning.groups import groups_of
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, Listing, Stat
from aiockpt.storage.transfer import RECORD_LIMIT_BYTES, put_once, read_record

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
READS_AT_ONCE = 32
PATIENCE_S = 5.0
"""How long the receipts of a group may be complete before its gathered object is not waited for any more."""


async def gather(backend: Backend, own: Receipt, group: range) -> None:
    """Leave the receipts of *group*, all of whose ranks have voted, in one object.

    Its want is made good by whoever reads the receipts themselves, so nothing that goes wrong here is raised.
    """
    others = set(group) - {own.rank}
    try:
        with anyio.move_on_after(PATIENCE_S):
            votes = {own.rank: own} | await _read_each(backend, own.id, own.attempt, others)
            if len(votes) == len(group):
                data = encode_gathered([votes[rank] for rank in group])
                await put_once(backend, gathered_key(own.id, own.attempt, group), data)
    except CheckpointError as error:
        logger.warning("the receipts of ranks %d–%d of %s are not gathered: %s", group[0], group[-1], own.id, error)


async def read_receipts(
    backend: Backend, step_id: str, attempt: str, known: Collection[int] = ()
) -> dict[int, Receipt]:
    """Return the receipts of an attempt by rank, but those of the ranks that are *known* already."""
    wanted = await ranks_that_voted(backend, step_id, attempt) - set(known)
    found: dict[int, Receipt] = {}
    if groups_of(len(wanted)):
        gathered = await _read_gathered(backend, step_id, attempt, wanted)
        found = {rank: vote for rank, vote in gathered.items() if rank in wanted}
    return found | await _read_each(backend, step_id, attempt, wanted - found.keys())


async def any_receipt(backend: Backend, step_id: str, attempt: str) -> Receipt | None:
    """Return a receipt of an attempt; None where there is none that counts."""
    for rank in sorted(await ranks_that_voted(backend, step_id, attempt))[:READS_AT_ONCE]:
        for receipt in (await _read_each(backend, step_id, attempt, [rank])).values():
            return receipt
    return None


class ReceiptReader:
    """Collects the votes of an attempt while they are cast, one look after the other.

    Attributes:
        votes: what was found so far, by rank.
    """

    def __init__(self, backend: Backend, step_id: str, attempt: str, world_size: int) -> None:
        self.votes: dict[int, Receipt] = {}
        self._place = (backend, step_id, attempt)
        self._world_size = world_size
        self._groups = groups_of(world_size)
        self._complete: set[range] = set()
        self._count_at_s = anyio.current_time() + PATIENCE_S

    @property
    def missing(self) -> set[int]:
        """The ranks whose votes were not found yet."""
        return set(range(self._world_size)) - self.votes.keys()

    async def look(self) -> None:
        """Read what is new: in a large world what groups have gathered, and receipts only of a group that does not."""
        if not self._groups:
            self.votes |= await read_receipts(*self._place, known=self.votes)
            return
        self.votes |= await _read_gathered(*self._place, self.missing)
        if self.missing and anyio.current_time() >= self._count_at_s:
            self._count_at_s = anyio.current_time() + PATIENCE_S
            self.votes |= await _read_each(*self._place, await self._ungathered())

    async def look_at_all(self) -> None:
        """Read every receipt that is there and was not found yet."""
        self.votes |= await read_receipts(*self._place, known=self.votes)

    async def _ungathered(self) -> set[int]:
        """Return the missing ranks of groups that were complete one patience ago, and are still not gathered."""
        voted, missing = await ranks_that_voted(*self._place), self.missing
        before = self._complete
        self._complete = {group for group in self._groups if missing & set(group) and voted >= set(group)}
        return {rank for group in self._complete & before for rank in group} & missing


async def ranks_that_voted(backend: Backend, step_id: str, attempt: str) -> set[int]:
    """Return the ranks whose receipts are there, as far as their names tell."""
    listing = await backend.list(receipt_folder(step_id, attempt))
    ranks = (parse_receipt(stat.key.rpartition("/")[2]) for stat in _of_possible_size(listing))
    return {rank for rank in ranks if rank is not None}


def _of_possible_size(listing: Listing) -> list[Stat]:
    """Return what is not too long to be of ours, which is not even read."""
    for stat in listing.objects:
        if stat.size > RECORD_LIMIT_BYTES:
            logger.warning("%s has %d bytes: it is no document of aiockpt, and not read", stat.key, stat.size)
    return [stat for stat in listing.objects if stat.size <= RECORD_LIMIT_BYTES]


async def _read_gathered(backend: Backend, step_id: str, attempt: str, wanted: set[int]) -> dict[int, Receipt]:
    """Return the receipts of every group that was gathered and has ranks that are *wanted*."""
    listing = await backend.list(gathered_folder(step_id, attempt))
    groups = (parse_gathered(stat.key.rpartition("/")[2]) for stat in _of_possible_size(listing))
    found: dict[int, Receipt] = {}
    decoding = Limiter("gathered receipts", 1)

    async def read(group: range) -> None:
        key = gathered_key(step_id, attempt, group)
        try:
            data = await read_record(backend, key)
            found.update(await run_blocking(decoding, decode_gathered, data, step_id, attempt, group))
        except (ManifestError, ObjectNotFoundError) as error:
            logger.warning("the receipts of ranks %d–%d are read one by one: %s", group[0], group[-1], error)
            found.update(await _read_each(backend, step_id, attempt, group))

    await do_all(read, [group for group in groups if group is not None and not wanted.isdisjoint(group)])
    return found


async def _read_each(backend: Backend, step_id: str, attempt: str, ranks: Iterable[int]) -> dict[int, Receipt]:
    """Return the receipts of some *ranks*, as far as they are there."""
    found: dict[int, Receipt] = {}

    async def read(rank: int) -> None:
        key = receipt_key(step_id, attempt, rank)
        try:
            receipt = decode_receipt(await read_record(backend, key), key)
            check_receipt(receipt, step_id, attempt, rank)
        except (ManifestError, ObjectNotFoundError):
            return
        found[rank] = receipt

    await do_all(read, sorted(ranks))
    return found


async def do_all(work: Callable[[T], Awaitable[object]], items: Sequence[T]) -> None:
    """Do *work* for every item, a few at once."""
    slots = anyio.Semaphore(READS_AT_ONCE)

    async def do(item: T) -> None:
        try:
            await work(item)
        finally:
            slots.release()

    async with open_tasks() as tasks:
        for item in items:
            await slots.acquire()
            tasks.start_soon(do, item)
