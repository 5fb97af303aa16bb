"""megatron-core on the CPU: what it asks of CUDA that a CPU does not answer. Import it before Megatron.

Nothing that has to do with checkpoints is touched: devices, names of tensor types, and the generator of random numbers,
which is that of the host.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")

cuda: Any = torch.cuda
cuda.current_device = lambda: "cpu"
cuda.synchronize = lambda device=None: None
cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
cuda.manual_seed = lambda seed: torch.manual_seed(seed)
cuda.current_stream = lambda device=None: None

tensor: Any = torch.Tensor
tensor.cuda = lambda self, *args, **options: self


class OnHost(TorchFunctionMode):
    """Makes on the host what is to be made on a GPU, and names types as on one: by these Megatron tells precisions apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is tensor.type and isinstance(result, str) else result


mode: Any = OnHost()
mode.__enter__()
random: Any = import_module("megatron.core.tensor_parallel.random")
random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
experts: Any = import_module("megatron.core.transformer.moe.moe_utils")
experts.te_general_gemm = None  # 0.16.1 asks for it, and defines it where Transformer Engine is installed only
