"""megatron-core (0.16): ``from aiockpt.integrations import megatron as dist_checkpointing`` in place of its own.

    dist_checkpointing.save(sharded_state_dict, "/runs/7/iter_0000100", async_sharded_save=True)
    state_dict = dist_checkpointing.load(sharded_state_dict, "/runs/7/iter_0000100")

`optimizer_state` describes a distributed optimizer to them without a collective, so that it loads under any parallelism.
docs/frameworks/megatron.md is the page for users.
"""

from aiockpt.integrations.megatron.checkpointing import latest, load, open_place, save, wait
from aiockpt.integrations.megatron.flat_buffers import load_optimizer_state, optimizer_state

__all__ = ["latest", "load", "load_optimizer_state", "open_place", "optimizer_state", "save", "wait"]
