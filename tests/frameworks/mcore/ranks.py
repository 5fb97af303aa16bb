"""One rank of a job that saves a GPT of Megatron under some parallelisms and loads it under others.

``tests.ranks.forked`` starts it with 4, then 2, then 1 ranks over one folder of checkpoints: what more ranks have saved is
loaded by fewer, too. What goes wrong is in FOLDER/RANK.json, by check.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aiockpt.format.names import join_name
from aiockpt.integrations import megatron
from aiockpt.integrations.megatron.sharded_leaves import path_of
from tests.frameworks.mcore.job import Job, random_state, set_random_state, start, unwrapped
from tests.frameworks.proving import assert_same

SHAPES: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "tp2-pp2": {"tp": 2, "pp": 2},
        "tp2-dp2": {"tp": 2},
        "pp2-dp2": {"pp": 2},
        "ep4-dp4": {"ep": 4, "experts": 4},
        "pp2-ep2-dp2": {"pp": 2, "ep": 2, "experts": 4},
    },
    2: {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}, "ep2-dp2": {"ep": 2, "experts": 4}},
    1: {"one": {}, "experts": {"experts": 4}},
}
"""Parallelisms by number of ranks, of a model without experts and of one with them."""


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run all checks of a number of ranks."""
    torch.set_num_threads(1)
    start(rank, world_size, str(folder / "store"))
    found: dict[str, str] = {}
    for shape, options in SHAPES[world_size].items():
        places = folder.parent / ("experts" if "experts" in options else "dense")
        for check in CHECKS:
            try:
                check(places, shape, options)
                megatron.wait()
                found[f"{check.__name__} {shape}"] = ""
            except BaseException:
                found[f"{check.__name__} {shape}"] = traceback.format_exc()
                (folder / f"{rank}.json").write_text(json.dumps(found))
                raise
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def model_state(job: Job, iteration: int = 0) -> dict[str, Any]:
    """Return what a trainer saves of the model alone."""
    return {"model": unwrapped(job).sharded_state_dict(), "iteration": iteration, "rng_state": random_state()}


def model_loads_from_every_parallelism_into_every(places: Path, shape: str, options: dict[str, Any]) -> None:
    job = Job(**options)
    job.step(0)
    straight = job.weights()
    place = places / "models" / shape
    megatron.save(model_state(job, 7), place / "iter_0000007")

    other = Job(**options, seed=8)
    loaded = megatron.load(model_state(other), place / "iter_0000007")
    assert loaded["iteration"] == 7
    unwrapped(other).load_state_dict(loaded["model"])
    assert_same(other.weights(), straight)
    set_random_state(loaded["rng_state"])

    for theirs in sorted((places / "models").iterdir()):
        asked = model_state(other)
        del asked["rng_state"]  # it is of the places of a model, which are others
        megatron.load(asked, theirs / "iter_0000007")
        again = places / "again" / shape / theirs.name
        megatron.save(model_state(other), again / "iter_0000001")
        assert_same(tensors_in(again, 1), tensors_in(theirs, 7))


def whole_state(job: Job, iteration: int = 0, *, is_loading: bool = False) -> dict[str, Any]:
    """Return what a trainer saves of a run."""
    state = model_state(job, iteration)
    return state | {"optimizer": megatron.optimizer_state(job.optimizer, state["model"], is_loading=is_loading)}


def resume(job: Job, folder: Path, *, same_places: bool = True) -> None:
    """Load a run."""
    asked = whole_state(job, is_loading=True)
    if not same_places:
        del asked["rng_state"]  # it is of the places of a model, which are others
    loaded = megatron.load(asked, folder)
    unwrapped(job).load_state_dict(loaded["model"])
    megatron.load_optimizer_state(job.optimizer, loaded["optimizer"])
    if same_places:
        set_random_state(loaded["rng_state"])


def the_same_parallelism_goes_on_bit_by_bit(places: Path, shape: str, options: dict[str, Any]) -> None:
    for bf16 in (False, True):
        job = Job(**options, bf16=bf16, dropout=0.1)
        for number in range(2):
            job.step(number)
        place = places / f"same-{bf16}" / shape
        megatron.save(whole_state(job, 2), place / "iter_0000002")
        straight = [job.step(number) for number in (2, 3)], job.weights()

        other = Job(**options, bf16=bf16, dropout=0.1, seed=8)
        resume(other, place / "iter_0000002")
        assert [other.step(number) for number in (2, 3)] == straight[0]
        assert_same(other.weights(), straight[1])


def optimizer_state_is_what_megatron_gathers(places: Path, shape: str, options: dict[str, Any]) -> None:
    for bf16 in (False, True):
        # A tied embedding gets a bucket of its own under pipelines, and Megatron's gather then forgets the padding between
        # buckets: it warns, and gives tensors that are shifted.
        job = Job(**options, bf16=bf16, tied=False)
        for number in range(2):
            job.step(number)
        model = unwrapped(job).sharded_state_dict()
        ours, theirs = places / f"ours-{bf16}" / shape, places / f"gathered-{bf16}" / shape
        megatron.save({"optimizer": megatron.optimizer_state(job.optimizer, model)}, ours)
        reshardable = {"distrib_optim_sharding_type": "fully_reshardable"}
        megatron.save({"optimizer": job.optimizer.sharded_state_dict(model, metadata=reshardable)}, theirs)
        found, expected = tensors_in(ours, 0), tensors_in(theirs, 0)
        # Megatron has the count of steps as a value.
        found = {name: one for name, one in found.items() if not name.endswith(".step")}
        # Experts on several ranks have an optimizer of their own, whose number Megatron puts in front.
        expected = {re.sub(r"^model\.chained_\d\.", "", name): one for name, one in expected.items()}
        expected = {
            join_name(path_of(name)) if name.startswith("optimizer.state.") else name: one
            for name, one in expected.items()
        }
        if not bf16:  # the main parameters are the model's own
            expected = {name: one for name, one in expected.items() if not name.startswith("main_params.")}
        assert_same(found, expected)


def runs_load_from_every_parallelism_into_every(places: Path, shape: str, options: dict[str, Any]) -> None:
    for bf16 in (False, True):
        runs = places / f"runs-{bf16}"
        job = Job(**options, bf16=bf16)
        for number in range(2):
            job.step(number)
        megatron.save(whole_state(job, 2), runs / shape / "iter_0000002")
        later = [job.step(number) for number in (2, 3, 4)]
        if later[0]:  # of the last stage of the pipeline
            (runs / shape / f"losses-{dist.get_rank()}").write_text(json.dumps(later))
        dist.barrier()
        for theirs in sorted(runs.iterdir()):
            other = Job(**options, bf16=bf16, seed=8)
            resume(other, theirs / "iter_0000002", same_places=False)
            again = places / f"again-{bf16}" / shape / theirs.name
            megatron.save(whole_state(other), again / "iter_0000001")
            assert_same(tensors_in(again, 1), tensors_in(theirs, 2))
            if "dp" in shape or "dp" in theirs.name or bf16:
                continue  # the sum of other batches, or in another precision, is another loss
            losses = [other.step(number) for number in (2, 3, 4)]
            for file in theirs.glob("losses-*"):
                assert losses[0] == 0 or losses == pytest.approx(json.loads(file.read_text()), rel=1e-5)


def tensors_in(place: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint that belong to no single rank."""
    ckpt = megatron.open_place(place)
    names = [tensor.name for tensor in ckpt.describe(step).result().tensors if "/shard_" not in tensor.name]
    return {name: ckpt.read(step, name).result() for name in names}


CHECKS: list[Callable[[Path, str, dict[str, Any]], None]] = [
    model_loads_from_every_parallelism_into_every,
    the_same_parallelism_goes_on_bit_by_bit,
    optimizer_state_is_what_megatron_gathers,
    runs_load_from_every_parallelism_into_every,
]
