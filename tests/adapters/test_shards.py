"""What a rank holds of a tensor may be described by hand: `aiockpt.Shards`, and what DCP's protocol says of foreign ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.tensors import new_tensor


def blocks_of(full: torch.Tensor, rows: list[int]) -> dict[tuple[int, ...], torch.Tensor]:
    """Cut a matrix into blocks of *rows*, each not contiguous."""
    return {(row, 0): full.t().clone().t()[row : row + 1] for row in rows}


async def saved_by_two(root: Path, first: Any, second: Any) -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateImportUsage]

    store = HashStore()
    async with (
        aiockpt.Checkpointer(str(root), ranks=aiockpt.Ranks(0, 2, store)) as one,
        aiockpt.Checkpointer(str(root), ranks=aiockpt.Ranks(1, 2, store)) as other,
    ):
        saves = one.save(1, {"x": first}), other.save(1, {"x": second})
        for save in saves:
            await save


async def test_blocks_of_two_ranks_are_one_tensor(tmp_path: Path) -> None:
    full = torch.arange(30.0).view(6, 5)
    await saved_by_two(
        tmp_path, aiockpt.Shards((6, 5), blocks_of(full, [0, 3, 5])), aiockpt.Shards((6, 5), blocks_of(full, [1, 2, 4]))
    )
    async with aiockpt.Checkpointer(str(tmp_path)) as ckpt:
        assert torch.equal(await ckpt.read(1, "x"), full)
        columns, corner = torch.zeros(6, 2), torch.zeros(2, 3)
        await ckpt.load({"x": aiockpt.Shards((6, 5), [((0, 0), columns), ((4, 2), corner)])})
        assert torch.equal(columns, full[:, :2])
        assert torch.equal(corner, full[4:, 2:])


@given(st.integers(0, 24), st.integers(0, 24), st.sampled_from([(24,), (4, 6), (2, 3, 4), (1, 24, 1)]))
def test_slices_of_a_flattened_tensor_hold_their_elements(start: int, end: int, shape: tuple[int, ...]) -> None:
    start, end = min(start, end), max(start, end)
    full = torch.arange(24.0).view(shape)
    walked = StateWalker().walk({"x": aiockpt.Shards.flat(shape, start, full.flatten()[start:end].clone())})
    found = torch.full(shape, -1.0)
    for shard in walked.tensors:
        taken = 0
        for box in shard.boxes:
            place = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
            found[place] = shard.data.flatten()[taken : taken + box.volume].view(box.sizes)
            taken += box.volume
    assert torch.equal(found.flatten()[start:end], full.flatten()[start:end])
    assert int((found >= 0).sum()) == end - start


async def test_ranks_without_a_part_say_the_dtype(tmp_path: Path) -> None:
    full = torch.arange(6, dtype=torch.int16)
    nothing = aiockpt.Shards((6,), {}, dtype=torch.int16)
    await saved_by_two(tmp_path, nothing, aiockpt.Shards((6,), {(0,): full}))
    async with aiockpt.Checkpointer(str(tmp_path)) as ckpt:
        assert torch.equal(await ckpt.read(1, "x"), full)
        await ckpt.load({"x": nothing})


async def test_parts_that_two_ranks_both_have_are_stored_once(tmp_path: Path) -> None:
    full = torch.arange(12.0).view(6, 2)
    await saved_by_two(
        tmp_path,
        aiockpt.Shards((6, 2), {(0, 0): full[:4]}),
        aiockpt.Shards((6, 2), {(0, 0): full[:4], (4, 0): full[4:]}),
    )
    async with aiockpt.Checkpointer(str(tmp_path)) as ckpt:
        (found,) = (await ckpt.describe(1)).tensors
        assert found.bytes == full.nbytes
        assert torch.equal(await ckpt.read(1, "x"), full)


async def test_parts_of_ranks_that_overlap_in_part_are_refused(tmp_path: Path) -> None:
    full = torch.arange(12.0).view(6, 2)
    some, others = aiockpt.Shards((6, 2), {(0, 0): full[:4]}), aiockpt.Shards((6, 2), {(2, 0): full[2:]})
    # Whichever rank finds it first raises RanksDisagreeError, and the other may hear of that before it finds it.
    with pytest.raises(aiockpt.RankError, match="x: boxes overlap without being equal"):
        await saved_by_two(tmp_path, some, others)


def test_a_walk_is_remembered() -> None:
    walker, shards = StateWalker(), aiockpt.Shards((4,), {(0,): torch.ones(4)})
    walker.walk({"x": shards})
    walker.walk({"x": shards})
    assert walker.cold_walks == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: aiockpt.Shards((4,), {(2,): torch.ones(3)}), "outside of (4,)"),
        (lambda: aiockpt.Shards((4,), {(0, 0): torch.ones(1, 1)}), "outside of (4,)"),
        (lambda: aiockpt.Shards((4,), [((0,), torch.ones(2)), ((1,), torch.ones(2))]), "overlap"),
        (lambda: aiockpt.Shards((4,), {(0,): torch.ones(2)}, dtype=torch.int8), "float32, torch.int8"),
        (lambda: aiockpt.Shards((4,), {}), "give dtype="),
        (lambda: aiockpt.Shards.flat((4,), 3, torch.ones(2)), "[3, 5) are not inside"),
        (lambda: aiockpt.Shards.flat((4,), 0, torch.ones(2, 2)), "contiguous 1-D tensor"),
        (lambda: aiockpt.Shards((4,), {(0,): torch.ones(4)}) + 1, "compute with its parts"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, says: str) -> None:
    with pytest.raises(aiockpt.UsageError) as refused:
        make()
    assert says in str(refused.value)


class Ragged(torch.Tensor):
    """A foreign tensor that has the methods which torch.distributed.checkpoint calls."""

    parts: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def make(shape: tuple[int, ...], parts: dict[tuple[int, ...], torch.Tensor]) -> Ragged:
        made: Ragged = torch.Tensor._make_wrapper_subclass(Ragged, shape, dtype=torch.float32)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self.parts.items()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.parts[tuple(index.offset)]


async def test_a_foreign_tensor_is_asked_by_the_protocol_of_dcp(tmp_path: Path) -> None:
    full = torch.arange(30.0).view(6, 5)
    await saved_by_two(
        tmp_path, Ragged.make((6, 5), blocks_of(full, [0, 1, 2])), Ragged.make((6, 5), blocks_of(full, [3, 4, 5]))
    )
    found: dict[tuple[int, ...], torch.Tensor] = {(2, 0): torch.zeros(3, 5)}
    async with aiockpt.Checkpointer(str(tmp_path)) as ckpt:
        await ckpt.load({"x": Ragged.make((6, 5), found)})
    assert torch.equal(found[2, 0], full[2:5])


def test_what_a_foreign_tensor_holds_is_asked_at_each_walk() -> None:
    walker, ragged = StateWalker(), Ragged.make((2,), {(0,): torch.ones(2)})
    walker.walk({"x": ragged})
    ragged.parts = {(0,): torch.zeros(2)}
    assert walker.walk({"x": ragged}).tensors[0].data.sum() == 0


def test_a_new_slice_of_a_flat_tensor_is_flat() -> None:
    like, flat = torch.ones(4), FlatRange((2, 3), 1, 5)
    made = new_tensor((2, 3), torch.float64, like, flat, (1, 0))
    assert (made.shape, made.dtype) == (like.shape, torch.float64)
