"""A run of Ray Train on the CPU: what each worker does, and a driver for it.

    python -m tests.frameworks.ray_job --workers 2 --steps 12

Ray keeps its own folders in a temporary one, as a cluster that is gone would: what is left of a run is its place.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import aiockpt
from aiockpt.integrations.ray import report, resume

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
ray: Any = import_module("ray")
train: Any = import_module("ray.train")
ray_torch: Any = import_module("ray.train.torch")
SAMPLES, WIDTH = 96, 6


def make_model() -> torch.nn.Module:
    """Return a model that draws random numbers."""
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))


def make_training() -> tuple[torch.nn.Module, torch.optim.Optimizer, aiockpt.Loader[Any]]:
    """Return what is trained, always with the same weights, and what on."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    data = torch.randn(SAMPLES, WIDTH)
    model = ray_torch.prepare_model(make_model())
    sampler = aiockpt.ShardedSampler(SAMPLES, batch_size=4, seed=5)
    loader = aiockpt.Loader(DataLoader(TensorDataset(data), batch_sampler=sampler))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), loader


def train_on(batch: list[torch.Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train on a batch, a tensor (rows, width) in a list, and return its loss."""
    loss = model(batch[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def train_loop(config: dict[str, Any]) -> None:
    """Train, save every second step, and die where *config* says so, once."""
    model, optimizer, loader = make_training()
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": aiockpt.RNG()}
    with aiockpt.Checkpointer(
        config["place"], every=config["every"], retention=aiockpt.Retention(last=config["keep"])
    ) as ckpt:
        step = resume(ckpt, state)
        note(config, f"begins at {step}")
        while step < config["steps"]:
            for batch in loader:
                loss = train_on(batch, model, optimizer)
                save = ckpt.step(step, state, metrics={"loss": loss})
                die_once(config, step, save)
                report({"loss": loss, "step": step}, save)
                step += 1
                if step == config["steps"]:
                    break


def die_once(config: dict[str, Any], step: int, save: aiockpt.SaveFuture | None) -> None:
    """Kill this worker by SIGKILL, the first time that it comes to the step of *config*."""
    marker = Path(config["place"] + ".died")
    if (step, train.get_context().get_world_rank()) == (
        config.get("dies_at"),
        config.get("dies_on", 0),
    ) and not marker.exists():
        if config.get("dies_committed") and save is not None:
            save.result()
        train.get_all_reported_checkpoints(
            consistency_mode=train.CheckpointConsistencyMode.COMMITTED
        )  # Ray has heard of all
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def note(config: dict[str, Any], line: str) -> None:
    """Append a line to what the test reads."""
    if train.get_context().get_world_rank() == 0:
        with open(config["place"] + ".notes", "a") as notes:
            notes.write(line + "\n")


def fit(
    config: dict[str, Any],
    workers: int,
    storage: str,
    name: str = "run",
    keep: int | None = None,
    loop: Any = train_loop,
    failures: int = 2,
) -> Any:
    """Run it, and return what Ray says of it."""
    return ray_torch.TorchTrainer(
        loop,
        train_loop_config={"steps": 10, "every": 2, "keep": 3, **config},
        torch_config=ray_torch.TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=train.FailureConfig(max_failures=failures),
            checkpoint_config=train.CheckpointConfig(num_to_keep=keep),
        ),
    ).fit()


def begin() -> None:
    """Start a cluster of this machine alone."""
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    begin()
    with tempfile.TemporaryDirectory() as folder:
        fit({"place": f"{Path.cwd()}/place", "steps": given.steps}, given.workers, folder)
    ray.shutdown()
