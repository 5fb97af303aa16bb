"""Is FSDP1's private description of its slices still what the adapter was written for?"""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import pytest
from torch.distributed.fsdp._flat_param import FlatParamHandle

PINNED = {
    "_init_flat_param_and_metadata": "3915f2fcb15b82dc",
    "flatten_tensors": "3cb6e823d7bde0f2",
    "_get_shard_metadata": "09bbceff964373eb",
    "_use_sharded_views": "d85522069fc6dfd7",
    "is_sharded": "3dd699fb40f6431e",
}


@pytest.mark.parametrize("name", PINNED)
def test_the_source_that_the_adapter_relies_on_is_unchanged(name: str) -> None:
    method: Any = getattr(FlatParamHandle, name)
    digest = hashlib.sha256(inspect.getsource(method).encode()).hexdigest()[:16]
    assert digest == PINNED[name], "read it again, see that aiockpt/adapters/fsdp.py still fits, then pin it anew"
