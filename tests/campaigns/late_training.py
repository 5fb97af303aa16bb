"""Batches are trained late and out of order, and the job is killed at random: no sample is lost, or trained twice.

A case is a training of a few epochs. A life of it takes batches, trains them in threads or tasks in an order of their own,
and saves; at a random moment all its ranks are killed with SIGKILL. What is trained is counted in the state itself, a number
for each sample, as training would be in the weights. After each kill a fresh process loads the newest step and trains what
the loader still gives: then each sample was trained once in each epoch. The next life goes on from the same step, with
another number of ranks and of workers. Each kill counts.
"""

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch.utils.data import DataLoader

import aiockpt
from tests.campaigns.campaign import Campaign, Case, Outcomes, in_folders, noted
from tests.campaigns.sigkill import RAISED, in_child
from tests.inline_process import TINY

EPOCHS = 8
FILES = {"a": 13, "b": 5, "c": 1, "d": 21, "e": 8}
FIRST_OF = {name: sum(list(FILES.values())[:place]) for place, name in enumerate(FILES)}
LENGTH = sum(FILES.values())
MOST_LIVES = 10
MOST_LIFE_S = 0.4
"""A life is killed less than that after all its ranks began to train, now and then before; one that is done is no kill."""
COUNT: Any = "trained"
"""How the loaders count; the tests see that another way is found."""
RIGHT, LOST, TWICE, NOTHING_SAVED, ALL_TRAINED = range(5)
DEADLINE_S = 250
NEEDED = (
    "aiockpt.session.checkpointer",
    "aiockpt.data.loader",
    "aiockpt.data.stream",
    "aiockpt.engine.load",
    "aiockpt.ranks.load",
)


class Pairs:
    """A stream of files whose numbers are packed in twos; one that waits for its neighbour is in the buffer."""

    def whole(self, epoch: int) -> aiockpt.LoaderPart:
        streams = tuple(aiockpt.Stream(name, 0, count) for name, count in FILES.items())
        return aiockpt.LoaderPart({"files": len(FILES)}, streams=streams)

    def part(self) -> aiockpt.LoaderPart:
        return aiockpt.LoaderPart(None, tuple(self.waiting), streams=tuple(self.files))

    def load_part(self, part: aiockpt.LoaderPart) -> None:
        self.waiting, self.files = list(part.buffer), list(part.streams)

    def __iter__(self) -> Iterator[list[int]]:
        while self.files:
            name, cursor = self.files[0].source, self.files[0].cursor
            left = FILES[name] - cursor - 1
            self.files[:1] = [aiockpt.Stream(name, cursor + 1, left)] if left else []
            self.waiting.append(FIRST_OF[name] + cursor)
            if len(self.waiting) > 1:
                pair, self.waiting = self.waiting[:2], self.waiting[2:]
                yield pair
        while self.waiting:
            yield [self.waiting.pop()]


def make_loader(streamed: bool, rank: int, size: int, workers: int, ahead_count: int) -> aiockpt.Loader[Any]:
    here: dict[str, Any] = {"rank": rank, "size": size}
    how: dict[str, Any] = {"num_workers": workers, "collate_fn": _flat}
    data: Any
    if streamed:
        data = aiockpt.StreamLoader(Pairs(), batch_size=1, **how, **here)
    else:
        sampler = aiockpt.ShardedSampler(LENGTH, 2, seed=3, **here)
        data = DataLoader([[number] for number in range(LENGTH)], batch_sampler=sampler, **how)  # type: ignore[arg-type]
    return aiockpt.Loader(data, count=COUNT, ahead_count=ahead_count, **here)


def _flat(samples: list[list[int]]) -> list[int]:
    return [number for sample in samples for number in sample]


class Job:
    """One rank of a life.

    Attributes:
        counts: how often this rank trained each sample since the run began, (LENGTH,) int64; of what ranks of earlier
            lives trained, rank 0 has the sum.
    """

    def __init__(self, ckpt: aiockpt.Checkpointer, loader: aiockpt.Loader[Any]) -> None:
        self.loader = loader
        self.counts = torch.zeros(LENGTH, dtype=torch.int64)
        self.first_step = 0
        self._ckpt = ckpt
        head = {"size": None}
        found = ckpt.load(head, strict=False).result(DEADLINE_S)
        if found is not None:
            counts = {str(rank): torch.zeros_like(self.counts) for rank in range(head["size"] or 0)}
            ckpt.load({"counts": counts, "size": 0, "loader": loader}, found.step).result(DEADLINE_S)
            self.first_step = found.step + 1
            if loader.rank == 0:
                self.counts += torch.stack(list(counts.values())).sum(0)

    def batches(self) -> Iterator[list[int]]:
        while (self.loader.epoch or 0) < EPOCHS:
            yield from self.loader

    def train(self, batch: list[int]) -> None:
        for number in batch:
            self.counts[number] += 1
        if COUNT == "trained":
            self.loader.trained(batch)

    def save(self, number: int) -> aiockpt.SaveFuture:
        state = {"counts": {str(self.loader.rank): self.counts}, "size": self.loader.size, "loader": self.loader}
        return self._ckpt.save(self.first_step + number, state)


SAVES = 40
PAUSE_S = 0.004


def live_in_threads(job: Job, dice: random.Random) -> None:
    """Take batches in one thread, train them in two, and save in this one."""
    waiting: Queue[list[int] | None] = Queue(maxsize=5)
    step = threading.Lock()

    def take() -> None:
        for batch in job.batches():
            waiting.put(batch)
        waiting.put(None)

    def train(pace: random.Random) -> None:
        while (batch := waiting.get()) is not None:
            time.sleep(pace.random() * PAUSE_S)
            with step:
                job.train(batch)
        waiting.put(None)

    for work in (take, lambda: train(random.Random(dice.random())), lambda: train(random.Random(dice.random()))):
        threading.Thread(target=work, daemon=True).start()
    for number in range(SAVES):
        time.sleep(dice.random() * PAUSE_S * 4)
        with step:
            job.save(number)


def live_in_tasks(job: Job, dice: random.Random) -> None:
    """Take, train and save in tasks of one event loop."""

    async def train(batch: list[int], space: asyncio.Semaphore) -> None:
        await asyncio.sleep(dice.random() * PAUSE_S * 2)
        job.train(batch)
        space.release()

    async def take() -> None:
        space = asyncio.Semaphore(5)
        async with asyncio.TaskGroup() as tasks:
            for batch in job.batches():
                await space.acquire()
                tasks.create_task(train(batch, space))

    async def live() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take())
            for number in range(SAVES):
                await asyncio.sleep(dice.random() * PAUSE_S * 4)
                job.save(number)

    asyncio.run(live())


def live(root: Path, store: Path, size: int, streamed: bool, seed: int, rank: int, began: Callable[[], object]) -> int:
    """Be one rank of a life, until it is killed or has saved as often as it does; return 0."""
    dice = random.Random(seed)
    workers, ahead_count, in_threads = dice.choice((0, 0, 2)), dice.choice((0, 2)), dice.random() < 0.5
    meeting = torch.distributed.FileStore(str(store), size)  # type: ignore[attr-defined]
    ranks = aiockpt.Ranks(rank, size, meeting) if size > 1 else None
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=TINY), ranks=ranks, on_error=lambda _: None) as ckpt:
        job = Job(ckpt, make_loader(streamed, rank, size, workers, ahead_count))
        began()
        (live_in_threads if in_threads else live_in_tasks)(job, random.Random(seed * 100 + rank))
    return 0


def judge(root: Path, streamed: bool) -> int:
    """Load the newest step, train all that its loader gives, and say what came of it."""
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=TINY)) as ckpt:
        job = Job(ckpt, make_loader(streamed, 0, 1, 0, 0))
        nothing, everything = not job.first_step, int(job.counts.sum()) == LENGTH * EPOCHS
        for batch in job.batches():
            job.train(batch)
    if int(job.counts.min()) < EPOCHS:
        return LOST
    if int(job.counts.max()) > EPOCHS:
        return TWICE
    return NOTHING_SAVED if nothing else ALL_TRAINED if everything else RIGHT


def kill_at_random(lives: Sequence[Callable[[Callable[[], object]], int]], after_s: float, early: bool) -> bool:
    """Fork ranks, kill them all a time after they began; return whether one was killed, and not done before.

    Args:
        early: count the time from the fork on, when they still import, load and meet.
    """
    children = []
    begun, begins = os.pipe()
    for work in lives:
        pid = os.fork()
        if not pid:
            status = RAISED
            with suppress(BaseException):
                os.setpgid(0, 0)
                status = work(lambda: os.write(begins, b"."))
            os._exit(status)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # whoever of the two comes first
        children.append(pid)
    os.close(begins)
    if not early:
        for _ in children:
            os.read(begun, 1)  # nothing where all have ended
    time.sleep(after_s)
    os.close(begun)
    for pid in children:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with its workers, as when a machine dies
    ends = [os.waitpid(pid, 0)[1] for pid in children]
    raised = [end for end in ends if not os.WIFSIGNALED(end) and os.WEXITSTATUS(end)]
    assert not raised, f"a rank ended with {raised}"
    return any(map(os.WIFSIGNALED, ends))


def look(seed: int, place: Path) -> Outcomes:
    """Kill a training again and again, until all is trained; look at it after each kill."""
    dice = random.Random(seed)
    root, outcomes = place / "run", Counter[str]()
    streamed = dice.random() < 0.5
    sizes: list[int] = []
    with noted(lambda: f"{'a stream' if streamed else 'a sampler'} on {sizes} ranks"):
        for number in range(MOST_LIVES):
            sizes.append(dice.choice((1, 1, 1, 2, 3)))
            job = partial(live, root, place / f"store-{number}", sizes[-1], streamed, seed * 10 + number)
            ranks = [partial(job, rank) for rank in range(sizes[-1])]
            killed = kill_at_random(ranks, dice.random() * MOST_LIFE_S, early=dice.random() < 0.2)
            _, verdict = in_child(partial(judge, root, streamed))
            outcomes[_describe(killed, verdict)] += killed
            if verdict == ALL_TRAINED:
                break
    return +outcomes


def prepare() -> Case:
    """Import here what each life would import anew."""
    for name in NEEDED:
        import_module(name)
    return in_folders(look)


def _describe(killed: bool, verdict: int) -> str:
    assert verdict != LOST, "a sample was lost"
    assert verdict != TWICE, "a sample was trained twice"
    outcomes = {
        RIGHT: "killed in the middle, each sample trained once",
        NOTHING_SAVED: "killed before the first step",
        ALL_TRAINED: "killed when all was trained and saved",
    }
    assert verdict in outcomes, f"the newest step cannot be judged: {verdict}"
    return outcomes[verdict] if killed else "done before its killer"


CAMPAIGN = Campaign(name="late-training", counts="kills", prepare=prepare, smoke_count=5, apart=True)
