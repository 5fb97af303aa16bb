"""Which tensors does only an optimizer step change? All others may change at any moment, forward included.

While a snapshot is copied beside the running program the barrier holds the optimizers, and nothing else. Forward itself
changes buffers (BatchNorm statistics, FP8 amax, router bias) and teachers (momentum encoders), an EMA is updated by hand,
and bare tensors are the user's. So only what an optimizer owns is trusted to be still; the rest is copied at the call
(DECISIONS 15), each time into the same memory. What is on a device is copied there, in the order of its compute stream:
the call does not wait for it.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from aiockpt.adapters.kinds import kind_of
from aiockpt.adapters.tensors import local_tensors
from aiockpt.errors import UsageError
from aiockpt.format.names import join_name, split_name
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.runtime.cuda import Cuda
from aiockpt.state.shards import ShardedState, TensorShard, are_same
from aiockpt.state.tree import Path

logger = logging.getLogger("aiockpt")


class Stillness:
    """Holds walked states still, and remembers how the last one was held.

    Args:
        mutable: names, or what they begin with, of tensors that are copied at the call whatever owns them.
        immutable: the same of tensors that change only behind the barrier although no optimizer owns them, such as the
            frozen weights under an adapter. The longer name wins.
        accelerator: copies what is on a device; None takes CUDA's.
    """

    def __init__(
        self, mutable: Sequence[str] = (), immutable: Sequence[str] = (), accelerator: Accelerator | None = None
    ) -> None:
        self._accelerator = accelerator or Cuda()
        self._rules = {_path(name): False for name in immutable} | {_path(name): True for name in mutable}
        self._seen: tuple[tuple[TensorShard, ...], bool] = ((), False)
        self._moving: list[int] = []
        self._held: tuple[TensorShard, ...] = ()

    def hold(self, walked: ShardedState, state: Mapping[str, Any], *, trusting: bool, reuse: bool) -> ShardedState:
        """Return *walked* with a copy of every tensor that something else than an optimizer step may change.

        Args:
            trusting: also leave parameters in place that no optimizer is known to own.
            reuse: whether the copies of the last call are read no more and may be overwritten.
        """
        if not self._knows(walked.tensors, trusting):
            self._moving = self._find_moving(walked.tensors, state, trusting)
            self._seen, self._held = (walked.tensors, trusting), ()
        if self._held and reuse:
            for index in self._moving:
                self._accelerator.clone(walked.tensors[index].data, self._held[index].data)
        elif self._moving:
            held = list(walked.tensors)
            for index in self._moving:
                shard = held[index]
                held[index] = msgspec.structs.replace(shard, data=self._accelerator.clone(shard.data))
            self._held = tuple(held)
        return msgspec.structs.replace(walked, tensors=self._held) if self._moving else walked

    def forget(self) -> None:
        """Let go of the last state."""
        self._seen, self._moving, self._held = ((), False), [], ()

    def _knows(self, tensors: Sequence[TensorShard], trusting: bool) -> bool:
        known, with_trust = self._seen
        return with_trust == trusting and are_same(tensors, known)

    def _find_moving(self, tensors: Sequence[TensorShard], state: Mapping[str, Any], trusting: bool) -> list[int]:
        owned = _Memory(_owned(state, trusting))
        moving = []
        paths = [split_name(shard.name) for shard in tensors] if self._rules else []
        for rule in self._rules:
            if not any(path[: len(rule)] == rule for path in paths):  # another rank may have it
                logger.warning("mutable or immutable: no tensor here is %r, or begins with it", join_name(rule))
        for index, shard in enumerate(tensors):
            ruled = self._rule(paths[index]) if self._rules else None
            if ruled or (ruled is None and shard.data not in owned):
                moving.append(index)
        return moving

    def _rule(self, path: Path) -> bool | None:
        """Return what the user says of the tensor at *path*: that it moves, that it does not, or nothing."""
        said = [parts for parts in self._rules if path[: len(parts)] == parts]
        return self._rules[max(said, key=len)] if said else None


def _path(name: str) -> Path:
    if not isinstance(name, str) or not name:
        raise UsageError(
            f"{name!r} names no tensor: give names as `describe().tensors` has them, or what they begin with"
        )
    return split_name(name)


class _Memory:
    """Where some tensors lie. A tensor is in it when all of it lies in one of them: a shard may begin anywhere in it."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        spans = sorted(_span(local) for tensor in tensors for local in local_tensors(tensor))
        self._starts = [start for start, _ in spans]
        self._ends = list(accumulate((end for _, end in spans), max))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        start, end = _span(tensor)
        place = bisect_right(self._starts, start) - 1
        return place >= 0 and end <= self._ends[place]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _owned(state: Mapping[str, Any], trusting: bool) -> Iterator[torch.Tensor]:
    """Yield what only optimizers change."""
    optimizers = list(_optimizers(state))
    for optimizer in optimizers or _living_optimizers():
        for group in optimizer.param_groups:
            yield from group["params"]
        for entry in optimizer.state.values():
            yield from (held for held in entry.values() if isinstance(held, torch.Tensor))
    if trusting:
        yield from _parameters(state)


def _optimizers(state: Mapping[str, Any]) -> Iterator[Optimizer]:
    for value in state.values():
        if kind_of(value) == "container":
            yield from _optimizers(value)
        elif isinstance(value, Optimizer):
            yield value


def _living_optimizers() -> list[Optimizer]:
    """Return the optimizers of this process: those of a state that names none are somewhere. Once for each structure.

    Asked for by what refers to their classes, as objects do. To hold all objects there are, even for a moment, breaks other
    threads: a tuple that is being made from an iterator cannot grow when anybody else has it.
    """
    classes: list[type] = [Optimizer]
    for known in classes:
        classes += known.__subclasses__()
    return [found for found in gc.get_referrers(*classes) if issubclass(type(found), Optimizer)]


def _parameters(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if kind_of(value) == "container":
            yield from _parameters(value)
        elif isinstance(value, nn.Module):
            yield from value.parameters()
