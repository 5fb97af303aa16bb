"""Import of a Hugging Face folder as a step: a save whose tensors are streamed from files, with receipt and commit.

The step equals a save of ``{"model": model}``, so ``load`` fills a module from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import anyio
import msgspec
import torch

from aiockpt.adapters.rename import Rules
from aiockpt.adapters.tensors import byte_view, torch_dtype
from aiockpt.convert.casting import Cast, cast_all, cast_code
from aiockpt.convert.choice import check_unique, name_below, parse_prefix
from aiockpt.convert.publish import write_file
from aiockpt.convert.source import Source, open_source
from aiockpt.engine import maintenance
from aiockpt.engine.alone import RoundAlone
from aiockpt.engine.context import Engine, Place
from aiockpt.engine.destination import Destination
from aiockpt.engine.job import Capture, RoundName, SaveJob, SaveRequest
from aiockpt.engine.save import attempting, check_space, commit_votes, committed, vote
from aiockpt.errors import StepExistsError, UsageError
from aiockpt.format.document import BLOCK_BYTES
from aiockpt.format.dtypes import itemsize
from aiockpt.format.manifest import FileEntry
from aiockpt.format.names import data_path, join_name, step_id
from aiockpt.pipeline.commit import Attempt
from aiockpt.pipeline.copy import Windows
from aiockpt.pipeline.discover import list_step
from aiockpt.pipeline.upload import BlockSums
from aiockpt.planning.write_plan import HEADER, WEIGHTS, Copy, FilePlan, Window
from aiockpt.redaction import HIDDEN, redact
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard, digest_structure
from aiockpt.state.tree import TAG, Node, Path
from aiockpt.storage.backend import Backend

WINDOWS = 8
CAST_BYTES = 8 << 20
"""Limit for data of one window that is read and waits to be cast."""
CUT_BYTES = 1 << 20


class ImportRequest(msgspec.Struct, frozen=True):
    """A request; the fields are the arguments of `aiockpt.convert.from_hugging_face`, the dtype as its code.

    Attributes:
        only: the one file to import; None: all weights of the folder.
    """

    step: int
    prefix: str
    dtype: str | None
    ties: Mapping[str, str]
    replace: bool
    dry_run: bool
    only: str | None
    rename: Rules


class Inbound(msgspec.Struct, frozen=True):
    """A conversion to a step, done or planned: its files and its weights."""

    files: tuple[str, ...]
    state: ShardedState
    prefix: str
    file_bytes: int


async def convert_folder(
    destination: Destination, folder: Backend, request: ImportRequest, on_written: Callable[[int], object]
) -> Inbound:
    """Save the weights of *folder* as a step; a dry run only plans it."""
    engine, place = destination.engine, destination.places[0]
    if engine.world_size > 1 or len(destination.places) > 1:
        raise UsageError("a conversion runs in one process, into one place: make a separate Checkpointer for it")
    path = parse_prefix(request.prefix)
    entry = await list_step(place.backend, step_id(request.step))
    if entry.committed and not request.replace:
        raise StepExistsError(
            f"{place.backend.url} has step {request.step} already: give another number, or use replace=True (--force)"
        )
    async with open_source(folder, request.only) as source:
        state = await run_blocking(engine.state_work, _describe, source, path, request)
        asked = SaveRequest(step=request.step, user={"converted_from": _place_alone(folder.url)})
        job = SaveJob(engine, RoundAlone(RoundName(request.step)), asked, Capture(state=state))
        job.plan = await run_blocking(engine.state_work, engine.plan, state)
        planned = Inbound(source.files, state, join_name(path), job.plan.file_bytes)
        await check_space(place, job)
        if request.dry_run:
            return planned
        attempt = await engine.begin_attempt(entry, engine.token(6), job.number)
        async with attempting(place, job, attempt):
            files = await _write_files(place, job, attempt, source, folder, on_written)
            receipt = await vote(place, job, attempt, files)
            with job.stages.time("commit"):
                manifest = await commit_votes(place, attempt, [receipt])
        await maintenance.clean_up(place, committed(engine, job, manifest.generation))
    return planned


def _place_alone(url: str) -> str:
    """Return *url* without user and query: every reader of the manifest can see it."""
    return redact(url).partition("?")[0].replace(f"{HIDDEN}@", "")


def _describe(source: Source, path: Path, request: ImportRequest) -> ShardedState:
    """Return the state that a module with these weights has, at *path* of the state."""
    shards = []
    ties = dict(_ties(source, request.ties))
    names = {name: request.rename(name) for name in (*(tensor.name for tensor in source.tensors), *ties)}
    check_unique(names)
    for tensor in source.tensors:
        dtype = cast_code(tensor.dtype, request.dtype)
        boxes = (Box.whole(tensor.shape),)
        shards.append(
            TensorShard(
                name=name_below(path, names[tensor.name]), dtype=dtype, shape=tensor.shape, boxes=boxes, data=None
            )
        )
    alias = {name_below(path, names[other]): name_below(path, names[kept]) for other, kept in ties.items()}
    values: Node = {TAG: "module"}
    for key in reversed(path):
        values = {key: values} if type(key) is str else {TAG: "dict", "items": [[key, values]]}
    return ShardedState(tuple(shards), alias, values, {}, digest_structure(shards, alias))


def _ties(source: Source, wanted: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names that share memory, as noted in the files and as passed by the caller."""
    names = {tensor.name for tensor in source.tensors}
    for other, kept in wanted.items():
        if kept not in names or other in names:
            problem = f"there is no tensor {kept!r}" if kept not in names else f"{other!r} has elements of its own"
            raise UsageError(f"tie {other}={kept}: {problem}; give NEW_NAME=NAME_IN_THE_FILES")
    yield from {**source.ties, **wanted}.items()


async def _write_files(
    place: Place,
    job: SaveJob,
    attempt: Attempt,
    source: Source,
    folder: Backend,
    on_written: Callable[[int], object],
) -> tuple[FileEntry, ...]:
    engine = place.engine
    windows = Windows(WINDOWS, engine.options.io.slab_bytes)
    reading = Limiter("folder reads", folder.traits.block_reads)
    block_bytes = engine.options.io.block_bytes or BLOCK_BYTES
    entries = []
    for number, file in enumerate(job.plan.files):
        path = data_path(attempt.attempt, 0, number)
        sums = BlockSums(file.size, block_bytes)
        filler = _WindowFiller(engine, source, file, job.state.tensors, reading)
        await write_file(
            place.backend,
            f"{attempt.id}/{path}",
            file.size,
            windows,
            filler,
            seen_from=sums.seen_from,
            on_written=on_written,
        )
        entries.append(sums.file_entry(path, rank=0, kind=WEIGHTS))
    return tuple(entries)


class _Batch:
    """A batch of reads with their casts: (file, start, into) of each read, and the bytes that wait to be cast.

    Args:
        scratch: memory for data that is read to be cast. It is reused: the allocator would keep for each thread what many
            threads allocate and free in turn.
    """

    def __init__(self, scratch: memoryview) -> None:
        self._scratch = scratch
        self.wanted: list[tuple[int, int, memoryview]] = []
        self.casts: list[Cast] = []
        self.cast_bytes = 0

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return scratch memory for *count* elements."""
        size = count * dtype.itemsize
        room = self._scratch[self.cast_bytes : self.cast_bytes + size]
        self.cast_bytes += -(-size // 64) * 64
        return torch.frombuffer(room, dtype=dtype)


def _cut(copy: Copy) -> Iterator[Copy]:
    """Cut a long copy, to bound the memory of reads that wait to be cast: at most `CAST_BYTES`, eight times as much."""
    for at in range(0, copy.size, CUT_BYTES):
        size = min(CUT_BYTES, copy.size - at)
        yield Copy(copy.window_offset + at, copy.source, copy.source_offset + at, size)


class _WindowFiller:
    """Fills the windows of one data file of a step.

    Args:
        shards: the ones to write, in the order of the source's tensors.
        reading: limits the reads.
    """

    def __init__(
        self, engine: Engine, source: Source, file: FilePlan, shards: Sequence[TensorShard], reading: Limiter
    ) -> None:
        self._engine = engine
        self._source = source
        self._file = file
        self._shards = shards
        self._reading = reading
        self._window_bytes = file.windows[0].size
        # A batch is cast once it holds CAST_BYTES; its last cut adds at most 4 MiB (1 MiB of 16 bits, from float64).
        self._scratch = Windows(WINDOWS, 2 * CAST_BYTES)

    async def __call__(self, offset: int, view: memoryview) -> None:
        window = self._file.windows[offset // self._window_bytes]
        scratch = await self._scratch.acquire()
        try:
            await self._fill(window, view, scratch.memory)
        finally:
            with anyio.CancelScope(shield=True):
                await self._scratch.release(scratch)

    async def _fill(self, window: Window, view: memoryview, scratch: memoryview) -> None:
        batch = _Batch(scratch)
        for copy in window.copies:
            if copy.source == HEADER:
                place = slice(copy.window_offset, copy.window_offset + copy.size)
                view[place] = self._file.header[copy.source_offset : copy.source_offset + copy.size]
                continue
            for cut in _cut(copy):
                self._plan(cut, view, batch)
                if batch.cast_bytes >= CAST_BYTES:
                    await self._carry_out(batch)
                    batch = _Batch(scratch)
        await self._carry_out(batch)

    def _plan(self, copy: Copy, view: memoryview, batch: _Batch) -> None:
        """Add to *batch* the reads and casts that fill the place of *copy* in the window *view*."""
        tensor, dtype = self._source.tensors[copy.source], self._shards[copy.source].dtype
        into = view[copy.window_offset : copy.window_offset + copy.size]
        if tensor.dtype == dtype:
            batch.wanted.append((tensor.file, tensor.start + copy.source_offset, into))
            return
        width = itemsize(dtype)
        stored = batch.allocate(copy.size // width, torch_dtype(tensor.dtype))
        start = tensor.start + copy.source_offset // width * itemsize(tensor.dtype)
        batch.wanted.append((tensor.file, start, byte_view(stored)))
        batch.casts.append(Cast(tensor.name, stored, torch.frombuffer(into, dtype=torch_dtype(dtype))))

    async def _carry_out(self, batch: _Batch) -> None:
        async with open_tasks() as tasks:
            for file, start, into in _join(batch.wanted):
                tasks.start_soon(self._read, file, start, into)
        if batch.casts:
            await run_blocking(self._engine.state_work, cast_all, batch.casts)

    async def _read(self, file: int, start: int, into: Sequence[memoryview]) -> None:
        async with self._reading:
            await self._source.readers[file].read(start, into)


def _join(wanted: Sequence[tuple[int, int, memoryview]]) -> list[tuple[int, int, list[memoryview]]]:
    """Merge adjacent reads: a request for each of a thousand small tensors would be far too slow."""
    joined: list[tuple[int, int, list[memoryview]]] = []
    end = (-1, -1)
    for file, start, into in sorted(wanted, key=lambda one: one[:2]):
        if not len(into):
            continue
        if (file, start) == end:
            joined[-1][2].append(into)
        else:
            joined.append((file, start, [into]))
        end = (file, start + len(into))
    return joined
