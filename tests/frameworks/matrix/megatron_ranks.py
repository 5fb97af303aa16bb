"""Megatron's layers, its data parallelism and its distributed optimizer, over two ranks of tensor parallelism."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.frameworks.matrix.net import HIDDEN, INNER, STEPS, WORDS, Known, batch, loss_of, settings_of
from tests.frameworks.matrix.rank import Ways, run, start
from tests.frameworks.mcore.job import configs, ddp, make_groups, optimizers, parallel, seeds

megatron: Any = import_module("aiockpt.integrations.megatron")  # now that Megatron runs on the CPU
layers: Any = import_module("megatron.core.tensor_parallel")
modules: Any = import_module("megatron.core.transformer.module")

TENSOR_PARALLEL = 2


class ParallelNet(modules.MegatronModule):  # type: ignore[misc]  # Any, where Megatron is not installed
    """The model of the matrix in Megatron's layers, under the same names."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        how = {"config": config, "init_method": nn.init.normal_}
        self.embed = layers.VocabParallelEmbedding(WORDS, HIDDEN, **how)
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = layers.ColumnParallelLinear(HIDDEN, INNER, gather_output=False, **how)
        self.down = layers.RowParallelLinear(
            INNER, HIDDEN, bias=True, input_is_parallel=True, skip_bias_add=False, **how
        )
        self.head = layers.ColumnParallelLinear(HIDDEN, WORDS, gather_output=True, **how)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.embed(words)
        found = found + self.down(torch.tanh(self.up(self.norm(found))[0]))[0]
        logits: torch.Tensor = self.head(found)[0]
        return logits


class Program:
    """A model and a distributed optimizer of Megatron."""

    def __init__(self, seed: int, rate: float) -> None:
        make_groups(TENSOR_PARALLEL, 1, 1)
        torch.manual_seed(seed)
        seeds.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        config = configs.TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            tensor_model_parallel_size=TENSOR_PARALLEL,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        )
        self.net = ParallelNet(config)
        how = ddp.DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = ddp.DistributedDataParallel(config, how, self.net)
        settings = optimizers.OptimizerConfig(
            optimizer="adam", lr=rate, weight_decay=0.1, use_distributed_optimizer=True, clip_grad=0.0
        )
        self.optimizer = optimizers.get_megatron_optimizer(settings, [self.model])

    def train(self, step: int) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        words = batch(step, parallel.get_data_parallel_rank())
        torch.autograd.backward(loss_of(self.model(words), words))
        self.model.finish_grad_sync()
        assert self.optimizer.step()[0]

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        model = self.net.sharded_state_dict()
        optimizer = megatron.optimizer_state(self.optimizer, model, is_loading=is_loading)
        return {"model": model, "optimizer": optimizer, "iteration": 0 if is_loading else STEPS}

    def save(self, place: Path) -> None:
        megatron.save(self._state(is_loading=False), place / f"iter_{STEPS:07}")
        megatron.wait()

    def load(self, place: Path) -> None:
        loaded = megatron.load(self._state(is_loading=True), place)
        self.net.load_state_dict(loaded["model"])
        megatron.load_optimizer_state(self.optimizer, loaded["optimizer"])
        assert loaded["iteration"] == STEPS
        megatron.wait()

    def known(self) -> Known:
        """Return what Megatron's own gather of the distributed optimizer gives, and the slices of tensors put together."""
        (one,) = self.optimizer.chained_optimizers
        (state,) = one.get_parameter_state_dp_zero(return_on_all_ranks=True)[0].values()
        (step,) = {float(entry["step"]) for entry in one.optimizer.state.values()}
        index = one.buffers[0].param_index_map
        found: Known = {}
        for name, parameter in self.net.named_parameters():
            first, end, _ = index[parameter]
            group = one.optimizer.param_groups[_group_of(one, parameter.dim())]
            whole = {key: _whole(parameter, state[key][first:end]) for key in ("param", "exp_avg", "exp_avg_sq")}
            assert torch.equal(_whole(parameter, parameter.detach().flatten()), whole["param"]), name
            whole["weight"] = whole.pop("param")
            found[name] = {**whole, "step": torch.tensor(step), **settings_of(group)}
        return found


def _group_of(optimizer: Any, dims: int) -> int:
    """Return the number of the group of matrices, or that of the rest, which Megatron gives no weight decay."""
    (number,) = (
        number
        for number, group in enumerate(optimizer.optimizer.param_groups)
        if (group["wd_mult"] != 0.0) == (dims > 1)
    )
    return number


def _whole(parameter: Any, flat: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies as a parameter, of the slices that the ranks of tensor parallelism have of it."""
    part = flat.view(parameter.shape).contiguous()
    if not getattr(parameter, "tensor_model_parallel", False):
        return part.clone()
    group = parallel.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(TENSOR_PARALLEL)]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, parameter.partition_dim)


WAYS: Ways = {"Megatron": partial(Program)}


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run one rank."""
    start(rank, world_size, folder)
    run(WAYS, folder)
