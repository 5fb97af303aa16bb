"""Loading of optimizers that have changed since the save (classes, groups, number): state follows its parameter, by name.

Requested by ``load(…, optimizer_state="by_parameter")``. All optimizers of the checkpoint count as one store of state:

- A parameter gets its state from the saved optimizer that had it; where several had it, from the one with the name of the
  optimizer here. The state must fit: from an optimizer whose groups have the same default keys, from a group of the same
  kind, for a parameter of the same shape and dtype. Otherwise it begins anew, as for a new parameter, and is reported.
- A group with exactly the parameters of a saved group continues with its values. Any other group keeps the values that the
  program set (those that differ from the optimizer's defaults), and loads the rest, such as a learning rate that a schedule
  has changed. Differing values are reported.
- The rates of groups that a scheduler of the state sets are left to that, unless all groups are the saved ones.
- Saved state whose parameter is in no optimizer here is skipped, and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import HOW_TO_STEP, NAMES, SCHEDULED, scheduler_in
from aiockpt.adapters.matcher import MakeUp, Matcher
from aiockpt.adapters.optimizer import is_plain, own_parameters, parameters_of
from aiockpt.adapters.optimizer_forms import Id, SavedOptimizer, agreed_values, class_misfit, groups_without_parameters
from aiockpt.adapters.optimizer_target import OptimizerTarget, Thunks, load_optimizer, note_make_up, numbers_misfit
from aiockpt.adapters.stored import show_value
from aiockpt.format.names import join_name, split_name
from aiockpt.state.tree import Node, Path


def load_by_parameter(optimizer: Any, path: Path, index: Index, matcher: Matcher) -> None:
    """Request the state of each parameter of an optimizer, from the optimizer of the checkpoint that has it."""
    if not matcher.optimizers:
        load_optimizer(optimizer, path, index, matcher)
    elif is_plain(optimizer) or matcher.selects_whole(path, "it has its own load_state_dict()"):
        _ByParameter(OptimizerTarget(optimizer, path, index, matcher)).load()


def note_unused(matcher: Matcher) -> None:
    """Report the state of the checkpoint that is skipped because no optimizer of the state has its parameter."""
    for saved in matcher.optimizers or ():
        name = join_name(saved.path)
        for one in [one for some in saved.members for one in some if one not in saved.met]:
            matcher.note(f"{name}.state.{one}: left in the checkpoint: no optimizer of the state has this parameter")
        if saved.rest is not None and None not in saved.met:
            matcher.note(
                f"{name}.rest: left in the checkpoint: it belongs to no parameter, and several optimizers differ"
            )


class _FoundState(msgspec.Struct, frozen=True):
    """An optimizer of the checkpoint, its identifiers of the parameters here, and why its class does not fit, or None."""

    saved: SavedOptimizer
    ids: dict[Path, Id]
    group_of: Mapping[Id, int]
    misfit: str | None


class _ByParameter:
    def __init__(self, target: OptimizerTarget) -> None:
        self._target, self._matcher = target, target.matcher
        self._at = split_name(self._matcher.stored_name(target.path))
        found = sorted(self._matcher.optimizers or (), key=lambda one: one.path != self._at)
        self._sources = list(map(self._source, found))
        self._rates_are_set = False
        self._goes_on: set[int] = set()

    def _source(self, saved: SavedOptimizer) -> _FoundState:
        target, ids = self._target, self._target.pair(saved)
        self._matcher.pass_over(target.path, stored=join_name(saved.path))
        if saved.by_numbers and saved.path != self._at:  # its numbers are of other parameters
            ids = {}
        elif saved.by_numbers and not ids:
            self._matcher.problem(join_name(target.path), numbers_misfit(target, saved))
        misfit, there = class_misfit(target.keeper, saved), saved.class_name
        if misfit is not None and there is not None:  # in a few words, since it is reported for each parameter
            own = type(target.keeper).__qualname__
            misfit = f"{own} in the state, {there.rpartition('.')[2]} in the checkpoint"
        return _FoundState(saved, ids, saved.group_of(), misfit)

    def load(self) -> None:
        """Request the state."""
        target = self._target
        self._want_own_parameters()
        chosen = [
            {owner: source for owner in owners if (source := self._choose(owner, number)) is not None}
            for number, owners in enumerate(target.members)
        ]
        sources = {owner: (one.saved, one.ids[owner]) for some in chosen for owner, one in some.items()}
        main = self._main(saved for saved, _ in sources.values())
        lined_up = self._lined_up(chosen)
        self._rates_are_set = not lined_up and any(
            isinstance(one, LRScheduler) and not isinstance(one, ReduceLROnPlateau)
            for one in map(scheduler_in, target.index.schedulers_of(target.optimizer))
        )
        empty = iter(()) if main is None else groups_without_parameters(main)
        groups = [
            target.want_values(number, self._values_of(number, chosen[number]) if owners else next(empty, {}))
            for number, owners in enumerate(target.members)
        ]
        note_make_up(target, lambda: MakeUp(lined_up, self._goes_on))
        states = target.want_states(sources, self._begin_anew)
        # A parameter without a source begins anew: with no getters its present state is removed.
        met = {id(parameter) for parameter, _ in states}
        every = (parameter for _, parameter, _ in parameters_of(target.optimizer, target.members))
        states += ((one, Thunks()) for one in every if id(one) not in met)
        target.apply_later(groups, states, None if main is None else target.want_rest(main))

    def _lined_up(self, chosen: Sequence[Mapping[Path, _FoundState]]) -> bool:
        """Return whether the groups here are those of one saved optimizer, in the same order."""
        used = {id(source): source for some in chosen for source in some.values()}
        members = zip(chosen, self._target.members, strict=True)
        here = [{some[one].ids[one] if one in some else None for one in owners} for some, owners in members]
        return len(used) == 1 and here == list(map(set, next(iter(used.values())).saved.members))

    def _want_own_parameters(self) -> None:
        """Request the parameters that are named by position only, where the positions are unchanged."""
        first, target = self._sources[0].saved, self._target
        same = first.path == self._at and list(map(len, first.members)) == list(map(len, target.members))
        for owner, parameter in own_parameters(target.optimizer, target.members, target.index).items():
            if same:
                self._matcher.want(owner, parameter, target.index.slice_of(parameter))
            else:
                for source in self._sources:
                    source.ids.pop(owner, None)

    def _main(self, sources: Iterable[SavedOptimizer]) -> SavedOptimizer | None:
        """Return the saved optimizer for what belongs to no parameter: that of the same name, else the only one used."""
        if (first := self._sources[0]).saved.path == self._at and first.misfit is None:
            return first.saved
        used = {one.path: one for one in sources}
        return next(iter(used.values())) if len(used) == 1 else None

    def _begin_anew(self, owner: Path, why: str) -> None:
        place = self._target.state_place(owner)
        if self._matcher.touches(place):
            self._matcher.note(f"{join_name(place)}: begins anew: {why}")

    def _choose(self, owner: Path, number: int) -> _FoundState | None:
        """Return the optimizer of the checkpoint that has the state for *owner*, in group *number* here; or None."""
        having = [source for source in self._sources if owner in source.ids]
        for source in having:
            source.saved.met.add(source.ids[owner])
        misfits = [source.misfit or self._group_misfit(source, owner, number) for source in having]
        fitting = [source for source, misfit in zip(having, misfits, strict=True) if misfit is None]
        if len(fitting) == 1 or (fitting and fitting[0].saved.path == self._at):
            return fitting[0]
        if fitting:
            names = " and ".join(join_name(source.saved.path) for source in fitting)
            why = f"{names} of the checkpoint have this parameter; map= says which is meant"
        else:
            why = next(filter(None, misfits), "no optimizer of the checkpoint has this parameter")
        self._begin_anew(owner, why)
        return None

    # ---------------------------------------------------------------- groups

    def _group_misfit(self, source: _FoundState, owner: Path, number: int) -> str | None:
        """Return as text why state does not fit: its group was stepped in another way by the same class; or None."""
        saved = source.saved.groups[source.group_of[source.ids[owner]]]
        here = self._here(number)
        if (lacking := here.keys() - saved.keys()) and (theirs := saved.keys() - here.keys()):
            return f"a group with {_keys(lacking)} in the state, with {_keys(theirs)} in the checkpoint"
        if self._is_as_saved(source, number):
            return None
        for key in sorted(here.keys() & saved.keys()):
            if type(here[key]) in (bool, str) and saved[key] != here[key] and self._is_set(number, key):
                return f"a group with {key}={here[key]!r} in the state, {key}={saved[key]!r} in the checkpoint"
        return None

    def _values_of(self, number: int, chosen: Mapping[Path, _FoundState]) -> dict[str, Node]:
        """Return the values of group *number* from the saved groups of its parameters, each with its source."""
        used = list({id(source): source for source in chosen.values()}.values())
        if len(used) == 1 and self._is_as_saved(used[0], number):
            ids = [used[0].ids[owner] for owner in chosen]
            values = agreed_values(used[0].saved, ids, self._matcher.stored.same_tensor)[0]
            if "lr" in values:
                self._goes_on.add(number)
            # The rate itself differs whenever a schedule has changed it.
            if "initial_lr" in values and not self._rates_are_set:
                self._takes(number, "initial_lr", [values["initial_lr"]], anyway=True)
            return values
        said: dict[str, list[Node]] = {}
        for source in used:
            groups = [source.group_of[source.ids[owner]] for owner, one in chosen.items() if one is source]
            for group in dict.fromkeys(groups):
                for key, node in source.saved.groups[group].items():
                    said.setdefault(key, []).append(node)
        taken = {}
        for key, nodes in said.items():
            if key in SCHEDULED and self._rates_are_set:
                continue
            if self._takes(number, key, nodes):
                taken[key] = nodes[0]
        if "lr" in taken:
            self._goes_on.add(number)
        return taken

    def _takes(self, number: int, key: str, nodes: Sequence[Node], *, anyway: bool = False) -> bool:
        """Return whether a value of group *number* is that of the checkpoint; report it where it differs.

        Args:
            anyway: take it even if the program set another one.
        """
        here, place = self._here(number), (*self._target.path, "groups", number, key)
        if not self._matcher.selects(place):
            return False
        if key not in here:
            # Steps have added it (the count of steps, in some optimizers): it belongs to the state of the parameters.
            return key not in SCHEDULED and all(node == nodes[0] for node in nodes)
        own = self._matcher.values.encoder().encode(here[key], (key,))
        takes = all(node == nodes[0] for node in nodes) and (anyway or not self._is_set(number, key))
        if any(node != own for node in nodes):
            there = " and ".join(dict.fromkeys(map(show_value, nodes)))
            which = "that of the checkpoint" if takes else "what is here"
            self._matcher.note(
                f"{join_name(place)}: {show_value(own)} here, {there} in the checkpoint; {which} is taken"
            )
        return takes

    def _is_as_saved(self, source: _FoundState, number: int) -> bool:
        """Return whether a group has exactly the parameters of a saved one."""
        ids = {source.ids.get(owner) for owner in self._target.members[number]}
        return any(set(some) == ids for some in source.saved.members if some)

    def _here(self, number: int) -> dict[str, Any]:
        group = self._target.optimizer.param_groups[number]
        return {key: value for key, value in group.items() if key not in (*NAMES, *HOW_TO_STEP)}

    def _is_set(self, number: int, key: str) -> bool:
        """Return whether the program set a value of the group other than the optimizer's default."""
        group = self._target.optimizer.param_groups[number]
        defaults = getattr(self._target.keeper, "defaults", {})
        # A schedule made before the load has changed the rate, and keeps the initial one.
        value = group.get("initial_lr", group[key]) if key == "lr" else group[key]
        return key != "step" and (key not in defaults or bool(defaults[key] != value))


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys)))
