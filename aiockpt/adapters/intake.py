"""What does a checkpoint offer, what does a state want, and what does not fit? The meeting of the two.

Adapters ask for what an object holds; the intake looks it up under its name in the checkpoint, notes which tensor is to
be filled, and collects every difference. Nothing of the state changes before `LoadTarget.apply`, except that the engine
fills the tensors of `LoadTarget.wanted`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from aiockpt.adapters.fit import fits, misfit, new_tensor, value_misfit
from aiockpt.adapters.held import FlatRange
from aiockpt.adapters.leaves import LeafReader, LeafWriter
from aiockpt.adapters.rename import Rename, Renaming, near
from aiockpt.adapters.stored import Found, Stored, find_flat, find_node
from aiockpt.adapters.tensors import hold, is_spread, memory_key, shards_of
from aiockpt.errors import StateMismatchError, UsageError
from aiockpt.format.dtypes import torch_name
from aiockpt.format.names import join_name, prefixes, split_name
from aiockpt.state.codecs import CodecRegistry
from aiockpt.state.shards import TensorShard
from aiockpt.state.tree import TAG, Decoder, Encoder, Node, Path, damaged


class LoadTarget:
    """A load that is ready to go.

    Attributes:
        wanted: the tensors to fill; ``data`` is filled in place, ``name`` is the name in the checkpoint.
        missing: names of the state that the checkpoint does not have.
        unexpected: names of the checkpoint that the state of this rank does not have.
        unexpected_claimed: those of them that belong to something the state does have, so that they are a difference
            unless another rank has them.
        problems: every difference, in words; not empty only when ``strict`` is False.
        written: names of the leaves that are overwritten.
    """

    def __init__(
        self,
        wanted: Sequence[TensorShard],
        missing: Sequence[str],
        unexpected: Sequence[str],
        unexpected_claimed: Sequence[str],
        problems: Sequence[str],
        written: frozenset[str],
        steps: Sequence[Callable[[], object]],
    ) -> None:
        self.wanted = tuple(wanted)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.unexpected_claimed = tuple(unexpected_claimed)
        self.problems = tuple(problems)
        self.written = written
        self._steps = list(steps)

    def __repr__(self) -> str:
        return f"<LoadTarget of {len(self.wanted)} tensors, {len(self.missing)} missing, {len(self._steps)} to apply>"

    def apply(self) -> None:
        """Set what is not a tensor, once all tensors are filled. Idempotent; a step that raised is tried again."""
        while self._steps:
            self._steps[0]()
            del self._steps[0]


class Intake:
    """One load being prepared; see `aiockpt.adapters.target.open_target` for the arguments."""

    def __init__(
        self,
        stored: Stored,
        *,
        only: Sequence[str] | None,
        strict: bool,
        rename: Rename | None,
        codecs: CodecRegistry,
        judge_unexpected: bool = True,
    ) -> None:
        self.strict = strict
        self._judge_unexpected = judge_unexpected
        self._stored = stored
        self._only = None if only is None else {split_name(name): name for name in only}
        self._met: set[str] = set()
        self._names: set[str] = set()
        self._rename = Renaming(rename)
        self._codecs = codecs
        self._wanted: list[TensorShard] = []
        self._filled: dict[Hashable, tuple[str, str]] = {}
        self._problems: list[str] = []
        self._missing: list[str] = []
        self._used: set[str] = set()
        self._claimed: set[str] = set()
        self._passed_over: set[str] = set()
        self._written: set[str] = set()
        self._steps: list[Callable[[], object]] = []
        self._last_steps: list[Callable[[], object]] = []

    # ---------------------------------------------------------------- names

    def stored_name(self, path: Path) -> str:
        """Return what the leaf at *path* of the state is called in the checkpoint."""
        self._rename.meet(path)
        return self._rename(join_name(path))

    def selects(self, path: Path) -> bool:
        """Return whether ``only`` lets the leaf at *path* be loaded."""
        self._rename.meet(path)
        if self._only is None:
            return True
        self._names.update(prefixes(join_name(path)))
        hits = [name for parts, name in self._only.items() if path[: len(parts)] == parts]
        self._met.update(hits)
        return bool(hits)

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

    # ---------------------------------------------------------------- ranks

    @property
    def rank(self) -> int:
        """Which rank loads."""
        return self._stored.rank

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self._stored.step

    @property
    def world_changed(self) -> str | None:
        """How the number of ranks changed, in words; None where it is the same."""
        saved, here = self._stored.saved_world_size, self._stored.world_size
        return None if saved == here else f"saved by {saved} ranks, and here are {here}"

    # ---------------------------------------------------------------- values

    def find(self, path: Path) -> Found | None:
        """Return the node of the leaf at *path*, or None when the checkpoint has none."""
        return find_node(self._stored.values, split_name(self.stored_name(path)))

    def find_own(self, path: Path) -> Found | None:
        """Return the node of this rank's own value at *path*, or None."""
        return find_flat(self._stored.per_rank, self.stored_name(path))

    def find_of_another(self, path: Path) -> Found | None:
        """Return the node at *path* of the saved rank that a rank without one derives its own from, or None."""
        ranks = max(self._stored.saved_world_size, 1)
        return find_flat(self._stored.every_rank.get(str(self.rank % ranks)), self.stored_name(path))

    def find_tagged(self, path: Path, kind: str) -> dict[str, Any] | None:
        """Return the tagged object of *kind* at *path*, or None."""
        found = self.find(path)
        node = None if found is None else found.node
        return node if type(node) is dict and node.get(TAG) == kind else None

    def misfit(self, path: Path, value: Any, node: Node) -> str | None:
        """Return in words why the plain *value* at *path* cannot be set from *node*, or None."""
        own = Encoder(self._codecs, LeafWriter(lambda place, tensor: "")).encode(value, path)
        return value_misfit(own, node)

    def value(self, path: Path, node: Node, template: Any = None, *, fresh: bool = False) -> Callable[[], Any]:
        """Check a node and ask for its tensors; return what decodes it once they are filled.

        Args:
            template: what is at *path* now; its tensors that fit are filled in place, others are made.
            fresh: fill none in place; what is spread over ranks in *template* is made anew and spread like it.

        Raises:
            ManifestError, UsageError: as `Decoder.decode`.
        """
        here = _tensors_in(template, path, self._codecs)
        made: dict[tuple[str, Path], torch.Tensor] = {}

        def get(name: str, place: Path, device: str) -> torch.Tensor:
            if (name, place) not in made:
                live, new = here.get(place), _local_device(device)
                if not fresh:
                    made[name, place] = self._obtain(place, name, live, new)
                else:
                    made[name, place] = self._obtain(place, name, None, live if is_spread(live) else new)
            return made[name, place]

        reader = LeafReader(get)
        Decoder(self._codecs, reader, dry=True).decode(node, path)
        self._used.add(self.stored_name(path))
        self.rewrites(path)
        return lambda: Decoder(self._codecs, reader).decode(node, path)

    # ---------------------------------------------------------------- tensors

    def want(self, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None) -> bool:
        """Have *tensor* filled from the checkpoint; return whether it will be.

        Args:
            flat: the elements of which tensor a 1-D *tensor* has; None takes it for what it is.
        """
        if not self.selects(path) or not self._enter(path, self.stored_name(path), tensor, flat):
            return False
        self.rewrites(path)
        return True

    def fill(
        self, path: Path, name: str, live: Any, like: torch.Tensor | torch.device, flat: FlatRange | None = None
    ) -> torch.Tensor | None:
        """Have *live* filled from tensor *name* where it fits, else a new tensor; None when it is not selected.

        Args:
            like: the tensor whose device (and strides and sharding, where the shape is the same) a new one gets, or a
                device.
            flat: the elements of which tensor *like* has, when it is a slice.
        """
        return self._obtain(path, name, live, like, flat) if self.selects(path) else None

    def leave(self, name: str) -> None:
        """Note that of tensor *name* of the checkpoint this rank has nothing, so that it is no difference."""
        self._used.add(name)

    def _obtain(
        self, path: Path, name: str, live: Any, like: torch.Tensor | torch.device, flat: FlatRange | None = None
    ) -> torch.Tensor:
        facts = self._stored.facts(name)
        if facts is None:
            raise damaged(path, f"refers to the tensor {name!r}, which is not there")
        dtype, shape = getattr(torch, torch_name(facts[0])), facts[1]
        if isinstance(like, torch.device) or flat is None or flat.shape != shape:
            flat = None
        can_hold = isinstance(live, torch.Tensor) and live.dtype == dtype and fits(live, shape, like, flat)
        tensor = live if can_hold else new_tensor(shape, dtype, like, flat)
        self._enter(path, name, tensor, flat)
        return tensor

    def _enter(self, path: Path, name: str, tensor: torch.Tensor, flat: FlatRange | None = None) -> bool:
        state_name = join_name(path)
        facts = self._stored.facts(name)
        if facts is None:
            self._miss_tensor(path)
            return False
        stored_as = self._stored.alias.get(name, name)
        self._used.add(name)
        held = hold(tensor, path, flat)
        problem = misfit(tensor.dtype, held, *facts)
        key = tuple(filter(None, (memory_key(piece.local) for piece in held.pieces)))
        if problem is None and key:
            other, other_stored_as = self._filled.setdefault(key, (state_name, stored_as))
            if other_stored_as != stored_as:
                problem = (
                    f"shares its memory with {other}, but the checkpoint has two tensors, {other_stored_as} and {name}"
                )
            elif other != state_name:
                return True
        if problem is not None:
            self.problem(f"{state_name}: {problem}")
            return False
        self._wanted += shards_of(stored_as, facts[0], held)
        return True

    def _miss_tensor(self, path: Path) -> None:
        """Note that the checkpoint has no such tensor, and perhaps a value in its place."""
        found = self.find(path)
        if found is None or (what := value_misfit({TAG: "tensor"}, found.node)) is None:
            self.miss(path)
        else:
            self.mismatch(path, what)

    def rewrites(self, path: Path) -> None:
        """Note that the leaf at *path* will have another value."""
        self._written.add(join_name(path))

    # ---------------------------------------------------------------- differences

    def claim(self, path: Path) -> None:
        """Say that whatever the checkpoint has below *path* belongs into the state, so that a rest is a difference."""
        self._claimed.add(self.stored_name(path))

    def miss(self, path: Path, reason: str | None = None) -> None:
        """Note that the checkpoint does not have the leaf at *path*."""
        if not self.selects(path):
            return
        name, stored_as = join_name(path), self.stored_name(path)
        if reason is None:
            asked = "" if stored_as == name else f" (asked for as {stored_as!r}, because of map=)"
            reason = f"in the state but not in the checkpoint{asked}"
        self._missing.append(name)
        self.problem(f"{name}: {reason}")

    def pass_over(self, path: Path) -> None:
        """Say that what the checkpoint has below *path* is known, and not all of it wanted: the rest is no difference."""
        self._passed_over.add(self.stored_name(path))

    def mismatch(self, path: Path, problem: str) -> None:
        """Note that the leaf at *path* is in the checkpoint and does not fit."""
        self.pass_over(path)
        self.problem(f"{join_name(path)}: {problem}")

    def problem(self, problem: str) -> None:
        """Note a difference."""
        self._problems.append(problem)

    # ---------------------------------------------------------------- the end

    def later(self, step: Callable[[], object], *, last: bool = False) -> None:
        """Have *step* run once the tensors are filled; after all others with *last*."""
        (self._last_steps if last else self._steps).append(step)

    def finish(self) -> LoadTarget:
        """Return the target.

        Raises:
            StateMismatchError: something differs, and strict.
            UsageError: ``only`` names nothing of the state, or an entry of the mapping renames nothing.
        """
        self._refuse_idle_arguments()
        unexpected = [
            name for name in self._stored.unused(self._used, self._claimed, self._passed_over) if self._in_scope(name)
        ]
        claimed = [name for name in unexpected if any(prefix in self._claimed for prefix in prefixes(name))]
        if self._judge_unexpected:
            for name in claimed:
                self.problem(f"{name}: in the checkpoint but not in the state")
        if self._problems and self.strict:
            advice = "Change the state, rename with map=, choose with only=, or load what fits with strict=False."
            raise StateMismatchError(self._stored.where, sorted(self._problems), advice)
        written = frozenset(self._written)
        steps = [*self._steps, *self._last_steps]
        return LoadTarget(self._wanted, self._missing, unexpected, claimed, self._problems, written, steps)

    def _in_scope(self, name: str) -> bool:
        scope = {self._rename(prefix) for prefix in (self._only or {}).values()}
        return self._only is None or any(prefix in scope for prefix in prefixes(name))

    def _refuse_idle_arguments(self) -> None:
        nothing = sorted(set((self._only or {}).values()) - self._met)
        if nothing:
            told = ", ".join(f"{name!r}{near(name, self._names)}" for name in nothing)
            raise UsageError(f"only={told} names nothing in the state; give keys of it, or prefixes of its names")
        idle = list(self._rename.idle_entries(self._stored.names(), state_is_whole=self._judge_unexpected))
        if idle:
            raise UsageError(f"{self._stored.where}: {'; '.join(idle)}")


def _tensors_in(value: Any, path: Path, codecs: CodecRegistry) -> dict[Path, torch.Tensor]:
    """Return the tensors in a plain value that is at *path*, arrays as tensors of the same memory."""
    found: dict[Path, torch.Tensor] = {}

    def put(place: Path, tensor: torch.Tensor) -> str:
        found[place] = tensor
        return ""

    Encoder(codecs, LeafWriter(put)).encode(value, path)
    return found


def _local_device(kind: str) -> torch.device:
    """Return the device here of a kind that the checkpoint names; the CPU where there is none."""
    return torch.device("cuda" if kind == "cuda" and torch.cuda.is_available() else "cpu")
