"""Differences between two steps: leaf by leaf, bit by bit, with the size of the difference where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal

import msgspec
import torch

from aiockpt.adapters.plain_values import in_words
from aiockpt.adapters.stored import members_of
from aiockpt.adapters.tensors import torch_dtype
from aiockpt.convert.folder_layout import split_by_bytes
from aiockpt.engine.alone import Destination
from aiockpt.engine.context import Place
from aiockpt.engine.load import fill_tensors, stored_state
from aiockpt.format.configuration import flatten, shown_value
from aiockpt.format.dtypes import itemsize
from aiockpt.format.manifest import Manifest, TensorEntry
from aiockpt.format.names import Names, name_within, prefixes
from aiockpt.pipeline.discover import newest_manifest
from aiockpt.runtime.limits import run_blocking
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import TAG, Node
from aiockpt.tools.cli.contents import read_values, shorten
from aiockpt.tools.cli.show import shape_text
from aiockpt.tools.cli.survey import find_committed

BATCH_BYTES = 256 << 20
"""Tensors of each step that are read at once: neighbours share blocks, which are read and verified whole."""

CHUNK_ELEMENTS = 1 << 14
"""Elements compared at once. Their float64 intermediates stay in the processor's cache, and torch does not spread the
work over threads: ten million float32 took 0.08 s, and 0.5 s in chunks of a million on a machine that others use."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Kind = Literal["same", "changed", "added", "removed", "left out", "not compared"]
"""The last is of names that both steps leave out."""


class TensorDifference(msgspec.Struct, frozen=True):
    """Distance of two tensors of one shape, computed as float64.

    Attributes:
        changed: elements whose bits differ, of *elements*.
        largest, mean: of the absolute differences, over the elements that are numbers in both; None when none is.
        relative: the Euclidean norm of the difference over that of the first tensor; None where that is 0, or beyond the
            range of float64.
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

    @property
    def differs(self) -> bool:
        """Whether a difference is known, or possible because one step left it out."""
        return self.kind not in ("same", "not compared")


_COMPARED_ELSEWHERE = ("tensor", "numpy.ndarray", "optimizer")
"""Kinds of nodes whose elements, or values by name, are compared one by one."""
_ALIKE = "not equal, though shown alike"

Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]
"""Shows progress over a total of bytes; called with the bytes of each tensor after its comparison."""


async def diff_steps(steps: Destination, one: int, two: int, progress: Progress) -> list[LeafChange]:
    """Compare every tensor and value of two steps; retention of other processes skips them meanwhile.

    Raises:
        StepNotFoundError, ManifestError: a step does not exist, or none of its generations is valid.
        CorruptionError: a block of either is damaged.
    """
    place = steps.places[0]
    entries = [await find_committed(place.backend, step) for step in (one, two)]
    async with place.reading(entries[0].id), place.reading(entries[1].id):
        before, after = [await newest_manifest(place.backend, entry) for entry in entries]
        with progress(sum(map(_tensor_bytes, before.tensors.values()))) as on_compared:
            changes = await _diff_tensors(place, before, after, on_compared)
    found = [
        *changes,
        *_by_name("tensor", before.alias, after.alias, lambda target: f"= {target}"),
        *_by_name("value", _all_values(before), _all_values(after), lambda value: shorten(value, 30)),
    ]
    return _mark_left_out(_mark_shown_alike(found, before, after), before, after)


async def _diff_tensors(
    place: Place, before: Manifest, after: Manifest, on_compared: Callable[[int], object]
) -> Iterable[LeafChange]:
    """Compare the tensors, several of each step at once, so that each verified block is read once."""
    old, new = before.tensors, after.tensors
    was, now = ({name: _shape(entry) for name, entry in side.items()} for side in (old, new))
    changes = {change.name: change for change in _by_name("tensor", was, now, str)}
    for name, change in changes.items():
        if change.kind != "same" and name in old:
            on_compared(_tensor_bytes(old[name]))
    same = [name for name, change in changes.items() if change.kind == "same"]
    for batch in split_by_bytes(same, lambda name: _tensor_bytes(old[name]), BATCH_BYTES):
        pairs = zip(batch, await _read(place, before, batch), await _read(place, after, batch), strict=True)
        for name, left, right in pairs:
            changes[name] = await run_blocking(place.engine.state_work, _compare, name, left, right)
            on_compared(_tensor_bytes(old[name]))
    return changes.values()


async def _read(place: Place, manifest: Manifest, names: Sequence[str]) -> list[torch.Tensor]:
    wanted = []
    for name in names:
        entry = manifest.tensors[name]
        tensor = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        wanted.append(TensorShard(name, entry.dtype, entry.shape, (Box.whole(entry.shape),), tensor))
    await fill_tensors(place, manifest, wanted)
    return [shard.data for shard in wanted]


def _tensor_bytes(entry: TensorEntry) -> int:
    return itemsize(entry.dtype) * math.prod(entry.shape)


def _mark_shown_alike(found: Sequence[LeafChange], before: Manifest, after: Manifest) -> list[LeafChange]:
    """Mark the values that differ and whose texts do not: in the type of a container, or in digits that are not printed."""
    changes = {(change.what, change.name): change for change in found}
    differing = {change.name for change in found if change.differs}
    known = Names(differing)
    for name, detail in _unequal_parts(before, after):
        if not known.reach(name) and differing.isdisjoint(prefixes(name)):
            leaf = next((prefix for prefix in prefixes(name) if ("value", prefix) in changes), name)
            changes["value", leaf] = LeafChange(leaf, "value", "changed", detail)
    return list(changes.values())


def _unequal_parts(before: Manifest, after: Manifest) -> Iterator[tuple[str, str]]:
    """Yield each smallest part of the values that is stored otherwise in the second step: its name, and a description."""
    yield from _unequal(before.state.get("global"), after.state.get("global"), "")
    old, new = (manifest.state.get("per_rank", {}) for manifest in (before, after))
    for rank in old.keys() & new.keys():
        label = "" if rank == "0" else f"rank {rank}: "
        for name in old[rank].keys() & new[rank].keys():
            yield from _unequal(old[rank][name], new[rank][name], label + name)


def _unequal(old: Node, new: Node, name: str) -> Iterator[tuple[str, str]]:
    kind = _kind(old)
    if kind != _kind(new):
        yield name, f"{in_words(old)} → {in_words(new)}"
    elif kind in _COMPARED_ELSEWHERE or msgspec.json.encode(old) == msgspec.json.encode(new):
        return
    elif kind == "module":
        yield from _unequal(old.get("values", {}), new.get("values", {}), name)
    elif kind == "stateful" and old.get("class") == new.get("class"):
        yield from _unequal(old.get("value"), new.get("value"), name)
    elif kind in ("dict", "OrderedDict", "list", "tuple"):
        yield from _unequal_items(old, new, name)
    else:
        yield name, _ALIKE


def _unequal_items(old: Node, new: Node, name: str) -> Iterator[tuple[str, str]]:
    was, now = members_of(old), members_of(new)
    for key in {**was, **now}:
        part = name_within(name, key)
        if key not in was:
            yield part, f"added: {in_words(now[key])}"
        elif key not in now:
            yield part, f"removed: {in_words(was[key])}"
        else:
            yield from _unequal(was[key], now[key], part)
    if _kind(old) == "OrderedDict" and [key for key in was if key in now] != [key for key in now if key in was]:
        yield name, "in another order"
    if _without_names(old) != _without_names(new):
        yield name, _ALIKE


def _kind(node: Node) -> str:
    return str(node.get(TAG, "dict")) if type(node) is dict else type(node).__name__


def _without_names(node: Node) -> bytes:
    """Return what `members_of` leaves out of a dict, encoded: the items under keys that are neither text nor integers."""
    items = node.get("items", []) if type(node) is dict and _kind(node) in ("dict", "OrderedDict") else []
    return msgspec.json.encode([pair for pair in items if type(pair[0]) not in (str, int)])


def _mark_left_out(found: Sequence[LeafChange], before: Manifest, after: Manifest) -> list[LeafChange]:
    """Mark names that were excluded when one of two steps was saved, or both: whether they changed is unknown."""
    old, new = before.left_out or {}, after.left_out or {}
    kept = [
        change for change in found if not (change.kind in ("added", "removed") and _covers({**old, **new}, change.name))
    ]
    for name in {**old, **new}:
        kind: Kind = "not compared" if name in old and name in new and old[name] == new[name] else "left out"
        facts = (_noted(left, manifest, name) for left, manifest in ((old, before), (new, after)))
        kept.append(LeafChange(name, "tensor", kind, " → ".join(facts)))
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


def _compare(name: str, left: torch.Tensor, right: torch.Tensor) -> LeafChange:
    if torch.equal(_bits(left), _bits(right)):
        return LeafChange(name, "tensor", "same")
    return LeafChange(name, "tensor", "changed", difference=measure_difference(left, right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of *tensor* as integers, a row for each element."""
    return tensor.reshape(-1, 1).view(_WORDS.get(tensor.element_size(), torch.int64))


def measure_difference(left: torch.Tensor, right: torch.Tensor) -> TensorDifference:
    """Return the difference of two tensors of one dtype and shape."""
    changed = not_finite = counted = 0
    largest, total, distance, length = 0.0, 0.0, 0.0, 0.0
    for start in range(0, left.numel(), CHUNK_ELEMENTS):
        one, two = (tensor.reshape(-1)[start : start + CHUNK_ELEMENTS] for tensor in (left, right))
        changed += _count_changed(one, two)
        was, now = _widen(one), _widen(two)
        if was is None or now is None:
            continue
        apart = now - was
        if not math.isfinite(_norm(apart, 1)):  # one is NaN, or the difference of two large ones overflows
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


def _by_name(
    what: Literal["tensor", "value"], old: Mapping[str, Any], new: Mapping[str, Any], say: Callable[[Any], str]
) -> list[LeafChange]:
    """Compare the entries of two steps by name; a difference has the texts of both."""
    changes = []
    for name in {**old, **new}:
        kind: Kind = "added" if name not in old else "removed" if name not in new else "changed"
        if kind == "changed" and repr(old[name]) == repr(new[name]):  # NaN equals itself here, and 1 is not True
            kind = "same"
        texts = [say(side[name]) for side in (old, new) if name in side]
        changes.append(LeafChange(name, what, kind, "" if kind == "same" else " → ".join(texts)))
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
