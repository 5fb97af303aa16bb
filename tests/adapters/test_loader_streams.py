"""Is a stream read once, by any number of ranks and workers, with workers that read ahead?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from aiockpt.data.loader import Loader
from aiockpt.data.samples import LoaderPart, Stream
from aiockpt.data.stream import StreamLoader
from tests.adapters.worlds import World

LENGTHS = {"a": 9, "b": 5, "c": 1, "d": 12, "e": 7, "f": 8}
EVERY_SAMPLE = Counter(f"{name}-{number}" for name, count in LENGTHS.items() for number in range(count))


class Documents:
    """Files whose documents are packed in twos; one that waits for its neighbour is in the buffer."""

    def whole(self, epoch: int) -> LoaderPart:
        return LoaderPart({"seed": epoch}, streams=tuple(Stream(name, 0, count) for name, count in LENGTHS.items()))

    def part(self) -> LoaderPart:
        return LoaderPart(None, tuple(self.waiting), streams=tuple(self.files))

    def load_part(self, part: LoaderPart) -> None:
        self.waiting = list(part.buffer)
        self.files = list(part.streams)

    def __iter__(self) -> Iterator[str]:
        while self.files:
            name, cursor = self.files[0].source, self.files[0].cursor
            self.waiting.append(f"{name}-{cursor}")
            left = LENGTHS[name] - cursor - 1
            self.files[:1] = [Stream(name, cursor + 1, left)] if left else []
            if len(self.waiting) >= 2:
                first, second, *self.waiting = self.waiting
                yield f"{first} {second}"
        while self.waiting:
            yield self.waiting.pop(0)


def make(rank: int = 0, size: int = 1, workers: int = 0, **options: Any) -> Loader[list[str]]:
    stream = StreamLoader(
        Documents(), batch_size=2, num_workers=workers, rank=rank, size=size, collate_fn=list, **options
    )
    return Loader(stream, rank=rank, size=size)


def documents(batches: list[list[str]]) -> list[str]:
    return [document for batch in batches for packed in batch for document in packed.split()]


@pytest.mark.parametrize("readers", [((2, 0), (3, 0), (1, 0)), ((1, 2), (2, 1), (1, 0)), ((2, 0), (1, 2))])
def test_every_document_is_read_once_while_ranks_and_workers_change(readers: tuple[tuple[int, int], ...]) -> None:
    given: list[list[str]] = []
    saved: World | None = None
    loops: list[Any] = []
    for size, workers in readers:
        loaders = [make(rank, size, workers) for rank in range(size)]
        if saved is not None:
            saved.load([{"loader": loader} for loader in loaders])
        loops = [iter(loader) for loader in loaders]
        given += [next(batches) for batches in loops]
        saved = World([{"loader": loader} for loader in loaders])
    given += [batch for batches in loops for batch in batches]
    assert Counter(documents(given)) == EVERY_SAMPLE


@pytest.mark.parametrize(
    ("count", "options"), [(0, {}), (3, {}), (4, {}), (9, {}), (3, {"multiprocessing_context": "spawn"})]
)
def test_a_stream_with_workers_goes_on_with_the_batch_that_came_next(count: int, options: dict[str, Any]) -> None:
    loader = make(workers=2, **options)
    batches = iter(loader)
    given = [next(batches) for _ in range(count)]
    saved = World([{"loader": loader}])
    expected = list(batches)
    again = make(workers=2)
    saved.load([{"loader": again}])
    assert list(again) == expected
    assert Counter(documents([*given, *expected])) == EVERY_SAMPLE


def test_what_all_readers_share_is_kept_whatever_a_worker_says_of_it() -> None:
    loader = make()
    next(iter(loader))
    assert loader.held().shared == {"epoch": 0, "shared": {"seed": 0}}


def test_the_next_epoch_begins_after_the_last_batch() -> None:
    loader = make()
    assert Counter(documents(list(loader))) == EVERY_SAMPLE
    saved = World([{"loader": loader}])
    again = make()
    saved.load([{"loader": again}])
    assert again.held().shared["epoch"] == again.epoch == 1
    assert Counter(documents(list(again))) == EVERY_SAMPLE


def test_a_loop_that_was_left_goes_on_with_what_training_has_not_had() -> None:
    loader = make(workers=2)
    given = [next(iter(loader))]
    assert Counter(documents([*given, *loader])) == EVERY_SAMPLE
