"""How is a module read to which FSDP2's ``fully_shard`` was applied? Directly: its sharded parameters are DTensors.

FSDP2 hooks ``state_dict()`` and ``load_state_dict()`` for one thing only: to show the sharded parameters instead of those
gathered for a forward pass. `show_shards` does the same, so these hooks need not have a say.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_PACKAGE = "torch.distributed.fsdp._fully_shard."


def is_own_hook(hook: Any) -> bool:
    """Return whether a hook of a module is one of FSDP2's."""
    return str(getattr(hook, "__module__", "")).startswith(_PACKAGE)


def show_shards(module: nn.Module) -> None:
    """Have all modules below *module* show their sharded parameters: what was gathered is freed, nothing is sent.

    After a forward pass without a backward pass the outermost module keeps what it gathered, but optimizers and
    checkpoints know the shards only.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    sharded: list[Any] = [member for member in module.modules() if isinstance(member, fsdp.FSDPModule)]
    for member in sharded:
        member.reshard()
