"""Loading of optimizers whose make-up has changed since the step was saved: state follows its parameter, by name.

Requested by ``load(…, optimizer_state="by_parameter")``. All optimizers of the checkpoint count as one store of state:

- A parameter gets its state from the optimizer that had it; where several had it, from the one with the name of the
  optimizer here. It must fit: an optimizer whose groups have the same values by default, a group of the same kind, a
  parameter of the same shape and dtype. What does not fit, and what is new, begins anew, and is reported by name.
- A group with just the parameters of a group of the checkpoint continues with its values. Any other keeps what the program
  set (what its group has and differs from the optimizer's default), and loads the rest, such as a learning rate that a
  schedule has moved; what differs is reported.
- State of the checkpoint whose parameter no optimizer here has is skipped, and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from aiockpt.adapters.index import Index
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.optimizer import is_plain, own_parameters
from aiockpt.adapters.optimizer_forms import HOW_TO_STEP, FoundOptimizer, Id, agreed_values, class_misfit
from aiockpt.adapters.optimizer_target import (
    OptimizerMatch,
    Thunks,
    apply_later,
    load_optimizer,
    numbers_misfit,
    want_states,
)
from aiockpt.adapters.stored import members_of
from aiockpt.format.names import join_name, split_name
from aiockpt.state.tree import TAG, Node, Path

_NOT_OF_THE_OPTIMIZER = {"params", "param_names", *HOW_TO_STEP}


def load_by_parameter(optimizer: Any, path: Path, index: Index, matcher: Matcher) -> None:
    """Request the state of each parameter of an optimizer, from whichever optimizer of the checkpoint has it."""
    if not matcher.optimizers:
        load_optimizer(optimizer, path, index, matcher)
    elif is_plain(optimizer) or matcher.selects_whole(path, "it has its own load_state_dict()"):
        _ByParameter(optimizer, path, index, matcher).load()


def tell_left(matcher: Matcher) -> None:
    """Report which state of the checkpoint is skipped, because no optimizer of the whole state has its parameter."""
    for found in matcher.optimizers or ():
        name = join_name(found.path)
        for one in [one for some in found.saved.members for one in some if one not in found.met]:
            matcher.tell(f"{name}.state.{one}: left in the checkpoint: no optimizer of the state has this parameter")


class _Store(msgspec.Struct, frozen=True):
    """An optimizer of the checkpoint beside the one here; why their classes do not fit, or None; group of each parameter."""

    found: FoundOptimizer
    match: OptimizerMatch
    misfit: str | None
    group_of: Mapping[Id, int]


class _ByParameter:
    def __init__(self, optimizer: Any, path: Path, index: Index, matcher: Matcher) -> None:
        self._path, self._index, self._matcher = path, index, matcher
        at = split_name(matcher.stored_name(path))
        self._sources: list[_Store] = []
        for found in sorted(matcher.optimizers or (), key=lambda one: one.path != at):
            match = OptimizerMatch(optimizer, path, index, found.saved, matcher)
            matcher.pass_over(path, stored=join_name(found.path))
            if found.saved.by_numbers and not match.ids and found.path == at:
                matcher.problem(join_name(path), numbers_misfit(match))
            elif found.saved.by_numbers and found.path != at:  # its numbers are of other parameters
                match.ids = {}
            self._sources.append(_Store(found, match, _class_misfit(match), found.saved.group_of()))
        self._match = self._sources[0].match
        self._at = at

    def load(self) -> None:
        """Request the state."""
        matcher, match = self._matcher, self._match
        self._want_own_parameters()
        groups: list[Thunks] = []
        chosen: dict[Path, _Store] = {}
        for number, owners in enumerate(match.members):
            chosen |= {owner: source for owner in owners if (source := self._choose(owner, number)) is not None}
            place = (*self._path, "groups", number)
            values = self._values_of(number, [(owner, chosen[owner]) for owner in owners if owner in chosen])
            groups.append(
                {
                    key: matcher.value((*place, key), node, match.optimizer.param_groups[number].get(key))
                    for key, node in values.items()
                    if matcher.selects((*place, key))
                }
            )
        states = []
        for source in self._sources:
            ids = source.match.ids
            source.match.ids = {owner: ids[owner] for owner, one in chosen.items() if one is source}
            states += want_states(source.match, self._begin_anew)
        met = {id(parameter) for parameter, _ in states}
        every = (parameter for group in match.optimizer.param_groups for parameter in group["params"])
        apply_later(match, groups, [*states, *((one, Thunks()) for one in every if id(one) not in met)], self._rest())

    def _want_own_parameters(self) -> None:
        """Request parameters that have no name but their place, where the places are what they were."""
        first, match = self._sources[0], self._match
        same = first.found.path == self._at and _sizes(first.found.saved.members) == _sizes(match.members)
        for owner, parameter in own_parameters(match.optimizer, match.members, self._index):
            if same:
                self._matcher.want(owner, parameter, self._index.slice_of(parameter))
            else:
                for source in self._sources:
                    source.match.ids.pop(owner, None)

    def _rest(self) -> Any:
        first = self._sources[0]
        if first.found.path != self._at or first.misfit is not None or first.found.saved.rest is None:
            return None
        return self._matcher.value((*self._path, "rest"), first.found.saved.rest, fresh=True)

    def _begin_anew(self, owner: Path, why: str) -> None:
        place = (*self._path, "state", *owner)
        if self._matcher.touches(place):
            self._matcher.tell(f"{join_name(place)}: begins anew: {why}")

    def _choose(self, owner: Path, number: int) -> _Store | None:
        """Return the optimizer of the checkpoint that *owner*, in the group *number* here, gets its state from; or None."""
        having = [source for source in self._sources if owner in source.match.ids]
        for source in having:
            source.found.met.add(source.match.ids[owner])
        if not having:
            self._begin_anew(owner, "no optimizer of the checkpoint has this parameter")
            return None
        misfits = [source.misfit or self._group_misfit(source, owner, number) for source in having]
        fitting = [source for source, misfit in zip(having, misfits, strict=True) if misfit is None]
        if not fitting:
            self._begin_anew(owner, next(filter(None, misfits)))
        elif len(fitting) > 1 and fitting[0].found.path != self._at:
            names = " and ".join(join_name(source.found.path) for source in fitting)
            self._begin_anew(owner, f"{names} of the checkpoint have this parameter; map= says which is meant")
        else:
            return fitting[0]
        return None

    # ---------------------------------------------------------------- groups

    def _group_misfit(self, source: _Store, owner: Path, number: int) -> str | None:
        """Return in words why state does not fit, because the same class stepped its group in another way; or None."""
        saved = source.found.saved.groups[source.group_of[source.match.ids[owner]]]
        here = self._here(number)
        if (lacking := here.keys() - saved.keys()) and (theirs := saved.keys() - here.keys()):
            return f"a group with {_keys(lacking)} in the state, with {_keys(theirs)} in the checkpoint"
        if self._is_as_saved(source, number):
            return None
        for key in sorted(here.keys() & saved.keys()):
            if type(here[key]) in (bool, str) and saved[key] != here[key] and self._is_given(number, key):
                return f"a group with {key}={here[key]!r} in the state, {key}={saved[key]!r} in the checkpoint"
        return None

    def _values_of(self, number: int, members: Sequence[tuple[Path, _Store]]) -> dict[str, Node]:
        """Return what the group *number* gets from the groups that its parameters were in."""
        used = list({id(source): source for _, source in members}.values())
        if len(used) == 1 and self._is_as_saved(used[0], number):
            ids = [used[0].match.ids[owner] for owner, _ in members]
            return agreed_values(used[0].found.saved, ids, self._matcher.same_tensor)[0]
        said: dict[str, list[Node]] = {}
        for source in used:
            of_it = [source.match.ids[owner] for owner, one in members if one is source]
            for group in dict.fromkeys(source.group_of[one] for one in of_it):
                for key, node in source.found.saved.groups[group].items():
                    said.setdefault(key, []).append(node)
        here, taken, place = self._here(number), dict[str, Node](), (*self._path, "groups", number)
        for key, nodes in said.items():
            if key not in here or not self._matcher.selects((*place, key)):
                continue
            own = self._matcher.encode_facts(lambda encoder, key=key: {key: encoder.encode(here[key], (key,))})[key]  # type: ignore[misc]
            if all(node == own for node in nodes):
                continue
            takes = all(node == nodes[0] for node in nodes) and not self._is_given(number, key)
            there = " and ".join(dict.fromkeys(map(_shown, nodes)))
            which = "that of the checkpoint" if takes else "what is here"
            self._matcher.tell(
                f"{join_name((*place, key))}: {_shown(own)} here, {there} in the checkpoint; {which} is taken"
            )
            if takes:
                taken[key] = nodes[0]
        return taken

    def _is_as_saved(self, source: _Store, number: int) -> bool:
        """Return whether a group has just the parameters of one of the checkpoint."""
        ids = {source.match.ids.get(owner) for owner in self._match.members[number]}
        return any(set(some) == ids for some in source.found.saved.members if some)

    def _here(self, number: int) -> dict[str, Any]:
        group = self._match.optimizer.param_groups[number]
        return {key: value for key, value in group.items() if key not in _NOT_OF_THE_OPTIMIZER}

    def _is_given(self, number: int, key: str) -> bool:
        """Return whether the program set a value of the group other than the optimizer's default."""
        group = self._match.optimizer.param_groups[number]
        defaults = getattr(self._match.keeper, "defaults", {})
        # A schedule that was made before the load has moved the rate, and keeps what it was.
        value = group.get("initial_lr", group[key]) if key == "lr" else group[key]
        return key not in defaults or bool(defaults[key] != value)


def _class_misfit(match: OptimizerMatch) -> str | None:
    """Return in a few words that the classes do not fit, since it is reported for each parameter; or None."""
    misfit, there = class_misfit(match.keeper, match.saved), match.saved.class_name
    if misfit is None or there is None:
        return misfit
    return f"{type(match.keeper).__qualname__} in the state, {there.rpartition('.')[2]} in the checkpoint"


def _sizes(members: Sequence[Sequence[Any]]) -> list[int]:
    return list(map(len, members))


def _keys(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys)))


def _shown(node: Node) -> str:
    """Return a plain value of a group as text for a message."""
    if type(node) is dict and node.get(TAG) == "tuple":
        return f"({', '.join(map(_shown, members_of(node).values()))})"
    return "a tensor" if type(node) is dict else f"{node!r:.40}"
