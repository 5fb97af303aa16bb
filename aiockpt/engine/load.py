"""A load: choose the newest valid step, check its manifest wholly, read straight into place, verify."""

from __future__ import annotations

import difflib
import logging
import sys
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from aiockpt.adapters.differences import Strict
from aiockpt.adapters.matcher import LoadTarget
from aiockpt.adapters.plain_values import objects_in
from aiockpt.adapters.rename import Rename
from aiockpt.adapters.stored import Stored, find_node
from aiockpt.adapters.target import OptimizerState, open_target
from aiockpt.adapters.tensors import byte_view, torch_dtype
from aiockpt.engine.context import Place
from aiockpt.engine.find import Found, Skipped, StepPlaces, candidates, find_manifest, note_skipped
from aiockpt.errors import (
    CorruptionError,
    NoValidCheckpointError,
    RankFailedError,
    StateMismatchError,
    UsageError,
    say_briefly,
)
from aiockpt.events import CANCELLED, Loaded, LoadFailed
from aiockpt.format.configuration import config_changes
from aiockpt.format.document import collector_paused
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import list_names, prefixes, split_name
from aiockpt.futures import LoadResult
from aiockpt.options import Best
from aiockpt.pipeline.fetch import Fetcher
from aiockpt.pipeline.step_info import count_not_finite_in
from aiockpt.planning.read_plan import LoadPlan, Scattered, Wanted, plan_load
from aiockpt.planning.weights import has_weights_only
from aiockpt.runtime.limits import run_blocking
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import TAG, Node
from aiockpt.units import duration, size

if TYPE_CHECKING:
    from aiockpt.engine.context import Engine

logger = logging.getLogger("aiockpt")


SCRATCH_READS = 4
"""The size of scratch memory, in multiples of the reads that are under way at once: 256 MiB for a folder."""


CHANGES_LOGGED = 20
"""Values of a configuration in one line of the log; the result of the load has all."""


class LoadRequest(msgspec.Struct, frozen=True):
    """The arguments of a load; the fields are those of `aiockpt.Checkpointer.load`."""

    state: Mapping[str, Any]
    step: int | Best | None
    only: Sequence[str] | None
    strict: Strict
    rename: Rename | None
    optimizer_state: OptimizerState = "by_optimizer"


class Traffic(msgspec.Struct, frozen=True):
    """What a load moved: bytes read from storage here, and bytes that other ranks read and sent."""

    read_bytes: int = 0
    received_bytes: int = 0


class Filled(msgspec.Struct, frozen=True):
    """A load whose tensors are filled; ``target.apply()`` fills the objects, on the waiter's thread.

    Attributes:
        agree: whether an object of any rank may refuse its value, so that all must be notified of the outcome.
    """

    result: LoadResult
    target: LoadTarget
    agree: bool = False

    def apply(self) -> LoadResult:
        """Fill the objects; return the result, whose *differences* name what could not be filled."""
        self.target.apply()
        return msgspec.structs.replace(self.result, differences=(*self.target.problems, *self.target.notes))


async def load(places: StepPlaces, request: LoadRequest) -> Filled | None:
    """Fill the tensors of a state; None only when no checkpoint exists at all.

    Raises:
        NoValidCheckpointError: steps exist and none is valid.
        StateMismatchError: the checkpoint does not fit the state; nothing was overwritten. A copy of the weights alone
            is skipped, where the state needs more, while there are other copies.
        CorruptionError: the requested step is damaged; the state may be partly overwritten.
    """
    engine, trials = places.engine, Trials(places.engine, request)
    sought_ns = engine.now_ns()
    with trials.explaining():
        async for found in candidates(places, request.step, trials.skipped):
            place, manifest, target = found.place, found.manifest, None
            engine.stages("load", manifest.step).ended("find", sought_ns)
            try:
                target = await trials.match(place, manifest)
                traffic = await fill(place, manifest, target)
            except StateMismatchError as error:
                trials.pass_over(place, manifest, error)
            except CorruptionError as error:
                trials.skip_damaged(manifest.id, manifest.step, target, error)
            else:
                return trials.finish(place, manifest, target, traffic)
            sought_ns = engine.now_ns()
    return None


class LoadAlone:
    """A load of a process by itself; see `aiockpt.engine.coordinator.LoadRound`."""

    load = staticmethod(load)

    async def agree_applied(self, error: Exception | None) -> None:
        if error is not None:
            raise error


@contextmanager
def reporting_failures(engine: Engine, step: int | Best | None) -> Iterator[None]:
    """Notify observers where a load of *step*, or of the newest one for None, raises or is cancelled."""
    begun_ns = engine.now_ns()
    try:
        yield
    except (Exception, CancelledError) as error:
        why = say_briefly(error) if isinstance(error, Exception) else CANCELLED
        at = step if isinstance(step, int) else -1
        engine.emit(LoadFailed(at_ns=engine.now_ns(), step=at, error=why, seconds=engine.since_s(begun_ns)))
        raise


class Trials:
    """The copies that one load tries, one after the other, and what it has to know of those before; alone and on a rank.

    Attributes:
        skipped: (step id, reason) of each that is skipped.
    """

    def __init__(self, engine: Engine, request: LoadRequest) -> None:
        self.skipped: Skipped = []
        self._engine, self._request = engine, request
        self._begun_ns = engine.now_ns()
        # Leaves that damaged steps have overwritten.
        self._touched: frozenset[str] = frozenset()
        self._lacking: StateMismatchError | None = None

    async def match(self, place: Place, manifest: Manifest) -> LoadTarget:
        """Match the state with a copy; raises as `match_state`.

        Raises:
            StateMismatchError: also when this copy would leave bytes of a damaged step (docs/decisions.md#loading).
        """
        target = await match_state(place, self._request, manifest)
        if self._touched and (left := self._touched - target.written):
            newer = ", ".join(name for name, _ in self.skipped)
            raise StateMismatchError(
                manifest.id,
                [f"{name}: overwritten from {newer} and not stored here" for name in sorted(left)],
                "The state is partly overwritten and not usable: build it anew, then load an explicit step.",
            )
        return target

    def pass_over(self, place: Place, manifest: Manifest, error: StateMismatchError) -> None:
        """Skip a copy of the weights alone that does not fit; raise for others, and when the step was requested."""
        if not has_weights_only(manifest):
            raise error
        advice = 'Load what it has, as with only=["model"], or a step that is somewhere in full.'
        where = f"{manifest.id} in {place.backend.url}, which has its weights only,"
        explained = StateMismatchError(where, error.problems, advice)
        if self._request.step is not None:
            raise explained from error
        self._lacking = self._lacking or explained
        note_skipped(self._engine, manifest.id, manifest.step, explained, self.skipped)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the mismatch of the first skipped copy of weights when the block finds nothing else to load."""
        try:
            yield
        except (NoValidCheckpointError, RankFailedError) as error:
            if self._lacking is None:
                raise
            raise self._lacking from error

    def skip_damaged(self, step_id: str, step: int, target: LoadTarget | None, error: CorruptionError) -> None:
        """Skip a step whose data are damaged; raise when it was requested.

        Args:
            target: what it has overwritten; None where it was not matched.
        """
        if target is not None:
            self._touched |= target.written
            if self._request.step is not None:
                error.add_note(
                    "The state given to load() is partly overwritten: build it anew, or load another step over it."
                )
        if self._request.step is not None:
            raise error
        note_skipped(self._engine, step_id, step, error, self.skipped)

    def finish(self, place: Place, manifest: Manifest, target: LoadTarget, traffic: Traffic) -> Filled:
        """Begin a new line of saves at the step that was loaded, and notify observers."""
        engine = self._engine
        engine.lineage.descend_from(manifest, place.backend)
        if manifest.finite is False:
            _log_not_finite(place, manifest)
        has_config = engine.options.config is not None and manifest.config is not msgspec.UNSET
        result = emit_loaded(
            engine,
            target,
            traffic,
            self._begun_ns,
            saved_ns=manifest.created_ns,
            step=manifest.step,
            id=manifest.id,
            generation=manifest.generation,
            url=place.backend.url,
            skipped=tuple(self.skipped),
            config_changes=_config_changes(engine, manifest) if has_config else (),
        )
        return Filled(result, target)


def stored_state(manifest: Manifest, rank: int, world_size: int = 1) -> Stored:
    """Return what *manifest* offers to a state on *rank* of *world_size*."""
    every_rank = manifest.state.get("per_rank", {})
    return Stored(
        tensors={name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()},
        axes={name: entry.axes for name, entry in manifest.tensors.items() if entry.axes},
        alias=manifest.alias,
        left_out=manifest.left_out or {},
        values=manifest.state.get("global"),
        per_rank=every_rank.get(str(rank)),
        where=manifest.id,
        step=manifest.step,
        rank=rank,
        world_size=world_size,
        every_rank=every_rank,
        saved_world_size=manifest.world_size,
    )


async def match_state(place: Place, request: LoadRequest, manifest: Manifest) -> LoadTarget:
    """Match the state with a checkpoint; nothing of it changes.

    Raises:
        StateMismatchError: they do not fit; also when the weights alone were found for a state that needs more, and
            ``strict=False`` would accept them as the newest step.
    """
    rank, world_size = place.engine.rank, place.engine.world_size
    with place.engine.stages("load", manifest.step).time("match"):
        target = await run_blocking(
            place.engine.state_work,
            lambda: open_target(
                request.state,
                stored_state(manifest, rank, world_size),
                only=request.only,
                strict=request.strict,
                rename=request.rename,
                judge_unexpected=world_size == 1,  # other ranks may want what this one does not
                optimizer_state=request.optimizer_state,
            ),
        )
    if target.missing and request.step is None and has_weights_only(manifest):
        raise StateMismatchError(manifest.id, target.problems, "Name the step to load what fits of it.")
    return target


async def fill(place: Place, manifest: Manifest, target: LoadTarget, tensors: FillTensors | None = None) -> Traffic:
    """Fill the tensors of *target*, every block verified.

    Args:
        tensors: how; None reads everything on this rank.
    """
    async with place.reading(manifest.id):
        if place.engine.options.io.verify == "full":
            with place.engine.stages("load", manifest.step).time("verify"):
                await verify_files(place, manifest)
        return await (tensors or fill_tensors)(place, manifest, target.wanted)


def _log_not_finite(place: Place, manifest: Manifest) -> None:
    """Log that a step which is loaded has numbers that are not finite."""
    found = list_names(tuple(count_not_finite_in(manifest.files)))
    logger.warning(
        "step %d is loaded, and has numbers that are NaN or infinite in %s; aiockpt ls %s shows which steps have none",
        manifest.step,
        found,
        place.backend.url,
    )


def emit_loaded(
    engine: Engine, target: LoadTarget, traffic: Traffic, begun_ns: int, *, saved_ns: int = 0, **origin: Any
) -> LoadResult:
    """Notify observers of a load that is whole, and return its result; *origin* has the fields that say what was loaded."""
    result = LoadResult(
        **origin,
        bytes=sum(shard.data.nbytes for shard in target.wanted),
        read_bytes=traffic.read_bytes,
        received_bytes=traffic.received_bytes,
        seconds=engine.since_s(begun_ns),
        saved_ns=saved_ns,
        missing=target.missing,
        unexpected=target.unexpected,
        differences=(*target.problems, *target.notes),
        left_out=target.left_out,
        renamed=target.renamed,
    )
    engine.emit(
        Loaded(
            at_ns=engine.now_ns(),
            step=result.step,
            bytes=result.bytes,
            read_bytes=result.read_bytes,
            seconds=result.seconds,
            saved_ns=saved_ns,
            forked_from=engine.lineage.origin,
        )
    )
    return result


def _config_changes(engine: Engine, manifest: Manifest) -> tuple[str, ...]:
    """Return how the configuration has changed since the step was saved, and log it once for all ranks."""
    changes = config_changes(manifest.config, engine.options.config)
    if changes and engine.rank == 0:
        more = f"; and {len(changes) - CHANGES_LOGGED} more" if len(changes) > CHANGES_LOGGED else ""
        logger.warning(
            "step %d: the configuration has changed since it was saved: %s%s",
            manifest.step,
            "; ".join(changes[:CHANGES_LOGGED]),
            more,
        )
    return changes


class FillTensors(Protocol):
    """A way to fill tensors from a manifest's files, every block verified; `fill_tensors` is the plain one."""

    async def __call__(self, place: Place, manifest: Manifest, wanted: Sequence[TensorShard], /) -> Traffic: ...


async def fill_tensors(place: Place, manifest: Manifest, wanted: Sequence[TensorShard]) -> Traffic:
    """Fill the tensors of *wanted* from the files of *manifest*, every block verified."""
    stages = place.engine.stages("load", manifest.step)
    with stages.time("plan"):
        memory = await run_blocking(place.engine.state_work, LoadMemory, manifest, wanted, scratch_limit_bytes(place))
    tally = Tally()
    fetcher = open_fetcher(place, manifest, tally)
    for number, landings in enumerate(memory.plan.passes):
        await fetcher.fetch(landings, memory.views)
        with stages.time("scatter"):
            await run_blocking(place.engine.state_work, memory.finish, number)
    return Traffic(tally.bytes)


def scratch_limit_bytes(place: Place) -> int:
    """Return the limit of a load's scratch memory, large enough that reads seldom wait for its reuse."""
    return SCRATCH_READS * place.backend.traits.block_reads * place.engine.options.io.read_bytes


class Tally:
    """Counts the bytes of reads."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, size: int) -> None:
        self.bytes += size


def open_fetcher(place: Place, manifest: Manifest, on_read: Callable[[int], object]) -> Fetcher:
    """Return the reader of the files of *manifest*, by the engine's options."""
    io = place.engine.options.io
    return Fetcher(
        place.backend,
        manifest,
        read_bytes=io.read_bytes,
        verify=io.verify != "none",
        on_read=on_read,
        elsewhere=partial(place.other_copies, manifest),
        stages=place.engine.stages("load", manifest.step),
    )


async def verify_files(
    place: Place,
    manifest: Manifest,
    on_read: Callable[[int], object] = lambda _: None,
    only: Sequence[int] | None = None,
) -> None:
    """Read and compare every block of every file of *manifest*, or of those with the numbers *only*.

    Raises:
        CorruptionError: names file, block, offset and tensors.
    """
    fetcher = Fetcher(place.backend, manifest, read_bytes=place.engine.options.io.read_bytes, on_read=on_read)
    for index in range(len(manifest.files)) if only is None else only:
        await fetcher.verify_file(index)


# Reading one tensor, or a slice of it, without the rest: the same plan and the same checks as a load.


async def read(places: StepPlaces, step: int | None, name: str, rows: slice | None) -> torch.Tensor:
    """Return tensor *name* of a step (the newest valid one for None), or the *rows* of its first axis, on the host."""
    return await read_found(await find_manifest(places, step), name, rows)


async def read_found(found: Found, name: str, rows: slice | None) -> torch.Tensor:
    """Return tensor *name* of a step that was found, or the *rows* of its first axis, on the host."""
    stored = _stored_name(found.manifest, name)
    return await read_tensor(found, stored, _rows(name, found.manifest.tensors[stored].shape, rows))


async def read_tensor(found: Found, stored: str, box: Box | None = None) -> torch.Tensor:
    """Return what is stored under a name, or a *box* of it, on the host; also the tensor of a list of numbers."""
    place, manifest = found.place, found.manifest
    stored = manifest.alias.get(stored, stored)
    entry = manifest.tensors[stored]
    box = box or Box.whole(entry.shape)
    tensor = torch.empty(box.sizes, dtype=torch_dtype(entry.dtype))
    shard = TensorShard(name=stored, dtype=entry.dtype, shape=entry.shape, boxes=(box,), data=tensor)
    async with place.reading(manifest.id):
        await fill_tensors(place, manifest, [shard])
    return tensor


def _stored_name(manifest: Manifest, name: str) -> str:
    stored = manifest.alias.get(name, name)
    if stored in manifest.tensors:
        count = _count_of_numbers(manifest.state, stored) if len(manifest.tensors[stored].shape) == 1 else None
        if count is None:
            return stored
        advice = _advise_loading(manifest, name) or "Load it: load() into a state that has it."
        raise StateMismatchError(manifest.id, [f"{name}: {count:,} plain numbers, and read() is for tensors"], advice)
    raise StateMismatchError(manifest.id, *_describe_name(manifest, name))


def _describe_name(manifest: Manifest, name: str) -> tuple[list[str], str]:
    """Return what is stored under *name*, which is no tensor, and how to get it."""
    if name in (manifest.left_out or {}):
        return [
            f"{name}: left out when this step was saved (only= or exclude= of save())"
        ], "Take it from where it came."
    names = [*manifest.tensors, *manifest.alias]
    below = [other for other in names if name in prefixes(other)]
    if below:
        some = ", ".join(below[:3]) + (", …" if len(below) > 3 else "")
        return [f"{name}: not one tensor but {len(below)} ({some})"], "Read one of them, or load() all into a state."
    if (advice := _advise_loading(manifest, name)) is not None:
        return [f"{name}: a plain value, and read() is for tensors"], advice
    if name.partition(".")[0] in (manifest.state.get("global") or {}):
        advice = "describe() lists the names of tensors, `aiockpt inspect` shows the values too."
    else:
        advice = "describe() lists the names."
    close = difflib.get_close_matches(name, names, n=5)
    return [f"{name}: no such tensor is stored"], f"Did you mean {', '.join(close)}?" if close else advice


def _count_of_numbers(tree: Node, stored: str) -> int | None:
    """Return how many plain numbers the tensor *stored*, which is longer, encodes; None for a real tensor."""
    if type(tree) is dict and tree.get(TAG) == "numbers":
        count: int | None = tree["count"] if tree["name"] == stored else None
        return count
    inside = tree.values() if type(tree) is dict else tree if type(tree) is list else ()
    counts = (_count_of_numbers(node, stored) for node in inside if type(node) in (dict, list))
    return next((count for count in counts if count is not None), None)


def _advise_loading(manifest: Manifest, name: str) -> str | None:
    """Return the line that loads a plain value alone, or None where it cannot be."""
    if (key := _key_of_value(manifest, name)) is None:
        return None
    return f"Load it: values = {{{key!r}: None}}; ckpt.load(values, {manifest.step}).result()"


def _key_of_value(manifest: Manifest, name: str) -> str | None:
    """Return the top-level key with which the plain value *name* can be loaded alone, or None where it cannot be."""
    try:
        path = split_name(name)
    except UsageError:
        return None
    values = manifest.state.get("global")
    if not path or find_node(values, path) is None:
        return None
    top = find_node(values, path[:1])
    return str(path[0]) if top is not None and not any(objects_in(top.node)) else None


def _rows(name: str, shape: tuple[int, ...], rows: slice | None) -> Box:
    if rows is None:
        return Box.whole(shape)
    if not shape:
        raise UsageError(f"{name} is a scalar: it has no rows")
    if not isinstance(rows, slice):
        raise UsageError(f"rows={rows!r}: give a slice, such as slice(0, 10)")
    if rows.step not in (None, 1):
        raise UsageError(f"rows={rows}: give a slice without a step")
    try:
        start, stop, _ = rows.indices(shape[0])
    except TypeError as error:
        raise UsageError(f"rows={rows}: give a slice of integers, such as slice(0, 10)") from error
    return Box((start, *(0 for _ in shape[1:])), (max(stop - start, 0), *shape[1:]))


def log_resumed(engine: Engine, loaded: LoadResult | None, url: str) -> None:
    """Write to stderr, on rank 0, where a run goes on; nothing where the program has configured logging, which has it."""
    if engine.rank or logger.level or logger.hasHandlers() or sys.stderr is None:
        return
    if loaded is None:
        line = f"nothing in {url}: begins at step 0"
    elif loaded.step < 0:
        line = f"begins at step 0 with what {loaded.url} holds"
    else:
        seconds = (engine.world.clock.time_ns() - loaded.saved_ns) / 1e9
        ago = f", saved {duration(max(0.0, seconds))} ago" if loaded.saved_ns else ""
        line = f"resumed step {loaded.step} of {loaded.url}{ago}"
    sys.stderr.write(f"aiockpt: {line}\n")


def log_loaded(loaded: LoadResult | None, url: str, *, forked: bool = False) -> None:
    """Log a load whose tensors are filled, or one that found no checkpoint at all at *url*."""
    if logger.isEnabledFor(logging.INFO):
        _log_loaded(loaded, url, forked=forked)


def _log_loaded(loaded: LoadResult | None, url: str, *, forked: bool) -> None:
    if loaded is None:
        logger.info("nothing to load: there is no checkpoint yet in %s", url)
        return
    over = f", passed over: {list_names([name for name, _ in loaded.skipped])}" if loaded.skipped else ""
    differing = f", {len(loaded.differences)} differences" if loaded.differences else ""
    logger.info(
        "%s %s: %s in %.2f s, from %s%s%s",
        "forked from" if forked else "loaded",
        "a foreign checkpoint" if loaded.step < 0 else f"step {loaded.step}",
        size(loaded.bytes),
        loaded.seconds,
        loaded.url,
        over,
        differing,
    )


# Live tensors from fetched bytes: mostly they are fetched straight into them; the rest is copied at the end.
#
# A target that is dense host memory is filled in place. One on a device, or strided, is fetched into a staging tensor and
# copied when all blocks are verified. Pieces that overlap a target in short runs come through scratch memory, which may be
# limited: then the passes of a load use it one after the other.


class LoadMemory:
    """The memory that a load fills.

    Args:
        shards: what is wanted; ``data`` is the live tensor, filled in place.
        scratch_limit_bytes: of scratch memory, unless one piece is larger. Each pass must then be finished before
            the next one is read; without a limit all may be read at once.
    """

    def __init__(
        self, manifest: Manifest, shards: Sequence[TensorShard], scratch_limit_bytes: int | None = None
    ) -> None:
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._wanted: list[Wanted] = []
        self._parts: list[torch.Tensor] = []  # a dense tensor for each wanted box
        for shard in shards:
            dense: torch.Tensor = shard.data
            if not is_fillable(dense):
                dense = torch.empty(dense.shape, dtype=dense.dtype, device="cpu")
                self._staged.append((shard.data, dense))
            if len(shard.boxes) == 1:
                self._wanted.append(Wanted(shard.name, shard.boxes[0]))
                self._parts.append(dense)
            else:
                self._add_boxes(shard, dense)
        with collector_paused():
            self.plan: LoadPlan = plan_load(manifest, self._wanted, scratch_limit_bytes)
        memory = torch.empty(self.plan.scratch_bytes, dtype=torch.uint8)
        self._scratch = [memory[offset : offset + size] for offset, size in self.plan.scratch]
        self._unplaced: dict[int, list[Scattered]] = {}
        for piece in self.plan.scattered:
            self._unplaced.setdefault(piece.pass_number, []).append(piece)
        self.views = [byte_view(tensor) for tensor in (*self._parts, *self._scratch)]

    def _add_boxes(self, shard: TensorShard, dense: torch.Tensor) -> None:
        flat = dense.view(-1)
        start = 0
        for box in shard.boxes:
            self._wanted.append(Wanted(shard.name, box))
            self._parts.append(flat[start : start + box.volume])
            start += box.volume

    @property
    def is_in_place(self) -> bool:
        """Whether all bytes come where they belong, so that `finish` has nothing to copy."""
        return not self._unplaced and not self._staged

    # Tensors that fit come as they are, not detached: torch refuses to change a parameter in place outside of this.
    @torch.no_grad()
    def finish(self, pass_number: int | None = None) -> None:
        """Copy staged and scratch data to the targets. Runs on a worker thread, after all blocks were verified.

        Args:
            pass_number: the pass that was read, whose part of the scratch memory becomes free; None: all were read.
        """
        all_read = pass_number is None or pass_number == len(self.plan.passes) - 1
        for number, pieces in self._unplaced.items():
            if all_read or number == pass_number:
                while pieces:
                    self._place(pieces.pop())
        if all_read:
            for live, dense in self._staged:
                live.copy_(dense)

    def _place(self, piece: Scattered) -> None:
        target = self._parts[piece.target]
        scratch = self._scratch[piece.scratch - len(self._parts)]
        box = self._wanted[piece.target].box
        source = scratch.view(target.dtype).view(piece.stored.sizes)[_slices(piece.overlap, piece.stored)]
        target.view(box.sizes)[_slices(piece.overlap, box)].copy_(source)


def _slices(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(
        slice(low - base, low - base + size)
        for low, base, size in zip(part.offsets, whole.offsets, part.sizes, strict=True)
    )


def is_fillable(tensor: torch.Tensor) -> bool:
    """Return whether bytes can be read straight into *tensor*."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
