"""Saving of optimizers: by the names of their parameters, not by their numbers.

Names are those that the modules of the same state define: ``optimizer.state.model.layers.0.weight.exp_avg``. So the state
of a parameter is found again after the order, the groups or the sharding has changed.

- A plain ``torch.optim.Optimizer`` is read directly, its tensors from their own memory.
- One that overrides or hooks ``state_dict()`` is read through that, and its numbers are converted to names.

`aiockpt.adapters.optimizer_target` loads.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import NAMES, default_keys, innermost
from aiockpt.adapters.leaves import KeptTensors, Run
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.tensor_kinds import Mesh, has_own_bytes, tensor_kind
from aiockpt.adapters.tensors import bytes_of
from aiockpt.adapters.watch import Watch
from aiockpt.errors import kind_in_words
from aiockpt.format.document import digest128
from aiockpt.format.names import join_name, list_names, split_name
from aiockpt.format.optimizers import OptimizerRow
from aiockpt.state.codecs import class_name
from aiockpt.state.tree import TAG, Node, Path, refuse

# Optimizer state of a parameter that is spread over ranks: this rank's part of it, determined by shapes, never guessed.
#
# - A DTensor is spread by its placements.
# - A plain tensor with the shape of the rank's part is that part of the state, if *every* parameter has a tensor with the
#   shape of its part under the same key. (A tensor that has the shape by chance would otherwise be cut into pieces.)
# - A tensor with the shape of the whole parameter is a replica.
# - A 0-d tensor (a step count), or a value that is not a tensor, is saved by ranks that hold elements of the parameter: on
#   the other ranks no step ever updates it.
# - Anything else (a preconditioner) must be equal on all ranks: its digest is part of each rank's vote, so that a save in
#   which ranks differ fails and names it. State that belongs to each rank is wrapped in ``aiockpt.per_rank``.


logger = logging.getLogger("aiockpt")
State = Mapping[Any, Any]
_logged: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose own parameters were logged."""
Form = Literal["like", "part", "whole", "own"]
"""Relation of a state tensor to its parameter: spread by its own placements (or the parameter is not spread), a plain part,
a plain replica, or a tensor of another shape that is equal on all ranks."""


class Owner(msgspec.Struct, frozen=True, eq=False):
    """A parameter, and its slice of a flat one; None for a whole parameter or a DTensor."""

    parameter: torch.Tensor
    flat: FlatRange | None

    @property
    def is_spread(self) -> bool:
        """Whether other ranks may have other elements of the parameter."""
        return self.flat is not None or tensor_kind(self.parameter).mesh is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.flat.shape if self.flat is not None else tuple(self.parameter.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(tensor_kind(self.parameter).local(self.parameter).shape)

    @property
    def is_elsewhere(self) -> bool:
        """Whether all its elements are on other ranks."""
        return self.is_spread and 0 in self.local_shape and 0 not in self.shape


class Placed(msgspec.Struct, frozen=True, eq=False):
    """The part of a state tensor to save.

    Attributes:
        source: the state tensor.
        tensor: the same, or a DTensor in its memory.
        flat: the range of a flat parameter that it is a slice of; else None.
        form: see `Form`.
        placements: those of a DTensor that is not spread like its parameter (`aiockpt.adapters.tensor_kinds.Mesh`).
    """

    source: torch.Tensor
    tensor: torch.Tensor
    flat: FlatRange | None
    form: Form
    placements: tuple[str, ...] = ()


def _find_cut(owners: Mapping[Path, Owner], states: Iterable[tuple[Path, State]]) -> set[Any]:
    """Return the keys under which plain tensors are the parts of their parameters."""
    cut, uncut = set[Any](), set[Any]()
    if any(owner.is_spread for owner in owners.values()):
        for path, state in states:
            for key, value in state.items():
                if has_own_bytes(value):
                    is_part = not tensor_kind(value).is_spread and tuple(value.shape) == owners[path].local_shape
                    (cut if is_part else uncut).add(key)
    return cut - uncut


def _place(owner: Owner, value: torch.Tensor, *, is_cut: bool) -> Placed | None:
    """Return the part of the state tensor *value* of a parameter to save; None where other ranks save it."""
    mesh = tensor_kind(value).mesh
    if mesh is not None:
        return Placed(value, value, None, "like", _placements(mesh, value, owner.parameter))
    if not owner.is_spread or tensor_kind(value).is_spread:
        return Placed(value, value, None, "like")
    if value.dim() and is_cut:
        mesh = tensor_kind(owner.parameter).mesh
        if owner.flat is not None or mesh is None:
            return Placed(value, value, owner.flat, "like")
        return Placed(value, mesh.wrap(value.detach(), owner.parameter), None, "part")
    if owner.is_elsewhere:
        return None
    if not value.dim():
        return Placed(value, value, None, "like")
    return Placed(value, value, None, "whole" if tuple(value.shape) == owner.shape else "own")


def _placements(mesh: Mesh, value: torch.Tensor, parameter: torch.Tensor) -> tuple[str, ...]:
    """Return the placements of a tensor on a mesh; an empty tuple where it is spread like its parameter."""
    alike = mesh is tensor_kind(parameter).mesh and mesh.alike(value, parameter)
    return () if alike else mesh.placements(value)


def form_of(owner: Owner, live: object, saved: Form, shape: tuple[int, ...]) -> Form:
    """Return the form of a state tensor after a load: that of the present one (*live*), else the saved one.

    Args:
        shape: of the tensor in the checkpoint.
    """
    if not owner.is_spread:
        return "like"
    part: Form = "part" if owner.flat is None else "like"
    if not isinstance(live, torch.Tensor):
        return part if saved == "part" else saved
    if tensor_kind(live).is_spread or not live.dim():
        return "like"
    is_part = tuple(live.shape) == owner.local_shape and shape == owner.shape
    return part if is_part and not (saved == "whole" and tuple(live.shape) == shape) else "whole"


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of the elements of a plain tensor, row-major."""
    flat = bytes_of(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest128(flat.numpy().data)


# The optimizer with this rank's state: the optimizer itself, except for torch's ``ZeroRedundancyOptimizer``.
#
# ``ZeroRedundancyOptimizer`` assigns each rank some of the parameters, and keeps an optimizer for them in ``optim``; its
# ``state_dict()`` needs all state gathered on one rank. Here nothing is gathered: each rank saves the state of its own
# optimizer by the names of the parameters, and loads the state of the parameters that it has. So the state moves between
# any number of ranks, and between ``ZeroRedundancyOptimizer`` and the optimizer that it wraps.


_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def keeper_of(optimizer: Optimizer, path: Path = ()) -> Optimizer:
    """Return the optimizer with the state of those parameters that *optimizer*, at *path*, has on this rank.

    Raises:
        UnsupportedStateError: it steps while the gradients are computed (``overlap_with_ddp``), and has no such optimizer.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    if not isinstance(inner, Optimizer):
        refuse(
            path,
            "a ZeroRedundancyOptimizer with overlap_with_ddp=True; make it with overlap_with_ddp=False, or call "
            "consolidate_state_dict(to=rank) on all ranks and save its state_dict() on that one",
        )
    return inner


class OptimizerView(msgspec.Struct, frozen=True):
    """An optimizer by names: its groups, the path of each parameter of each group, the state of each parameter with state,
    and the rest of its state."""

    groups: Sequence[Mapping[str, Any]]
    members: Sequence[Sequence[Path]]
    states: Sequence[tuple[Path, State]]
    rest: Mapping[Any, Any]


def is_plain(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is saved and loaded by its ``state`` and ``param_groups`` alone."""
    if (keeper := keeper_of(optimizer)) is not optimizer:
        return is_plain(keeper)
    cls = type(optimizer)
    return (
        cls.state_dict is Optimizer.state_dict
        and cls.load_state_dict is Optimizer.load_state_dict
        and "state_dict" not in vars(optimizer)
        and "load_state_dict" not in vars(optimizer)
        and not any(_hooks(optimizer))
    )


def _hooks(optimizer: Optimizer) -> tuple[Mapping[int, Any], ...]:
    return (
        optimizer._optimizer_state_dict_pre_hooks,
        optimizer._optimizer_state_dict_post_hooks,
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )


def name_members(optimizer: Optimizer, path: Path, index: Index) -> list[list[Path]]:
    """Return the path of each parameter of each group.

    A parameter that is in no module and no tensor of the state (the temperature of a loss) is named as a part of the
    optimizer, by group and position: ``optimizer.parameters[0][3]``.

    Raises:
        UnsupportedStateError: the state has neither a module nor a tensor, so the model is missing.
    """
    for number, group in enumerate(optimizer.param_groups if not index.paths else ()):
        for place, parameter in enumerate(group["params"]):
            refuse(
                (*path, "groups", number, "params", place),
                f"this parameter {tuple(parameter.shape)} is in no module of the state, which has none, so it has no name; "
                "put its module (or the tensor) into the state too",
            )
    return [
        [
            (*path, "parameters", number, place) if (found := index.path_of(parameter)) is None else found
            for place, parameter in enumerate(group["params"])
        ]
        for number, group in enumerate(optimizer.param_groups)
    ]


def parameters_of(
    optimizer: Optimizer, members: Sequence[Sequence[Path]]
) -> Iterator[tuple[Mapping[str, Any], torch.Tensor, Path]]:
    """Yield each parameter with its group and its path.

    Args:
        members: `name_members`.
    """
    for group, some in zip(optimizer.param_groups, members, strict=True):
        for parameter, path in zip(group["params"], some, strict=True):
            yield group, parameter, path


def own_parameters(optimizer: Optimizer, members: Sequence[Sequence[Path]], index: Index) -> dict[Path, torch.Tensor]:
    """Return the parameters that are saved as parts of the optimizer, by their paths."""
    every = parameters_of(optimizer, members)
    return {path: parameter for _, parameter, path in every if index.path_of(parameter) is None}


def _log_own(optimizer: Optimizer, path: Path, own: Mapping[Path, torch.Tensor], index: Index) -> None:
    """Log once which parameters are saved with the optimizer because they have no name."""
    if not own or optimizer in _logged:
        return
    _logged.add(optimizer)
    shown = ", ".join(f"{join_name(owner)} {tuple(parameter.shape)}" for owner, parameter in own.items())
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    shapes = {parameter.shape for parameter in own.values()}
    idle = [
        join_name((*place, *name.split(".")))
        for place, holder in index.holders.items()
        if isinstance(holder, nn.Module)
        for name, parameter in holder.named_parameters()
        if id(parameter) not in stepped and parameter.requires_grad and parameter.shape in shapes
    ]
    replaced = f". Or {list_names(idle)} replaced them after it was made: then make it anew, it trains nothing now"
    logger.warning(
        "%s: parameters that are in no module of the state are saved with the optimizer, by group and place: %s; put "
        "their module into the state to have names, and its buffers too%s",
        join_name(path),
        shown,
        replaced if idle else "",
    )


class OptimizerPart:
    """One optimizer of a walked state; see `aiockpt.adapters.native`."""

    def __init__(self, optimizer: Optimizer, path: Path, index: Index, plan: KeptTensors) -> None:
        watch = plan.watch
        self._optimizer = optimizer
        self._keeper = keeper_of(optimizer, path)
        self._path = path
        self._members = name_members(optimizer, path, index)
        self._owners = {
            owner: Owner(parameter, index.slice_of(parameter))
            for _, parameter, owner in parameters_of(optimizer, self._members)
        }
        self._names = [list(map(join_name, some)) for some in self._members]
        self._plain = is_plain(optimizer)
        own = own_parameters(optimizer, self._members, index)
        for owner, parameter in own.items():
            plan.keep(owner, parameter, index.slice_of(parameter), may_differ=False)
        _log_own(optimizer, path, own, index)
        watch.attribute(attrgetter("__class__"), optimizer)
        if self._keeper is not optimizer:
            watch.attribute(attrgetter("optim"), optimizer)
        watch.attribute(attrgetter("param_groups"), optimizer)
        watch.items(optimizer.param_groups)
        for group in optimizer.param_groups:
            watch.keys(group, ["params"])
            watch.items(group["params"])
        if self._plain:
            self._view = view_plain(optimizer, self._members)
            self._watch_plain(watch)
            self._content = _SavedState(self._view, self._owners, path)
            for place, placed in self._content.tensors:
                plan.keep(place, placed.tensor, placed.flat, may_differ=False)
                if placed.form == "part":  # the walk keeps a DTensor in its memory, which is stale once it moves
                    watch.tensor(placed.source)

    def _watch_plain(self, watch: Watch) -> None:
        optimizer = self._keeper
        watch.attribute(attrgetter("state"), optimizer)
        watch.attribute(lambda each: "state_dict" in vars(each), optimizer)
        for hooks in _hooks(optimizer):
            watch.mapping(hooks)
        # Values that are no tensors are read anew in each walk (`refresh`): of them only the keys have to stay.
        if self._view.rest:
            watch.keys(optimizer.state, [key for key in optimizer.state if isinstance(key, torch.Tensor)])
        else:
            watch.mapping(optimizer.state)
        for _, state in self._view.states:
            tensors = [key for key, value in state.items() if has_own_bytes(value)]
            watch.mapping(state) if len(tensors) == len(state) else watch.keys(state, tensors)

    def refresh(self, value: object, run: Run) -> Node:
        """Return the node of the optimizer's values; the walk has kept the tensors of a plain optimizer."""
        run.same(value, self._optimizer)
        if self._plain:
            rest = {key: self._keeper.state[key] for key in self._view.rest}
            return self._node(msgspec.structs.replace(self._view, rest=rest), self._content, run)
        view = view_general(self._optimizer, self._members)
        if view is None:
            return {TAG: "stateful", "value": run.encode(self._optimizer.state_dict(), self._path)}
        content = _SavedState(view, self._owners, self._path)
        for place, placed in content.tensors:
            run.put(place, placed.tensor, placed.flat)
        return self._node(view, content, run)

    def _node(self, view: OptimizerView, content: _SavedState, run: Run) -> Node:
        digests = {
            join_name(place[len(self._path) :]): digest_of(placed.tensor)
            for place, placed in content.tensors
            if placed.form == "own"
        }
        node = {
            TAG: "optimizer",
            "class": class_name(type(innermost(self._keeper))),
            "keys": default_keys(self._keeper),
            "groups": [
                {"params": names, "values": self._refresh_group(group, number, run, digests)}
                for number, (group, names) in enumerate(zip(view.groups, self._names, strict=True))
            ],
            "state": content.table,
            "values": [
                [join_name(owner), key, self._encode(state[key], state_path(self._path, owner, key), run, alike)]
                for owner, state, key in content.values
                for alike in (digests if self._owners[owner].is_spread else None,)
            ],
        }
        if view.rest:
            alike = digests if any(owner.is_spread for owner in self._owners.values()) else None
            node["rest"] = self._encode(dict(view.rest), (*self._path, "rest"), run, alike)
        return {**node, "digests": digests} if digests else node

    def _refresh_group(
        self, group: Mapping[str, Any], number: int, run: Run, digests: dict[str, str]
    ) -> dict[str, Node]:
        nodes = {}
        for key, value in group.items():
            if key not in NAMES:
                # Reading a tensor on a device would wait for all kernels there.
                alike = digests if isinstance(value, torch.Tensor) and value.device.type == "cpu" else None
                nodes[key] = self._encode(value, (*self._path, "groups", number, key), run, alike)
        return nodes

    def _encode(self, value: Any, place: Path, run: Run, digests: dict[str, str] | None) -> Node:
        """Return the node of a value; the digests of plain tensors in it are added to *digests*."""
        first = len(run.leaves)
        node = run.encode(value, place)
        if digests is not None:
            for leaf in run.leaves[first:]:
                if not tensor_kind(leaf.owner).is_spread:
                    digests[join_name(split_name(leaf.name)[len(self._path) :])] = digest_of(leaf.owner)
        return node


class _SavedState:
    """This rank's part of the parameters' state of an optimizer at a path.

    Attributes:
        tensors: the tensors to save, with their paths.
        values: (parameter, its state, key) of each value that is not a tensor.
    """

    def __init__(self, view: OptimizerView, owners: Mapping[Path, Owner], path: Path) -> None:
        self.tensors: list[tuple[Path, Placed]] = []
        self.values: list[tuple[Path, State, Any]] = []
        self._members = view.members
        self._rows: list[tuple[Path, dict[Any, Placed]]] = []
        cut = _find_cut(owners, view.states)
        for place, state in view.states:
            owner, row = owners[place], dict[Any, Placed]()
            for key, value in state.items():
                if has_own_bytes(value):
                    if (placed := _place(owner, value, is_cut=key in cut)) is not None:
                        row[key] = placed
                        self.tensors.append((state_path(path, place, key), placed))
                elif not owner.is_elsewhere:
                    self.values.append((place, state, key))
            self._rows.append((place, row))

    @cached_property
    def table(self) -> list[dict[str, Any]]:
        """The sets of tensors that parameters have, with the numbers of these parameters; most have the same."""
        numbers = {owner: number for number, owner in enumerate(owner for some in self._members for owner in some)}
        rows: dict[tuple[tuple[Any, Form, tuple[str, ...]], ...], list[int]] = {}
        for owner, row in self._rows:
            if not all(type(key) in (str, int) for key in row):
                refuse(owner, "the optimizer's state of this parameter has keys that are neither text nor integers")
            said: tuple[tuple[Any, Form, tuple[str, ...]], ...]
            said = tuple((key, placed.form, placed.placements) for key, placed in row.items())
            rows.setdefault(said, []).append(numbers[owner])
        return [_write_row(said, some) for said, some in rows.items()]


def _write_row(said: Sequence[tuple[Any, Form, tuple[str, ...]]], params: list[int]) -> dict[str, Any]:
    row = OptimizerRow(
        [key for key, _, _ in said],
        params,
        [key for key, form, _ in said if form == "part"],
        [key for key, form, _ in said if form in ("whole", "own")],
        [(key, list(placements)) for key, _, placements in said if placements],
    )
    written: dict[str, Any] = msgspec.to_builtins(row)
    return written


def view_plain(optimizer: Optimizer, members: Sequence[Sequence[Path]]) -> OptimizerView:
    """Return a view of a plain optimizer; the mappings are its own."""
    owners = {id(parameter): owner for _, parameter, owner in parameters_of(optimizer, members)}
    # The state of a parameter that is no longer in a group is unreachable; torch would refuse to save it.
    kept = keeper_of(optimizer).state
    states = [(owners[id(key)], state) for key, state in kept.items() if id(key) in owners]
    for owner, state in states:
        if not isinstance(state, dict):
            refuse(owner, f"the optimizer's state of this parameter is {kind_in_words(state)}, not a dict")
    rest = {key: state for key, state in kept.items() if not isinstance(key, torch.Tensor)}
    return OptimizerView(optimizer.param_groups, members, states, rest)


def view_general(optimizer: Optimizer, members: Sequence[Sequence[Path]]) -> OptimizerView | None:
    """Return the content of ``state_dict()``, by names; None when it does not have the form of torch's."""
    state_dict = optimizer.state_dict()
    groups, states = state_dict.get("param_groups"), state_dict.get("state")
    if set(state_dict) != {"state", "param_groups"} or not isinstance(groups, list) or not isinstance(states, dict):
        return None
    numbers = [group.get("params", ()) for group in groups]
    if [len(some) for some in members] != [len(some) for some in numbers]:
        return None
    owners = {
        number: owner
        for some, paths in zip(numbers, members, strict=True)
        for number, owner in zip(some, paths, strict=True)
    }
    if not all(isinstance(state, Mapping) for number, state in states.items() if number in owners):
        return None
    return OptimizerView(
        groups,
        members,
        [(owners[number], state) for number, state in states.items() if number in owners],
        {key: state for key, state in states.items() if key not in owners},
    )


def state_path(path: Path, owner: Path, key: str | int) -> Path:
    """Return the path of one entry of the state of the parameter at *owner*."""
    return (*path, "state", *owner, key)
