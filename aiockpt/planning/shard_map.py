"""The map of shards: which ranks hold which parts of which tensors, as columns, each distinct thing once.

Guarantees:

- Pure and deterministic; ranks with equal lists of holdings cost one comparison each, equal holdings one, equal boxes one.
- Ranks that disagree about a dtype or a shape, gaps, and boxes that overlap without being equal are refused, all of
  them by name; by volumes and the sweep of `aiockpt.format.tiling`, never in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiockpt.errors import RanksDisagreeError, UsageError
from aiockpt.format.dtypes import itemsize
from aiockpt.format.tiling import tiles
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState

Ints = NDArray[np.int64]
SHOWN_PROBLEMS = 20
_SHOWN_RANKS = 5


class LocalBoxes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The facts of a `TensorShard` without its memory: what other ranks must know of it.

    Attributes:
        unit: what must come from one rank together, because each may have its own: the module or dict that the tensor
            lies in. None where every rank that holds it has the same.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    unit: str | None = None


def local_boxes_of(state: ShardedState) -> tuple[LocalBoxes, ...]:
    """Return what this rank holds, in the order of its tensors."""
    return tuple(
        LocalBoxes(
            shard.name, shard.dtype, shard.shape, shard.boxes, _unit_of(shard.name) if shard.may_differ else None
        )
        for shard in state.tensors
    )


def _unit_of(name: str) -> str:
    """Return what a tensor lies in: its name without the last part.

    A key of a dict with dots in it, as those of a ``state_dict()``, is the name of a module and of what lies in that.
    """
    return name[: max(name.rfind("."), name.rfind("["), 0)]


def check_whole(state: ShardedState) -> None:
    """Raise when a process that saves alone has not all of each tensor.

    Raises:
        UsageError: names the tensors; nothing was written.
    """
    held: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for shard in state.tensors:
        wanted[shard.name] = prod(shard.shape)
        held[shard.name] = held.get(shard.name, 0) + sum(box.volume for box in shard.boxes)
    partial = [name for name, volume in wanted.items() if held[name] < volume]
    if not partial:
        return
    lines = [f"  - {name}: {held[name]} of {wanted[name]} elements" for name in partial[:SHOWN_PROBLEMS]]
    if len(partial) > SHOWN_PROBLEMS:
        lines.append(f"  … and {len(partial) - SHOWN_PROBLEMS} more")
    raise UsageError(
        "this process saves alone, and has only a part of these tensors; other processes have the rest:\n"
        + "\n".join(lines)
        + "\nNothing was written. Make the Checkpointer on every rank, after torch.distributed.init_process_group(), and "
        "without ranks=aiockpt.Ranks()."
    )


class Group(msgspec.Struct, frozen=True, eq=False):
    """Boxes that the same ranks hold.

    Attributes:
        boxes: their numbers, in order of first appearance.
        ranks: the holders, ascending.
        places: for each holder, which of a box's incidences is its own (see `ShardMap.rows_of`).
    """

    boxes: Ints
    ranks: Ints
    places: Ints


class ShardMap(msgspec.Struct, frozen=True, eq=False):
    """All boxes of all ranks, each once, and where each holder has them.

    A box of volume 0 has no holder and is left out. An *incidence* says that a list of holdings has a box; the
    incidences of one box follow one another, from ``first[box]`` to ``first[box + 1]``.

    Attributes:
        boxes: the distinct boxes.
        widths: bytes of one element of each box.
        nbytes: bytes of each box.
        first: where the incidences of each box begin.
        holding: of each incidence, the holding's place in its list.
        start: of each incidence, the first element of the box in the holding's data.
        units: of each box, a number that those share which must come from one rank together; -1 where it does not matter.
        groups: boxes by their holders, those with the fewest holders first.
        empty: (rank, place in its list) of the first holding of each tensor that has no elements at all.
    """

    boxes: list[Box]
    widths: Ints
    nbytes: Ints
    first: Ints
    holding: Ints
    start: Ints
    units: Ints
    groups: list[Group]
    empty: list[tuple[int, int]]


def survey(holdings: Sequence[Sequence[LocalBoxes]]) -> ShardMap:
    """Return which ranks hold what, checked; one list of holdings for each rank.

    Raises:
        RanksDisagreeError: the holdings do not make whole tensors; names the tensors and the ranks.
    """
    lists, ranks_of_list = _distinct_lists(holdings)
    catalogue = _Catalogue()
    contents = [np.fromiter(map(catalogue.number_of, some), np.int64, len(some)) for some in lists]
    problems = list(catalogue.problems(lambda wanted: _ranks_with(wanted, contents, ranks_of_list)))
    if problems:
        _refuse(problems)
    return _tabulate(catalogue, contents, ranks_of_list)


def _distinct_lists(holdings: Sequence[Sequence[LocalBoxes]]) -> tuple[list[Sequence[LocalBoxes]], list[list[int]]]:
    """Return the distinct lists and the ranks that have each: by identity, then by their bytes."""
    by_identity: dict[int, int] = {}
    by_bytes: dict[bytes, int] = {}
    lists: list[Sequence[LocalBoxes]] = []
    ranks: list[list[int]] = []
    encode = msgspec.msgpack.Encoder().encode
    for rank, some in enumerate(holdings):
        number = by_identity.get(id(some))
        if number is None:
            number = by_bytes.setdefault(encode(some), len(lists))
            by_identity[id(some)] = number
            if number == len(lists):
                lists.append(some)
                ranks.append([])
        ranks[number].append(rank)
    return lists, ranks


class _Tensor(msgspec.Struct):
    """A tensor as the holding that named it first describes it, with the numbers of all boxes of it."""

    dtype: str
    shape: tuple[int, ...]
    width: int
    first_holding: int
    boxes: dict[Box, int]


class _Catalogue:
    """Distinct holdings and distinct boxes, numbered in order of first appearance.

    Attributes:
        boxes, widths, volumes: of each distinct box; width in bytes, volume in elements.
        counts: of each distinct holding, how many of its boxes are not empty.
        units: of each distinct box, as of `ShardMap`.
        empty: the first holding of each tensor that has no elements.
        held, starts: these boxes of all holdings, one after the other: number, and first element in the holding's data.
    """

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.widths: list[int] = []
        self.volumes: list[int] = []
        self.counts: list[int] = []
        self.held: list[int] = []
        self.starts: list[int] = []
        self.units: list[int] = []
        self.empty: list[int] = []
        self._unit_numbers: dict[str, int] = {}
        self._tensors: dict[str, _Tensor] = {}
        self._misfits: list[tuple[int, LocalBoxes]] = []
        self._by_identity: dict[int, int] = {}
        self._by_bytes: dict[bytes, int] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def number_of(self, holding: LocalBoxes) -> int:
        """Return the number of *holding*; the holdings given must stay alive as long as this catalogue."""
        number = self._by_identity.get(id(holding))
        if number is None:
            number = self._by_bytes.setdefault(self._encode(holding), len(self.counts))
            self._by_identity[id(holding)] = number
            if number == len(self.counts):
                self.counts.append(self._add(number, holding))
        return number

    def _add(self, number: int, holding: LocalBoxes) -> int:
        """Enter a new holding's boxes and return how many there are."""
        name, dtype, shape = holding.name, holding.dtype, holding.shape
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = _Tensor(dtype, shape, itemsize(dtype), number, {})
            if 0 in shape:
                self.empty.append(number)
        if dtype != tensor.dtype or shape != tensor.shape or not _are_inside(holding.boxes, shape):
            self._misfits.append((number, holding))
            return 0
        start = count = 0
        for box in holding.boxes:
            volume = prod(box.sizes)
            if volume:
                self.held.append(self._number_of_box(tensor, box, volume, holding.unit))
                self.starts.append(start)
                start += volume
                count += 1
        return count

    def _number_of_box(self, tensor: _Tensor, box: Box, volume: int, unit: str | None) -> int:
        number = tensor.boxes.setdefault(box, len(self.boxes))
        if number == len(self.boxes):
            self.boxes.append(box)
            self.widths.append(tensor.width)
            self.volumes.append(volume)
            self.units.append(-1 if unit is None else self._unit_numbers.setdefault(unit, len(self._unit_numbers)))
        return number

    def problems(self, ranks_with: Callable[[Sequence[int]], list[int]]) -> Iterator[tuple[str, list[int]]]:
        """Yield what is wrong, and the ranks that it is wrong on; *ranks_with* finds the ranks of some holdings."""
        refused = set()
        for number, holding in self._misfits:
            tensor = self._tensors[holding.name]
            refused.add(holding.name)
            ranks = ranks_with([number])
            if (holding.dtype, holding.shape) != (tensor.dtype, tensor.shape):
                others = ranks_with([tensor.first_holding])
                yield (
                    f"{holding.name}: {holding.dtype} {list(holding.shape)} on {_name(ranks)}, {tensor.dtype} "
                    f"{list(tensor.shape)} on {_name(others)}",
                    sorted({*ranks, *others}),
                )
            else:
                yield f"{holding.name}: {_name(ranks)} holds a box outside its shape {list(holding.shape)}", ranks
        for name, tensor in self._tensors.items():
            problem = None if name in refused else self._find_gap(tensor)
            if problem:
                ranks = ranks_with(self._with_boxes(tensor) or [tensor.first_holding])
                yield f"{name}: {problem} ({_name(ranks)})", ranks

    def _with_boxes(self, tensor: _Tensor) -> list[int]:
        """Return the holdings that have a box of *tensor*."""
        held = np.isin(self.held, list(tensor.boxes.values()))
        return list(map(int, np.unique(np.repeat(np.arange(len(self.counts)), self.counts)[held])))

    def _find_gap(self, tensor: _Tensor) -> str | None:
        volume = prod(tensor.shape)
        held = sum(self.volumes[number] for number in tensor.boxes.values())
        if held < volume:
            return f"{held} of {volume} elements are held by any rank"
        if held > volume:
            return f"boxes overlap without being equal: together they have {held} elements of {volume}"
        if len(tensor.boxes) > 1 and not tiles(tensor.shape, [(box.offsets, box.sizes) for box in tensor.boxes]):
            return f"boxes overlap and leave a gap, though their {held} elements add up"
        return None


def _are_inside(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    for box in boxes:
        offsets, sizes = box.offsets, box.sizes
        if not len(offsets) == len(sizes) == len(shape):
            return False
        for axis, limit in enumerate(shape):
            if not 0 <= offsets[axis] <= offsets[axis] + sizes[axis] <= limit:
                return False
    return True


def _ranks_with(wanted: Sequence[int], contents: Sequence[Ints], ranks_of_list: Sequence[list[int]]) -> list[int]:
    """Return the ranks whose list has one of the *wanted* holdings."""
    return sorted(
        rank
        for some, ranks in zip(contents, ranks_of_list, strict=True)
        if np.isin(some, wanted).any()
        for rank in ranks
    )


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', …' if len(ranks) > _SHOWN_RANKS else ''}"


def _refuse(problems: Sequence[tuple[str, list[int]]]) -> None:
    lines = [f"  - {text}" for text, _ in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"  … and {len(problems) - SHOWN_PROBLEMS} more")
    raise RanksDisagreeError(
        "the ranks do not hold whole tensors together:\n" + "\n".join(lines) + "\nNothing was written. Give every rank "
        "its part of the same state, or keep each rank's own with aiockpt.per_rank(...), then save again.",
        ranks=sorted({rank for _, ranks in problems for rank in ranks}),
    )


def _tabulate(catalogue: _Catalogue, contents: Sequence[Ints], ranks_of_list: Sequence[list[int]]) -> ShardMap:
    """Turn lists of holdings into columns of boxes: expand each holding to its boxes, then sort by box and list."""
    counts = np.array(catalogue.counts, np.int64)
    lengths = np.fromiter(map(len, contents), np.int64, len(contents))
    holding = np.concatenate([np.zeros(0, np.int64), *contents])
    place, owner = _within(lengths), np.repeat(np.arange(len(contents)), lengths)
    repeats = counts[holding]
    rows = np.repeat((np.cumsum(counts) - counts)[holding], repeats) + _within(repeats)
    box, start = np.array(catalogue.held, np.int64)[rows], np.array(catalogue.starts, np.int64)[rows]
    place, owner = np.repeat(place, repeats), np.repeat(owner, repeats)

    order = np.argsort(box, kind="stable")  # owners ascend already, and places within them
    box, owner, place, start = box[order], owner[order], place[order], start[order]
    fresh = np.ones(len(box), bool)
    fresh[1:] = (box[1:] != box[:-1]) | (owner[1:] != owner[:-1])  # a rank that has a box twice writes one of them
    box, owner, place, start = box[fresh], owner[fresh], place[fresh], start[fresh]
    first = np.searchsorted(box, np.arange(len(catalogue.boxes) + 1))
    widths = np.array(catalogue.widths, np.int64)
    return ShardMap(
        boxes=catalogue.boxes,
        widths=widths,
        nbytes=widths * np.array(catalogue.volumes, np.int64),
        first=first,
        holding=place,
        start=start,
        units=np.array(catalogue.units, np.int64),
        groups=_group(owner, first, ranks_of_list),
        empty=[_find_first(number, contents, ranks_of_list) for number in catalogue.empty],
    )


def _find_first(number: int, contents: Sequence[Ints], ranks_of_list: Sequence[list[int]]) -> tuple[int, int]:
    """Return the lowest rank that has a holding, and the holding's place in its list."""
    for some, ranks in zip(contents, ranks_of_list, strict=True):
        places = np.flatnonzero(some == number)
        if len(places):
            return ranks[0], int(places[0])
    raise LookupError(number)


def _within(lengths: Ints) -> Ints:
    """Return 0, 1, … for each of the *lengths*, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _group(owner: Ints, first: Ints, ranks_of_list: Sequence[list[int]]) -> list[Group]:
    """Collect the boxes that the same lists have, the fewest holders first."""
    members: dict[bytes, list[int]] = {}
    bounds = first.tolist()
    for box in range(len(bounds) - 1):
        members.setdefault(owner[bounds[box] : bounds[box + 1]].tobytes(), []).append(box)
    groups = []
    for owners, boxes in members.items():
        some = [ranks_of_list[number] for number in np.frombuffer(owners, np.int64)]
        ranks = np.array([rank for ranks in some for rank in ranks], np.int64)
        places = np.repeat(np.arange(len(some)), [len(ranks) for ranks in some])
        ascending = np.argsort(ranks, kind="stable")
        groups.append(Group(np.array(boxes, np.int64), ranks[ascending], places[ascending]))
    groups.sort(key=lambda group: len(group.ranks))
    return groups
