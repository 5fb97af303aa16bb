"""The checks of data loaders and random numbers with real processes: saved by two ranks, loaded by one, two and four.

Processes 0 to n-1 of the world are a job of n ranks, with a checkpointer of their own.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

import aiockpt
from aiockpt.data.samples import LoaderPart, Stream
from aiockpt.errors import StateMismatchError
from tests.adapters.loaders import TOKENS, Packed
from tests.ranks.adapters_worker import check
from tests.ranks.engine_checks import DEADLINES, shared_folder

SAVED_BY = 2
LENGTH = 83
EPOCHS = 3
FILES = {"a": 9, "b": 5, "c": 1, "d": 12, "e": 7, "f": 8}
Make = Callable[[int, int], "aiockpt.Loader[Any]"]
_jobs = iter(range(1000))


class Numbers(Dataset[int]):
    """Sample *i* is *i*."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Documents:
    """Files of documents, read one after the other."""

    def whole(self, epoch: int) -> LoaderPart:
        return LoaderPart({"epoch": epoch}, streams=tuple(Stream(name, 0, count) for name, count in FILES.items()))

    def part(self) -> LoaderPart:
        return LoaderPart(None, streams=tuple(self.files))

    def load_part(self, part: LoaderPart) -> None:
        self.files = list(part.streams)

    def __iter__(self) -> Iterator[str]:
        while self.files:
            name, cursor = self.files[0].source, self.files[0].cursor
            left = FILES[name] - cursor - 1
            self.files[:1] = [Stream(name, cursor + 1, left)] if left else []
            yield f"{name}-{cursor}"


def sampled(rank: int, size: int) -> aiockpt.Loader[Any]:
    sampler = aiockpt.ShardedSampler(LENGTH, 3, rank=rank, size=size, seed=5)
    return aiockpt.Loader(
        DataLoader(Numbers(), batch_sampler=sampler, num_workers=2, collate_fn=list), rank=rank, size=size
    )


def sampled_by_torchdata(rank: int, size: int) -> aiockpt.Loader[Any]:
    sampler = aiockpt.ShardedSampler(LENGTH, 3, rank=rank, size=size, seed=5)
    data = StatefulDataLoader(Numbers(), batch_sampler=sampler, num_workers=2, collate_fn=list)
    return aiockpt.Loader(data, rank=rank, size=size, ahead_count=1)


def streamed(rank: int, size: int) -> aiockpt.Loader[Any]:
    data = aiockpt.StreamLoader(Documents(), batch_size=2, num_workers=2, rank=rank, size=size, collate_fn=list)
    return aiockpt.Loader(data, rank=rank, size=size)


def packing(rank: int, size: int) -> aiockpt.Loader[Any]:
    data = aiockpt.StreamLoader(
        Packed(torch.tensor), batch_size=2, num_workers=2, rank=rank, size=size, collate_fn=_words
    )
    return aiockpt.Loader(data, rank=rank, size=size)


def _words(rows: list[str]) -> list[str]:
    return [token for row in rows for token in row.split()]


def opaque(rank: int, size: int) -> aiockpt.Loader[Any]:
    data = StatefulDataLoader(Numbers(), batch_size=3, num_workers=2, collate_fn=list)
    return aiockpt.Loader(data, rank=rank, size=size, ahead_count=1)


@contextmanager
def job_of(size: int, folder: Path) -> Iterator[aiockpt.Checkpointer | None]:
    """Open the checkpointer of a job of *size* ranks; None for a process that has no part in it. All wait for its end."""
    rank, number = dist.get_rank(), next(_jobs)
    try:
        if rank < size:
            store = PrefixStore(f"job-{number}", dist.distributed_c10d._get_default_store())
            ranks = aiockpt.Ranks(rank, size, store)
            with aiockpt.Checkpointer(folder, ranks=ranks, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
                yield ckpt
        else:
            yield None
    finally:
        dist.barrier()


def from_all(items: list[Any]) -> list[Any]:
    """Return what all processes give, as one list."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, items)
    return [item for some in everyone for item in some]


def save_in_an_epoch(make: Make, folder: Path, batch_count: int) -> tuple[list[Any], list[Any]]:
    """Save on two ranks; return the samples that all of them had before, and those that this one had after it."""
    given: list[Any] = []
    rest: list[Any] = []
    with job_of(SAVED_BY, folder) as ckpt:
        if ckpt is not None:
            loader = make(dist.get_rank(), SAVED_BY)
            batches = iter(loader)
            given = [sample for _ in range(batch_count) for sample in next(batches)]
            ckpt.save(1, {"loader": loader}).result()
            rest = [sample for batch in batches for sample in batch]
    return from_all(given), rest


def load_the_rest(make: Make, folder: Path, size: int) -> list[Any]:
    """Load on so many ranks; return the samples that this process gets."""
    rest: list[Any] = []
    with job_of(size, folder) as ckpt:
        if ckpt is not None:
            loader = make(dist.get_rank(), size)
            assert ckpt.load({"loader": loader}).result() is not None
            rest = [sample for batch in loader for sample in batch]
    return rest


@check(4)
def every_sample_is_seen_once_when_two_ranks_save_and_others_go_on() -> None:
    everything = {
        sampled: Counter(range(LENGTH)),
        sampled_by_torchdata: Counter(range(LENGTH)),
        streamed: Counter(f"{name}-{number}" for name, count in FILES.items() for number in range(count)),
        packing: TOKENS,
    }
    for make, samples in everything.items():
        root = shared_folder()
        given, own_rest = save_in_an_epoch(make, root, 3)
        assert given
        for size in (1, SAVED_BY, 4):
            rest = load_the_rest(make, root, size)
            assert Counter(given + from_all(rest)) == samples, (make, size)
            assert size != SAVED_BY or rest == own_rest, (make, "the same ranks go on with other samples")


@check(4)
def what_only_knows_its_own_state_goes_on_where_the_ranks_are_the_same_and_is_refused_elsewhere() -> None:
    root = shared_folder()
    _, own_rest = save_in_an_epoch(opaque, root, 4)
    assert load_the_rest(opaque, root, SAVED_BY) == own_rest
    for size in (1, 4):
        with job_of(size, root) as ckpt:
            if ckpt is not None:
                loader = opaque(dist.get_rank(), size)
                with pytest.raises(StateMismatchError, match=f"saved by 2 data-parallel ranks, and here are {size}"):
                    ckpt.load({"loader": loader}).result()
                # To its end: the error holds it, and torch waits 5 s for workers that die in a cycle.
                first, *_ = loader
                assert first == [0, 1, 2]


EVEN = {
    "the last two rounds are dealt together": (17, 8, False, 2, 2, 0),
    "the same, saved between the two": (17, 8, False, 2, 2, 1),
    "the last round is short": (21, 8, False, 2, 3, 1),
    "a sample comes again, of batches of one": (17, 1, False, 2, 4, 3),
    "a sample comes again, of fewer than ranks": (3, 2, False, 2, 4, 0),
    "only full batches": (20, 2, True, 2, 3, 1),
}
"""For each branch of the rule: samples, batch size, drop_last, ranks before and after, and rounds before the save."""


def train_in_step(loader: aiockpt.Loader[Any], group: Any, rounds: int | None) -> Iterator[int]:
    """Train with DDP, which hangs where ranks differ by a batch; yield the sizes of the batches."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
    for (batch,), _ in zip(loader, range(LENGTH if rounds is None else rounds), strict=False):
        model(batch[:, None].float()).sum().backward()
        yield len(batch)


@check(4)
def ranks_stay_even_under_ddp_in_an_epoch_its_rest_and_the_next() -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    for why, (length, batch_size, drop_last, before, after, rounds) in EVEN.items():
        root, sizes = shared_folder(), []
        for size, count in ((before, rounds), (after, None)):
            with job_of(size, root) as ckpt:
                if ckpt is None:
                    continue
                sampler = aiockpt.ShardedSampler(
                    length, batch_size, rank=dist.get_rank(), size=size, drop_last=drop_last
                )
                data = DataLoader(torch.utils.data.TensorDataset(torch.arange(length)), batch_sampler=sampler)
                loader = aiockpt.Loader(data, rank=dist.get_rank(), size=size)
                ckpt.load({"loader": loader}).result()
                loop = train_in_step(loader, groups[size], count)
                sizes = list(loop)
                if count is not None:
                    ckpt.save(1, {"loader": loader}).result()
                else:
                    assert loader.epoch == 1, why
                    sizes += train_in_step(loader, groups[size], None)
        counts = from_all([len(sizes)])[:after]
        assert len(set(counts)) == 1, (why, counts)
        assert not drop_last or set(sizes) <= {batch_size}, (why, sizes)


def trained_late(make: Make) -> Make:
    """Return loaders like those of *make* that count what is trained."""

    def make_late(rank: int, size: int) -> aiockpt.Loader[Any]:
        loader = make(rank, size)
        return aiockpt.Loader(loader._source, rank=rank, size=size, count="trained")

    return make_late


def train_out_of_order(loader: aiockpt.Loader[Any], batch_count: int) -> list[Any]:
    """Take so many batches, over the end of an epoch, and train every third; return the samples of those."""
    batches = (batch for _ in range(EPOCHS) for batch in loader)
    taken = [next(batches) for _ in range(batch_count)]
    done = taken[::-3]
    for batch in done:
        loader.trained(batch)
    return [sample for batch in done for sample in batch]


@check(4)
def nothing_is_lost_or_trained_twice_when_ranks_in_different_epochs_save_what_is_trained() -> None:
    for make, samples in (
        (sampled, range(LENGTH)),
        (streamed, [f"{n}-{i}" for n, count in FILES.items() for i in range(count)]),
    ):
        root = shared_folder()
        mine: list[Any] = []
        with job_of(SAVED_BY, root) as ckpt:
            if ckpt is not None:
                loader = trained_late(make)(dist.get_rank(), SAVED_BY)
                mine = train_out_of_order(loader, (10, 20)[dist.get_rank()])
                assert loader.epoch == dist.get_rank()
                ckpt.save(1, {"loader": loader}).result()
        before = from_all(mine)
        for size in (1, SAVED_BY, 4):
            mine = []
            with job_of(size, root) as ckpt:
                if ckpt is not None:
                    loader = trained_late(make)(dist.get_rank(), size)
                    assert ckpt.load({"loader": loader}).result() is not None
                    while (loader.epoch or 0) < EPOCHS:
                        mine += [sample for batch in loader for sample in batch]
            assert Counter(before + from_all(mine)) == Counter(dict.fromkeys(samples, EPOCHS)), (make, size)


def draw() -> tuple[float, ...]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


@check(4)
def ranks_go_on_with_their_own_random_numbers_and_new_ones_get_others() -> None:
    root = shared_folder()
    mine: list[Any] = []
    with job_of(SAVED_BY, root) as ckpt:
        if ckpt is not None:
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(dist.get_rank())
            ckpt.save(1, {"rng": aiockpt.RNG()}).result()
            mine = [draw()]
    expected = from_all(mine)
    drawn: dict[int, list[Any]] = {}
    for size in (1, SAVED_BY, 4, 4):
        mine = []
        with job_of(size, root) as ckpt:
            if ckpt is not None:
                ckpt.load({"rng": aiockpt.RNG()}).result()
                mine = [draw()]
        again = from_all(mine)
        assert again[:SAVED_BY] == expected[:size]
        assert all(len(set(numbers)) == size for numbers in zip(*again, strict=True))
        assert drawn.setdefault(size, again) == again
