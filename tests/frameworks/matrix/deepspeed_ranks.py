"""DeepSpeed's engine under ZeRO-1, -2 and -3."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aiockpt.integrations.deepspeed import attach
from tests.frameworks.ds.job import deepspeed, start
from tests.frameworks.matrix.net import BATCH, Known, Net, batch, groups_of, is_matrix, loss_of, settings_of
from tests.frameworks.matrix.rank import Ways, run


class Program:
    """An engine under a stage of ZeRO."""

    def __init__(self, stage: int, seed: int, rate: float) -> None:
        torch.manual_seed(seed)
        net = Net()
        settings = {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(groups_of(net.named_parameters()), lr=rate)
        self.engine: Any = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)[0]

    def train(self, step: int) -> None:
        words = batch(step, dist.get_rank())
        self.engine.backward(loss_of(self.engine(words), words))
        self.engine.step()

    def save(self, place: Path) -> None:
        with attach(self.engine, place):
            self.engine.save_checkpoint("x")

    def load(self, place: Path) -> None:
        with attach(self.engine, place):
            path, _ = self.engine.load_checkpoint("x")
        assert path is not None

    def known(self) -> Known:
        inner = self.engine.optimizer.optimizer
        (step,) = {float(state["step"]) for state in inner.state.values()}
        gather = _of_stage_3 if hasattr(self.engine.optimizer, "fp32_partitioned_groups_flat") else _of_stages_1_and_2
        names = {parameter: name for name, parameter in self.engine.module.named_parameters()}
        return {
            name: {
                **gather(self.engine, parameter),
                "step": torch.tensor(step),
                **settings_of(inner.param_groups[0 if is_matrix(name) else 1]),
            }
            for parameter, name in names.items()
        }


def _of_stage_3(engine: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """Return what DeepSpeed itself gathers of a parameter."""
    gather = deepspeed.utils.safe_get_full_optimizer_state
    return {
        "weight": deepspeed.utils.safe_get_full_fp32_param(parameter).clone(),
        **{key: gather(parameter, key).clone() for key in ("exp_avg", "exp_avg_sq")},
    }


def _of_stages_1_and_2(engine: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """Return a parameter, and its part of the partitions of all ranks put one behind another."""
    zero = engine.optimizer
    found = {"weight": parameter.detach().clone()}
    for group, own in enumerate(zero.single_partition_of_fp32_groups):
        first = 0
        for member in zero.round_robin_bit16_groups[group]:
            end = first + member.numel()
            if member is parameter:
                for key, flat in (("weight", own), *zero.optimizer.state[own].items()):
                    if flat.dim() == 0:
                        continue
                    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                    dist.all_gather(parts, flat.detach().contiguous())
                    whole = torch.cat(parts)[first:end].view(parameter.shape)
                    assert key != "weight" or torch.equal(whole, found[key])
                    found[key] = whole
            first = end
    return found


WAYS: Ways = {f"ZeRO-{stage}": partial(Program, stage) for stage in (1, 2, 3)}


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    start(rank, world_size, str(folder / "store"))
    run(WAYS, folder)
