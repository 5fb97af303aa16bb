"""A plain fit of Lightning, killed and resumed: never worse than by Lightning's own checkpoints."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.real import small

lightning: Any = pytest.importorskip("lightning.pytorch")

from aiockpt.integrations.lightning import AsyncCheckpoint  # noqa: E402  needs what was looked for

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SAMPLES, BATCH, OTHER_BATCH, EPOCHS = 24, 4, 6, 3
KILLS = {"first": 7, "middle": 10, "last": 12}
"""Batches of four that were trained before the kill: in the second epoch."""


class Variant(NamedTuple):
    """What a fit is given."""

    sampler: str = "generator"
    workers: int = 0
    accumulate: int = 1


class Fit(NamedTuple):
    """What a fit has trained, and its weights at the end."""

    trained: list[list[int]]
    weights: list[torch.Tensor]


class Killed(BaseException):
    """The process ends here."""


class Rows(Dataset[Any]):
    """Rows that know their number."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.rows[index]


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A model with dropout, which ends before a batch when *kill* were trained."""

    def __init__(self, kill: int, by_signal: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.trained: list[list[int]] = []
        self.kill, self.by_signal = kill, by_signal

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if len(self.trained) == self.kill:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.append(batch[0].tolist())
        loss: torch.Tensor = self.net(batch[1]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(
    folder: Path,
    variant: Variant,
    *,
    ours: bool = False,
    kill: int = -1,
    by_signal: bool = False,
    resume: bool = False,
    size: int = BATCH,
) -> Fit:
    """Train to the kill or to the end, as a process of its own would."""
    lightning.seed_everything(3, verbose=False)
    data = Rows()
    shuffled: dict[str, dict[str, Any]] = {
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
        "distributed": {"sampler": DistributedSampler(data, 1, 0, seed=5)},
        "global": {"shuffle": True},
    }
    loader = DataLoader(data, size, num_workers=variant.workers, **shuffled[variant.sampler])
    theirs = lightning.callbacks.ModelCheckpoint
    saving: Any = AsyncCheckpoint if ours else theirs
    more: Any = {} if ours else {"save_last": True}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        accumulate_grad_batches=variant.accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving(folder, every_n_train_steps=1, **more)],
    )
    module = Module(kill, by_signal)
    alone = {"ckpt_path": "last", "weights_only": False} if resume and not ours else {}
    with suppress(Killed):
        trainer.fit(module, loader, **alone)
    return Fit(module.trained, [one.detach().clone() for one in module.state_dict().values()])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fits")


@cache
def straight(root: Path, variant: Variant) -> Fit:
    return fit(root / "-".join(map(str, variant)), variant)


def is_same(one: Fit, other: Fit) -> bool:
    same = zip(one.weights, other.weights, strict=True)
    return one.trained == other.trained and all(torch.equal(*pair) for pair in same)


def resumed(
    folder: Path, variant: Variant, kill: int, size: int, expected: Fit, *, ours: bool
) -> tuple[bool, int, int]:
    """Return whether it is the run that was never stopped, the samples that were lost, and those that came too often."""
    first = fit(folder, variant, ours=ours, kill=kill)
    again = fit(folder, variant, ours=ours, resume=True, size=size)
    trained = [*first.trained[: kill // variant.accumulate * variant.accumulate], *again.trained]
    wanted, got = Counter(dict.fromkeys(range(SAMPLES), EPOCHS)), Counter(chain.from_iterable(trained))
    return is_same(Fit(trained, again.weights), expected), (wanted - got).total(), (got - wanted).total()


@pytest.mark.parametrize("size", [BATCH, OTHER_BATCH], ids=["the same size", "another size"])
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sampler", ["generator", "distributed", "global"])
def test_a_killed_fit_is_never_worse_than_by_lightning_alone(
    sampler: str, workers: int, accumulate: int, kill: str, size: int, root: Path, tmp_path: Path
) -> None:
    variant = Variant(sampler, workers, accumulate)
    expected = straight(root, variant)
    ours, alone = (resumed(tmp_path / str(by), variant, KILLS[kill], size, expected, ours=by) for by in (True, False))
    name = f"{sampler}, workers {workers}, accumulation {accumulate}, {kill} of an epoch, batches of {size}"
    figures = ("equal", "lost", "twice")
    small.compared[name] = {
        "ours": dict(zip(figures, ours, strict=True)),
        "alone": dict(zip(figures, alone, strict=True)),
    }
    assert ours >= (alone[0], 0, 0), "worse than Lightning alone"
    assert ours[1:] == (0, 0)
    assert ours[0] or size != BATCH
    small.certified += 1


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "alone"])
def test_a_fit_killed_by_a_signal_goes_on(ours: bool, root: Path, tmp_path: Path) -> None:
    expected = straight(root, Variant())
    call = f"fit(Path({str(tmp_path)!r}), Variant(), ours={ours}, kill={KILLS['middle']}, by_signal=True)"
    assert small.status_of("tests.real.test_lightning_fit", call) == -signal.SIGKILL
    again = fit(tmp_path, Variant(), ours=ours, resume=True)
    trained = [*expected.trained[: -len(again.trained)], *again.trained]
    same = is_same(Fit(trained, again.weights), expected)
    small.compared.setdefault("killed by SIGKILL, middle of an epoch", {})["ours" if ours else "alone"] = same
    if ours:
        assert same
        small.certified += 1
