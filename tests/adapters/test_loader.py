"""Resume of a loader where training was, on any number of ranks: DataLoader, torchdata and our own sources."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

from aiockpt.adapters.target import read_tree
from aiockpt.data.loader import Loader
from aiockpt.data.sampler import ShardedSampler
from aiockpt.data.samples import LoaderPart, Span
from aiockpt.errors import ManifestError, StateMismatchError, UsageError
from tests.adapters.loaders import (
    EVERY_SAMPLE,
    LENGTH,
    TOKENS,
    Counting,
    Files,
    Make,
    Numbers,
    by_torchdata,
    impatience,
    no_vital,
    opaque,
    packed,
    read,
    resume,
    sampled,
    samples_of,
    saved,
    spell,
    streamed,
    take,
)
from tests.adapters.worlds import World

__all__ = ["impatience"]
pytestmark = [no_vital, pytest.mark.usefixtures("impatience")]
EACH = samples_of([range(LENGTH)])


@pytest.mark.parametrize("count", [0, 3, 4, 9])
@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((make, {"workers": workers}) for make in (sampled, opaque, streamed) for workers in (0, 2)),
        *((make, {"ahead_count": 2}) for make in (sampled, opaque)),
        (streamed, {"workers": 2, "how": {"multiprocessing_context": "spawn"}}),
    ],
)
def test_a_loader_goes_on_with_the_next_batch(make: Make, how: dict[str, Any], count: int) -> None:
    if "how" in how and count != 3:
        pytest.skip("to spawn workers takes long")
    loader = make(**how)
    batches = iter(loader)
    given, world = take(batches, count), saved(loader)
    expected = list(batches)
    assert list(resume(world, make(workers=how.get("workers", 0)))) == expected
    assert samples_of([*given, *expected]) == (EVERY_SAMPLE if make is streamed else EACH)


def test_the_saved_position_is_that_of_training() -> None:
    drawn: list[int] = []

    def note(batch: list[int]) -> list[int]:
        drawn.append(len(drawn))
        return batch

    loader = sampled(ahead_count=3, prepare=note)
    batches = iter(loader)
    for step in range(1, 6):
        given = next(batches)
        assert len(drawn) == step + 3
        (part,) = loader.held().own["parts"]
        assert sum(len(range(*span[1:])) for span in part["spans"]) == LENGTH - step * len(given)


def test_a_kept_state_does_not_change_by_reading_ahead() -> None:
    loader = Loader(Counting(), ahead_count=2)
    for number in loader:
        assert loader.held().own["state"] == {"given": number + 1}


def test_a_save_reads_nothing_of_the_source() -> None:
    source = Counting()
    loader = Loader(source, ahead_count=1)
    for number in loader:
        asked_count = source.asked_count
        saved(loader)
        assert source.asked_count == asked_count == min(number + 2, 9)


@pytest.mark.parametrize("make", [sampled, streamed])
def test_after_an_epoch_the_next_one_begins(make: Make) -> None:
    loader = make(ahead_count=1)
    first, world = list(loader), saved(loader)
    second = list(loader)
    assert samples_of(first) == samples_of(second) == (EVERY_SAMPLE if make is streamed else EACH)
    assert (first != second) is (make is sampled)
    again = resume(world, make())
    assert again.held().shared["epoch"] == again.epoch == 1
    assert list(again) == second


@pytest.mark.parametrize("make", [sampled, opaque, streamed])
@pytest.mark.parametrize("from_step", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_checkpoint_at_the_last_batch_ends_its_epoch(
    caplog: pytest.LogCaptureFixture, make: Make, ahead: int, from_step: bool
) -> None:
    loader = make(ahead_count=ahead)
    again = resume([saved(loader) for _ in loader][-1], make(epoch_from_step=from_step))
    assert (again.epoch, again.is_over) == (int(from_step), True)
    assert from_step or not list(again)
    assert again.epoch == loader.epoch == 1
    following = list(again)
    assert samples_of(following) == (EVERY_SAMPLE if make is streamed else EACH)
    assert following == list(loader)
    (told,) = caplog.messages
    assert ("the first loop is epoch 1" if from_step else "the first loop is empty, ") in told
    assert "epoch_from_step" in told


@pytest.mark.parametrize("make", [sampled, opaque, streamed, read])
@pytest.mark.parametrize("batches", [0, 3, 99])
def test_every_source_counts_epochs_and_a_load_goes_on_counting(make: Make, batches: int) -> None:
    loader = make()
    while loader.epoch < 2:
        assert loader.epoch == resume(loader, make()).epoch
        list(loader)
    batch = take(loop := iter(loader), batches)
    again = resume(loader, make())
    assert again.epoch == loader.epoch == (3 if len(batch) < batches else 2)
    list(again)
    list(loop)
    assert again.epoch == loader.epoch + (len(batch) < batches)


@pytest.mark.parametrize(
    ("make", "how"), [(sampled, {"workers": 2}), (streamed, {"workers": 2})]
    + [(make, {"ahead_count": 2}) for make in (sampled, streamed, opaque)],
)  # fmt: skip
def test_a_loop_that_was_left_goes_on(make: Make, how: dict[str, Any]) -> None:
    loader = make(**how)
    assert samples_of([*take(loader, 2), *loader]) == (EVERY_SAMPLE if make is streamed else EACH)


def test_what_was_read_ahead_before_a_load_is_dropped() -> None:
    loader, other = sampled(workers=2), sampled()
    world = saved(other)
    take(loader, 5)
    resume(world, loader)
    assert take(iter(loader), 1) == take(iter(other), 1)
    assert loader.held() == other.held()


RANKS = ((2, 3, 1), (1, 4, 2), (3, 3, 1), (2, 1), (3, 2))
"""How many ranks there are, one after the other."""
READERS = (((1, 2), (2, 1), (1, 0)), ((2, 0), (1, 2)))
"""The same, with the workers of each."""


@pytest.mark.parametrize(
    ("make", "every", "readers"),
    [
        *(
            (make, every, tuple((size, 0) for size in sizes))
            for make, every in (
                (sampled, EACH),
                (read, EVERY_SAMPLE),
                (streamed, EVERY_SAMPLE),
                (packed, TOKENS),
                (by_torchdata, TOKENS),
            )
            for sizes in RANKS
        ),
        *(
            (make, every, readers)
            for make, every in ((streamed, EVERY_SAMPLE), (packed, TOKENS))
            for readers in READERS
        ),
    ],
)
def test_each_sample_is_read_once_while_ranks_change(
    make: Make, every: Counter[str], readers: tuple[tuple[int, int], ...]
) -> None:
    seen: list[Any] = []
    world: World | None = None
    loops: list[Iterator[Any]] = []
    for size, workers in readers:
        loaders = [make(rank, size, workers=workers) for rank in range(size)]
        if world is not None:
            resume(world, *loaders)
        loops = [iter(loader) for loader in loaders]
        seen += [batch for loop in loops for batch in take(loop, 1)]
        world = saved(*loaders)
    seen += chain.from_iterable(loops)
    assert samples_of(seen) == every


@pytest.mark.parametrize("sizes", [(2, 3, 1), (1, 4, 2), (3, 3, 1)])
def test_ranks_in_lock_step_keep_the_order_while_their_number_changes(sizes: tuple[int, ...]) -> None:
    order: list[int] = []
    world: World | None = None
    for size in sizes:
        loaders = [sampled(rank, size) for rank in range(size)]
        if world is not None:
            resume(world, *loaders)
        for round_ in take(zip(*loaders, strict=True), 2):
            order += chain.from_iterable(zip(*round_, strict=True))
        world = saved(*loaders)
    assert order == torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5)).tolist()[: len(order)]


def test_peers_that_read_the_same_data_are_saved_once() -> None:
    world = saved(*(sampled(rank // 2, 2) for rank in range(4)))
    assert list(world.values["loader"]["readers"]) == ["0", "1"]
    assert all(tree == {} for tree in world.per_rank.values())
    two = [sampled(rank, 2) for rank in range(2)]
    resume(world, *two)
    assert samples_of(chain(*two)) == EACH


def test_a_peer_may_leave_saving_to_another() -> None:
    first = opaque(0, 1)
    take(first, 2)
    world, again = saved(first, opaque(0, 1, saves=False)), opaque()
    world.load_one({"loader": again}, 1, 2)
    assert take(again, 1) == [[6, 7, 8]]


class Buffered:
    """A source whose buffer is a tensor."""

    def __init__(self, rank: int) -> None:
        self.part = LoaderPart(buffer=(torch.arange(3) + rank,))

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.part.buffer

    def parts(self) -> list[LoaderPart]:
        return [self.part]

    def load_parts(self, parts: Sequence[LoaderPart]) -> None:
        (self.part,) = parts


@pytest.mark.parametrize("size", [1, 2, 3])
def test_buffered_tensors_find_their_new_ranks(size: int) -> None:
    world = saved(*(Loader(Buffered(rank), rank=rank, size=2) for rank in range(2)))
    assert len(world.tensors) == 2
    sources = [Buffered(9) for _ in range(size)]
    resume(world, *(Loader(source, rank=rank, size=size) for rank, source in enumerate(sources)))
    found = sorted(tensor.tolist() for source in sources for tensor in source.part.buffer)
    assert found == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(("workers", "form"), [(0, "parts"), (2, "whole")])
def test_a_dataset_copied_to_workers_is_not_resharded(workers: int, form: str) -> None:
    class Source(Buffered, torch.utils.data.IterableDataset[torch.Tensor]):
        pass

    loader = Loader(StatefulDataLoader(Source(0), batch_size=None, num_workers=workers))
    assert loader.held().form == form


def test_tensors_of_other_ranks_loaders_are_no_difference() -> None:
    class Whole(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.state: Any = {"tokens": torch.zeros(2)}

    def make() -> list[dict[str, Any]]:
        return [{"data": {"x": Loader(Whole(), rank=rank, size=2)}} for rank in range(2)]

    World(make()).load(make())


def test_tokens_that_wait_are_told_from_unread_ones() -> None:
    loader = packed(0, 1)
    given = samples_of(take(loader, 1))
    (part,) = loader.held().own["parts"]
    waiting = Counter(spell(token) for piece in part["buffer"] for token in piece)
    assert given.total() == 32
    assert waiting
    assert not waiting & given


def test_what_all_readers_share_is_kept() -> None:
    loader = streamed()
    next(iter(loader))
    assert loader.held().shared == {"epoch": 0, "shared": {"seed": 0}}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (lambda: [opaque(0, 2), opaque(1, 2)], lambda: opaque(0, 3), "saved by 2 data-parallel ranks, and here are 3"),
        (lambda: [opaque()], lambda: opaque(workers=2), "saved with num_workers=0, and here it is num_workers=2"),
        (lambda: [opaque()], sampled, "by a loader that cannot be resharded, and here is one that can"),
        (lambda: [sampled()], opaque, "by a loader that can be resharded, and here is one that cannot"),
        (lambda: [sampled(0, 2)], sampled, r"data-parallel ranks \['0'\], of 2"),
        (
            lambda: [by_torchdata(rank, 2, workers=1) for rank in range(2)],
            lambda: by_torchdata(0, 1, workers=1),
            r"the state of a StatefulDataLoader cannot be split.*your own parts\(\)",
        ),
    ],
)
def test_a_loader_that_cannot_go_on_is_refused_before_anything_changes(before: Any, now: Any, message: str) -> None:
    world = World([{"loader": loader, "x": 1} for loader in before()])
    state = {"loader": now(), "x": 2}
    with pytest.raises(StateMismatchError, match=message):
        world.load_one(state, 0, 1)
    assert state["x"] == 2
    world.load_one(state, 0, 1, strict=False)
    assert state["x"] == 1


def test_a_bare_loader_of_another_world_is_refused() -> None:
    loader = StatefulDataLoader(Numbers(), batch_size=3)
    with pytest.raises(StateMismatchError, match=r"saved by 1 ranks, and here are 2; wrap it in aiockpt.Loader"):
        saved(loader).load_one({"loader": loader}, 0, 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batches", "goes_on"), [(2, False), (4, False), (4, True)])
def test_a_bare_loader_is_torchdatas_own(
    caplog: pytest.LogCaptureFixture, workers: int, batches: int, goes_on: bool
) -> None:
    loader, again, theirs = (StatefulDataLoader(Numbers(), batch_size=12, num_workers=workers) for _ in range(3))
    loop = iter(loader)
    for _ in range(batches):
        next(loop)
    if goes_on:
        assert not list(loop)
    state = loader.state_dict()
    saved(loader).load_one({"loader": again}, 0, 1)
    theirs.load_state_dict(state)
    assert [len(list(again)) for _ in range(2)] == [len(list(theirs)) for _ in range(2)]
    assert ("its next loop is empty" in caplog.text) == (batches == 4 and not goes_on)


@pytest.mark.parametrize("make", [sampled, opaque, streamed])
def test_a_second_loop_after_one_left_is_told(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    loader = make()
    list(loader)
    take(loader, 1)  # a look at the data
    take(loader, 2)
    assert "was left" not in caplog.text
    take(loader, 2)
    take(loader, 2)
    assert caplog.text.count("a loop was left after 2 batches") == 1


def test_a_loop_that_a_load_has_ended_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    loader = sampled()
    take(loader, 2)
    saved(loader).load_one({"loader": loader}, 0, 1)
    take(loader, 2)
    assert "was left" not in caplog.text


def test_a_sampler_of_batches_may_stand_in_sampler() -> None:
    def make() -> Loader[Any]:
        return Loader(DataLoader(torch.arange(LENGTH), batch_size=None, sampler=ShardedSampler(LENGTH, 3)))  # type: ignore[arg-type]

    loader = make()
    given = take(loop := iter(loader), 4)
    rest = list(resume(loader, make()))
    assert torch.equal(torch.cat(rest), torch.cat(list(loop)))
    assert samples_of(torch.cat([*given, *rest]).view(-1, 1).tolist()) == EACH


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_from_before_the_load_is_told(caplog: pytest.LogCaptureFixture, workers: int, holds: bool) -> None:
    loader = in_order(workers=workers)
    take(loader, 2)
    world = saved(loader)
    again = in_order(workers=workers)
    held = iter(again)
    if not holds:
        del held
    world.load_one({"loader": again}, 0, 1)
    assert ("loader: the program holds an iterator that it made before the load" in caplog.text) == holds


class Drawing(Numbers):
    """Samples that workers may change at random."""


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [2, 99])
def test_random_numbers_of_workers_are_told_in_mid_epoch(
    caplog: pytest.LogCaptureFixture, batches: int, workers: int, wrapped: bool
) -> None:
    def make(data: Any) -> Any:
        return StatefulDataLoader(data, batch_size=12, num_workers=workers)

    plain: Any = list(range(LENGTH))
    for data in (Drawing(), Subset(plain, range(LENGTH))):
        loader, again = (Loader(make(data)) if wrapped else make(data) for _ in range(2))
        take(loop := iter(loader), batches)
        saved(loader).load_one({"loader": again}, 0, 1)
        del loop
    assert caplog.text.count("seeded anew") == (batches == 2 and workers == 2)
    assert ("in Drawing.__getitem__(index)" in caplog.text) == (batches == 2 and workers == 2)


@pytest.mark.parametrize("damage", [{"size": "2"}, {"readers": []}, {"form": None}])
def test_a_damaged_node_is_refused(damage: dict[str, Any]) -> None:
    world = saved(sampled())
    world.values["loader"].update(damage)
    with pytest.raises((ManifestError, StateMismatchError), match="loader"):
        resume(world, sampled())


def test_people_can_look_at_a_loader() -> None:
    seen = read_tree(saved(sampled()).stored(0, 1))
    assert seen["loader"]["shared"]["epoch"] == 0
    assert seen["loader"]["readers"]["0"]["parts"][0]["spans"] == [["order", 0, LENGTH, 1]]


def test_another_dataset_is_refused() -> None:
    other = Loader(DataLoader(Numbers(), batch_sampler=ShardedSampler(LENGTH - 1, 3)))
    with pytest.raises(UsageError, match=f"has {LENGTH - 1} samples and had {LENGTH}"):
        resume(saved(sampled()), other)


class Stretch(IterableDataset[int]):
    """Numbers from front to back."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


@pytest.mark.parametrize(
    ("source", "how", "message"),
    [
        ([1, 2], {}, "a list has no state to save. Give a DataLoader with batch_sampler=aiockpt.ShardedSampler"),
        (
            DataLoader(Numbers(), batch_size=32, shuffle=True, drop_last=True),
            {},
            "Write DataLoader(data, batch_sampler=aiockpt.ShardedSampler(len(data), 32, drop_last=True)) in place of "
            "batch_size=32, shuffle=True, drop_last=True",
        ),
        (
            DataLoader(Numbers(), batch_size=8),
            {},
            "ShardedSampler(len(data), 8, shuffle=False)) in place of batch_size=8",
        ),
        (
            DataLoader(Numbers(), batch_size=8, sampler=DistributedSampler(Numbers(), 2, 0)),
            {},
            "ShardedSampler(len(data), 8)) in place of batch_size=8, sampler=<DistributedSampler>",
        ),
        (
            DataLoader(Numbers(), batch_sampler=BatchSampler(range(LENGTH), 4, False)),
            {},
            "in place of batch_sampler=<BatchSampler>",
        ),
        (
            DataLoader(Numbers(), batch_size=4, sampler=ShardedSampler(LENGTH, 4)),
            {},
            "A ShardedSampler yields whole batches: write DataLoader(data, batch_sampler=ShardedSampler(…)), without",
        ),
        (DataLoader(Stretch(), batch_size=4), {}, "aiockpt.StreamLoader takes the place"),
        (Files({}), {"rank": 1}, "both rank and size"),
        (Files({}), {"rank": 2, "size": 2}, "rank 2 of 2"),
        (
            DataLoader(Numbers(), batch_sampler=ShardedSampler(LENGTH, 3), num_workers=2, in_order=False),
            {},
            "in_order=False",
        ),
        (Files({}), {"count": "done"}, "give 'handed' or 'trained'"),
    ],
)
def test_a_loader_that_cannot_be_saved_is_refused(source: Any, how: Any, message: str) -> None:
    end = "$" if message.endswith("batch_size=8") else ""
    with pytest.raises(UsageError, match=re.escape(message) + end):
        Loader(source, **how)


@pytest.mark.parametrize(
    ("length", "size", "batch_size", "expected", "how"),
    [
        (17, 2, 8, [[5, 4], [4, 4]], {}),
        (17, 2, 1, [[1] * 9, [1] * 9], {}),
        (33, 2, 8, [[8, 5, 4], [8, 4, 4]], {}),
        (20, 2, 8, [[8, 2], [8, 2]], {}),
        (19, 3, 8, [[7], [6], [6]], {}),
        (2, 3, 4, [[1], [1], [1]], {}),
        (9, 1, 8, [[8, 1]], {}),
        (0, 2, 4, [[], []], {}),
        (47, 4, 3, [[3, 3, 3]] * 4, {"drop_last": True, "shuffle": False}),
    ],
)
def test_ranks_have_the_same_number_of_batches(
    length: int, size: int, batch_size: int, expected: list[list[int]], how: dict[str, Any]
) -> None:
    samplers = [ShardedSampler(length, batch_size, rank=rank, size=size, **how) for rank in range(size)]
    assert list(map(len, samplers)) == list(map(len, expected))
    batches = list(map(list, samplers))
    assert [[len(batch) for batch in of_rank] for of_rank in batches] == expected
    seen = samples_of(chain.from_iterable(batches))
    assert how or seen.keys() == samples_of([range(length)]).keys()


def test_ranks_are_even_after_an_uneven_position() -> None:
    """As 0.1.0 has stored 17 samples on two ranks after one batch of eight: the first rank had one more."""
    shared = {"epoch": 0, "seed": 0, "shuffle": True, "length": 17}
    parts = [[["order", 16, 17, 2]], []]
    owns = [{"iterating": True, "parts": [{"buffer": [], "spans": spans, "streams": []}]} for spans in parts]
    loaders = [Loader(ShardedSampler(17, 8, rank=rank, size=2), rank=rank, size=2) for rank in range(2)]
    for loader in loaders:
        loader.resume(shared, owns)
    assert [[len(batch) for batch in loader] for loader in loaders] == [[1], [1]]
    assert [loader.epoch for loader in loaders] == [1, 1]
    assert [[len(batch) for batch in loader] for loader in loaders] == [[5, 4], [4, 4]]


def test_a_loader_tells_its_epoch_its_length_and_what_it_is() -> None:
    loader, epochs = sampled(), []
    for _ in range(2):
        epochs += [loader.epoch for _ in loader]
    assert (epochs, loader.epoch) == ([0] * 16 + [1] * 16, 2)
    assert resume(loader, sampled()).epoch == 2
    assert repr(sampled(1, 2)) == "<Loader of DataLoader, data-parallel rank 1 of 2>"
    assert len(sampled(1, 2)) == 8
    (part,) = ShardedSampler(10, 2, rank=1, size=2).parts()
    assert part.spans == (Span("order", 1, 10, 2),)


def shuffled(length: int = 20, *, batch_size: int = 4, workers: int = 0, **how: Any) -> StatefulDataLoader:
    how = {"shuffle": True, "generator": torch.Generator().manual_seed(3), **how}
    return StatefulDataLoader(Numbers(length), batch_size=batch_size, num_workers=workers, collate_fn=list, **how)


def in_order(length: int = 20, *, batch_size: int = 4, workers: int = 0, **how: Any) -> StatefulDataLoader:
    return StatefulDataLoader(Numbers(length), batch_size=batch_size, num_workers=workers, collate_fn=list, **how)


def by(sampler: type[Any], length: int = 20, **how: Any) -> StatefulDataLoader:
    return in_order(length, sampler=sampler(Numbers(length), **how))


def cut(batch_size: int) -> StatefulDataLoader:
    cutter = BatchSampler(SequentialSampler(range(20)), batch_size, drop_last=False)
    return StatefulDataLoader(Numbers(20), batch_sampler=cutter, collate_fn=list)


def go_on(before: Any, after: Any, batches: int, *, wrapped: bool = False, ended: bool = False) -> Any:
    """Have *after* go on where *before* was saved after so many batches; return it, and what was given before."""
    one, other = (Loader(data) if wrapped else data for data in (before, after))
    loop = iter(one)
    given = [next(loop) for _ in range(batches)]
    assert not ended or not list(loop)
    saved(one).load_one({"loader": other}, 0, 1)
    return other, given


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_loader_of_torchdata_is_given_what_it_saved(wrapped: bool) -> None:
    class Recording(StatefulDataLoader):  # type: ignore[misc]
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            loaded.append(list(state_dict))
            super().load_state_dict(state_dict)

    loaded: list[list[str]] = []
    before = shuffled()
    go_on(before, Recording(Numbers(20), batch_size=4, shuffle=True, collate_fn=list), 2, wrapped=wrapped)
    assert loaded == [list(before.state_dict())]


HAD_20 = "the data have {} samples, and had 20 when the checkpoint was made: the rest of this epoch is drawn of another"


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize(("length", "workers", "epoch"), [(25, 0, 0), (25, 2, 2), (15, 0, 2), (15, 2, 0), (20, 0, 2)])
def test_a_shuffled_loader_of_torchdata_tells_of_another_length(
    caplog: pytest.LogCaptureFixture, length: int, workers: int, epoch: int, wrapped: bool
) -> None:
    """By itself it draws the rest of another order, and says nothing."""
    before = shuffled(workers=workers)
    for _ in range(epoch):
        list(before)
    after, given = go_on(before, shuffled(length, workers=workers), 2, wrapped=wrapped)
    rest = list(after)
    assert samples_of(rest).total() == length - 8
    if length == 20:
        assert samples_of(given) + samples_of(rest) == samples_of([range(20)])
    assert samples_of(after) == samples_of([range(length)])
    assert caplog.text.count(HAD_20.format(length)) == (length != 20)
    assert ("use a ShardedSampler; only= leaves the loader out of load()" in caplog.text) == (length != 20)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (in_order, lambda: in_order(25), ""),
        (in_order, lambda: in_order(15), ""),
        (in_order, lambda: in_order(batch_size=3), ""),
        (
            in_order,
            lambda: in_order(3),
            "have 3 samples, and had 20 .*, of which 8 were trained: it cannot go on there",
        ),
        (in_order, shuffled, "come from torchdata.RandomSampler, and came from torch.SequentialSampler"),
        (shuffled, in_order, "come from torch.SequentialSampler, and came from torchdata.RandomSampler"),
        (shuffled, lambda: shuffled(batch_size=3), ""),
        (shuffled, lambda: shuffled(drop_last=True), ""),
        (lambda: by(RandomSampler), lambda: by(RandomSampler), "RandomSampler has no state: .*; shuffle=True"),
        (
            lambda: by(DistributedSampler, num_replicas=1, rank=0),
            lambda: by(DistributedSampler, 25, num_replicas=1, rank=0),
            HAD_20.format(25),
        ),
        (lambda: cut(4), lambda: cut(4), ""),
        (
            lambda: cut(4),
            lambda: cut(3),
            "have 3 samples, and had 4 when 2 of this epoch were trained; .* counts batches",
        ),
        (
            lambda: shuffled(workers=2, snapshot_every_n_steps=3),
            lambda: shuffled(workers=2, snapshot_every_n_steps=3, batch_size=3),
            "counts batches",
        ),
        (
            lambda: StatefulDataLoader(Stretch(), batch_size=4),
            lambda: StatefulDataLoader(Stretch(), batch_size=3),
            "counts batches",
        ),
        (
            lambda: StatefulDataLoader(Stretch(), batch_size=4),
            lambda: StatefulDataLoader(Stretch(), batch_size=4),
            "",
        ),
    ],
)
def test_torchdata_without_the_rest_of_the_epoch_is_told(
    caplog: pytest.LogCaptureFixture, before: Any, after: Any, says: str
) -> None:
    _, given = go_on(before(), go := after(), 2)
    told = [text for _, _, text in caplog.record_tuples if "seeded anew" not in text]
    assert len(told) == bool(says)
    assert re.search(says, "".join(told))
    if not says and not isinstance(go.dataset, Stretch) and not go.drop_last:
        assert samples_of(given) + samples_of(go) == samples_of([range(len(go.dataset))])


@pytest.mark.parametrize("length", [25, 15])
def test_another_length_is_told_where_torchdata_cannot_go_on(caplog: pytest.LogCaptureFixture, length: int) -> None:
    go_on(shuffled(), after := shuffled(length), 5, ended=True)
    assert ("of which 20 were trained: it cannot go on there, and raises" in caplog.text) == (length == 15)
    if length == 25:
        assert samples_of(after) == samples_of([range(25)])


def test_states_of_torchdata_and_of_older_checkpoints_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for bare in (True, False):
        loader = shuffled()
        next(iter(loader))
        world = saved(loader if bare else Loader(loader))
        node = world.per_rank["0"]["loader"] if bare else world.values["loader"]["readers"]["0"]["state"]
        assert node.pop("aiockpt_data") == {"samples": 20, "batch_size": 4, "sampler": "torchdata.RandomSampler"}
        again = shuffled()
        world.load_one({"loader": again if bare else Loader(again)}, 0, 1)
        assert samples_of(again).total() == 16
    assert not caplog.text


def test_a_loader_of_another_rank_than_its_sampler_is_refused() -> None:
    def of(own: tuple[int, int], **given: int) -> Loader[Any]:
        sampler = ShardedSampler(8, 2, rank=own[0], size=own[1], shuffle=False)
        return Loader(DataLoader(list(range(8)), batch_sampler=sampler, collate_fn=list), **given)  # type: ignore[arg-type]

    assert of((1, 2), rank=1, size=2).size == 2
    assert of((1, 2)).size == 1, "a process that knows of no other"
    for rank, size in ((0, 2), (1, 4)):
        with pytest.raises(UsageError, match=rf"\(rank={rank}, size={size}\): its ShardedSampler reads as rank 1 of 2"):
            of((1, 2), rank=rank, size=size)
    with pytest.raises(UsageError, match="saves=False"):
        of((0, 1), rank=1, size=2)
