"""Several ranks in one process, each a thread with its own checkpointer: as many as a test likes, in milliseconds.

They meet in a `HashStore` as processes meet in a `TCPStore`; what they save lies in one place. What only processes show
(collectives, kill -9) is tested with processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import torch.distributed

import aiockpt
from aiockpt.ranks.coordinator import RankCoordinator
from aiockpt.runtime.world import World

T = TypeVar("T")
QUICK = aiockpt.Deadlines(ranks_s=20, commit_s=20, takeover_s=10, close_s=60)
PATIENT = aiockpt.Deadlines(ranks_s=100, commit_s=100, takeover_s=100, close_s=20)
"""Longer than tests wait for a future: what ranks learn in time, they were told, on however slow a machine."""
SMALL = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384)


def coordinator_of(checkpointer: aiockpt.Checkpointer) -> RankCoordinator:
    """Return how a rank agrees with the others."""
    coordinator = checkpointer._coordinator
    assert isinstance(coordinator, RankCoordinator)
    return coordinator


class Crew:
    """The ranks of one job.

    Args:
        url: where all of them save to; a callable gives each rank its own backend.
        worlds: the outside of each rank; None for the real one.
        store: of their notes; None for a new one.
    """

    def __init__(
        self,
        world_size: int,
        url: str | Path | Callable[[int], Any],
        *,
        worlds: Sequence[World | None] | None = None,
        io: aiockpt.IO = SMALL,
        deadlines: aiockpt.Deadlines = QUICK,
        load_group: Any = None,
        store: Any = None,
        **options: Any,
    ) -> None:
        store = store or torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.world_size = world_size
        self.checkpointers = [
            aiockpt.Checkpointer(
                url if isinstance(url, str | Path) else url(rank),
                ranks=aiockpt.Ranks(rank, world_size, store, load_group=load_group),
                **dict[str, Any](
                    limits=aiockpt.Limits(io=io, deadlines=deadlines), world=worlds[rank] if worlds else None
                )
                | options,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.on_all(
            lambda rank, checkpointer: checkpointer._parts.shutdown.close() if checkpointer._loop.usable else None
        )

    def on_all(self, work: Callable[[int, aiockpt.Checkpointer], T]) -> list[T]:
        """Run *work* on every rank at once; return what each returned, or raise what the lowest rank raised."""
        return [outcome.result() for outcome in self.start(work)]

    def start(self, work: Callable[[int, aiockpt.Checkpointer], T]) -> list[Any]:
        """Run *work* on every rank at once and wait; return the finished futures."""
        with ThreadPoolExecutor(self.world_size) as threads:
            return [threads.submit(work, rank, checkpointer) for rank, checkpointer in enumerate(self.checkpointers)]

    def errors(self, work: Callable[[int, aiockpt.Checkpointer], T]) -> list[BaseException | None]:
        """Run *work* on every rank at once; return what each raised."""
        return [outcome.exception() for outcome in self.start(work)]

    def hurry(self, **deadlines: float) -> None:
        """Have other deadlines of `aiockpt.Deadlines` on all ranks from now on; not "ranks_s"."""
        for checkpointer in self.checkpointers:
            engine = checkpointer._engine
            hurried = msgspec.structs.replace(engine.options.deadlines, **deadlines)
            engine.options = msgspec.structs.replace(engine.options, deadlines=hurried)

    def record_notes(self) -> list[str]:
        """Return a list that gets the key of every note that a rank leaves from now on."""
        posted: list[str] = []
        for checkpointer in self.checkpointers:
            board: Any = coordinator_of(checkpointer).board
            post = board.post

            async def note(key: str, value: Any, post: Any = post) -> None:
                posted.append(key)
                await post(key, value)

            board.post = note
        return posted
