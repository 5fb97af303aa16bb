"""Differences between a state and a checkpoint, and which of them are raised: collected by leaf, judged at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
import torch

from aiockpt.adapters.addresses import span_of
from aiockpt.adapters.rename import near_key, refuse_idle
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.tensors import has_memory_of_its_own
from aiockpt.errors import CheckpointError, StateMismatchError, UsageError
from aiockpt.format.names import Names, join_name, prefixes
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import Path

# What an object refuses in its own ``load_state_dict()`` is a difference, found when the state is partly overwritten.


PARTLY_OVERWRITTEN = "The state is partly overwritten and not usable: build it anew, then load what fits it."


@contextmanager
def asking(owner: object, path: Path, where: str) -> Iterator[None]:
    """Run the own loading of *owner*, at *path* of the state, in this context.

    Args:
        where: what to call the checkpoint.

    Raises:
        StateMismatchError: it refuses.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        refusal = f"{join_name(path)}: {type(owner).__qualname__} refused what is stored: {error!r}"
        raise StateMismatchError(where, [refusal], PARTLY_OVERWRITTEN) from error


# Tensors of a state that share a part of their memory. What one gets must be what the other gets.
#
# (Views of one buffer that lie across each other, a tensor beside its transpose or beside another view of its bytes, and
# one whose own elements share memory: after `expand`, `unfold`, `as_strided`.) Otherwise the element filled last would win.
# So each is read into memory of its own first, and they are put in place together, only where the checkpoint has the same
# values for what they share, as it has when they were saved so.


_ALIGNMENT = 64
_ADVICE = (
    "Give each tensor memory of its own (clone()). The tensors of the state are partly overwritten: build it anew."
)


class Apart(msgspec.Struct, frozen=True, eq=False):
    """A tensor that shares memory with others, and what is read for it."""

    name: str
    live: torch.Tensor
    read: torch.Tensor


def separate(wanted: Sequence[TensorShard], where: str) -> tuple[list[TensorShard], list[Callable[[], None]]]:
    """Return *wanted* with memory of their own for those that overlap, and what puts these in place when they are filled.

    Args:
        where: what to call the checkpoint in messages.
    """
    apart = list(wanted)
    steps: list[Callable[[], None]] = []
    for numbers in _clusters(wanted):
        cluster = []
        for number in numbers:
            shard = wanted[number]
            read = torch.empty(shard.data.shape, dtype=shard.data.dtype, device=shard.data.device)
            apart[number] = msgspec.structs.replace(shard, data=read)
            cluster.append(Apart(shard.name, shard.data, read))
        steps.append(partial(_put_together, cluster, where))
    return apart, steps


def _clusters(wanted: Sequence[TensorShard]) -> Iterator[list[int]]:
    """Yield the numbers of those whose memory overlaps, by the addresses between their first and last bytes.

    One by itself, where its own elements share memory.
    """
    if _lie_apart(wanted):
        return
    spans = sorted(
        (str(shard.data.device), *span_of(shard.data), number)
        for number, shard in enumerate(wanted)
        if shard.data.numel()
    )
    cluster: list[int] = []
    place, reach = "", 0
    for device, start, end, number in spans:
        if device != place or start >= reach:
            if _share(cluster, wanted):
                yield cluster
            cluster, place, reach = [], device, end
        cluster.append(number)
        reach = max(reach, end)
    if _share(cluster, wanted):
        yield cluster


def _lie_apart(wanted: Sequence[TensorShard]) -> bool:
    """Return whether all are dense and no address is in two of them, as is usual and quick to see; False where unsure."""
    tensors = [shard.data for shard in wanted]
    if not all(tensor.is_contiguous() for tensor in tensors):
        return False
    starts = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    ends = starts + np.array([tensor.nbytes for tensor in tensors], np.uint64)
    order = np.argsort(starts)
    return bool(np.all(ends[order[:-1]] <= starts[order[1:]]))


def _share(cluster: list[int], wanted: Sequence[TensorShard]) -> bool:
    return len(cluster) > 1 or any(not has_memory_of_its_own(wanted[number].data) for number in cluster)


def _put_together(cluster: list[Apart], where: str) -> None:
    """Copy all of a cluster into place.

    Raises:
        StateMismatchError: they have different values for the same memory.
    """
    spans = [span_of(one.live) for one in cluster]
    base = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    trial = torch.empty(max(end for _, end in spans) - base, dtype=torch.uint8, device=cluster[0].live.device)
    views = [_view_at(one.live, base, trial) for one in cluster]
    for view, one in zip(views, cluster, strict=True):
        _copy(one.read, view)
    for view, one in zip(views, cluster, strict=True):
        if not torch.equal(_bits(view), _bits(one.read)):
            others = ", ".join(other.name for other in cluster if other is not one)
            shared = f"shares a part of its memory with {others}" if others else "its elements share memory"
            raise StateMismatchError(where, [f"{one.name}: {shared}, and was saved with other values"], _ADVICE)
    for one in cluster:
        with torch.inference_mode(one.live.is_inference()), torch.no_grad():
            _copy(one.read, one.live)


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    """Fill *into*; of elements that `expand` made of one, only the first: torch refuses to write to them all."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in into.stride())
    into[once].copy_(source[once])


def _view_at(tensor: torch.Tensor, base: int, memory: torch.Tensor) -> torch.Tensor:
    """Return the view of *memory*, whose first byte stands for the address *base*, that *tensor* is of its own."""
    place = (tensor.data_ptr() - base) // tensor.element_size()
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(memory.untyped_storage(), place, tensor.shape, tensor.stride())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# The ``strict=`` of a load, for parts of the state: the differences that it raises, and those that it only reports.


Strict = bool | Mapping[str, bool]


class Strictness:
    """Decides for each name of the state whether a difference there is raised.

    Args:
        strict: for all of it, or for parts: the longest entry that a name begins with decides, and what has none is strict.

    Raises:
        UsageError: it is neither.
    """

    def __init__(self, strict: Strict) -> None:
        self._parts = dict(strict) if isinstance(strict, Mapping) else {}
        self._rest = True if isinstance(strict, Mapping) else strict
        if not all(type(name) is str for name in self._parts) or not all(
            type(one) is bool for one in (self._rest, *self._parts.values())
        ):
            raise UsageError(
                f'strict= takes True, False, or which for parts of the state, {{"model": False}}: {strict!r}'
            )

    def __call__(self, name: str) -> bool:
        """Return whether a difference at *name* is raised."""
        return next((self._parts[part] for part in prefixes(name) if part in self._parts), self._rest)

    def refuse_idle(self, met: Collection[str]) -> None:
        """Refuse entries that are nothing here.

        Args:
            met: the name of every leaf of the state, or that only the checkpoint has in it, and of all that they are in.

        Raises:
            UsageError: says which.
        """
        refuse_idle("strict", set(self._parts) - set(met), met, "is nothing")


ADVICE = "Change the state, rename with map= or rename=, choose with only=, or load what fits with strict=False."
OTHER_OPTIMIZER = (
    ' Where optimizers have changed their make-up, optimizer_state="by_parameter" has the state of each parameter follow it '
    "(docs/guide/optimizers.md)."
)


class _Problem(msgspec.Struct):
    """A difference at a place of the state."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class Judged(msgspec.Struct, frozen=True):
    """What did not fit, and is not raised; the fields are those of `LoadTarget`."""

    unexpected: tuple[str, ...]
    unexpected_claimed: tuple[str, ...]
    problems: tuple[str, ...]


class Differences:
    """Differences found while a state is matched. Names of the state are *places* here, *names* are the checkpoint's.

    Attributes:
        is_strict: says of each place whether a difference there is raised.
        missing: places that the checkpoint does not have.
        optimizers: places at which there are optimizers.
        used: names that something of the state is filled from, or that it is known not to need.
    """

    def __init__(self, stored: Stored, strict: Strict) -> None:
        self.is_strict = Strictness(strict)
        self.missing: list[str] = []
        self.optimizers: set[str] = set()
        self.used: set[str] = set()
        self._judges_parts = isinstance(strict, Mapping)
        self._stored = stored
        self._problems: list[_Problem] = []
        self._places: set[str] = set()
        self._claimed: dict[str, str] = {}
        self._passed_over: set[str] = set()
        self._hints: list[tuple[_Problem, str]] = []

    def note_place(self, place: str) -> None:
        """Note that the state has something there."""
        if self._judges_parts:
            self._places.update(prefixes(place))

    def add(self, place: str, text: str) -> None:
        """Note a difference, in words."""
        self._problems.append(_Problem(place, text))

    def miss(self, place: str, reason: str) -> None:
        """Note that the checkpoint has nothing for what is there, and why."""
        self.missing.append(place)
        self.add(place, reason)

    def hint(self, name: str) -> None:
        """Have the last difference list the unused names of the checkpoint that are near *name*, which was not found."""
        self._hints.append((self._problems[-1], name))

    def claim(self, name: str, place: str) -> None:
        """Note that what the checkpoint has below *name* belongs to *place*, so that a rest is a difference."""
        self._claimed[name] = place

    def pass_over(self, name: str) -> None:
        """Note that what the checkpoint has below *name* is known, and not all of it wanted: the rest is no difference."""
        self._passed_over.add(name)

    def known_names(self) -> Names:
        """Return all names of the checkpoint that something of the state refers to."""
        return Names((*self.used, *self._claimed, *self._passed_over))

    def judge(self, scope: Collection[str] | None, *, state_is_whole: bool) -> Judged:
        """Return what did not fit.

        Args:
            scope: names below which unused entries of the checkpoint are reported; None for all.
            state_is_whole: False where other ranks may need what this one does not.

        Raises:
            StateMismatchError: something differs where that is strict.
            UsageError: ``strict`` names nothing.
        """
        unexpected = list(self._stored.unused(self.used, self._passed_over, self.known_names()))
        if scope is not None:
            unexpected = [name for name in unexpected if not set(scope).isdisjoint(prefixes(name))]
        if self._hints and unexpected:
            self._add_hints(unexpected)
        spare = {name: place for name in unexpected if (place := self._place_of(name)) is not None}
        if self._judges_parts and state_is_whole:
            self.is_strict.refuse_idle(self._places | {part for place in spare.values() for part in prefixes(place)})
        strictly_spare = [name for name, place in spare.items() if self.is_strict(place)]
        problems = list(map(str, self._problems))
        raised = {str(problem): problem.place for problem in self._problems if self.is_strict(problem.place)}
        if state_is_whole:
            problems += map(_not_here, spare)
            raised |= {_not_here(name): spare[name] for name in strictly_spare}
        if raised:
            met = {part for place in raised.values() for part in prefixes(place)}
            advice = ADVICE if met.isdisjoint(self.optimizers) else ADVICE + OTHER_OPTIMIZER
            raise StateMismatchError(self._stored.where, sorted(raised), advice)
        return Judged(tuple(unexpected), tuple(strictly_spare), tuple(problems))

    def _place_of(self, name: str) -> str | None:
        """Return where in the state tensor or value *name* would be; None where nothing claims it."""
        part = next((part for part in prefixes(name) if part in self._claimed), None)
        return None if part is None else self._claimed[part] + name[len(part) :]

    def _add_hints(self, unexpected: Sequence[str]) -> None:
        """Add to what the checkpoint lacks the names that it has unused and that may be meant."""
        free = {part for name in unexpected for part in prefixes(name)}
        there = {part for name in self._stored.names() for part in prefixes(name)}
        notes: dict[str, str] = {}
        for problem, name in self._hints:
            wrong = next((part for part in reversed(prefixes(name)) if part not in there), "")
            if wrong and wrong not in notes:
                notes[wrong] = near_key(wrong, free)
            problem.text += notes.get(wrong, "")


def _not_here(name: str) -> str:
    return f"{name}: in the checkpoint but not in the state"
