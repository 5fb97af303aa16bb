"""Plans move every byte exactly once: writes are fulfilled in memory, reads are fulfilled from the writes."""

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import StateMismatchError
from aiockpt.format.manifest import Manifest, TensorEntry
from aiockpt.format.safetensors import decode_header
from aiockpt.format.validate import check_header
from aiockpt.planning.read_plan import GAP, Landing, Wanted, plan_load, plan_reads
from aiockpt.planning.write_plan import HEADER, PAGE_BYTES, SavePlan, plan_save
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard, digest_structure
from tests.example_counts import examples
from tests.paper import written_files

SLAB = 8192


def shard(name: str, array: np.ndarray, dtype: str = "F32") -> TensorShard:
    return TensorShard(name=name, dtype=dtype, shape=array.shape, boxes=(Box.whole(array.shape),), data=array)


def state_of(shards: list[TensorShard]) -> ShardedState:
    return ShardedState(tensors=tuple(shards), alias={}, values={}, per_rank={}, structure=digest_structure(shards, {}))


def execute(plan: SavePlan, shards: list[TensorShard]) -> list[bytes]:
    """Do what the snapshot does, in memory: copy window by window."""
    sources = [np.ascontiguousarray(one.data).tobytes() for one in shards]
    files = []
    for file in plan.files:
        image = bytearray()
        for window in file.windows:
            assert window.offset == len(image)
            part = bytearray(window.size)
            for copy in window.copies:
                source = file.header if copy.source == HEADER else sources[copy.source]
                piece = source[copy.source_offset : copy.source_offset + copy.size]
                assert len(piece) == copy.size
                part[copy.window_offset : copy.window_offset + copy.size] = piece
            image += part
        assert len(image) == file.size
        files.append(bytes(image))
    return files


def manifest_of(plan: SavePlan, files: list[bytes], block: int = 4096) -> Manifest:
    return Manifest(
        writer="test",
        id="step-00000001",
        step=1,
        generation=1,
        sequence=1,
        run="0" * 12,
        parent=None,
        attempt="0" * 12,
        write_id="w",
        created_ns=0,
        world_size=1,
        files=written_files(files, block),
        tensors=plan.tensors,
        alias={},
        state={},
        metrics={},
        user=None,
    )


def fulfil(manifest: Manifest, files: list[bytes], wanted: list[Wanted], itemsize: int, **how: object) -> list[bytes]:
    """Do what fetch and place do, in memory; returns each wanted box, row-major."""
    plan = plan_load(manifest, wanted)
    memories = [bytearray(want.box.volume * itemsize) for want in wanted]
    memories += [bytearray(size) for _, size in plan.scratch]
    for landings in plan.passes:
        for file, some in landings.items():
            for read in plan_reads(some, len(files[file]), **how):  # type: ignore[arg-type]
                cursor = read.offset
                for segment in read.segments:
                    if segment.target != GAP:
                        into = memories[segment.target]
                        into[segment.target_offset : segment.target_offset + segment.size] = files[file][
                            cursor : cursor + segment.size
                        ]
                    cursor += segment.size
                assert cursor == read.offset + read.size <= len(files[file])
    for piece in plan.scattered:
        dtype = np.dtype(f"V{itemsize}")
        source = np.frombuffer(memories[piece.scratch], dtype).reshape(piece.stored.sizes)
        box = wanted[piece.target].box
        target = np.frombuffer(memories[piece.target], dtype).reshape(box.sizes)
        target[_slices(piece.overlap, box)] = source[_slices(piece.overlap, piece.stored)]
    return [bytes(memory) for memory in memories[: len(wanted)]]


def _slices(part: Box, whole: Box) -> tuple[slice, ...]:
    pairs = zip(part.offsets, whole.offsets, part.sizes, strict=True)
    return tuple(slice(low - base, low - base + size) for low, base, size in pairs)


def arrays(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=8)


@examples(60)
@given(shapes=SHAPES, file_bytes=st.sampled_from([1, 5000, 1 << 30]))
def test_what_is_written_is_read_back_whole(shapes: list[tuple[int, ...]], file_bytes: int) -> None:
    data = arrays(shapes)
    shards = [shard(f"t{n}", array) for n, array in enumerate(data)]
    plan = plan_save(state_of(shards), slab_bytes=SLAB, file_bytes=file_bytes)
    files = execute(plan, shards)
    manifest = manifest_of(plan, files)
    wanted = [Wanted(one.name, Box.whole(one.shape)) for one in shards]
    for whole_blocks in (True, False):
        found = fulfil(manifest, files, wanted, 4, block_bytes=4096, read_bytes=SLAB, whole_blocks=whole_blocks)
        assert found == [array.tobytes() for array in data]


@examples(80)
@given(data=st.data())
def test_any_box_of_any_sharding_is_read_back(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    array = arrays([(rows, columns)])[0]
    cut = data.draw(st.integers(0, rows))
    halves = [
        TensorShard(
            name="w", dtype="F32", shape=(rows, columns), boxes=(box,), data=array[box.offsets[0] :][: box.sizes[0]]
        )
        for box in (Box((0, 0), (cut, columns)), Box((cut, 0), (rows - cut, columns)))
    ]
    plans = [plan_save(state_of([half]), slab_bytes=SLAB, file_bytes=1 << 30) for half in halves]
    files: list[bytes] = []
    pieces = []
    for plan, half in zip(plans, halves, strict=True):
        for entry in plan.tensors.values():  # none where the half is empty
            pieces += [msgspec.structs.replace(piece, file=len(files)) for piece in entry.pieces]
        files += execute(plan, [half])
    whole = TensorEntry("F32", (rows, columns), tuple(pieces))
    manifest = msgspec.structs.replace(manifest_of(plans[0], files), tensors={"w": whole})
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    box = Box((top, left), (data.draw(st.integers(0, rows - top)), data.draw(st.integers(0, columns - left))))
    want = [Wanted("w", box), Wanted("w", Box.whole((rows, columns)))]  # twice: needs a second pass
    found = fulfil(manifest, files, want, 4, block_bytes=4096, read_bytes=4096, whole_blocks=True)
    part = array[top : top + box.sizes[0], left : left + box.sizes[1]]
    assert found == [part.tobytes(), array.tobytes()]


def test_equal_states_give_equal_plans_and_other_structures_other_digests() -> None:
    one = state_of([shard("a", np.zeros((3, 4), np.float32))])
    two = state_of([shard("a", np.ones((3, 4), np.float32))])
    other = state_of([shard("a", np.zeros((4, 3), np.float32))])
    plans = [plan_save(state, slab_bytes=SLAB, file_bytes=1 << 20) for state in (one, two, other)]
    assert plans[0] == plans[1]
    assert plans[0].digest != plans[2].digest


def test_page_multiples_come_first_and_start_on_pages() -> None:
    data = [np.zeros(3, np.float32), np.zeros(2048, np.float32), np.zeros(1, np.float32), np.zeros(1024, np.float32)]
    shards = [shard(f"t{n}", array) for n, array in enumerate(data)]
    plan = plan_save(state_of(shards), slab_bytes=SLAB, file_bytes=1 << 30)
    starts = {name: entry.pieces[0].start for name, entry in plan.tensors.items()}
    assert starts["t1"] % PAGE_BYTES == starts["t3"] % PAGE_BYTES == 0
    assert max(starts["t1"], starts["t3"]) < min(starts["t0"], starts["t2"])


def test_files_are_cut_at_the_wanted_size_but_never_inside_a_tensor() -> None:
    shards = [shard(f"t{n}", np.zeros(1024, np.float32)) for n in range(5)]
    shards.append(shard("big", np.zeros(4096, np.float32)))
    plan = plan_save(state_of(shards), slab_bytes=SLAB, file_bytes=8192)
    assert [len({piece.file for piece in entry.pieces}) for entry in plan.tensors.values()] == [1] * 6
    assert len(plan.files) == 4


def test_a_dtype_that_safetensors_lacks_is_stored_as_bytes() -> None:
    array = np.zeros(3, np.complex128)
    plan = plan_save(state_of([shard("z", array, "C128")]), slab_bytes=SLAB, file_bytes=1 << 30)
    header = decode_header(plan.files[0].header, plan.files[0].size)
    assert (header.entries[0].dtype, header.entries[0].shape) == ("U8", (48,))
    assert plan.tensors["z"].dtype == "C128"


def test_several_boxes_share_one_flat_entry_and_differ_in_the_manifest() -> None:
    boxes = (Box((0, 3), (1, 2)), Box((1, 0), (1, 5)))
    flat = np.arange(7, dtype=np.float32)
    one = TensorShard(name="w", dtype="F32", shape=(2, 5), boxes=boxes, data=flat)
    plan = plan_save(state_of([one]), slab_bytes=SLAB, file_bytes=1 << 30)
    header = decode_header(plan.files[0].header, plan.files[0].size)
    assert [(entry.name, entry.shape) for entry in header.entries] == [("w", (7,))]
    pieces = plan.tensors["w"].pieces
    assert [piece.offsets for piece in pieces] == [(0, 3), (1, 0)]
    assert pieces[0].end == pieces[1].start


def parts_of(name: str, array: np.ndarray, *cuts: tuple[int, int]) -> list[TensorShard]:
    return [
        TensorShard(
            name=name,
            dtype="F32",
            shape=array.shape,
            boxes=(Box((low, *(0 for _ in array.shape[1:])), (high - low, *array.shape[1:])),),
            data=array[low:high],
        )
        for low, high in cuts
    ]


def test_parts_of_one_tensor_are_entries_of_one_tensor_under_free_names() -> None:
    array = arrays([(9, 3)])[0]
    shards = [*parts_of("w", array, (0, 2), (2, 5), (5, 9)), shard("w#1", np.zeros(3, np.float32))]
    plan = plan_save(state_of(shards), slab_bytes=SLAB, file_bytes=1 << 30)
    files = execute(plan, shards)
    header = decode_header(plan.files[0].header, plan.files[0].size)
    assert [entry.name for entry in header.entries] == ["w", "w#2", "w#3", "w#1"]
    sharding = msgspec.json.decode(header.metadata["DCP_SHARDING_INFO"])
    assert sharding["w#2"] == {"saved_offsets": [2, 0]}
    assert [piece.offsets for piece in plan.tensors["w"].pieces] == [(0, 0), (2, 0), (5, 0)]
    manifest = manifest_of(plan, files)
    check_header(0, manifest, header)
    want = [Wanted("w", Box.whole(array.shape))]
    assert fulfil(manifest, files, want, 4, block_bytes=4096, read_bytes=SLAB, whole_blocks=True) == [array.tobytes()]


def test_parts_of_one_tensor_bear_its_name_once_in_every_file() -> None:
    shards = parts_of("w", np.zeros((4, 256), np.float32), (0, 2), (2, 4))
    plan = plan_save(state_of(shards), slab_bytes=SLAB, file_bytes=2048)
    names = [[entry.name for entry in decode_header(file.header, file.size).entries] for file in plan.files]
    assert names == [["w"], ["w"]]
    assert [piece.file for piece in plan.tensors["w"].pieces] == [0, 1]


def test_a_shard_without_elements_leaves_no_trace_unless_the_tensor_has_none() -> None:
    array = np.zeros((4, 3), np.float32)
    empty = TensorShard(name="v", dtype="F32", shape=(4,), boxes=(), data=np.zeros(0, np.float32))
    shards = [*parts_of("w", array, (4, 4)), empty, shard("none", np.zeros((0, 3), np.float32))]
    plan = plan_save(state_of(shards), slab_bytes=SLAB, file_bytes=1 << 30)
    assert list(plan.tensors) == ["none"]
    assert [entry.name for entry in decode_header(plan.files[0].header, plan.files[0].size).entries] == ["none"]
    assert plan_save(state_of(shards[:2]), slab_bytes=SLAB, file_bytes=1 << 30).files == ()


@pytest.mark.parametrize("column", [False, True])
def test_pieces_are_found_whatever_their_order(column: bool) -> None:
    array = arrays([(60, 64)])[0]
    shards = [
        TensorShard(
            name="w",
            dtype="F32",
            shape=array.shape,
            boxes=(Box((0, 2 * n), (60, 2)) if column else Box((2 * n, 0), (2, 64)),),
            data=array[:, 2 * n : 2 * n + 2] if column else array[2 * n : 2 * n + 2],
        )
        for n in range(32 if column else 30)
    ]
    plan = plan_save(state_of(shards), slab_bytes=SLAB, file_bytes=1 << 30)
    files = execute(plan, shards)
    ordered = manifest_of(plan, files)
    entry = plan.tensors["w"]
    mixed = msgspec.structs.replace(entry, pieces=(*entry.pieces[7:], *entry.pieces[6::-1]))
    box = Box((3, 5), (30, 40))
    for manifest in (ordered, msgspec.structs.replace(ordered, tensors={"w": mixed})):
        found = fulfil(manifest, files, [Wanted("w", box)], 4, block_bytes=4096, read_bytes=SLAB, whole_blocks=True)
        assert found == [array[3:33, 5:45].tobytes()]


def test_an_empty_state_has_no_files() -> None:
    plan = plan_save(state_of([]), slab_bytes=SLAB, file_bytes=1 << 30)
    assert (plan.files, plan.tensors, plan.file_bytes) == ((), {}, 0)


def test_a_gap_in_what_is_stored_is_refused_by_name() -> None:
    array = np.zeros((4, 4), np.float32)
    half = TensorShard(name="w", dtype="F32", shape=(4, 4), boxes=(Box((0, 0), (2, 4)),), data=array[:2])
    plan = plan_save(state_of([half]), slab_bytes=SLAB, file_bytes=1 << 30)
    manifest = manifest_of(plan, execute(plan, [half]))
    with pytest.raises(StateMismatchError, match="w: 8 of 16 elements are stored"):
        plan_load(manifest, [Wanted("w", Box.whole((4, 4)))])


def test_reads_skip_blocks_that_nobody_wants() -> None:
    landings = [Landing(100, 200, 0, 0), Landing(9 * 4096, 9 * 4096 + 10, 0, 100)]
    reads = list(plan_reads(landings, 20 * 4096, block_bytes=4096, read_bytes=8192, whole_blocks=True))
    assert [(read.offset, read.size) for read in reads] == [(0, 4096), (9 * 4096, 4096)]
    exact = list(plan_reads(landings, 20 * 4096, block_bytes=4096, read_bytes=8192, whole_blocks=False))
    assert [(read.offset, read.size) for read in exact] == [(100, 100), (9 * 4096, 10)]


def test_rows_of_a_row_sharded_tensor_are_read_without_excess() -> None:
    array = np.zeros((1024, 1024), np.float32)
    plan = plan_save(state_of([shard("w", array)]), slab_bytes=1 << 20, file_bytes=1 << 30)
    files = execute(plan, [shard("w", array)])
    want = [Wanted("w", Box((256, 0), (256, 1024)))]
    load = plan_load(manifest_of(plan, files), want)
    reads = [
        read
        for file, some in load.passes[0].items()
        for read in plan_reads(some, len(files[file]), block_bytes=65536, read_bytes=1 << 20, whole_blocks=True)
    ]
    assert sum(read.size for read in reads) <= 1.1 * load.wanted_bytes


def test_the_header_length_is_a_page_multiple() -> None:
    plan = plan_save(state_of([shard("w", np.zeros(5, np.float32))]), slab_bytes=SLAB, file_bytes=1 << 30)
    header = plan.files[0].header
    assert len(header) % PAGE_BYTES == 0
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8


def test_a_large_file_begins_its_payload_where_it_was_asked_to_and_a_small_one_at_a_page() -> None:
    array = np.zeros((64, 16384), np.float32)
    whole = {"slab_bytes": 1 << 20, "file_bytes": 1 << 30}
    large = plan_save(state_of([shard("w", array)]), **whole, payload_alignment=65536)
    small = plan_save(state_of([shard("w", array[:63])]), **whole, payload_alignment=65536)
    assert [plan.tensors["w"].pieces[0].start for plan in (large, small)] == [65536, 4096]
    want = [Wanted("w", Box((row, 0), (4, 16384))) for row in range(0, 64, 8)]
    files = execute(large, [shard("w", array)])
    load = plan_load(manifest_of(large, files), want)
    reads = plan_reads(load.passes[0][0], len(files[0]), block_bytes=65536, read_bytes=1 << 20, whole_blocks=True)
    assert sum(read.size for read in reads) == load.wanted_bytes
