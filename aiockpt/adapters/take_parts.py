"""Parts of shards, for a rank that writes only its share: each is a shard of its own, in the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from aiockpt.planning.spread import Part
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard


def take_parts(shards: Sequence[TensorShard], parts: Sequence[Part]) -> Iterator[TensorShard]:
    """Yield the *parts* of *shards*, in order: a whole shard unchanged, adjacent parts of one as a single shard."""
    for number, some in groupby(parts, key=attrgetter("holding")):
        shard = shards[number]
        for run in _runs(list(some)):
            yield _part(shard, run)


def _runs(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Group the parts of one shard that are adjacent in its memory."""
    run: list[Part] = []
    for part in parts:
        if run and run[-1].start + run[-1].box.volume != part.start:
            yield run
            run = []
        run.append(part)
    if run:
        yield run


def _part(shard: TensorShard, run: Sequence[Part]) -> TensorShard:
    boxes = tuple(part.box for part in run)
    if boxes == shard.boxes:
        return shard
    data = shard.data
    if len(boxes) == len(shard.boxes) == 1 and not data.is_contiguous():
        data = _narrow(data, shard.boxes[0], boxes[0])
    else:
        start, volume = run[0].start, sum(box.volume for box in boxes)
        data = data.view(-1)[start : start + volume]
        if len(boxes) == 1:
            data = data.view(boxes[0].sizes)
    return msgspec.structs.replace(shard, boxes=boxes, data=data)


def _narrow(data: object, whole: Box, part: Box) -> object:
    """Return the view of a strided tensor, which holds the box *whole*, that holds *part*."""
    for axis, (offset, base, size) in enumerate(zip(part.offsets, whole.offsets, part.sizes, strict=True)):
        data = data.narrow(axis, offset - base, size)  # type: ignore[attr-defined]
    return data
