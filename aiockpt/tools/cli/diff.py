"""Differences between two steps: leaf by leaf, bit by bit, with the size of the difference where there is one."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import anyio
import msgspec
import torch

from aiockpt.adapters.tensors import torch_dtype
from aiockpt.engine.load import Places, stored_state
from aiockpt.errors import StorageError
from aiockpt.format.configuration import flatten, shown_value
from aiockpt.format.dtypes import itemsize
from aiockpt.format.manifest import Manifest, TensorEntry
from aiockpt.format.names import lease_key, prefixes
from aiockpt.options import IO
from aiockpt.pipeline.discover import StepEntry, newest_manifest
from aiockpt.pipeline.fetch import Fetcher
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.world import World
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard
from aiockpt.storage.backend import Backend
from aiockpt.tools.cli.contents import read_values, shorten
from aiockpt.tools.cli.show import shape_text

RELEASE_S = 10.0
BATCH_BYTES = 256 << 20
"""Tensors of each step that are read at once: neighbours share blocks, which are read and verified whole."""

CHUNK_ELEMENTS = 1 << 14
"""Elements compared at once. What is computed of them, as float64, stays in the processor's cache, and torch does not
spread it over threads: ten million float32 took 0.08 s, and 0.5 s in chunks of a million on a machine that others use."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Kind = Literal["same", "changed", "added", "removed", "left out"]


class TensorDifference(msgspec.Struct, frozen=True):
    """Distance of two tensors of one shape, computed as float64.

    Attributes:
        changed: elements whose bits differ, of *elements*.
        largest, mean: of the absolute differences, over the elements that are numbers in both; None when none is.
        relative: the Euclidean length of the difference against that of the first tensor; None where that is 0,
            or more than a float64 can say.
        not_finite: elements of the second that are NaN or infinite.
    """

    elements: int
    changed: int
    largest: float | None
    mean: float | None
    relative: float | None
    not_finite: int


class LeafChange(msgspec.Struct, frozen=True):
    """One leaf of two steps; *detail* has what it was and is, where a difference does not."""

    name: str
    what: Literal["tensor", "value"]
    kind: Kind
    detail: str = ""
    difference: TensorDifference | None = None


async def diff_steps(
    before: StepReader, after: StepReader, on_compared: Callable[[int], object] = lambda _: None
) -> list[LeafChange]:
    """Compare every tensor and value of two steps.

    Args:
        on_compared: called with the bytes of each tensor when it is compared.

    Raises:
        CorruptionError: a block of either is not as it was saved.
    """
    old, new = before.manifest.tensors, after.manifest.tensors
    changes = {name: _without_reading(name, old.get(name), new.get(name)) for name in {**old, **new}}
    for name, change in changes.items():
        if change.kind != "same" and name in old:
            on_compared(tensor_bytes(old[name]))
    for batch in _batches([name for name, change in changes.items() if change.kind == "same"], old):
        pairs = zip(batch, await before.read(batch), await after.read(batch), strict=True)
        for name, left, right in pairs:
            changes[name] = _compare(name, left, right)
            on_compared(tensor_bytes(old[name]))
    found = [
        *changes.values(),
        *_aliases(before.manifest.alias, after.manifest.alias),
        *_values(_all_values(before.manifest), _all_values(after.manifest)),
    ]
    return _mark_left_out(found, before.manifest, after.manifest)


def tensor_bytes(entry: TensorEntry) -> int:
    """Return the bytes of a tensor."""
    return itemsize(entry.dtype) * math.prod(entry.shape)


def _without_reading(name: str, old: TensorEntry | None, new: TensorEntry | None) -> LeafChange:
    if old is None and new is not None:
        return LeafChange(name, "tensor", "added", _shape(new))
    if new is None and old is not None:
        return LeafChange(name, "tensor", "removed", _shape(old))
    if old is not None and new is not None and (old.dtype, old.shape) != (new.dtype, new.shape):
        return LeafChange(name, "tensor", "changed", f"{_shape(old)} → {_shape(new)}")
    return LeafChange(name, "tensor", "same")


def _mark_left_out(found: Sequence[LeafChange], before: Manifest, after: Manifest) -> list[LeafChange]:
    """Mark names that one of two steps was saved without, by choice: whether they changed is unknown.

    What both were saved without is the same as far as that was noted: dtype and shape.
    """
    old, new = before.left_out or {}, after.left_out or {}
    kept = [one for one in found if not (one.kind in ("added", "removed") and _covers({**old, **new}, one.name))]
    for name in {**old, **new}:
        kind: Kind = "same" if name in old and name in new and old[name] == new[name] else "left out"
        facts = (_noted(left, manifest, name) for left, manifest in ((old, before), (new, after)))
        kept.append(LeafChange(name, "tensor", kind, "" if kind == "same" else " → ".join(facts)))
    return kept


def _covers(left_out: Mapping[str, object], name: str) -> bool:
    return name in left_out or any(prefix in left_out for prefix in prefixes(name))


def _noted(left_out: Mapping[str, tuple[str, tuple[int, ...]] | None], manifest: Manifest, name: str) -> str:
    if name in left_out:
        facts = left_out[name]
        return "left out" if facts is None else f"left out ({_in_words(*facts)})"
    entry = manifest.tensors.get(manifest.alias.get(name, name))
    return "there" if entry is None else _shape(entry)


def _shape(tensor: TensorEntry) -> str:
    return _in_words(tensor.dtype, tensor.shape)


def _in_words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape_text(shape)}"


def _batches(names: Sequence[str], tensors: Mapping[str, TensorEntry]) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for name in names:
        size = tensor_bytes(tensors[name])
        if batch and held + size > BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += size
    if batch:
        yield batch


def _compare(name: str, left: torch.Tensor, right: torch.Tensor) -> LeafChange:
    if torch.equal(_bits(left), _bits(right)):
        return LeafChange(name, "tensor", "same")
    return LeafChange(name, "tensor", "changed", difference=measure_difference(left, right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of *tensor* as integers, a row for each element."""
    return tensor.reshape(-1, 1).view(_WORDS.get(tensor.element_size(), torch.int64))


def measure_difference(left: torch.Tensor, right: torch.Tensor) -> TensorDifference:
    """Return how far two tensors of one dtype and shape are from each other."""
    changed = not_finite = counted = 0
    largest, total, distance, length = 0.0, 0.0, 0.0, 0.0
    for start in range(0, left.numel(), CHUNK_ELEMENTS):
        one, two = (tensor.reshape(-1)[start : start + CHUNK_ELEMENTS] for tensor in (left, right))
        changed += _count_changed(one, two)
        was, now = _widen(one), _widen(two)
        if was is None or now is None:
            continue
        apart = now - was
        if not math.isfinite(_norm(apart, 1)):  # one of them is not a number, or two large ones are too far apart
            not_finite += int((~now.isfinite()).sum())
            numbers = was.isfinite() & now.isfinite()
            was, apart = was[numbers], apart[numbers]
        if apart.numel():
            counted += apart.numel()
            largest = max(largest, _norm(apart, math.inf))
            total += _norm(apart, 1)
            distance = math.hypot(distance, _norm(apart, 2))
            length = math.hypot(length, _norm(was, 2))
    return TensorDifference(
        elements=left.numel(),
        changed=changed,
        largest=largest if counted else None,
        mean=total / counted if counted else None,
        relative=distance / length if 0 < length < math.inf else None,
        not_finite=not_finite,
    )


def _count_changed(one: torch.Tensor, two: torch.Tensor) -> int:
    """Return how many elements differ in a bit."""
    differ = _bits(one) != _bits(two)
    return int(torch.count_nonzero(differ if differ.shape[1] == 1 else differ.any(dim=1)))


def _norm(tensor: torch.Tensor, order: float) -> float:
    return float(torch.linalg.vector_norm(tensor, order))


def _widen(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return *tensor* as float64 or complex128; None where torch cannot compute with its elements."""
    with suppress(NotImplementedError):
        return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return None


def _aliases(old: Mapping[str, str], new: Mapping[str, str]) -> list[LeafChange]:
    """Compare which names share the memory of another tensor."""
    changes = []
    for name in {**old, **new}:
        was, now = old.get(name), new.get(name)
        kind = _kind_of_change(name in old, name in new, was == now)
        texts = [f"= {target}" for target in (was, now) if target is not None]
        changes.append(LeafChange(name, "tensor", kind, "" if kind == "same" else " → ".join(texts)))
    return changes


def _kind_of_change(was_there: bool, is_there: bool, equal: bool) -> Kind:
    if was_there and is_there:
        return "same" if equal else "changed"
    return "removed" if was_there else "added"


def _values(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[LeafChange]:
    changes = []
    for name in {**old, **new}:
        was, now = old.get(name), new.get(name)
        equal = repr(was) == repr(now)  # NaN equals itself here, and 1 is not True
        kind = _kind_of_change(name in old, name in new, equal)
        texts = [shorten(value, 30) for value, there in ((was, name in old), (now, name in new)) if there]
        changes.append(LeafChange(name, "value", kind, "" if kind == "same" else " → ".join(texts)))
    return changes


def _all_values(manifest: Manifest) -> dict[str, Any]:
    """Return the values by name: those that all ranks share, those of each rank (named after it), and the user's own."""
    per_rank: Mapping[str, Mapping[str, Any]] = manifest.state.get("per_rank", {})
    values = read_values(stored_state(manifest, 0))
    for rank in range(1, manifest.world_size):
        own = tuple(per_rank.get(str(rank), ()))
        theirs = read_values(stored_state(manifest, rank))
        values |= {f"rank {rank}: {name}": value for name, value in theirs.items() if name.startswith(own)}
    if manifest.user is not None:
        values["user"] = manifest.user
    if manifest.config is not msgspec.UNSET:
        values |= {name: shown_value(name, value) for name, value in flatten(manifest.config)}
    return values


class StepReader:
    """Reads whole tensors of one step, several at once, so that each verified block is read once; see `open_step`.

    (`Checkpointer.read` is for one tensor: it reads the blocks around it whole, and the manifest again each time.)
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self.manifest = manifest
        self._backend = backend
        self._threads = Limiter("reading", 1)

    async def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the tensors *names*, every block verified.

        Raises:
            CorruptionError: a block is not as it was saved.
        """
        shards = [self._shard(name) for name in names]
        places = await run_blocking(self._threads, Places, self.manifest, shards)
        fetcher = Fetcher(
            self._backend,
            self.manifest,
            places.memories,
            read_bytes=IO().read_bytes,
            verify=True,
            on_read=lambda _: None,
        )
        for landings in places.plan.passes:
            async with open_tasks() as tasks:
                for file, some in landings.items():
                    tasks.start_soon(fetcher.fetch_file, file, some)
        await run_blocking(self._threads, places.settle)
        return [shard.data for shard in shards]

    def _shard(self, name: str) -> TensorShard:
        entry = self.manifest.tensors[name]
        tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        return TensorShard(
            name=name, dtype=entry.dtype, shape=entry.shape, boxes=(Box.whole(entry.shape),), data=tensor
        )


@asynccontextmanager
async def open_step(backend: Backend, entry: StepEntry) -> AsyncIterator[StepReader]:
    """Open a step for reading, and keep the retention of other processes away from it meanwhile.

    Raises:
        ManifestError: none of its generations is valid.
    """
    key = lease_key(entry.id, World().token(6).hex())
    try:
        await backend.put(key, b"")
    except StorageError:
        key = ""  # a place that may only be read: nothing is deleted there either
    try:
        yield StepReader(backend, await newest_manifest(backend, entry))
    finally:
        if key:
            with anyio.move_on_after(RELEASE_S, shield=True):
                await backend.delete([key])
