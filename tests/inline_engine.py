"""The whole engine on one thread, over a simulated file system: deterministic saves and loads, thousands a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, TypeVarTuple, cast

import torch

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.backends.local import LocalBackend
from aiockpt.engine import keep
from aiockpt.engine.context import Engine
from aiockpt.engine.load import LoadRequest, load
from aiockpt.engine.save import save
from aiockpt.engine.ticket import Call, Capture, Ticket
from aiockpt.events import Observer
from aiockpt.options import Options
from aiockpt.runtime.future import LoadResult, SaveFuture
from aiockpt.runtime.loop import LoopThread
from aiockpt.runtime.ranks import Ranks
from aiockpt.runtime.world import Files, World
from aiockpt.storage.backend import Backend
from aiockpt.testing.simulated_files import SimulatedFiles
from aiockpt.testing.simulation import run_inline, simulated_world

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
State = Mapping[str, Any]

ROOT = "/run"
TINY = aiockpt.IO(pool_bytes=1 << 16, slab_bytes=4096, block_bytes=4096, read_bytes=4096)


class InlineLoop:
    """Stands in for the loop thread where everything runs on one: `call_soon` goes to the running loop."""

    def call_soon(self, work: Callable[[*Ts], object], *args: *Ts) -> None:
        asyncio.get_running_loop().call_soon(work, *args)


def make_engine(backend: Backend, world: World, observers: tuple[Observer, ...] = (), **options: Any) -> Engine:
    """Return an engine for use inside `run_inline`."""
    chosen = Options(**{"io": TINY, **options})
    return Engine(backend, cast(LoopThread, InlineLoop()), chosen, observers, world, Ranks())


def local(files: Files, seed: int = 0) -> tuple[LocalBackend, World]:
    """Return a local backend over *files*, and its world."""
    base = simulated_world(seed)
    world = World(files, base.clock, base.token)
    return LocalBackend(ROOT, world=world), world


async def run_save(
    engine: Engine, step: int, state: State, watch: Callable[[Ticket], object] | None = None
) -> SaveFuture:
    """Save *state* as a checkpointer does, without the thread; return the settled future."""
    ticket = Ticket(engine, Call(step=step), Capture(state=StateWalker().walk(state)))
    ticket.prepare()
    if watch is not None:
        watch(ticket)
    running = asyncio.ensure_future(ticket.run(save))
    ticket.copy()  # the pool of these tests holds the whole state, so this never waits for a writer
    result = await running
    if result is not None and not result.existed:
        await keep.tidy(engine, result)
    return ticket.future


async def run_load(engine: Engine, state: State, step: int | None = None) -> LoadResult | None:
    """Load into *state* as a checkpointer does, without the thread."""
    filled = await load(engine, LoadRequest(state, step, None, True, None))
    if filled is None:
        return None
    filled.target.apply()
    return filled.result


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


def saved_files(steps: int = 1, seed: int = 0) -> SimulatedFiles:
    """Return a file system that holds *steps* committed tiny states: step n of value n."""
    files = SimulatedFiles()
    backend, world = local(files, seed)

    async def main() -> None:
        engine = make_engine(backend, world)
        for step in range(1, steps + 1):
            (await run_save(engine, step, tiny_state(step))).result()
        await backend.close()

    run_inline(main)
    return files


def load_value(files: Files, step: int | None = None) -> float | None:
    """Load the newest (or the given) tiny state from *files* and return its value, after checking every tensor."""
    state = tiny_state(-1)
    backend, world = local(files, seed=99)

    async def main() -> LoadResult | None:
        try:
            return await run_load(make_engine(backend, world), state, step)
        finally:
            await backend.close()

    loaded = run_inline(main)
    if loaded is None:
        return None
    assert states_equal(state, tiny_state(state["value"])), "loaded values that were never saved"
    return cast(float, state["value"])
