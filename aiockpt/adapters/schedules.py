"""Learning rate schedulers: their state, and their rates where the optimizer has other groups than at the save.

The state is the ``state_dict()`` of a scheduler, without the objects that the program makes anew.
``LRScheduler.state_dict()`` returns all attributes. Of a class that does not override it:

- functions, and lists and dicts with functions in them, are left out, as by torch's own ``LambdaLR``: the scheduler that
  loads keeps its own. So are an optimizer under another name than ``optimizer``, and weak references;
- an inner scheduler (a warm-up around another one) is saved and loaded by its own state.

A scheduler of another class whose attributes have other names is a mismatch: it would accept them and never read them.

The saved rates belong to the saved groups. For other groups, or an optimizer of another kind, a scheduler keeps the rates
of the program and goes on at the saved position: a copy of it is stepped there, with a stand-in for the optimizer. The
copy's state must then equal the saved one in everything but rates; else the schedule is refused, before anything changes.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from aiockpt.adapters.kinds import SCHEDULED, innermost
from aiockpt.adapters.matcher import MakeUp, Matcher
from aiockpt.adapters.optimizer_forms import pairs_of
from aiockpt.adapters.optimizer_target import set_value
from aiockpt.adapters.stored import members_of
from aiockpt.adapters.tensors import may_spread
from aiockpt.format.names import join_name
from aiockpt.state.codecs import class_name, field
from aiockpt.state.tree import TAG, Node, Path

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    weakref.ReferenceType,
    Optimizer,
)
_RATES = re.compile(r"lr|eta_m|momentum|beta1")
"""Matches the attributes of a scheduler that are rates of its groups, or depend on the class of their optimizer."""
_MULTIPLY = (
    lr_scheduler.ConstantLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.LinearLR,
    lr_scheduler.MultiplicativeLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.StepLR,
)
"""Schedules that multiply the present rate: the order in which several of them are stepped does not matter."""
_STEPS_LIMIT = 3_000_000
"""A position beyond it is refused: to replay it takes 10 to 20 µs a step."""


def get_state(value: LRScheduler) -> Any:
    state: Any = value.state_dict()
    if not _returns_attributes(value) or not isinstance(state, dict):
        return state
    given = {}
    for key, item in state.items():
        if isinstance(item, LRScheduler):
            given[key] = get_state(item)
        elif not _has_function(item):
            given[key] = item
    return given


def set_state(value: LRScheduler, state: Any) -> None:
    """Load into a scheduler the state that `get_state` returned for one.

    One that never stepped (saved in the first epoch, behind its last batch) may step before its optimizer does so in this
    process. torch would warn of that, and skip nothing: the optimizer stepped before the save.
    """
    if _returns_attributes(value) and isinstance(state, dict):
        inner = {key for key in state if isinstance(vars(value).get(key), LRScheduler)}
        for key in inner:
            set_state(vars(value)[key], state[key])
        state = {key: item for key, item in state.items() if key not in inner}
    value.load_state_dict(state)
    if getattr(value, "_step_count", 0) == 1:
        # The mark of torch's own wrapper around `step` (`patch_track_step_called` in `LRScheduler.__init__`).
        cast("Any", value.optimizer)._opt_called = True  # noqa: SLF001  not public; a test keeps it there


def _returns_attributes(value: LRScheduler) -> bool:
    cls = type(value)
    return cls.state_dict is LRScheduler.state_dict and cls.load_state_dict is LRScheduler.load_state_dict


def _has_function(item: Any) -> bool:
    """Return whether an attribute is, or contains at any depth, an object that the program makes anew."""
    if isinstance(item, _FUNCTIONS):
        return True
    if type(item) is dict:
        return any(map(_has_function, item.values()))
    return type(item) in (list, tuple) and any(map(_has_function, item))


def go_on(schedulers: Iterable[tuple[LRScheduler, Path]], matcher: Matcher) -> None:
    """Request the state of schedulers, once the groups of all optimizers are known."""
    stand_ins: dict[int, _StandIn] = {}
    for value, path in schedulers:
        found = matcher.find(path)
        node: Any = None if found is None else found.node
        saved_by = None
        if type(node) is dict and node.get(TAG) == "stateful":
            saved_by, node = node.get("class"), node.get("value")
        saved = pairs_of(node)
        if saved is None:
            matcher.miss(path)
        elif (misfit := _class_misfit(value, saved_by, saved)) is not None:
            matcher.mismatch(path, misfit)
            saved = None
        key, count = id(innermost(value.optimizer)), len(value.optimizer.param_groups)
        make_up = matcher.make_ups.get(key)
        if make_up is None:
            # The load does not touch the optimizer: groups of another number are others for sure.
            was = None if saved is None else _count(saved.get("_last_lr"))
            make_up = MakeUp(lined_up=was in (None, count))
        if make_up.lined_up:
            if saved is not None:
                template = get_state(value) if may_spread() else None
                matcher.hand_over(value, path, partial(set_state, value), matcher.values.fresh(path, node, template))
        elif not isinstance(value, ReduceLROnPlateau):
            if key not in stand_ins:
                stand_ins[key] = _StandIn(value.optimizer)
            _load_changed(value, path, matcher, stand_ins[key], saved, saved_by)
        elif saved is not None:
            _load_plateau(value, path, matcher, node, saved, make_up.goes_on)
    for stand_in in stand_ins.values():
        matcher.later(stand_in.set_rates)


def _class_misfit(value: LRScheduler, saved_by: object, keys: Collection[str]) -> str | None:
    """Return why a scheduler cannot continue from the saved state of another, or None.

    Args:
        saved_by: the class that saved it; None where unknown.
        keys: the keys of the saved state.
    """
    state = get_state(value)
    if _is_saved_class(value, saved_by) or not isinstance(state, Mapping):
        return None
    own, theirs = set(state), set(keys)
    if not (own - theirs and theirs - own):
        return None
    there = saved_by.rpartition(".")[2] if isinstance(saved_by, str) else "a scheduler of another class"
    return (
        f"{type(value).__qualname__} in the state (with {_words(own - theirs)}), {there} in the checkpoint (with "
        f"{_words(theirs - own)})"
    )


def _is_saved_class(value: LRScheduler, saved_by: object) -> bool:
    return any(class_name(cls) == saved_by for cls in type(value).__mro__)


def _words(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys)))


def _count(node: Node) -> int | None:
    """Return the length of a list in a node; a long list of numbers is stored as a tensor."""
    if type(node) is dict and node.get(TAG) == "numbers":
        count: int = field(node, "count", int)
        return count
    return len(node) if type(node) is list else None


# Schedules of an optimizer whose groups are not those that were saved.


class _Group(dict[str, Any]):
    """A group of an optimizer that notes which of its keys are set."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        super().__init__({key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in group.items()})
        self.keys_set = {key for key in SCHEDULED if key in group} | getattr(group, "keys_set", set())

    def __setitem__(self, key: str, value: Any) -> None:
        self.keys_set.add(key)
        super().__setitem__(key, value)


class _StandIn(Optimizer):
    """Stands for an optimizer while copies of its schedulers are stepped.

    Attributes:
        stepped: the names of the schedulers that were stepped, and whether each multiplies the present rate.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # That of `Optimizer` would need parameters, and make hooks.
        self._optimizer = optimizer
        self.defaults = optimizer.defaults
        self.param_groups: list[Any] = list(map(_Group, optimizer.param_groups))
        self._opt_called = True
        self.stepped: dict[str, bool] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""

    # Schedulers warn of an optimizer that lacks this mark of theirs.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001

    def set_rates(self) -> None:
        """Set the values of the optimizer's groups that schedulers have set here."""
        for group, here in zip(self._optimizer.param_groups, self.param_groups, strict=True):
            for key in here.keys_set:
                set_value(group, key, here[key].item() if isinstance(here[key], torch.Tensor) else here[key])


class _RefusedError(Exception):
    """A schedule cannot go on from the saved position; the message says why."""


def _load_changed(
    value: LRScheduler,
    path: Path,
    matcher: Matcher,
    stand_in: _StandIn,
    saved: Mapping[Any, Node] | None,
    saved_by: object,
) -> None:
    """Request the saved position of a schedule with the rates of the program; without *saved* state, its present one."""
    name, before = join_name(path), list(map(_Group, stand_in.param_groups))
    try:
        replayed = _replay(value, name, matcher, stand_in, saved, saved_by)
    except _RefusedError as refused:
        stand_in.param_groups[:] = before
        matcher.mismatch(
            path,
            f"the groups of its optimizer have changed, and the schedule cannot go on with the new ones: {refused}; or "
            f'strict={{"{name}": False}} keeps it as it is here',
        )
        return
    if saved is not None:
        matcher.pass_over(path)
        matcher.rewrites(path)
        matcher.hand_over(value, path, partial(set_state, value), lambda: get_state(replayed))
        rates = ", ".join(f"{float(group['lr']):.6g}" for group in stand_in.param_groups)
        matcher.note(
            f"{name}: the groups of its optimizer have changed; it goes on at {_position(saved)}, with the rates that the "
            f"schedule here has there: {rates}"
        )


def _replay(
    value: LRScheduler,
    name: str,
    matcher: Matcher,
    stand_in: _StandIn,
    saved: Mapping[Any, Node] | None,
    saved_by: object,
) -> LRScheduler:
    """Return a copy of a scheduler that was stepped to the *saved* position.

    Raises:
        _RefusedError: it cannot be stepped there, or its state is another one then.
    """
    replayed = _copy(value, stand_in)
    if saved is None:
        return replayed
    if saved_by is not None and not _is_saved_class(value, saved_by):
        raise _RefusedError(f"{type(value).__qualname__} in the state, {saved_by} in the checkpoint")
    write = matcher.values.encoder().encode
    here, there = _position(write(get_state(replayed), ())), _position(saved)
    if here is None or there is None:
        raise _RefusedError("it keeps no position (last_epoch)")
    if there - here > _STEPS_LIMIT:
        raise _RefusedError(f"its position {there} is more than {_STEPS_LIMIT} steps away")
    if here > there:
        raise _RefusedError(f"it is at {here}, and the checkpoint at {there}; load before it is stepped")
    if there > here:
        multiplies = isinstance(value, _MULTIPLY)
        if stand_in.stepped and not (multiplies and all(stand_in.stepped.values())):
            others = _words(stand_in.stepped)
            raise _RefusedError(f"{others} steps the same rates, and the order is not known; begin one of them anew")
        stand_in.stepped[name] = multiplies
    try:
        for _ in range(there - here):
            replayed.step()
    except Exception as error:
        raise _RefusedError(f"it cannot be stepped to {there} ({error!r}); make it as it was at the save") from error
    # A scheduler that was made with last_epoch= has counted fewer steps: torch's own, but `SWALR`, do not depend on that.
    counts_matter = type(value).__module__ != LRScheduler.__module__
    if differing := list(_differing(write(get_state(replayed), ()), saved, counts_matter=counts_matter)):
        raise _RefusedError(f"{'; '.join(differing)}; make it as it was at the save")
    return replayed


def _copy(value: LRScheduler, stand_in: _StandIn) -> LRScheduler:
    """Return a copy of a scheduler with another optimizer.

    Raises:
        _RefusedError: an attribute cannot be copied.
    """
    # Modules and parameters are no part of a schedule, and may be large.
    memo: dict[int, Any] = {id(one): one for one in vars(value).values() if isinstance(one, nn.Module)}
    memo |= {id(value.optimizer): stand_in, id(innermost(value.optimizer)): stand_in}
    memo[id(value.optimizer.param_groups)] = stand_in.param_groups
    for group, twin in zip(value.optimizer.param_groups, stand_in.param_groups, strict=True):
        memo |= {id(group): twin} | {id(one): one for one in group["params"]}
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise _RefusedError(f"it cannot be copied ({error!r})") from error


def _position(state: Node) -> int | None:
    """Return how often a scheduler was stepped, from the node of its state; that of a chain is its first one's."""
    members = members_of(state)
    if "last_epoch" in members:
        return members["last_epoch"] if type(members["last_epoch"]) is int else None
    inner = members_of(members.get("_schedulers"))
    return _position(inner[0]) if inner else None


def _differing(own: Node, saved: Node, name: str = "", *, counts_matter: bool) -> Iterator[str]:
    """Yield as text each attribute, other than rates, in which a scheduler's state differs from the saved one."""
    here, there = members_of(own), members_of(saved)
    for key in here:
        if key not in there or (type(key) is str and _RATES.search(key)) or here[key] == there[key]:
            continue
        if key == "_step_count" and not counts_matter:
            continue
        inner = f"{name}.{key}".lstrip(".")
        if members_of(here[key]) and len(members_of(here[key])) == len(members_of(there[key])):
            yield from _differing(here[key], there[key], inner, counts_matter=counts_matter)
        else:
            yield f"{inner} is {here[key]!r:.40} here, {there[key]!r:.40} in the checkpoint"


def _load_plateau(
    value: ReduceLROnPlateau,
    path: Path,
    matcher: Matcher,
    node: Node,
    saved: Mapping[Any, Node],
    goes_on: Collection[int],
) -> None:
    """Request the state of a scheduler that reduces the present rates, if these must be right: see `_are_reduced`."""
    if not _are_reduced(value, saved, goes_on):
        name = join_name(path)
        matcher.mismatch(
            path,
            "the groups of its optimizer have changed, and it does not record how far it has reduced their rates; "
            f'begin it anew with strict={{"{name}": False}}, and set the rates after the load',
        )
        return

    def take(state: Mapping[str, Any]) -> None:
        kept = {key: one for key, one in get_state(value).items() if _RATES.search(key)}
        last_lr = [copy.copy(group["lr"]) for group in value.optimizer.param_groups]
        set_state(value, {**state, **kept, "_last_lr": last_lr})

    matcher.hand_over(value, path, take, matcher.values.fresh(path, node))


def _are_reduced(value: ReduceLROnPlateau, saved: Mapping[Any, Node], goes_on: Collection[int]) -> bool:
    """Return whether the rate of each group is that of the program, reduced as often as at the save.

    Args:
        goes_on: the groups whose rate is that of the checkpoint; the others have the program's, which is not reduced.
    """
    last, patience = saved.get("last_epoch"), saved.get("patience")
    if type(last) is not int or type(patience) is not int or patience < 0:
        return False
    most, there = last // (patience + 1), members_of(saved.get("_last_lr")).values()
    for number, (group, least) in enumerate(zip(value.optimizer.param_groups, value.min_lrs, strict=True)):
        rate = float(group["lr"])
        # Only some dozens of reductions matter: then a rate is 0 or at its minimum.
        reached = [rate] + [rate := max(rate * value.factor, least) for _ in range(min(most, 1000))]
        if most and number not in goes_on:
            return False
        if number in goes_on and not any(
            type(one) is float and math.isclose(one, rate) for one in there for rate in reached
        ):
            return False
    return True
