"""A checkpoint does not know how the job was parallelised: any mesh saves it, any other loads it, byte by byte.

All ranks live in this process and own arrays. What they write goes into files in memory, through the real plans, votes
and merge; what they load comes out of these files through the real load plans. There is no storage and no torch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiockpt.format.document import BLOCK_BYTES
from aiockpt.format.manifest import Manifest, decode_manifest, encode_manifest
from aiockpt.format.merge import merge_receipts
from aiockpt.planning.read_plan import GAP, Wanted, plan_load, plan_reads
from aiockpt.planning.spread import Part, local_boxes_of, spread
from aiockpt.planning.write_plan import HEADER, SavePlan, plan_save
from aiockpt.state.geometry import Box, flat_range_boxes
from aiockpt.state.shards import ShardedState, TensorShard, digest_structure
from benchmarks.measure.planning import planned_receipt
from tests.example_counts import examples
from tests.paper import written_files

WIDTH = 4
CUT_BYTES = 256
"""Ranks are even within so much, or one row."""
SUM_BYTES = 4096
SLAB_BYTES = 4096
Array = np.ndarray[Any, np.dtype[np.int32]]
Tensors = dict[str, Array]


class Layout(msgspec.Struct, frozen=True):
    """How a job divides its tensors over its ranks.

    Attributes:
        mesh: ranks on each axis of the mesh; their product is the world.
        axes: for each axis of the mesh, the axis of a tensor that it shards; None: replicas, and so where a tensor has no
            such axis.
        inner_first: whether the last axis of the mesh divides first, as TP under FSDP2 does (strided shards).
        flat: instead, the flattened tensor is cut into one range for each rank, as FSDP1 does.
    """

    mesh: tuple[int, ...]
    axes: tuple[int | None, ...] = (0,)
    inner_first: bool = False
    flat: bool = False

    @property
    def world(self) -> int:
        """The number of ranks."""
        return prod(self.mesh)

    def boxes(self, shape: tuple[int, ...], rank: int) -> tuple[Box, ...]:
        """Return what *rank* holds of a tensor, in the order in which it lies in its memory."""
        if self.flat:
            size = -(-prod(shape) // self.world)
            start, end = (min(edge * size, prod(shape)) for edge in (rank, rank + 1))
            return tuple(flat_range_boxes(shape, start, end))
        offsets, sizes = [0] * len(shape), list(shape)
        places = list(zip(self.mesh, self.axes, np.unravel_index(rank, self.mesh), strict=True))
        for count, axis, place in reversed(places) if self.inner_first else places:
            if axis is not None and axis < len(shape):
                chunk = -(-sizes[axis] // count)  # as torch.chunk: the last ones are shorter, or empty
                skipped = min(int(place) * chunk, sizes[axis])
                offsets[axis] += skipped
                sizes[axis] = min(chunk, sizes[axis] - skipped)
        return (Box(tuple(offsets), tuple(sizes)),)


GRID = [
    Layout((1,)),
    Layout((2,)),
    Layout((3,)),
    Layout((16,)),
    Layout((4,), (1,)),
    Layout((5,), (None,)),
    Layout((16,), (None,)),
    Layout((2, 2), (0, 1)),
    Layout((3, 5), (1, 0)),
    Layout((4, 4), (None, 0)),
    Layout((4, 2), (0, None)),
    Layout((2, 3), (0, 0)),
    Layout((4, 4), (0, 0), inner_first=True),
    Layout((3, 2, 2), (None, 0, 1)),
    Layout((2, 2, 2), (0, None, 0), inner_first=True),
    Layout((2,), flat=True),
    Layout((7,), flat=True),
    Layout((13,), flat=True),
]
SHAPES = [(17, 24), (64, 3), (5,), (), (1, 40, 3), (0, 4), (2, 3, 4), (33,)]


def tensors_of(shapes: Sequence[tuple[int, ...]]) -> Tensors:
    """Return tensors in which every element is another number."""
    tensors, begin = {}, 1
    for number, shape in enumerate(shapes):
        tensors[f"t{number}"] = np.arange(begin, begin + prod(shape), dtype=np.int32).reshape(shape)
        begin += prod(shape)
    return tensors


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.offsets, box.end, strict=True))


def shards_of(tensors: Tensors, layout: Layout, rank: int) -> list[TensorShard]:
    shards = []
    for name, array in tensors.items():
        boxes = layout.boxes(array.shape, rank)
        data = np.concatenate([np.zeros(0, np.int32), *(array[cut(box)].ravel() for box in boxes)])
        shards.append(TensorShard(name=name, dtype="I32", shape=array.shape, boxes=boxes, data=data))
    return shards


def state_of(shards: Sequence[TensorShard]) -> ShardedState:
    return ShardedState(
        tensors=tuple(shards), alias={}, values={}, per_rank=None, structure=digest_structure(shards, {})
    )


def take(shards: Sequence[TensorShard], parts: Sequence[Part]) -> ShardedState:
    """Return the state that is left of a rank's when it writes its parts only."""
    taken = []
    for part in parts:
        shard = shards[part.holding]
        data = shard.data[part.start : part.start + part.box.volume]
        taken.append(msgspec.structs.replace(shard, boxes=(part.box,), data=data))
    return state_of(taken)


def write(plan: SavePlan, shards: Sequence[TensorShard]) -> list[bytes]:
    """Do what snapshot and upload do, in memory."""
    sources = [shard.data.tobytes() for shard in shards]
    images = []
    for file in plan.files:
        image = bytearray(file.size)
        for window in file.windows:
            for copy in window.copies:
                source = file.header if copy.source == HEADER else sources[copy.source]
                at = window.offset + copy.window_offset
                image[at : at + copy.size] = source[copy.source_offset : copy.source_offset + copy.size]
        images.append(bytes(image))
    return images


def save(
    tensors: Tensors, layout: Layout
) -> tuple[Manifest, list[bytes], list[list[TensorShard]], list[tuple[Part, ...]]]:
    """Save from all ranks of a job; return the checkpoint, and what the ranks held and wrote."""
    held = [shards_of(tensors, layout, rank) for rank in range(layout.world)]
    parts = spread([local_boxes_of(state_of(shards)) for shards in held], block_bytes=CUT_BYTES)
    images: list[bytes] = []
    votes = []
    for rank, (shards, some) in enumerate(zip(held, parts, strict=True)):
        state = take(shards, some)
        plan = plan_save(state, slab_bytes=SLAB_BYTES, file_bytes=3000)
        written = write(plan, state.tensors)
        vote = planned_receipt(plan, rank, layout.world, SUM_BYTES)
        votes.append(msgspec.structs.replace(vote, files=written_files(written, SUM_BYTES, rank)))
        images += written
    manifest = merge_receipts(votes, writer="test", write_id="w", created_ns=0)
    return decode_manifest(encode_manifest(manifest)), images, held, parts


def load(
    manifest: Manifest, images: Sequence[bytes], wanted: Sequence[Wanted], limit_bytes: int | None = None
) -> Iterator[Array]:
    """Do what fetch and place do, in memory; yield each wanted box."""
    plan = plan_load(manifest, wanted, limit_bytes)
    largest = max((size for _, size in plan.scratch), default=0)
    if limit_bytes is not None:
        assert plan.scratch_bytes <= max(limit_bytes, largest + ALIGNMENT)
    scratch = memoryview(bytearray(plan.scratch_bytes))
    memories = [memoryview(bytearray(want.box.volume * WIDTH)) for want in wanted]
    memories += [scratch[offset : offset + size] for offset, size in plan.scratch]
    arrays = [
        np.frombuffer(memory, np.int32).reshape(want.box.sizes) for memory, want in zip(memories, wanted, strict=False)
    ]
    for number, landings in enumerate(plan.passes):
        for file, some in landings.items():
            for read in plan_reads(
                some, len(images[file]), block_bytes=SUM_BYTES, read_bytes=2 * SUM_BYTES, whole_blocks=True
            ):
                cursor = read.offset
                for segment in read.segments:
                    if segment.target != GAP:
                        to = segment.target_offset
                        memories[segment.target][to : to + segment.size] = images[file][cursor : cursor + segment.size]
                    cursor += segment.size
        for piece in plan.scattered:
            due = piece.pass_number == number if limit_bytes is not None else number == len(plan.passes) - 1
            if due:
                source = np.frombuffer(memories[piece.scratch], np.int32).reshape(piece.stored.sizes)
                into = arrays[piece.target]
                into[_inside(piece.overlap, wanted[piece.target].box)] = source[_inside(piece.overlap, piece.stored)]
    yield from arrays


def _inside(part: Box, whole: Box) -> tuple[slice, ...]:
    offsets = tuple(low - base for low, base in zip(part.offsets, whole.offsets, strict=True))
    return cut(Box(offsets, part.sizes))


ALIGNMENT = 64
LIMITS = (None, 300)
"""Bytes of scratch memory."""


def check_loaded(tensors: Tensors, layout: Layout, manifest: Manifest, images: Sequence[bytes]) -> None:
    for rank in range(layout.world):
        wanted = [Wanted(name, box) for name, array in tensors.items() for box in layout.boxes(array.shape, rank)]
        for limit_bytes in LIMITS:
            for want, found in zip(wanted, load(manifest, images, wanted, limit_bytes), strict=True):
                assert np.array_equal(found, tensors[want.name][cut(want.box)])


def check_written_once(tensors: Tensors, manifest: Manifest, parts: Sequence[Sequence[Part]]) -> None:
    total = sum(array.size for array in tensors.values())
    assert sum(part.box.volume for some in parts for part in some) == total
    pieces = [piece for entry in manifest.tensors.values() for piece in entry.pieces]  # `check_manifest` saw them tile
    assert sum(piece.end - piece.start for piece in pieces) == total * WIDTH
    assert manifest.tensors.keys() == tensors.keys()


def check_even(held: Sequence[Sequence[TensorShard]], parts: Sequence[Sequence[Part]]) -> None:
    """No rank writes much more than another that could take more than a block of it."""
    loads = [sum(part.box.volume for part in some) * WIDTH for some in parts]
    boxes = [{(shard.name, box) for shard in shards for box in shard.boxes if box.volume} for shards in held]
    written: list[Counter[tuple[str, Box]]] = [Counter() for _ in held]
    for shards, some, bytes_of in zip(held, parts, written, strict=True):
        for part in some:
            shard = shards[part.holding]
            bytes_of[shard.name, _box_at(shard, part.start)] += part.box.volume * WIDTH
    rows = [box.volume // next((size for size in box.sizes if size > 1), 1) for some in boxes for _, box in some]
    granule = max([CUT_BYTES, *(row * WIDTH for row in rows)])
    for rank, load_bytes in enumerate(loads):
        for other, less in enumerate(loads):
            if load_bytes - less > 2 * granule:  # a scalar that might be there as well makes nothing even
                could_move = sum(size for box, size in written[rank].items() if box in boxes[other])
                assert could_move <= granule, (rank, load_bytes, other, less)


def _box_at(shard: TensorShard, start: int) -> Box:
    for box in shard.boxes:
        if start < box.volume:
            return box
        start -= box.volume
    return Box.whole(shard.shape)


@pytest.mark.parametrize("source", GRID, ids=str)
def test_any_layout_of_the_grid_loads_into_any_other(source: Layout) -> None:
    tensors = tensors_of(SHAPES)
    manifest, images, held, parts = save(tensors, source)
    check_written_once(tensors, manifest, parts)
    check_even(held, parts)
    for target in GRID:
        check_loaded(tensors, target, manifest, images)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    mesh = draw(st.lists(st.integers(1, 16), min_size=1, max_size=3).map(tuple).filter(lambda mesh: prod(mesh) <= 16))
    axes = draw(st.tuples(*(st.sampled_from([None, 0, 1]) for _ in mesh)))
    return Layout(mesh, axes, inner_first=draw(st.booleans()), flat=draw(st.integers(0, 4)) == 0)


@example(
    shapes=[(), (13, 9, 8)],
    source=Layout((4, 2), (1, None)),
    target=Layout((1,), (None,), flat=True),
)  # four bytes lie with a rank that has many, and make nothing uneven
@examples(60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 24), max_size=3).map(tuple), min_size=1, max_size=5),
    source=layouts(),
    target=layouts(),
)
def test_any_layout_loads_into_any_other(shapes: list[tuple[int, ...]], source: Layout, target: Layout) -> None:
    tensors = tensors_of(shapes)
    manifest, images, held, parts = save(tensors, source)
    check_written_once(tensors, manifest, parts)
    check_even(held, parts)
    check_loaded(tensors, target, manifest, images)


@pytest.mark.parametrize("world", [2, 3, 8, 16])
def test_replicas_on_all_ranks_are_even_within_a_block(world: int) -> None:
    tensors = tensors_of([(64, 16), (640, 4), (7,), (60,), (31, 33), (8, 1), ()])
    _, _, _, parts = save(tensors, Layout((world,), (None,)))
    loads = [sum(part.box.volume for part in some) * WIDTH for some in parts]
    even = sum(loads) / world
    assert max(abs(load_bytes - even) for load_bytes in loads) <= CUT_BYTES


@pytest.mark.parametrize(("source", "target"), [(8, 4), (4, 8), (6, 4), (2, 4), (8, 8)])
def test_row_shards_of_real_sizes_are_read_with_little_excess(source: int, target: int) -> None:
    """Planned only: tensors of 1 GiB in blocks of 8 MiB. A slice costs up to two blocks more than it has."""
    shape, block_bytes = (16384, 16384), BLOCK_BYTES
    entries = {f"layers.{number}": Layout((source,)) for number in range(4)}
    votes = []
    for rank in range(source):
        shards = [
            TensorShard(name=name, dtype="F32", shape=shape, boxes=layout.boxes(shape, rank), data=None)
            for name, layout in entries.items()
        ]
        plan = plan_save(state_of(shards), slab_bytes=32 << 20, file_bytes=1 << 30)
        votes.append(planned_receipt(plan, rank, source, block_bytes))
    manifest = merge_receipts(votes, writer="test", write_id="w", created_ns=0)
    for rank in range(target):
        wanted = [Wanted(name, box) for name in entries for box in Layout((target,)).boxes(shape, rank)]
        plan_of_load = plan_load(manifest, wanted)
        read_bytes = sum(
            read.size
            for landings in plan_of_load.passes
            for file, some in landings.items()
            for read in plan_reads(
                some, manifest.files[file].size, block_bytes=block_bytes, read_bytes=32 << 20, whole_blocks=True
            )
        )
        assert read_bytes <= 1.1 * plan_of_load.wanted_bytes
