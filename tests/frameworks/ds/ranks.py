"""One rank of a job that saves an engine under some ZeRO stages and loads it under others.

``tests.ranks.forked`` starts it with 3, then 2, then 1 ranks over one folder of checkpoints: what more ranks have saved is
loaded by fewer, too. What goes wrong is in FOLDER/RANK.json, by check.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import aiockpt
from aiockpt.integrations.deepspeed import attach
from tests.frameworks.ds.job import Job, Net, groups_of, start
from tests.frameworks.proving import assert_same

SHAPES = ["zero0-fp32", "zero1-fp32", "zero1-bf16", "zero2-fp32", "zero2-fp16", "zero3-fp32", "zero3-bf16"]
WORLDS = (3, 2, 1)
PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run all checks of a number of ranks."""
    torch.set_num_threads(1)
    start(rank, world_size, str(folder / "store"))
    found: dict[str, str] = {}
    for shape in SHAPES:
        for check in CHECKS:
            try:
                check(folder.parent / "places", shape)
                found[f"{check.__name__} {shape}"] = ""
            except BaseException:
                found[f"{check.__name__} {shape}"] = traceback.format_exc()
                (folder / f"{rank}.json").write_text(json.dumps(found))
                raise
            dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def make(shape: str, **options: Any) -> Job:
    stage, precision = shape.removeprefix("zero").split("-")
    return Job(int(stage), precision, **options)


def the_same_parallelism_goes_on_bit_by_bit(places: Path, shape: str) -> None:
    place = places / f"same-{dist.get_world_size()}" / shape
    job = make(shape, dropout=0.1)
    with attach(job.engine, place):
        losses = job.steps(0, 1)
        job.engine.save_checkpoint(
            "x", client_state={"losses": losses}
        )  # each rank has others: those of the first count
        straight = job.steps(2, 3, 4), job.weights(), job.engine.get_lr()
    other = make(shape, dropout=0.1, seed=8)
    with attach(other.engine, place):
        path, client = other.engine.load_checkpoint("x")
    assert (path, client) == ("x/global_step2", {"losses": losses})
    assert other.engine.global_steps == 2
    assert other.engine.global_samples == 2 * other.engine.train_batch_size()
    assert (other.steps(2, 3, 4), other.engine.get_lr()) == (straight[0], straight[2])
    assert_same(without_seen(other.weights()), without_seen(straight[1]))


def what_any_stage_and_number_of_ranks_saved_loads_into_every(places: Path, shape: str) -> None:
    runs = places / "runs"
    job = make(shape)
    place = runs / f"{shape}-of-{dist.get_world_size()}"
    with attach(job.engine, place):
        job.steps(0, 1)
        job.engine.save_checkpoint("x", client_state={"rank": dist.get_rank()})
    dist.barrier()
    other = make(shape, seed=8)
    for theirs in sorted(runs.iterdir()):
        with attach(other.engine, theirs):
            _, client = other.engine.load_checkpoint("x")
        same_size = theirs.name.endswith(f"-of-{dist.get_world_size()}")
        assert client == {"rank": dist.get_rank() if same_size else 0}
        again = places / "again" / f"{shape}-of-{dist.get_world_size()}" / theirs.name
        with attach(other.engine, again):
            other.engine.save_checkpoint("x")
        if dist.get_rank() == 0:
            assert_same(trained(again), trained(theirs))
    other.step(2)


def a_plain_module_and_optimizer_take_it(places: Path, shape: str) -> None:
    theirs = places / "runs" / f"{shape}-of-{dist.get_world_size()}"
    module = Net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=1.0)
    module.frozen.data = module.frozen.data.to(PRECISION[shape.partition("-")[2]])  # it is in that of the model
    with aiockpt.Checkpointer(theirs) as ckpt:
        ckpt.load({"model": module, "optimizer": optimizer}).result()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter.detach(), ckpt.read(2, f"model.{name}").result()), name
                escaped = name.replace(".", "\\.")
                for key in ("exp_avg", "exp_avg_sq"):
                    saved = ckpt.read(2, f"optimizer.state.{escaped}.{key}").result()
                    assert torch.equal(optimizer.state[parameter][key], saved), name
                assert float(optimizer.state[parameter]["step"]) == 2
    assert optimizer.param_groups[0]["lr"] < 1
    # And back: what a plain program saves.
    back = places / "plain" / theirs.name
    with aiockpt.Checkpointer(back) as ckpt:
        ckpt.save(2, {"model": module, "optimizer": optimizer})
    job = make(shape, seed=8)
    with attach(job.engine, back):
        job.engine.load_checkpoint("x")
    again = places / "plain-again" / theirs.name
    with attach(job.engine, again):
        job.engine.save_checkpoint("x")
    if dist.get_rank() == 0:
        assert_same(trained(again), trained(theirs))


def trained(place: Path) -> dict[str, torch.Tensor]:
    """Return the trained weights, and the optimizer's state."""
    with aiockpt.Checkpointer(place, ranks=aiockpt.Ranks()) as ckpt:
        described = ckpt.describe().result()
        names = [*(tensor.name for tensor in described.tensors), *described.alias]
        found = {plain_name(name): ckpt.read(None, name).result() for name in names}
    return {name: one for name, one in found.items() if name not in ("model.frozen", "model.seen", "model.head.weight")}


def plain_name(name: str) -> str:
    """Return a name as the dict form and the optimizer itself both have it."""
    return name.replace("\\", "").replace("optimizer.state.model.", "optimizer.state.")


def without_seen(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the buffer, of which each rank has its own and one is saved."""
    return {name: one for name, one in weights.items() if name != "seen"}


CHECKS: list[Callable[[Path, str], None]] = [
    the_same_parallelism_goes_on_bit_by_bit,
    what_any_stage_and_number_of_ranks_saved_loads_into_every,
    a_plain_module_and_optimizer_take_it,
]
