"""Is each token of a packing loader trained once, when its buffers are dealt to another number of ranks?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

from aiockpt.data.loader import Loader
from aiockpt.data.samples import LoaderPart, Stream
from aiockpt.data.stream import StreamLoader
from aiockpt.errors import StateMismatchError
from tests.adapters.test_loader_trained import EPOCHS, check_a_run
from tests.adapters.worlds import World

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata 0.11
ROW = 16
FILES = {"a": (40, 3, 90), "b": (7,), "c": (1, 1, 33, 2), "d": (16, 16), "e": (55,)}
"""How many tokens each document of a file has."""
TOKENS = Counter(
    f"{name}{number}.{place}" for name in FILES for number, n in enumerate(FILES[name]) for place in range(n)
)
Keep = Callable[[list[int]], Any]


def document(name: str, number: int) -> list[int]:
    """Return the tokens of a document, each another number."""
    return [ord(name) << 16 | number << 8 | place for place in range(FILES[name][number])]


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
                self.tokens += document(name, number)
            row, self.tokens = self.tokens[:ROW], self.tokens[ROW:]
            yield " ".join(map(spell, row))


class PackedForTorchdata(Packed, torch.utils.data.IterableDataset[str]):
    """The same as the dataset of a StatefulDataLoader that reads in this process."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(list)
        everything = [Stream(name, 0, len(counts)) for name, counts in FILES.items()]
        self.load_part(LoaderPart(streams=tuple(everything[rank::size])))

    def parts(self) -> list[LoaderPart]:
        return [self.part()]

    def load_parts(self, parts: list[LoaderPart]) -> None:
        self.load_part(parts[0])


def packed(rank: int, size: int, *, workers: int = 0, keep: Keep = list, **how: Any) -> Loader[Any]:
    data = StreamLoader(Packed(keep), batch_size=2, num_workers=workers, rank=rank, size=size, collate_fn=list)
    return Loader(data, rank=rank, size=size, **{"count": "trained", **how})


def by_torchdata(rank: int, size: int, workers: int = 0) -> Loader[Any]:
    data = StatefulDataLoader(PackedForTorchdata(rank, size), batch_size=2, num_workers=workers, collate_fn=list)
    return Loader(data, rank=rank, size=size)


def tokens_of(batches: Iterator[list[str]] | Loader[Any] | list[list[str]]) -> Counter[str]:
    return Counter(token for batch in batches for row in batch for token in row.split())


EVERY_EPOCH = Counter(dict.fromkeys(TOKENS, EPOCHS))
KEPT: dict[str, Keep] = {
    "list": list,
    "torch": torch.tensor,
    "numpy": np.array,
}


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(0, 10**9),
    st.sampled_from(["list", "torch", "numpy"]),
)
def test_no_token_is_lost_and_none_is_trained_twice_while_the_ranks_change(
    sizes: list[int], seed: int, kept: str
) -> None:
    check_a_run(lambda rank, size: packed(rank, size, keep=KEPT[kept]), sizes, seed, EVERY_EPOCH)


@pytest.mark.parametrize(
    ("readers", "count"), [(((2, 0), (3, 0), (1, 0)), "handed"), (((1, 2), (2, 1), (1, 0)), "trained")]
)
def test_buffers_of_workers_and_ranks_are_dealt_to_others(readers: tuple[tuple[int, int], ...], count: str) -> None:
    trained: Counter[str] = Counter()
    saved: World | None = None
    loaders: list[Loader[Any]] = []
    for size, workers in readers:
        loaders = [packed(rank, size, workers=workers, keep=torch.tensor, count=count) for rank in range(size)]
        if saved is not None:
            saved.load([{"loader": loader} for loader in loaders])
        for loader in loaders:
            batch = next(iter(loader), None)
            if batch is not None:
                trained += tokens_of([batch])
                if count == "trained":
                    loader.trained(batch)
        saved = World([{"loader": loader} for loader in loaders])
    again = [packed(rank, 4, count="handed") for rank in range(4)]
    assert saved is not None
    saved.load([{"loader": loader} for loader in again])
    for loader in again:
        trained += tokens_of(loader)
    assert trained == TOKENS


def test_tokens_that_wait_are_told_from_those_that_are_still_to_be_read() -> None:
    loader = packed(0, 1, count="handed")
    given = tokens_of([next(iter(loader))])
    (part,) = loader.held().own["parts"]
    assert given.total() == 2 * ROW
    waiting = Counter(spell(token) for piece in part["buffer"] for token in piece)
    assert waiting
    assert not waiting & given


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3), (3, 2)])
def test_torchdata_deals_tokens_anew_where_it_reads_in_this_process(sizes: tuple[int, int]) -> None:
    before, after = sizes
    loaders = [by_torchdata(rank, before) for rank in range(before)]
    trained = sum((tokens_of([next(iter(loader))]) for loader in loaders), Counter[str]())
    saved = World([{"loader": loader} for loader in loaders])
    again = [by_torchdata(rank, after) for rank in range(after)]
    saved.load([{"loader": loader} for loader in again])
    assert sum((tokens_of(loader) for loader in again), trained) == TOKENS


def test_torchdata_with_workers_keeps_its_tokens_to_itself_and_its_ranks() -> None:
    saved = World([{"loader": by_torchdata(rank, 2, workers=1)} for rank in range(2)])
    with pytest.raises(
        StateMismatchError, match=r"the state of a StatefulDataLoader cannot be split.*your own parts\(\)"
    ):
        saved.load_one({"loader": by_torchdata(0, 1, workers=1)}, 0, 1)
