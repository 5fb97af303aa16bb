"""What is told of loops over a loader: work behind a save, a range that counts anew, a loader that never moves."""

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import aiockpt

BATCHES = 3


class Script:
    """A training of two epochs, in pieces."""

    def __init__(self, place: Path, **how: Any) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        data: Any = torch.ones(6, 1)
        self.source: Any = DataLoader(data, batch_sampler=aiockpt.ShardedSampler(6, 2))
        self.loader = aiockpt.Loader(self.source, **how)
        self.state: dict[str, Any] = {"model": self.model, "loader": self.loader, "rng": aiockpt.RNG(), "best": 0}
        self.ckpt = aiockpt.Checkpointer(place)
        self.step = self.ckpt.resume(self.state)

    def train(self, batch: torch.Tensor) -> None:
        self.model(batch).sum().backward()
        self.optimizer.step()

    def save(self) -> None:
        self.ckpt.save(self.step, self.state).result()
        self.step += 1


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(**how: Any) -> Script:
        made.append(Script(tmp_path, **how))
        return made[-1]

    yield make
    for one in made:
        one.ckpt.close()


Work = Callable[[Script], object]


def change_best(script: Script) -> None:
    script.state["best"] += 1


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda script: None, ""),
        (lambda script: script.optimizer.zero_grad(), ""),
        (change_best, "'best'"),
        (lambda script: random.random(), "'rng'"),
        (lambda script: script.train(torch.ones(1, 1)), "'model'"),
    ],
)
@pytest.mark.parametrize("within", [True, False])
def test_work_behind_a_save_is_named_once(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture, work: Work, told: str, within: bool
) -> None:
    one = script()
    while one.loader.epoch < 2:
        for batch in one.loader:
            one.train(batch)
            if within:
                one.save()
                work(one)
        if not within:
            one.save()
            work(one)
    what = f"saved {'within' if within else 'behind'} a loop over its loader, and {told} changed before the next"
    assert caplog.text.count(what) == len(caplog.messages) == bool(told)


def test_what_stands_at_the_beginning_of_an_epoch_is_not_told(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one = script()
    while one.loader.epoch < 2:
        one.state["best"] = one.loader.epoch
        torch.manual_seed(one.loader.epoch)
        for batch in one.loader:
            one.train(batch)
        one.save()
    assert not caplog.messages


def test_batches_that_are_read_past_the_loader_are_told_once(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one = script()
    for batch in one.source:
        one.train(batch)
        one.save()
    assert caplog.messages == [
        "steps 0 and 1 were saved, and no batch came from the Loader in the state: its position does not move. Write "
        "`for batch in loader` with the aiockpt.Loader, not with the DataLoader that it wraps"
    ]


def test_a_second_loader_that_waits_is_not_told(
    script: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    one = script()
    one.state["held_out"] = script().loader
    for batch in one.loader:
        one.train(batch)
        one.save()
    assert not caplog.messages


def loop_by_range(script: Script) -> None:
    for _epoch in range(2):
        train_epoch(script)


def loop_by_fixed_range(script: Script) -> None:
    for _epoch in range(1, 3):
        for batch in script.loader:
            script.train(batch)


def loop_from_the_state(script: Script) -> None:
    for _epoch in range(script.state["best"], 2):
        train_epoch(script)


def loop_by_the_loader(script: Script) -> None:
    for _fold in range(1):
        while script.loader.epoch < 2:
            train_epoch(script)


def train_epoch(script: Script) -> None:
    for _number, batch in enumerate(script.loader):
        script.train(batch)


LOOPS = [(loop_by_range, True), (loop_by_fixed_range, True), (loop_from_the_state, False), (loop_by_the_loader, False)]


@pytest.mark.parametrize(("loop", "counts_anew"), LOOPS)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("from_step", [False, True])
def test_a_loop_that_counts_anew_is_told(
    script: Callable[..., Script],
    caplog: pytest.LogCaptureFixture,
    loop: Work,
    counts_anew: bool,
    epoch: int,
    from_step: bool,
) -> None:
    one = script()
    while one.loader.epoch < epoch:
        train_epoch(one)
    one.save()
    again = script(epoch_from_step=from_step)
    loop(again)
    told = [text for text in caplog.messages if "counts anew" in text]
    assert len(told) == (counts_anew and epoch > 0 and not from_step)
    assert all("trains as many epochs again. Write `while loader.epoch < n`" in text for text in told)
    assert again.loader.epoch == (2 + epoch if counts_anew else 2 + epoch * (loop is loop_from_the_state))


def test_the_log_says_what_a_resume_leaves_out(script: Callable[..., Script], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiockpt")
    one = script()
    for batch in one.loader:
        one.train(batch)
        one.save()
        script()
    train_epoch(one)
    one.save()
    script()
    told = [text.partition("Loader: ")[2][:34] for text in caplog.messages if text.startswith("Loader: ")]
    assert told == [
        "goes on with the next batch of epo",
        "goes on with the next batch of epo",
        "saved in the last batch of epoch 0",
        "goes on with epoch 2, and what the",
    ]
