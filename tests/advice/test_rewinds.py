"""The advice of rewinds, carried out where it is given."""

import math
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

import aiockpt
from tests.adapters.loaders import no_vital
from tests.advice.carry_out import Entry, carry_out, names_of

DATA = cast("Any", torch.arange(8))


def sharded() -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=aiockpt.ShardedSampler(len(DATA), 2))


def bare() -> Any:
    return StatefulDataLoader(DATA, batch_size=2)


def train(
    loader: Any = None, *, losses: tuple[float, ...] = (1.0, 1.0), name: str = "loss", in_for: bool = False, **how: Any
) -> int:
    """Train a step for each of *losses*, and return the next one."""
    state = {"weight": torch.zeros(2), **({} if loader is None else {"loader": loader})}
    step = 0
    with aiockpt.Checkpointer("rewinds", every=1, rewind=aiockpt.Rewind(**{"skip": None, **how})) as ckpt:
        for number, loss in enumerate(losses):
            step = ckpt.advance(number if in_for else step, state, metrics={name: loss})
    return step


NAN = (1.0, math.nan)
REWIND = "with aiockpt.Checkpointer('other', every=1, rewind=aiockpt.Rewind(skip=None)) as ckpt: %s"
TABLE = [
    Entry(REWIND % "ckpt.step(0, state)", r"with rewind= write `step = (ckpt\.advance\(step, state), …\)`",
          "step = 0\n" + REWIND % "{})"),
    Entry(REWIND % "in_coroutine(lambda: ckpt.advance(0, state))",
          r"advance\(\) with rewind=.* write `step = (await ckpt\.aadvance\(step, state), …\)`",
          "step = 0\nasync with aiockpt.Checkpointer('other', rewind=aiockpt.Rewind(skip=None)) as ckpt: {})"),
    Entry("ckpt.rewind('it is worse')", r"rewind\(\): give Checkpointer\(…, (rewind=aiockpt\.Rewind\(\))\), and call",
          "with aiockpt.Checkpointer('other', {}) as other: other.rewind('it is worse')"),
    Entry("train(losses=(*NAN, 1.0), in_for=True)", r"write `(step = ckpt\.advance\(step), …\)` in a `while` loop",
          "assert train(losses=(*NAN, 1.0)) == 2  # {}"),
    Entry("train(name='train_loss')", r"name the loss, as in Rewind\((loss='train_loss')\)",
          "assert train(name='train_loss', losses=NAN, finite=('train_loss',), {}) == 1"),
    Entry("train(bare())", r"does not set back the loop over a \w+: wrap it in (aiockpt\.Loader\()…\)",
          "train({}bare()))"),
    Entry("train(aiockpt.Loader(sharded(), count='trained'), skip='bad')",
          r"had of a Loader\(count='trained'\): give Rewind\((skip=None)\)",
          "train(aiockpt.Loader(sharded(), count='trained'), {})"),
    Entry("train(skip='bad')", r"goes on with its next batch\. Put an (aiockpt\.Loader) into the state",
          "train({}(sharded()), skip='bad')"),
    Entry("train(losses=NAN, most=0)", r"and Rewind\((most)=\d+\): step \d+ is bad", "train(losses=NAN, {}=1)"),
]  # fmt: skip


@no_vital
@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)
