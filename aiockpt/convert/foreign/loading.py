"""Loading of a foreign checkpoint into live objects: matched by name like our own, and copied box by box."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.rename import Renames, Rules
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.target import open_target
from aiockpt.convert.foreign.checkpoint import Foreign, open_checkpoint
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard


def load(
    checkpoint: Foreign | str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    only: Sequence[str] | None = None,
    strict: bool | Mapping[str, bool] = True,
    map: Mapping[str, str] | Callable[[str], str] | None = None,
    rename: Renames = (),
    trust_pickle: bool = False,
) -> tuple[str, ...]:
    """Fill *state* in place, and return the mismatches in words (none when *strict*).

    Modules, optimizers and tensors may be sharded in any way; each rank fills its part, without messages. Optimizers are
    filled from the result of ``get_optimizer_state_dict``, by names, and from ``optimizer.state_dict()``, by the order of
    the parameters.

    Args:
        checkpoint: a result of `open_checkpoint`, or an argument that it accepts: ``dcp:///path``, a folder, a file.
        state: as for ``Checkpointer.load``.
        only, strict, map, rename: as for ``Checkpointer.load``: ``map={"model": "state_dict"}`` for Lightning's ``.ckpt``.

        trust_pickle: as for `open_checkpoint`.

    Raises:
        StateMismatchError: all differences by name; nothing was overwritten.
        UsageError: an entry of ``map`` or ``only`` matches no name; or as for `open_checkpoint`.
        CorruptionError: as for `open_checkpoint`.
    """
    if not isinstance(checkpoint, Foreign):
        checkpoint = open_checkpoint(checkpoint, trust_pickle=trust_pickle)
    content = SourceState(checkpoint)
    target = open_target(state, content.stored, only=only, strict=strict, rename=Rules(rename) if rename else map)
    for wanted in target.wanted:
        content.fill(wanted)
    target.apply()
    return (*target.problems, *target.notes)


class SourceState:
    """Tensors and values of a foreign checkpoint: *stored*, to be matched with a state, and `fill`, which copies tensors."""

    def __init__(self, checkpoint: Foreign) -> None:
        saved = StateWalker().walk(checkpoint.state)
        held: dict[str, list[TensorShard]] = {}
        for shard in saved.tensors:
            held.setdefault(shard.name, []).append(shard)
        facts = {name: (shards[0].dtype, shards[0].shape) for name, shards in held.items()}
        axes = {name: shards[0].axes for name, shards in held.items() if shards[0].axes is not None}
        where = f"{checkpoint.kind} at {checkpoint.path}"
        self.stored = Stored(facts, saved.alias, saved.values, where=where, axes=axes)
        self._held = held

    def fill(self, wanted: TensorShard) -> None:
        """Copy the elements of *wanted*, whose name is one of `stored`."""
        for shard in self._held[self.stored.alias.get(wanted.name, wanted.name)]:
            for there, source in boxes_of(shard):
                copy_shared(wanted, there, source)


@torch.no_grad()
def copy_shared(wanted: TensorShard, there: Box, source: torch.Tensor) -> None:
    """Copy the intersection of *wanted* and the box *there*, whose elements are *source*."""
    for box, into in boxes_of(wanted):
        shared = box.intersect(there)
        if shared is not None:
            _window(into, box, shared).copy_(_window(source, there, shared))


def boxes_of(shard: TensorShard) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield each box of a shard with its elements, in the shape of the box."""
    if len(shard.boxes) == 1:
        yield (
            shard.boxes[0],
            shard.data.view(shard.boxes[0].sizes) if shard.data.dim() != shard.boxes[0].ndim else shard.data,
        )
        return
    flat, at = shard.data.view(-1), 0
    for box in shard.boxes:
        yield box, flat[at : at + box.volume].view(box.sizes)
        at += box.volume


def _window(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return the elements of *part* in a *tensor* that holds those of *box*."""
    for axis, (start, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        tensor = tensor.narrow(axis, start - box.offsets[axis], size)
    return tensor
