"""The random numbers that training draws after a resume in the middle of an epoch, bit by bit, wherever it is killed."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

from aiockpt.adapters.rng import RNG
from aiockpt.data.loader import Loader
from aiockpt.data.sampler import ShardedSampler
from aiockpt.data.samples import LoaderPart, Stream
from aiockpt.data.stream import StreamLoader
from tests.adapters.loaders import impatience, no_vital, resume, saved
from tests.adapters.worlds import World

__all__ = ["impatience"]
pytestmark = [no_vital, pytest.mark.usefixtures("impatience")]
LENGTH, BATCH, BATCHES = 10, 4, 3
STEPS = BATCHES + 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So few numbers are not worth waking others for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index / LENGTH)


class Lines:
    """A stream of the same."""

    def whole(self, epoch: int) -> LoaderPart:
        return LoaderPart(epoch, streams=(Stream("lines", 0, LENGTH),))

    def load_part(self, part: LoaderPart) -> None:
        self.left = part.streams

    def part(self) -> LoaderPart:
        return LoaderPart(None, streams=self.left)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.left:
            cursor = self.left[0].cursor
            self.left = (Stream("lines", cursor + 1, LENGTH - cursor - 1),) if cursor + 1 < LENGTH else ()
            yield torch.full((3,), cursor / LENGTH)


def sampled(workers: int = 0, **options: Any) -> Any:
    sampler = ShardedSampler(LENGTH, BATCH, seed=3)
    return DataLoader(Points(), batch_sampler=sampler, num_workers=workers, **options)


def opaque(workers: int = 0, **options: Any) -> Any:
    return StatefulDataLoader(Points(), batch_size=BATCH, num_workers=workers, **options)


def streamed(workers: int = 0, **options: Any) -> Any:
    return StreamLoader(Lines(), batch_size=BATCH, num_workers=workers, **options)


class Moving:
    """A wrapper that begins its loader with the first batch, as that of Fabric, which moves batches to a device."""

    def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
        self.__dict__.update(loader.__dict__)
        self.inside = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.inside


class Late(DataLoader[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        yield from super().__iter__()


MAKES = (sampled, streamed, opaque)


class Run:
    """A training with dropout. It pauses wherever a checkpoint may be made: between epochs, before a batch, after a step."""

    def __init__(self, make: Callable[[], Any], *, done: int = 0, leave: int = STEPS, **how: Any) -> None:
        torch.manual_seed(done)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.loader: Loader[torch.Tensor] = Loader(make(), **how)
        self.probe: Loader[torch.Tensor] = Loader(sampled())
        self.probed = not how
        self.done, self.leave = done, leave
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        loaders = {"loader": self.loader, "probe": self.probe}
        return {"model": self.model, "optimizer": self.optimizer, **loaders, "rng": RNG()}

    def train(self) -> Iterator[None]:
        while self.done < STEPS:
            yield
            batches = iter(self.loader)
            yield
            for batch in batches:
                self.losses.append(self.step(batch))
                self.done += 1
                if self.done == STEPS or self.done % self.leave == 0:
                    break
                yield
            del batches

    def step(self, batch: torch.Tensor) -> float:
        if self.probed:
            next(iter(self.probe), None)
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def check_every_resume(make: Callable[[], Any], **how: Any) -> None:
    """Save a run wherever it pauses, and compare what is left of it with what each resume does."""
    run = Run(make, **how)
    saved = [(run.done, World([run.state])) for _ in run.train()]
    losses = run.losses
    del run  # and its workers, or those of the others would have to wait for them in the end
    assert len({number for number, _ in saved}) == STEPS
    for done, world in saved:
        again = Run(make, done=done, **how)
        world.load([again.state])
        assert len(list(again.train())) >= STEPS - done
        assert again.losses == losses[done:], f"killed after {done} steps"


@pytest.mark.parametrize(
    ("make", "how"),
    [
        *((lambda make=make, workers=workers: make(workers), {}) for make in MAKES for workers in (0, 2)),
        *((lambda make=make: make(2, persistent_workers=True), {}) for make in (sampled, opaque)),
        (lambda: opaque(shuffle=True), {}),
        (lambda: sampled(generator=torch.Generator()), {}),
        *((lambda workers=workers: Moving(sampled(workers)), {}) for workers in (0, 2)),
        (lambda: Moving(sampled(2, persistent_workers=True)), {}),
        (lambda: Late(Points(), batch_sampler=ShardedSampler(LENGTH, BATCH, seed=3)), {}),
        (sampled, {"ahead_count": 2}),
        (sampled, {"leave": 2}),
    ],
)
def test_a_killed_run_draws_the_same_numbers(make: Any, how: dict[str, Any]) -> None:
    check_every_resume(make, **how)


def test_an_epoch_takes_from_the_generator_what_a_bare_dataloader_takes() -> None:
    def numbers(loader: Any) -> list[float]:
        torch.manual_seed(1)
        return [float(torch.rand(())) for _ in range(2) for _ in [*loader, None]]

    bare = DataLoader(Points(), batch_size=BATCH)
    assert numbers(Loader(sampled())) == numbers(Loader(Moving(sampled()))) == numbers(bare)


class Seeds(Dataset[int]):
    """What each worker is seeded with."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


def test_workers_draw_other_numbers_in_each_epoch() -> None:
    def make() -> Loader[torch.Tensor]:
        return Loader(DataLoader(Seeds(), batch_sampler=ShardedSampler(LENGTH, BATCH), num_workers=1))

    loader = make()
    next(iter(loader))
    again = resume(loader, make())
    rest, following = ({int(seed) for batch in again for seed in batch} for _ in range(2))
    assert rest.isdisjoint(following)


def test_a_state_dict_that_draws_leaves_the_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    Loader(opaque()).held()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_from_before_this_was_noted_goes_on() -> None:
    loader = Loader(sampled())
    next(iter(loader))
    world = saved(loader)
    del world.values["loader"]["readers"]["0"]["iterating"]
    assert len(list(resume(world, Loader(sampled())))) == BATCHES - 1
