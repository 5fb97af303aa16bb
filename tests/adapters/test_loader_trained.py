"""Does a loader that counts what is trained lose nothing and repeat nothing, when training is out of order?"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, _utils
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types
from torchdata.stateful_dataloader import worker as stateful_worker

from aiockpt.data.loader import Loader
from aiockpt.data.sampler import ShardedSampler
from aiockpt.data.stream import StreamLoader
from aiockpt.errors import UsageError
from tests.adapters.test_loader import LENGTH, Counting, Files, Numbers
from tests.adapters.test_loader_streams import EVERY_SAMPLE, Documents
from tests.adapters.worlds import World

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11
LENGTHS = {"a": 7, "b": 3, "c": 1, "d": 10, "e": 4}
EPOCHS = 3
Make = Callable[..., "Loader[Any]"]


def sampled(rank: int = 0, size: int = 1, *, workers: int = 0, batch_size: int = 3, **how: Any) -> Loader[list[int]]:
    sampler = ShardedSampler(LENGTH, batch_size, rank=rank, size=size, seed=5)
    data = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    return Loader(data, rank=rank, size=size, **{"count": "trained", **how})


def opaque(rank: int = 0, size: int = 1, *, workers: int = 0, **how: Any) -> Loader[list[int]]:
    data = StatefulDataLoader(Numbers(), batch_size=3, num_workers=workers, collate_fn=list)
    return Loader(data, rank=rank, size=size, **{"count": "trained", **how})


def streamed(rank: int = 0, size: int = 1, *, workers: int = 0, **how: Any) -> Loader[list[str]]:
    data = StreamLoader(Documents(), batch_size=2, num_workers=workers, rank=rank, size=size, collate_fn=list)
    return Loader(data, rank=rank, size=size, **{"count": "trained", **how})


def read(rank: int = 0, size: int = 1, *, workers: int = 0, **how: Any) -> Loader[list[str]]:
    files = Files(LENGTHS if rank == 0 else {})
    files._lengths = LENGTHS
    return Loader(files, rank=rank, size=size, **{"count": "trained", **how})


def samples_of(batches: Iterable[Iterable[Any]]) -> Counter[Any]:
    """Count samples; documents that were packed together are two."""
    return Counter(word for batch in batches for sample in batch for word in str(sample).split())


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is left in the middle of an epoch waits this long for workers that do not look."""
    for module in (_utils, _utils.worker, stateful_worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.2)


WITH_WORKERS = [(sampled, 0), (sampled, 2), (opaque, 0), (opaque, 2), (streamed, 0), (streamed, 2), (read, 0)]


@pytest.mark.parametrize(("make", "workers"), WITH_WORKERS)
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("by_number", [False, True])
def test_what_was_handed_out_and_not_trained_comes_again_first_and_in_order(
    make: Make, workers: int, ahead: int, by_number: bool
) -> None:
    loader = make(workers=workers, ahead_count=ahead)
    if by_number:
        numbered = loader.numbered()
        pairs = [next(numbered) for _ in range(6)]
        batches = [batch for _, batch in pairs]
        for place in (4, 1, 2):
            loader.trained(number=pairs[place][0])
        left_over: Iterator[Any] = (batch for _, batch in numbered)
    else:
        left_over = iter(loader)
        batches = [next(left_over) for _ in range(6)]
        for place in (4, 1, 2):
            loader.trained(batches[place])
    assert loader.untrained_count == 3
    saved = World([{"loader": loader}])
    expected = [batches[0], batches[3], batches[5], *left_over]
    again = make(workers=workers)
    saved.load([{"loader": again}])
    assert list(again) == expected


@pytest.mark.parametrize("make", [sampled, opaque, streamed, read])
def test_what_comes_again_is_saved_again_until_it_is_trained(make: Make) -> None:
    loader = make()
    batches = take(loader, 3)
    for trained in (0, 1, 2):
        saved = World([{"loader": loader}])
        loader = make()
        saved.load([{"loader": loader}])
        again = take(loader, 1)
        assert again == [batches[trained]]
        loader.trained(again[0])
    assert loader.untrained_count == 0


@pytest.mark.parametrize("make", [sampled, opaque, streamed, read])
def test_what_was_handed_out_again_comes_again_before_what_was_not(make: Make) -> None:
    loader = make()
    batches = take(loader, 4)
    saved = World([{"loader": loader}])
    for _ in range(2):
        loader = make()
        saved.load([{"loader": loader}])
        assert take(loader, 2) == batches[:2]
        saved = World([{"loader": loader}])
    loader = make()
    saved.load([{"loader": loader}])
    assert take(loader, 4) == batches


def take(loader: Loader[Any], count: int) -> list[Any]:
    return [batch for _, batch in zip(range(count), loader, strict=False)]


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
    saved, in_the_state = None, Counter[Any]()
    for size in sizes:
        trainers = [Trainer(make(rank, size), epochs) for rank in range(size)]
        if saved is not None:
            saved.load([{"loader": trainer.loader} for trainer in trainers])
        paces = [dice.choice((1, 5, 40)) for _ in trainers]
        for _ in range(dice.randrange(12)):
            for trainer, pace in zip(trainers, paces, strict=True):
                for _ in range(pace):
                    trainer.go_on(dice)
        saved = World([{"loader": trainer.loader} for trainer in trainers])
        in_the_state = sum((trainer.trained for trainer in trainers), in_the_state)
        for trainer in trainers:  # what comes after the save is lost, and may be anything
            for _ in range(dice.randrange(5)):
                trainer.go_on(dice)
    last = [Trainer(make(rank, 2), epochs) for rank in range(2)]
    assert saved is not None
    saved.load([{"loader": trainer.loader} for trainer in last])
    for trainer in last:
        trainer.finish()
    assert sum((trainer.trained for trainer in last), in_the_state) == expected


ANY_SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)
EACH_EPOCH = Counter(dict.fromkeys(map(str, range(LENGTH)), EPOCHS))


@given(ANY_SIZES, st.integers(0, 10**9))
def test_no_sample_is_lost_or_trained_twice_while_ranks_change_and_are_in_different_epochs(
    sizes: list[int], seed: int
) -> None:
    check_a_run(sampled, sizes, seed, EACH_EPOCH)


@given(ANY_SIZES, st.integers(0, 10**9))
def test_no_document_of_a_stream_is_lost_or_trained_twice(sizes: list[int], seed: int) -> None:
    check_a_run(streamed, sizes, seed, Counter(dict.fromkeys(EVERY_SAMPLE, EPOCHS)))


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_read_ahead_change_nothing_of_it(seed: int) -> None:
    def make(rank: int, size: int) -> Loader[Any]:
        return (sampled, streamed)[seed % 2](rank, size, workers=(size + seed) % 2 + seed // 2, ahead_count=seed % 3)

    expected = (EACH_EPOCH, Counter(dict.fromkeys(EVERY_SAMPLE, EPOCHS)))[seed % 2]
    check_a_run(make, [2, 1], seed, expected)


def test_the_last_batches_of_an_epoch_come_again_in_their_epoch_and_the_next_one_goes_on() -> None:
    makes: tuple[Make, ...] = (sampled, streamed)
    for make in makes:
        loader = make()
        first = list(loader)
        for batch in first[:-2]:
            loader.trained(batch)
        second = take(loader, 3)
        loader.trained(second[1])
        assert loader.epoch == 1
        between, again = make(count="handed"), make(count="handed")
        World([{"loader": loader}]).load([{"loader": between}])
        World([{"loader": between}]).load([{"loader": again}])
        assert again.epoch == 0
        assert list(again) == first[-2:]
        assert again.epoch == 1
        rest = list(again)
        assert rest[:2] == [second[0], second[2]]
        assert samples_of([*rest, second[1]]) == samples_of(first)
        assert again.epoch == 2


def test_an_epoch_of_which_nothing_is_left_is_passed_over_on_another_number_of_ranks() -> None:
    loader = sampled()
    late, *others = loader
    for batch in (*others, *loader):
        loader.trained(batch)
    assert loader.epoch == 2
    ranks = [sampled(rank, 2) for rank in range(2)]
    World([{"loader": loader}]).load([{"loader": one} for one in ranks])
    assert [one.epoch for one in ranks] == [0, 0]
    assert samples_of([*ranks[0], *ranks[1]]) == samples_of([late])
    assert [one.epoch for one in ranks] == [2, 2]


def test_an_epoch_that_is_handed_out_is_over_for_the_loop_and_not_for_the_state() -> None:
    loader = opaque()
    batches = list(loader)
    for batch in batches[1:]:
        loader.trained(batch)
    saved = World([{"loader": loader}])
    again = opaque()
    saved.load([{"loader": again}])
    assert len(again) == 1
    assert list(again) == batches[:1]
    assert len(list(again)) == len(batches)


def test_a_loader_that_counts_what_is_handed_out_goes_on_from_one_that_counts_what_is_trained_and_back() -> None:
    loader = sampled()
    one, two, three = take(loader, 3)
    loader.trained(two)
    handed = sampled(count="handed")
    World([{"loader": loader}]).load([{"loader": handed}])
    assert take(handed, 1) == [one]
    trained = sampled()
    World([{"loader": handed}]).load([{"loader": trained}])
    assert take(trained, 1) == [three]


def test_batches_that_wait_are_not_lost_where_a_loader_counts_what_is_handed_out() -> None:
    loader = streamed()
    batches = take(loader, 3)
    for _ in range(3):
        handed = streamed(count="handed")
        World([{"loader": loader}]).load([{"loader": handed}])
        assert len(take(handed, 1)) == 1
        loader = handed
    again = streamed()
    World([{"loader": loader}]).load([{"loader": again}])
    assert samples_of([*batches, *again]) == EVERY_SAMPLE


def test_what_is_saved_of_a_sampler_is_places_and_no_batch() -> None:
    loader = sampled()
    take(loader, 5)
    (epoch,) = loader.held().own["epochs"]
    assert epoch["batches"] == []
    assert sum(len(range(*span[1:])) for span in epoch["parts"][0]["spans"]) == LENGTH


def test_tensors_that_wait_are_saved_as_they_came_and_prepared_again() -> None:
    tensors = [torch.arange(3), torch.arange(3) + 10]

    class Tensors(Files):
        def __iter__(self) -> Iterator[Any]:
            yield from tensors

    def make() -> Loader[Any]:
        return Loader(Tensors({}), count="trained", prepare=lambda batch: batch * 2)

    loader = make()
    doubled = take(loader, 2)
    loader.trained(doubled[0])
    saved = World([{"loader": loader}])
    again = make()
    saved.load([{"loader": again}])
    assert take(again, 1)[0].tolist() == [20, 22, 24]


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
    trained: Counter[str] = Counter()
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
                trained.update(samples_of([batch]))
                loader.trained(batch)
        handed.put(None)

    threads = [threading.Thread(target=work) for work in (produce, train, train)]
    for thread in threads:
        thread.start()
    moments: list[tuple[World, Counter[str]]] = []
    for _ in range(2 * LENGTH // 4):
        permits.release(4)
        with step:
            moments.append((World([{"loader": loader}]), Counter(trained)))
    permits.release(2 * LENGTH)
    for thread in threads:
        thread.join()
    for saved, before in moments:
        again = Trainer(sampled(batch_size=1), 2)
        saved.load([{"loader": again.loader}])
        again.finish()
        assert before + again.trained == Counter({str(sample): 2 for sample in range(LENGTH)})


def test_a_save_while_a_batch_is_read_is_of_the_moment_before_it() -> None:
    saved: list[World] = []

    class Interrupted(Files):
        """A save of another thread comes when the source has moved on, and its batch is not handed out yet."""

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                saved.append(World([{"loader": loader}]))
                yield batch

    def source(kind: type[Files]) -> Loader[Any]:
        return Loader(kind(LENGTHS), count="trained")

    loader = source(Interrupted)
    everything = samples_of(source(Files))
    before = Counter[Any]()
    for batch, world in zip(loader, saved, strict=False):
        again = source(Files)
        world.load([{"loader": again}])
        assert before + samples_of(again) == everything
        before += samples_of([batch])
        loader.trained(batch)


def test_numbers_are_never_given_twice_and_a_batch_from_before_a_load_is_refused() -> None:
    loader = sampled()
    old = [number for number, _ in zip((number for number, _ in loader.numbered()), range(2), strict=False)]
    World([{"loader": sampled()}]).load([{"loader": loader}])
    with pytest.raises(UsageError, match=r"batch 0 was handed out before the load\(\)"):
        loader.trained(number=old[0])
    number, _ = next(loader.numbered())
    assert number not in old
    loader.trained(number=number)


def test_misuse_is_told() -> None:
    loader = sampled()
    one, two = take(loader, 2)
    loader.trained(one)
    with pytest.raises(UsageError, match="a list is no batch that waits to be trained: it was trained before"):
        loader.trained(one)
    with pytest.raises(UsageError, match="not the very object"):
        loader.trained(list(two))
    with pytest.raises(UsageError, match="give the batch, or number="):
        loader.trained()
    with pytest.raises(UsageError, match="give the batch, or number="):
        loader.trained(two, number=1)
    loader.trained(number=1)
    with pytest.raises(UsageError, match="batch 1 was trained before"):
        loader.trained(number=1)
    for number in (2, -1, True, "1"):
        with pytest.raises(UsageError, match="give a number that"):
            loader.trained(number=number)  # type: ignore[arg-type]
    handed = sampled(count="handed")
    for call in (lambda: handed.trained(one), handed.numbered):
        with pytest.raises(UsageError, match="give Loader\\(…, count='trained'\\)"):
            call()
    with pytest.raises(UsageError, match="give 'handed' or 'trained'"):
        sampled(count="done")


class OneBuffer(Counting):
    """A source that fills the one batch that it has."""

    def __iter__(self) -> Iterator[Any]:
        batch = [0]
        for number in range(3):
            batch[0] = number
            yield batch


def test_a_source_that_fills_one_object_again_is_refused_while_that_is_not_trained() -> None:
    loader: Loader[Any] = Loader(OneBuffer(), count="trained")
    batches = iter(loader)
    loader.trained(next(batches))
    next(batches)
    with pytest.raises(UsageError, match="a list again that is batch 1, not trained yet; a batch is saved as it is"):
        next(batches)


def test_numbers_and_text_may_be_the_same_object_again() -> None:
    class Sevens(Counting):
        def __iter__(self) -> Iterator[int]:
            yield from (7, 7, 7)

    loader: Loader[int] = Loader(Sevens(), count="trained")
    for left, batch in zip((2, 1, 0), list(loader), strict=True):
        loader.trained(batch)
        assert loader.untrained_count == left


def test_one_object_for_all_batches_of_a_sampler_is_told_apart_by_number() -> None:
    def make() -> Loader[Any]:
        same: list[int] = []
        sampler = ShardedSampler(4, 1)
        return Loader(DataLoader(Numbers(), batch_sampler=sampler, collate_fn=lambda _: same), count="trained")

    with pytest.raises(UsageError, match=r"iterate over numbered\(\)"):
        list(make())
    assert [number for number, _ in make().numbered()] == [0, 1, 2, 3]


def test_a_loop_that_was_overtaken_by_a_load_says_so() -> None:
    loader = sampled()
    saved = World([{"loader": loader}])
    batches = iter(loader)
    next(batches)
    saved.load([{"loader": loader}])
    with pytest.raises(UsageError, match="leave this one, and start a new one"):
        next(batches)
    assert samples_of(loader) == samples_of([range(LENGTH)])


@pytest.mark.parametrize("make", [sampled, streamed, opaque])
def test_a_loop_with_batches_ahead_that_was_left_goes_on_with_what_training_has_not_had(make: Make) -> None:
    loader = make(count="handed", ahead_count=2)
    given = take(loader, 2)
    assert samples_of([*given, *loader]) == samples_of(make(count="handed"))


def test_ranks_in_different_epochs_need_a_source_that_knows_its_epochs_only_where_their_number_changes() -> None:
    class Epochs(Files):
        """Its epochs are not known to it before they begin."""

    def make(rank: int, size: int) -> Loader[Any]:
        return Loader(Epochs({f"{rank}": 2}), rank=rank, size=size, count="trained")

    loaders = [make(rank, 2) for rank in range(2)]
    list(loaders[0])
    saved = World([{"loader": loader} for loader in loaders])
    saved.load([{"loader": make(rank, 2)} for rank in range(2)])
    with pytest.raises(
        UsageError, match=r"data-parallel rank 1 was in epoch 0 and another in epoch 1.*epoch_parts\(\)"
    ):
        saved.load_one({"loader": make(0, 1)}, 0, 1)


def test_a_state_that_makes_no_sense_is_refused() -> None:
    loader = sampled()
    take(loader, 2)
    for damage in ([], [{"number": 0, "batches": []}], [{"number": "0"}], 7):
        world = World([{"loader": loader}])
        world.values["loader"]["readers"]["0"]["epochs"] = damage
        with pytest.raises(UsageError, match="the state of a loader cannot be read"):
            world.load_one({"loader": sampled()}, 0, 1)


def test_a_loader_tells_how_many_batches_are_with_training() -> None:
    loader = sampled()
    assert len(deque(zip(loader, range(3), strict=False))) == 3
    assert repr(loader).endswith(f"{loader.untrained_count} batches not trained>")
    assert sampled(count="handed").untrained_count == 0
