"""Exchange of blocks that several ranks want: each rank reads its parcels once, offers them, and takes the others'.

Reading, taking and placing overlap. Guarantees:

- A rank verifies each block that it reads before it offers it, and each block that it takes before it uses it. Blocks
  that were damaged in transit, or lost with the rank that reads them, it reads from storage itself.
- Where a rank cannot read, those that want what it reads raise `UnservedError`, while it raises its own error.
- Memory beyond the targets: `PARCELS_AHEAD` and `TAKEN_AT_ONCE` parcels, whatever the size of the group, and as many more as
  ranks are lost; a parcel has `PARCEL_BYTES`, or one block where that is more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from aiockpt.engine.load import LoadMemory
from aiockpt.errors import CorruptionError
from aiockpt.format.manifest import Manifest
from aiockpt.options import Options
from aiockpt.pipeline.fetch import BlockCheck, Fetcher
from aiockpt.planning.exchange import Exchange, FileSpan, SharedRange, landings_of, landings_within
from aiockpt.ranks.peers import Shelf
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking

logger = logging.getLogger("aiockpt")

PARCEL_BYTES = 4 << 20
"""Small, so that buffers are used again soon: the first use of new memory costs more than the hop to a thread."""
PARCELS_AHEAD = 4
"""Own parcels that are being read or taken: object stores need several requests in flight."""
TAKEN_AT_ONCE = 4
"""Each waits on a worker thread, of which there are few."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Parcels = Iterator[tuple[int, SharedRange]]


class UnservedError(CorruptionError):
    """Another rank could not read what this one was to receive; that rank's error gives the cause."""


class Exchanger:
    """One rank's part in one exchange. Use once, on one event loop.

    Args:
        shelf: of this trial.
        fetcher: reads this rank's parcels.
        memory: where bytes land here.
    """

    def __init__(
        self,
        shelf: Shelf,
        manifest: Manifest,
        fetcher: Fetcher,
        memory: LoadMemory,
        exchange: Exchange,
        options: Options,
    ) -> None:
        self._shelf = shelf
        self._me = shelf.ranks.index(shelf.rank)
        self._manifest = manifest
        self._fetcher = fetcher
        self._memory = memory
        self._targets = [np.frombuffer(view, np.uint8) for view in memory.views]
        self._exchange = exchange
        self._verify = options.io.verify != "none"
        self._deadline_s = options.deadlines.ranks_s
        self._placing = Limiter("place", 2)
        self._buffer_bytes = max((parcel.size_bytes for parcel in exchange.parcels), default=0)
        self._left: list[FileSpan] = []
        self._received_bytes = 0
        self._lost: dict[int, OSError] = {}

    async def run(self) -> int:
        """Read and take, then read what was damaged or did not arrive; return the bytes taken when all others are served.

        Raises:
            CheckpointError: this rank could not read its part.
            UnservedError: another one could not.
        """
        parcels = list(enumerate(self._exchange.parcels))
        mine = [(number, parcel) for number, parcel in parcels if parcel.reader == self._me]
        theirs = (
            (number, parcel) for number, parcel in parcels if self._me in parcel.takers and parcel.reader != self._me
        )
        to_read = iter(mine)
        async with open_tasks() as watches:
            for taker in {taker for _, parcel in mine for taker in self._takers(parcel)}:
                watches.start_soon(self._shelf.watch, taker)
            async with open_tasks() as tasks:
                tasks.start_soon(self._fetch_into_place, self._exchange.alone[self._me])
                for _ in range(PARCELS_AHEAD):
                    tasks.start_soon(self._read, to_read)
                async with open_tasks() as takes:
                    for _ in range(TAKEN_AT_ONCE):
                        takes.start_soon(self._take, theirs)
                self._shelf.done.resolve(None)
            watches.cancel_scope.cancel()
        if self._lost:
            lost = ", ".join(f"rank {rank} ({error})" for rank, error in sorted(self._lost.items()))
            logger.warning("the load_group lost %s; this rank read for itself what they were to send", lost)
        await self._fetch_into_place(sorted(self._left))
        return self._received_bytes

    def _takers(self, parcel: SharedRange) -> list[int]:
        """Return the other ranks that want an own parcel."""
        return [self._shelf.ranks[taker] for taker in parcel.takers if taker != self._me]

    async def _fetch_into_place(self, spans: Sequence[FileSpan]) -> None:
        for landings in landings_of(self._memory.plan.passes, spans):
            await self._fetcher.fetch(landings, self._memory.views)

    async def _read(self, parcels: Parcels) -> None:
        """Read own parcels, one after the other, each when the one before has been taken."""
        buffer = self._new_buffer()
        for number, parcel in parcels:
            data = buffer[: parcel.size_bytes]
            await self._fetch(parcel, data.data)
            await run_blocking(self._placing, self._place, parcel, data)
            if not await self._shelf.offer(number, data.data, self._takers(parcel), self._deadline_s):
                buffer = self._new_buffer()

    async def _fetch(self, parcel: SharedRange, into: memoryview) -> None:
        begin, unopened = 0, set(parcel.opens)
        async with open_tasks() as tasks:
            for span in parcel.spans:
                end = begin + span.end - span.start
                header = span.file in unopened
                unopened.discard(span.file)
                fetch = partial(self._fetcher.fetch_span, header=header)
                tasks.start_soon(fetch, span.file, span.start, into[begin:end])
                begin = end

    async def _take(self, parcels: Parcels) -> None:
        """Take parcels from their readers, one after the other; note what is to be read here after all."""
        buffer = self._new_buffer()
        for number, parcel in parcels:
            data = buffer[: parcel.size_bytes]
            if await self._receive(number, self._shelf.ranks[parcel.reader], data.data):
                self._left.extend(await run_blocking(self._placing, self._place, parcel, data))
                self._received_bytes += parcel.size_bytes
            else:
                self._left += parcel.spans

    async def _receive(self, number: int, reader: int, into: memoryview) -> bool:
        """Fill *into* with a parcel; return False if its *reader* is lost.

        Raises:
            UnservedError: it could not read it.
        """
        if reader in self._lost:
            return False
        try:
            is_served = await self._shelf.take(reader, number, into, self._deadline_s)
        except OSError as error:
            self._lost[reader] = error
            self._shelf.leave(reader)
            return False
        if not is_served:
            raise UnservedError(f"{self._manifest.id}: rank {reader} could not read its part")
        return True

    def _place(self, parcel: SharedRange, message: Bytes) -> list[FileSpan]:
        """Compare and copy the spans of a parcel; return those that are damaged. On a worker thread."""
        damaged, begin = [], 0
        for span in parcel.spans:
            data = message[begin : begin + span.end - span.start]
            begin += len(data)
            if parcel.reader != self._me and self._is_damaged(span, data):
                damaged.append(span)
                continue
            for landings in self._memory.plan.passes:
                for landing in landings_within(landings.get(span.file, ()), span):
                    target = self._targets[landing.target][landing.target_offset :][: landing.end - landing.start]
                    np.copyto(target, data[landing.start - span.start : landing.end - span.start])
        return damaged

    def _is_damaged(self, span: FileSpan, data: Bytes) -> bool:
        if not self._verify:
            return False
        check = BlockCheck(self._manifest.files[span.file], span.start)
        check(data.data)
        return bool(check.bad_blocks)

    def _new_buffer(self) -> Bytes:
        return np.empty(self._buffer_bytes, np.uint8)
