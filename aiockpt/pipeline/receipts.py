"""Manifests and receipts, read: a receipt one by one, or many at once where a group of ranks has gathered them.

Guarantees:

- A receipt is the vote. A gathered object is a copy, read because that is quicker, and used only when it is whole
  (`aiockpt.format.gathered`); one that is damaged, late or missing costs time and no checkpoint.
- Nothing is gathered before every rank of the group has voted, so a gathered object never stands for a missing vote.
- A receipt that is damaged or belongs to another attempt is no vote, and skipped.
- A reader makes a few requests at once, and none for receipts that it has.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypeVar

import anyio

from aiockpt.errors import CheckpointError, ManifestError, NewerFormatError, ObjectNotFoundError
from aiockpt.format.document import digest128
from aiockpt.format.gathered import decode_gathered, encode_gathered
from aiockpt.format.manifest import HEAD_BYTES, Head, Manifest, Receipt, decode_head, decode_manifest, decode_receipt
from aiockpt.format.names import (
    gathered_folder,
    gathered_key,
    manifest_key,
    parse_gathered,
    parse_receipt,
    receipt_folder,
    receipt_key,
)
from aiockpt.format.parts import attach, part_paths
from aiockpt.format.validate import check_manifest, check_receipt
from aiockpt.planning.groups import groups_of
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.storage.backend import Backend, Listing, Stat
from aiockpt.storage.transfer import RECORD_LIMIT_BYTES, put_once, read_record, read_start

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
READS_AT_ONCE = 32
PATIENCE_S = 5.0
"""How long a reader waits for the gathered object of a group whose receipts are complete."""


async def gather(backend: Backend, own: Receipt, group: range) -> None:
    """Write the receipts of *group*, all of whose ranks have voted, into one object.

    Without it readers read the receipts themselves, so a failure here is logged, not raised.
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
    """Return the receipts of an attempt by rank, except those of the *known* ranks."""
    wanted = await ranks_that_voted(backend, step_id, attempt) - set(known)
    found: dict[int, Receipt] = {}
    if groups_of(len(wanted)):
        gathered = await _read_gathered(backend, step_id, attempt, wanted)
        found = {rank: vote for rank, vote in gathered.items() if rank in wanted}
    return found | await _read_each(backend, step_id, attempt, wanted - found.keys())


async def any_receipt(backend: Backend, step_id: str, attempt: str) -> Receipt | None:
    """Return a receipt of an attempt; None where no valid one was found."""
    for rank in sorted(await ranks_that_voted(backend, step_id, attempt))[:READS_AT_ONCE]:
        for receipt in (await _read_each(backend, step_id, attempt, [rank])).values():
            return receipt
    return None


class ReceiptReader:
    """Collects the votes of an attempt while they are cast, one poll after the other.

    Attributes:
        votes: those found so far, by rank.
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

    async def poll(self) -> None:
        """Read new votes: in a large world gathered objects, and single receipts only of groups without one."""
        if not self._groups:
            self.votes |= await read_receipts(*self._place, known=self.votes)
            return
        self.votes |= await _read_gathered(*self._place, self.missing)
        if self.missing and anyio.current_time() >= self._count_at_s:
            self._count_at_s = anyio.current_time() + PATIENCE_S
            self.votes |= await _read_each(*self._place, await self._ungathered())

    async def poll_all(self) -> None:
        """Read every receipt that exists and was not read yet."""
        self.votes |= await read_receipts(*self._place, known=self.votes)

    async def _ungathered(self) -> set[int]:
        """Return the missing ranks of groups that have been complete long enough, and are still not gathered."""
        voted, missing = await ranks_that_voted(*self._place), self.missing
        before = self._complete
        self._complete = {group for group in self._groups if missing & set(group) and voted >= set(group)}
        return {rank for group in self._complete & before for rank in group} & missing


async def ranks_that_voted(backend: Backend, step_id: str, attempt: str) -> set[int]:
    """Return the ranks with a receipt, judged by the names of the objects alone."""
    listing = await backend.list(receipt_folder(step_id, attempt))
    ranks = (parse_receipt(stat.key.rpartition("/")[2]) for stat in _of_possible_size(listing))
    return {rank for rank in ranks if rank is not None}


def _of_possible_size(listing: Listing) -> list[Stat]:
    """Return the objects that are not too long to be ours; longer ones are not read."""
    for stat in listing.objects:
        if stat.size > RECORD_LIMIT_BYTES:
            logger.warning("%s: %d bytes are too many for a document of aiockpt; it is not read", stat.key, stat.size)
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
            logger.warning("the receipts of ranks %d–%d: read one by one, not gathered: %s", group[0], group[-1], error)
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
            # Before the task is started: thousands of items have a few tasks at once.
            await slots.acquire()
            tasks.start_soon(do, item)


# One manifest, or its head: read, and read again while it comes damaged, until it is whole or certainly is not.
#
# Guarantees:
#
# - What is returned was proven: a head by its own digest, a manifest by all of `aiockpt.format.validate`, and both by
#   agreeing with their key.
# - `ManifestError` means that this object is bad: its bytes, its device, or another object in its place. Damaged bytes are
#   read again until they are whole, or the same a second time: a network damages them differently each time.
# - `NewerFormatError` means that it is whole and of a newer version. Any other `StorageError` proves nothing about it.


READS = 12
"""The most reads of bytes that are damaged differently each time: as many as a call that fails in transit gets."""


async def read_head(backend: Backend, step_id: str, generation: int) -> Head:
    """Return the head of one manifest: from its first bytes, or from all of it where those do not prove the head.

    Raises:
        ManifestError, NewerFormatError, ObjectNotFoundError, StorageError: as the section above says.
    """
    key = manifest_key(step_id, generation)
    start = await read_start(backend, key, HEAD_BYTES)
    head = decode_head(start)
    if head is None:
        whole = start if len(start) < HEAD_BYTES else None
        return Head.of(await read_manifest(backend, step_id, generation, come=whole))
    if (head.id, head.generation) != (step_id, generation):
        claim = f"generation {head.generation} of {head.id!r}"
        raise ManifestError(f"{key}: it says that it is {claim}; was it copied here?", key=key)
    return head


async def read_manifest(backend: Backend, step_id: str, generation: int, *, come: bytes | None = None) -> Manifest:
    """Return one manifest, decoded and checked in every way that needs no other object.

    Args:
        come: its bytes, where they were read already.

    Raises:
        ManifestError, NewerFormatError, ObjectNotFoundError, StorageError: as the section above says.
    """
    key = manifest_key(step_id, generation)
    seen: set[str] = set()
    while True:
        blobs: dict[str, bytes] = {}
        try:
            blobs[key] = await read_record(backend, key) if come is None else come
            manifest = decode_manifest(blobs[key], key)
            if manifest.parts:
                manifest = await _read_parts(backend, manifest, step_id, blobs)
            check_manifest(manifest, step_id, generation)
            return manifest
        except NewerFormatError:
            raise
        except ManifestError as error:
            came = digest128(b"".join(digest128(blobs[path]).encode() for path in sorted(blobs)))
            if came in seen or len(seen) == READS - 1:
                raise
            seen.add(came)
            come = None
            logger.info("%s; it is read once more", error)


async def _read_parts(backend: Backend, manifest: Manifest, step_id: str, blobs: dict[str, bytes]) -> Manifest:
    """Return the manifest with the pieces from the blobs beside it; add these to *blobs*."""

    async def read(path: str) -> None:
        try:
            blobs[path] = await read_record(backend, f"{step_id}/{path}")
        except ObjectNotFoundError as error:
            raise ManifestError(f"{step_id}/{path} is missing, a part of its manifest", key=path) from error

    await do_all(read, part_paths(manifest))
    return await run_blocking(Limiter("parts", 1), attach, manifest, blobs)
