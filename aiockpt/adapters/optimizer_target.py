"""Loading of optimizers: by the names of their parameters, bit-exactly.

- A plain ``torch.optim.Optimizer`` is filled directly: present state tensors in place, others are made.
  ``Optimizer.load_state_dict()`` is not used, because it casts fp32 moments to the dtype of bf16 parameters; its last
  call, ``__setstate__()``, is made: there classes adapt the state of an older version or a related class.
- One that overrides or hooks ``state_dict()`` gets a state dict with torch's numbers.
- The checkpoint may have it in any form. `aiockpt.adapters.optimizer_forms` describes the forms, the resulting groups and
  the other classes that fit; `aiockpt.adapters.optimizer_by_parameter` loads optimizers that have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from aiockpt.adapters.composite_target import ask_value
from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import NAMES, innermost
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.matcher import MakeUp, Matcher
from aiockpt.adapters.module import (
    OwnLoad,
    SavedModule,
    bare_key,
    is_saved_module,
    loads_directly,
    open_source,
    walk_parts,
)
from aiockpt.adapters.optimizer import (
    Form,
    Owner,
    form_of,
    is_plain,
    keeper_of,
    name_members,
    own_parameters,
    parameters_of,
    state_path,
    view_general,
    view_plain,
)
from aiockpt.adapters.optimizer_exact import device_for
from aiockpt.adapters.optimizer_forms import (
    Id,
    SavedOptimizer,
    agreed_values,
    class_misfit,
    dict_misfit,
    groups_without_parameters,
    is_form,
    pair_up,
    read_form,
    tensor_names,
)
from aiockpt.adapters.stored import is_tensor_node
from aiockpt.adapters.tensor_kinds import local_tensors, tensor_kind
from aiockpt.adapters.tensors import facts_of, may_spread, torch_dtype
from aiockpt.adapters.value_requests import Thunk
from aiockpt.format.dtypes import same, torch_name
from aiockpt.format.names import dotted, join_name, prefixes, split_name
from aiockpt.format.optimizers import OptimizerRow
from aiockpt.state.tree import TAG, Node, Path

Thunks = dict[Any, Thunk]
"""Functions that return the values, by key, once all tensors are filled."""
States = Sequence[tuple[torch.Tensor, Thunks]]
"""The state that some parameters will have."""
_LIKE_ITS_PARAMETER = OptimizerRow([], [])
_Chosen = tuple[Path, Owner, Mapping[str, Any], Mapping[Id, Node], OptimizerRow]
"""A parameter whose state is loaded: its path, its owner, its group, its stored state, and the row that describes that."""
Source = tuple[SavedOptimizer, Id]
"""The source of a parameter's state: an optimizer of the checkpoint, and the identifier of the parameter there."""


class SavedNames:
    """Names in the checkpoint of the parameters and tensors of a state, independent of wrappers of their modules.

    A module that loads itself may load a parameter from another key; the optimizer then uses that name, too.
    """

    def __init__(self, index: Index, matcher: Matcher) -> None:
        self._index = index
        self._matcher = matcher
        self._sources: dict[Path, SavedModule | None] = {}
        self._renames: dict[Path, dict[Path, str]] = {}

    def name_of(self, owner: Path) -> str:
        """Return the name of the tensor at *owner* of the state."""
        path, holder = self._index.holder_of(owner)
        if holder is None:
            return self._matcher.stored_name(owner)
        if path not in self._sources:
            is_module = isinstance(holder, nn.Module) or (path and is_saved_module(holder, path, self._matcher))
            self._sources[path] = open_source(path, self._matcher) if path and is_module else None
        source = self._sources[path]
        if source is None:
            return self._matcher.stored_name(owner)
        if not isinstance(holder, nn.Module):
            return source.name_of(bare_key(str(owner[-1]), holder))
        name = source.stored_name(owner, self._matcher)
        if self._matcher.stored.facts(name) is None:
            return self._renames_of(path, holder, source).get(owner, name)
        return name

    def _renames_of(self, path: Path, holder: nn.Module, source: SavedModule) -> dict[Path, str]:
        """Return the names of parameters that modules with their own load take from other keys."""
        if path not in self._renames:
            parts = walk_parts(holder, path, loads_directly)
            own = [OwnLoad(member, place, source, self._matcher) for place, member, direct in parts if not direct]
            self._renames[path] = {owner: name for one in own for owner, name in one.find_renames().items()}
        return self._renames[path]


class OptimizerTarget:
    """The prepared load of one optimizer of the state.

    Attributes:
        keeper: the optimizer that has the state of this rank.
        members: the path of each parameter of each group.
        names: of each parameter by its path, in the checkpoint.
    """

    def __init__(self, optimizer: Optimizer, path: Path, index: Index, matcher: Matcher) -> None:
        self.optimizer = optimizer
        self.keeper = keeper_of(optimizer, path)
        self.path = path
        self.index = index
        self.matcher = matcher
        self.members = name_members(optimizer, path, index)
        saved_names = SavedNames(index, matcher)
        self.names = {owner: saved_names.name_of(owner) for some in self.members for owner in some}

    def state_place(self, owner: Path) -> Path:
        """Return the path of the state of the parameter at *owner*."""
        return (*self.path, "state", *owner)

    def pair(self, saved: SavedOptimizer) -> dict[Path, Id]:
        """Return path → identifier in *saved* of each parameter; those that *saved* lacks are left out."""
        if saved.by_numbers:
            return self._pair_by_numbers(saved)
        there = {one for some in saved.members for one in some}
        # An optimizer was saved with the names of the state: where all are the same nothing has to be guessed.
        exact: dict[Path, Id] = (
            {} if saved.is_dict else {own: name for own, name in self.names.items() if name in there}
        )
        if len(exact) == len(self.names):
            return exact
        taken = set(exact.values())
        left = [[one for one in some if one not in taken] for some in saved.members]
        guessed = self._guess(msgspec.structs.replace(saved, members=left), exact)
        return exact | {
            owner: one for owner, one in guessed.items() if not self._names_other_parameter(owner, one, saved)
        }

    def _guess(self, saved: SavedOptimizer, known: Mapping[Path, Id]) -> dict[Path, Id]:
        keys = {owner: dotted(name) for owner, name in self.names.items() if owner not in known}
        ids = pair_up([[keys[owner] for owner in some if owner in keys] for some in self.members], saved)
        return {owner: ids[key] for owner, key in keys.items() if key in ids}

    def _pair_by_numbers(self, saved: SavedOptimizer) -> dict[Path, Id]:
        """Pair by the names beside the numbers where these are all here; else by position, if no shape contradicts."""
        if saved.names:
            numbers: dict[Id, Id] = dict(zip(chain(*saved.names), chain(*saved.members), strict=True))
            named = self.pair(msgspec.structs.replace(saved, members=saved.names, names=[]))
            if len(named) == len(self.names) == len(numbers):
                return {owner: numbers[name] for owner, name in named.items()}
        found = self._guess(saved, {})
        return {} if self._are_out_of_order(found, saved) else found

    def _are_out_of_order(self, ids: Mapping[Path, Id], saved: SavedOptimizer) -> bool:
        """Return whether the state tensors under a key have the shapes of the parameters, in another order."""
        shapes: dict[Any, list[tuple[Any, Any]]] = {}
        for _, parameter, owner in parameters_of(self.optimizer, self.members):
            for key, node in saved.state.get(ids[owner], {}).items() if owner in ids else ():
                facts = self.matcher.stored.facts(node["name"]) if is_tensor_node(node) else None
                here = facts_of(parameter, self.index.slice_of(parameter))
                if facts is not None and here is not None:
                    shapes.setdefault(key, []).append((here[1], facts[1]))
        return any(
            any(here != there for here, there in pairs)
            and sorted(here for here, _ in pairs) == sorted(there for _, there in pairs)
            for pairs in shapes.values()
        )

    def _names_other_parameter(self, owner: Path, one: Id, saved: SavedOptimizer) -> bool:
        """Return whether the checkpoint has the parameter at *owner*, and *one* of *saved* is the name of another one."""
        mine = self._stored_names.get(dotted(self.names[owner]))
        if mine is None:
            return False
        # A dict has names within the module, an optimizer those of the state.
        text = str(one) if saved.is_dict else dotted(str(one))
        below = dotted(self.matcher.stored_name(self.index.holder_of(owner)[0])) if saved.is_dict else ""
        candidates = (f"{below}.{text}", text) if below else (text,)
        found = next((self._stored_names[name] for name in candidates if name in self._stored_names), mine)
        return found != mine

    @cached_property
    def _stored_names(self) -> dict[str, str]:
        """The tensors of the checkpoint by their names with dots, as one name for all names of a tensor."""
        stored = self.matcher.stored
        return {dotted(name): stored.same_tensor(name) for name in (*stored.tensors, *stored.alias)}

    def want_values(self, number: int, values: Mapping[str, Node]) -> Thunks:
        """Return getters for those *values* of group *number* that are selected."""
        group, place = self.optimizer.param_groups[number], (*self.path, "groups", number)
        return {
            key: self.matcher.values.request((*place, key), node, group.get(key))
            for key, node in values.items()
            if self.matcher.selects((*place, key))
        }

    def want_states(
        self, sources: Mapping[Path, Source], refuse: Callable[[Path, str], object]
    ) -> list[tuple[torch.Tensor, Thunks]]:
        """Return getters for the state of each parameter that has a source; present tensors are filled in place.

        Args:
            refuse: called with each parameter that differs from the saved one, and the reason.
        """
        found: list[_Chosen] = []
        # The keeper of a ZeroRedundancyOptimizer has only this rank's share of the parameters.
        kept = {id(parameter) for group in self.keeper.param_groups for parameter in group["params"]}
        for group, parameter, owner in parameters_of(self.optimizer, self.members):
            if owner not in sources:
                continue
            saved, one = sources[owner]
            flat, nodes = self.index.slice_of(parameter), saved.state.get(one, {})
            if nodes and (problem := self._parameter_misfit(owner, parameter, flat)) is not None:
                refuse(owner, problem)
            elif id(parameter) in kept and (flat is None or flat.start != flat.end):
                row = saved.rows.get(one, _LIKE_ITS_PARAMETER)
                found.append((owner, Owner(parameter, flat), group, nodes, row))
                continue
            # The present state is kept. (Optimizer steps never update a parameter without elements on this rank.)
            for name in tensor_names(nodes):
                self.matcher.skip(name)
        filled = self._fill_plain(found)
        return [(chosen[1].parameter, self._want_state(*chosen, filled)) for chosen in found]

    def _fill_plain(self, found: Sequence[_Chosen]) -> set[tuple[str, int]]:
        """Request the present state tensors that are whole and ordinary, as most are; return their names and identities."""
        names, tensors = [], []
        for _, owner, _, nodes, _ in found:
            live = {} if owner.is_spread else self.keeper.state.get(owner.parameter, {})
            for key, node in nodes.items():
                tensor = live.get(key)
                # In a contiguous tensor no two elements share memory; `Matcher.fill` replaces one in which they do.
                if is_tensor_node(node) and isinstance(tensor, torch.Tensor) and tensor.is_contiguous():
                    names.append(node["name"])
                    tensors.append(tensor)
        return set(compress(zip(names, map(id, tensors), strict=True), self.matcher.fill_plain(names, tensors)))

    def _parameter_misfit(self, owner: Path, parameter: torch.Tensor, flat: FlatRange | None) -> str | None:
        """Return why the stored state belongs to another parameter than the present one, or None.

        The state of a parameter that does not fit is kept. With the saved moments the next step would fail, or update it by
        the history of another tensor. (A parameter that is not requested may have another dtype.)
        """
        if not self.matcher.touches(self.state_place(owner)):
            return None
        here, there = facts_of(parameter, flat), self.matcher.stored.facts(self.names[owner])
        if here is None or there is None or here == there or self.index.loads_itself(parameter):
            return None
        if here[1] != there[1]:
            return f"of a parameter of shape {here[1]} in the state, of {there[1]} in the checkpoint"
        if self.matcher.selects(owner) and not same(here[0], there[0]):
            own, saved = torch_name(here[0]), torch_name(there[0])
            return f"of a parameter of torch.{own} in the state, torch.{saved} in the checkpoint"
        return None

    def _want_state(
        self,
        path: Path,
        owner: Owner,
        group: Mapping[str, Any],
        nodes: Mapping[Id, Node],
        row: OptimizerRow,
        filled: set[tuple[str, int]],
    ) -> Thunks:
        live = self.keeper.state.get(owner.parameter, {})
        thunks: Thunks = {}
        for key, node in nodes.items():
            if is_tensor_node(node) and (node["name"], id(live.get(key))) in filled:
                thunks[key] = _returning(live[key])
                continue
            place = state_path(self.path, path, key)
            if not self.matcher.selects(place):
                continue
            if is_tensor_node(node):
                like = device_for(owner.parameter, key, group)
                tensor = self._want_tensor(owner, row, key, node["name"], place, live.get(key), like, path)
                thunks[key] = _returning(tensor)
            else:
                thunks[key] = ask_value(place, live.get(key), node, self.matcher, owner.parameter)
        return thunks

    def _want_tensor(
        self,
        owner: Owner,
        row: OptimizerRow,
        key: Id,
        name: str,
        place: Path,
        live: Any,
        like: torch.Tensor | torch.device,
        path: Path,
    ) -> torch.Tensor:
        """Request the state tensor *name* of the parameter at *path*; see `Matcher.fill`."""
        matcher, parameter, beside = self.matcher, owner.parameter, self.names[path]
        facts = matcher.stored.facts(name)
        if facts is None or not owner.is_spread:
            return matcher.fill(place, name, live, like, beside=beside)
        mesh = tensor_kind(parameter).mesh
        form: Form = "part" if key in row.part else "whole" if key in row.whole else "like"
        match form_of(owner, live, form, facts[1]):
            case "part":
                spread = None if live is None or mesh is None else mesh.wrap(live.detach(), parameter)
                tensor = matcher.fill(place, name, spread, parameter, beside=beside)
                # The DTensor lies in the memory of *live*, which stays in the optimizer itself.
                if isinstance(live, torch.Tensor) and tensor is spread:
                    return live
                return tensor_kind(tensor).local(tensor)
            case "whole":
                return matcher.fill(place, name, live, parameter.device)
        placements = dict(row.spread).get(key)
        if live is None and placements is not None and mesh is not None:
            dtype = torch_dtype(facts[0])
            live = mesh.place(placements, parameter, facts[1], dtype, matcher.stored.axes_of(name))
        return matcher.fill(place, name, live, like, owner.flat, beside=beside)

    def want_rest(self, saved: SavedOptimizer) -> Thunk | None:
        """Return a getter for the state of no parameter; None where it stays: not selected, or a dict was saved."""
        saved.met.add(None)
        place = (*self.path, "rest")
        if saved.is_dict or not self.matcher.selects(place):
            return None
        return dict if saved.rest is None else self.matcher.values.fresh(place, saved.rest)

    # ---------------------------------------------------------------- steps

    def apply_later(self, groups: Sequence[Thunks], states: States, rest: Thunk | None) -> None:
        """Set the requested parts in a step: the values of groups, the state of parameters, and the rest; None stays."""
        if not is_plain(self.optimizer):
            self.matcher.later(lambda: self._apply_general(groups, states, rest))
            return
        whole = self.matcher.selects(self.path)
        if whole:  # all present state is filled or dropped, even if the checkpoint lacks it
            for place in (self.path, *self.state_places()):
                self.matcher.rewrites(place)
        self.matcher.later(lambda: self._apply_plain(groups, states, rest, whole=whole))

    def state_places(self) -> Iterator[Path]:
        """Yield the path of each entry of the present state."""
        for owner, state in view_plain(self.optimizer, self.members).states:
            for key in state:
                yield state_path(self.path, owner, key)

    def _apply_plain(self, groups: Sequence[Thunks], states: States, rest: Thunk | None, *, whole: bool) -> None:
        optimizer = self.keeper
        for group, thunks in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in thunks.items():
                set_value(group, key, value())
        for parameter, thunks in states:
            if whole:
                optimizer.state.pop(parameter, None)
            if thunks:
                optimizer.state[parameter].update({key: value() for key, value in thunks.items()})
        if rest is not None:
            for key in [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
                del optimizer.state[key]
            optimizer.state.update(rest())
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    def _apply_general(self, groups: Sequence[Thunks], states: States, rest: Thunk | None) -> None:
        """Pass a state dict with torch's numbers to the optimizer's own ``load_state_dict()``, which replaces all state."""
        optimizer, numbers, packed = self.optimizer, dict[torch.Tensor, int](), []
        for group, thunks in zip(optimizer.param_groups, groups, strict=False):
            for parameter in group["params"]:
                numbers.setdefault(parameter, len(numbers))
            values = {**group, **{key: value() for key, value in thunks.items()}}
            packed.append({**values, "params": [numbers[parameter] for parameter in group["params"]]})
        state = {parameter: {key: value() for key, value in thunks.items()} for parameter, thunks in states}
        others = {} if rest is None else rest()
        is_whole = rest is not None and len(state) == len(numbers)
        if not is_whole and (present := view_general(optimizer, self.members)) is not None:
            # What is not loaded stays, as in a plain optimizer.
            parameters = {owner: parameter for _, parameter, owner in parameters_of(optimizer, self.members)}
            state = {parameters[owner]: dict(entry) for owner, entry in present.states} | state
            others = present.rest if rest is None else others
        numbered: dict[Any, Any] = {numbers[parameter]: {**entry} for parameter, entry in state.items() if entry}
        numbered |= others
        optimizer.load_state_dict({"state": numbered, "param_groups": packed})
        for parameter, entry in state.items():
            _undo_casts(parameter, entry, optimizer.state.get(parameter, {}))


def _undo_casts(parameter: torch.Tensor, given: Mapping[Any, Any], taken: dict[Any, Any]) -> None:
    """Replace the tensors of a parameter's state that torch's ``load_state_dict()`` has cast to the parameter's dtype."""
    for key, tensor in given.items():
        cast = taken.get(key)
        if (
            isinstance(tensor, torch.Tensor)
            and isinstance(cast, torch.Tensor)
            and tensor.dtype != cast.dtype == parameter.dtype
        ):
            parts = zip(local_tensors(cast), local_tensors(tensor), strict=True)
            # Other values are the optimizer's own conversion.
            if all(torch.equal(one, source.to(one)) for one, source in parts):
                taken[key] = tensor.to(cast.device)


def _returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one value of a group; a present tensor (a capturable learning rate) is filled, not replaced."""
    here = group.get(key)
    if isinstance(here, torch.Tensor) and isinstance(value, float | int):
        here.detach().fill_(value)
    else:
        group[key] = value


def load_optimizer(optimizer: Optimizer, path: Path, index: Index, matcher: Matcher) -> None:
    """Request from *matcher* all that an optimizer holds, from the optimizer of the checkpoint that has its name."""
    matcher.claim(path)
    matcher.note_optimizer(path)
    found = matcher.find(path)
    node = None if found is None else found.node
    saved = read_form(node, split_name(matcher.stored_name(path)))
    if saved is None:
        if node is None:
            matcher.make_ups[id(innermost(optimizer))] = MakeUp()
        _load_own_form(optimizer, path, node, matcher)
        return
    target = OptimizerTarget(optimizer, path, index, matcher)
    if not is_plain(optimizer) and not matcher.selects_whole(path, "it has its own load_state_dict()"):
        return
    for owner, parameter in own_parameters(optimizer, target.members, index).items():
        matcher.want(owner, parameter, index.slice_of(parameter))
    misfit = class_misfit(target.keeper, saved) if matcher.touches(path) else None
    if misfit is not None:
        for place in _places(target):  # ``only`` may name these places, though nothing of them is loaded
            matcher.selects(place)
        note_make_up(target, MakeUp)
        matcher.mismatch(path, misfit)
        return
    ids = target.pair(saved)
    groups, states = _want_groups(target, saved, ids), _want_states_of_all(target, saved, ids)
    if not saved.flat:  # it has a group for each parameter, whatever groups the optimizer had
        note_make_up(target, lambda: _make_up(target, saved, ids, groups))
    target.apply_later(groups, states, target.want_rest(saved))


def note_make_up(target: OptimizerTarget, make_up: Callable[[], MakeUp]) -> None:
    """Note what becomes of the groups of an optimizer for its schedulers, if the state has any."""
    if target.index.schedulers_of(target.optimizer) and target.matcher.touches(target.path):
        target.matcher.make_ups[id(innermost(target.optimizer))] = make_up()


def _make_up(
    target: OptimizerTarget, saved: SavedOptimizer, ids: Mapping[Path, Id], groups: Sequence[Thunks]
) -> MakeUp:
    """Return what becomes of the groups of an optimizer whose values all come from the optimizer of the checkpoint."""
    pairs = list(zip(target.members, map(set, saved.members), strict=False))
    lined_up = len(target.members) == len(saved.members) and all(
        not owners or ((known := {ids[one] for one in owners if one in ids}) and known <= there)
        for owners, there in pairs
    )
    return MakeUp(bool(lined_up), [number for number, values in enumerate(groups) if "lr" in values])


def _places(target: OptimizerTarget) -> Iterator[Path]:
    """Yield the path of each entry of an optimizer."""
    yield target.path
    for number, group in enumerate(target.optimizer.param_groups):
        yield from ((*target.path, "groups", number, key) for key in group)
    yield from map(target.state_place, target.names)
    yield from target.state_places()


def _load_own_form(optimizer: Optimizer, path: Path, node: Node, matcher: Matcher) -> None:
    """Load an optimizer whose ``state_dict()`` had a form of its own."""
    if type(node) is not dict:
        matcher.miss(path)
    elif matcher.selects_whole(path, "it has its own load_state_dict()"):
        if is_plain(optimizer):
            matcher.mismatch(path, "an optimizer in the state, something else in the checkpoint")
            return
        template = optimizer.state_dict() if may_spread() else None
        value = matcher.values.fresh(path, node.get("value") if node.get(TAG) == "stateful" else node, template)
        matcher.later(lambda: optimizer.load_state_dict(value()))


def _want_groups(target: OptimizerTarget, saved: SavedOptimizer, ids: Mapping[Path, Id]) -> list[Thunks]:
    """Return getters for the values of each group."""
    matcher = target.matcher
    _skip_groups(saved, matcher)
    stored = split_name(matcher.stored_name(target.path))
    for place in saved.value_names(ids.values()):
        matcher.skip(join_name((*stored, *place)))
    without_parameters = groups_without_parameters(saved)
    wanted: list[Thunks] = []
    for number, owners in enumerate(target.members):
        values, refused = agreed_values(saved, [ids[one] for one in owners if one in ids], matcher.stored.same_tensor)
        if not owners:
            values = next(without_parameters, {})
        place = (*target.path, "groups", number)
        for problem in refused if matcher.touches(place) else ():
            matcher.problem(join_name(place), problem)
        wanted.append(target.want_values(number, values))
    return wanted


def _skip_groups(saved: SavedOptimizer, matcher: Matcher) -> None:
    """Mark the tensors of the saved groups as known, whether a group here uses them or not."""
    for name in tensor_names([list(group.values()) for group in saved.groups]):
        matcher.skip(name)


def _want_states_of_all(target: OptimizerTarget, saved: SavedOptimizer, ids: Mapping[Path, Id]) -> States:
    """Return getters for each parameter's state; a parameter that the saved optimizer lacks is a difference."""
    matcher = target.matcher
    if saved.by_numbers and not ids:
        matcher.problem(join_name(target.path), numbers_misfit(target, saved))
        return []
    for owner in (owner for some in target.members for owner in some if owner not in ids):
        why = f"the optimizer of the checkpoint has no parameter {target.names[owner]}"
        matcher.miss(target.state_place(owner), why)
    sources = {owner: (saved, one) for owner, one in ids.items()}
    return target.want_states(sources, lambda owner, why: matcher.problem(join_name(target.state_place(owner)), why))


def numbers_misfit(target: OptimizerTarget, saved: SavedOptimizer) -> str:
    """Return why the numbers in the checkpoint cannot be those of the parameters here."""
    there, here = ([len(some) for some in members] for members in (saved.members, target.members))
    sizes = f"groups of {here} parameters in the state, of {there}" if here != there else "parameters in another order"
    return (
        f"{sizes} in the checkpoint, which has an optimizer's state_dict(): "
        "that knows parameters by their numbers only; make the optimizer as it was, or save the optimizer itself"
    )


# Optimizer state dicts for which the checkpoint has another form: their node is written in the form of the present dict.
#
# A dict of the same form is loaded as a plain value, unless the two are of optimizers of different classes.
#
# A program may save ``optimizer`` and load into ``optimizer.state_dict()``, or save that and load into the result of
# torch's ``get_optimizer_state_dict()``. The node from `node_for` has the form of the present dict, refers to the tensors
# of the checkpoint, and is loaded like any other value.


def node_for(here: object, path: Path, matcher: Matcher) -> Node | None:
    """Return the node to fill *here* from, where *here* and the checkpoint have an optimizer in different forms; else None.

    Differences are noted; the node is ``UNSET`` where nothing can be loaded.
    """
    found = matcher.find(path) if is_form(here) else None
    if found is None:
        return None
    saved, own = read_form(found.node, split_name(matcher.stored_name(path))), read_form(here, path)
    if saved is None or own is None:
        return None
    same_form = saved.is_dict and own.flat == saved.flat and (own.flat or own.by_numbers == saved.by_numbers)
    pairs = {} if same_form else pair_up(own.members, saved, flat=own.flat)
    if not (saved.is_dict or own.by_numbers):
        pairs = {name: one for name, one in pairs.items() if not _is_other_name(str(name), str(one), matcher)}
    misfit = dict_misfit(own, saved)
    if not same_form and not pairs and any(own.members):
        counts, saved_counts = (list(map(len, members)) for members in (own.members, saved.members))
        misfit = f"groups of {counts} parameters in the state, of {saved_counts} in the checkpoint, and no common names"
    if misfit is None and same_form:
        return None
    if misfit is not None:
        if matcher.selects(path):
            matcher.mismatch(path, misfit)
        return msgspec.UNSET
    for problem in _differences(own, saved, pairs) if matcher.selects(path) else ():
        matcher.mismatch(path, problem)
    groups = []
    for group, members in zip(own.groups, own.members, strict=True):
        values, refused = agreed_values(
            saved, [pairs[one] for one in members if one in pairs], matcher.stored.same_tensor
        )
        for problem in refused:
            matcher.mismatch(path, problem)
        # Without a saved value, a group keeps its plain value, such as one for how a step is computed.
        kept = {key: value for key, value in group.items() if type(value) in (type(None), bool, int, float, str)}
        groups.append({**kept, **values})
    _skip_groups(saved, matcher)
    states = {one: saved.state[there] for one, there in pairs.items() if there in saved.state}
    return _write_flat(own, groups, states) if own.flat else _write(here, groups, states)


def _is_other_name(name: str, one: str, matcher: Matcher) -> bool:
    """Return whether *name*, within a module above parameter *one* of the checkpoint, is another tensor there."""
    stored = matcher.stored
    places = (join_name((*above, *name.split("."))) for above in map(split_name, prefixes(one)))
    return any(stored.facts(place) and stored.same_tensor(place) != stored.same_tensor(one) for place in places)


def _differences(own: SavedOptimizer, saved: SavedOptimizer, pairs: Mapping[Id, Id]) -> Iterator[str]:
    for one in (one for some in own.members for one in some if one not in pairs):
        yield f"the optimizer of the checkpoint has no parameter {one}"
    for one in sorted(map(str, saved.group_of().keys() - set(pairs.values()))):
        yield f"the optimizer of the state has no parameter {one}"


def _write(here: Any, groups: list[dict[str, Node]], states: Mapping[Id, Mapping[Id, Node]]) -> Node:
    named = [
        {**group, **{key: list(own[key]) for key in NAMES if key in own}}
        for group, own in zip(groups, here["param_groups"], strict=True)
    ]
    return {"state": _write_dict({one: _write_dict(entry) for one, entry in states.items()}), "param_groups": named}


def _write_flat(own: SavedOptimizer, groups: list[dict[str, Node]], states: Mapping[Id, Mapping[Id, Node]]) -> Node:
    state: dict[Id, Node] = {f"state.{one}.{key}": node for one, entry in states.items() for key, node in entry.items()}
    said: dict[Id, Node] = {
        f"param_groups.{one}.{key}": node
        for (one,), group in zip(own.members, groups, strict=True)
        for key, node in group.items()
    }
    return _write_dict({**state, **said})


def _write_dict(items: Mapping[Id, Node]) -> Node:
    if TAG not in items and all(type(key) is str for key in items):
        return dict(items)
    return {TAG: "dict", "items": [[key, node] for key, node in items.items()]}
