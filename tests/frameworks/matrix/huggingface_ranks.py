"""The Trainer of Hugging Face, over a model of its own kind."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import (  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from aiockpt.integrations.huggingface import attach
from tests.frameworks.matrix.net import BATCH, STEPS, Known, add_layers, batch, loss_of, run_layers, settings_of
from tests.frameworks.matrix.rank import Ways, run, start


class NetConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "matrix"


class NetModel(PreTrainedModel):  # type: ignore[misc]
    """The model of the matrix as one of transformers."""

    config_class = NetConfig

    def __init__(self, config: NetConfig) -> None:
        super().__init__(config)
        add_layers(self)
        self.post_init()

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = run_layers(self, words)
        return {"loss": loss_of(logits, words), "logits": logits}


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """What all ranks train, sample by sample."""

    def __len__(self) -> int:
        return 64 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"words": batch(index // BATCH, 0)[index % BATCH]}


class AtTheBeginning(TrainerCallback):  # type: ignore[misc]
    """Notes what there is when training begins or goes on."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._program.note(state.global_step)


class Program:
    """A Trainer: it saves what its run has come to, and loads when a run begins."""

    def __init__(self, folder: Path, seed: int, rate: float) -> None:
        torch.manual_seed(seed)
        self._folder = folder / "out"
        self._rate, self._known, self._first = rate, Known(), -1
        self.model = NetModel(NetConfig())

    def _trainer(self, steps: int) -> Any:
        arguments = TrainingArguments(
            str(self._folder),
            per_device_train_batch_size=BATCH,
            max_steps=steps,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=self._rate,
            weight_decay=0.1,
            lr_scheduler_type="constant",
        )
        return Trainer(self.model, arguments, train_dataset=Words())

    def note(self, step: int) -> None:
        """Note all that the Trainer has, and the step at which it begins."""
        optimizer = self.trainer.optimizer
        names = {id(one): name for name, one in self.trainer.accelerator.unwrap_model(self.model).named_parameters()}
        self._first = step
        self._known = {
            names[id(one)]: {
                "weight": one.detach().clone(),
                **{key: value.clone() for key, value in optimizer.state[one].items()},
                **settings_of(group),
            }
            for group in optimizer.param_groups
            for one in group["params"]
        }

    def train(self, step: int) -> None:
        """Train all steps at the first call; after a load that is done already."""
        if step == 0:
            self.trainer = self._trainer(STEPS)
            self.trainer.train()
            self.note(STEPS)

    def save(self, place: Path) -> None:
        with attach(self.trainer, place):
            self.trainer._save_checkpoint(self.model, None)

    def load(self, place: Path) -> None:
        self._folder = self._folder.with_name(f"into-{place.name}")
        self.trainer = self._trainer(STEPS + 1)
        self.trainer.add_callback(AtTheBeginning(self))
        with attach(self.trainer, place, resume=True):
            self.trainer.train()
        assert self._first == STEPS, f"the Trainer began at step {self._first}"

    def known(self) -> Known:
        return self._known


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    """Run one rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    start(rank, world_size, folder)
    ways: Ways = {"HF Trainer": partial(Program, folder)}
    run(ways, folder)
