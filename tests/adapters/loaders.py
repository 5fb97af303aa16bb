"""Sources of data for the tests of loaders, and a resume of some loaders by others."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, _utils
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types
from torchdata.stateful_dataloader import worker as stateful_worker

from aiockpt.data.loader import Loader
from aiockpt.data.sampler import ShardedSampler
from aiockpt.data.samples import LoaderPart, Stream
from aiockpt.data.stream import StreamLoader
from tests.adapters.worlds import World

LENGTH = 47
LENGTHS = {"a": 9, "b": 5, "c": 1, "d": 12, "e": 7, "f": 8}
"""Documents of each file."""
EVERY_SAMPLE = Counter(f"{name}-{number}" for name, count in LENGTHS.items() for number in range(count))
Make = Callable[..., "Loader[Any]"]
no_vital = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that is left in the middle of an epoch waits this long for workers that do not look."""
    for module in (_utils, _utils.worker, stateful_worker):
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.2)


class Numbers(Dataset[int]):
    """Sample *i* is *i*."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Files:
    """Files of samples, read one after the other, of which two at a time become one; a source with a buffer."""

    def __init__(self, lengths: dict[str, int], here: bool = True) -> None:
        self._lengths = lengths
        self._part = LoaderPart(streams=tuple(Stream(name, 0, count) for name, count in lengths.items() if here))

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
            left = Stream(stream.source, stream.cursor + 1, self._lengths[stream.source] - stream.cursor - 1)
            buffer = (*self._part.buffer, f"{stream.source}-{stream.cursor}")
            packed = len(buffer) >= 2
            self._part = LoaderPart(None, buffer[2:] if packed else buffer, (), (left, *others))
            if packed:
                yield list(buffer[:2])
        if self._part.buffer:
            rest, self._part = self._part.buffer, LoaderPart()
            yield list(rest)


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


class Counting:
    """A source that changes the one state it has, again and again; it counts how often it was asked for it."""

    def __init__(self, *batches: Any) -> None:
        self.state = {"given": 0}
        self.asked_count = 0
        self.batches = batches or range(9)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.state["given"] += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        self.asked_count += 1
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def sampled(rank: int = 0, size: int = 1, *, workers: int = 0, batch_size: int = 3, **how: Any) -> Loader[list[int]]:
    sampler = ShardedSampler(LENGTH, batch_size, rank=rank, size=size, seed=5)
    data = DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers, collate_fn=list)
    return Loader(data, rank=rank, size=size, **how)


def opaque(rank: int = 0, size: int = 1, *, workers: int = 0, **how: Any) -> Loader[list[int]]:
    data = StatefulDataLoader(Numbers(), batch_size=3, num_workers=workers, collate_fn=list)
    return Loader(data, rank=rank, size=size, **how)


def streamed(rank: int = 0, size: int = 1, *, workers: int = 0, how: Any = None, **options: Any) -> Loader[list[str]]:
    """A loader of `Documents`; *how* is for the stream, *options* are for the loader."""
    data = StreamLoader(
        Documents(), batch_size=2, num_workers=workers, rank=rank, size=size, collate_fn=list, **(how or {})
    )
    return Loader(data, rank=rank, size=size, **options)


def read(rank: int = 0, size: int = 1, *, workers: int = 0, **how: Any) -> Loader[list[str]]:
    return Loader(Files(LENGTHS, here=rank == 0), rank=rank, size=size, **how)


def saved(*loaders: Any) -> World:
    """What the ranks with these loaders save."""
    return World([{"loader": loader} for loader in loaders])


def resume(by: World | Loader[Any], *loaders: Any) -> Any:
    """Load what was saved, or what a loader saves now, into these loaders; return the first."""
    (by if isinstance(by, World) else saved(by)).load([{"loader": loader} for loader in loaders])
    return loaders[0]


def take(loader: Iterable[Any], count: int) -> list[Any]:
    """The next batches."""
    return [batch for _, batch in zip(range(count), loader, strict=False)]


def samples_of(batches: Iterable[Iterable[Any]]) -> Counter[Any]:
    """Count samples; documents that were packed together are two."""
    return Counter(word for batch in batches for sample in batch for word in str(sample).split())


ROW = 16
FILES = {"a": (40, 3, 90), "b": (7,), "c": (1, 1, 33, 2), "d": (16, 16), "e": (55,)}
"""How many tokens each document of a file has."""
TOKENS = Counter(
    f"{name}{number}.{place}" for name in FILES for number, n in enumerate(FILES[name]) for place in range(n)
)
Keep = Callable[[list[int]], Any]


def spell(token: int) -> str:
    return f"{chr(token >> 16)}{token >> 8 & 255}.{token & 255}"


class Packed:
    """Documents as rows of tokens; what does not fill a row waits for the next document.

    Args:
        keep: how tokens that wait are kept in a checkpoint.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep

    def whole(self, epoch: int) -> LoaderPart:
        return LoaderPart(streams=tuple(Stream(name, 0, len(counts)) for name, counts in FILES.items()))

    def load_part(self, part: LoaderPart) -> None:
        self.tokens = [int(token) for piece in part.buffer for token in piece]
        self.files = list(part.streams)

    def part(self) -> LoaderPart:
        return LoaderPart(None, (self._keep(list(self.tokens)),) if self.tokens else (), streams=tuple(self.files))

    def __iter__(self) -> Iterator[str]:
        while self.files or self.tokens:
            while self.files and len(self.tokens) < ROW:
                name, number = self.files[0].source, self.files[0].cursor
                left = len(FILES[name]) - number - 1
                self.files[:1] = [Stream(name, number + 1, left)] if left else []
                self.tokens += [ord(name) << 16 | number << 8 | place for place in range(FILES[name][number])]
            row, self.tokens = self.tokens[:ROW], self.tokens[ROW:]
            yield " ".join(map(spell, row))


class PackedForTorchdata(Packed, torch.utils.data.IterableDataset[str]):
    """The same as the dataset of a StatefulDataLoader that reads in this process."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(list)
        self.load_part(LoaderPart(streams=self.whole(0).streams[rank::size]))

    def parts(self) -> list[LoaderPart]:
        return [self.part()]

    def load_parts(self, parts: list[LoaderPart]) -> None:
        self.load_part(parts[0])


def packed(rank: int, size: int, *, workers: int = 0, keep: Keep = list, **how: Any) -> Loader[Any]:
    data = StreamLoader(Packed(keep), batch_size=2, num_workers=workers, rank=rank, size=size, collate_fn=list)
    return Loader(data, rank=rank, size=size, **how)


def by_torchdata(rank: int, size: int, *, workers: int = 0) -> Loader[Any]:
    data = StatefulDataLoader(PackedForTorchdata(rank, size), batch_size=2, num_workers=workers, collate_fn=list)
    return Loader(data, rank=rank, size=size)
