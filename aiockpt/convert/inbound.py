"""Import of a Hugging Face folder as a step: a save whose tensors are streamed from files, with receipt and commit.

The step equals a save of ``{"model": model}``, so ``load`` fills a module from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch

from aiockpt.adapters.rename import Rules
from aiockpt.adapters.tensors import byte_view, torch_dtype
from aiockpt.convert.casting import Cast, cast_all, cast_code
from aiockpt.convert.choice import Converted, check_unique, count_dtypes, name_below, parse_prefix
from aiockpt.convert.publish import write_file
from aiockpt.convert.source import Source, open_source
from aiockpt.engine import maintenance
from aiockpt.engine.alone import Destination, RoundAlone
from aiockpt.engine.context import Engine, Place
from aiockpt.engine.job import RoundName, SaveJob, SaveRequest
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
from aiockpt.planning.write_plan import HEADER, WEIGHTS, FilePlan
from aiockpt.redaction import HIDDEN, redact
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard, digest_structure
from aiockpt.state.tree import TAG, Node, Path
from aiockpt.storage.backend import Backend

WINDOWS = 6
"""Windows under way; what is read to be cast is beside them, up to four times as much."""


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


async def convert_folder(
    destination: Destination, folder: Backend, request: ImportRequest, on_written: Callable[[int], object]
) -> Converted:
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
        job = SaveJob(engine, RoundAlone(RoundName(request.step)), asked, state)
        job.plan = await run_blocking(engine.state_work, engine.plan, state)
        done = Converted(
            step=request.step,
            url=place.backend.url,
            prefix=join_name(path),
            files=source.files,
            tensor_count=len(state.tensors),
            dtypes=count_dtypes(shard.dtype for shard in state.tensors),
            ties=dict(state.alias),
            bytes=job.plan.file_bytes,
            dry_run=request.dry_run,
        )
        await check_space(place, job)
        if request.dry_run:
            return done
        attempt = await engine.begin_attempt(entry, engine.token(6), job.number)
        async with attempting(place, job, attempt):
            files = await _write_files(place, job, attempt, source, folder, on_written)
            receipt = await vote(place, job, attempt, files)
            with job.stages.time("commit"):
                manifest = await commit_votes(place, attempt, [receipt])
        await maintenance.clean_up(place, committed(engine, job, manifest.generation))
    return done


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

    async def __call__(self, offset: int, view: memoryview) -> None:
        wanted: list[tuple[int, int, memoryview]] = []
        casts: list[Cast] = []
        for copy in self._file.windows[offset // self._window_bytes].copies:
            into = view[copy.window_offset : copy.window_offset + copy.size]
            if copy.source == HEADER:
                into[:] = self._file.header[copy.source_offset : copy.source_offset + copy.size]
                continue
            tensor, dtype = self._source.tensors[copy.source], self._shards[copy.source].dtype
            start = copy.source_offset
            if tensor.dtype != dtype:
                start = start // itemsize(dtype) * itemsize(tensor.dtype)
                stored = torch.empty(copy.size // itemsize(dtype), dtype=torch_dtype(tensor.dtype))
                casts.append(Cast(tensor.name, stored, torch.frombuffer(into, dtype=torch_dtype(dtype))))
                into = byte_view(stored)
            wanted.append((tensor.file, tensor.start + start, into))
        async with open_tasks() as tasks:
            for file, start, parts in _join(wanted):
                tasks.start_soon(self._read, file, start, parts)
        if casts:
            await run_blocking(self._engine.state_work, cast_all, casts)

    async def _read(self, file: int, start: int, into: Sequence[memoryview]) -> None:
        async with self._reading:
            await self._source.readers[file].read(start, into)


def _join(wanted: Sequence[tuple[int, int, memoryview]]) -> list[tuple[int, int, list[memoryview]]]:
    """Merge adjacent reads: a request for each of a thousand small tensors would be far too slow."""
    joined: list[tuple[int, int, list[memoryview]]] = []
    end = (-1, -1)
    for file, start, into in sorted(wanted, key=lambda read: read[:2]):
        if not len(into):
            continue
        if (file, start) == end:
            joined[-1][2].append(into)
        else:
            joined.append((file, start, [into]))
        end = (file, start + len(into))
    return joined
