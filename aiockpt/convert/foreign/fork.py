"""The start of a run from another program's checkpoint: ``load(state, fork="dcp:///old")``, ``fork="hf:///weights"``.

Guarantees: every rank fills its own part, and no rank fills any before the states of all ranks have matched. The foreign
checkpoint is only read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import anyio
import msgspec
import torch

from aiockpt.adapters.differences import ADVICE
from aiockpt.adapters.matcher import LoadTarget
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import open_target
from aiockpt.adapters.tensors import byte_view, torch_dtype
from aiockpt.convert.choice import name_below
from aiockpt.convert.foreign.checkpoint import open_checkpoint
from aiockpt.convert.foreign.loading import SourceState, boxes_of, copy_shared
from aiockpt.convert.source import Source, open_source
from aiockpt.engine.context import Engine
from aiockpt.engine.coordinator import Coordinator, LoadRound
from aiockpt.engine.load import Filled, LoadRequest, Traffic, emit_loaded
from aiockpt.errors import StateMismatchError, UsageError
from aiockpt.format.names import join_name
from aiockpt.redaction import redact
from aiockpt.runtime.limits import open_tasks, run_blocking
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import TAG
from aiockpt.storage.address import hide_secrets
from aiockpt.storage.open import open_backend

T = TypeVar("T")
HF = "hf://"
READS_AT_ONCE = 4
"""Concurrent reads of a folder's tensors; the rows that this rank holds of each are in memory meanwhile."""


class _Opened(msgspec.Struct, frozen=True):
    """A foreign checkpoint: its entries, and a function that fills one tensor and returns the bytes it read."""

    stored: Stored
    fill: Callable[[TensorShard], Awaitable[int]]


class ForeignFork:
    """One load from a foreign checkpoint. Made on every rank, on the thread that calls ``load``.

    Raises:
        UsageError: the request names a step, or state of optimizers by parameter: a foreign checkpoint has neither; or
            *where* is a folder of weights, and the request does not choose exactly one module.
    """

    def __init__(self, engine: Engine, coordinator: Coordinator, where: str, request: LoadRequest) -> None:
        hide_secrets(where)
        self._engine = engine
        self._where, self._request, self._only = where, request, request.only
        self._loads = coordinator.begin_load(), coordinator.begin_load()
        if request.step is not None:
            raise UsageError(f"fork={where!r} holds one state and no steps; leave out the step ({request.step})")
        if request.optimizer_state != "by_optimizer":
            raise UsageError(
                f"fork={where!r}: optimizer_state={request.optimizer_state!r} is for steps of aiockpt; make one of it "
                f"first: aiockpt convert {where} RUN, and fork from that"
            )
        if where.startswith(HF):
            self._module = _find_module(where, request)
            self._only = request.only or [join_name((self._module,))]

    async def load(self) -> Filled:
        """Fill the tensors of the state.

        Raises:
            StateMismatchError: the checkpoint does not fit the state of every rank; nothing was overwritten.
            UsageError, CorruptionError, StorageError: the checkpoint cannot be opened or read.
        """
        begun_ns, engine = self._engine.now_ns(), self._engine
        async with AsyncExitStack() as files:

            async def match() -> tuple[LoadTarget, _Opened]:
                opened = await files.enter_async_context(self._open())
                return await run_blocking(engine.state_work, self._match, opened.stored), opened

            try:
                target, opened = await self._on_all(self._loads[0], match)
            except StateMismatchError as error:
                raise StateMismatchError(redact(self._where), error.problems, ADVICE) from error

            async def fill() -> int:
                return await _fill_all(target, opened)

            read_bytes = await self._on_all(self._loads[1], fill)
        engine.lineage.begin_from_foreign(self._where)
        traffic, where = Traffic(read_bytes), redact(self._where)
        result = emit_loaded(engine, target, traffic, begun_ns, step=-1, id="", generation=0, url=where)
        return Filled(result, target, agree=engine.world_size > 1)

    async def _on_all(self, load: LoadRound, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of *work* after it succeeded on every rank."""
        try:
            result = await work()
        except Exception as error:
            await load.agree_applied(error)
            raise
        await load.agree_applied(None)
        return result

    def _match(self, stored: Stored) -> LoadTarget:
        return open_target(
            self._request.state,
            stored,
            only=self._only,
            strict=self._request.strict,
            rename=self._request.rename,
            judge_unexpected=self._engine.world_size == 1,
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[_Opened]:
        if not self._where.startswith(HF):
            yield await run_blocking(self._engine.state_work, _open_checkpoint, self._engine, self._where)
            return
        folder = open_backend(_folder_of(self._where), world=self._engine.world)
        try:
            async with open_source(folder) as source:
                yield _open_weights(self._engine, source, self._module, redact(self._where))
        finally:
            await folder.close()


def _folder_of(where: str) -> str:
    """Return the path or URL of the folder; a repository of the Hub keeps its URL."""
    rest = where.removeprefix(HF)
    return rest if rest.startswith(("/", "./", "~")) or "://" in rest else where


def _find_module(where: str, request: LoadRequest) -> str:
    """Return the key of the one module of the state that weights are for."""
    modules = [key for key, value in request.state.items() if isinstance(value, torch.nn.Module)]
    if request.only is not None:
        modules = [key for key in modules if any(name.partition(".")[0] == key for name in request.only)]
    if len(modules) != 1:
        found = f"{len(modules)} modules ({', '.join(map(str, modules))})" if modules else "no module"
        raise UsageError(
            f"fork={where!r} holds the weights of one module, and the state has {found}; name it: load(state, "
            f'only=["model"], fork={where!r})'
        )
    return modules[0]


def _open_checkpoint(engine: Engine, where: str) -> _Opened:
    content = SourceState(open_checkpoint(where))

    async def fill(wanted: TensorShard) -> int:
        await run_blocking(engine.state_work, content.fill, wanted)
        return wanted.nbytes

    return _Opened(content.stored, fill)


def _open_weights(engine: Engine, source: Source, module: str, where: str) -> _Opened:
    tensors = {name_below((module,), tensor.name): tensor for tensor in source.tensors}
    ties = {name_below((module,), other): name_below((module,), kept) for other, kept in source.ties.items()}
    values: Mapping[str, Any] = {module: {TAG: "module"}}
    stored = Stored({name: (found.dtype, found.shape) for name, found in tensors.items()}, ties, values, where=where)

    async def fill(wanted: TensorShard) -> int:
        found = tensors[ties.get(wanted.name, wanted.name)]
        read_bytes = 0
        for box, _ in boxes_of(wanted):
            # Rows are contiguous; along the other axes, elements of other ranks are read with them.
            rows = Box(box.offsets[:1] + (0,) * (box.ndim - 1), box.sizes[:1] + found.shape[1:]) if box.ndim else box
            read = torch.empty(rows.sizes, dtype=torch_dtype(found.dtype))
            row_bytes = read.nbytes // rows.sizes[0] if rows.sizes and rows.sizes[0] else 0
            start = found.start + (rows.offsets[0] * row_bytes if rows.offsets else 0)
            if read.nbytes:
                await source.readers[found.file].read(start, [byte_view(read)])
                await run_blocking(engine.state_work, copy_shared, wanted, rows, read)
            read_bytes += read.nbytes
        return read_bytes

    return _Opened(stored, fill)


async def _fill_all(target: LoadTarget, opened: _Opened) -> int:
    """Fill the tensors of *target*; return how many bytes were read."""
    slots, sizes = anyio.Semaphore(READS_AT_ONCE), []

    async def fill(wanted: TensorShard) -> None:
        async with slots:
            sizes.append(await opened.fill(wanted))

    async with open_tasks() as tasks:
        for wanted in target.wanted:
            tasks.start_soon(fill, wanted)
    return sum(sizes)
