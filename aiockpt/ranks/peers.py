"""Point-to-point messages between ranks, over a process group that the user provides for this purpose alone.

The one file that uses a process group. Collectives, and all that must happen in one order on all ranks, stay away from
training's groups: those belong to the training thread. A group of its own may be used from our threads; sends and receives
are matched by tag. Guarantees:

- Nothing waits longer than the deadline. A rank that dies, fails or is cancelled breaks the group, and every other rank
  detects that at once: the rank closes all connections, and gloo notifies the other end of a closed connection.
- A group that broke is never used again. Its loss is an error of the exchange, not of the load: what did not arrive can be
  read from storage.
- The memory of a message is no longer touched once `trade` has returned or raised.

gloo only: bytes to load lie in host memory, and only gloo moves that. Make the group with
``torch.distributed.new_group(backend="gloo")`` beside the ``nccl`` ones of training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import anyio
import numpy as np
import torch
from anyio.lowlevel import checkpoint_if_cancelled
from torch import distributed

from aiockpt.errors import RankFailedError, UsageError
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.world import Ranks

Message = tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]
"""A rank of the job, and the contiguous memory to send to it or to receive from it."""
_NEVER_SENT_TAG = (1 << 31) - 1
_AT_ONCE = timedelta(milliseconds=1)


class PeersLostError(RankFailedError):
    """The process group broke: a rank died, closed its connections, or was silent for too long."""


class PeerConnection(Protocol):
    """The verbs of ``torch.distributed.ProcessGroup`` that are used here; ranks are numbers within the group."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> Any: ...  # noqa: N803
    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> Any: ...  # noqa: N803


class Peers:
    """The ranks of one process group, as one of them sees them. Use on one event loop.

    Args:
        group: of gloo; nothing else may use it.
        ranks: of the job, in the group's order; *rank* is this one.

    Attributes:
        broken: why it cannot be used any more; None while it can.
    """

    def __init__(self, group: PeerConnection, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.broken: str | None = None
        self._group = group
        self._number = {other: number for number, other in enumerate(ranks)}
        self._trading = Limiter("load group", 1)
        self._closing = Limiter("load group, closing", 1)

    async def trade(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, deadline_s: float) -> None:
        """Send and receive; return when all of it is done.

        Args:
            tag: the same at both ends, and of no other trade under way.

        Raises:
            PeersLostError: the group broke, now or earlier; names the rank whose connection failed first.
        """
        done = False

        async def hang_up_when_cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                if not done:
                    with anyio.CancelScope(shield=True):
                        await self.hang_up("the load was given up here")

        async with open_tasks() as tasks:
            # The thread below cannot be cancelled: this task is, and closes the connections on which the thread waits.
            tasks.start_soon(hang_up_when_cancelled)
            try:
                await run_blocking(self._trading, self._trade, sends, receives, tag, deadline_s)
            except PeersLostError:
                await checkpoint_if_cancelled()  # then this rank broke the group itself; no peer was lost
                raise
            finally:
                done = True
            tasks.cancel_scope.cancel()

    async def hang_up(self, why: str) -> None:
        """Break the group, so that no rank waits for this one. Idempotent."""
        if self.broken is None:
            self.broken = why
            await run_blocking(self._closing, self._close_connections)

    def _trade(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, deadline_s: float) -> None:
        """Blocking; on a worker thread."""
        self._check()
        ends = time.monotonic() + deadline_s
        works: list[tuple[int, Any]] = []
        peer = self.rank
        try:
            for peer, memory in receives:
                works.append((peer, self._group.recv([torch.from_numpy(memory)], self._number[peer], tag)))
            for peer, memory in sends:
                works.append((peer, self._group.send([torch.from_numpy(memory)], self._number[peer], tag)))
            for waited_for, work in works:
                peer = waited_for
                # Never 0, which means no timeout to c10d.
                work.wait(timedelta(seconds=max(ends - time.monotonic(), 0.001)))
        except (RuntimeError, ValueError) as error:  # what c10d raises
            if self.broken is None:
                self.broken = f"rank {peer}: {error}"
                self._close_connections()
            works.clear()  # each releases gloo's reference to its memory
            raise PeersLostError(f"the load_group lost rank {peer}: {error}", [peer]) from error

    def _check(self) -> None:
        if self.broken is not None:
            raise PeersLostError(f"the load_group is broken ({self.broken}): make a new one")

    def _close_connections(self) -> None:
        """Close the connection to every peer. Blocking.

        gloo has no call for it. But it closes a connection on which a wait times out: wait, with a tiny timeout, for a
        message that is never sent.
        """
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in self.ranks:
            if peer != self.rank:
                with suppress(RuntimeError, ValueError):
                    self._group.recv([nothing], self._number[peer], _NEVER_SENT_TAG).wait(_AT_ONCE)

    def __repr__(self) -> str:
        return f"<Peers {len(self.ranks)} ranks, {self.broken or 'connected'}>"


def find_peers(group: Any, ranks: Ranks) -> Peers | None:
    """Return the peers of *group*, which the user provides; None without a group, or if it has this rank only.

    Raises:
        UsageError: *group* is not a group of this process, cannot move host memory, or is training's own; or *ranks*
            number this process differently.
    """
    if group is None:
        return None
    members = _members(group)
    rank = distributed.get_rank()
    if rank != ranks.rank or max(members) >= ranks.world_size:
        raise UsageError(
            f"load_group has rank {rank} of ranks {members}, and this is rank {ranks.rank} of {ranks.world_size}: "
            "give ranks as torch.distributed counts them, or none"
        )
    return Peers(group, members, rank) if len(members) > 1 else None


def _members(group: Any) -> tuple[int, ...]:
    """Return the ranks of a group, as the job numbers them, if the group can be used; else raise UsageError."""
    advice = 'give one of its own, made with torch.distributed.new_group(backend="gloo")'
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError("load_group: call torch.distributed.init_process_group() first")
    if not isinstance(group, distributed.ProcessGroup):
        raise UsageError(f"load_group={group!r} is not a process group with this rank in it: {advice}")
    if group is distributed.group.WORLD:
        raise UsageError(f"load_group is the group that training uses: {advice}")
    backends = distributed.get_backend_config(group)
    if "cpu:gloo" not in backends.split(","):
        raise UsageError(f"load_group has {backends}, which does not move host memory: {advice}")
    return tuple(distributed.get_process_group_ranks(group))
