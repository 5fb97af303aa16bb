"""The files of one version, shared out among the ranks of a job: rank 0 requests them, and each rank writes its own.

Request and reports are notes in the job's store (`aiockpt.runtime.notes`): no collective, and nothing on the training
thread. Guarantees:

- A version has files of other ranks only if each of these has reported its whole share. Else its draft is given up as a
  whole, and rank 0 writes the version by itself, under other names; the rank is left out for a while.
- A rank writes only while it sees the *mark* of the draft, an object that rank 0 removes when it gives the draft up: so it
  learns, too, whether both see one place. What it has written when the mark is gone, it removes.
- A rank that is late adds nothing to a version and overwrites none: the names it writes are this draft's, and its own.
- A rank that is gone is noticed as in a save; one that is silent, some time after rank 0 has written its own share.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import msgspec

from aiockpt.convert.publish import CLEAN_UP_DEADLINE_S
from aiockpt.errors import ObjectNotFoundError, RankError, RankFailedError, RankTimeoutError
from aiockpt.publish.step_weights import StepWeights
from aiockpt.publish.version_files import DeltaTooLargeError, WrittenFiles
from aiockpt.publish.versions import Draft, Versions
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.notes import StoreLostError, name_ranks
from aiockpt.session.agreed_call import POLL_OF_A_RANK_S, POLL_S
from aiockpt.storage.backend import Backend

if TYPE_CHECKING:
    from aiockpt.ranks.coordinator import RankCoordinator

logger = logging.getLogger("aiockpt")

MOST_RANKS = 64
"""That write one version: rank 0 reads a report of each, and each asks the store for requests all the time."""
PATIENCE_S, PATIENCE = 60.0, 3.0
"""How long rank 0 waits for others after its own share: so many seconds, and so many times as long as that took."""
LEFT_OUT = 16
"""Drafts for which a rank is left out after it has failed: what keeps it from writing may stay as it is."""
WATCH_S = 5.0
"""Between two looks of a rank that writes whether the mark is there."""
GOODBYE_S = 5.0
"""How long a rank whose checkpointer is closed goes on without a request: rank 0 may publish the last step now."""
_REQUEST = "publish/request"
Files = dict[int, list[int]]
"""Rank → numbers of its files."""
Own = Callable[[list[int]], Awaitable[WrittenFiles]]
"""Writes the files of these numbers."""


class ShareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's note of what to write; one without *files* is the last.

    Attributes:
        folder, hidden, token: of the draft.
        number: of the version; *is_delta*: whether it is against the version before.
        step, attempt: the save that the weights are of; *layout*: the digest of their names, dtypes and shapes.
        ranks: by whose count the weights are divided into files.
        files: rank → numbers of its files.
    """

    folder: str = ""
    hidden: str = ""
    token: str = ""
    number: int = 0
    is_delta: bool = False
    step: int = 0
    attempt: str = ""
    layout: str = ""
    ranks: int = 1
    files: Files = {}

    def draft(self, backend: Backend) -> Draft:
        """Return the draft in *backend*."""
        return Draft(backend, self.folder, self.hidden, self.token)

    def report_key(self, rank: int) -> str:
        """Return where *rank* reports."""
        return f"publish/{self.token}/{rank}"


class ShareReport(msgspec.Struct, frozen=True):
    """A rank's note of what it has written, or of why it has not."""

    written: WrittenFiles
    error: str = ""


def spread_ranks(world_size: int) -> list[int]:
    """Return the ranks that may write: spread evenly, as launchers number those of one host in a row."""
    count = min(world_size, MOST_RANKS)
    return [place * world_size // count for place in range(count)]


def deal_files(sizes: Sequence[int], ranks: Sequence[int]) -> Files:
    """Return rank → numbers of its files: the largest first, each to the rank that has the fewest bytes so far."""
    files: Files = {rank: [] for rank in ranks}
    held = dict.fromkeys(ranks, 0)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = min(held, key=held.__getitem__)
        files[rank].append(number)
        held[rank] += sizes[number]
    return {rank: numbers for rank, numbers in files.items() if numbers}


@asynccontextmanager
async def while_marked(versions: Versions, draft: Draft) -> AsyncIterator[Draft]:
    """Yield rank 0's *draft* under names of this rank's while the mark is seen; remove its files when it is not.

    Raises:
        ObjectNotFoundError: rank 0 has given up the draft, or writes to another place.
    """
    own = msgspec.structs.replace(draft, token=f"{draft.token}-{versions.world.token(6).hex()}")

    async def watch() -> None:
        while True:
            await anyio.sleep(WATCH_S)
            await draft.backend.stat(draft.mark)

    await draft.backend.stat(draft.mark)
    try:
        async with open_tasks() as tasks:
            tasks.start_soon(watch)
            yield own
            tasks.cancel_scope.cancel()
        await draft.backend.stat(draft.mark)
    except BaseException:
        with anyio.move_on_after(CLEAN_UP_DEADLINE_S, shield=True):
            try:
                await draft.backend.stat(draft.mark)  # rank 0 removes all that is there after the mark
            except ObjectNotFoundError:
                await versions.abandon(own)
        raise


class ShareRequests:
    """Rank 0's side: requests the shares of a draft, and gathers them. On the loop."""

    def __init__(self, coordinator: RankCoordinator) -> None:
        self._coordinator = coordinator
        self._board = coordinator.board
        self._left_out: dict[int, int] = {}

    def ranks(self) -> list[int]:
        """Return the ranks that may write now, this one first."""
        return [rank for rank in spread_ranks(self._board.world_size) if rank not in self._left_out]

    def deal(self, new: StepWeights) -> Files:
        """Return rank → numbers of its files, for the next draft; of no other rank where that does not pay."""
        ranks = self.ranks()
        self._left_out = {rank: count - 1 for rank, count in self._left_out.items() if count > 1}
        count = min(new.shares, len(ranks))
        sizes = [file.size for file in new.layout.files]
        return deal_files(sizes, [ranks[place * len(ranks) // count] for place in range(count)])

    async def write(
        self, draft: Draft, number: int, new: StepWeights, is_delta: bool, files: Files, own: Own
    ) -> WrittenFiles:
        """Have the *files* of each rank written; this rank's by *own*.

        Raises:
            RankError: another rank has not written its share.
            DeltaTooLargeError: more than half has changed, over all ranks.
            CheckpointError: this rank has not written its share.
        """
        request = ShareRequest(
            folder=draft.folder,
            hidden=draft.hidden,
            token=draft.token,
            number=number,
            is_delta=is_delta,
            step=new.manifest.step,
            attempt=new.manifest.attempt,
            layout=new.digest,
            ranks=new.ranks,
            files=files,
        )
        missing = {*files} - {0}
        begun_s = anyio.current_time()
        await draft.backend.put(draft.mark, b"")
        try:
            await self._board.post(_REQUEST, request)
            async with open_tasks() as tasks:
                written = WrittenFiles({}, {}, {})
                tasks.start_soon(self._gather, request, draft, missing, written)
                written.add(await own(files[0]))
                own_s = anyio.current_time() - begun_s
                tasks.cancel_scope.deadline = anyio.current_time() + PATIENCE_S + PATIENCE * own_s
            if missing:
                late = sorted(missing)
                raise RankTimeoutError(f"no files of {name_ranks(late)}, after {own_s:.0f} s for those of rank 0", late)
        except RankError as error:
            self._left_out |= dict.fromkeys({*error.ranks} - {0} or {*files} - {0}, LEFT_OUT)
            raise
        finally:
            with anyio.move_on_after(GOODBYE_S, shield=True), suppress(StoreLostError):
                await self._board.delete(map(request.report_key, files))
        if is_delta and 2 * sum(file.bytes for file in written.files.values()) > new.weight_bytes:
            raise DeltaTooLargeError("more than half has changed, over all ranks")
        await draft.backend.delete([draft.mark])
        return written

    async def _gather(self, request: ShareRequest, draft: Draft, missing: set[int], written: WrittenFiles) -> None:
        """Add what *missing* ranks report, who are missing no more then."""
        lookout = self._coordinator.make_lookout(f"version {request.number}", PATIENCE_S)
        while missing:
            ranks = sorted(missing)
            gone = await lookout.check_ranks(ranks)  # before the notes: what it posted before it went still counts
            reports = await self._board.find_all(list(map(request.report_key, ranks)), ShareReport)
            for rank, report in zip(ranks, reports, strict=True):
                if report is not None:
                    await self._check(draft, rank, report)
                    written.add(report.written)
                    missing.remove(rank)
            if gone is not None and missing:
                raise gone
            await anyio.sleep(POLL_S)

    @staticmethod
    async def _check(draft: Draft, rank: int, report: ShareReport) -> None:
        """Raise RankFailedError unless all that was reported is in the draft, as this rank sees it."""
        why = report.error
        for name, file in report.written.files.items():
            try:
                stat = await draft.backend.stat(draft.key(name))
            except ObjectNotFoundError:
                why = f"{name} is not seen here"
            else:
                why = why if stat.size == file.bytes else f"{name} has {stat.size:,} bytes here, not {file.bytes:,}"
        if why:
            raise RankFailedError(f"rank {rank} has written no files: {why}", [rank])

    async def end(self) -> None:
        """Post that nothing more is requested."""
        with suppress(StoreLostError):
            if self._board.name:
                await self._board.post(_REQUEST, ShareRequest())


class ShareWriter:
    """Another rank's side: writes what rank 0 requests, until that ends, or a while after `end`.

    Args:
        write: writes this rank's share of a request.
    """

    def __init__(self, coordinator: RankCoordinator, write: Callable[[ShareRequest], Awaitable[WrittenFiles]]) -> None:
        self._board = coordinator.board
        self._write = write
        self._until_s = math.inf
        self._pause_s = max(POLL_S, POLL_OF_A_RANK_S * coordinator.world_size)

    async def run(self) -> None:
        """Serve the requests, one after the other; end without an error when the store is lost."""
        seen: str | None = None
        with suppress(StoreLostError):
            while anyio.current_time() < self._until_s:
                # A board without a name is that of ranks which made no call yet, or which never met.
                request = await self._board.find(_REQUEST, ShareRequest) if self._board.name else None
                if request is not None and request.token != seen:
                    seen = request.token
                    if not request.files:
                        return
                    if self._board.rank in request.files:
                        await self._serve(request)
                await anyio.sleep(self._pause_s)

    async def _serve(self, request: ShareRequest) -> None:
        try:
            report = ShareReport(await self._write(request))
        except Exception as error:
            logger.info("no files of version %d are written here", request.number, exc_info=error)
            report = ShareReport(WrittenFiles({}, {}, {}), f"{type(error).__name__}: {error}")
        await self._board.post(request.report_key(self._board.rank), report)
        if self._until_s < math.inf:
            await self.end()

    async def end(self) -> None:
        """Let `run` end soon: the checkpointer is being closed."""
        self._until_s = anyio.current_time() + GOODBYE_S
