"""What one rank does in the benchmark of many: save and load the same FSDP2 state by one contender, all ranks at once.

Started by torchrun, once for each rank. A time is from a barrier before the call to the moment when the slowest rank is
done and all is durable. What was loaded is compared with what was saved, off the clock.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import aiockpt
from benchmarks import pages
from benchmarks.ranks_floor import Floor
from benchmarks.slow_storage import SlowStorage

WIDTH = 1024


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    Attributes:
        action: "save" or "load".
        contender: "aiockpt", "dcp", "dcp-async" or "floor".
        layers: of WIDTH × WIDTH float32; each is saved three times, as parameter and as two moments.
        repetitions: timed saves (or cold loads).
        answer: the file for rank 0's answer.
        replicated: every rank holds the whole state, as with DDP, instead of its shards.
        load_group: ranks read once and send to each other (aiockpt only).
        warm: the page cache keeps what it has between the loads.
        storage_bytes_s: the rate at which all ranks together may read (aiockpt only); None: that of the disk.
    """

    action: str
    contender: str
    folder: str
    layers: int
    repetitions: int
    answer: str
    replicated: bool = False
    load_group: bool = False
    warm: bool = False
    storage_bytes_s: float | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Samples: seconds of each operation, and of the caller's being held; bytes read over bytes needed, all ranks.

    Attributes:
        read_once: bytes read by all ranks over the bytes of the tensors that they want, each counted once; of replicas.
    """

    seconds: list[float] = []
    held_s: list[float] = []
    over_read: list[float] = []
    read_once: list[float] = []


def build(layers: int, *, replicated: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded or replicated model and an optimizer that has its moments."""
    torch.manual_seed(0)
    empty: Callable[..., nn.Module] = nn.utils.skip_init
    model = nn.Sequential(*(empty(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(layers)))
    if not replicated:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Ours:
    """aiockpt by its defaults, with a load_group or without."""

    def __init__(self, order: Order, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._state = {"model": model, "optimizer": optimizer}
        group: Any = distributed.new_group(backend="gloo") if order.load_group else None
        place: Any = Path(order.folder)
        if order.storage_bytes_s is not None:
            place = SlowStorage(place, order.storage_bytes_s / distributed.get_world_size())
        self._checkpointer = aiockpt.Checkpointer(place, load_group=group)
        self.read_bytes = 0

    def save(self, step: int) -> Callable[[], object]:
        return self._checkpointer.save(step, self._state).result

    def load(self, step: int) -> None:
        loaded = self._checkpointer.load(self._state, step).result()
        assert loaded is not None
        self.read_bytes = loaded.read_bytes

    def close(self) -> None:
        self._checkpointer.close()


class Dcp:
    """``torch.distributed.checkpoint`` by its defaults, with the state dicts that its documentation uses."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, background: bool) -> None:
        self._folder = folder
        self._model = model
        self._optimizer = optimizer
        self._background = background

    def _state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self._model),
            "optim": get_optimizer_state_dict(self._model, self._optimizer),
        }

    def save(self, step: int) -> Callable[[], object]:
        place = self._folder / f"step-{step:08d}"
        if not self._background:
            save(self._state(), checkpoint_id=place)
            return lambda: pages.sync_folders(place)
        future: Any = async_save(self._state(), checkpoint_id=place)

        def wait() -> None:
            future.result()
            pages.sync_folders(place)

        return wait

    def load(self, step: int) -> None:
        state = self._state()
        dcp_load(state, checkpoint_id=self._folder / f"step-{step:08d}")
        set_model_state_dict(self._model, state["model"])
        set_optimizer_state_dict(self._model, self._optimizer, state["optim"])

    def close(self) -> None:
        pass


def slowest(seconds: float) -> float:
    """Return the largest of what all ranks measured."""
    found = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return found.item()


def total(count: int) -> int:
    """Return the sum over all ranks."""
    found = torch.tensor(count, dtype=torch.int64)
    distributed.all_reduce(found)
    return int(found.item())


def bytes_read() -> int:
    """Return the bytes that this process has read so far, from wherever (``/proc/self/io``)."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    raise RuntimeError("/proc/self/io has no rchar")


def locals_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return this rank's tensors, large ones only."""
    tensors: list[Any] = list(model.parameters())
    tensors += [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]


def value_of(step: int, number: int) -> float:
    """Return what tensor *number* is full of when *step* is saved."""
    return float(step * 1000 + number)


def do_saves(order: Order, contender: Any, tensors: list[torch.Tensor]) -> Answer:
    """Save one step off the clock, then timed ones."""
    answer = Answer()
    for step in range(order.repetitions + 1):
        for number, tensor in enumerate(tensors):
            tensor.fill_(value_of(step, number))
        gc.collect()
        os.sync()
        distributed.barrier()
        begun = time.perf_counter()
        wait = contender.save(step)
        held_s = time.perf_counter() - begun
        wait()
        seconds = slowest(time.perf_counter() - begun)
        if step:
            answer.seconds.append(seconds)
            answer.held_s.append(slowest(held_s))
    return answer


def do_loads(order: Order, contender: Any, tensors: list[torch.Tensor]) -> Answer:
    """Load the last step, its pages dropped before each time (unless they are to be warm), and compare."""
    answer = Answer()
    steps = sorted(int(folder.name.removeprefix("step-")) for folder in Path(order.folder).glob("step-*"))
    for _ in range(order.repetitions):
        for tensor in tensors:
            tensor.zero_()
        if distributed.get_rank() == 0 and not order.warm:
            pages.drop(Path(order.folder) / f"step-{steps[-1]:08d}")
        distributed.barrier()
        before = bytes_read()
        begun = time.perf_counter()
        contender.load(steps[-1])
        answer.seconds.append(slowest(time.perf_counter() - begun))
        read = total(bytes_read() - before)
        answer.over_read.append(read / total(sum(tensor.nbytes for tensor in tensors)))
        if order.replicated:
            answer.read_once.append(total(contender.read_bytes) / sum(tensor.nbytes for tensor in tensors))
        if order.contender == "floor":
            continue
        wrong = sum(bool((tensor != value_of(steps[-1], number)).any()) for number, tensor in enumerate(tensors))
        if total(wrong):
            raise RuntimeError(f"{wrong} tensors differ from what was saved")
    return answer


def main() -> None:
    """Carry out the order in the file that the command line names."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model, optimizer = build(order.layers, replicated=order.replicated)
    folder = Path(order.folder)
    contender: Any
    if order.contender == "aiockpt":
        contender = Ours(order, model, optimizer)
    elif order.contender == "floor":
        contender = Floor(folder, sum(tensor.nbytes for tensor in locals_of(model, optimizer)))
    else:
        contender = Dcp(folder, model, optimizer, background=order.contender == "dcp-async")
    work = do_saves if order.action == "save" else do_loads
    answer = work(order, contender, locals_of(model, optimizer))
    contender.close()
    if distributed.get_rank() == 0:
        Path(order.answer).write_bytes(msgspec.json.encode(answer))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
