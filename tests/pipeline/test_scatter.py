"""Pieces that are copied out of scratch memory to where they are wanted, when there is little of it."""

from pathlib import Path

import pytest
import torch

import aiockpt

IO = aiockpt.IO(slab_bytes=4096, block_bytes=4096, read_bytes=4096, file_bytes=100_000)
"""Scratch memory for 64 KiB: two of the tensors below, and less than the largest one."""


def make_tensors() -> dict[str, torch.Tensor]:
    tensors = {f"t{number}": torch.rand(100, 64) for number in range(10)}
    return tensors | {"t5": torch.rand(200, 200)}


def half(tensor: torch.Tensor) -> tuple[torch.Tensor, aiockpt.Shards]:
    """Return memory for the left half of all columns, and a leaf that a load fills it by."""
    columns = torch.zeros(tensor.shape[0], tensor.shape[1] // 2)
    return columns, aiockpt.Shards(tuple(tensor.shape), [((0, 0), columns)])


def test_columns_come_to_their_places_through_scratch_memory_for_a_few_of_them(tmp_path: Path) -> None:
    saved = make_tensors()
    whole = {name: torch.zeros_like(saved[name]) for name in ("t1", "t8")}
    halves = {name: half(tensor) for name, tensor in saved.items() if name not in whole}
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=IO)) as ckpt:
        ckpt.save(1, saved).result()
        loaded = ckpt.load({**whole, **{name: leaf for name, (_, leaf) in halves.items()}}).result()
    assert loaded
    for name, tensor in whole.items():
        assert torch.equal(tensor, saved[name])
    for name, (columns, _) in halves.items():
        assert torch.equal(columns, saved[name][:, : columns.shape[1]]), name
    written = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert loaded.read_bytes <= 1.2 * written, "a block is read again where a pass begins, and no more"


def test_a_block_that_is_damaged_in_the_last_pass_is_found(tmp_path: Path) -> None:
    saved = make_tensors()
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=IO)) as ckpt:
        ckpt.save(1, saved).result()
        last = max(tmp_path.rglob("*.safetensors"))
        content = bytearray(last.read_bytes())
        content[-1] ^= 1
        last.write_bytes(content)
        with pytest.raises(aiockpt.CorruptionError, match=last.name):
            ckpt.load({name: half(tensor)[1] for name, tensor in saved.items()}, step=1).result()
