"""A fit as users write it: shuffled data, accumulated gradients, dropout, schedulers, validation, callbacks with a state.

Options choose the loader, the strategy, and when the callback saves. What is learnt means nothing.
"""

from __future__ import annotations

import argparse
import builtins
import os
import random
import signal
import sys
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import aiockpt


def replace(checkpoint: Any) -> None:
    weights = checkpoint.pop("state_dict")
    assert "state_dict" not in dict(checkpoint)
    checkpoint["state_dict"] = {name: torch.full_like(one, 0.5) for name, one in weights.items()}


def scale(checkpoint: Any) -> None:
    assert "state_dict" in list(checkpoint)
    for one in dict(checkpoint)["state_dict"].values():
        one *= 1


def change_current(checkpoint: Any) -> None:
    checkpoint["current_model_state"]["net.0.weight"] += 1


def forget(checkpoint: Any) -> None:
    checkpoint["optimizer_states"] = checkpoint["lr_schedulers"] = []


HOOKS = {"forgotten": forget, "replaced": replace, "scaled": scale, "current": change_current, "nothing": len}
"""What the module's hook does with the checkpoint that is loaded."""

STANDS = [
    "raw optimizer",
    "hook of a batch",
    "no optimizer",
    "moves in the second epoch",
    "accumulates by hand",
    "unseen in the data",
]
"""Ways to train by hand; ``trainer.global_step`` stays 0, or does so for a while."""


def options(*given: str) -> Any:
    """Return what *given* says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", default="lightning.pytorch")
    parser.add_argument("--dir", default="ckpt")
    parser.add_argument("--loader", default="shuffled")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--every-steps", type=int)
    parser.add_argument("--every-epochs", type=int)
    parser.add_argument("--keep-last", type=int)
    parser.add_argument("--monitor")
    parser.add_argument("--snapshot", default="eager")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--val-every", type=int, default=5)
    parser.add_argument("--norm", default="batch")
    parser.add_argument("--means", action="store_true")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--average", action="store_true")
    parser.add_argument("--hook-of-load", choices=[*HOOKS, "callback", "read"])
    parser.add_argument("--stands-still", choices=STANDS)
    parser.add_argument("--same-process", action="store_true")
    parser.add_argument("--datamodule", action="store_true")
    parser.add_argument("--counting-precision", action="store_true")
    parser.add_argument("--sigterm-at", type=int)
    parser.add_argument("--sigterm-within", action="store_true")
    parser.add_argument("--sigterm-to", choices=["process", "group", "workers"], default="process")
    parser.add_argument("--raise", dest="error")
    parser.add_argument("--no-last", action="store_true")
    parser.add_argument("--plugin", choices=["ours", "theirs"])
    parser.add_argument("--rolling", action="store_true")
    parser.add_argument("--no-validation", action="store_true")
    parser.add_argument("--imported-first")
    parser.add_argument("--one-cycle", action="store_true")
    parser.add_argument("--looks", choices=["setup", "setup-of-callback", "configure", "on-fit-start"])
    parser.add_argument("--finds", choices=["rate", "batch"])
    parser.add_argument("--changes", choices=["finetuning", "averaging", "accumulation", "pruning", "pruning for good"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--last-sample", type=int, default=0)
    return parser.parse_args(given)


class Noisy(TensorDataset):
    """Samples that are augmented by random numbers; the *last* one tells the process to end, and fails."""

    given, last = 0, 0

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.numbers: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.given += 1
        self.numbers.append(index)
        if self.given == self.last:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated. ")
        inputs, targets = (tensor[index] for tensor in self.tensors)
        return inputs + 0.01 * torch.randn_like(inputs), targets


class Streamed(IterableDataset[Any]):
    """Samples that have no numbers, and no state either."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        order = torch.randperm(len(self.samples)).tolist()  # type: ignore[arg-type]
        return (self.samples[place] for place in order)


class OwnOrder(Sampler[int]):
    """An order drawn from generators of its own, of each kind, each epoch from where they are."""

    def __init__(self, count: int) -> None:
        self.count, self.inner = count, Dice()
        self.g = torch.Generator().manual_seed(2)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        order = torch.randperm(self.count, generator=self.g).tolist()
        self.inner.dice.shuffle(order)
        yield from self.inner.old.permutation(self.inner.new.permutation(order)).tolist()


class Dice(Sampler[int]):
    """Generators in an object of another one."""

    def __init__(self) -> None:
        self.dice, self.new, self.old = random.Random(3), np.random.default_rng(4), np.random.RandomState(5)


class Jittered(Dataset[Any]):
    """Samples with noise of the data's own generator."""

    def __init__(self, data: Any) -> None:
        self.data, self.noise = data, np.random.Generator(np.random.Philox(6))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.data[index]
        return inputs + self.noise.normal(0, 0.1), targets


def make_loader(kind: str, data: Dataset[Any], workers: int, batch: int = 8) -> Any:
    common: dict[str, Any] = {"batch_size": batch, "num_workers": workers}
    if kind == "own":
        return DataLoader(Jittered(data), sampler=OwnOrder(len(data)), **common)  # type: ignore[arg-type]
    if kind == "generator":
        return DataLoader(data, shuffle=True, generator=torch.Generator().manual_seed(5), **common)
    if kind == "stateful":
        return import_module("torchdata.stateful_dataloader").StatefulDataLoader(data, shuffle=True, **common)
    if kind == "ours":
        sampler = aiockpt.ShardedSampler(len(data), 8, seed=3)  # type: ignore[arg-type]
        return aiockpt.Loader(DataLoader(data, batch_sampler=sampler, num_workers=workers))
    if kind == "unwrapped":
        return DataLoader(data, batch_sampler=aiockpt.ShardedSampler(len(data), 8))  # type: ignore[arg-type]
    if kind == "unsized":
        return import_module("torchdata.stateful_dataloader").StatefulDataLoader(Streamed(data), **common)
    if kind == "mixed":
        return [make_loader("stateful", data, workers), make_loader("streamed", data, workers)]
    if kind == "in-order":
        return DataLoader(data, **common)
    if kind == "streamed":
        return DataLoader(Streamed(data), **common)
    if kind == "two":
        other = DataLoader(Noisy(torch.randn(24, 12), torch.randn(24, 1)), shuffle=True, **common)
        return {"one": DataLoader(data, shuffle=True, **common), "other": other}
    return DataLoader(data, shuffle=True, **common)


def join(batch: dict[str, Any]) -> list[torch.Tensor]:
    """Return one batch of those of two loaders."""
    return [torch.cat([one, more]) for one, more in zip(batch["one"], batch["other"], strict=True)]


def meet_fate(trainer: Any, arguments: Any) -> None:
    """Be told to end, or fail, where the options say so."""
    if (
        trainer.global_step == arguments.sigterm_at
        and trainer.fit_loop._should_accumulate() == arguments.sigterm_within
    ):
        if arguments.sigterm_to == "workers":
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            for pid in map(int, children):
                os.kill(pid, signal.SIGTERM)
        os.kill(0 if arguments.sigterm_to == "group" else os.getpid(), signal.SIGTERM)
    if trainer.global_step == 10 and arguments.error:
        raise getattr(builtins, arguments.error)


class Metric(Enum):
    MEAN = 1


def make_optimizers(module: Any, arguments: Any) -> Any:
    trained = module.net[-1].parameters() if arguments.changes == "finetuning" else module.parameters()
    optimizer = torch.optim.AdamW(trained, lr=0.01 if arguments.finds is None else module.rate)
    if arguments.changes is not None:
        return optimizer
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    if arguments.one_cycle:
        steps = module.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_stander(module: type[Any], kind: str) -> type[Any]:
    class Stander(module):  # type: ignore[misc]
        """Trains by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.own = torch.optim.SGD(self.net.parameters(), 0.01)

        def step(self) -> None:
            self.own.step()
            self.own.zero_grad()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.backward()
            own = self.trainer.current_epoch == 0 if kind.startswith("moves") else kind == "raw optimizer"
            if kind.startswith("unseen"):
                self.net[0].weight.data.add_(self.net[0].weight.grad, alpha=-0.01)
                self.own.zero_grad()
            elif own:
                self.step()
            elif kind.startswith("moves") or (kind.startswith("accumulates") and batch_idx % 4 == 3):
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss.detach()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if kind == "hook of a batch":
                self.step()

        def configure_optimizers(self) -> Any:
            moves = kind.startswith(("moves", "accumulates", "unseen"))
            return torch.optim.SGD(self.net.parameters(), 0.01) if moves else None

    return Stander


def make_module(package: Any, arguments: Any) -> Any:  # noqa: C901  its methods are many, and short
    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            plain: dict[str, Any] = {"width": 32, "layers": [12, {"out": 1}]}
            more = {
                "scale": np.float32(0.5),
                "activation": nn.ReLU,
                "loss": nn.functional.mse_loss,
                "metric": Metric.MEAN,
            }
            unpickles_plain = arguments.plugin == "theirs" or arguments.finds
            self.save_hyperparameters(plain if unpickles_plain else {**plain, **more})
            # What each rank has its own of (statistics of a batch, attributes) is saved as rank 0 has it.
            norm = nn.BatchNorm1d(32) if arguments.ranks == 1 and arguments.norm == "batch" else nn.LayerNorm(32)
            self.net = nn.Sequential(nn.Linear(12, 32), norm, nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
            self.hooks: list[str] = []
            self.logged: dict[int, Any] = {}
            self.seen, self.rate, self.batch_size = 0.0, 0.01, arguments.batch

        def configure_model(self) -> None:
            mesh = getattr(self, "_device_mesh", None)
            if mesh is not None:
                fully_shard = import_module("torch.distributed.fsdp").fully_shard
                fully_shard(self.net[0], mesh=mesh["data_parallel"])
                fully_shard(self.net, mesh=mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets = join(batch) if isinstance(batch, dict) else batch
            found = self.net(inputs)
            loss = nn.functional.mse_loss(found, targets)
            self.log("train_loss", loss, on_step=True, on_epoch=arguments.means, sync_dist=True)
            if arguments.rolling:
                self.log("slot", float(self.trainer.global_step // arguments.every_steps % 2))
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.logged.setdefault(self.trainer.global_step, dict(self.trainer.callback_metrics))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            meet_fate(self.trainer, arguments)
            self.seen += float(outputs["loss"].detach()) + float(torch.rand(())) if arguments.ranks == 1 else 1.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            inputs, targets = batch
            self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets), sync_dist=True)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["seen"] = self.seen

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.hooks.append("on_load_checkpoint")
            self.seen = checkpoint["seen"]
            if arguments.hook_of_load in HOOKS:
                HOOKS[arguments.hook_of_load](checkpoint)
            elif arguments.hook_of_load == "read":
                assert checkpoint["lr_schedulers"]

        def on_train_start(self) -> None:
            self.begun = {name: one.clone() for name, one in self.state_dict().items()}
            stepped = [len(one.state) for one in self.trainer.optimizers]
            passed = [one.scheduler.last_epoch for one in self.trainer.lr_scheduler_configs]
            self.begun["stepped"], self.begun["passed"] = torch.tensor(stepped), torch.tensor(passed)

        def look(self, where: str) -> None:
            if arguments.looks == where:
                assert self.trainer.estimated_stepping_batches != 0

        def setup(self, stage: str) -> None:
            self.look("setup")

        def on_fit_start(self) -> None:
            self.look("on-fit-start")

        def configure_optimizers(self) -> Any:
            self.hooks.append("configure_optimizers")
            self.look("configure")
            return make_optimizers(self, arguments)

    return (make_stander(Module, arguments.stands_still) if arguments.stands_still else Module)()


def make_datamodule(package: Any, loaders: list[Any]) -> Any:
    class Data(package.LightningDataModule):  # type: ignore[misc]
        """Data that knows how often it was saved."""

        saves = 0

        batch_size = 8

        def train_dataloader(self) -> Any:
            return loaders[0]

        def val_dataloader(self) -> Any:
            return loaders[1]

        def state_dict(self) -> dict[str, int]:
            self.saves += 1
            return {"saves": self.saves}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.saves = state["saves"]

    return Data()


def make_precision(arguments: Any) -> Any:
    class Counting(import_module(f"{arguments.package}.plugins").Precision):  # type: ignore[misc]
        """A precision that has a state, as the one that scales gradients has on a GPU."""

        scale, note = 1, 0

        def state_dict(self) -> dict[str, int]:
            self.scale *= 2
            return {"scale": self.scale}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.scale = state["scale"]

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            checkpoint["note"] = self.note = self.note + 1

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.note = checkpoint["note"]

    return Counting()


def make_finetuning(callbacks: Any) -> Any:
    class Finetuning(callbacks.BaseFinetuning):  # type: ignore[misc]
        """Trains the first layer from the second epoch on."""

        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.003)

    return Finetuning()


def make_loader_of_halves(callbacks: Any) -> Any:
    class Halves(callbacks.Callback):  # type: ignore[misc]
        """Begins with the half of each weight that is loaded."""

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            with torch.no_grad():
                pl_module.net[0].weight /= 2

    return Halves()


def make_pruning(callbacks: Any, permanent: bool) -> Any:
    return callbacks.ModelPruning(
        "l1_unstructured",
        amount=0.3,
        parameter_names=["weight"],
        make_pruning_permanent=permanent,
        # Its first reset lends the weights the memory of their beginning: a resume is another run, with Lightning alone too.
        use_lottery_ticket_hypothesis=False,
    )


def make_looker(callbacks: Any) -> Any:
    class Looker(callbacks.Callback):  # type: ignore[misc]
        """Has the loaders set up before any other callback is."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            assert trainer.estimated_stepping_batches != 0

    return Looker()


def make_trainer(arguments: Any, package: Any, callback: Any) -> Any:
    callbacks = import_module(f"{arguments.package}.callbacks")
    stop = callbacks.EarlyStopping("train_loss", patience=50, check_on_train_epoch_end=True)
    strategy = arguments.strategy
    if strategy == "fsdp2":
        strategy = import_module(f"{arguments.package}.strategies").ModelParallelStrategy(
            data_parallel_size=arguments.ranks, tensor_parallel_size=1, process_group_backend="gloo"
        )
    elif strategy == "ddp":
        strategy = import_module(f"{arguments.package}.strategies").DDPStrategy(process_group_backend="gloo")
    plugins: list[Any] = [make_precision(arguments)] if arguments.counting_precision else []
    if arguments.plugin is not None:
        kept: dict[str, Any] = {"save_top_k": 2, "monitor": "step", "mode": "max", "save_last": True}
        if arguments.rolling:
            kept = {"filename": "{slot}", "enable_version_counter": False}
        callback = callbacks.ModelCheckpoint(arguments.dir, every_n_train_steps=arguments.every_steps, **kept)
        if arguments.plugin == "ours":
            slow: Any = {"limits": aiockpt.Limits(io=aiockpt.IO(bandwidth=5e4))} if arguments.rolling else {}
            plugins.append(import_module("aiockpt.integrations.lightning").AiockptCheckpointIO(**slow))
    changing = {
        "averaging": lambda: callbacks.StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
        "accumulation": lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
        "finetuning": lambda: make_finetuning(callbacks),
        "pruning": lambda: make_pruning(callbacks, False),
        "pruning for good": lambda: make_pruning(callbacks, True),
        "rate": lambda: callbacks.LearningRateFinder(num_training_steps=5, attr_name="rate"),
        "batch": lambda: callbacks.BatchSizeFinder(max_trials=1, init_val=arguments.batch, steps_per_trial=1),
    }
    more = [changing[one]() for one in (arguments.changes, arguments.finds) if one is not None]
    if arguments.looks == "setup-of-callback":
        more.append(make_looker(callbacks))
    if arguments.hook_of_load == "callback":
        more.append(make_loader_of_halves(callbacks))
    average = [callbacks.EMAWeightAveraging(decay=0.9)] if arguments.average else []
    return package.Trainer(
        fast_dev_run=arguments.fast,
        accelerator="cpu",
        devices=arguments.ranks,
        strategy=strategy,
        max_epochs=arguments.epochs,
        max_steps=arguments.max_steps,
        accumulate_grad_batches=1 if arguments.changes == "accumulation" else arguments.accumulate,
        val_check_interval=arguments.val_every,
        limit_val_batches=0 if arguments.no_validation else None,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[stop, callback, *average, *more],
        plugins=plugins,
    )


def samples_of(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets; more of them begin with the same ones."""
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(count, 13, generator=generator)
    return samples[:, :12], samples[:, 12:]


def main(arguments: Any, **of_fit: Any) -> Any:
    """Train; return the trainer."""
    if arguments.imported_first:
        import_module(arguments.imported_first)
    package = import_module(arguments.package)
    callback_of = import_module("aiockpt.integrations.lightning").AsyncCheckpoint
    if not arguments.same_process:
        import_module("aiockpt.integrations.lightning.callback")._finished.clear()
    package.seed_everything(7, verbose=False)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(1)
    data = Noisy(*samples_of(arguments.samples))
    data.last = arguments.last_sample
    held_out = TensorDataset(torch.randn(24, 12, generator=generator), torch.randn(24, 1, generator=generator))
    callback = callback_of(
        arguments.dir,
        every_n_train_steps=arguments.every_steps,
        every_n_epochs=arguments.every_epochs,
        keep_last=arguments.keep_last,
        monitor=arguments.monitor,
        snapshot=arguments.snapshot,
        resume=not arguments.anew,
        save_last=not arguments.no_last,
    )
    trainer = make_trainer(arguments, package, callback)
    module = make_module(package, arguments)
    loaders = [
        make_loader(arguments.loader, data, arguments.workers, arguments.batch),
        DataLoader(held_out, batch_size=8),
    ]
    if arguments.datamodule:
        trainer.fit(module, datamodule=make_datamodule(package, loaders), **of_fit)
    else:
        trainer.fit(module, *loaders, **of_fit)
    return trainer


if __name__ == "__main__":
    main(options(*sys.argv[1:]))
