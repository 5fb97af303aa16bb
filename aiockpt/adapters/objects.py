"""Saving and loading of objects with a state of their own: any with ``state_dict()``, loaders, and values of one rank.

A value of one rank (`aiockpt.adapters.rng.per_rank`, a random generator, a reader of data) is stored separately for each
rank. The readers of a loader are stored under their data-parallel ranks, so that any number of readers can continue.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from aiockpt.adapters.dtensors import dtensor_placed, is_dtensor, local_of, placements_of
from aiockpt.adapters.index import Index
from aiockpt.adapters.kinds import HOW_TO_STEP, NAMES, Stateful, innermost, kind_of, reads_data
from aiockpt.adapters.leaves import Run
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.optimizer import is_plain, keeper_of
from aiockpt.adapters.optimizer_forms import pairs_of
from aiockpt.adapters.optimizer_target import set_value
from aiockpt.adapters.rng import RNG, PerRank, derive_state
from aiockpt.adapters.tensors import may_spread
from aiockpt.data.data_source import warn_of_empty_loop, with_data, without_data
from aiockpt.data.loader import Loader
from aiockpt.format.names import join_name
from aiockpt.state.codecs import class_name, field
from aiockpt.state.layout import axes_in_memory
from aiockpt.state.tree import TAG, Node, Path, damaged, refuse


def write_stateful(value: Stateful, path: Path, run: Run) -> Node:
    """Write an object with ``state_dict()``, which may return any value."""
    node = {TAG: "stateful", "value": run.encode(get_state(value), path)}
    cls = scheduler_class(value)
    return node if cls is None else {**node, "class": cls}


def load_stateful(value: Any, path: Path, matcher: Matcher) -> None:
    """Load an object; the checkpoint may instead have its ``state_dict()``, saved as a plain dict."""
    if not matcher.selects_whole(path, "it has its own load_state_dict()"):
        return
    found = matcher.find(path)
    node: Any = None if found is None else found.node
    saved_by = None
    if type(node) is dict and node.get(TAG) == "stateful":
        saved_by, node = node.get("class"), node.get("value")
    elif pairs_of(node) is None:
        matcher.miss(path)
        return
    misfit = scheduler_misfit(value, saved_by, pairs_of(node) or ())
    if misfit is not None:
        matcher.mismatch(path, misfit)
        return
    template = get_state(value) if may_spread() else None
    state = matcher.values.fresh(path, node, template)
    name = join_name(path)
    keep = partial(keep_lists, value, note=lambda what: matcher.note(f"{name}: {what}"))
    matcher.hand_over(value, path, partial(set_state, value), lambda: keep(state()))


def write_loader(loader: Loader[Any], path: Path, run: Run) -> Node:
    """Write the state that the readers of a loader share, and that of this data-parallel rank, under its number.

    So peers that read the same data write equal trees, and the union of all trees has every data-parallel rank once.
    """
    held, rank = loader.held(), str(loader.rank)
    own = {rank: run.encode(held.own, (*path, "readers", rank))} if loader.saves else {}
    shared = run.encode(held.shared, (*path, "shared"))
    return {TAG: "loader", "form": held.form, "size": loader.size, "shared": shared, "readers": own}


def load_loader(loader: Loader[Any], path: Path, matcher: Matcher) -> None:
    """Load the state from which the readers of this rank continue: that of as many stored readers as they need."""
    if not matcher.selects_whole(path, "a loader resumes as a whole"):
        return
    node = matcher.find_tagged(path, "loader")
    if node is None:
        matcher.miss(path)
        return
    try:
        form, shared = node["form"], node["shared"]
        size, readers = field(node, "size", int), field(node, "readers", dict)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"is not the state of a loader ({error!r})") from error
    if (misfit := loader.misfit(form, size, readers)) is not None:
        matcher.mismatch(path, misfit)
        return
    needed = [str(rank) for rank in loader.needed_ranks(size)]
    value = matcher.values.request(path, {"shared": shared, "owns": [readers[rank] for rank in needed]})
    # The readers that this rank does not need are no difference.
    matcher.pass_over(path)

    def resume() -> None:
        saved = value()
        loader.resume(saved["shared"], saved["owns"])

    matcher.later(resume)


def write_own(value: Any, path: Path, index: Index, run: Run) -> Node:
    """Write a value of this rank: an object, or the value that `per_rank` wraps."""
    held = of_this_rank(value, index)
    is_object = kind_of(held) in ("stateful", "per_rank")
    run.per_rank[join_name(path)] = run.encode_own(with_data(held, held.state_dict()) if is_object else held, path)
    return {TAG: "per_rank"}


def load_own(value: Any, path: Path, index: Index, matcher: Matcher) -> None:
    """Load a value of this rank: an object, or the value that `per_rank` wraps."""
    if not matcher.selects_whole(path, "it belongs to one rank"):
        return
    holder = of_this_rank(value, index)
    if reads_data(holder) and matcher.stored.world_changed:
        matcher.miss(
            path,
            f"{matcher.stored.world_changed}; wrap it in aiockpt.Loader(...), so that no sample is lost or repeated",
        )
        return
    found = matcher.find_own(path)
    if found is None and isinstance(holder, RNG) and _derive_random(holder, path, matcher):
        return
    if found is None:
        matcher.miss(path, _why_none(path, matcher))
        return
    if kind_of(holder) in ("stateful", "per_rank"):
        state, may_refuse = matcher.values.request(path, found.node), isinstance(holder, OwnOptimizer)
        if reads_data(holder):
            matcher.later(lambda: warn_of_empty_loop(holder, state(), join_name(path)))
        matcher.hand_over(
            holder,
            path,
            holder.load_state_dict,
            lambda: without_data(holder, state()),
            # Generators are set last: the ``load_state_dict()`` of other objects may draw numbers.
            last=isinstance(holder, RNG),
            may_refuse=may_refuse,
        )
    elif (own := matcher.values.refill(path, holder, found.node)) is not None:
        matcher.later(lambda: setattr(value, "value", own()))


def _why_none(path: Path, matcher: Matcher) -> str | None:
    """Return why the checkpoint has no value of this rank at *path*, and a remedy; None if it has one of no rank."""
    if matcher.find(path) is None:
        return None
    if matcher.find_tagged(path, "per_rank") is None:
        return "one value for all ranks in the checkpoint; load it without aiockpt.per_rank(...)"
    changed = f" ({matcher.stored.world_changed})" if matcher.stored.world_changed else ""
    return f"this rank has none in the checkpoint{changed}; strict=False keeps what is here, only= leaves it out"


def _derive_random(rng: RNG, path: Path, matcher: Matcher) -> bool:
    """Derive the generators of a rank that is not in the checkpoint; return whether it has a state to derive them from."""
    found = matcher.find_of_another(path)
    if found is None:
        return False
    state = matcher.values.request(path, found.node)
    matcher.later(
        lambda: rng.load_state_dict(derive_state(state(), matcher.stored.rank, matcher.stored.step)), last=True
    )
    return True


# State of learning rate schedulers: their ``state_dict()``, without the objects that the program makes anew.
#
# ``LRScheduler.state_dict()`` returns all attributes. Of a class that does not override it:
#
# - functions, and lists and dicts with functions in them, are left out, as by torch's own ``LambdaLR``: the scheduler that
#   loads keeps its own. So are an optimizer under another name than ``optimizer``, and weak references;
# - an inner scheduler (a warm-up around another one) is saved and loaded by its own state.
#
# A scheduler of another class whose attributes have other names is a mismatch: it would accept them and never read them.


_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    weakref.ReferenceType,
    Optimizer,
)


def get_state(value: Any) -> Any:
    """Return the state of an object with ``state_dict()``."""
    state = value.state_dict()
    if not _returns_attributes(value) or not isinstance(state, dict):
        return state
    given = {}
    for key, item in state.items():
        if isinstance(item, LRScheduler):
            given[key] = get_state(item)
        elif not _has_function(item):
            given[key] = item
    return given


def set_state(value: Any, state: Any) -> None:
    """Load into an object the state that `get_state` returned for one."""
    if _returns_attributes(value) and isinstance(state, dict):
        inner = {key for key in state if isinstance(vars(value).get(key), LRScheduler)}
        for key in inner:
            set_state(vars(value)[key], state[key])
        state = {key: item for key, item in state.items() if key not in inner}
    value.load_state_dict(state)


def keep_lists(value: Any, state: Any, note: Callable[[str], object]) -> Any:
    """Return *state* with the lists of the scheduler *value* in place of those that have an item for each saved group.

    With the saved lists, the scheduler would step only as many groups as its optimizer had at the save.

    Args:
        note: called with a report of the lists that stay.
    """
    if not isinstance(value, LRScheduler) or not isinstance(state, dict):
        return state
    own, count = get_state(value), len(value.optimizer.param_groups)
    was = _length(state.get("_last_lr"))
    if was in (None, count) or _length(own.get("_last_lr")) != count:
        kept = {}
    else:
        kept = {key: own[key] for key in state if _length(state[key]) == was and _length(own.get(key)) == count}
    if kept:
        note(
            f"{_words(kept)} keep their present values: the saved ones are for other groups; the optimizer has {count} now"
        )
    inner = zip(getattr(value, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    parts = [keep_lists(one, part, note) for one, part in inner]
    return {**state, **kept, **({"_schedulers": parts} if parts else {})}


def _length(value: object) -> int | None:
    return len(value) if type(value) is list else None


def scheduler_class(value: Any) -> str | None:
    """Return the name of a scheduler's class in checkpoints; None for another object."""
    return class_name(type(value)) if isinstance(value, LRScheduler) else None


def scheduler_misfit(value: Any, saved_by: object, keys: Collection[str]) -> str | None:
    """Return why a scheduler cannot continue from the saved state of another, or None.

    Args:
        saved_by: the class that saved it; None where unknown.
        keys: the keys of the saved state.
    """
    if not isinstance(value, LRScheduler):
        return None
    names = set(map(class_name, type(value).__mro__))
    state = get_state(value)
    if saved_by in names or not isinstance(state, Mapping):
        return None
    own, theirs = set(state), set(keys)
    if not (own - theirs and theirs - own):
        return None
    there = saved_by.rpartition(".")[2] if isinstance(saved_by, str) else "a scheduler of another class"
    return (
        f"{type(value).__qualname__} in the state (with {_words(own - theirs)}), {there} in the checkpoint (with "
        f"{_words(theirs - own)})"
    )


def _returns_attributes(value: Any) -> bool:
    return (
        isinstance(value, LRScheduler)
        and type(value).state_dict is LRScheduler.state_dict
        and type(value).load_state_dict is LRScheduler.load_state_dict
    )


def _has_function(item: Any) -> bool:
    """Return whether an attribute is, or contains at any depth, an object that the program makes anew."""
    if isinstance(item, _FUNCTIONS):
        return True
    if type(item) is dict:
        return any(map(_has_function, item.values()))
    return type(item) in (list, tuple) and any(map(_has_function, item))


def _words(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys)))


# State of ``aiockpt.per_rank(optimizer)``: the whole local state of an optimizer, as it is, for this rank alone.
#
# For state in which ranks differ on purpose (their own preconditioners, different group values for one parameter). It loads
# on the same number of ranks, for the same parameters with the same sharding: it cannot be resharded. A DTensor is saved
# as its local part, and made again on the mesh of its parameter.


_PLACED, _SHAPE, _LOCAL = "dtensor placed", "of shape", "local"
"""Keys of the dict that stands for a DTensor."""


def of_this_rank(value: Any, index: Index) -> Any:
    """Return the value of this rank: an object, or what `per_rank` wraps; an optimizer as `OwnOptimizer`."""
    held = value.value if isinstance(value, PerRank) else value
    return OwnOptimizer(held, index) if isinstance(held, Optimizer) else held


class OwnOptimizer:
    """An optimizer as an object with a state of this rank, which includes its parameters that are not in *index*."""

    def __init__(self, optimizer: Optimizer, index: Index) -> None:
        self._optimizer = optimizer
        self._index = index
        self._keeper = keeper_of(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the local parts of DTensors, outside autograd."""
        said = self._keeper.state_dict()
        return {
            "class": class_name(type(innermost(self._keeper))),
            "shapes": self._shapes(),
            "groups": [{key: group[key] for key in group if key not in NAMES} for group in said["param_groups"]],
            "state": {number: _decompose(entry) for number, entry in said["state"].items()},
            "parameters": {number: local.detach() for number, local in self._loose()},
        }

    def _loose(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number and local part of each parameter that no module of the state holds, if the state has modules."""
        if not self._index.paths:  # the weights are saved elsewhere; only the optimizer's state is meant
            return
        parameters = [parameter for group in self._keeper.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            if self._index.path_of(parameter) is None:
                yield number, local_of(parameter) if is_dtensor(parameter) else parameter

    def _shapes(self) -> list[list[list[int]]]:
        """Return the shape of this rank's part of each parameter of each group."""
        groups = (
            [local_of(one) if is_dtensor(one) else one for one in group["params"]]
            for group in self._keeper.param_groups
        )
        return [[list(one.shape) for one in some] for some in groups]

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: it is of another optimizer, or the parameters are spread differently here.
        """
        keeper, here = self._keeper, self._shapes()
        own = {class_name(type(keeper)), class_name(type(innermost(keeper)))}  # 0.1.0 wrote the class of the wrapper
        if saved["class"] not in own or saved["shapes"] != here:
            raise ValueError(
                f"it was saved for a {saved['class']} with parts of shapes {saved['shapes']}, and here is a "
                f"{class_name(type(keeper))} with parts of shapes {here}; what belongs to one rank is not resharded"
            )
        loose = saved.get("parameters", {})  # 0.1.0 did not write them
        with torch.no_grad():
            for number, local in self._loose():
                if number in loose:
                    local.copy_(loose[number])
        parameters = [parameter for group in keeper.param_groups for parameter in group["params"]]
        state = {number: _put_together(entry, parameters[number]) for number, entry in saved["state"].items()}
        if not is_plain(keeper):
            numbers = keeper.state_dict()["param_groups"]
            groups = [{**own, **group} for own, group in zip(numbers, saved["groups"], strict=True)]
            keeper.load_state_dict({"state": state, "param_groups": groups})
            return
        for group, values in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            for key, value in values.items():
                if key not in HOW_TO_STEP:
                    set_value(group, key, value)
        for number, parameter in enumerate(parameters):
            keeper.state.pop(parameter, None)
            if number in state:
                keeper.state[parameter] = state[number]
        keeper.__setstate__({"state": keeper.state, "param_groups": keeper.param_groups})


def _decompose(value: Any) -> Any:
    """Return a value of the state with each DTensor replaced by its local part and description."""
    if is_dtensor(value):
        placements = placements_of(value)
        if not placements:
            refuse(("per_rank",), f"a DTensor placed as {value.placements}; redistribute it to Shard or Replicate")
        return {_PLACED: list(placements), _SHAPE: list(value.shape), _LOCAL: local_of(value)}
    if type(value) is dict:
        return {key: _decompose(item) for key, item in value.items()}
    return type(value)(map(_decompose, value)) if type(value) in (list, tuple) else value


def _put_together(value: Any, parameter: torch.Tensor) -> Any:
    """Return the value that `_decompose` received, with its DTensors on the mesh of *parameter*."""
    if type(value) is dict and value.keys() == {_PLACED, _SHAPE, _LOCAL}:
        local, made = value[_LOCAL], None
        if is_dtensor(parameter):
            axes = axes_in_memory(local.shape, local.stride())
            made = dtensor_placed(value[_PLACED], parameter, tuple(value[_SHAPE]), local.dtype, axes)
        if made is None or local_of(made).shape != local.shape:
            raise ValueError(
                f"beside a DTensor of shape {value[_SHAPE]} is a parameter that is spread in another way here"
            )
        local_of(made).copy_(local)
        return made
    if type(value) is dict:
        return {key: _put_together(item, parameter) for key, item in value.items()}
    return type(value)(_put_together(item, parameter) for item in value) if type(value) in (list, tuple) else value
