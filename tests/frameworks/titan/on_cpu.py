"""torchtitan on the CPU: what it asks of the device that a CPU does not answer. Import it before torchtitan.

Nothing that has to do with checkpoints is touched: the device's type, its memory statistics, attention's kernel, and what
gloo does not know.
"""

from __future__ import annotations

import os
import types
from importlib import import_module
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
for variable, value in ALONE.items():
    os.environ.setdefault(variable, value)

cpu: Any = torch.cpu
cpu.get_device_name = lambda device=None: "cpu"
cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1 << 30)
cpu.reset_peak_memory_stats = lambda device=None: None
cpu.empty_cache = lambda: None
cpu.memory_stats = lambda device=None: {}
utils: Any = import_module("torch._utils")
utils._get_available_device_type = lambda: "cpu"

distributed: Any = torch.distributed
barrier: Any = distributed.barrier
distributed.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)
if not hasattr(distributed, "set_timeout"):  # a later torch has it
    distributed.set_timeout = lambda timeout, group=None: None

fsdp: Any = FSDPModule
set_divisor: Any = fsdp.set_gradient_divide_factor


def divide_after_the_sum(module: Any, factor: float) -> None:
    """Have gradients summed and then divided, since gloo has no operation that does both."""
    set_divisor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, enable_gqa: bool, scale: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Return what flex attention computes, whose backward torch has not for the CPU; all (batch, heads, length, width)."""
    mask = flex.create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa), None


fsdp.set_gradient_divide_factor = divide_after_the_sum
flex: Any = import_module("torch.nn.attention.flex_attention")
titans: Any = import_module("torchtitan.models.common.attention")  # it asks for the device's type when it is imported
titans.FlexAttention._compiled_flex_attn = attend
