"""Exchange of blocks that several ranks want: each rank reads its parcels once, sends them, and receives the rest.

Reading, sending and placing overlap: while one round travels, the parcels of the next are read and those of the one
before are compared and put in place. Guarantees:

- A rank verifies each block that it reads before it sends it, and each block that it receives before it uses it. Blocks
  that were damaged in transit, or lost when the group broke, it reads from storage itself.
- A rank that cannot read still sends its messages, marked as invalid. So no receiver times out, the group survives a
  damaged step, and a receiver raises `UnservedError` while the reader raises its own error.
- Memory beyond the targets: `BUFFER_BYTES`, whatever the size of the group, and of blocks up to 1 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import anyio
import msgspec
import numpy as np

from aiockpt.errors import CheckpointError, CorruptionError
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.fetch import BlockCheck, Fetcher
from aiockpt.planning.exchange import Exchange, FileSpan, SharedRange, landings_of, landings_within
from aiockpt.planning.read_plan import Landing
from aiockpt.ranks.peers import Peers, PeersLostError
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking

BUFFER_BYTES = 128 << 20
MOST_PARCEL_BYTES = 4 << 20
"""Small, so that buffers are reused soon: the first use of new memory costs more than the hop to a thread."""
ROUNDS_AHEAD = 4
"""Own parcels that are being read or wait to be sent: object stores need several requests in flight."""
ROUNDS_RECEIVED = 2
"""One that is arriving, and one that is being placed."""
_VOUCHED, _WORTHLESS = 1, 0
"""Values of the byte after a parcel: its data are valid, or invalid."""


Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class UnservedError(CorruptionError):
    """Another rank could not read what this one was to receive; that rank's error gives the cause."""


def parcel_bytes(group_size: int) -> int:
    """Return the size of a parcel with which all buffers of one rank stay within BUFFER_BYTES."""
    return min(MOST_PARCEL_BYTES, BUFFER_BYTES // (ROUNDS_AHEAD + ROUNDS_RECEIVED * (group_size - 1)))


class Delivered(msgspec.Struct, frozen=True):
    """The outcome of an exchange.

    Attributes:
        received_bytes: of parcels that other ranks read.
        lost: why the group broke; None when it did not.
    """

    received_bytes: int
    lost: PeersLostError | None


class Exchanger:
    """One rank's part in one exchange. Use once, on one event loop.

    Args:
        peers: the group.
        fetcher: reads this rank's parcels; *memories* are its landing targets.
        passes: where bytes land here, all passes (`aiockpt.planning.read_plan.LoadPlan`).
        deadline_s: for one round, with the reading before it.
    """

    def __init__(
        self,
        peers: Peers,
        manifest: Manifest,
        fetcher: Fetcher,
        memories: Sequence[memoryview],
        passes: Sequence[Mapping[int, Sequence[Landing]]],
        exchange: Exchange,
        *,
        verify: bool,
        deadline_s: float,
    ) -> None:
        self._peers = peers
        self._me = peers.ranks.index(peers.rank)
        self._manifest = manifest
        self._fetcher = fetcher
        self._targets = [np.frombuffer(memory, np.uint8) for memory in memories]
        self._passes = passes
        self._rounds = exchange.rounds
        self._alone = exchange.alone[self._me]
        self._verify = verify
        self._deadline_s = deadline_s
        self._ahead = anyio.Semaphore(ROUNDS_AHEAD)
        self._receiving = anyio.Semaphore(ROUNDS_RECEIVED)
        self._placing = Limiter("place", ROUNDS_RECEIVED)
        self._may_trade = [anyio.Event() for _ in range(len(exchange.rounds) + 1)]
        self._buffer_bytes = 1 + max((parcel.size_bytes for some in exchange.rounds for parcel in some), default=0)
        self._free: list[Bytes] = []
        self._error: CheckpointError | None = None
        self._unserved_by: int | None = None
        self._due = {
            (number, parcel.reader): parcel
            for number, some in enumerate(exchange.rounds)
            for parcel in some
            if self._me in parcel.takers
        }
        self._damaged: list[FileSpan] = []
        self._received_bytes = 0

    async def run(self) -> Delivered:
        """Take part in all rounds, read what only this rank wants, then read what was damaged or did not arrive.

        Raises:
            CheckpointError: this rank could not read its part.
            UnservedError: another one could not.
        """
        lost = await self._exchange()
        if self._error is not None:
            raise self._error
        if self._unserved_by is not None:
            raise UnservedError(f"{self._manifest.id}: rank {self._unserved_by} could not read its part")
        undelivered = [span for parcel in self._due.values() for span in parcel.spans]
        await self._fetch_into_place(sorted((*self._alone, *self._damaged, *undelivered)))
        return Delivered(self._received_bytes, lost)

    async def _exchange(self) -> PeersLostError | None:
        self._may_trade[0].set()
        try:
            async with open_tasks() as tasks:
                tasks.start_soon(self._read_alone)
                for number, parcels in enumerate(self._rounds):
                    await self._ahead.acquire()
                    tasks.start_soon(self._round, number, parcels)
        except PeersLostError as error:
            return error
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._peers.hang_up(f"{type(error).__name__}: {error}")
            raise
        return None

    async def _read_alone(self) -> None:
        try:
            await self._fetch_into_place(self._alone)
        except CheckpointError as error:
            self._error = self._error or error
        self._alone = ()

    async def _fetch_into_place(self, spans: Sequence[FileSpan]) -> None:
        for landings in landings_of(self._passes, spans):
            await self._fetcher.fetch(landings)

    async def _round(self, number: int, parcels: Sequence[SharedRange]) -> None:
        mine = [parcel for parcel in parcels if parcel.reader == self._me]
        theirs = [parcel for parcel in parcels if parcel.reader != self._me and self._me in parcel.takers]
        try:
            read = [(parcel, await self._read(parcel)) for parcel in mine]
            # The same order on all ranks, as the group does one trade at a time: two ranks in different rounds would
            # wait for each other's messages.
            await self._may_trade[number].wait()
            # Only in its turn: later rounds in these places would keep the one before them from trading.
            async with self._receiving:
                received = [(parcel, self._borrow(parcel)) for parcel in theirs]
                await self._trade(number, read, received)
                self._may_trade[number + 1].set()
                for parcel, message in (*read, *received):
                    await self._resolve(number, parcel, message)
        finally:
            self._ahead.release()

    async def _read(self, parcel: SharedRange) -> Bytes:
        """Read an own parcel, and return its message. An error is kept until the end: receivers still get a message."""
        message = self._borrow(parcel)
        if self._error is None:
            try:
                await self._fetch(parcel, message.data)
            except CheckpointError as error:
                self._error = self._error or error
        message[-1] = _VOUCHED if self._error is None else _WORTHLESS
        return message

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

    async def _trade(
        self, number: int, read: Sequence[tuple[SharedRange, Bytes]], received: Sequence[tuple[SharedRange, Bytes]]
    ) -> None:
        ranks = self._peers.ranks
        sends = [(ranks[to], message) for parcel, message in read for to in parcel.takers if to != self._me]
        receives = [(ranks[parcel.reader], message) for parcel, message in received]
        if sends or receives:
            await self._peers.trade(sends, receives, number, self._deadline_s)

    async def _resolve(self, number: int, parcel: SharedRange, message: Bytes) -> None:
        """Place an arrived parcel, or note what is wrong with it; then free its buffer."""
        if message[-1] != _VOUCHED:
            self._unserved_by = self._peers.ranks[parcel.reader]
        else:
            self._damaged += await run_blocking(self._placing, self._place, parcel, message)
            if parcel.reader != self._me:
                self._received_bytes += parcel.size_bytes
        del self._due[number, parcel.reader]
        assert message.base is not None
        self._free.append(message.base)

    def _place(self, parcel: SharedRange, message: Bytes) -> list[FileSpan]:
        """Compare and copy the spans of a parcel; return those that are damaged. On a worker thread."""
        damaged, begin = [], 0
        for span in parcel.spans:
            data = message[begin : begin + span.end - span.start]
            begin += len(data)
            if parcel.reader != self._me and self._is_damaged(span, data):
                damaged.append(span)
                continue
            for landings in self._passes:
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

    def _borrow(self, parcel: SharedRange) -> Bytes:
        """Return a buffer for a parcel and the byte after it. Buffers are reused: new pages cost more than a copy."""
        whole = self._free.pop() if self._free else np.empty(self._buffer_bytes, np.uint8)
        return whole[: parcel.size_bytes + 1]
