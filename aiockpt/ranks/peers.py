"""The ranks that read each block once together: each offers what it has read, and takes from the others what they offer.

The process group that the user gives names the ranks; bytes go over plain TCP (`aiockpt.runtime.peer_link`), connected anew
for each trial of a load. Guarantees:

- A rank that dies, fails or is done keeps no other waiting: those that watch it learn it at once. One that is silent is
  lost after `aiockpt.runtime.peer_link.SILENCE_S`, or at the deadline.
- A rank that cannot read says so to those that ask it; a rank that is lost costs the others its parcels alone.
- A question waits at most `HELD_S`: a load that is cancelled ends soon, and a slow storage is not taken for a lost rank.
- Memory is used again only when each taker has taken all of it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import anyio
import msgspec
from torch import distributed

from aiockpt.errors import UsageError
from aiockpt.format.document import described
from aiockpt.runtime.peer_link import Network, RangeReply, TcpNetwork, find_address
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.world import Ranks

HELD_S = 2.0
"""How long a question for a parcel that is not read yet waits for it, before the asker asks again."""
_THE_END = -1
_HERE, _NOT_YET, _NEVER = b"here", b"not yet", b"never"


class RangeCall(msgspec.Struct, frozen=True, array_like=True):
    """A question of *rank*: for a parcel, by number; or `_THE_END`, for when the asked rank takes no more."""

    rank: int
    parcel: int


class Offer:
    """A parcel that other ranks take.

    Attributes:
        data: its bytes, once they are read.
        takers: the ranks that have not taken it; *released* when all have.
        is_missed: whether one of them is gone: the bytes may still be on their way to it.
    """

    def __init__(self) -> None:
        self.data: Promise[memoryview] = Promise("a parcel that this rank reads")
        self.released: Promise[None] = Promise("a parcel that other ranks take")
        self.takers: set[int] = set()
        self.is_missed = False

    def drop(self, rank: int) -> None:
        """Expect *rank* no more. Any thread."""
        self.takers.discard(rank)
        if not self.takers:
            self.released.resolve(None)

    def miss(self, rank: int) -> None:
        """Expect *rank* no more, which is gone, if it was to take it."""
        if rank in self.takers:
            self.is_missed = True
            self.drop(rank)


class Shelf:
    """What this rank offers to its peers in one trial of a load, and its way to what they offer. On one event loop.

    Attributes:
        ranks: of the job, in the group's order; *rank* is this one.
        address: where this rank answers; *addresses* are those of all, once they are known.
        done: this rank takes no more.
    """

    def __init__(self, ranks: Sequence[int], rank: int, network: Network) -> None:
        self.ranks, self.rank = ranks, rank
        self.done: Promise[None] = Promise("all that this rank takes from others")
        self._network = network
        self._offers: dict[int, Offer] = {}
        self._gone: set[int] = set()
        self._has_failed = False
        self.addresses: Sequence[str] = ()
        self.address = network.announce(lambda: nullcontext(self._answer))

    async def offer(self, parcel: int, data: memoryview, takers: Iterable[int], deadline_s: float) -> bool:
        """Offer a parcel until all *takers* have taken it, or are gone; at the deadline, the rest are.

        Returns:
            Whether all have taken it, so that its memory may be used again.
        """
        offer = self._find(parcel)
        offer.takers.update(takers)
        for rank in self._gone:
            offer.miss(rank)
        offer.data.resolve(data)
        with anyio.move_on_after(deadline_s):
            await offer.released.settled()
        for late in offer.takers.copy():
            self.leave(late)
        del self._offers[parcel]
        return not offer.is_missed

    def leave(self, rank: int) -> None:
        """Expect *rank* no more."""
        self._gone.add(rank)
        for offer in list(self._offers.values()):
            offer.miss(rank)

    def fail(self) -> None:
        """Offer no more: the load has failed here."""
        self._has_failed = True
        self.done.resolve(None)
        for offer in list(self._offers.values()):
            offer.data.fail(ConnectionAbortedError("the load has failed here"))

    async def take(self, reader: int, parcel: int, into: memoryview, deadline_s: float) -> bool:
        """Fill *into* with a parcel, once its *reader* has read it; return False where it never will.

        Raises:
            OSError: the reader is lost, or late.
        """
        answer = _NOT_YET
        with anyio.fail_after(deadline_s):
            while answer == _NOT_YET:
                answer = await self._network.ask(*self._call(reader, parcel), [into])
        return answer == _HERE

    async def watch(self, rank: int) -> None:
        """Expect *rank* no more as soon as it takes no more, or is lost; return then."""
        await self._network.watch(*self._call(rank, _THE_END))
        self.leave(rank)

    def _call(self, rank: int, parcel: int) -> tuple[str, bytes]:
        return self.addresses[self.ranks.index(rank)], msgspec.msgpack.encode(RangeCall(self.rank, parcel))

    def _answer(self, question: bytes) -> RangeReply:
        """Answer another rank, when there is an answer; on a thread of its own."""
        call = msgspec.msgpack.decode(question, type=described(RangeCall))
        if call.parcel == _THE_END:
            self.done.wait_anyway(None)
        if call.rank in self._gone:
            raise ConnectionAbortedError(f"rank {call.rank} was given up")
        if self._has_failed or call.parcel == _THE_END:
            return RangeReply(_NEVER)
        offer = self._find(call.parcel)
        if not offer.data.wait_anyway(HELD_S):
            return RangeReply(_NOT_YET)
        if offer.data.has_failed:
            return RangeReply(_NEVER)
        return RangeReply(_HERE, memory=offer.data.value, on_sent=partial(offer.drop, call.rank))

    def _find(self, parcel: int) -> Offer:
        """Return an offer, made by what comes first, its data or a question for it."""
        return self._offers.setdefault(parcel, Offer())


class Peers(NamedTuple):
    """The ranks of the job that read each block once together, in the group's order; *rank* is this one."""

    ranks: tuple[int, ...]
    rank: int
    make_network: Callable[[], Network]

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Shelf]:
        """Yield this rank's shelf for one trial of a load; its connections end with the block."""
        network = self.make_network()
        try:
            yield Shelf(self.ranks, self.rank, network)
        finally:
            with anyio.CancelScope(shield=True):
                await network.close()


def find_peers(ranks: Ranks) -> Peers | None:
    """Return the peers in the ``load_group`` of *ranks*; None if it has this rank only.

    Raises:
        UsageError: it is not a group of this process; or *ranks* number this process differently.
    """
    group = ranks.load_group
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError("load_group: call torch.distributed.init_process_group() first")
    if not isinstance(group, distributed.ProcessGroup):
        raise UsageError(
            f"load_group={group!r} is not a process group with this rank in it: give one that "
            "torch.distributed.new_group() returns, or torch.distributed.group.WORLD"
        )
    members, rank = distributed.get_process_group_ranks(group), distributed.get_rank()
    if rank != ranks.rank or max(members) >= ranks.world_size:
        raise UsageError(
            f"load_group has rank {rank} of ranks {members}, and this is rank {ranks.rank} of {ranks.world_size}: "
            "give ranks as torch.distributed counts them, or none"
        )
    if len(members) == 1:
        return None
    network = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]  # as what is sent over gloo
    return Peers(tuple(members), rank, partial(TcpNetwork, find_address(network or None, ranks.store)))
