"""Choice of the tensors of a state that a lazy save leaves in place; the others are copied in the call.

While a snapshot is copied beside the running program only optimizers wait for that. Forward itself changes buffers
(BatchNorm statistics, FP8 amax, router bias), teachers (momentum encoders) and embeddings with a ``max_norm``, an EMA is
updated by hand, and bare tensors are the user's. So only what is owned by an optimizer that waits is left in place
(`aiockpt.lazy.optimizer_owned`); the rest is copied at the call, each time into the same memory. What is on a device is
copied there, in the order of its compute stream: the call does not wait for it.

What is left in place is compared all the same (`aiockpt.lazy.version_check`). So it is copied at the call, too, where that
would see nothing or too much: a tensor without a counter of its changes (of inference mode), one that shares its storage,
and perhaps its counter, with something that is not trusted, and one that was seen to change while it was being copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import is_not
from typing import Any

import msgspec
import torch

from aiockpt.adapters.addresses import TensorMemory
from aiockpt.errors import UsageError
from aiockpt.format.names import join_name, list_names, split_name
from aiockpt.lazy.guards import COPIED, KINDS, KindKey
from aiockpt.lazy.optimizer_owned import OptimizerOwned
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.runtime.cuda import Cuda
from aiockpt.state.shards import ShardedState, TensorShard
from aiockpt.state.tree import Path

logger = logging.getLogger("aiockpt")

SHOWN = 12
"""Names in a line that somebody is to copy into a program."""


class Mutability:
    """Copies what may change of walked states, and remembers what that was of the last one.

    Args:
        mutable: names, or what they begin with, of tensors that are copied at the call whatever owns them.
        immutable: the same of tensors that change only in optimizer steps although no optimizer owns them, such as the
            frozen weights under an adapter. The longer name wins.
        accelerator: copies what is on a device; None for CUDA's.

    Attributes:
        kinds: of the tensors of the last call, by name; of one with several parts here, that of the last part.
        in_place: what was not copied at the last call; one tuple for as long as these are the same, where they were.
    """

    def __init__(
        self, mutable: Sequence[str] = (), immutable: Sequence[str] = (), accelerator: Accelerator | None = None
    ) -> None:
        self._accelerator = accelerator or Cuda()
        self._rules = {_path(name): False for name in immutable} | {_path(name): True for name in mutable}
        self._owned = OptimizerOwned()
        self._torn: frozenset[str] = frozenset()
        self._newly_torn: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Release the last state."""
        self.kinds: dict[str, KindKey] = {}
        self.in_place: tuple[TensorShard, ...] = ()
        self._seen: tuple[tuple[TensorShard, ...], bool] = ((), False)
        self._copied: dict[int, torch.device | None] = {}
        self._copies: tuple[TensorShard, ...] = ()
        self._owned.forget()

    def distrust(self, names: Iterable[str]) -> None:
        """Have tensors copied at the call from now on: they changed while they were being copied. Any thread."""
        self._newly_torn += names

    def copy_mutable(
        self, walked: ShardedState, state: Mapping[str, Any], *, trusting: bool, reuse: bool
    ) -> ShardedState:
        """Return *walked* with a copy of every tensor that something else than an optimizer step may change.

        Args:
            trusting: also leave parameters in place that no optimizer is known to own.
            reuse: whether the copies of the last call are read no more and may be overwritten.
        """
        tensors = walked.tensors
        if self._newly_torn:
            self._note_torn(tensors)
        if not self._knows(tensors, trusting):
            self._owned.find(state, tensors, trusting=trusting)
            mutable_numbers = self._find_mutable(tensors)
            self._copied = {index: self._accelerator.device_of(tensors[index].data) for index in mutable_numbers}
            self.in_place = tuple(shard for index, shard in enumerate(tensors) if index not in self._copied)
            self._copies = ()
        self._seen = (tensors, trusting)
        if not self._copied:
            return walked
        if self._copies and reuse:
            self._copy(tensors)
        else:
            self._copies = self._clone(tensors)
        return msgspec.structs.replace(walked, tensors=self._copies)

    def _copy(self, tensors: Sequence[TensorShard]) -> None:
        """Copy what may change into the copies of the last call."""
        on_host: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index, device in self._copied.items():
            into, live = self._copies[index].data, tensors[index].data
            if device is None:
                on_host[0].append(into)
                on_host[1].append(live)
            else:
                self._accelerator.clone(live, into)
        if on_host[0]:
            with torch.no_grad():
                torch._foreach_copy_(*on_host)  # pyright: ignore[reportPrivateImportUsage]  no public one loops in C++

    def _clone(self, tensors: Sequence[TensorShard]) -> tuple[TensorShard, ...]:
        copies = list(tensors)
        for index in self._copied:
            shard = copies[index]
            with torch.inference_mode(False):  # or none but a call in that mode could copy into it again
                copies[index] = msgspec.structs.replace(shard, data=self._accelerator.clone(shard.data))
        return tuple(copies)

    def _note_torn(self, tensors: Sequence[TensorShard]) -> None:
        """Distrust what was torn, and log once how the program can declare it."""
        newly_torn, self._newly_torn = self._newly_torn, []
        torn = self._torn.union(newly_torn)
        if torn != self._torn:
            self._torn = torn
            self._seen = ((), False)
            logger.warning(
                "%s changed while a snapshot was being copied, not in the step of an optimizer: from now on the call of a "
                "save copies what did. Say so from the start: Checkpointer(mutable=%s)",
                list_names(sorted(torn)),
                _in_short(torn, [shard.name for shard in tensors]),
            )

    def _knows(self, tensors: Sequence[TensorShard], trusting: bool) -> bool:
        """Return whether *tensors* are the last ones, but that some that are copied may be in other memory."""
        known, with_trust = self._seen
        if with_trust != trusting or len(known) != len(tensors) or not self._owned.is_current():
            return False
        others = compress(range(len(known)), map(is_not, tensors, known))
        return all(index in self._copied and _alike(tensors[index], known[index]) for index in others)

    def _find_mutable(self, tensors: Sequence[TensorShard]) -> list[int]:
        said = self._said(tensors)
        kinds: list[KindKey] = [self._kind_of(shard, rule) for shard, rule in zip(tensors, said, strict=True)]
        copied = TensorMemory(
            (shard.data for shard, kind in zip(tensors, kinds, strict=True) if kind in COPIED), around=True
        )
        for index, shard in enumerate(tensors):
            if kinds[index] not in COPIED and copied.touches(shard.data):
                kinds[index] = "near"
        self.kinds = {shard.name: kind for shard, kind in zip(tensors, kinds, strict=True)}
        return [index for index, kind in enumerate(kinds) if kind in COPIED]

    def _kind_of(self, shard: TensorShard, rule: bool | None) -> KindKey:
        """Return the kind of a tensor by itself; *rule* is the user's rule for it."""
        owner = self._owned.kind_of
        fits: dict[KindKey, Callable[[], bool]] = {
            "named": lambda: rule is True,
            "torn": lambda: shard.name in self._torn,
            "uncounted": shard.data.is_inference,
            "immutable": lambda: rule is False,
            "unhooked": lambda: owner(shard.data) == "unhooked",
            "owned": lambda: owner(shard.data) == "owned",
            "other": lambda: True,
        }
        return next(kind.key for kind in KINDS if kind.key in fits and fits[kind.key]())

    def _said(self, tensors: Sequence[TensorShard]) -> Iterable[bool | None]:
        if not self._rules:
            return [None] * len(tensors)
        paths = [split_name(shard.name) for shard in tensors]
        self._check_rules(paths)
        return map(self._rule, paths)

    def _check_rules(self, paths: Sequence[Path]) -> None:
        for rule in self._rules:
            if not any(path[: len(rule)] == rule for path in paths):  # another rank may have it
                logger.warning("mutable or immutable: no tensor here is %r, or begins with it", join_name(rule))

    def _rule(self, path: Path) -> bool | None:
        """Return the user's rule for the tensor at *path*: that it may change, that it does not, or none."""
        said = [parts for parts in self._rules if path[: len(parts)] == parts]
        return self._rules[max(said, key=len)] if said else None


def _alike(shard: TensorShard, known: TensorShard) -> bool:
    """Return whether one is what the other was, in other memory."""
    return (
        (shard.name, shard.dtype, shard.shape, shard.boxes) == (known.name, known.dtype, known.shape, known.boxes)
        and shard.data.shape == known.data.shape
        and shard.data.device == known.data.device
    )


def _in_short(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return what *names* begin with, and nothing else that is *known*, where a line has room for that."""
    chosen = sorted(set(names))
    others = {
        path[:size] for path in map(split_name, set(known).difference(chosen)) for size in range(1, len(path) + 1)
    }
    paths = list(map(split_name, chosen))
    found = [next((path[:size] for size in range(1, len(path)) if path[:size] not in others), path) for path in paths]
    for size in range(max(map(len, found)), 0, -1):
        found = list(dict.fromkeys(path[:size] for path in found))
        if len(found) <= SHOWN:
            break
    return list(map(join_name, found))


def _path(name: str) -> Path:
    if not isinstance(name, str) or not name:
        raise UsageError(
            f"{name!r} names no tensor: give names as `describe().tensors` has them, or what they begin with"
        )
    return split_name(name)
