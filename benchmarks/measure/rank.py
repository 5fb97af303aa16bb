"""One rank of the benchmark of many ranks: it saves and loads the same FSDP2 state by one contender, with all other ranks.

Started by torchrun, once for each rank. A time is from a barrier before the call until the slowest rank is done and all is
durable. The loaded state is compared with the saved one, off the clock.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.host_memory import map_pages
from aiockpt.storage.backend import Reader, Seen
from benchmarks import floors, pages
from benchmarks.contenders import DEADLINE_S, Contender, Pending, dcp, make, ours
from benchmarks.measure.ranks import Answer, Order
from benchmarks.scenarios import SCENARIOS
from benchmarks.state import State

WIDTH = 1024


class Ours(ours.Aiockpt):
    """aiockpt by its defaults, with a load_group or without, from the disk or from a storage that is slow."""

    def order(self, order: Order) -> None:
        """Accept the order."""
        self._storage_bytes_s = order.storage_bytes_s
        if order.load_group:
            self._options["ranks"] = aiockpt.Ranks(load_group=distributed.group.WORLD)

    def place(self, folder: Path) -> Any:
        if self._storage_bytes_s is None:
            return folder
        return SlowStorage(folder, self._storage_bytes_s / distributed.get_world_size())

    def load(self, step: int, state: State) -> None:
        loaded = self.checkpointer.load(state, step).result(DEADLINE_S)
        assert loaded is not None
        self.read_bytes = loaded.read_bytes


class SlowStorage:
    """A local backend whose data files are read at *bytes_s* bytes a second: one rank's share of a shared storage."""

    def __init__(self, root: Path, bytes_s: float) -> None:
        self._inner = LocalBackend(root)
        self._bytes_s = bytes_s
        self._one_by_one = anyio.Lock()

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._inner, verb)

    async def open(self, key: str) -> Reader:
        """Open an object; its reads take their time."""
        return _SlowReader(await self._inner.open(key), self._bytes_s, self._one_by_one)


class _SlowReader:
    def __init__(self, inner: Reader, bytes_s: float, one_by_one: anyio.Lock) -> None:
        self._inner = inner
        self._bytes_s = bytes_s
        self._one_by_one = one_by_one
        self.size = inner.size
        self.close = inner.close

    async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
        async with self._one_by_one:
            await anyio.sleep(sum(map(len, into)) / self._bytes_s)
        await self._inner.read(offset, into, seen)


class _FsdpDcp(Contender):
    """The state dicts that DCP's documentation uses, taken within the call."""

    def save(self, step: int, state: State) -> Pending:
        return super().save(step, _state_dicts(state))

    def load(self, step: int, state: State) -> None:
        loaded = _state_dicts(state)
        super().load(step, loaded)
        set_model_state_dict(state["model"], loaded["model"])
        set_optimizer_state_dict(state["model"], state["optimizer"], loaded["optimizer"])


def _state_dicts(state: State) -> State:
    optimizer = get_optimizer_state_dict(state["model"], state["optimizer"])
    return {"model": get_model_state_dict(state["model"]), "optimizer": optimizer}


class DcpSave(_FsdpDcp, dcp.Save):
    """``dcp.save``, defaults."""


class DcpAsyncSave(_FsdpDcp, dcp.AsyncSave):
    """``dcp.async_save``, defaults."""


class Floor(Contender):
    """Each rank only moves its even share of the bytes past the page cache: the limit for ranks on one disk.

    Memory is warm and in huge pages; threads are started before the clock. The bytes are not hashed, named or committed, so
    they are no checkpoint. The number of readers is that of the writers, or a multiple of it.
    """

    checks = False

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        self._memory = memoryview(map_pages(sum(tensor.nbytes for tensor in locals_of(state))))
        self._direct = floors.supports_direct_io(folder.parent)
        self._threads = ThreadPoolExecutor(floors.DIRECT_THREADS)
        list(self._threads.map(lambda _: None, range(floors.DIRECT_THREADS)))

    def save(self, step: int, state: State) -> Pending:
        self.location(step).mkdir(exist_ok=True)
        file = self.location(step) / f"{distributed.get_rank()}.raw"
        floors.write_direct(self._threads, file, self._memory, self._direct)
        return Pending(lambda: True, lambda: pages.sync_folders(self.location(step)))

    def load(self, step: int, state: State) -> None:
        files = sorted(self.location(step).glob("*.raw"), key=lambda path: int(path.stem))
        readers = distributed.get_world_size() // len(files)
        number, part = divmod(distributed.get_rank(), readers)
        floors.read_direct(self._threads, files[number], self._memory, self._direct, part * len(self._memory))


def build(layers: int, *, replicated: bool) -> State:
    """Return a sharded or replicated model and an optimizer with its moments."""
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
    return {"model": model, "optimizer": optimizer}


def slowest(seconds: float) -> float:
    """Return the maximum over all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return found.item()


def total(count: int) -> int:
    """Return the sum over all ranks."""
    found = torch.tensor(count, dtype=torch.int64)
    distributed.all_reduce(found)
    return int(found.item())


def bytes_read() -> int:
    """Return the bytes that this process has read so far, from any source (``/proc/self/io``)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("rchar:"))


def locals_of(state: State) -> list[torch.Tensor]:
    """Return this rank's tensors, large ones only."""
    tensors: list[Any] = list(state["model"].parameters())
    tensors += [held[key] for held in state["optimizer"].state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]


def value_of(step: int, number: int) -> float:
    """Return the value that fills tensor *number* when *step* is saved."""
    return float(step * 1000 + number)


def do_saves(order: Order, contender: Contender, state: State) -> Answer:
    """Save one step off the clock, then timed ones."""
    answer = Answer()
    for step in range(order.repetitions + 1):
        for number, tensor in enumerate(locals_of(state)):
            tensor.fill_(value_of(step, number))
        gc.collect()
        os.sync()
        distributed.barrier()
        begun = time.perf_counter()
        pending = contender.save(step, state)
        held_s = time.perf_counter() - begun
        pending.wait()
        seconds = slowest(time.perf_counter() - begun)
        if step:
            answer.seconds.append(seconds)
            answer.held_s.append(slowest(held_s))
    return answer


def do_loads(order: Order, contender: Contender, state: State) -> Answer:
    """Load a step, its pages dropped before each time (unless they are to be warm), and compare."""
    answer = Answer()
    tensors = locals_of(state)
    needed_bytes = sum(tensor.nbytes for tensor in tensors)
    for _ in range(order.repetitions):
        for tensor in tensors:
            tensor.zero_()
        if distributed.get_rank() == 0 and not order.warm:
            pages.drop(contender.location(order.step))
        distributed.barrier()
        before = bytes_read()
        begun = time.perf_counter()
        contender.load(order.step, state)
        answer.seconds.append(slowest(time.perf_counter() - begun))
        answer.over_read.append(total(bytes_read() - before) / total(needed_bytes))
        if order.replicated:
            answer.read_once.append(total(contender.read_bytes) / needed_bytes)
        wrong = sum(bool((tensor != value_of(order.step, number)).any()) for number, tensor in enumerate(tensors))
        if contender.checks and total(wrong):
            raise RuntimeError(f"{wrong} tensors differ from what was saved")
    return answer


def main() -> None:
    """Carry out the order in the file that the command line names."""
    order = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    state = build(max(1, order.turn.size_bytes // (3 * 4 * WIDTH * WIDTH)), replicated=order.replicated)
    contender: Contender = make(SCENARIOS["ranks"].contenders[order.contender])
    if isinstance(contender, Ours):
        contender.order(order)
    contender.open(Path(order.folder), state)
    answer = (do_saves if order.action == "save" else do_loads)(order, contender, state)
    contender.close()
    if distributed.get_rank() == 0:
        Path(order.answer).write_bytes(msgspec.json.encode(answer))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    from benchmarks.measure import rank  # the contenders are made from that module, not from this copy of it

    rank.main()
