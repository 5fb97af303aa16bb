"""State of learning rate schedulers: what ``state_dict()`` returns, except what the program makes anew.

``LRScheduler.state_dict()`` returns all attributes, whatever they are. Of a class that does not override it:

- functions, and lists and dicts with functions in them, are left out, as torch's own ``LambdaLR`` leaves them out: the
  scheduler that loads keeps its own. So are an optimizer under another name than ``optimizer``, and weak references;
- a scheduler inside (a warm-up around another one) is saved and loaded by its own state.

A scheduler of another class whose attributes have other names is a mismatch: it would accept them and never read them.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from aiockpt.state.codecs import class_name

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    weakref.ReferenceType,
    Optimizer,
)


def give_state(value: Any) -> Any:
    """Return the state of an object with ``state_dict()``."""
    state = value.state_dict()
    if not _gives_attributes(value) or not isinstance(state, dict):
        return state
    given = {}
    for key, item in state.items():
        if isinstance(item, LRScheduler):
            given[key] = give_state(item)
        elif not _has_function(item):
            given[key] = item
    return given


def take_state(value: Any, state: Any) -> None:
    """Load into an object the state that `give_state` returned for one."""
    if _gives_attributes(value) and isinstance(state, dict):
        inner = {key for key in state if isinstance(vars(value).get(key), LRScheduler)}
        for key in inner:
            take_state(vars(value)[key], state[key])
        state = {key: item for key, item in state.items() if key not in inner}
    value.load_state_dict(state)


def keep_lists(value: Any, state: Any, tell: Callable[[str], object]) -> Any:
    """Return the *state* for a scheduler with the lists that are here, where each has an item for each group.

    A scheduler with as many rates as its optimizer had groups when it was saved would step none of the others.

    Args:
        tell: called with a report of which lists stay.
    """
    if not isinstance(value, LRScheduler) or not isinstance(state, dict):
        return state
    own, count = give_state(value), len(value.optimizer.param_groups)
    was = _length(state.get("_last_lr"))
    if was in (None, count) or _length(own.get("_last_lr")) != count:
        kept = {}
    else:
        kept = {key: own[key] for key in state if _length(state[key]) == was and _length(own.get(key)) == count}
    if kept:
        tell(
            f"{_words(kept)} stay as they are here: they were of other groups of the optimizer, and there are {count} now"
        )
    inner = zip(getattr(value, "_schedulers", ()), state.get("_schedulers", ()), strict=False)
    parts = [keep_lists(one, part, tell) for one, part in inner]
    return {**state, **kept, **({"_schedulers": parts} if parts else {})}


def _length(value: object) -> int | None:
    return len(value) if type(value) is list else None


def scheduler_class(value: Any) -> str | None:
    """Return what the class of a scheduler is called in checkpoints; None for another object."""
    return class_name(type(value)) if isinstance(value, LRScheduler) else None


def scheduler_misfit(value: Any, saved_by: object, keys: Collection[str]) -> str | None:
    """Return the reason why a scheduler cannot continue with what another one saved, or None.

    Args:
        saved_by: the class that did; None where unknown.
        keys: of its state.
    """
    if not isinstance(value, LRScheduler):
        return None
    names = set(map(class_name, type(value).__mro__))
    state = give_state(value)
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


def _gives_attributes(value: Any) -> bool:
    return (
        isinstance(value, LRScheduler)
        and type(value).state_dict is LRScheduler.state_dict
        and type(value).load_state_dict is LRScheduler.load_state_dict
    )


def _has_function(item: Any) -> bool:
    """Return whether an attribute is, or has in it at any depth, what the program makes anew."""
    if isinstance(item, _FUNCTIONS):
        return True
    if type(item) is dict:
        return any(map(_has_function, item.values()))
    return type(item) in (list, tuple) and any(map(_has_function, item))


def _words(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys)))
