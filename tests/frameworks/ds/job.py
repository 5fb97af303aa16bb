"""A small model in an engine of DeepSpeed under any ZeRO stage and precision, and a step of it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")

import torch
import torch.distributed as dist
from torch import nn

deepspeed: Any = import_module("deepspeed")
# torch computes in float16 on the CPU, which DeepSpeed takes to be too slow for anyone.
import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: (
    True
)  # Its op for shared memory is compiled by who comes first, under a lock that a killed process leaves behind for ever.
_comm: Any = import_module("deepspeed.comm.torch")
_comm.build_shm_op = lambda: None

BATCH = 2
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def start(rank: int, world_size: int, store: str) -> None:
    """Begin the process group that DeepSpeed uses."""
    environment = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    deepspeed.init_distributed("gloo")


class Net(nn.Module):
    """Odd sizes, so that partitions cut parameters and have padding; a tied, a frozen and a scalar parameter; a buffer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("seen", torch.zeros(7))
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(torch.tanh(self.first(self.embed(words)))))
        self.get_buffer("seen").add_(hidden.detach().mean(0))
        found: torch.Tensor = self.head(self.second(hidden) * self.scale + self.frozen.sum())
        return found


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices, and the rest without weight decay."""
    trained = [one for one in module.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]


class Job:
    """An engine.

    Args:
        stage: of ZeRO.
        precision: a key of `PRECISIONS`.
        optimizer: its class.
        module: what to train, in one group; None is a `Net` with `groups_of` it.
        zero: more settings of ``zero_optimization``.
    """

    def __init__(
        self,
        stage: int = 2,
        precision: str = "fp32",
        *,
        dropout: float = 0.0,
        optimizer: Any = torch.optim.AdamW,
        seed: int = 7,
        module: nn.Module | None = None,
        zero: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        torch.manual_seed(seed)
        made = Net(dropout) if module is None else module
        trained = [one for one in made.parameters() if one.requires_grad]
        groups: Any = groups_of(made) if module is None else trained
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": stage, **(zero or {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 1.0,
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.02, "warmup_num_steps": 5},
            },
            **PRECISIONS[precision],
            **config,
        }
        self.engine, _, _, _ = deepspeed.initialize(model=made, optimizer=optimizer(groups, lr=0.02), config=settings)

    def step(self, number: int) -> float:
        """Train a batch that is made for this step and rank, and return its loss."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        return self.train(torch.randint(0, 11, (8,), generator=generator))

    def train(self, words: torch.Tensor) -> float:
        """Train a batch, and return its loss."""
        logits = self.engine(words)
        loss = nn.functional.cross_entropy(logits.float(), words.roll(1))
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def steps(self, *numbers: int) -> list[float]:
        return [self.step(number) for number in numbers]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole weights and buffers by name."""
        parameters = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            return {name: one.detach().clone() for name, one in self.engine.module.state_dict().items()}
