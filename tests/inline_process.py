"""A whole checkpointer on one thread, over a simulated file system: deterministic saves and loads, thousands a minute.

This is the one way in which the crash tests and the campaigns use aiockpt: through the public `aiockpt.Checkpointer`, with
a backend and a world of their own.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.events import Observer
from aiockpt.runtime.world import Files, World
from aiockpt.storage.backend import Backend
from tests.file_surgery import ROOT, fingerprint
from tests.simulated.inline_loop import InlineLoop
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import run_inline, simulated_world, snapshot

State = Mapping[str, Any]

TINY = aiockpt.IO(pool_bytes=1 << 16, slab_bytes=4096, block_bytes=4096, read_bytes=4096)


def ignore(_: aiockpt.SaveFuture) -> None:
    """Leave a failed save to whoever has its future."""


class Process:
    """A simulated process: a checkpointer in the running event loop. It ends by being forgotten.

    Attributes:
        ckpt: the checkpointer.
        backend, world: what it was given.
    """

    def __init__(
        self,
        backend: Backend,
        world: World,
        observers: tuple[Observer, ...] = (),
        *,
        io: aiockpt.IO = TINY,
        **options: Any,
    ) -> None:
        self.backend = backend
        self.world = world
        self.ckpt = aiockpt.Checkpointer(
            backend,
            world=dataclasses.replace(world, make_loop=self._make_loop),
            observers=observers,
            limits=aiockpt.Limits(io=io),
            **dict[str, Any](on_error=ignore) | options,
        )

    def _make_loop(self, name: str, on_exit: Callable[[], object]) -> InlineLoop:
        self._loop = InlineLoop(name, on_exit)
        return self._loop

    async def save(
        self, step: int, state: State, watch: Callable[[aiockpt.SaveFuture], object] | None = None
    ) -> aiockpt.SaveFuture:
        """Save *state*, wait until all is cleaned up after it, and return the settled future.

        Args:
            watch: given the future when the call of ``save`` has returned and nothing else has run.
        """
        future = self.ckpt.save(step, state)
        if watch is not None:
            watch(future)
        await self.idle()
        return future

    async def load(self, state: State, step: int | None = None) -> aiockpt.LoadResult | None:
        """Load into *state*."""
        return await self.ckpt.load(state, step)

    async def idle(self) -> None:
        """Wait for what is done in the background; raise what the process died of."""
        await self._loop.idle()

    @property
    def used_slabs(self) -> int:
        """Slabs that hold what is not written yet."""
        return self.ckpt.statistics().pool.used_slabs


def local(files: Files, seed: int = 0) -> tuple[LocalBackend, World]:
    """Return a local backend over *files*, and its world."""
    base = simulated_world(seed)
    world = World(files, base.clock, base.token)
    return LocalBackend(ROOT, world=world), world


def tiny_state(value: float) -> dict[str, Any]:
    """Return a state of three small tensors and a value, all of them functions of *value*."""
    return {
        "weight": torch.full((37, 31), value),
        "bias": torch.arange(5, dtype=torch.int64) + int(value),
        "flag": torch.tensor(value > 1),
        "value": value,
    }


def states_equal(one: State, other: State) -> bool:
    """Say whether two tiny states are equal, bit for bit."""
    return all(
        torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in one
    )


def saved_files(steps: int = 1) -> SimulatedFiles:
    """Return a file system that holds *steps* committed tiny states: step n of value n. It was saved once, and copied."""
    return snapshot(_saved_files(steps))


@cache
def _saved_files(steps: int) -> SimulatedFiles:
    files = SimulatedFiles()
    backend, world = local(files)

    async def main() -> None:
        process = Process(backend, world)
        for step in range(1, steps + 1):
            (await process.save(step, tiny_state(step))).result()
        await backend.close()

    run_inline(main)
    return files


def load_value(files: Files, step: int | None = None) -> float | None:
    """Load the newest (or the given) tiny state from *files* and return its value, after checking every tensor."""
    state = tiny_state(-1)
    backend, world = local(files, seed=99)

    async def main() -> aiockpt.LoadResult | None:
        try:
            return await Process(backend, world).load(state, step)
        finally:
            await backend.close()

    loaded = run_inline(main)
    if loaded is None:
        return None
    assert states_equal(state, tiny_state(state["value"])), "loaded values that were never saved"
    return cast(float, state["value"])


class Restarts:
    """The value that the next process loads, for disks that nobody needs any longer.

    What is found follows from names and bytes alone: of disks that are equal in these, one is looked at. Power cuts at
    neighbouring calls leave many of them.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, float | aiockpt.CheckpointError | AssertionError | None] = {}

    def load_value(self, files: SimulatedFiles) -> float | None:
        """Return or raise what `load_value` does."""
        key = fingerprint(files)
        if key not in self._found:
            try:
                self._found[key] = load_value(files)
            except (aiockpt.CheckpointError, AssertionError) as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, Exception):
            raise found
        return found
