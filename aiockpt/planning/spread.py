"""The spread of writes over ranks that hold the same boxes: replicas are written once, and loads are about equal.

Guarantees:

- Pure and deterministic. Every element of every tensor is in exactly one part of one rank that holds it.
- A tensor without elements is one empty part of the lowest rank that has it, so that its name is not lost.
- A box of one rank is written by that rank. Boxes of several ranks are spread over them so that the bytes of all ranks
  are as even as the holders allow, within one block (or one row, where a row is larger).
- Replicas that may differ between ranks (buffers, an EMA, bare tensors) are never mixed: up to 64 MiB together all come
  from the lowest rank that has them, as in the broadcast of `DistributedDataParallel`; beyond that they are spread, but
  all of one module or dict comes from one rank, whole.
- Boxes up to a block stay whole. Larger ones are cut between rows of their first axis longer than 1, at most once for
  every rank that writes a part of them, so that a part is one run of bytes in its holder's memory.

How: *first* in bytes, as if anything could be cut. Each group of boxes with the same holders is poured over them like
water over uneven ground, repeatedly until nothing moves: exact coordinate descent on the sum of squared loads, whose
minimum is also the lowest possible highest load. *Then* in rows and boxes, which come as close to it as they can; a rank
that got too much of one group gets less of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from operator import attrgetter

import msgspec
import numpy as np

from aiockpt.errors import UsageError
from aiockpt.format.document import BLOCK_BYTES, collector_paused
from aiockpt.format.parts import MAX_TABLE_PIECES
from aiockpt.format.tiling import Ints
from aiockpt.planning.shard_map import Group, LocalBoxes, ShardMap, local_boxes_of, survey
from aiockpt.state.geometry import Box

__all__ = ["LocalBoxes", "Part", "local_boxes_of", "spread"]

LOWEST_RANK_BYTES = 64 << 20
"""The most bytes of replicas that may differ which one rank writes beyond its share, so that all are of one rank."""
_MAX_SWEEPS = 32


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part that a rank writes: *box*, of its holding number *holding*.

    Its elements begin at element *start* of the holding's row-major data, in which the boxes of a holding follow one
    another.
    """

    holding: int
    box: Box
    start: int


class Shares(msgspec.Struct, frozen=True):
    """For each rank the parts that it writes, and the numbers of its holdings that other ranks also have boxes of."""

    parts: list[tuple[Part, ...]]
    replicas: list[tuple[int, ...]]


def spread(holdings: Sequence[Sequence[LocalBoxes]], *, block_bytes: int = BLOCK_BYTES) -> list[tuple[Part, ...]]:
    """Return the parts that each rank writes: one tuple a rank, ordered by holding, then by start. As `plan_shares`."""
    return plan_shares(holdings, block_bytes=block_bytes).parts


def plan_shares(holdings: Sequence[Sequence[LocalBoxes]], *, block_bytes: int = BLOCK_BYTES) -> Shares:
    """Return the parts that each rank writes, ordered by holding, then by start; and its holdings with replicas.

    Args:
        holdings: the list of each rank; the same list for many ranks is read once.
        block_bytes: the unevenness that ranks may have, and the size up to which no box is cut.

    Raises:
        RanksDisagreeError: the holdings do not make whole tensors; lists all of it by name, with the ranks.
        UsageError: these are more pieces than a checkpoint can have; refused before anything is written.
    """
    with collector_paused():
        holders = survey(holdings)
        return Shares(_spread(holdings, holders, block_bytes), _find_replicas(holders, len(holdings)))


def _find_replicas(holders: ShardMap, rank_count: int) -> list[tuple[int, ...]]:
    """Return which of each rank's holdings have a box that several ranks have; one tuple for ranks with the same."""
    found: list[list[Ints]] = [[] for _ in range(rank_count)]
    for group in holders.groups:
        if len(group.ranks) > 1:
            for place in np.unique(group.places):
                some = holders.holding[holders.first[group.boxes] + place]
                for rank in group.ranks[group.places == place].tolist():
                    found[rank].append(some)
    known: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for some in found:
        # By identity: ranks with the same replicas have the same arrays.
        same = tuple(map(id, some))
        if same not in known:
            known[same] = tuple(np.unique(np.concatenate(some)).tolist())
    return [known[tuple(map(id, some))] for some in found]


def _spread(holdings: Sequence[Sequence[LocalBoxes]], holders: ShardMap, block_bytes: int) -> list[tuple[Part, ...]]:
    parts: list[list[Part]] = [[] for _ in holdings]
    for rank, place in holders.empty:
        parts[rank].append(Part(place, Box.whole(holdings[rank][place].shape), 0))
    shared: list[_Pool] = []
    loads = np.zeros(len(holdings), np.int64)
    alone = [0] * len(holdings)
    for group in holders.groups:
        if len(group.ranks) == 1:
            _assign_all(holders, group, parts[group.ranks[0]])
            alone[group.ranks[0]] = len(group.boxes)
            loads[group.ranks[0]] += holders.nbytes[group.boxes].sum()
        else:
            shared += _pools(holders, group, block_bytes)
    # Before `_level`: units cannot be cut, and the pools even out what they make uneven.
    _assign_units(holders, _units(holders), loads, parts)
    _level(shared, loads)
    excess = np.zeros(len(holdings), np.int64)
    for pool in shared:
        (_cut if pool.divisible else _hand_out)(holders, pool, excess, parts)
    pieces = sum(map(len, parts))
    if pieces > MAX_TABLE_PIECES:
        raise UsageError(
            f"{len(holdings)} ranks would write {pieces:,} pieces, more than the {MAX_TABLE_PIECES:,} of a checkpoint: "
            "shard over fewer ranks and replicate over the rest, or save fewer, larger tensors"
        )
    in_order = (len(some) == count for some, count in zip(parts, alone, strict=True))  # as boxes of one rank alone are
    by_place = attrgetter("holding", "start")
    return [tuple(some if done else sorted(some, key=by_place)) for some, done in zip(parts, in_order, strict=True)]


def _assign_all(holders: ShardMap, group: Group, into: list[Part]) -> None:
    rows, boxes = holders.first[group.boxes], map(holders.boxes.__getitem__, group.boxes.tolist())
    into.extend(map(Part, holders.holding[rows].tolist(), boxes, holders.start[rows].tolist()))


class _Pool(msgspec.Struct, eq=False):
    """Boxes of one group that are treated alike: all may be cut, or all stay whole.

    Attributes:
        quotas: the bytes that each holder should get, as if boxes could be cut at any byte.
    """

    group: Group
    boxes: Ints
    divisible: bool
    total_bytes: int
    quotas: Ints


def _pools(holders: ShardMap, group: Group, block_bytes: int) -> list[_Pool]:
    """Divide the boxes that may come from any rank into those that may be cut and those that stay whole.

    The coarse pool is first, so that the fine one can even it out.
    """
    free = group.boxes[holders.units[group.boxes] < 0]
    large = holders.nbytes[free] > block_bytes
    pools = []
    for divisible, boxes in ((True, free[large]), (False, free[~large])):
        if len(boxes):
            total_bytes = int(holders.nbytes[boxes].sum())
            pools.append(_Pool(group, boxes, divisible, total_bytes, np.zeros(len(group.ranks), np.int64)))
    return pools


class _Unit(msgspec.Struct, eq=False):
    """Boxes of one group that must come from one rank together."""

    group: Group
    boxes: Ints
    nbytes: int


def _units(holders: ShardMap) -> list[_Unit]:
    """Return all units that several ranks hold, in order of their groups and numbers."""
    units = []
    for group in holders.groups:
        numbers = holders.units[group.boxes]
        if len(group.ranks) > 1 and (numbers >= 0).any():
            for number in np.unique(numbers[numbers >= 0]):
                boxes = group.boxes[numbers == number]
                units.append(_Unit(group, boxes, int(holders.nbytes[boxes].sum())))
    return units


def _assign_units(holders: ShardMap, units: Sequence[_Unit], loads: Ints, parts: list[list[Part]]) -> None:
    """Assign each unit to one holder, the largest first: few bytes to the lowest rank, more to the least loaded one."""
    few = sum(unit.nbytes for unit in units) <= LOWEST_RANK_BYTES
    for unit in units if few else sorted(units, key=lambda unit: -unit.nbytes):
        ranks = unit.group.ranks
        holder = 0 if few else int(np.argmin(loads[ranks]))
        for box in unit.boxes.tolist():
            axis, row_count = _cutting_axis(holders.boxes[box])
            _assign_rows(holders, unit.group, box, holder, axis, (0, row_count), parts)
        loads[ranks[holder]] += unit.nbytes


def _level(pools: Sequence[_Pool], loads: Ints) -> None:
    """Set the quotas of all pools so that the loads of the ranks are as even as the holders allow."""
    for sweep in range(_MAX_SWEEPS):
        moved = 0
        for pool in pools:
            ranks = pool.group.ranks
            loads[ranks] -= pool.quotas
            quotas = _pour(pool.total_bytes, loads[ranks])
            moved = max(moved, int(np.abs(quotas - pool.quotas).max()))
            pool.quotas = quotas
            loads[ranks] += quotas
        if sweep and moved <= len(pools):  # whole bytes: the remainders may move for ever
            return


def _pour(total_bytes: int, ground: Ints) -> Ints:
    """Return the depth at each place when *total_bytes* of water are poured over *ground*."""
    order = np.argsort(ground, kind="stable")
    heights = ground[order]
    below = np.cumsum(heights)
    # The k lowest places overflow to the next one when k times its height, less their own heights, has been poured.
    wet = int(np.searchsorted(np.arange(1, len(heights)) * heights[1:] - below[:-1], total_bytes)) + 1
    level, left = divmod(total_bytes + int(below[wet - 1]), wet)
    depths = np.zeros_like(ground)
    depths[order[:wet]] = level - heights[:wet]
    depths[order[:left]] += 1
    return depths


def _cut(holders: ShardMap, pool: _Pool, excess: Ints, parts: list[list[Part]]) -> None:
    """Lay the boxes of a pool end to end and cut the line where one holder's quota ends and the next begins."""
    ranks = pool.group.ranks
    quotas = _pour(pool.total_bytes, excess[ranks] - pool.quotas)
    taken = np.zeros_like(quotas)
    ends = np.cumsum(quotas).tolist()
    holder, line = 0, 0
    for box in pool.boxes.tolist():
        size = int(holders.nbytes[box])
        axis, row_count = _cutting_axis(holders.boxes[box])
        row_bytes = size // row_count
        row = 0
        while row < row_count:
            while ends[holder] <= line + row * row_bytes and holder < len(ends) - 1:
                holder += 1
            stop = row_count
            if holder < len(ends) - 1:
                stop = min(stop, max(row + 1, (ends[holder] - line + row_bytes // 2) // row_bytes))
            _assign_rows(holders, pool.group, box, holder, axis, (row, stop), parts)
            taken[holder] += (stop - row) * row_bytes
            row = stop
            if row < row_count:  # the rest of this quota is less than half a row: not worth a second part
                holder += 1
        line += size
    excess[ranks] += taken - pool.quotas


def _cutting_axis(box: Box) -> tuple[int, int]:
    """Return the first axis longer than 1 and its length: rows of it follow one another in memory."""
    return next(((axis, size) for axis, size in enumerate(box.sizes) if size > 1), (0, 1))


def _assign_rows(
    holders: ShardMap, group: Group, box: int, holder: int, axis: int, rows: tuple[int, int], parts: list[list[Part]]
) -> None:
    incidence = holders.first[box] + group.places[holder]
    whole, (row, stop) = holders.boxes[box], rows
    part, skipped = whole, 0
    if whole.sizes and stop - row < whole.sizes[axis]:
        offsets, sizes = list(whole.offsets), list(whole.sizes)
        skipped = row * (whole.volume // sizes[axis])
        offsets[axis] += row
        sizes[axis] = stop - row
        part = Box(tuple(offsets), tuple(sizes))
    start = int(holders.start[incidence]) + skipped
    parts[group.ranks[holder]].append(Part(int(holders.holding[incidence]), part, start))


def _hand_out(holders: ShardMap, pool: _Pool, excess: Ints, parts: list[list[Part]]) -> None:
    """Assign whole boxes, the largest first, each to the holder that is furthest from its quota (worst fit)."""
    group = pool.group
    given = (excess[group.ranks] - pool.quotas).tolist()
    queue = [(amount, holder) for holder, amount in enumerate(given)]
    heapify(queue)
    sizes = holders.nbytes[pool.boxes]
    for index in np.argsort(-sizes, kind="stable").tolist():
        amount, holder = queue[0]
        box = int(pool.boxes[index])
        axis, row_count = _cutting_axis(holders.boxes[box])
        _assign_rows(holders, group, box, holder, axis, (0, row_count), parts)
        heapreplace(queue, (amount + int(sizes[index]), holder))
    for amount, holder in queue:
        excess[group.ranks[holder]] = amount
