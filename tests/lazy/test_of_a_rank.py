"""A lazy save takes what belongs to one rank, in lists too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import aiockpt


async def test_tensors_in_lists_of_one_rank_are_saved_lazily_read_and_loaded(tmp_path: Path) -> None:
    held = {"lists": [torch.ones(2), {"deep": [torch.full((3,), 4.0)]}]}
    async with aiockpt.Checkpointer(tmp_path, snapshot="lazy", immutable=["own.lists"]) as ckpt:
        await ckpt.save(1, {"own": aiockpt.per_rank(held)})
        assert (await ckpt.read(1, "own.lists[1].deep[0]@rank0")).tolist() == [4.0, 4.0, 4.0]
        found: dict[str, Any] = {"own": aiockpt.per_rank({"lists": [torch.zeros(2), {"deep": [torch.zeros(3)]}]})}
        await ckpt.load(found)
    assert found["own"].value["lists"][1]["deep"][0].tolist() == [4.0, 4.0, 4.0]
