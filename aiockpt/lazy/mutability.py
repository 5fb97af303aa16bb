"""Choice of the tensors of a state that a lazy save leaves in place; the others are copied in the call.

While a snapshot is copied beside the running program only optimizers wait for that. Forward itself changes buffers
(BatchNorm statistics, FP8 amax, router bias), teachers (momentum encoders) and embeddings with a ``max_norm``, an EMA is
updated by hand, and bare tensors are the user's. So only what is owned by an optimizer that waits is left in place
(`aiockpt.lazy.optimizer_owned`); the rest is copied at the call, each time into the same memory. What is on a device is
copied there, in the order of its compute stream: the call does not wait for it.

Tensors left in place are still compared (`aiockpt.lazy.version_check`). Where that comparison would miss changes, or report
unrelated ones, a tensor is copied at the call, too: one without a change counter (of inference mode), one that shares its
storage, and perhaps its counter, with an untrusted tensor, and one that once changed while it was being copied.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, compress
from operator import is_not
from typing import Any

import msgspec
import torch

from aiockpt.adapters.addresses import TensorMemory
from aiockpt.errors import UsageError
from aiockpt.format.names import join_name, list_names, split_name
from aiockpt.lazy.guards import COPIED, KINDS, KindKey
from aiockpt.lazy.optimizer_owned import OptimizerFinder, OptimizerOwned
from aiockpt.lazy.version_check import VersionCheck, VersionSources
from aiockpt.pipeline.device_copy import is_row_major
from aiockpt.runtime.accelerator import Accelerator
from aiockpt.runtime.cuda import Cuda
from aiockpt.state.shards import KnownState, ShardedState, TensorShard
from aiockpt.state.tree import Path

logger = logging.getLogger("aiockpt")

SHOWN = 12
"""Names, at most, in a line that a user copies into a program."""
PACKED_BYTES, ALIGNED_BYTES = 1 << 10, 16
"""Tensors of at most this size are copied together: torch spends 0.3 µs on each, a copy of 1 KiB takes 0.05."""


class Mutability:
    """Copies the tensors of walked states that may change.

    Args:
        mutable: names, or prefixes of names, of tensors that are copied at the call whatever owns them.
        immutable: the same of tensors that change only in optimizer steps although no optimizer owns them, such as the
            frozen weights under an adapter. The longer name wins.
        accelerator: copies what is on a device; None for CUDA's.
    """

    def __init__(
        self, mutable: Sequence[str] = (), immutable: Sequence[str] = (), accelerator: Accelerator | None = None
    ) -> None:
        self._accelerator = accelerator or Cuda()
        self._rules = {_path(name): False for name in immutable} | {_path(name): True for name in mutable}
        self._finder = OptimizerFinder()
        self._torn: frozenset[str] = frozenset()
        self._newly_torn: list[str] = []
        self._known = KnownState()

    def distrust(self, names: Iterable[str]) -> None:
        """Have tensors copied at the call from now on: they changed while they were being copied. Any thread."""
        self._newly_torn += names

    def split(self, walked: ShardedState, state: Mapping[str, Any], *, trusting: bool) -> SplitState:
        """Divide *walked* into tensors copied in the call and tensors left in place; reuses the last result while it holds.

        Args:
            trusting: also leave parameters in place that no optimizer is known to own.
        """
        tensors = walked.tensors
        if self._newly_torn:
            self._note_torn(tensors)
        if walked.known is not self._known:  # copies of one state at a time are kept
            self._known.drop(SplitState)
            self._known = walked.known
        asked = trusting, self._torn
        split = walked.known.find(SplitState, asked)
        if split is None or not split.fits(tensors):
            owned = OptimizerOwned(self._finder)
            owned.find(state, tensors, trusting=trusting)
            kinds = self._find_kinds(tensors, owned)
            split = walked.known.keep(SplitState(tensors, kinds, owned, self._accelerator), asked)
        return split

    def _note_torn(self, tensors: Sequence[TensorShard]) -> None:
        """Distrust what was torn, and log once how the program can declare it."""
        newly_torn, self._newly_torn = self._newly_torn, []
        torn = self._torn.union(newly_torn)
        if torn != self._torn:
            self._torn = torn
            logger.warning(
                "%s: changed while a snapshot was being copied, not in the step of an optimizer; from now on each save "
                "copies them in the call. Declare them from the start: Checkpointer(lazy=Lazy(mutable=%s))",
                list_names(sorted(torn)),
                _in_short(torn, [shard.name for shard in tensors]),
            )

    def _find_kinds(self, tensors: Sequence[TensorShard], owned: OptimizerOwned) -> list[KindKey]:
        rules = self._rules_for(tensors)
        kinds: list[KindKey] = [self._kind_of(shard, rule, owned) for shard, rule in zip(tensors, rules, strict=True)]
        copied = TensorMemory(
            (shard.data for shard, kind in zip(tensors, kinds, strict=True) if kind in COPIED), around=True
        )
        for index, shard in enumerate(tensors):
            if kinds[index] not in COPIED and copied.touches(shard.data):
                kinds[index] = "near"
        return kinds

    def _kind_of(self, shard: TensorShard, rule: bool | None, owned: OptimizerOwned) -> KindKey:
        """Return the kind of a tensor by itself; *rule* is the user's rule for it."""
        owner = owned.kind_of
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

    def _rules_for(self, tensors: Sequence[TensorShard]) -> Iterable[bool | None]:
        if not self._rules:
            return [None] * len(tensors)
        paths = [split_name(shard.name) for shard in tensors]
        self._check_rules(paths)
        return map(self._rule, paths)

    def _check_rules(self, paths: Sequence[Path]) -> None:
        for rule in self._rules:
            if not any(path[: len(rule)] == rule for path in paths):  # another rank may have it
                logger.warning("mutable=/immutable=: %r matches no tensor here (exact name or prefix)", join_name(rule))

    def _rule(self, path: Path) -> bool | None:
        """Return the user's rule for the tensor at *path*: that it may change, that it does not, or none."""
        fitting = [parts for parts in self._rules if path[: len(parts)] == parts]
        return self._rules[max(fitting, key=len)] if fitting else None


class SplitState:
    """The tensors of one state, divided into those copied in the call and those left in place.

    Attributes:
        kinds: by name; of a tensor with several parts here, that of the last part.
        in_place: the tensors that are not copied.
        copied_bytes: of those that are.
        copies: those of the last call; None before the first one, and where nothing is copied.
    """

    def __init__(
        self,
        tensors: tuple[TensorShard, ...],
        kinds: Sequence[KindKey],
        owned: OptimizerOwned,
        accelerator: Accelerator,
    ) -> None:
        self._tensors, self._owned, self._accelerator = tensors, owned, accelerator
        self.kinds = {shard.name: kind for shard, kind in zip(tensors, kinds, strict=True)}
        self._copied = {number: None for number, kind in enumerate(kinds) if kind in COPIED}
        self.copied_bytes = sum(tensors[number].data.nbytes for number in self._copied)
        self.in_place = tuple(shard for number, shard in enumerate(tensors) if number not in self._copied)
        self._sources = VersionSources(self.in_place, accelerator) if self.in_place else None
        self.copies: _Copies | None = None

    def fits(self, tensors: tuple[TensorShard, ...]) -> bool:
        """Return whether *tensors* are those of the last call; those that are copied may have moved to other memory."""
        known = self._tensors
        if len(known) != len(tensors) or not self._owned.is_current():
            return False
        # The walk's own sequence: no tensor has changed places, so nothing needs to be compared one by one.
        if tensors is not known:
            others = compress(range(len(known)), map(is_not, tensors, known))
            if not all(number in self._copied and _alike(tensors[number], known[number]) for number in others):
                return False
            self._tensors = tensors
        return True

    def copy(self, walked: ShardedState, *, reuse: bool) -> ShardedState:
        """Return *walked*, whose tensors fit, with a copy of each that anything but an optimizer step may change.

        Args:
            reuse: whether the copies of the last call are no longer read and may be overwritten.
        """
        if not self._copied:
            return walked
        if self.copies is None or not reuse:
            self.copies = _Copies(walked.tensors, list(self._copied), self._accelerator)
        else:
            self.copies.make_again(walked.tensors)
        return msgspec.structs.replace(walked, tensors=self.copies.shards)

    def note_versions(self) -> VersionCheck | None:
        """Return a check of the tensors left in place against their present versions; None if there are no such tensors."""
        return None if self._sources is None else VersionCheck(self._sources)


class _Copies:
    """Copies of some of the tensors of a state, made again at each save by a few calls for all of them.

    Args:
        numbers: of the tensors to copy.

    Attributes:
        shards: the whole state, with the copies in place of their originals.
    """

    def __init__(self, tensors: Sequence[TensorShard], numbers: Sequence[int], accelerator: Accelerator) -> None:
        self._numbers, self._accelerator = numbers, accelerator
        small = [number for number in numbers if _is_small(tensors[number].data, accelerator)]
        starts = [0, *accumulate(_aligned(tensors[number].data.nbytes) for number in small)]
        # Small ones lie side by side, so that one join of their sources fills all of them.
        self._starts = dict(zip(small, starts, strict=False))
        shards = list(tensors)
        with torch.inference_mode(False):  # or none but a call in that mode could copy into it again
            self._packed = torch.empty(starts[-1], dtype=torch.uint8)
            for number in numbers:
                live = tensors[number].data
                start = self._starts.get(number)
                if start is None:
                    copy = accelerator.clone(live)
                else:
                    copy = self._packed[start : start + live.nbytes].view(live.dtype).view(live.shape)
                shards[number] = msgspec.structs.replace(shards[number], data=copy)
        self.shards = tuple(shards)
        self._find_sources(tensors)
        self._copy_packed()

    def make_again(self, tensors: Sequence[TensorShard]) -> None:
        """Copy the present values of *tensors*: the same ones, or others like them.

        A walk returns the very same sequence only while all tensors are at their old addresses.
        """
        if tensors is not self._live:
            self._find_sources(tensors)
        self._copy_packed()
        if self._on_host[0]:
            with torch.no_grad():
                torch._foreach_copy_(*self._on_host)  # pyright: ignore[reportPrivateImportUsage]  no public one loops in C++
        for into, live in self._on_devices:
            self._accelerator.clone(live, into)

    def _copy_packed(self) -> None:
        # One pass of C code over windows at the tensors' addresses. To allocate the bytes in between, at most 1 KiB of each
        # tensor, costs less than a call for each: 15 us against 180 of 1,000 calls of memmove.
        data = b"".join(self._windows)
        ctypes.memmove(self._packed.data_ptr(), data, len(data))

    def _find_sources(self, tensors: Sequence[TensorShard]) -> None:
        self._live = tensors
        self._windows: list[Any] = []
        self._on_host: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._on_devices: list[tuple[torch.Tensor, torch.Tensor]] = []
        # What has become strided since is copied by torch; then all are, for the windows have no gaps.
        packed = all(_is_small(tensors[number].data, self._accelerator) for number in self._starts)
        for number in self._numbers:
            into, live = self.shards[number].data, tensors[number].data
            if packed and number in self._starts:
                window = (ctypes.c_ubyte * live.nbytes).from_address(live.data_ptr())
                self._windows += (window, bytes(_aligned(live.nbytes) - live.nbytes))
            elif self._accelerator.device_of(live) is None:
                self._on_host[0].append(into)
                self._on_host[1].append(live)
            else:
                self._on_devices.append((into, live))


def _is_small(tensor: torch.Tensor, accelerator: Accelerator) -> bool:
    """Return whether the bytes of *tensor* can be copied as they are, together with those of others."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and (tensor.device.type, tensor.layout, tensor.is_quantized) == ("cpu", torch.strided, False)
        and accelerator.device_of(tensor) is None
        and 0 < tensor.nbytes <= PACKED_BYTES
        and is_row_major(tensor)
    )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _alike(shard: TensorShard, known: TensorShard) -> bool:
    """Return whether both describe the same tensor, perhaps in other memory."""
    return (
        (shard.name, shard.dtype, shard.shape, shard.boxes) == (known.name, known.dtype, known.shape, known.boxes)
        and shard.data.shape == known.data.shape
        and shard.data.device == known.data.device
    )


def _in_short(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return prefixes that match *names* and no other *known* name; shorter ones if a line has no room for those."""
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
            f"{name!r} names no tensor: give names as `ckpt.describe().result().tensors` has them, or prefixes of them"
        )
    return split_name(name)
