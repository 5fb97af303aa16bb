"""Jobs whose ranks are threads, and meet bad batches: what each rank has trained in the end, and what it should have.

A job trains all batches of some epochs, in lock step, as gradients that are averaged would have it. Some batches are bad on
some ranks; some of its starts are killed. `Plan.expected` says which batches are trained in the end.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.utils.data import DataLoader

import aiockpt
from aiockpt.events import Rewound
from tests.adapters.loaders import Numbers
from tests.ranks.crew import Crew

Sign = Literal["nan", "spike", "asked", "screen"]
SAMPLES, BATCH, EPOCHS = 36, 2, 2
FILES = 6
WAIT_S = 100.0
StartCrew = Callable[..., Crew]


class Bad(msgspec.Struct, frozen=True):
    """A batch that is bad on some ranks, and how that shows."""

    ranks: tuple[int, ...]
    sign: Sign


class Kill(msgspec.Struct, frozen=True):
    """The end of one start: after so many calls of ``advance``, or in its rewind of that number, on these ranks."""

    calls: int = -1
    rewind: int = -1
    ranks: tuple[int, ...] = ()


class Killed(BaseException):
    """What ends a start."""


class Plan(msgspec.Struct, frozen=True):
    """A job.

    Attributes:
        source: of the batches: "sampler" or "stream"; *workers* read them.
        bad: by the position of the batch.
        kills: one for each start but the last.
    """

    world_size: int
    skip: Literal["bad", "all"] | None
    source: Literal["sampler", "stream"] = "sampler"
    workers: int = 0
    every: int = 1
    epochs: int = EPOCHS
    bad: dict[int, Bad] = {}
    kills: tuple[Kill, ...] = ()

    @classmethod
    def draw(cls, dice: random.Random, world_size: int = 2) -> Plan:
        """Return a random one."""
        every = dice.choice((1, 1, 2, 3))
        signs: tuple[Sign, ...] = ("nan", "spike", "asked", "screen") if every == 1 else ("nan", "spike", "asked")
        total = EPOCHS * SAMPLES // (BATCH * world_size)
        places = dice.sample(range(every + 2, total - 3), dice.randint(1, 3))

        def ranks() -> tuple[int, ...]:
            return tuple(sorted(dice.sample(range(world_size), dice.randint(1, world_size))))

        kills = [
            Kill(calls=dice.randint(1, total - 2)) if dice.random() < 0.5 else Kill(rewind=0, ranks=ranks())
            for _ in range(dice.randint(0, 2))
        ]
        return cls(
            world_size,
            dice.choice(("bad", "all", None)),
            dice.choice(("sampler", "stream")),
            every=every,
            # A loss is a spike among the losses of the same start alone.
            bad={
                place: Bad(ranks(), dice.choice([sign for sign in signs if sign != "spike" or not kills]))
                for place in places
            },
            kills=tuple(kills),
        )

    @property
    def total(self) -> int:
        """Batches of a rank in all epochs."""
        return self.epochs * math.ceil(SAMPLES / (BATCH * self.world_size))

    def loader(self, rank: int) -> aiockpt.Loader[Any]:
        """Return the loader of one rank."""
        source: Any
        if self.source == "stream":
            source = aiockpt.StreamLoader(
                Line(), batch_size=BATCH, rank=rank, size=self.world_size, num_workers=self.workers
            )
        else:
            sampler = aiockpt.ShardedSampler(SAMPLES, BATCH, rank=rank, size=self.world_size, seed=3)
            source = DataLoader(Numbers(SAMPLES), batch_sampler=sampler, num_workers=self.workers)
        return aiockpt.Loader(source, rank=rank, size=self.world_size)

    def batches(self, rank: int) -> list[list[int]]:
        """Return all batches of one rank, in order, as they come without a checkpoint."""
        loader, found = self.loader(rank), []
        while loader.epoch < self.epochs:
            found += [batch.tolist() for batch in loader]
        return found

    def expected(self) -> list[int]:
        """Return the positions of the batches that are trained in the end."""
        skips: set[int] = set()
        met: set[int] = set()
        trained: list[int] = []
        saved: dict[int, tuple[int, int]] = {}
        step = position = 0
        while position < self.total:
            if position in skips:
                position += 1
                continue
            if position in self.bad and (self.skip or position not in met):
                met.add(position)
                good = max(one for one in saved if one < step)
                skips |= set(range(saved[good][0], position + 1)) if self.skip == "all" else set()
                skips |= {position} if self.skip == "bad" else set()
                saved = {one: at for one, at in saved.items() if one <= good}
                position, count = saved[good]
                del trained[count:]
                step = good + 1
                continue
            trained.append(position)
            position += 1
            if step % self.every == 0:
                saved[step] = position, len(trained)
            step += 1
        return trained

    def reference(self, rank: int) -> Trainee:
        """Return what one rank holds that has trained those batches alone."""
        trainee, batches = Trainee(rank), self.batches(rank)
        for position in self.expected():
            trainee.train(torch.tensor(batches[position]))
        return trainee


class Line:
    """A stream of `SAMPLES` numbers, in as many parts as there are readers."""

    def __init__(self) -> None:
        self._part = aiockpt.LoaderPart()

    def whole(self, epoch: int) -> aiockpt.LoaderPart:
        streams = tuple(aiockpt.Stream(f"file-{number}", 0, SAMPLES // FILES) for number in range(FILES))
        return aiockpt.LoaderPart({"order": epoch}, streams=streams)

    def load_part(self, part: aiockpt.LoaderPart) -> None:
        self._part = part

    def part(self) -> aiockpt.LoaderPart:
        return self._part

    def __iter__(self) -> Iterator[int]:
        while self._part.streams:
            first, *others = self._part.streams
            if not first.remaining_count:
                self._part = aiockpt.LoaderPart(self._part.shared, streams=tuple(others))
                continue
            after = aiockpt.Stream(first.source, first.cursor + 1, first.remaining_count - 1)
            self._part = aiockpt.LoaderPart(self._part.shared, streams=(after, *others))
            yield int(first.source[5:]) * (SAMPLES // FILES) + first.cursor


class Trainee:
    """The state of one rank, without its loader."""

    def __init__(self, rank: int) -> None:
        torch_state = torch.Generator().manual_seed(rank)
        self.model = torch.nn.Linear(1, 3)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch_state))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        self.trained = torch.full((4 * SAMPLES,), -1)
        self.count = torch.zeros((), dtype=torch.int64)
        self.state: dict[str, Any] = {
            f"model{rank}": self.model,
            f"optimizer{rank}": self.optimizer,
            f"scheduler{rank}": self.scheduler,
            f"trained{rank}": self.trained,
            f"count{rank}": self.count,
        }

    def train(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        (self.model(batch.float().unsqueeze(1) / SAMPLES) - 1).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.trained[self.count] = int(batch.flatten()[0])
        self.count += 1

    def held(self) -> list[Any]:
        """Return all of it, to compare."""
        moments = [state[key] for state in self.optimizer.state.values() for key in ("step", "exp_avg", "exp_avg_sq")]
        tensors = [*self.model.parameters(), *moments, self.trained, self.count]
        return [*(tensor.detach().tolist() for tensor in tensors), self.scheduler.state_dict()["last_epoch"]]


class Job:
    """All starts of one plan.

    Args:
        start: makes the crew of one start, with the options that it is given.
        notes: a folder for what must outlive a process that is killed: which bad batches were met, and each rewind.
    """

    def __init__(self, plan: Plan, start: StartCrew, notes: Path | None = None) -> None:
        self.plan, self._start, self._notes = plan, start, notes
        self._batches = [plan.batches(rank) for rank in range(plan.world_size)]
        self._met: set[tuple[int, int]] = set()
        self.trainees: list[Trainee] = []
        self.rewinds: list[Rewound] = []
        self.killed = 0

    def run(self) -> None:
        """Start it until it is done."""
        for kill in self.plan.kills:
            self._run_once(kill)
        errors = self._run_once(None)
        for error in errors:
            if error is not None:
                raise error

    def check(self) -> None:
        """Compare what each rank holds with the reference."""
        for rank, trainee in enumerate(self.trainees):
            first = [batch[0] for batch in self._batches[rank]]
            trained = trainee.trained[: int(trainee.count)].tolist()
            assert trained == [first[position] for position in self.plan.expected()], (rank, self.plan)
            assert trainee.held() == self.plan.reference(rank).held(), (rank, self.plan)

    def _run_once(self, kill: Kill | None) -> list[BaseException | None]:
        world_size = self.plan.world_size
        barrier = threading.Barrier(world_size)
        self.trainees = [Trainee(rank) for rank in range(world_size)]
        counts, seen = [0] * world_size, [0] * world_size

        def went_back(rank: int, one: Rewound) -> None:
            if rank == 0:
                self.rewinds.append(one)
                if self._notes is not None:
                    (self._notes / f"rewind-{time.monotonic_ns()}").touch()
            if kill is not None and kill.rewind == seen[rank] and rank in kill.ranks:
                raise Killed
            seen[rank] += 1

        def work(rank: int, ckpt: aiockpt.Checkpointer) -> None:
            trainee, loader = self.trainees[rank], self.plan.loader(rank)
            state = {**trainee.state, "loader": loader}
            ckpt._rewinder.policy = msgspec.structs.replace(  # type: ignore[union-attr]
                ckpt._rewinder.policy,  # type: ignore[union-attr]
                on_rewind=lambda one: went_back(rank, one),
            )
            try:
                with ckpt:
                    self._train(rank, ckpt, state, trainee, loader, barrier, counts, kill)
            except BaseException:
                barrier.abort()
                raise

        rewind = aiockpt.Rewind(skip=self.plan.skip, window=8, most=100)
        with self._start(every=self.plan.every, rewind=rewind, screen="finite") as crew:
            errors = crew.errors(work)
        self.killed += any(isinstance(error, Killed) for error in errors)
        return errors

    def _train(
        self,
        rank: int,
        ckpt: aiockpt.Checkpointer,
        state: dict[str, Any],
        trainee: Trainee,
        loader: aiockpt.Loader[Any],
        barrier: threading.Barrier,
        counts: list[int],
        kill: Kill | None,
    ) -> None:
        step = ckpt.resume(state)
        while loader.epoch < self.plan.epochs:
            for batch in loader:
                barrier.wait(WAIT_S)
                trainee.train(batch)
                metrics = self._metrics(rank, loader.position - 1, trainee, ckpt)
                step = ckpt.advance(step, state, metrics=metrics)
                counts[rank] += 1
                if kill is not None and counts[rank] == kill.calls:
                    raise Killed

    def _metrics(
        self, rank: int, position: int, trainee: Trainee, ckpt: aiockpt.Checkpointer
    ) -> dict[str, float | torch.Tensor]:
        bad = self.plan.bad.get(position)
        is_bad = bad is not None and rank in bad.ranks and (self.plan.skip or not self._has_met(rank, position))
        loss: float | torch.Tensor = 1.0 + 0.001 * (position % 3)
        if bad is not None and is_bad:
            if bad.sign == "asked":
                ckpt.rewind("a test asks")
            elif bad.sign == "screen":
                with torch.no_grad():
                    trainee.model.weight.fill_(float("nan"))
            else:
                loss = torch.tensor(float("nan" if bad.sign == "nan" else 1e6))
        return {"loss": loss}

    def _has_met(self, rank: int, position: int) -> bool:
        """Return whether a rank has met its bad batch before; note that it has."""
        if self._notes is None:
            has_met = (rank, position) in self._met
            self._met.add((rank, position))
            return has_met
        note = self._notes / f"met-{rank}-{position}"
        has_met = note.exists()
        note.touch()
        return has_met
