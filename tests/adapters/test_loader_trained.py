"""A loader that counts what is trained loses nothing and repeats nothing when training is out of order."""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from aiockpt.data.loader import Loader
from aiockpt.data.sampler import ShardedSampler
from aiockpt.errors import UsageError
from tests.adapters import loaders
from tests.adapters.loaders import (
    EVERY_SAMPLE,
    LENGTH,
    LENGTHS,
    TOKENS,
    Counting,
    Files,
    Make,
    Numbers,
    impatience,
    no_vital,
    resume,
    samples_of,
    saved,
    take,
)
from tests.adapters.worlds import World

__all__ = ["impatience"]
pytestmark = [no_vital, pytest.mark.usefixtures("impatience")]
EPOCHS = 3


def trained(make: Make) -> Make:
    """The same, but that it counts what is trained."""
    return wraps(make)(lambda *args, **how: make(*args, **{"count": "trained", **how}))


sampled, opaque, streamed = trained(loaders.sampled), trained(loaders.opaque), trained(loaders.streamed)
read, packed = trained(loaders.read), trained(loaders.packed)
WITH_WORKERS = [(sampled, 0), (sampled, 2), (opaque, 0), (opaque, 2), (streamed, 0), (streamed, 2), (read, 0)]


@pytest.mark.parametrize(("make", "workers"), WITH_WORKERS)
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("by_number", [False, True])
def test_what_was_not_trained_comes_again_in_order(make: Make, workers: int, ahead: int, by_number: bool) -> None:
    loader = make(workers=workers, ahead_count=ahead)
    loop = loader.numbered() if by_number else enumerate(iter(loader))
    pairs = take(loop, 6)
    batches = [batch for _, batch in pairs]
    for place in (4, 1, 2):
        loader.trained(**{"number": pairs[place][0]} if by_number else {"batch": batches[place]})
    assert loader.untrained_count == 3
    world = saved(loader)
    expected = [batches[0], batches[3], batches[5], *(batch for _, batch in loop)]
    assert list(resume(world, make(workers=workers))) == expected


@pytest.mark.parametrize("make", [sampled, opaque, streamed, read])
def test_what_comes_again_is_saved_again_until_it_is_trained(make: Make) -> None:
    loader = make()
    batches = take(loader, 4)
    for _ in range(2):
        loader = resume(loader, make())
        assert take(loader, 2) == batches[:2]
    loader = resume(loader, make())
    for expected in batches:
        again = take(loader, 1)
        assert again == [expected]
        loader.trained(again[0])
        loader = resume(loader, make())
    assert loader.untrained_count == 0


class Trainer:
    """A rank of an asynchronous training: what it has counts only once it is trained."""

    def __init__(self, loader: Loader[Any], epochs: int) -> None:
        self.loader = loader
        self.with_training: list[Any] = []
        self.trained: Counter[Any] = Counter()
        self._batches = self._all(epochs)

    def _all(self, epochs: int) -> Iterator[Any]:
        while (self.loader.epoch or 0) < epochs:
            yield from self.loader

    def go_on(self, dice: random.Random) -> None:
        """Take a batch or train one, where there is any."""
        if dice.random() < 0.6:
            self.with_training += [batch for batch in (next(self._batches, None),) if batch is not None]
        elif self.with_training:
            self._train(self.with_training.pop(dice.randrange(len(self.with_training))))

    def _train(self, batch: Any) -> None:
        self.trained += samples_of([batch])
        self.loader.trained(batch)

    def finish(self) -> None:
        for batch in self._batches:
            self.with_training.append(batch)
        while self.with_training:
            self._train(self.with_training.pop())


def check_a_run(make: Make, sizes: list[int], seed: int, expected: Counter[Any], epochs: int = EPOCHS) -> None:
    """Train on one number of ranks after the other, each killed after a save; what is trained is in the state."""
    dice = random.Random(seed)
    world, in_the_state = None, Counter[Any]()
    for size in sizes:
        trainers = [Trainer(make(rank, size), epochs) for rank in range(size)]
        if world is not None:
            resume(world, *(trainer.loader for trainer in trainers))
        paces = [dice.choice((1, 5, 40)) for _ in trainers]
        for _ in range(dice.randrange(12)):
            for trainer, pace in zip(trainers, paces, strict=True):
                for _ in range(pace):
                    trainer.go_on(dice)
        world = saved(*(trainer.loader for trainer in trainers))
        in_the_state = sum((trainer.trained for trainer in trainers), in_the_state)
        for trainer in trainers:  # what comes after the save is lost, and may be anything
            for _ in range(dice.randrange(5)):
                trainer.go_on(dice)
    last = [Trainer(make(rank, 2), epochs) for rank in range(2)]
    assert world is not None
    resume(world, *(trainer.loader for trainer in last))
    for trainer in last:
        trainer.finish()
    assert sum((trainer.trained for trainer in last), in_the_state) == expected


ANY_SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)
KEPT: tuple[Any, ...] = (list, torch.tensor, np.array)
SOURCES: dict[str, tuple[Make, Counter[str]]] = {
    "sampler": (sampled, samples_of([range(LENGTH)])),
    "stream": (streamed, EVERY_SAMPLE),
    "packed": (packed, TOKENS),
}


def each_epoch(samples: Counter[str]) -> Counter[str]:
    return Counter(dict.fromkeys(samples, EPOCHS))


@pytest.mark.parametrize("source", SOURCES)
@given(ANY_SIZES, st.integers(0, 10**9))
def test_each_sample_is_trained_once_while_ranks_change(source: str, sizes: list[int], seed: int) -> None:
    make, samples = SOURCES[source]
    how = {"keep": KEPT[seed % 3]} if source == "packed" else {}
    check_a_run(lambda rank, size: make(rank, size, **how), sizes, seed, each_epoch(samples))


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_read_ahead_change_nothing_of_it(seed: int) -> None:
    make, samples = SOURCES[("sampler", "stream")[seed % 2]]

    def with_workers(rank: int, size: int) -> Loader[Any]:
        return make(rank, size, workers=(size + seed) % 2 + seed // 2, ahead_count=seed % 3)

    check_a_run(with_workers, [2, 1], seed, each_epoch(samples))


@pytest.mark.parametrize("make", [sampled, streamed])
def test_last_batches_come_again_in_their_epoch(make: Make) -> None:
    loader = make()
    first = list(loader)
    for batch in first[:-2]:
        loader.trained(batch)
    second = take(loader, 3)
    loader.trained(second[1])
    assert loader.epoch == 1
    again = resume(resume(loader, make(count="handed")), make(count="handed"))
    assert again.epoch == 0
    assert list(again) == first[-2:]
    assert again.epoch == 1
    rest = list(again)
    assert rest[:2] == [second[0], second[2]]
    assert samples_of([*rest, second[1]]) == samples_of(first)
    assert again.epoch == 2


def test_other_ranks_pass_over_a_finished_epoch() -> None:
    loader = sampled()
    late, *others = loader
    for batch in (*others, *loader):
        loader.trained(batch)
    assert loader.epoch == 2
    ranks = [sampled(rank, 2) for rank in range(2)]
    resume(loader, *ranks)
    assert [one.epoch for one in ranks] == [0, 0]
    assert samples_of([*ranks[0], *ranks[1]]) == samples_of([late])
    assert [one.epoch for one in ranks] == [2, 2]


def test_an_epoch_handed_out_is_over_for_the_loop() -> None:
    loader = opaque()
    batches = list(loader)
    for batch in batches[1:]:
        loader.trained(batch)
    again = resume(loader, opaque())
    assert len(again) == 1
    assert list(again) == batches[:1]
    assert len(list(again)) == len(batches)


def test_loaders_of_both_counts_load_each_other() -> None:
    loader = sampled()
    one, two, three = take(loader, 3)
    loader.trained(two)
    handed = resume(loader, sampled(count="handed"))
    assert take(handed, 1) == [one]
    assert take(resume(handed, sampled()), 1) == [three]


def test_batches_that_wait_are_not_lost_between_counts() -> None:
    loader = streamed()
    batches = take(loader, 3)
    for _ in range(3):
        loader = resume(loader, streamed(count="handed"))
        assert len(take(loader, 1)) == 1
    assert samples_of([*batches, *resume(loader, streamed())]) == EVERY_SAMPLE


def test_what_is_saved_of_a_sampler_is_places_and_no_batch() -> None:
    loader = sampled()
    take(loader, 5)
    (epoch,) = loader.held().own["epochs"]
    assert epoch["batches"] == []
    assert sum(len(range(*span[1:])) for span in epoch["parts"][0]["spans"]) == LENGTH


def test_tensors_that_wait_are_saved_as_they_came_and_prepared_again() -> None:
    def make() -> Loader[Any]:
        source = Counting(torch.arange(3), torch.arange(3) + 10)
        return Loader(source, count="trained", prepare=lambda batch: batch * 2)

    loader = make()
    loader.trained(take(loader, 2)[0])
    assert take(resume(loader, make()), 1)[0].tolist() == [20, 22, 24]


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads give way to each other as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_a_save_while_other_threads_take_and_train_is_one_moment() -> None:
    loader = sampled(batch_size=1)
    handed: Queue[Any] = Queue(maxsize=7)
    done: Counter[str] = Counter()
    step, permits = threading.Lock(), threading.Semaphore(0)

    def produce() -> None:
        for _ in range(2):
            for batch in loader:
                handed.put(batch)
        handed.put(None)

    def train() -> None:
        while (batch := handed.get()) is not None:
            permits.acquire()
            with step:
                done.update(samples_of([batch]))
                loader.trained(batch)
        handed.put(None)

    threads = [threading.Thread(target=work) for work in (produce, train, train)]
    for thread in threads:
        thread.start()
    moments: list[tuple[World, Counter[str]]] = []
    for _ in range(2 * LENGTH // 4):
        permits.release(4)
        with step:
            moments.append((saved(loader), Counter(done)))
    permits.release(2 * LENGTH)
    for thread in threads:
        thread.join()
    for world, before in moments:
        again = Trainer(resume(world, sampled(batch_size=1)), 2)
        again.finish()
        assert before + again.trained == Counter({str(sample): 2 for sample in range(LENGTH)})


def test_a_save_during_a_read_is_of_before() -> None:
    worlds: list[World] = []

    class Interrupted(Files):
        """A save of another thread comes when the source has moved on, and its batch is not handed out yet."""

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                worlds.append(saved(loader))
                yield batch

    loader = Loader(Interrupted(LENGTHS), count="trained")
    before = Counter[Any]()
    for batch, world in zip(loader, worlds, strict=False):
        assert before + samples_of(resume(world, read())) == EVERY_SAMPLE
        before += samples_of([batch])
        loader.trained(batch)


def test_a_batch_from_before_a_load_is_refused() -> None:
    loader = sampled()
    old = [number for number, _ in take(loader.numbered(), 2)]
    resume(sampled(), loader)
    with pytest.raises(UsageError, match=r"batch 0 was handed out before the load\(\)"):
        loader.trained(number=old[0])
    number, _ = next(loader.numbered())
    assert number not in old
    loader.trained(number=number)


def test_misuse_is_refused() -> None:
    loader, handed = sampled(), sampled(count="handed")
    one, two = take(loader, 2)
    loader.trained(one)
    wrong: Any = (2, -1, True, 1.0, "1")
    for number in wrong:
        with pytest.raises(UsageError, match="give a number that"):
            loader.trained(number=number)
    loader.trained(number=1)
    give = "give the batch, or number="
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: loader.trained(one), "a list is not a batch in training: it was trained before"),
        (lambda: loader.trained(list(two)), "not the very object"),
        (loader.trained, give),
        (lambda: loader.trained(two, number=1), give),
        (lambda: loader.trained(number=1), "batch 1 was trained before"),
        (lambda: handed.trained(one), r"give Loader\(…, count='trained'\)"),
        (handed.numbered, r"give Loader\(…, count='trained'\)"),
    ]
    for call, message in calls:
        with pytest.raises(UsageError, match=message):
            call()


def test_an_object_filled_again_before_training_is_refused() -> None:
    loader: Loader[Any] = Loader(Counting(*[[0]] * 3), count="trained")
    batches = iter(loader)
    loader.trained(next(batches))
    next(batches)
    with pytest.raises(UsageError, match="a list again that is batch 1, not trained yet; a batch is saved as it is"):
        next(batches)


def test_numbers_and_text_may_be_the_same_object_again() -> None:
    loader: Loader[int] = Loader(Counting(7, 7, 7), count="trained")
    for left, batch in zip((2, 1, 0), list(loader), strict=True):
        loader.trained(batch)
        assert loader.untrained_count == left


def test_batches_in_one_object_are_known_by_number() -> None:
    def make() -> Loader[Any]:
        same: list[int] = []
        data = DataLoader(Numbers(), batch_sampler=ShardedSampler(4, 1), collate_fn=lambda _: same)
        return Loader(data, count="trained")

    with pytest.raises(UsageError, match=r"iterate over numbered\(\)"):
        list(make())
    assert [number for number, _ in make().numbered()] == [0, 1, 2, 3]


def test_a_loop_that_was_overtaken_by_a_load_says_so() -> None:
    loader = sampled()
    world, batches = saved(loader), iter(loader)
    next(batches)
    resume(world, loader)
    with pytest.raises(UsageError, match="end this loop, and start a new one"):
        next(batches)
    assert samples_of(loader) == samples_of([range(LENGTH)])


def test_ranks_in_different_epochs_need_a_source_with_epochs() -> None:
    def make(rank: int, size: int) -> Loader[Any]:
        return Loader(Files({f"{rank}": 2}), rank=rank, size=size, count="trained")

    ranks = [make(rank, 2) for rank in range(2)]
    list(ranks[0])
    world = saved(*ranks)
    resume(world, *(make(rank, 2) for rank in range(2)))
    with pytest.raises(UsageError, match=r"rank 1 was in epoch 0 and another in epoch 1.*epoch_parts\(\)"):
        world.load_one({"loader": make(0, 1)}, 0, 1)


def test_a_stream_that_two_ranks_own_is_refused() -> None:
    def make() -> list[Loader[Any]]:
        return [Loader(Files({"same": 2}), rank=rank, size=2, count="trained") for rank in range(2)]

    world = saved(*make())
    with pytest.raises(UsageError, match="two readers both own the stream 'same'"):
        resume(world, *make())


@pytest.mark.parametrize("damage", [[], [{"number": 0, "batches": []}], [{"number": "0"}], 7])
def test_a_state_that_makes_no_sense_is_refused(damage: Any) -> None:
    loader = sampled()
    take(loader, 2)
    world = saved(loader)
    world.values["loader"]["readers"]["0"]["epochs"] = damage
    with pytest.raises(UsageError, match="the state of a loader cannot be read"):
        resume(world, sampled())


def test_a_loader_tells_how_many_batches_are_with_training() -> None:
    loader = sampled()
    assert len(take(loader, 3)) == loader.untrained_count == 3
    assert repr(loader).endswith("3 batches not trained>")
    assert sampled(count="handed").untrained_count == 0
