"""Does a loader go on where training was, on any number of ranks? With DataLoader, torchdata, and our own sources."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

from aiockpt.adapters.native import read_tree
from aiockpt.data.loader import Loader
from aiockpt.data.sampler import ShardedSampler
from aiockpt.data.samples import LoaderPart, Span, Stream
from aiockpt.errors import ManifestError, StateMismatchError, UsageError
from tests.adapters.worlds import World

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11
LENGTH = 47


class Numbers(Dataset[int]):
    """Sample *i* is *i*."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Stretch(IterableDataset[int]):
    """The same, from front to back."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def sampled(rank: int = 0, size: int = 1, *, workers: int = 0, **how: Any) -> Loader[torch.Tensor]:
    sampler = ShardedSampler(LENGTH, 3, rank=rank, size=size, seed=5)
    data = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)
    return Loader(data, rank=rank, size=size, **how)


def opaque(rank: int = 0, size: int = 1, *, workers: int = 0, **how: Any) -> Loader[torch.Tensor]:
    data = StatefulDataLoader(Numbers(), batch_size=3, num_workers=workers)
    return Loader(data, rank=rank, size=size, **how)


class Files:
    """Files of samples, read one after the other, of which two at a time become one; a source with a buffer."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self._lengths = lengths
        self._part = LoaderPart(streams=tuple(Stream(name, 0, count) for name, count in lengths.items()))

    def parts(self) -> list[LoaderPart]:
        return [self._part]

    def load_parts(self, parts: Sequence[LoaderPart]) -> None:
        (self._part,) = parts

    def __iter__(self) -> Iterator[list[str]]:
        while self._part.streams:
            stream, *others = self._part.streams
            if stream.cursor == self._lengths[stream.source]:
                self._part = LoaderPart(None, self._part.buffer, (), tuple(others))
                continue
            sample = f"{stream.source}-{stream.cursor}"
            left = Stream(stream.source, stream.cursor + 1, self._lengths[stream.source] - stream.cursor - 1)
            buffer = (*self._part.buffer, sample)
            packed = len(buffer) >= 2
            self._part = LoaderPart(None, buffer[2:] if packed else buffer, (), (left, *others))
            if packed:
                yield list(buffer[:2])
        if self._part.buffer:
            rest, self._part = self._part.buffer, LoaderPart()
            yield list(rest)


def take(batches: Iterator[torch.Tensor], count: int) -> list[list[int]]:
    return [next(batches).tolist() for _ in range(count)]


def rest(loader: Loader[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: Iterable[Iterable[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


@pytest.mark.parametrize("make", [sampled, opaque])
@pytest.mark.parametrize(("workers", "ahead"), [(0, 0), (2, 0), (0, 2)])
def test_a_loader_goes_on_with_the_batch_that_would_have_come_next(make: Any, workers: int, ahead: int) -> None:
    loader = make(workers=workers, ahead_count=ahead)
    batches = iter(loader)
    take(batches, 4)
    saved = World([{"loader": loader}])
    expected = [batch.tolist() for batch in batches]
    again = make(workers=workers)
    saved.load([{"loader": again}])
    assert len(expected) == 12
    assert rest(again) == expected


def test_what_is_saved_is_the_state_at_the_batch_that_training_has_not_what_was_read_ahead() -> None:
    drawn: list[int] = []

    def note(batch: torch.Tensor) -> torch.Tensor:
        drawn.append(len(drawn))
        return batch

    loader = sampled(ahead_count=3, prepare=note)
    batches = iter(loader)
    for step in range(1, 6):
        given = next(batches)
        assert len(drawn) == step + 3
        (part,) = loader.held().own["parts"]
        assert sum(len(range(*span[1:])) for span in part["spans"]) == LENGTH - step * len(given)


class Counting:
    """A source that changes the one state it has, again and again."""

    def __init__(self) -> None:
        self.state = {"given": 0}

    def __iter__(self) -> Iterator[int]:
        for number in range(9):
            self.state["given"] += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def test_a_state_that_is_kept_does_not_change_while_the_source_reads_ahead() -> None:
    loader = Loader(Counting(), ahead_count=2)
    for number in loader:
        assert loader.held().own["state"] == {"given": number + 1}


class Asked(Counting):
    """A source that notes how often it was asked for its state, as one with workers would have to wait for them."""

    asked_count = 0

    def state_dict(self) -> dict[str, int]:
        self.asked_count += 1
        return super().state_dict()


def test_a_save_asks_nobody_where_states_are_collected_one_step_ahead() -> None:
    source = Asked()
    loader = Loader(source, ahead_count=1)
    for number in loader:
        asked_count = source.asked_count
        World([{"loader": loader}])
        assert source.asked_count == asked_count == min(number + 2, 9)


def test_after_an_epoch_the_next_one_is_another_order_and_a_load_finds_it() -> None:
    loader = sampled(ahead_count=1)
    first, saved = rest(loader), World([{"loader": loader}])
    second = rest(loader)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(LENGTH))
    assert first != second
    again = sampled()
    saved.load([{"loader": again}])
    assert rest(again) == second


@pytest.mark.parametrize("make", [sampled, opaque])
@pytest.mark.parametrize("ahead", [0, 2])
def test_after_a_checkpoint_at_the_last_batch_inside_the_loop_comes_the_next_epoch(make: Any, ahead: int) -> None:
    loader = make(ahead_count=ahead)
    saved = [World([{"loader": loader}]) for _ in loader][-1]
    again = make()
    saved.load([{"loader": again}])
    assert again.epoch == loader.epoch
    following = rest(again)
    assert sorted(flat(following)) == list(range(LENGTH))
    assert following == rest(loader)


def test_a_loop_that_was_left_goes_on_with_what_training_has_not_had() -> None:
    loader = sampled(workers=2)
    seen = take(iter(loader), 5)
    assert sorted(flat([*seen, *rest(loader)])) == list(range(LENGTH))


def test_what_was_read_ahead_before_a_load_is_forgotten() -> None:
    loader, other = sampled(workers=2), sampled()
    saved = World([{"loader": other}])
    take(iter(loader), 5)
    saved.load([{"loader": loader}])
    assert take(iter(loader), 1) == take(iter(other), 1)
    assert loader.held() == other.held()


@pytest.mark.parametrize("sizes", [(2, 3, 1), (1, 4, 2), (3, 3, 1)])
def test_every_sample_of_an_epoch_is_seen_once_while_the_number_of_ranks_changes(sizes: tuple[int, ...]) -> None:
    seen: Counter[int] = Counter()
    order: list[int] = []
    saved: World | None = None
    all_batches: list[Any] = []
    for size in sizes:
        loaders = [sampled(rank, size) for rank in range(size)]
        if saved is not None:
            saved.load([{"loader": loader} for loader in loaders])
        all_batches = [iter(loader) for loader in loaders]
        for _ in range(2):
            round_ = [next(batches).tolist() for batches in all_batches]
            order += flat(zip(*round_, strict=True))
        saved = World([{"loader": loader} for loader in loaders])
    seen.update(order)
    for batches in all_batches:
        for batch in batches:
            seen.update(batch.tolist())
    assert seen == Counter(range(LENGTH))
    assert order == torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5)).tolist()[: len(order)]


@pytest.mark.parametrize("sizes", [(2, 3, 1), (1, 2, 4)])
def test_buffered_samples_and_half_read_files_are_read_once_by_any_number_of_ranks(sizes: tuple[int, ...]) -> None:
    lengths = {"a": 7, "b": 3, "c": 1, "d": 10, "e": 4}
    seen: list[str] = []
    saved: World | None = None
    all_batches: list[Any] = []
    for size in sizes:
        files = [Files(lengths if rank == 0 else {}) for rank in range(size)]
        for source in files:
            source._lengths = lengths
        loaders = [Loader(source, rank=rank, size=size) for rank, source in enumerate(files)]
        if saved is not None:
            saved.load([{"loader": loader} for loader in loaders])
        all_batches = [iter(loader) for loader in loaders]
        for batches in all_batches:
            seen += next(batches, [])
        saved = World([{"loader": loader} for loader in loaders])
    for batches in all_batches:
        for batch in batches:
            seen += batch
    assert sorted(seen) == sorted(f"{name}-{number}" for name, count in lengths.items() for number in range(count))


def test_peers_that_read_the_same_data_are_saved_once() -> None:
    states = [{"loader": sampled(rank // 2, 2)} for rank in range(4)]
    saved = World(states)
    assert list(saved.values["loader"]["readers"]) == ["0", "1"]
    assert all(tree == {} for tree in saved.per_rank.values())
    two = [sampled(rank, 2) for rank in range(2)]
    saved.load([{"loader": loader} for loader in two])
    assert sorted(flat([*rest(two[0]), *rest(two[1])])) == list(range(LENGTH))


def test_a_peer_may_leave_saving_to_another() -> None:
    states = [{"loader": opaque(0, 1)}, {"loader": opaque(0, 1, saves=False)}]
    take(iter(states[0]["loader"]), 2)
    saved = World(states)
    again = opaque()
    saved.load_one({"loader": again}, 1, 2)
    assert rest(again)[0] == [6, 7, 8]


class Packed:
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
    saved = World([{"data": {"x": Loader(Packed(rank), rank=rank, size=2)}} for rank in range(2)])
    assert len(saved.tensors) == 2
    sources = [Packed(9) for _ in range(size)]
    saved.load([{"data": {"x": Loader(source, rank=rank, size=size)}} for rank, source in enumerate(sources)])
    found = sorted(tensor.tolist() for source in sources for tensor in source.part.buffer)
    assert found == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.parametrize(("workers", "form"), [(0, "parts"), (2, "whole")])
def test_a_dataset_that_can_be_resharded_counts_only_where_no_worker_has_a_copy_of_it(workers: int, form: str) -> None:
    class Source(Packed, torch.utils.data.IterableDataset[torch.Tensor]):
        pass

    loader = Loader(StatefulDataLoader(Source(0), batch_size=None, num_workers=workers))
    assert loader.held().form == form


def test_tensors_of_other_ranks_loaders_are_no_difference() -> None:
    class Whole:
        def __init__(self) -> None:
            self.state = {"tokens": torch.zeros(2)}

        def __iter__(self) -> Iterator[int]:
            return iter(())

        def state_dict(self) -> dict[str, torch.Tensor]:
            return self.state

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
            self.state = state

    def make(rank: int) -> dict[str, Any]:
        return {"data": {"x": Loader(Whole(), rank=rank, size=2)}}

    World([make(0), make(1)]).load([make(0), make(1)])


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (lambda: [opaque(0, 2), opaque(1, 2)], lambda: opaque(0, 3), "saved by 2 data-parallel ranks, and here are 3"),
        (
            lambda: [opaque(workers=0)],
            lambda: opaque(workers=2),
            "saved with num_workers=0, and here it is num_workers=2",
        ),
        (lambda: [opaque()], sampled, "by a loader that cannot be resharded, and here is one that can"),
        (lambda: [sampled()], opaque, "by a loader that can be resharded, and here is one that cannot"),
        (lambda: [sampled(0, 2)], sampled, r"data-parallel ranks \['0'\], of 2"),
    ],
)
def test_a_loader_that_cannot_go_on_is_refused_before_anything_changes(saved: Any, loaded: Any, message: str) -> None:
    world = World([{"loader": loader, "x": 1} for loader in saved()])
    state = {"loader": loaded(), "x": 2}
    with pytest.raises(StateMismatchError, match=message):
        world.load_one(state, 0, 1)
    assert state["x"] == 2
    world.load_one(state, 0, 1, strict=False)
    assert state["x"] == 1


def test_a_bare_loader_of_another_world_is_refused_with_the_way_out() -> None:
    state = {"loader": StatefulDataLoader(Numbers(), batch_size=3)}
    with pytest.raises(StateMismatchError, match=r"saved by 1 ranks, and here are 2; wrap it in aiockpt.Loader"):
        World([state]).load_one(state, 0, 2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batches", "goes_on"), [(2, False), (4, False), (4, True)])
def test_a_bare_loader_is_torchdatas_own_and_an_empty_loop_is_told(
    caplog: pytest.LogCaptureFixture, workers: int, batches: int, goes_on: bool
) -> None:
    loader, again, theirs = (StatefulDataLoader(Numbers(), batch_size=12, num_workers=workers) for _ in range(3))
    loop = iter(loader)
    for _ in range(batches):
        next(loop)
    if goes_on:
        assert not list(loop)
    state = loader.state_dict()
    World([{"loader": loader}]).load_one({"loader": again}, 0, 1)
    theirs.load_state_dict(state)
    assert [len(list(again)) for _ in range(2)] == [len(list(theirs)) for _ in range(2)]
    assert ("its next loop is empty" in caplog.text) == (batches == 4 and not goes_on)


@pytest.mark.parametrize("damage", [{"size": "2"}, {"readers": []}, {"form": None}])
def test_a_damaged_node_is_refused(damage: dict[str, Any]) -> None:
    world = World([{"loader": sampled()}])
    world.values["loader"].update(damage)
    with pytest.raises((ManifestError, StateMismatchError), match="loader"):
        world.load_one({"loader": sampled()}, 0, 1)


def test_people_can_look_at_a_loader() -> None:
    seen = read_tree(World([{"loader": sampled()}]).stored(0, 1))
    assert seen["loader"]["shared"]["epoch"] == 0
    assert seen["loader"]["readers"]["0"]["parts"][0]["spans"] == [["order", 0, LENGTH, 1]]


def test_another_dataset_is_refused() -> None:
    world = World([{"loader": sampled()}])
    other = Loader(DataLoader(Numbers(), batch_sampler=ShardedSampler(LENGTH - 1, 3)))
    with pytest.raises(UsageError, match=f"has {LENGTH - 1} samples and had {LENGTH}"):
        world.load_one({"loader": other}, 0, 1)


@pytest.mark.parametrize(
    ("source", "how", "message"),
    [
        ([1, 2], {}, r"a list has no state to save\. Give a DataLoader with batch_sampler=aiockpt\.ShardedSampler"),
        (
            DataLoader(Numbers(), batch_size=32, shuffle=True, drop_last=True),
            {},
            re.escape(
                "Write DataLoader(data, batch_sampler=aiockpt.ShardedSampler(len(data), 32, drop_last=True)) in place of "
                "batch_size=32, shuffle=True, drop_last=True"
            ),
        ),
        (
            DataLoader(Numbers(), batch_size=8),
            {},
            re.escape("ShardedSampler(len(data), 8, shuffle=False)) in place of batch_size=8") + "$",
        ),
        (
            DataLoader(Numbers(), batch_size=8, sampler=DistributedSampler(Numbers(), 2, 0)),
            {},
            re.escape("ShardedSampler(len(data), 8)) in place of batch_size=8, sampler=<DistributedSampler>"),
        ),
        (
            DataLoader(Numbers(), batch_sampler=BatchSampler(range(LENGTH), 4, False)),
            {},
            "in place of batch_sampler=<BatchSampler>",
        ),
        (DataLoader(Stretch(), batch_size=4), {}, "aiockpt.StreamLoader takes the place"),
        (Files({}), {"rank": 1}, "both rank and size"),
        (Files({}), {"rank": 2, "size": 2}, "rank 2 of 2"),
    ],
)
def test_a_loader_that_cannot_be_saved_is_refused_when_it_is_made(source: Any, how: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(source, **how)


def test_batches_out_of_order_are_refused() -> None:
    sampler = ShardedSampler(LENGTH, 3)
    data = DataLoader(Numbers(), batch_sampler=sampler, num_workers=2, in_order=False)
    with pytest.raises(UsageError, match="in_order=False"):
        Loader(data)


def test_ranks_get_the_same_number_of_full_batches_when_the_last_are_dropped() -> None:
    samplers = [ShardedSampler(LENGTH, 3, rank=rank, size=4, drop_last=True, shuffle=False) for rank in range(4)]
    assert [len(sampler) for sampler in samplers] == [3, 3, 3, 3]
    assert [len(batch) for sampler in samplers for batch in sampler] == [3] * 12


@pytest.mark.parametrize(
    ("length", "size", "batch_size", "expected"),
    [
        (17, 2, 8, [[5, 4], [4, 4]]),
        (17, 2, 1, [[1] * 9, [1] * 9]),
        (33, 2, 8, [[8, 5, 4], [8, 4, 4]]),
        (20, 2, 8, [[8, 2], [8, 2]]),
        (19, 3, 8, [[7], [6], [6]]),
        (2, 3, 4, [[1], [1], [1]]),
        (9, 1, 8, [[8, 1]]),
        (0, 2, 4, [[], []]),
    ],
)
def test_the_tail_of_an_epoch_is_dealt_so_that_ranks_have_the_same_number_of_batches(
    length: int, size: int, batch_size: int, expected: list[list[int]]
) -> None:
    batches = [list(ShardedSampler(length, batch_size, rank=rank, size=size)) for rank in range(size)]
    assert [[len(batch) for batch in of_rank] for of_rank in batches] == expected
    assert set(flat(chain.from_iterable(batches))) == set(range(length))


def test_a_position_that_an_uneven_sampler_has_stored_is_loaded_and_ranks_are_even_from_then_on() -> None:
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


def test_a_loader_tells_its_epoch() -> None:
    loader, epochs = sampled(), []
    for _ in range(2):
        epochs += [loader.epoch for _ in loader]
    assert (epochs, loader.epoch) == ([0] * 16 + [1] * 16, 2)
    again = sampled()
    World([{"loader": loader}]).load([{"loader": again}])
    assert again.epoch == 2
    assert Loader(Files({})).epoch is None


def test_a_loader_says_what_it_is_and_how_long() -> None:
    loader = sampled(1, 2)
    assert repr(loader) == "<Loader of DataLoader, data-parallel rank 1 of 2>"
    assert len(loader) == 8


def test_spans_are_what_a_sampler_saves() -> None:
    (part,) = ShardedSampler(10, 2, rank=1, size=2).parts()
    assert part.spans == (Span("order", 1, 10, 2),)
