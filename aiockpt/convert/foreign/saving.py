"""Saving of a foreign checkpoint as a step: a save of its state, whose tensors are mapped from the files."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from aiockpt.adapters.native import StateWalker
from aiockpt.convert.choice import Converted
from aiockpt.convert.foreign.checkpoint import Foreign
from aiockpt.errors import StepExistsError
from aiockpt.events import BytesWritten, Event
from aiockpt.options import IO, Limits, OnExists
from aiockpt.redaction import redact
from aiockpt.runtime.world import Ranks
from aiockpt.session.checkpointer import Checkpointer, Place


def save_as_step(
    checkpoint: Foreign,
    place: Place,
    *,
    step: int = 0,
    replace: bool = False,
    dry_run: bool = False,
    io: IO = IO(),
    ranks: Ranks | None = None,
    on_written: Callable[[int], object] = lambda _: None,
) -> Converted:
    """Save the state of a checkpoint as a step of *place*; return when it is committed.

    The staging pool of *io* bounds the memory, whatever the size of the checkpoint.

    Args:
        replace: add a generation where the step already exists.
        dry_run: write nothing, and return what would be written.
        ranks: ``Ranks()`` where one rank of a job converts alone; None uses ``torch.distributed``.
        on_written: called with the bytes of each write, on the loop thread; for progress.

    Raises:
        StepExistsError: the step already exists.
        UnsupportedStateError: the checkpoint holds something that cannot be saved; it is named.
        StorageError: of the place.
    """
    begun = time.monotonic()
    state = StateWalker().walk(checkpoint.state)
    url, total = redact(str(place)), sum(shard.nbytes for shard in state.tensors)
    on_exists: OnExists = "new_generation" if replace else "raise"
    with Checkpointer(
        place, on_exists=on_exists, limits=Limits(io=io), ranks=ranks, observers=[_Written(on_written)]
    ) as ckpt:
        # For a dry run, too, and before any data are read; `on_exists` is for a step that appears meanwhile.
        if not replace and any(info.step == step for info in ckpt.steps().result()):
            raise StepExistsError(f"{url} has step {step} already: give another number, or use replace=True (--force)")
        if not dry_run:
            source = {"converted_from": str(checkpoint.path), "kind": checkpoint.kind}
            saved = ckpt.save(step, checkpoint.state, user=source).result()
            url, total = saved.url, saved.bytes
    return Converted(
        step=step,
        url=url,
        prefix="",
        files=(),
        tensor_count=len({shard.name for shard in state.tensors}),
        dtypes=dict(Counter({shard.name: shard.dtype for shard in state.tensors}.values()).most_common()),
        ties=dict(state.alias),
        bytes=total,
        seconds=time.monotonic() - begun,
        dry_run=dry_run,
    )


class _Written:
    """Passes on the number of bytes written."""

    def __init__(self, on_written: Callable[[int], object]) -> None:
        self._on_written = on_written

    def on_event(self, event: Event) -> None:
        if isinstance(event, BytesWritten):
            self._on_written(event.bytes)
