"""The advice of loaders and samplers, carried out where it is given."""

import inspect
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

import aiockpt
from tests.adapters.loaders import no_vital
from tests.advice.carry_out import Entry, carry_out, names_of

__all__ = ["RandomSampler", "inspect"]  # for a line
DATA = torch.arange(8)


def sharded(rank: int = 0, size: int = 1, **options: Any) -> DataLoader[Any]:
    """Return a loader of batches of two, read by a sampler of ours."""
    sampler = aiockpt.ShardedSampler(len(DATA), 2, rank=rank, size=size)
    return DataLoader(cast("Any", DATA), batch_sampler=sampler, **options)


def bare() -> Any:
    return StatefulDataLoader(cast("Any", DATA), batch_size=2)


def end_epoch(loader: Any, ckpt: aiockpt.Checkpointer, step: int = 3) -> None:
    """Save in the last batch of an epoch, within the loop."""
    for number, _ in enumerate(loader):
        if number == len(DATA) // 2 - 1:
            ckpt.save(step, {"loader": loader}).result()


def first_loop(loader: Any, ckpt: aiockpt.Checkpointer) -> int:
    """Return how many batches the first loop has after the newest step is loaded."""
    ckpt.resume({"loader": loader})
    return len(list(loader))


def train_anew(ckpt: aiockpt.Checkpointer) -> None:
    """Go on in the second epoch, with a range that begins at 0."""
    loader = aiockpt.Loader(sharded())
    list(loader)
    next(iter(loader))
    ckpt.save(3, {"loader": loader}).result()
    loader = aiockpt.Loader(sharded())
    ckpt.resume({"loader": loader})
    for _ in range(2):
        for _ in loader:
            pass


def train_on(ckpt: aiockpt.Checkpointer) -> None:
    """Go on in the second epoch, by the loader's number."""
    loader = aiockpt.Loader(sharded())
    ckpt.resume({"loader": loader})
    while loader.epoch < 2:
        for _ in loader:
            pass


TABLE = [
    Entry("ckpt.save(3, {'loader': sharded()})", r"(loader = aiockpt\.Loader\()…\)",
          "{}sharded())\nckpt.save(3, {'loader': loader}).result()"),
    Entry("ckpt.save(3, {'sampler': sharded().sampler})", r"(loader = aiockpt\.Loader\()…\)",
          "{}sharded())\nckpt.save(3, {'loader': loader}).result()"),
    Entry("ckpt.save(3, {'sampler': RandomSampler(DATA)})",
          r"Write a (DataLoader\(data, batch_sampler=.*\(len\(data\), batch_size\)\))",
          "data, batch_size = DATA, 2\nckpt.save(3, {'loader': aiockpt.Loader({})}).result()"),
    Entry("ckpt.save(3, {'batches': iter(sharded())})",
          r"Write a (DataLoader\(data, batch_sampler=.*\(len\(data\), batch_size\)\))",
          "data, batch_size = DATA, 2\nckpt.save(3, {'loader': aiockpt.Loader({})}).result()"),
    Entry("aiockpt.Loader(sharded(num_workers=1, in_order=False))", r"leave it at (True)",
          "aiockpt.Loader(sharded(num_workers=1, in_order={}))"),
    Entry("loader = aiockpt.Loader(sharded(), count='trained')\nloader.trained([0, 1])",
          r"(iterate over loader\.numbered\(\)) and call loader\.(trained\(number=)",
          "loader = aiockpt.Loader(sharded(), count='trained')\n"
          "for number, _ in loader.numbered(): loader.trained(number=number)"),
    Entry("aiockpt.Loader(sharded(1, 2), rank=0, size=2)", r"give both the same, and (saves=False)",
          "aiockpt.Loader(sharded(1, 2), rank=1, size=2, {})"),
    Entry("loader = aiockpt.Loader(sharded())\nloader.trained(next(iter(loader)))", r"Loader\(…, (count='trained')\)",
          "loader = aiockpt.Loader(sharded(), {})\nloader.trained(next(iter(loader)))"),
    Entry("[ckpt.save(step, {'loader': aiockpt.Loader(sharded())}).result() for step in (3, 4)]",
          r"Write `(for batch in loader)` with the aiockpt.Loader",
          "loader = aiockpt.Loader(sharded())\n{}: ckpt.save(3 + len(batch), {'loader': loader}).result()"),
    Entry("train_anew(ckpt)", r"counts anew: that trains as many epochs again. Write `(while loader.epoch <) n`",
          "assert '{} 2' in inspect.getsource(train_on)\ntrain_on(ckpt)"),
    Entry("end_epoch(aiockpt.Loader(sharded()), ckpt)\nfirst_loop(aiockpt.Loader(sharded()), ckpt)",
          r"write Loader\(…, (epoch_from_step=True)\)", "assert first_loop(aiockpt.Loader(sharded(), {}), ckpt) == 4"),
    Entry("end_epoch(bare(), ckpt)\nfirst_loop(bare(), ckpt)",
          r"write (aiockpt\.Loader\()…, (?:epoch_from_step=True)\)",
          "wrapped = lambda: {}bare(), epoch_from_step=True)\nend_epoch(wrapped(), ckpt, 4)\n"
          "assert first_loop(wrapped(), ckpt) == 4"),
]  # fmt: skip


@no_vital
@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)
