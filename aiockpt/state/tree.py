"""The encoding of values without pickle: as JSON, and as tagged objects for types that JSON lacks (docs/format.md#values).

`Encoder` turns a value into a tree of JSON values, `Decoder` turns it back; a tagged object is ``{"$": kind, …}``.
Values of a framework (tensors, dtypes, arrays) are left to a `Writer` and a `ValueReader`: no framework is imported here.

Guarantees:

- A decoded value equals the encoded one, type included; a subclass is refused rather than saved as its base.
- A value that cannot be written raises `UnsupportedStateError` with its path, at encode time.
- Decoding uses no imports, no attributes and no classes outside the registry. Whatever the tree holds, only
  `ManifestError` (damaged or hostile) or `UsageError` (a codec that is not registered) is raised.
- Sets are written in sorted order, so that equal values give equal bytes on every rank.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, Protocol

import msgspec

from aiockpt.errors import CheckpointError, ManifestError, UnsupportedStateError, UsageError, kind_in_words
from aiockpt.format.names import join_name
from aiockpt.state.codecs import READERS, WRITERS, CodecRegistry, advise, check_text, decode_base64, field

Path = tuple[str | int, ...]
Node = Any
"""A JSON value: null, bool, str, int of 64 bits, finite float, list of nodes, dict of nodes."""

TAG = "$"
MAX_DEPTH = 64
METADATA = "metadata"
"""Member of the node of a module, and of a ``state_dict()``: the saved ``_metadata`` of the dict (versions and all else),
for ``load_state_dict()``."""
INLINE_BYTES = 64 << 10
"""Longer bytes are stored as a U8 tensor."""
LONG_LIST = 1024
"""Lists, tuples, deques and sets of at least so many numbers of one type are stored as a tensor."""

_TEXT_CODES = "uw"
"""The type codes of arrays of characters, whose size depends on the platform."""

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{cls.__name__: cls for cls in (list, dict, set, tuple, int, float, complex, str, bool, bytes)},
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}


class Writer(Protocol):
    """The writer of a framework's values."""

    def encode(self, value: Any, path: Path, encoder: Encoder) -> Node | None:
        """Return the node of *value*, or None when it is not one of the framework's."""

    def encode_bytes(self, data: bytes, path: Path) -> Node:
        """Store long bytes as a tensor and return their node."""

    def encode_numbers(self, values: Collection[Any], path: Path, *, in_order: bool) -> Node | None:
        """Store many numbers of one type as a tensor and return their node; None when they are not numbers of one type.

        Args:
            in_order: False for a set; they are stored in ascending order then.
        """


class ValueReader(Protocol):
    """The reader of a framework's values."""

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        """Return the value of a tagged object.

        Raises:
            KeyError: no such kind.
            TypeError, ValueError, ArithmeticError: no encoder writes such an object.
        """


class AnyEncoder(Protocol):
    """Values → nodes."""

    def encode(self, value: Any, path: Path) -> Node: ...


class Opaque(msgspec.Struct, frozen=True, eq=False):
    """The plain values that a codec wrote, for inspection only."""

    codec: str
    value: Any


class Encoder:
    """Values → nodes.

    Args:
        codecs: the user's classes.
        leaves: the framework's values.

    Attributes:
        written: characters of text and count of nodes so far, an estimate of the size.
    """

    def __init__(self, codecs: CodecRegistry, leaves: Writer) -> None:
        self._codecs = codecs
        self.leaves = leaves
        self.written = 0
        self._fixed = False

    def encode(self, value: Any, path: Path) -> Node:
        """Return the node of *value*, which is at *path* of the state.

        Raises:
            UnsupportedStateError: a value in it cannot be written; names the path.
        """
        self.written += 1
        cls = type(value)
        if value is None or cls is bool:
            return value
        if len(path) > MAX_DEPTH:
            refuse(path[:8], f"nested deeper than {MAX_DEPTH} levels (does it contain itself?); flatten it")
        if (write_scalar := WRITERS.get(cls)) is not None:
            return _checked(write_scalar, value, path)
        if (write := _WRITERS.get(cls)) is not None:
            return write(self, value, path)
        if (codec := self._codecs.for_class(cls)) is not None:
            inner = self.encode(codec.to_plain(value), (*path, codec.name))
            return {TAG: "codec", "name": codec.name, "value": inner}
        node = self.leaves.encode(value, path, self)
        if self._fixed and type(node) is dict and node[TAG] == "tensor":
            refuse(
                path,
                f"{kind_in_words(value)} as a key or in a set, where no load could find it; use a list, or name it",
            )
        if node is None:
            refuse(path, f"{kind_in_words(value)} cannot be saved without pickle. {advise(value, self._codecs)}")
        return node

    def encode_fixed(self, value: Any, path: Path) -> Node:
        """Return the node of a key, or of a member of a set.

        Raises:
            UnsupportedStateError: it contains a tensor, which is found there by its identity; no load restores that.
        """
        outer, self._fixed = self._fixed, True
        try:
            return self.encode(value, path)
        finally:
            self._fixed = outer


def _checked(write: Callable[[Any], Node], value: Any, path: Path) -> Node:
    try:
        return write(value)
    except ValueError as error:
        refuse(path, str(error))


def _write_text(encoder: Encoder, value: str, path: Path) -> str:
    encoder.written += len(value)
    text: str = _checked(check_text, value, path)
    return text


def _write_bytes(encoder: Encoder, value: bytes | bytearray, path: Path) -> Node:
    kind = type(value).__name__
    if len(value) > INLINE_BYTES:
        return {TAG: kind, "stored": encoder.leaves.encode_bytes(bytes(value), path)}
    encoder.written += len(value) * 4 // 3
    return {TAG: kind, "value": b64encode(value).decode("ascii")}


def _write_array(encoder: Encoder, value: array[Any], path: Path) -> Node:
    if value.typecode in _TEXT_CODES:
        return {TAG: "array", "typecode": value.typecode, "text": _write_text(encoder, value.tounicode(), path)}
    data = _little_endian(value).tobytes()
    inner = _write_bytes(encoder, data, path)
    return {TAG: "array", "typecode": value.typecode, "itemsize": value.itemsize, "bytes": inner}


def _little_endian(value: array[Any]) -> array[Any]:
    if sys.byteorder == "little":
        return value
    turned = value[:]
    turned.byteswap()
    return turned


def _read_array(decoder: Decoder, node: Mapping[str, Any], path: Path) -> Any:
    value: array[Any] = array(field(node, "typecode", str))
    if value.typecode in _TEXT_CODES:
        value.fromunicode(field(node, "text", str))
        return value
    data = decoder.decode(node["bytes"], path)
    if type(data) is not bytes:
        return data
    if value.itemsize != node["itemsize"]:
        raise ValueError(
            f"items of {node['itemsize']} bytes, and here an array of {value.typecode!r} has {value.itemsize}"
        )
    value.frombytes(data)
    return _little_endian(value)


def _write_list(encoder: Encoder, value: Collection[Any], path: Path) -> Node:
    if len(value) >= LONG_LIST and (node := encoder.leaves.encode_numbers(value, path, in_order=True)) is not None:
        return node
    return [encoder.encode(item, (*path, index)) for index, item in enumerate(value)]


def _write_set(encoder: Encoder, value: set[Any] | frozenset[Any], path: Path) -> Node:
    kind = type(value).__name__
    if len(value) >= LONG_LIST and (node := encoder.leaves.encode_numbers(value, path, in_order=False)) is not None:
        return {TAG: kind, "items": node}
    items = [encoder.encode_fixed(item, (*path, index)) for index, item in enumerate(value)]
    return {TAG: kind, "items": sorted(items, key=msgspec.json.encode)}


def _write_dict(encoder: Encoder, value: dict[Any, Any], path: Path) -> Node:
    if TAG in value or not all(type(key) is str for key in value):
        return {TAG: "dict", "items": _write_pairs(encoder, value, path)}
    return {_write_text(encoder, key, path): encoder.encode(item, (*path, key)) for key, item in value.items()}


def _write_named_dict(encoder: Encoder, value: dict[Any, Any], path: Path) -> Node:
    return write_metadata(
        {TAG: type(value).__name__, "items": _write_pairs(encoder, value, path)}, value, path, encoder
    )


def metadata_of(value: object) -> Any:
    """Return the ``_metadata`` that torch, and classes of its protocol, attach to a ``state_dict()``; None without."""
    return vars(value).get("_metadata") if type(value) is OrderedDict else None


def set_metadata(value: OrderedDict[Any, Any], metadata: Any) -> None:
    """Attach *metadata* to a ``state_dict()``."""
    vars(value)["_metadata"] = metadata


def write_metadata(node: dict[str, Node], value: object, path: Path, encoder: AnyEncoder) -> dict[str, Node]:
    """Add `metadata_of` the dict *value* at *path* to its *node*, and return that."""
    if (metadata := metadata_of(value)) is not None:
        node[METADATA] = encoder.encode(metadata, (*path, "_metadata"))
    return node


def _write_default_dict(encoder: Encoder, value: defaultdict[Any, Any], path: Path) -> Node:
    name = _FACTORY_NAMES.get(value.default_factory)
    if name is None:
        refuse(path, f"a defaultdict of {value.default_factory!r}; use a built-in type, or a plain dict")
    return {TAG: "defaultdict", "factory": name, "items": _write_pairs(encoder, value, path)}


def _write_pairs(encoder: Encoder, value: dict[Any, Any], path: Path) -> list[list[Node]]:
    return [
        [encoder.encode_fixed(key, (*path, part)), encoder.encode(item, (*path, part))]
        for part, (key, item) in zip(key_parts(value), value.items(), strict=True)
    ]


def key_parts(keys: Collection[Any]) -> list[str | int]:
    """Return distinct parts of paths for the *keys* of one dict.

    Text and integers stand for themselves; any other key is ``#`` and its number, with more ``#`` where a text is that.
    """
    taken = {key for key in keys if type(key) is str}
    parts: list[str | int] = []
    for number, key in enumerate(keys):
        if type(key) is str or (type(key) is int and abs(key) < 2**63):
            parts.append(key)
            continue
        part = f"#{number}"
        while part in taken:
            part = f"#{part}"
        parts.append(part)
    return parts


_WRITERS: dict[type, Callable[[Encoder, Any, Path], Node]] = {
    str: _write_text,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    list: _write_list,
    tuple: lambda encoder, value, path: {TAG: "tuple", "items": _write_list(encoder, value, path)},
    set: _write_set,
    frozenset: _write_set,
    array: _write_array,
    deque: lambda encoder, value, path: (
        {TAG: "deque", "items": _write_list(encoder, value, path), "maxlen": value.maxlen}
    ),
    dict: _write_dict,
    OrderedDict: _write_named_dict,
    Counter: _write_named_dict,
    defaultdict: _write_default_dict,
}


SCALARS = frozenset({type(None), bool, int, float, str})


def plain_value(node: Node) -> Any:
    """Return the value of the node of a number, a text, None, or a tuple of these; ``UNSET`` for any other node."""
    if type(node) in SCALARS:
        return node
    items = node.get("items") if type(node) is dict and node.keys() == {TAG, "items"} and node[TAG] == "tuple" else None
    return tuple(items) if type(items) is list and SCALARS.issuperset(map(type, items)) else msgspec.UNSET


def are_alike(here: object, value: object) -> bool:
    """Return whether a value and a `plain_value` are of one type, and their items, so that one may replace the other."""
    if type(here) is not type(value):
        return False
    return not isinstance(here, tuple) or list(map(type, here)) == list(map(type, value))  # type: ignore[call-overload]


class Decoder:
    """Nodes → values.

    Args:
        codecs: the user's classes; None returns an `Opaque` for every one of them, for inspection only.
        leaves: the framework's values.
        dry: check that each codec is registered but call none; returns an `Opaque`, too. (The tensors that values are made
            of may not be loaded yet.)
    """

    def __init__(self, codecs: CodecRegistry | None, leaves: ValueReader, *, dry: bool = False) -> None:
        self._codecs = codecs
        self._leaves = leaves
        self.is_dry = dry

    @property
    def describes_only(self) -> bool:
        """Whether values are only shown: a stand-in replaces what a codec wrote, or what is stored beside the tree."""
        return self._codecs is None

    def decode(self, node: Node, path: Path) -> Any:
        """Return the value of *node*, which is at *path* of the state.

        Raises:
            ManifestError: no encoder writes such a node.
            UsageError: it needs a codec that is not registered, or that does not accept what was saved.
        """
        if len(path) > MAX_DEPTH:
            raise damaged(path[:8], f"is nested deeper than {MAX_DEPTH} levels")
        if type(node) is list:
            return [self.decode(item, (*path, index)) for index, item in enumerate(node)]
        if type(node) is not dict:
            return node
        if TAG not in node:
            return {key: self.decode(item, (*path, key)) for key, item in node.items()}
        try:
            return self._tagged(node, path)
        except CheckpointError:
            raise
        except (KeyError, ValueError, TypeError, ArithmeticError) as error:
            reason = f"is not a value that was ever saved ({type(error).__name__}: {error})"
            raise damaged(path, reason) from error

    def _tagged(self, node: Mapping[str, Any], path: Path) -> Any:
        kind = field(node, TAG, str)
        if (read_scalar := READERS.get(kind)) is not None:
            return read_scalar(node)
        if (read := _READERS.get(kind)) is not None:
            return read(self, node, path)
        return self._leaves.decode(kind, node, path, self)

    def keys_of(self, node: Mapping[str, Any], path: Path) -> list[tuple[Any, str | int, Node]]:
        """Return (key, part of the path, node) of each entry of a dict that is written as pairs.

        Raises:
            ManifestError, UsageError: as `decode`.
        """
        try:
            return self.read_keys(node, path)
        except (KeyError, ValueError, TypeError) as error:
            raise damaged(path, f"is not a dict that was ever saved ({type(error).__name__}: {error})") from error

    def read_keys(self, node: Mapping[str, Any], path: Path) -> list[tuple[Any, str | int, Node]]:
        """Return the same as `keys_of`; an entry that no encoder writes raises `KeyError`, `TypeError` or `ValueError`."""
        items = [(key, item) for key, item in field(node, "items", list)]
        keys = [self.decode(key, (*path, number)) for number, (key, _) in enumerate(items)]
        for key in keys:
            # Raises TypeError for a list or a dict, which no encoder writes as a key.
            hash(key)
        return [(key, part, item) for key, part, (_, item) in zip(keys, key_parts(keys), items, strict=True)]

    def decode_codec(self, node: Mapping[str, Any], path: Path) -> Any:
        """Return the instance that a registered codec makes of ``node["value"]``."""
        name = field(node, "name", str)
        codec = self._codecs.for_name(name) if self._codecs is not None else None
        if codec is None and self._codecs is not None:
            raise UsageError(f"{join_name(path)}: saved by the codec {name!r}; register it before you load")
        value = self.decode(node["value"], (*path, name))
        if codec is None or self.is_dry:
            return Opaque(name, value)
        try:
            return codec.from_plain(value)
        except Exception as error:
            raise UsageError(f"{join_name(path)}: the codec {name!r} refused what was saved: {error!r}") from error


def _read_items(decoder: Decoder, node: Mapping[str, Any], path: Path) -> list[Any]:
    if type(node["items"]) is dict:
        found = decoder.decode(node["items"], path)
        if type(found) is not list and not decoder.describes_only:
            raise TypeError("the stored items are not a list")
        return found if type(found) is list else [found]
    return [decoder.decode(item, (*path, index)) for index, item in enumerate(field(node, "items", list))]


def _read_pairs(decoder: Decoder, node: Mapping[str, Any], path: Path) -> list[tuple[Any, Any]]:
    return [(key, decoder.decode(item, (*path, part))) for key, part, item in decoder.read_keys(node, path)]


def _read_ordered_dict(decoder: Decoder, node: Mapping[str, Any], path: Path) -> Any:
    value: Any = OrderedDict(_read_pairs(decoder, node, path))
    if METADATA in node:
        set_metadata(value, decoder.decode(node[METADATA], (*path, "_metadata")))
    return value


def _read_bytes(decoder: Decoder, node: Mapping[str, Any], path: Path) -> Any:
    if "stored" not in node:
        return decode_base64(field(node, "value", str))
    data = decoder.decode(node["stored"], path)
    if type(data) is not bytes and not decoder.describes_only:
        raise TypeError("the stored bytes are not bytes")
    return data


def _read_bytearray(decoder: Decoder, node: Mapping[str, Any], path: Path) -> Any:
    data = _read_bytes(decoder, node, path)
    return bytearray(data) if type(data) is bytes else data


_READERS: dict[str, Callable[[Decoder, Mapping[str, Any], Path], Any]] = {
    "codec": Decoder.decode_codec,
    "bytes": _read_bytes,
    "bytearray": _read_bytearray,
    "array": _read_array,
    "tuple": lambda decoder, node, path: tuple(_read_items(decoder, node, path)),
    "set": lambda decoder, node, path: set(_read_items(decoder, node, path)),
    "frozenset": lambda decoder, node, path: frozenset(_read_items(decoder, node, path)),
    "deque": lambda decoder, node, path: deque(_read_items(decoder, node, path), node["maxlen"]),
    "dict": lambda decoder, node, path: dict(_read_pairs(decoder, node, path)),
    "OrderedDict": _read_ordered_dict,
    # A Counter made of pairs would count how often each pair occurs.
    "Counter": lambda decoder, node, path: Counter(dict(_read_pairs(decoder, node, path))),
    "defaultdict": lambda decoder, node, path: defaultdict(
        _FACTORIES[field(node, "factory", str)], _read_pairs(decoder, node, path)
    ),
}


def refuse(path: Path, reason: str) -> NoReturn:
    """Raise `UnsupportedStateError` for the leaf at *path*."""
    raise UnsupportedStateError(join_name(path) or "the state", reason)


def damaged(path: Path, reason: str) -> ManifestError:
    """Return the error for a node at *path* that no encoder writes."""
    return ManifestError(f"{join_name(path)} {reason}: the checkpoint is damaged or not ours; load another step")
