"""Matching of a state's leaves with a checkpoint's entries.

Adapters request the leaves of an object; the matcher finds each under its name in the checkpoint, notes which tensors to
fill, and collects every difference. The state does not change before `LoadTarget.apply`, except that the engine fills the
tensors of `LoadTarget.wanted`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import msgspec
import torch

from aiockpt.adapters.differences import NONE, Differences, Judged, Strict, asking, separate
from aiockpt.adapters.local_shards import FlatRange, whole_boxes
from aiockpt.adapters.optimizer_forms import SavedOptimizer
from aiockpt.adapters.plain_values import in_words
from aiockpt.adapters.rename import Rename, Renamed, Renaming, Rules, refuse_idle
from aiockpt.adapters.stored import FoundNode, Stored, find_flat, find_node, members_of
from aiockpt.adapters.tensors import (
    facts_of,
    fits,
    hold,
    memory_key,
    misfit,
    new_tensor,
    plain_addresses,
    shards_of,
    torch_dtype,
)
from aiockpt.adapters.value_requests import ValueRequests
from aiockpt.errors import UsageError
from aiockpt.format.dtypes import torch_name
from aiockpt.format.names import dotted, join_name, list_names, prefixes, split_name
from aiockpt.state.codecs import CodecRegistry
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import TAG, Node, Path, damaged

_LONG_WAY = -1
"""Value in `Matcher._places` for a tensor at that address that is filled in another way than by `Matcher.fill_plain`."""

# The result of the match: tensors to fill, and steps to apply when they are.


class LoadTarget(msgspec.Struct, eq=False, kw_only=True):
    """A load that is ready to run.

    Attributes:
        wanted: the tensors to fill; ``data`` is filled in place, ``name`` is the name in the checkpoint.
        missing: names of the state that the checkpoint lacks.
        unexpected: names of the checkpoint that the state of this rank lacks.
        unexpected_claimed: those of them that lie below a strict object of the state, so that they are a difference
            unless another rank has them.
        left_out: names of the state that stay as they are, because the checkpoint was made without them.
        problems: the differences that are not raised, as text; empty unless ``strict`` is False there.
        notes: reports of what is removed or replaced, in words; what refuses to be filled is added by `apply`.
        rewritten: the leaves that are overwritten, by name or by path.
        steps: the remaining steps of `apply`.
        may_refuse: whether `apply` calls objects that may refuse a value; all ranks must be notified of a refusal.
        renamed: name in the checkpoint → name in the state, of the leaves that rules have renamed.
    """

    wanted: tuple[TensorShard, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unexpected_claimed: tuple[str, ...]
    left_out: tuple[str, ...]
    problems: tuple[str, ...]
    notes: list[str]
    rewritten: Sequence[str | Path]
    steps: list[Callable[[], object]]
    may_refuse: bool
    renamed: Mapping[str, str] = {}

    @property
    def written(self) -> frozenset[str]:
        """The names of the leaves that are overwritten: joined on access, which only a damaged step needs."""
        return frozenset(one if isinstance(one, str) else join_name(one) for one in self.rewritten)

    def __repr__(self) -> str:
        return f"<LoadTarget of {len(self.wanted)} tensors, {len(self.missing)} missing, {len(self.steps)} to apply>"

    def apply(self) -> None:
        """Set everything but tensors, once all tensors are filled. Idempotent; a step that raised is retried.

        All values are decoded before the first object changes.
        """
        while self.steps:
            self.steps[0]()
            del self.steps[0]


class MakeUp(msgspec.Struct, frozen=True):
    """What became of the groups of an optimizer that has a scheduler.

    Attributes:
        lined_up: whether they are the saved ones, in the same order.
        goes_on: the numbers of those with a rate of the checkpoint.
    """

    lined_up: bool = False
    goes_on: Collection[int] = ()


class Matcher:
    """One load being prepared; see `aiockpt.adapters.target.open_target` for the arguments.

    Attributes:
        schedulers: the learning rate schedulers of the state that are loaded, with their paths.
        make_ups: of their optimizers, as far as these are loaded, by identity.
    """

    def __init__(
        self,
        stored: Stored,
        *,
        only: Sequence[str] | None,
        strict: Strict,
        rename: Rename | None,
        codecs: CodecRegistry,
        judge_unexpected: bool = True,
        optimizers: Sequence[SavedOptimizer] | None = None,
    ) -> None:
        self.optimizers = optimizers
        self.schedulers: list[tuple[Any, Path]] = []
        self.make_ups: dict[int, MakeUp] = {}
        self._differences = Differences(stored, strict)
        self._judge_unexpected = judge_unexpected
        self.stored = stored
        self._sorted_names: list[str] | None = None
        self._last: tuple[Path, str] = ((), "")
        self._only = None if only is None else {split_name(name): name for name in only}
        self._seen: set[str] = set()
        self._names: set[str] = set()
        self._rename: Renaming | Renamed | None = None
        if rename is not None:
            self._rename = Renamed(rename, stored.names()) if isinstance(rename, Rules) else Renaming(rename)
        self.renames = rename is not None
        self.asks_for_all = only is None and rename is None and not isinstance(strict, Mapping)
        self._wanted: list[TensorShard] = []
        # Keeps the tensor alive, so that its address is not used for another one.
        self._filled: dict[Hashable, tuple[str, str, torch.Tensor]] = {}
        self._places: dict[int, int] = {}
        self._left_out: list[str] = []
        self._may_refuse = False
        self._rewritten: list[str | Path] = []
        self._notes: list[str] = []
        self.values = ValueRequests(self, codecs)
        self._steps: list[Callable[[], object]] = []
        self._last_steps: list[Callable[[], object]] = []

    # ---------------------------------------------------------------- names

    def name_of(self, path: Path) -> str:
        """Return the name of the leaf at *path* in the state; that of the last leaf is cached."""
        if path is not self._last[0]:
            self._last = path, join_name(path)
        return self._last[1]

    def stored_name(self, path: Path) -> str:
        """Return the name in the checkpoint of the leaf at *path* of the state."""
        name = self.name_of(path)
        if self._rename is None:
            return name
        self._rename.note_path(path)
        return self._rename(name)

    def rename_keys(self, path: Path, node: Node, own: Any) -> Node | None:
        """Return the *node* of an object's state with the keys of its dicts renamed to those of its present state, *own*.

        Dicts that both have keys which the other lacks are a mismatch: None. The object would refuse them, or ignore them.
        """
        if self._rename is None:
            return node
        problems: list[str] = []
        here, there = dotted(self.name_of(path)), dotted(self.stored_name(path))
        renamed = _rename_keys(self._rename, node, own, here, there, problems)
        for problem in problems:
            self.mismatch(path, problem)
        return None if problems else renamed

    def selects(self, path: Path) -> bool:
        """Return whether ``only`` lets the leaf at *path* be loaded."""
        return self.asks_for_all or self._asks_for(path)

    def _asks_for(self, path: Path) -> bool:
        if self._rename is not None:
            self._rename.note_path(path)
        self._differences.note_place(self.name_of(path))
        if self._only is None:
            return True
        self._names.update(prefixes(self.name_of(path)))
        hits = [name for parts, name in self._only.items() if path[: len(parts)] == parts]
        self._seen.update(hits)
        return bool(hits)

    def touches(self, path: Path) -> bool:
        """Return whether ``only`` lets the object at *path*, or a part of it, be loaded."""
        return not self._only or any(parts[: len(path)] == path[: len(parts)] for parts in self._only)

    def selects_whole(self, path: Path, why: str) -> bool:
        """Return the same for an object that loads as a whole or not at all.

        Raises:
            UsageError: ``only`` names a part of it.
        """
        if self.selects(path):
            return True
        for parts, name in (self._only or {}).items():
            if parts[: len(path)] == path:
                raise UsageError(f"only={name!r} is a part of {join_name(path)!r}, which loads as a whole: {why}")
        return False

    # ---------------------------------------------------------------- nodes

    def find(self, path: Path) -> FoundNode | None:
        """Return the node of the leaf at *path*, or None when the checkpoint has none."""
        parts = path if self._rename is None else split_name(self.stored_name(path))
        return find_node(self.stored.values, parts)

    def find_own(self, path: Path) -> FoundNode | None:
        """Return the node of this rank's own value at *path*, or None."""
        return find_flat(self.stored.per_rank, self.stored_name(path))

    def find_of_another(self, path: Path) -> FoundNode | None:
        """Return the node at *path* of the saved rank from which a rank without a node derives its own, or None."""
        ranks = max(self.stored.saved_world_size, 1)
        return find_flat(self.stored.every_rank.get(str(self.stored.rank % ranks)), self.stored_name(path))

    def find_tagged(self, path: Path, kind: str) -> dict[str, Any] | None:
        """Return the tagged object of *kind* at *path*, or None."""
        found = self.find(path)
        node = None if found is None else found.node
        return node if type(node) is dict and node.get(TAG) == kind else None

    def note(self, what: str) -> None:
        """Report a change that the load makes besides those requested."""
        self._notes.append(what)

    # ---------------------------------------------------------------- tensors

    def want(
        self, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None, *, stored: str | None = None
    ) -> bool:
        """Request that *tensor* be filled from the checkpoint; return whether it will be.

        Args:
            flat: the range of the original tensor that a 1-D *tensor* holds; None for a whole tensor.
            stored: its name in the checkpoint, if not `stored_name` of *path*.
        """
        if not self.selects(path) or not self.enter(path, stored or self.stored_name(path), tensor, flat):
            return False
        self.rewrites(path)
        return True

    def want_plain(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Request ordinary tensors that fit those stored under their own *names*, as most do; return which will be filled.

        The fast path of `want`, for many at once; pass all others to `want`.
        """
        taken = self.fill_plain(names, tensors)
        self._rewritten += compress(names, taken)
        return taken

    def are_plain(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether `fill_plain` will fill all of *tensors*."""
        addresses = plain_addresses(tensors, list(map(self.stored.tensors.get, names))) if names else []
        return all(addresses) and len({*addresses}) == len(names) and self._places.keys().isdisjoint(addresses)

    def fill_plain(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Request those of *tensors* that fit the stored *names*, whatever `selects` returns; return which."""
        if not self.asks_for_all:
            # `only=`, renaming and a ``strict=`` mapping refuse entries that match no name: only `want` notes names.
            return [False] * len(names)
        # An alias is not in `tensors` and takes the long way: tied names are one tensor in `_wanted` and in `whole`.
        facts = list(map(self.stored.tensors.get, names))
        taken = []
        for name, tensor, known, address in zip(names, tensors, facts, plain_addresses(tensors, facts), strict=True):
            place = len(self._wanted)
            # The address is entered last, only for a tensor that is then appended: *place* is its index in `_wanted`.
            if known is None or not address or self._places.setdefault(address, place) != place:
                taken.append(False)
                continue
            self._wanted.append(TensorShard(name, known[0], known[1], whole_boxes(known[1]), tensor))
            self.values.whole.setdefault(name, tensor)
            taken.append(True)
        self._differences.used.update(compress(names, taken))
        return taken

    def skip(self, name: str) -> None:
        """Skip tensor *name* of the checkpoint, which this rank does not need: it is not a difference."""
        self._differences.used.add(name)

    def share(self, path: Path, tensor: torch.Tensor, name: str) -> None:
        """Note that the owner of *tensor*, at *path*, fills it from *name*: tensors that share its memory must agree."""
        stored_as = self.stored.same_tensor(name)
        key = self._memory_of([tensor])
        other, other_stored_as, _ = self._filled.setdefault(key, (self.name_of(path), stored_as, tensor))
        if key and other_stored_as != stored_as:
            self.problem(self.name_of(path), _two_tensors(other, other_stored_as, name))

    def _memory_of(self, tensors: Iterable[torch.Tensor]) -> tuple[Hashable, ...]:
        """Return the key of some tensors in `_filled`; add the entries of tensors at their addresses from the fast path."""
        keys = []
        for tensor in tensors:
            if (key := memory_key(tensor)) is not None:
                keys.append(key)
                place = self._places.setdefault(tensor.data_ptr(), _LONG_WAY)
                if place != _LONG_WAY:
                    shard = self._wanted[place]
                    self._filled.setdefault((memory_key(shard.data),), (shard.name, shard.name, shard.data))
        return tuple(keys)

    def names_below(self, name: str) -> list[str]:
        """Return the tensors of the checkpoint whose names begin with *name* and a dot, in order."""
        if self._sorted_names is None:
            self._sorted_names = sorted({*self.stored.tensors, *self.stored.alias})
        # In ASCII the slash follows the dot, so the names between the two are those that begin with *name* and a dot.
        start, end = (bisect_left(self._sorted_names, f"{name}{end}") for end in (".", "/"))
        return self._sorted_names[start:end]

    def fill(
        self,
        path: Path,
        name: str,
        live: Any,
        like: torch.Tensor | torch.device,
        flat: FlatRange | None = None,
        *,
        beside: str | None = None,
    ) -> torch.Tensor:
        """Request that *live* be filled from tensor *name* if it fits, else a new tensor; return which. Ignores `selects`.

        Args:
            like: the tensor whose device (and, for the same shape, sharding) a new one gets, or a device. The axes of a new
                one have the saved order in memory; without a recorded order, that of *like*.
            flat: the range of the original tensor that *like* holds, when it is a slice.
            beside: the stored name of *like*. If an order is recorded for that tensor and not for *name*, then *name* was
                row-major.
        """
        facts = self.stored.facts(name)
        if facts is None:
            raise damaged(path, f"refers to the tensor {name!r}, which is not there")
        dtype, shape = torch_dtype(facts[0]), facts[1]
        # Only state with the shape of its parameter is sliced like it; a step count is not.
        if isinstance(like, torch.device) or flat is None or flat.shape != shape:
            flat = None
        can_hold = isinstance(live, torch.Tensor) and live.dtype == dtype and fits(live, shape, like, flat)
        axes = self.stored.axes_of(name)
        if axes is None and beside is not None and self.stored.axes_of(beside) is not None:
            axes = tuple(range(len(shape)))
        tensor = live if can_hold else new_tensor(shape, dtype, like, flat, axes)
        self.enter(path, name, tensor, flat)
        return tensor

    def enter(self, path: Path, name: str, tensor: torch.Tensor, flat: FlatRange | None = None) -> bool:
        """Request *tensor* from tensor *name*, ignoring `selects`; return whether it will be, or note why not."""
        facts = self.stored.facts(name)
        if facts is None:
            if not self.stays(path, tensor, flat, stored=name):
                self._miss_tensor(path)
            return False
        stored_as = self.stored.same_tensor(name)
        self._differences.used.add(name)
        held = hold(tensor, path, flat)
        if (problem := misfit(tensor.dtype, held, *facts)) is not None:
            self.problem(self.name_of(path), problem)
            return False
        state_name, is_first = self.name_of(path), True
        if key := self._memory_of(piece.local for piece in held.pieces):
            other, other_stored_as, _ = self._filled.setdefault(key, (state_name, stored_as, tensor))
            if other_stored_as != stored_as:
                self.problem(state_name, _two_tensors(other, other_stored_as, name))
                return False
            is_first = other == state_name
        if is_first:
            self._wanted += shards_of(stored_as, facts[0], held)
        # A slice of a parameter is not the whole tensor, which values may share.
        if flat is None:
            self.values.note_filled(name, tensor)
        return True

    def _miss_tensor(self, path: Path) -> None:
        """Note that the checkpoint lacks the tensor, or has a value in its place."""
        found = self.find(path)
        if found is None:
            self.miss(path)
            return
        self.mismatch(path, f"a tensor in the state, {in_words(found.node)} in the checkpoint")

    def rewrites(self, path: Path) -> None:
        """Note that the leaf at *path* will have another value."""
        self._rewritten.append(path)

    # ---------------------------------------------------------------- differences

    def is_strict(self, path: Path) -> bool:
        """Return whether a difference at *path* is raised."""
        return self._differences.is_strict(self.name_of(path))

    def claim(self, path: Path) -> None:
        """Note that everything below *path* in the checkpoint belongs to the state: an unused rest is a difference."""
        self._differences.claim(self.stored_name(path), self.name_of(path))

    def miss(self, path: Path, reason: str | None = None) -> None:
        """Note that the checkpoint lacks the leaf at *path*."""
        if not self.selects(path) or self.stays(path):
            return
        name, stored_as = self.name_of(path), self.stored_name(path)
        if reason is not None:
            self._differences.miss(name, reason)
            return
        asked = ""
        if self._rename is not None and stored_as != name:
            asked = f" (asked for as {stored_as!r}, because of {self._rename.argument})"
        self._differences.miss(name, f"in the state but not in the checkpoint{asked}")
        self._differences.hint(stored_as)

    def stays(
        self,
        path: Path,
        tensor: torch.Tensor | None = None,
        flat: FlatRange | None = None,
        *,
        stored: str | None = None,
    ) -> bool:
        """Return whether the checkpoint was made without the leaf at *path*; note that the leaf then stays as it is.

        Args:
            tensor, flat: the present tensor, if any, and its range: dtype and shape must be those that were left out.
            stored: its name in the checkpoint, if not `stored_name` of *path*.
        """
        name = stored or self.stored_name(path)
        if not self.stored.leaves_out(name):
            return False
        state_name = self.name_of(path)
        there, here = self.stored.left_out.get(name), None if tensor is None else facts_of(tensor, flat)
        if there is not None and here is not None and here != there:
            self.problem(
                state_name,
                f"{_in_words(here)} in the state, {_in_words(there)} when the checkpoint was made without it",
            )
        if state_name not in self._left_out:
            self._left_out.append(state_name)
        return True

    def pass_over(self, path: Path, *, stored: str | None = None) -> None:
        """Note that the content below *path* in the checkpoint is known: an unused rest is not a difference.

        Args:
            stored: its name in the checkpoint, if not `stored_name` of *path*.
        """
        self._differences.pass_over(stored or self.stored_name(path))

    def note_optimizer(self, path: Path) -> None:
        """Note an optimizer at *path*: for a difference there, the error advises how to load changed optimizers."""
        self._differences.optimizers.add(self.name_of(path))

    def mismatch(self, path: Path, problem: str) -> None:
        """Note that the leaf at *path* is in the checkpoint and does not fit."""
        self.pass_over(path)
        self.problem(self.name_of(path), problem)

    def problem(self, name: str, problem: str) -> None:
        """Note a difference at *name* of the state."""
        self._differences.add(name, problem)

    # ---------------------------------------------------------------- the end

    def later(self, step: Callable[[], object], *, last: bool = False, may_refuse: bool = False) -> None:
        """Run *step* once the tensors are filled; with *last*, after all other steps.

        Args:
            may_refuse: whether it passes a value to an object that may refuse it.
        """
        self._may_refuse = self._may_refuse or may_refuse
        (self._last_steps if last else self._steps).append(step)

    def hand_over(
        self,
        owner: object,
        path: Path,
        take: Callable[[Any], object],
        state: Callable[[], Any],
        *,
        last: bool = False,
        may_refuse: bool = True,
    ) -> None:
        """In a step, call *take*, which passes the result of *state* to *owner*, at *path*; flags as for `later`."""

        def step() -> None:
            with asking(owner, path, self.stored.where):
                take(state())

        self.later(step, last=last, may_refuse=may_refuse)

    def finish(self) -> LoadTarget:
        """Return the target.

        Raises:
            StateMismatchError: there are strict differences.
            UsageError: an entry of ``only`` or ``strict`` matches nothing, or one of the mapping renames nothing.
        """
        if not self.asks_for_all:
            self._refuse_idle()
        # Before `make_tensors`: the values may need new tensors; before `judge`: what they use is no longer unexpected.
        if self._judge_unexpected and self.values.incomplete:
            self.values.add_missing(self._differences.known_names)
        self.values.make_tensors()
        renamed = {} if self._rename is None else self._note_renamed(self._rename)
        judged = NONE if self._differences.are_none else self._judge()
        wanted, together = separate(self._wanted, self.stored.where)
        return LoadTarget(
            wanted=tuple(wanted),
            missing=tuple(self._differences.missing),
            unexpected=judged.unexpected,
            unexpected_claimed=judged.unexpected_claimed,
            left_out=tuple(self._left_out),
            problems=judged.problems,
            notes=self._notes,
            rewritten=self._rewritten,
            # Overlapping tensors are filled first: a codec may make its object from them.
            steps=[*together, *self.values.decodes, *self._steps, *self._last_steps],
            may_refuse=self._may_refuse,
            renamed=renamed,
        )

    def _refuse_idle(self) -> None:
        """Raise UsageError for an entry of ``only`` that matches nothing, or one of the mapping that renames nothing."""
        if self._only is not None:
            refuse_idle("only", set(self._only.values()) - self._seen, self._names)
        if self._rename is not None:
            self._rename.refuse_idle(self.stored.names(), self.stored.where, state_is_whole=self._judge_unexpected)

    def _note_renamed(self, rename: Renaming | Renamed) -> Mapping[str, str]:
        """Return what rules have renamed; note names that both the checkpoint and the rules give."""
        if not isinstance(rename, Renamed):
            return {}
        for name, new in rename.asked_twice():
            self.problem(name, f"in the state, and rename= makes {new} of what the checkpoint has under this name")
        return rename.used(self._differences.used)

    def _judge(self) -> Judged:
        scope = None if self._only is None else set(map(self.stored_name, self._only))
        return self._differences.judge(scope, state_is_whole=self._judge_unexpected)


def _rename_keys(rename: Renaming | Renamed, node: Node, own: Any, here: str, there: str, problems: list[str]) -> Node:
    """Return a *node* at *there* with its keys renamed to those of *own* at *here*; *problems* gets what still differs."""
    saved = members_of(node) if type(node) is dict else {}
    if not isinstance(own, Mapping) or not all(type(key) is str for key in (*saved, *own)):
        return node
    found = rename.keys(here, own, there, saved)
    new = {
        old: key for old, key in found.items() if old in saved and key in own and old not in own and key not in saved
    }
    lacking, unknown = own.keys() - saved.keys() - {*new.values()}, saved.keys() - own.keys() - new.keys()
    if lacking and unknown:
        problems.append(
            f"{here} has {list_names(sorted(lacking))} in the state, {list_names(sorted(unknown))} in the checkpoint: "
            f"{rename.argument} does not rename these, which it sees as {there}.{min(unknown)}"
        )
    inner = []
    for old, part in saved.items():
        key = new.get(old, old)
        inner.append((key, _rename_keys(rename, part, own.get(key), f"{here}.{key}", f"{there}.{old}", problems)))
    return dict(inner) if TAG not in node else {**node, "items": list(map(list, inner))}


def _in_words(facts: tuple[str, tuple[int, ...]]) -> str:
    return f"torch.{torch_name(facts[0])} of shape {facts[1]}"


def _two_tensors(other: str, other_stored_as: str, name: str) -> str:
    return f"shares its memory with {other}, but the checkpoint has two tensors, {other_stored_as} and {name}"
