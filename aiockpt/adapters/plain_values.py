"""Matching of plain values: whether a stored value fits the present one, and which present objects will hold it.

Guarantees:

- Under the keys of dicts, types decide and values do not: numbers fit numbers and 0-d tensors, lists and tuples fit each
  other, so do the kinds of dicts, and None fits all. Items of a list, tuple or deque are data: an item of another kind is
  replaced by the saved one.
- The match changes nothing. `refill` sets the values once all are decoded; both decide by `pair_of`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

from aiockpt.adapters.composites import COMPOSITE
from aiockpt.adapters.leaves import read_plain_leaf, share
from aiockpt.adapters.stored import Stored, members_of
from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.adapters.tensors import hold, misfit, number_misfit, write_number
from aiockpt.errors import kind_in_words
from aiockpt.format.names import join_name
from aiockpt.state.codecs import PATHS, CodecRegistry
from aiockpt.state.tree import TAG, Decoder, Node, Path, damaged, metadata_of, set_metadata

# Filling of objects that the program holds.
#
# `refill` puts a decoded value into the present one, at every depth. It changes objects, so it runs after all values are
# decoded.
#
# Guarantee: the result equals the saved value; it is the present object wherever that can be filled.


class Filling:
    """The objects of the program that one load fills, each with its node.

    Args:
        note: called with a report, as text.
    """

    def __init__(self, stored: Stored, codecs: CodecRegistry, note: Callable[[str], object]) -> None:
        self.stored = stored
        self.codecs = codecs
        self._note = note
        # By id. The entry keeps its object alive, so that no other one gets the id.
        self._held: dict[int, tuple[object, Node, Path]] = {}
        # Objects at several places whose saved contents differ: the first place keeps the object, the others get new
        # ones.
        self._split: set[int] = set()
        self._filled: set[int] = set()

    def hold(self, here: object, node: Node, path: Path, *, by_key: bool = True) -> str | None:
        """Note that *here* will be filled from *node*; return why it cannot, where it is filled elsewhere, too.

        Below an item of a list that is not a conflict: each place after the first gets a new object. (The dict of a
        scheduler of schedulers shares lists while it is new.)
        """
        _, known, where = self._held.setdefault(id(here), (here, node, path))
        if known is node or same_content(known, node, self.stored.same_tensor):
            return None
        if not by_key:
            self._split.add(id(here))
            return None
        return f"the same object as {join_name(where)}, but the checkpoint has two contents; give each one of its own"

    def may_fill(self, here: object) -> bool:
        """Return whether *here* may be filled: an object with several contents only once."""
        if id(here) not in self._split:
            return True
        first = id(here) not in self._filled
        self._filled.add(id(here))
        return first

    def note_refusal(self, here: object, error: Exception) -> None:
        """Report that *here* refuses to be filled."""
        what = f"replaced by what was saved: a {type(here).__name__} that cannot be filled ({error!r:.200})"
        _, _, path = self._held.get(id(here), (here, None, ()))  # none in an instance of a registered class
        self._note(f"{join_name(path)}: {what}" if path else what)


def refill(here: Any, new: Any, filling: Filling, *, by_key: bool = True) -> Any:
    """Return the replacement of *here*: itself, filled, where that is possible, else *new*.

    Args:
        by_key: whether it has a key of its own; False for an item of a list, which is kept only for a value of its kind.
    """
    if here is new or here is None or new is None:
        return new
    match pair_of(name_of(here, filling.codecs), name_of(new, filling.codecs), by_key=by_key):
        case None | "tensor":
            return new
        case "number into tensor":
            write_number(new, here)
            return here
        case "tensor into number":
            return new.item()
        case "array":
            return _refill_array(here, new)
    if type(here) is tuple:
        return tuple(_items_of(here, new, filling))
    too_long = isinstance(here, deque) and here.maxlen is not None and len(new) > here.maxlen
    if too_long or not isinstance(here, MUTABLE) or not filling.may_fill(here):
        return new
    try:
        _fill(here, new, filling, by_key)
    except Exception as error:  # noqa: BLE001  a class of the user's may refuse in any way
        filling.note_refusal(here, error)
        return new
    return here


def _refill_array(here: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> Any:
    """Return the present array where the new one shares its memory, or can be copied into it; else the new one."""
    if here.dtype != new.dtype or here.shape != new.shape or not here.flags.writeable:
        return new
    if here.__array_interface__ != new.__array_interface__:
        here[...] = new
    return here


def _items_of(here: Any, new: Any, filling: Filling) -> list[Any]:
    """Return the items of *new*, each filled into the present item at its position."""
    count = len(here)
    old = list(here)
    return [
        refill(old[place], item, filling, by_key=False) if place < count else item for place, item in enumerate(new)
    ]


def _fill(here: Any, new: Any, filling: Filling, by_key: bool) -> None:
    match here:
        case dict():
            entries = {
                key: refill(here[key], value, filling, by_key=by_key) if key in here else value
                for key, value in new.items()
            }
            here.clear()
            here.update(entries)
            if isinstance(here, defaultdict) and isinstance(new, defaultdict):
                here.default_factory = new.default_factory
            if type(here) is OrderedDict and (metadata := metadata_of(new)) is not None:
                set_metadata(here, metadata)
        case list():
            here[:] = _items_of(here, new, filling)
        case deque():
            items = _items_of(here, new, filling)
            here.clear()
            here.extend(items)
        case set():
            here.clear()
            here.update(new)
        case _:
            here[:] = new
    _set_attributes(here, new)


def _set_attributes(here: Any, new: Any) -> None:
    """Set the saved attributes of an instance of a user's class, and check that it has all its items.

    Raises:
        TypeError: some attributes cannot be set from outside, or it did not accept the items.
    """
    if type(here) in _BUILT_IN:
        return
    if any(getattr(cls, "__slots__", ()) for cls in type(here).__mro__):
        raise TypeError("it keeps values in slots")
    vars(here).clear()
    vars(here).update(vars(new))
    if len(here) != len(new):
        raise TypeError("it did not take what was saved")


_BUILT_IN = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set, bytearray, array})


OBJECTS = {
    "module": "a module",
    "optimizer": "an optimizer",
    "stateful": "an object with state_dict()",
    "loader": "an aiockpt.Loader",
    "per_rank": "a value of each rank (aiockpt.per_rank)",
}
DICTS: frozenset[str] = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
SEQUENCES: frozenset[str] = frozenset({"list", "tuple"})
NUMBERS: frozenset[str] = frozenset({"bool", "int", "float", "complex", "numpy number"})
_NAMING = ("tensor", "numpy.ndarray", "stored", "numbers")
"""Kinds of nodes that name a tensor."""
MUTABLE: tuple[type, ...] = (list, dict, set, deque, bytearray, array)
_WORDS = {COMPOSITE: "tensor", "numpy.raw": "numpy.ndarray", "stored": "bytes", "numbers": "list", "path": "path"}
_NAMES: dict[type, str] = {
    **{cls: cls.__name__ for cls in (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset)},
    **{cls: cls.__name__ for cls in (dict, OrderedDict, defaultdict, Counter, deque, array, range)},
    **dict.fromkeys(PATHS.values(), "path"),
    np.ndarray: "numpy.ndarray",
    torch.dtype: "torch.dtype",
    torch.device: "torch.device",
    torch.Size: "torch.Size",
}


Pair = Literal[
    "dict", "items", "deque", "number into tensor", "tensor into number", "tensor", "array", "codec", "value"
]
"""How a value replaces another; "value" stands for all other kinds."""
_PAIRS: dict[str, Pair] = {"deque": "deque", "tensor": "tensor", "numpy.ndarray": "array"}


def pair_of(own: str, there: str, *, by_key: bool) -> Pair | None:
    """Return how a stored value of one kind replaces a present one of another; None where it does not fit.

    Args:
        own, there: the names of the present and of the stored kind, from `name_of` and `name_of_node`.
        by_key: whether it has a key of its own; False for an item of a list, which only a value of its kind fits.
    """
    if own in NUMBERS and there in NUMBERS:
        return "value"
    if own != there and not by_key:
        return None
    if own in DICTS and there in DICTS:
        return "dict"
    if own in SEQUENCES and there in SEQUENCES:
        return "items"
    if own == "tensor" and there in NUMBERS:
        return "number into tensor"
    if own in NUMBERS and there == "tensor":
        return "tensor into number"
    if own != there:
        return None
    return "codec" if own.startswith("codec ") else _PAIRS.get(own, "value")


class ValueMatch:
    """The match of one present plain value with its node.

    Attributes:
        problems: the reasons why they do not fit, as text.
        notes: reports of the parts that will be removed or replaced, as text.
        tensors: the present tensors that will be filled, by their paths; arrays as tensors of the same memory.
    """

    def __init__(self, filling: Filling, *, makes_containers: bool = False) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.tensors: dict[Path, torch.Tensor] = {}
        self._filling = filling
        # Inside a registered class, whose containers are made anew: they are not registered in *filling*.
        self._makes_containers = makes_containers

    def problem(self) -> str | None:
        """Return the first problems as one, or None."""
        more = f" (and {len(self.problems) - 3} more)" if len(self.problems) > 3 else ""
        return "; ".join(self.problems[:3]) + more if self.problems else None

    def match(self, here: Any, node: Node, path: Path, where: str = "", *, by_key: bool = True) -> None:
        """Compare *here* with *node*, both at *path*.

        Args:
            where: the keys below the value, for messages.
            by_key: whether it has a key of its own; False for an item of a list.
        """
        there = name_of_node(node)
        if there == "None":
            return
        own = name_of(here, self._filling.codecs)
        if own == "None" or there in OBJECTS:
            self._match_nothing(node, where)
        elif not self._match_kind(here, own, node, there, path, where, by_key):
            self._misfit(here, path, where, by_key, _words(own), _words(there))
            if not by_key:
                self._match_nothing(node, where)

    def _misfit(self, here: Any, path: Path, where: str, by_key: bool, own: str, there: str) -> None:
        """Note that *here* does not fit, with both kinds as text; an item of a list is replaced instead."""
        if by_key:
            self._problem(where, f"{own} in the state, {there} in the checkpoint")
        else:
            self._replace(here, path, f"{own} by {there}")

    def _problem(self, where: str, problem: str) -> None:
        self.problems.append(f"{where}: {problem}" if where else problem)

    def _match_kind(self, here: Any, own: str, node: Node, there: str, path: Path, where: str, by_key: bool) -> bool:
        """Match by the two kinds; return whether they fit."""
        match pair_of(own, there, by_key=by_key):
            case None:
                return False
            case "number into tensor":
                return self._match_number(here, node, path, where)
            case "tensor into number":
                facts = self._filling.stored.facts(str(node.get("name")))
                return facts is not None and facts[1] == ()
            case "dict":
                self._match_dict(here, node, path, where, by_key)
            case "items":
                self._match_items(here, node, path, where, by_key)
            case "deque":
                self._match_deque(here, node, path, where, by_key)
            case "tensor":
                self._match_tensor(here, node, path, where, by_key)
            case "array":
                self._match_array(here, node, path)
            case "codec":
                self._match_registered(here, node, path, where, by_key)
            case "value" if type(here) in MUTABLE:
                self._hold(here, node, path, where, by_key)
        return True

    def _hold(self, here: Any, node: Node, path: Path, where: str, by_key: bool) -> None:
        if self._makes_containers:
            return
        if (problem := self._filling.hold(here, node, path, by_key=by_key)) is not None:
            self._problem(where, problem)

    # ---------------------------------------------------------------- containers

    def _match_dict(self, here: dict[Any, Any], node: Node, path: Path, where: str, by_key: bool) -> None:
        self._hold(here, node, path, where, by_key)
        stored = self._entries(node, path)
        for key, (part, inner) in stored.items():
            at = f"{where}[{key!r}]"
            if key in here:
                self.match(here[key], inner, (*path, part), at, by_key=by_key)
            else:
                self._match_nothing(inner, at)
        if gone := [key for key in here if key not in stored]:
            self.notes.append(removed(path, gone))

    def _entries(self, node: Node, path: Path) -> dict[Any, tuple[str | int, Node]]:
        """Return key → (part of the path, node) of a dict's node."""
        if TAG not in node:
            return {key: (key, inner) for key, inner in node.items()}
        # Keys hold no tensors, so that they can be decoded at once.
        pairs = Decoder(self._filling.codecs, _NO_TENSORS).keys_of(node, path)
        return {key: (part, inner) for key, part, inner in pairs}

    def _match_items(self, here: Any, node: Node, path: Path, where: str, by_key: bool) -> None:
        if type(here) is not tuple:
            self._hold(here, node, path, where, by_key)
        items = _items(node)
        for number, (item, inner) in enumerate(zip(here, items, strict=False)):
            self.match(item, inner, (*path, number), f"{where}[{number}]", by_key=False)
        for number in range(len(here), len(items)):
            self._match_nothing(items[number], f"{where}[{number}]")

    def _match_deque(self, here: deque[Any], node: Node, path: Path, where: str, by_key: bool) -> None:
        limit, count = node.get("maxlen"), _count(node)
        if here.maxlen is not None and count > here.maxlen:
            self._misfit(here, path, where, by_key, f"a deque of at most {here.maxlen}", f"one of {count} items")
            return
        if limit != here.maxlen:
            self.notes.append(f"{join_name(path)}: maxlen={here.maxlen} in the state, {limit} in the checkpoint; kept")
        self._match_items(here, node, path, where, by_key)

    def _match_registered(self, here: Any, node: Node, path: Path, where: str, by_key: bool) -> None:
        """Match an instance of a registered class: it is made anew of its present tensors; a container stays."""
        codec = self._filling.codecs.for_class(type(here))
        assert codec is not None, "its name said so"
        if isinstance(here, MUTABLE):
            self._hold(here, node, path, where, by_key)
        inner = ValueMatch(self._filling, makes_containers=True)
        inner.match(codec.to_plain(here), node.get("value"), (*path, codec.name), where, by_key=False)
        self.tensors |= inner.tensors

    # ---------------------------------------------------------------- tensors, arrays, numbers

    def _match_tensor(self, here: torch.Tensor, node: Node, path: Path, where: str, by_key: bool) -> None:
        if node[TAG] != "tensor":
            why = "a tensor that is made of others is filled only where it has a name of its own"
            self._replace(here, path, why)
        elif tensor_kind(here).in_parts:
            return
        elif (problem := self._tensor_misfit(here, node["name"], path)) is None:
            self.tensors[path] = here
        elif by_key:
            self._problem(where, problem)
        else:
            self._replace(here, path, problem)

    def _tensor_misfit(self, tensor: torch.Tensor, name: str, path: Path) -> str | None:
        """Return the reason why *tensor* cannot be filled from tensor *name* of the checkpoint, or None."""
        facts = self._filling.stored.facts(name)
        if facts is None:
            raise damaged(path, f"refers to the tensor {name!r}, which is not there")
        return misfit(tensor.dtype, hold(tensor, path), *facts)

    def _match_array(self, here: np.ndarray[Any, Any], node: Node, path: Path) -> None:
        if node[TAG] == "numpy.raw":
            fits = here.dtype.str == node.get("dtype") and list(here.shape) == node.get("shape")
        else:
            shared = share(here)
            fits = shared is not None and self._tensor_misfit(shared, node["name"], path) is None
            # Not a copy, which `share` makes where torch cannot view the array: a load would fill only the copy.
            if fits and shared is not None and shared.data_ptr() == here.__array_interface__["data"][0]:
                self.tensors[path] = shared
        if not (fits and here.flags.writeable):
            self._replace(here, path, "an array that has another shape or dtype, or cannot be written")

    def _match_number(self, here: torch.Tensor, node: Node, path: Path, where: str) -> bool:
        if here.dim():
            return False
        problem = number_misfit(Decoder(self._filling.codecs, _NO_TENSORS).decode(node, path), here.dtype)
        if problem is not None:
            self._problem(where, problem)
        return True

    # ---------------------------------------------------------------- what is made anew

    def _match_nothing(self, node: Node, where: str) -> None:
        """Note as problems the objects in a node without a present value: objects cannot be made."""
        for at, kind in objects_in(node, where):
            self._problem(
                at,
                f"a plain value in the state, {OBJECTS[kind]} in the checkpoint; objects are filled and never made: have "
                "one in its place",
            )

    def _replace(self, here: Any, path: Path, why: str) -> None:
        if isinstance(here, (torch.Tensor, np.ndarray, *MUTABLE)):
            self.notes.append(f"{join_name(path)}: replaced by what was saved: {why}")


def objects_in(node: Node, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the place and kind of each saved object in *node*."""
    if type(node) is list:
        for number, item in enumerate(node):
            if type(item) in (dict, list):
                yield from objects_in(item, f"{where}[{number}]")
    elif type(node) is dict and TAG not in node:
        for key, item in node.items():
            if type(item) in (dict, list):
                yield from objects_in(item, f"{where}[{key!r}]")
    elif type(node) is dict and type(node[TAG]) is str and node[TAG] in OBJECTS:
        yield where, node[TAG]
    elif type(node) is dict and type(items := node.get("items")) is list:
        yield from objects_in(items, where)


def has_named_parts(node: Node) -> bool:
    """Return whether *node* has a tensor with a name of its own, or an object: neither is made by a load."""
    if name_of_node(node) == "tensor":
        return True
    if type(node) is dict and node.get(TAG) in (None, "dict", "OrderedDict"):
        parts = members_of(node)
        if all(type(key) is str for key in parts) and any(map(has_named_parts, parts.values())):
            return True
    return any(objects_in(node))


def in_words(node: Node) -> str:
    """Return the kind of value that *node* was written for, with its article."""
    name = name_of_node(node)
    return OBJECTS.get(name) or _words(name)


def same_content(one: Node, other: Node, tied_name: Callable[[str], str]) -> bool:
    """Return whether two nodes have the same content, including tensors of the same memory.

    Args:
        tied_name: returns the one name that stands for all names of a tensor.
    """
    if type(one) is not type(other):
        return False
    if type(one) is list:
        return len(one) == len(other) and all(same_content(a, b, tied_name) for a, b in zip(one, other, strict=True))
    if type(one) is not dict:
        return bool(one == other)
    if one.keys() != other.keys():
        return False
    if type(one.get("name")) is str and one.get(TAG) in _NAMING:
        if "digest" in one:
            return {**one, "name": ""} == {**other, "name": ""}
        return {**one, "name": tied_name(one["name"])} == {**other, "name": tied_name(other["name"])}
    return all(same_content(value, other[key], tied_name) for key, value in one.items())


def removed(path: Path, keys: list[Any]) -> str:
    """Return as text that *keys*, which only the state had in the dict at *path*, are removed."""
    shown = ", ".join(f"{key!r:.80}" for key in keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
    return f"{join_name(path)}: only in the state, and removed: {shown}"


def _items(node: Node) -> list[Node]:
    """Return the nodes of items; nothing for numbers that are stored as an array."""
    items = node.get("items") if type(node) is dict else node
    return items if type(items) is list else []


def _count(node: Node) -> int:
    items = node.get("items")
    count = items.get("count") if type(items) is dict else len(items) if type(items) is list else 0
    return count if type(count) is int else 0


def name_of(value: Any, codecs: CodecRegistry) -> str:
    """Return the usual name of a present value's type."""
    if value is None:
        return "None"
    if type(value) is array:
        return f"array of {value.typecode!r}"
    known = _NAMES.get(type(value))
    if known is not None:
        return known
    if (codec := codecs.for_class(type(value))) is not None:
        return f"codec {codec.name!r}"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, np.generic):
        return _numpy_name(value.dtype)
    return type(value).__name__ if type(value).__module__ in ("datetime", "decimal", "uuid") else kind_in_words(value)


def name_of_node(node: Node) -> str:
    """Return the usual name of the type that *node* was written for."""
    if node is None:
        return "None"
    if not isinstance(node, dict):
        return type(node).__name__
    if TAG not in node:
        return "dict"
    kind = str(node[TAG])
    if kind == "array":
        return f"array of {node.get('typecode')!r}"
    if kind == "numpy.scalar":
        try:
            return _numpy_name(np.dtype(node["dtype"]))
        except (KeyError, TypeError):
            return kind
    return f"codec {node.get('name')!r}" if kind == "codec" else _WORDS.get(kind, kind) or "value without a kind"


def _numpy_name(dtype: np.dtype[Any]) -> str:
    return "numpy number" if dtype.kind in "biufc" else f"numpy {dtype.type.__name__}"


def _words(name: str) -> str:
    """Return the name of a type with its article."""
    if name in ("bytes", "None") or (" " in name and name.split()[0] in ("a", "an", "the")):
        return name
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


class _NoTensors:
    """Decodes keys, which contain no tensors."""

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        # An older version wrote tensors as keys; each key was equal only to itself.
        return object() if kind == "tensor" else read_plain_leaf(kind, node, path, decoder)


_NO_TENSORS = _NoTensors()
