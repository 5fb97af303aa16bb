"""Ranks that share a `ShardedSampler`, for any length, batch size, number of ranks before and after, and position.

A case trains some epochs in lock step, as ``DistributedDataParallel`` does: in each round every rank takes a batch, or none
does. After a random number of rounds the loaders are saved, and another number of ranks goes on. Every rank must have the
same number of batches and be in the same epoch; without ``drop_last`` each sample comes in each epoch, once but for what
makes ranks even; with it no batch is short. Each round counts.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import aiockpt
from tests.campaigns.campaign import Campaign, Outcomes

MOST_RANKS, MOST_SAMPLES, MOST_BATCH = 6, 70, 9
Loader = aiockpt.Loader[list[int]]
make_sampler: Callable[..., aiockpt.ShardedSampler] = aiockpt.ShardedSampler
"""What is tried; the tests see that one that is uneven is found."""


class Job:
    """The ranks of one world after the other, over the same data."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.length, self.batch_size = self.dice.randrange(MOST_SAMPLES), self.dice.randint(1, MOST_BATCH)
        self.drop_last, self.shuffle = self.dice.random() < 0.3, self.dice.random() < 0.5
        self.seen: dict[int, Counter[int]] = {}
        self.may_repeat: Counter[int] = Counter()
        self.resumes: Counter[int] = Counter()
        self.outcomes: Outcomes = Counter()
        self.loaders: list[Loader] = []
        self.loops: list[Iterator[list[int]]] = []

    def start(self, size: int) -> None:
        """Begin with *size* ranks, where the ranks before were."""
        saved = [loader.held() for loader in self.loaders]
        how = {"shuffle": self.shuffle, "drop_last": self.drop_last, "size": size}
        samplers = [make_sampler(self.length, self.batch_size, rank=rank, **how) for rank in range(size)]
        self.loaders = [aiockpt.Loader(one, rank=rank, size=size) for rank, one in enumerate(samplers)]
        if saved:
            assert all(state.shared == saved[0].shared for state in saved), "ranks are in different epochs"
            owns: list[Any] = [json.loads(json.dumps(state.own)) for state in saved]
            for loader in self.loaders:
                loader.resume(saved[0].shared, owns)
        self.loops = [iter(loader) for loader in self.loaders]
        self.resumes[self.epoch] += 1
        left = self.length - self.seen.get(self.epoch, Counter()).total()
        if 0 < left < size or self.batch_size == 1:
            self.may_repeat[self.epoch] += size - 1

    @property
    def epoch(self) -> int:
        """The epoch that all ranks are in."""
        (epoch,) = {loader.epoch for loader in self.loaders}
        assert epoch is not None
        return epoch

    def round(self) -> bool:
        """Take a batch on each rank; return whether there was one."""
        epoch = self.epoch
        batches = [next(loop, None) for loop in self.loops]
        sizes = {None if batch is None else len(batch) for batch in batches}
        if sizes == {None}:
            self.check(epoch)
            self.loops = [iter(loader) for loader in self.loaders]
            if self.length < len(self.loaders) or self.batch_size == 1:
                self.may_repeat[epoch + 1] += len(self.loaders) - 1
            return False
        assert None not in sizes, f"one rank has a batch more: {batches}"
        known = sorted(size for size in sizes if size is not None)
        assert known[-1] - known[0] <= 1, f"batches of one round: {batches}"
        assert 0 < known[0] <= known[-1] <= self.batch_size, f"batches of {known}"
        assert not self.drop_last or known[0] == self.batch_size, f"a short batch: {batches}"
        self.seen.setdefault(epoch, Counter()).update(sample for batch in batches for sample in batch or ())
        self.outcomes["short rounds" if known[0] < self.batch_size else "full rounds"] += 1
        return True

    def check(self, epoch: int) -> None:
        """Check an epoch that has ended."""
        seen = self.seen.pop(epoch, Counter())
        if self.drop_last:
            dropped = self.length - seen.total()
            assert seen.total() == len(seen), f"{seen.total() - len(seen)} samples twice"
            assert dropped < (self.resumes[epoch] + 1) * self.batch_size * MOST_RANKS, f"{dropped} samples were dropped"
            return
        assert len(seen) == self.length, f"{self.length - len(seen)} samples never came"
        assert seen.total() - self.length <= self.may_repeat[epoch], f"{seen.total() - self.length} came again"


def case(seed: int) -> Outcomes:
    """Train on some worlds, one after the other, and then to the end of an epoch."""
    job = Job(seed)
    for _ in range(job.dice.randint(1, 4)):
        job.start(job.dice.randint(1, MOST_RANKS))
        for _ in range(job.dice.randrange(2 + 3 * job.length // job.batch_size)):
            job.round()
    while job.round():
        pass
    return job.outcomes


CAMPAIGN = Campaign(name="even-ranks", counts="rounds", prepare=lambda: case, smoke_count=1_000)
