"""A mesh of this process alone: DTensors as they are on a rank, without others."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()
