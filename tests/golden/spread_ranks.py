"""The golden checkpoints of optimizers beside sharded parameters, and of a composite tensor that is spread over two ranks.

Run by `tests.ranks.forked` with a folder that has none it writes those of the version that is installed: once for each
release, never again. Where the folder has them it loads them and compares.
"""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import aiockpt
from tests.ranks.composite_checks import Viewed
from tests.ranks.optimizer_checks import forms, fsdp1, fsdp2, job

State = dict[str, Any]
CASES = [("Preconditioned", fsdp2), ("Local", fsdp2), ("Adafactors", fsdp2), ("NAdam", fsdp1), ("NAdam", fsdp2)]
"""State of a shape of its own with digests; plain parts and plain replicas; spread otherwise; flat slices; a rank's own."""
OWN = len(CASES) - 1


def numbered(tensor: torch.Tensor, start: int, like: DTensor | None) -> None:
    """Write the numbers from *start* into *tensor*: as a whole, and of a DTensor, or a plain part beside one, its part."""
    spread = tensor if isinstance(tensor, DTensor) else like
    shape = spread.shape if spread is not None else tensor.shape
    whole = torch.arange(start, start + shape.numel(), dtype=torch.float32).view(shape) / 8
    if spread is not None:
        for placement in spread.placements:  # one axis of the mesh
            if isinstance(placement, Shard):
                axis, rank = placement.dim, dist.get_rank()
                chunks = whole.chunk(dist.get_world_size(), axis)
                whole = chunks[rank] if rank < len(chunks) else whole.narrow(axis, 0, 0)
    here: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    here.copy_(whole)


@torch.no_grad()
def fill(state: State) -> None:
    """Give the parameters and the state of the optimizer numbers that are exact; FSDP1 shows slices, which get one each."""
    for place, (_, parameter) in enumerate(state["model"].named_parameters()):
        sharded = parameter if isinstance(parameter, DTensor) else None
        if not parameter.numel():  # no step reaches it on this rank
            state["optimizer"].state.pop(parameter, None)
        held = [parameter, *(one for _, one in sorted(state["optimizer"].state.get(parameter, {}).items()))]
        tensors = [one for some in held for one in (some if isinstance(some, list) else [some])]
        for number, tensor in enumerate(one for one in tensors if isinstance(one, torch.Tensor)):
            is_part = sharded is not None and number and tensor.shape == sharded.to_local().shape != sharded.shape
            if sharded is None:
                tensor.fill_(place + number / 8)
            else:
                numbered(tensor, 100 * place + number, sharded if is_part else None)


def made(case: int, *, filled: bool) -> State:
    """Return the state of a case, *filled* or new; the optimizer of each rank's own has to have begun."""
    kind, wrap = CASES[case]
    state = job(kind, wrap, 1)
    if not filled and case != OWN:
        return state
    for parameter in state["model"].parameters():
        parameter.grad = torch.zeros_like(parameter)
    state["optimizer"].step()
    if filled:
        fill(state)
    return state


def composite(start: int) -> State:
    mesh: Any = init_device_mesh("cpu", (2,))
    rank, rows = dist.get_rank(), 5 - dist.get_rank()

    def codes(rows: int, low: int) -> Any:
        return Viewed(torch.arange(low, low + 4 * rows, dtype=torch.int8).view(rows, 4), torch.ones(rows), 4)

    how: Any = {"run_check": False, "shape": torch.Size((9, 4)), "stride": (4, 1)}
    cut = DTensor.from_local(codes(rows, start + 20 * rank), mesh, [Shard(0)], **how)
    return {"cut": cut, "same": DTensor.from_local(codes(2, start), mesh, [Replicate()], run_check=False)}


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Write or check all cases; what differs is in FOLDER/RANK.json."""
    meet, within = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size, timeout=within)
    writes = not (folder / "spread").exists()
    dist.barrier()
    wrong: list[str] = []
    with aiockpt.Checkpointer(folder / "spread", limits=aiockpt.Limits(io=aiockpt.IO(block_bytes=4096))) as ckpt:
        for case, (kind, wrap) in enumerate(CASES):
            state, wanted = made(case, filled=writes), made(case, filled=True)
            saved = {**state, "optimizer": aiockpt.per_rank(state["optimizer"])} if case == OWN else state
            _ = ckpt.save(case, saved).result() if writes else ckpt.load(saved, case).result()
            if forms(state) != forms(wanted):
                wrong.append(f"{kind} {wrap.__name__}")
        last, other = composite(0), composite(0 if writes else 50)
        _ = ckpt.save(len(CASES), other).result() if writes else ckpt.load(other, len(CASES)).result()
        for name, one in last.items():
            if not torch.equal(one._local_tensor.codes, other[name]._local_tensor.codes):
                wrong.append(name)
    (folder / f"{rank}.json").write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()
