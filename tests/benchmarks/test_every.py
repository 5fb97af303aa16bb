"""Does the benchmark of every step run, and check what it saved?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import every


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_every_way_to_save_has_its_samples(tmp_path: Path) -> None:
    result = every.run(12 << 20, 4, 1, 1, tmp_path)
    assert set(result.ways) == {"none", "aiockpt lazy", "aiockpt lazy, process", "aiockpt eager", "dcp async"}
    assert all(len(way.block_s) == 1 for way in result.ways.values())
    assert result.ways["aiockpt lazy"].call_s
    assert result.ways["aiockpt lazy"].loop_s
    assert "| aiockpt lazy |" in every.table(result)
