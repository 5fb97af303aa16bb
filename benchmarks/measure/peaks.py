"""Peak memory of a save and of a load beside the state, compared with the estimate.

Each way runs in a process forked for it, so that it reuses no memory of another way. A small save and a small load first
allocate the memory of the libraries; then the kernel's high-water mark of the process is reset (``clear_refs``), and read at
the end, with the memory of a writer process. The state is a model of fp32 matrices with AdamW. The result is shown beside
the estimate of `Checkpointer.estimate` for the same state.
"""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import aiockpt
from benchmarks.visit import Outcome, Turn

SAVES = 3
WIDTH = 1024
DEADLINE_S = 600.0
MIB = 1 << 20
_CLEAR_REFS = Path("/proc/self/clear_refs")
State = dict[str, Any]
Figures = dict[str, float]


def peaks(turn: Turn, outcome: Outcome) -> None:
    """Measure each way, in a process of its own."""
    if not os.access(_CLEAR_REFS, os.W_OK):
        outcome.unavailable.update(dict.fromkeys(turn.contenders, "this system has no /proc/self/clear_refs"))
        return
    _import_all()
    for name in turn.contenders:
        folder = Path(turn.folder) / name.replace(" ", "-")
        folder.mkdir()
        outcome.add(turn, name, {metric: [value] for metric, value in _in_child(name, turn.size_bytes, folder).items()})


def _import_all() -> None:
    """Import once the modules that each process needs; this starts no thread, which a fork would lose."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    import_module("aiockpt.session.checkpointer")


def _in_child(name: str, size_bytes: int, folder: Path) -> Figures:
    answer = folder / "answer.json"
    _in_fork(lambda: answer.write_text(json.dumps(WAYS[name](size_bytes, folder))))
    found: Figures = json.loads(answer.read_text())
    return found


def _in_fork(work: Callable[[], object]) -> None:
    """Do *work* in a process of its own."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001  the fork must run no code of the parent
            traceback.print_exc()
        os._exit(status)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("nothing was measured; the log says why")


def _build(size_bytes: int, of_ranks: int = 1) -> State:
    """Return a model and its AdamW of about *size_bytes*, with moments; or one rank's part of them."""
    count = max(1, size_bytes // (3 * 4 * WIDTH * WIDTH))
    mesh = init_device_mesh("cpu", (of_ranks,)) if of_ranks > 1 else None

    def make() -> torch.Tensor:
        local = torch.full((WIDTH, WIDTH // of_ranks), 0.5)
        return local if mesh is None else DTensor.from_local(local, mesh, [Shard(1)], run_check=False)

    model = torch.nn.ParameterList(torch.nn.Parameter(make()) for _ in range(count))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.ones(()), "exp_avg": make(), "exp_avg_sq": make()}
    return {"model": model, "optimizer": optimizer, "step": 1}


def _open(folder: Path, **options: Any) -> aiockpt.Checkpointer:
    return aiockpt.Checkpointer(folder, ranks=aiockpt.Ranks(), **options)


def _save(size_bytes: int, folder: Path, **options: Any) -> dict[str, float]:
    """Measure the peak over some saves."""
    _load_libraries(folder, **options)
    state = _build(size_bytes)
    with _open(folder / "run", retention=aiockpt.Retention(last=1), **options) as ckpt:
        said = ckpt.estimate(state).result(DEADLINE_S)
        before = _begin()
        for step in range(SAVES):
            ckpt.save(step, state).result(DEADLINE_S)
            ckpt.wait()
        beyond = _status_bytes("self", "VmHWM") - before + sum(_status_bytes(pid, "RssAnon") for pid in _children())
    return _figures(said.held_bytes, beyond, said.memory_bytes)


def _load(size_bytes: int, folder: Path, of_ranks: int = 1, **options: Any) -> Figures:
    """Measure the peak of a load into an existing state, from a step that another process saved."""
    _in_fork(lambda: _save_once(size_bytes, folder / "run", **options))
    _load_libraries(folder)
    if of_ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=of_ranks)
    state = _build(size_bytes, of_ranks)
    ranks = aiockpt.Ranks(0, of_ranks, FakeStore())
    with aiockpt.Checkpointer(folder / "run", ranks=ranks, **options) as ckpt:
        said = ckpt.estimate(state).result(DEADLINE_S)
    with _open(folder / "run", **options) as ckpt:
        before = _begin()
        ckpt.load(state).result(DEADLINE_S)
        beyond = _status_bytes("self", "VmHWM") - before
    return _figures(said.held_bytes, beyond, said.load_bytes if of_ranks == 1 else said.other_layout_bytes)


def _save_once(size_bytes: int, folder: Path, **options: Any) -> None:
    with _open(folder, **options) as ckpt:
        ckpt.save(1, _build(size_bytes)).result(DEADLINE_S)


def _load_libraries(folder: Path, **options: Any) -> None:
    """Save and load a small state first: memory of libraries does not count as memory of a save."""
    small = _build(1)
    with _open(folder / "first", **options) as ckpt:
        ckpt.save(1, small).result(DEADLINE_S)
        ckpt.load(small).result(DEADLINE_S)
    del small
    gc.collect()


def _figures(held: int, beyond: int, said: int) -> Figures:
    return {
        "state_bytes": held,
        "beyond_bytes": beyond,
        "peak_ratio": (held + beyond) / held,
        "said_ratio": (held + said) / held,
        "said_of_peak_ratio": (held + said) / (held + beyond),
    }


def _begin() -> int:
    """Reset the high-water mark; return the current memory of this process."""
    gc.collect()
    _CLEAR_REFS.write_text("5")
    return _status_bytes("self", "VmRSS")


def _children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _status_bytes(pid: str, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


WAYS: dict[str, Callable[[int, Path], Figures]] = {
    "save, eager": partial(_save, snapshot="eager"),
    "save, lazy": partial(_save, snapshot="lazy"),
    "save, writer process": partial(_save, worker="process"),
    "save, a pool of 64 MiB": partial(_save, limits=aiockpt.Limits(io=aiockpt.IO(pool_bytes=64 * MIB))),
    "load, in place": _load,
    "load, half of all columns": partial(_load, of_ranks=2),
    "the same in reads of 1 MiB": partial(
        _load, of_ranks=2, limits=aiockpt.Limits(io=aiockpt.IO(read_bytes=MIB, block_bytes=MIB, slab_bytes=MIB))
    ),
}
