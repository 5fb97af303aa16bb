"""The map of shards: which ranks hold which parts of which tensors, as columns, each distinct box and list once.

Guarantees:

- Pure and deterministic; ranks with equal lists of holdings cost one comparison each. All else is columns.
- Ranks that disagree about a dtype or a shape, gaps, and boxes that overlap without being equal are refused, all of
  them by name; by volumes and the sweep of `aiockpt.format.tiling`, never in pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from itertools import chain
from math import prod
from operator import attrgetter
from typing import NoReturn

import msgspec
import numpy as np

from aiockpt.errors import RanksDisagreeError, UsageError
from aiockpt.format.dtypes import itemsize
from aiockpt.format.pieces import pad, read_boxes, sort_boxes
from aiockpt.format.tiling import Flags, Ints, add_up, are_tiled
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState

_SAMPLE = 8
"""About how many holdings of a list distinguish it from most other lists."""
SHOWN_PROBLEMS = 20
_SHOWN_RANKS = 5


class LocalBoxes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The facts of a `TensorShard` that other ranks need: all but its memory.

    Attributes:
        unit: the module or dict that the tensor lies in, all of which must come from one rank, because ranks may differ
            in it. None where every rank that holds the tensor has the same values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    unit: str | None = None


def local_boxes_of(state: ShardedState) -> tuple[LocalBoxes, ...]:
    """Return the holdings of this rank, in the order of its tensors."""
    return tuple(
        LocalBoxes(
            shard.name, shard.dtype, shard.shape, shard.boxes, _unit_of(shard.name) if shard.may_differ else None
        )
        for shard in state.tensors
    )


def _unit_of(name: str) -> str:
    """Return the name of the module or dict of a tensor: its own name without the last part.

    A dict key with dots in it, like those of a ``state_dict()``, is the name of a module and of a tensor in that.
    """
    return name[: max(name.rfind("."), name.rfind("["), 0)]


def check_whole(state: ShardedState) -> None:
    """Raise when a process that saves alone lacks a part of a tensor.

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
        places: for each holder, which of a box's incidences is its own, counted from `ShardMap.first`.
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
        units: of each box, a number shared by those that must come from one rank together; -1 where it does not matter.
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
    """Return the checked map of *holdings*, which has one list for each rank.

    Raises:
        RanksDisagreeError: the holdings do not make whole tensors; names the tensors and the ranks.
    """
    lists, ranks_of_list = _distinct_lists(holdings)
    held = _read(list(chain.from_iterable(lists)))
    if held is None or not held.are_whole():
        _refuse(_find_problems(lists, ranks_of_list))
    return _tabulate(held, lists, ranks_of_list)


def _distinct_lists(holdings: Sequence[Sequence[LocalBoxes]]) -> tuple[list[Sequence[LocalBoxes]], list[list[int]]]:
    """Return the distinct lists and the ranks that have each: by identity, then by some of their bytes, then by all."""
    by_identity: dict[int, int] = {}
    by_some: dict[bytes, dict[bytes, int]] = {}
    lists: list[Sequence[LocalBoxes]] = []
    ranks: list[list[int]] = []
    encode = msgspec.msgpack.Encoder().encode
    for rank, some in enumerate(holdings):
        number = by_identity.get(id(some))
        if number is None:
            alike = by_some.setdefault(encode((len(some), some[:: len(some) // _SAMPLE + 1])), {})
            if (only := alike.pop(b"", None)) is not None:  # the first of these, to be distinguished now
                alike[encode(lists[only])] = only
            number = by_identity[id(some)] = alike.setdefault(encode(some) if alike else b"", len(lists))
            if number == len(lists):
                lists.append(some)
                ranks.append([])
        ranks[number].append(rank)
    return lists, ranks


class _BoxColumns(msgspec.Struct, eq=False):
    """The boxes of all lists as columns, in their order; those without elements are left out.

    Attributes:
        flat: all holdings, one list after the other; *tensors*: number of the one that names each tensor first.
        shapes: of the tensors, filled up with 1.
        holding, tensor: of each box, numbers; *start*: its first element in the holding's data.
    """

    flat: list[LocalBoxes]
    tensors: list[int]
    shapes: Ints
    boxes: list[Box]
    order: Ints
    fresh: Flags
    holding: Ints
    tensor: Ints
    start: Ints
    offsets: Ints
    sizes: Ints
    volumes: Ints

    def are_whole(self) -> bool:
        """Return whether the distinct boxes tile all tensors."""
        distinct = self.order[self.fresh]
        counts = np.bincount(self.tensor[distinct], minlength=len(self.tensors))
        if add_up(self.volumes[distinct], counts) != [prod(self.flat[number].shape) for number in self.tensors]:
            return False
        return bool(are_tiled(self.shapes, counts, self.offsets[distinct], self.sizes[distinct]).all())

    def number(self) -> tuple[Ints, Ints]:
        """Return the number of each box, the same for equal ones, and the first box of each; by first appearance."""
        first = self.order[self.fresh]
        numbers, rank, by_first = np.empty_like(self.order), np.empty_like(first), np.argsort(first)
        rank[by_first] = np.arange(len(first))
        numbers[self.order] = rank[np.cumsum(self.fresh) - 1]
        return numbers, first[by_first]


def _read(flat: list[LocalBoxes]) -> _BoxColumns | None:
    """Return the boxes of all lists together; None where a box is no part of its tensor."""
    names = list(map(attrgetter("name"), flat))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    owner = np.fromiter(map(numbers.__getitem__, names), np.int64, len(flat))
    first = np.zeros(len(numbers), np.int64)
    # Backwards: where an index is repeated numpy keeps the last value, which is then the first holding.
    first[owner[::-1]] = np.arange(len(flat))[::-1]
    described = [flat[number] for number in first.tolist()]
    for fact in map(attrgetter, ("dtype", "shape")):
        said = list(map(fact, described))
        if list(map(fact, flat)) != list(map(said.__getitem__, owner.tolist())):
            return None
    held = list(map(attrgetter("boxes"), flat))
    counts = np.fromiter(map(len, held), np.int64, len(held))
    boxes = list(chain.from_iterable(held))
    tensor = np.repeat(owner, counts)
    dimensions = np.fromiter((len(one.shape) for one in described), np.int64, len(described))
    if (sides := read_boxes(boxes, dimensions[tensor])) is None:
        return None
    most = int(dimensions.max(initial=0))
    sizes = np.fromiter(chain.from_iterable(one.shape for one in described), np.int64, int(dimensions.sum()))
    shapes = pad(sizes, dimensions, most, 1)
    lows, extents = (pad(side, dimensions[tensor], most, fill) for side, fill in zip(sides, (0, 1), strict=True))
    # Not `lows + extents > shapes`: the sum may wrap.
    if (extents > shapes[tensor] - lows).any():
        return None
    volumes = extents.prod(axis=1)
    before = np.concatenate([[0], np.cumsum(volumes)])
    start = before[:-1] - np.repeat(before[np.cumsum(counts) - counts], counts)
    columns = [np.repeat(np.arange(len(flat)), counts), tensor, start, lows, extents, volumes]
    if not volumes.all():
        filled = np.flatnonzero(volumes)
        boxes, columns = [boxes[place] for place in filled.tolist()], [column[filled] for column in columns]
    order, fresh = sort_boxes(columns[1], len(numbers), columns[3], columns[4])
    return _BoxColumns(flat, first.tolist(), shapes, boxes, order, fresh, *columns)


def _find_problems(
    lists: Sequence[Sequence[LocalBoxes]], ranks_of_list: Sequence[list[int]]
) -> list[tuple[str, list[int]]]:
    encode = msgspec.msgpack.Encoder().encode
    contents = [{encode(one): one for one in some} for some in lists]
    distinct = {key: one for some in contents for key, one in some.items()}

    def ranks_with(keys: Set[bytes]) -> list[int]:
        with_them = zip(contents, ranks_of_list, strict=True)
        return sorted(rank for some, ranks in with_them if not keys.isdisjoint(some) for rank in ranks)

    problems = []
    first: dict[str, bytes] = {}
    refused, boxes, holders = set(), defaultdict[str, dict[Box, None]](dict), defaultdict[str, set[bytes]](set)
    for key, one in distinct.items():
        known, ranks = distinct[first.setdefault(one.name, key)], ranks_with({key})
        if (one.dtype, one.shape) != (known.dtype, known.shape):
            others = ranks_with({first[one.name]})
            said = (
                f"{one.dtype} {list(one.shape)} on {_name(ranks)}, {known.dtype} {list(known.shape)} on {_name(others)}"
            )
            problems.append((f"{one.name}: {said}", sorted({*ranks, *others})))
        elif not _are_inside(one.boxes, one.shape):
            problems.append((f"{one.name}: {_name(ranks)} holds a box outside its shape {list(one.shape)}", ranks))
        else:
            filled = [box for box in one.boxes if box.volume]
            boxes[one.name].update(dict.fromkeys(filled))
            holders[one.name].update([key] if filled else [])
            continue
        refused.add(one.name)
    for name, key in first.items():
        problem = None if name in refused else _find_gap(distinct[key].shape, list(boxes[name]))
        if problem:
            ranks = ranks_with(holders[name] or {key})
            problems.append((f"{name}: {problem} ({_name(ranks)})", ranks))
    return problems


def _find_gap(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    volume, held = prod(shape), sum(box.volume for box in boxes)
    if held < volume:
        return f"{held} of {volume} elements are held by any rank"
    if held > volume:
        return f"boxes overlap without being equal: together they have {held} elements of {volume}"
    offsets, sizes = (np.array([getattr(box, side) for box in boxes], np.int64) for side in ("offsets", "sizes"))
    if len(boxes) > 1 and not are_tiled(np.array([shape]), np.array([len(boxes)]), offsets, sizes)[0]:
        return f"boxes overlap and leave a gap, though their {held} elements add up"
    return None


def _are_inside(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    return all(
        len(box.offsets) == len(box.sizes) == len(shape)
        and all(0 <= low <= low + size <= most for low, size, most in zip(box.offsets, box.sizes, shape, strict=True))
        for box in boxes
    )


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', …' if len(ranks) > _SHOWN_RANKS else ''}"


def _refuse(problems: Sequence[tuple[str, list[int]]]) -> NoReturn:
    lines = [f"  - {text}" for text, _ in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"  … and {len(problems) - SHOWN_PROBLEMS} more")
    raise RanksDisagreeError(
        "the ranks do not hold whole tensors together:\n" + "\n".join(lines) + "\nNothing was written. Give every rank "
        "its part of the same state, or keep each rank's own with aiockpt.per_rank(...), then save again.",
        ranks=sorted({rank for _, ranks in problems for rank in ranks}),
    )


def _tabulate(held: _BoxColumns, lists: Sequence[Sequence[LocalBoxes]], ranks_of_list: Sequence[list[int]]) -> ShardMap:
    """Sort the boxes of all lists by box and list."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    place, owner = _within(lengths), np.repeat(np.arange(len(lists)), lengths)
    box, first_of = held.number()
    order = np.arange(len(box))
    if len(first_of) < len(box):
        order = np.argsort(box, kind="stable")  # lists ascend already, and places within them
        box, lists_of = box[order], owner[held.holding[order]]
        fresh = np.ones(len(box), bool)
        fresh[1:] = (box[1:] != box[:-1]) | (lists_of[1:] != lists_of[:-1])  # a rank that holds a box twice writes one
        order, box = order[fresh], box[fresh]
    holding, first = held.holding[order], np.searchsorted(box, np.arange(len(first_of) + 1))
    described = [held.flat[number] for number in held.tensors]
    widths = np.array([itemsize(one.dtype) for one in described], np.int64)[held.tensor[first_of]]
    units = [held.flat[number].unit for number in held.holding[first_of].tolist()]
    numbers = {unit: number for number, unit in enumerate(dict.fromkeys(unit for unit in units if unit is not None))}
    empty = [number for number, one in zip(held.tensors, described, strict=True) if 0 in one.shape]
    return ShardMap(
        boxes=[held.boxes[number] for number in first_of.tolist()],
        widths=widths,
        nbytes=widths * held.volumes[first_of],
        first=first,
        holding=place[holding],
        start=held.start[order],
        units=np.array([-1 if unit is None else numbers[unit] for unit in units], np.int64),
        groups=_group(owner[holding], first, ranks_of_list),
        empty=[(ranks_of_list[owner[number]][0], int(place[number])) for number in empty],
    )


def _within(lengths: Ints) -> Ints:
    """Return 0, 1, … for each of the *lengths*, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _group(owner: Ints, first: Ints, ranks_of_list: Sequence[list[int]]) -> list[Group]:
    """Collect the boxes that the same lists have, the fewest holders first."""
    counts = np.diff(first)
    alone = np.flatnonzero(counts == 1)
    order = np.argsort(owner[first[alone]], kind="stable")
    ends = np.cumsum(np.bincount(owner[first[alone]], minlength=len(ranks_of_list)))
    found = [(boxes, [number]) for number, boxes in enumerate(np.split(alone[order], ends[:-1])) if len(boxes)]
    members: dict[bytes, list[int]] = {}
    for box in np.flatnonzero(counts > 1).tolist():
        members.setdefault(owner[first[box] : first[box + 1]].tobytes(), []).append(box)
    found += [(np.array(boxes), np.frombuffer(owners, np.int64).tolist()) for owners, boxes in members.items()]
    groups = []
    for boxes, owners in found:
        some = [ranks_of_list[number] for number in owners]
        ranks = np.array(list(chain.from_iterable(some)), np.int64)
        places = np.repeat(np.arange(len(some)), list(map(len, some)))
        ascending = np.argsort(ranks, kind="stable")
        groups.append(Group(boxes, ranks[ascending], places[ascending]))
    groups.sort(key=lambda group: (len(group.ranks), group.boxes[0]))
    return groups
