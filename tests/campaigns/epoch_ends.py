"""A training that is killed anywhere and resumes from a save at any line of its loops, against the run never stopped.

A case draws where the save stands, the form of the outer loop, what the script does behind the inner loop, what it reads,
and four runs with up to three kills. A kill is an exception at a line, after which all is made anew and resumes. In the end
weights, optimizer, schedule, random numbers, what evaluations gave and what early stopping counted are those of the run that
was never stopped, or the log of a start has said, once, what is not. A script that saves where the guide says must be equal.

States are saved and loaded in memory, without the engine, so that a case takes some hundredths of a second.
"""

import logging
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

import aiockpt
from aiockpt.session.loop_watch import LoopWatch
from tests.adapters.worlds import World
from tests.campaigns.campaign import Campaign, Outcomes

EPOCHS, SAMPLES, BATCH, BATCHES, MOST_LOOPS = 3, 7, 3, 3, 40
SOURCES = ("sharded", "stream", "stateful", "bare")
WORK = ("scheduler", "evaluation", "patience", "best")
Saves = dict[int, tuple[World, list[Any], int, int]]
"""Of each save its state, what was trained by then, the next step, and how often the script was at that line."""


class Killed(BaseException):
    """The process ends here."""


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), index / SAMPLES)


class Lines:
    """A stream of the same."""

    def whole(self, epoch: int) -> aiockpt.LoaderPart:
        return aiockpt.LoaderPart(epoch, streams=(aiockpt.Stream("lines", 0, SAMPLES),))

    def load_part(self, part: aiockpt.LoaderPart) -> None:
        self.left = part.streams

    def part(self) -> aiockpt.LoaderPart:
        return aiockpt.LoaderPart(None, streams=self.left)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.left:
            at = self.left[0].cursor
            self.left = (aiockpt.Stream("lines", at + 1, SAMPLES - at - 1),) if at + 1 < SAMPLES else ()
            yield torch.full((2,), at / SAMPLES)


class Draw:
    """What a seed says.

    Attributes:
        save_at: the line at which the script saves, each *every*-th time that it is there.
        works: what it does behind the inner loop, in order.
        lives: some runs; after how many lines each of its starts is killed.
    """

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.source = dice.choice(SOURCES)
        self.form = dice.choice([form for form in FORMS if self.source != "bare" or "loader" not in form])
        self.works: list[str] = dice.sample(WORK, dice.randint(0, len(WORK)))
        if self.form == "range of state":
            self.works.insert(dice.randint(0, len(self.works)), "epoch")
        self.checks_first = dice.random() < 0.5
        self.save_at = dice.choice(["top", "body", "trained", "trained", "trained", "behind", *self.works, "end"])
        self.every = dice.choice([1, 1, 2, 3])
        self.lives = [[dice.randint(1, 30) for _ in range(dice.randint(1, 3))] for _ in range(4)]

    def __str__(self) -> str:
        return str(vars(self))

    @property
    def excuses(self) -> str:
        """A pattern of what must be told where this script is not the same run; what never matches where it must be."""
        counts = {"range": "counts anew", "from the step": r"\(epoch_from_step\)"}
        given = [counts.get(self.form, "")]
        if self.source == "bare":
            given.append("counts no epochs|its next loop is empty")
        ends_right = self.save_at == "end" and self.checks_first and self.form != "range of state, set at the top"
        if self.save_at == "body" or (self.save_at not in ("top", "trained") and not ends_right):
            given.append("changed before the next|behind that save")
        return "|".join(filter(None, given)) or "(?!)"


class Start:
    """One process of the script: all is made anew, and resumes from the last of *saves*."""

    def __init__(self, draw: Draw, saves: Saves, kill: int | None) -> None:
        self.draw, self.saves, self.kill = draw, saves, kill
        torch.manual_seed(100 if saves else 1)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.loader = make_loader(draw)
        self.counts: dict[str, Any] = {"best": 99.0, "bad": 0}
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "counts": self.counts,
            "rng": aiockpt.RNG(),
        }
        if draw.form == "range of state":
            self.state["epoch"] = 0
        self.history: list[Any] = []
        self.step = self.lines = self.visits = self.loops = 0
        self.watch = LoopWatch()
        torch.manual_seed(200 if saves else 2)
        if saves:
            world, history, self.step, self.visits = saves[max(saves)]
            self.history = list(history)
            world.load([self.state])
        FORMS[draw.form](self)

    def here(self, line: str) -> None:
        """Save at this line, or be killed."""
        if line == self.draw.save_at:
            self.visits += 1
            if self.visits % self.draw.every == 0:
                number = len(self.saves)
                self.saves[number] = World([self.state]), [*self.history], self.step, self.visits
                self.watch.saved(number, self.state)
        self.lines += 1
        if self.lines == self.kill:
            raise Killed

    @property
    def stops(self) -> bool:
        return bool(self.counts["bad"] >= 2)

    def run_epoch(self) -> bool:
        """Run the body of the outer loop; return whether the training stops early."""
        self.loops += 1
        assert self.loops < MOST_LOOPS
        self.here("top")
        for batch in self.loader:
            self.here("body")
            self.train(batch)
            self.step += 1
            self.here("trained")
        self.here("behind")
        for work in self.draw.works:
            self.work(work)
            self.here(work)
        if self.draw.checks_first and self.stops:
            return True
        self.here("end")
        return self.stops

    def train(self, batch: torch.Tensor) -> None:
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history.append(batch.tolist())

    def work(self, work: str) -> None:
        if work == "scheduler":
            self.scheduler.step()
        elif work == "epoch":
            self.state["epoch"] += 1
        elif work == "evaluation":
            self.history.append(float(self.model(torch.rand(1, 2)).item()))
        else:
            value = float(self.model[0].weight.abs().sum().item())  # type: ignore[operator]
            is_better = value < self.counts["best"] - 0.2
            self.counts["bad"] += work == "patience" and not is_better
            self.counts["best"] = min(value, self.counts["best"]) if work == "best" else self.counts["best"]

    def result(self) -> list[Any]:
        """Return all that the run came to."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        weights = [value.tolist() for value in self.model.state_dict().values()]
        moments = [value["momentum_buffer"].tolist() for value in self.optimizer.state.values()]
        numbers = torch.get_rng_state().tolist()
        return [self.history, self.counts, rates, self.scheduler.last_epoch, weights, moments, numbers]


def make_loader(draw: Draw) -> Any:
    source: Any
    if draw.source == "sharded":
        source = DataLoader(Points(), batch_sampler=aiockpt.ShardedSampler(SAMPLES, BATCH, seed=3))
    elif draw.source == "stream":
        source = aiockpt.StreamLoader(Lines(), batch_size=BATCH)
    else:
        source = StatefulDataLoader(Points(), batch_size=BATCH, shuffle=True)
    return source if draw.source == "bare" else aiockpt.Loader(source, epoch_from_step=draw.form == "from the step")


def by_loader(start: Start) -> None:
    while start.loader.epoch < EPOCHS:
        if start.run_epoch():
            break


def by_state(start: Start) -> None:
    for _epoch in range(start.state["epoch"], EPOCHS):
        if start.run_epoch():
            break


def by_state_at_top(start: Start) -> None:
    for epoch in range(start.counts.get("epoch", 0), EPOCHS):
        start.counts["epoch"] = epoch
        if start.run_epoch():
            break


def by_range(start: Start) -> None:
    for _ in range(EPOCHS):
        if start.run_epoch():
            break


def by_step(start: Start) -> None:
    for _epoch in range(start.step // BATCHES, EPOCHS):
        if start.run_epoch():
            break


FORMS: dict[str, Callable[[Start], None]] = {
    "while loader.epoch": by_loader,
    "range of state": by_state,
    "range of state, set at the top": by_state_at_top,
    "range": by_range,
    "from the step": by_step,
}


@contextmanager
def listening() -> Iterator[list[logging.LogRecord]]:
    """Yield what aiockpt logs in the block."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment,method-assign]
    logger = logging.getLogger("aiockpt")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        logger.setLevel(before[0])


def case(seed: int) -> Outcomes:
    """Run a script without a kill, and some times with kills."""
    draw = Draw(seed)
    with listening() as records, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = Start(draw, {}, None).result()
        outcomes: Outcomes = Counter()
        for kills in draw.lives:
            records.clear()
            is_equal = run(draw, kills, records) == expected
            levels = {record.levelno for record in records if re.search(draw.excuses, record.getMessage())}
            told = "warned" if logging.WARNING in levels else "told at INFO" if levels else "untold"
            assert is_equal or levels, f"unequal and untold, killed at {kills}: {draw}"
            outcomes[f"{draw.form}: {'equal' if is_equal else f'unequal, {told}'}"] += 1
    return outcomes


def run(draw: Draw, kills: list[int], records: list[logging.LogRecord]) -> list[Any]:
    """Run a script to its end, whatever kills it; return its result."""
    saves: Saves = {}
    for kill in [*kills, None]:
        seen = len(records)
        result = None
        with suppress(Killed):
            result = Start(draw, saves, kill).result()
        warned = [record.msg for record in records[seen:] if record.levelno >= logging.WARNING]
        assert len(warned) == len(set(warned)), f"told twice in one start: {warned}; {draw}"
        if result is not None:
            return result
    raise AssertionError("the last start is not killed")


CAMPAIGN = Campaign(name="epoch-ends", counts="runs", prepare=lambda: case, smoke_count=60)
