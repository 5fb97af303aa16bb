"""How does an object that the program holds become what was saved, without becoming another object?

`refill` puts a decoded value into the one that is here, at every depth. It changes objects, so it comes after all is
decoded; which values fit is settled before, by `aiockpt.adapters.plain_values`, and the rules here are the same.

Guarantee: what it returns equals what was saved; it is the object that is here wherever that can be filled.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aiockpt.adapters.fit import write_number
from aiockpt.state.tree import metadata_of, set_metadata

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, tuple)


class Filling:
    """What one load has filled so far.

    Args:
        tell: is told of an object that refuses to be filled, and why, in words.

    Attributes:
        split: objects, by identity, that are at several places for which different contents were saved: the first place
            has them, the others get new ones.
    """

    def __init__(self, tell: Callable[[object, str], object]) -> None:
        self.tell = tell
        self.split: set[int] = set()
        self._filled: set[int] = set()

    def may_fill(self, here: object) -> bool:
        """Return whether *here* is to be filled once more."""
        if id(here) not in self.split:
            return True
        first = id(here) not in self._filled
        self._filled.add(id(here))
        return first


def refill(here: Any, new: Any, filling: Filling, *, by_key: bool = True) -> Any:
    """Return what takes the place of *here*: itself, filled, where that can be, else *new*.

    Args:
        by_key: whether it has a key of its own; an item of a list has none, and stays only for what is of its own kind.
    """
    if here is new or here is None or new is None:
        return new
    if isinstance(here, torch.Tensor) or isinstance(new, torch.Tensor):
        return _refill_tensor(here, new) if by_key else new
    if isinstance(here, np.ndarray) and isinstance(new, np.ndarray):
        return _refill_array(here, new)
    if type(here) is not type(new) and not (by_key and _are_kin(here, new)):
        return new
    if isinstance(here, tuple):
        return tuple(_items(here, new, filling)) if type(here) is tuple else new
    if isinstance(here, deque) and here.maxlen is not None and len(new) > here.maxlen:
        return new
    fill = next((fill for cls, fill in _FILLS if isinstance(here, cls)), None)
    if fill is None or not filling.may_fill(here):
        return new
    try:
        fill(here, new, filling, by_key)
    except Exception as error:  # noqa: BLE001  a class of the user's may refuse in any way
        filling.tell(
            here, f"replaced by what was saved: a {type(here).__name__} that cannot be filled ({error!r:.200})"
        )
        return new
    return here


def _are_kin(here: Any, new: Any) -> bool:
    """Return whether two values of different classes hold the same kind of things."""
    return any(type(here) in kin and type(new) in kin for kin in (_DICTS, _SEQUENCES))


def _refill_tensor(here: Any, new: Any) -> Any:
    """Turn a number and a tensor without axes into each other, as what is here."""
    if isinstance(here, torch.Tensor):
        if isinstance(new, torch.Tensor):
            return new
        write_number(new, here)
        return here
    return new.item()


def _refill_array(here: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> Any:
    """Return the array that is here where the new one is in its memory, or can be copied into it."""
    if type(here) is not np.ndarray or here.dtype != new.dtype or here.shape != new.shape or not here.flags.writeable:
        return new
    if here.__array_interface__ != new.__array_interface__:
        here[...] = new
    return here


def _items(here: Any, new: Any, filling: Filling) -> list[Any]:
    """Return the items of *new*, each filled into the one that is at its place here."""
    count = len(here)
    old = list(here)
    return [
        refill(old[place], item, filling, by_key=False) if place < count else item for place, item in enumerate(new)
    ]


def _fill_dict(here: Any, new: Any, filling: Filling, by_key: bool) -> None:
    entries = {
        key: refill(here[key], value, filling, by_key=by_key) if key in here else value for key, value in new.items()
    }
    here.clear()
    here.update(entries)
    if isinstance(here, defaultdict) and isinstance(new, defaultdict):
        here.default_factory = new.default_factory
    if type(here) is OrderedDict and (metadata := metadata_of(new)) is not None:
        set_metadata(here, metadata)
    _settle(here, new)


def _fill_list(here: Any, new: Any, filling: Filling, by_key: bool) -> None:
    here[:] = _items(here, new, filling)
    _settle(here, new)


def _fill_deque(here: Any, new: Any, filling: Filling, by_key: bool) -> None:
    items = _items(here, new, filling)
    here.clear()
    here.extend(items)
    _settle(here, new)


def _fill_set(here: Any, new: Any, filling: Filling, by_key: bool) -> None:
    here.clear()
    here.update(new)
    _settle(here, new)


def _fill_flat(here: Any, new: Any, filling: Filling, by_key: bool) -> None:
    here[:] = new
    _settle(here, new)


def _settle(here: Any, new: Any) -> None:
    """Give an instance of the user's own class the attributes that were saved, and see that it took all of its items.

    Raises:
        TypeError: it has attributes that cannot be set from outside, or did not take the items.
    """
    if type(here) in _BUILT_IN:
        return
    if any(getattr(cls, "__slots__", ()) for cls in type(here).__mro__):
        raise TypeError("it keeps values in slots")
    vars(here).clear()
    vars(here).update(vars(new))
    if len(here) != len(new):
        raise TypeError("it did not take what was saved")


_BUILT_IN = frozenset({*_DICTS, list, deque, set, bytearray, array})
_FILLS: tuple[tuple[type, Callable[[Any, Any, Filling, bool], None]], ...] = (
    (dict, _fill_dict),
    (list, _fill_list),
    (deque, _fill_deque),
    (set, _fill_set),
    (bytearray, _fill_flat),
    (array, _fill_flat),
)
