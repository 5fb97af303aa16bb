"""Differences between a state and a checkpoint: collected leaf by leaf; at the end they are raised, or only reported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np
import torch

from aiockpt.adapters.addresses import span_of
from aiockpt.adapters.rename import near_key, refuse_idle
from aiockpt.adapters.stored import Stored, is_leaf
from aiockpt.adapters.tensors import has_memory_of_its_own
from aiockpt.errors import CheckpointError, StateMismatchError, UsageError
from aiockpt.format.names import Names, join_name, name_within, prefixes
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import Path

# A refusal by an object's own ``load_state_dict()`` is a difference that is found when the state is partly overwritten.


PARTLY_OVERWRITTEN = "The state is partly overwritten and not usable: build it anew, then load what fits it."


@contextmanager
def asking(owner: object, path: Path, where: str) -> Iterator[None]:
    """Context for a call of the ``load_state_dict()`` of *owner*, at *path* of the state.

    Args:
        where: the name of the checkpoint in messages.

    Raises:
        StateMismatchError: the call raised, which means that *owner* refuses the stored state.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        refusal = f"{join_name(path)}: {type(owner).__qualname__} refused what is stored: {error!r}"
        raise StateMismatchError(where, [refusal], PARTLY_OVERWRITTEN) from error


# Tensors of a state that share a part of their memory. The checkpoint must have equal values for the shared elements.
#
# (Overlapping views of one buffer, a tensor and its transpose or another view of its bytes, and a tensor whose own elements
# share memory: after `expand`, `unfold`, `as_strided`.) Otherwise the element that is filled last would win. So each is
# first read into separate memory. Then they are copied into place together, if the checkpoint has equal values for the
# shared elements, which is the case where they were saved like this.


_ALIGNMENT = 64
_ADVICE = (
    "Give each tensor memory of its own (clone()). The tensors of the state are partly overwritten: build it anew."
)


class Apart(msgspec.Struct, frozen=True, eq=False):
    """A tensor that shares memory with others, and the separate tensor that is read for it."""

    name: str
    live: torch.Tensor
    read: torch.Tensor


def separate(wanted: Sequence[TensorShard], where: str) -> tuple[list[TensorShard], list[Callable[[], None]]]:
    """Return *wanted* with separate memory for tensors that overlap, and steps that copy these into place once filled.

    Args:
        where: the name of the checkpoint in messages.
    """
    if _lie_apart(wanted):
        return list(wanted), []
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
    """Yield the indices of tensors whose address ranges, from first to last byte, overlap.

    A tensor whose own elements share memory is a cluster, too.
    """
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
    """Return whether all are dense and no two overlap, which is usual and cheap to check; False where that is unclear."""
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
        StateMismatchError: the checkpoint has different values for the same memory.
    """
    spans = [span_of(one.live) for one in cluster]
    # `set_` places a view in whole elements, so the distance from *base* must be a multiple of every element size.
    base = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
    trial = torch.empty(max(end for _, end in spans) - base, dtype=torch.uint8, device=cluster[0].live.device)
    views = [_view_at(one.live, base, trial) for one in cluster]
    for view, one in zip(views, cluster, strict=True):
        _copy(one.read, view)
    for view, one in zip(views, cluster, strict=True):
        # Bits are compared, not values: NaN does not equal itself.
        if not torch.equal(_bits(view), _bits(one.read)):
            others = ", ".join(other.name for other in cluster if other is not one)
            shared = f"shares a part of its memory with {others}" if others else "its elements share memory"
            raise StateMismatchError(where, [f"{one.name}: {shared}, and was saved with other values"], _ADVICE)
    for one in cluster:
        # Else torch refuses to change in place an inference tensor, or a leaf that requires gradients.
        with torch.inference_mode(one.live.is_inference()), torch.no_grad():
            _copy(one.read, one.live)


def _copy(source: torch.Tensor, into: torch.Tensor) -> None:
    """Fill *into*; only the first of elements that `expand` has multiplied: torch refuses to write to all of them."""
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in into.stride())
    into[once].copy_(source[once])


def _view_at(tensor: torch.Tensor, base: int, memory: torch.Tensor) -> torch.Tensor:
    """Return the view of *memory* (its first byte stands for address *base*) that has the layout of *tensor*."""
    place = (tensor.data_ptr() - base) // tensor.element_size()
    view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return view.set_(memory.untyped_storage(), place, tensor.shape, tensor.stride())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# The ``strict=`` of a load, also for parts of the state: it decides which differences are raised, and which only reported.


Strict = bool | Mapping[str, bool]


class Strictness:
    """Decides for each name of the state whether a difference there is raised.

    Args:
        strict: a bool for all names, or a mapping: its longest entry that is a prefix of a name decides; others are strict.

    Raises:
        UsageError: *strict* is neither.
    """

    def __init__(self, strict: Strict) -> None:
        self._parts = dict(strict) if isinstance(strict, Mapping) else {}
        self._rest = True if isinstance(strict, Mapping) else strict
        if not all(type(name) is str for name in self._parts) or not all(
            type(one) is bool for one in (self._rest, *self._parts.values())
        ):
            raise UsageError(
                f'strict= takes True, False, or a dict for parts of the state, {{"model": False}}: {strict!r}'
            )

    def __call__(self, name: str) -> bool:
        """Return whether a difference at *name* is raised."""
        return next((self._parts[part] for part in prefixes(name) if part in self._parts), self._rest)

    def refuse_idle(self, met: Collection[str]) -> None:
        """Refuse entries that match no name.

        Args:
            met: the names of all leaves, of the state or of the checkpoint alone, and all prefixes of them.

        Raises:
            UsageError: there are such entries; the message lists them.
        """
        refuse_idle("strict", set(self._parts) - set(met), met, "is nothing")


ADVICE = (
    'Change the state, rename with map={"name in the state": "name in the checkpoint"} or rename=, choose with only=, '
    "or load what fits with strict=False."
)
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
    """The differences that are not raised; the fields are those of `LoadTarget`."""

    unexpected: tuple[str, ...]
    unexpected_claimed: tuple[str, ...]
    problems: tuple[str, ...]


NONE = Judged((), (), ())


class Differences:
    """The differences found while a state is matched. Here *places* are names of the state, *names* those of the checkpoint.

    Attributes:
        is_strict: returns whether a difference at a place is raised.
        missing: places that the checkpoint lacks.
        optimizers: places of optimizers.
        used: names from which the state is filled, or that are known not to be needed.
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
        """Note that the state has a leaf at *place*."""
        if self._judges_parts:
            self._places.update(prefixes(place))

    def add(self, place: str, text: str) -> None:
        """Note a difference, as text."""
        self._problems.append(_Problem(place, text))

    def miss(self, place: str, reason: str) -> None:
        """Note that the checkpoint lacks the leaf at *place*, and why."""
        self.missing.append(place)
        self.add(place, reason)

    def hint(self, name: str) -> None:
        """Request that the last difference list the unused names of the checkpoint that are similar to *name*."""
        self._hints.append((self._problems[-1], name))

    def claim(self, name: str, place: str) -> None:
        """Note that everything below *name* in the checkpoint belongs to *place*: an unused rest is a difference."""
        self._claimed[name] = place

    def pass_over(self, name: str) -> None:
        """Note that the content below *name* in the checkpoint is known: an unused rest is not a difference."""
        self._passed_over.add(name)

    def known_names(self) -> Names:
        """Return all names of the checkpoint that something of the state refers to."""
        return Names((*self.used, *self._claimed, *self._passed_over))

    @property
    def are_none(self) -> bool:
        """Whether nothing differs, by a comparison of all names at once; False also where that is not certain.

        Each tensor of the checkpoint is used, and each value at the top is used or belongs to an object of the state.
        """
        stored, values = self._stored, self._stored.values
        return (
            not (self._problems or self._judges_parts)
            and type(values) is dict
            and self.used >= stored.tensors.keys()
            and self.used >= stored.alias.keys()
            and all(
                (name := name_within("", key)) in self.used or (name in self._claimed and is_leaf(node))
                for key, node in values.items()
            )
        )

    def judge(self, scope: Collection[str] | None, *, state_is_whole: bool) -> Judged:
        """Raise the differences that are strict; return the others.

        Args:
            scope: names below which unused entries of the checkpoint are reported; None for all.
            state_is_whole: False where other ranks may need entries that this rank does not use.

        Raises:
            StateMismatchError: there is a difference at a strict place.
            UsageError: an entry of ``strict`` matches nothing.
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
        """Return the place of the state that claims tensor or value *name*; None where there is none."""
        part = next((part for part in prefixes(name) if part in self._claimed), None)
        return None if part is None else self._claimed[part] + name[len(part) :]

    def _add_hints(self, unexpected: Sequence[str]) -> None:
        """Add similar unused names of the checkpoint to missing leaves: to as many as an error shows, the search is slow."""
        free = {part for name in unexpected for part in prefixes(name)}
        names = set(self._stored.names())
        there = {part for name in names for part in prefixes(name)}
        notes: dict[str, str] = {}
        # In the order of the error's lines, so that the limited number of hints goes to those that it shows.
        for problem, name in sorted(self._hints, key=lambda hint: str(hint[0])):
            wrong = next((part for part in reversed(prefixes(name)) if part not in there), "")
            if wrong and wrong not in notes and len(notes) < StateMismatchError.SHOWN:
                notes[wrong] = near_key(wrong, free) or self._other_key(wrong, free, names)
            problem.text += notes.get(wrong, "")

    def _other_key(self, wrong: str, free: Collection[str], names: Collection[str]) -> str:
        """Return how to rename *wrong*, where one unused part of the checkpoint has all that is missing below it."""
        below = [name[len(wrong) :] for _, name in self._hints if name.startswith(f"{wrong}.")]
        same = [part for part in free if below and all(f"{part}{rest}" in names for rest in below)]
        return f"; the checkpoint has it below {same[0]!r}: map={{{wrong!r}: {same[0]!r}}}" if len(same) == 1 else ""


def _not_here(name: str) -> str:
    return f"{name}: in the checkpoint but not in the state"
