"""Values of torch and numpy in the tree of values: tensors by reference, the rest as tagged objects.

A `Run` is one pass over the values of a state. A tensor or array becomes a node that names a tensor of the checkpoint: the
`put` passed to `LeafWriter` stores the tensor, `LeafReader` provides it. All other values (dtypes, devices, sizes, numpy
scalars, arrays of text or dates) are written in place.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Collection, Hashable, Mapping
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from aiockpt.adapters.composites import COMPOSITE, SPREAD, read_composite, read_spread, write_composite
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.selection import LeafChoice
from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.adapters.tensors import Leaf, describe, facts_of, lies_at_address, memory_key, tensor_name
from aiockpt.adapters.watch import Watch
from aiockpt.data.data_source import advise_for_state
from aiockpt.errors import kind_in_words
from aiockpt.format.document import digest128
from aiockpt.format.names import join_name
from aiockpt.state.codecs import CodecRegistry, decode_base64, field
from aiockpt.state.tree import TAG, Decoder, Encoder, Node, Path, refuse

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_TENSOR_KINDS = "biufc"
"""Kinds of numpy dtypes (``dtype.kind``) that torch may have too."""
_RAW_KINDS = "biufcSUMm"
"""Kinds of numpy dtypes whose bytes are the value."""

_NUMBERS: dict[type, Any] = {float: np.float64, int: np.int64, bool: np.bool_}
"""Types whose long lists are stored as a tensor."""
_NUMBER_DTYPES = (torch.float64, torch.int64, torch.bool)

Put = Callable[[Path, torch.Tensor], str]


class LeafWriter:
    """Values → nodes.

    Args:
        put: stores the tensor at a path, and returns its name in the checkpoint.
    """

    def __init__(self, put: Put) -> None:
        self._put = put

    def encode(self, value: Any, path: Path, encoder: Encoder) -> Node | None:
        """Return the node of *value*, or None when its type is neither torch's nor numpy's."""
        if isinstance(value, torch.Tensor):
            if tensor_kind(value).in_parts:
                return write_composite(value, path, encoder)
            return write_tensor(value, self._put(path, value))
        if type(value) is np.ndarray:
            return self._array(value, path, encoder)
        if isinstance(value, np.generic) and value.dtype.kind in _RAW_KINDS and value.dtype.itemsize:
            data = b64encode(value.tobytes()).decode("ascii")
            return {TAG: "numpy.scalar", "dtype": value.dtype.str, "value": data}
        if type(value) is torch.dtype:
            return {TAG: "torch.dtype", "name": str(value)}
        if type(value) is torch.device:
            return {TAG: "torch.device", "name": str(value)}
        if type(value) is torch.Size:
            return {TAG: "torch.Size", "sizes": list(value)}
        if (instead := advise_for_state(value)) is not None:
            refuse(
                path,
                f"{kind_in_words(value)} has no state to save. {instead}, put loader = aiockpt.Loader(…) of it into "
                "the state, and train from that",
            )
        return None

    def encode_bytes(self, data: bytes, path: Path) -> Node:
        """Store long bytes as a U8 tensor; the digest shows whether ranks, or two places of a state, have equal bytes."""
        # A copy in a bytearray: torch warns of memory that cannot be written, such as that of bytes.
        name = self._put(path, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return {TAG: "stored", "name": name, "digest": digest128(data)}

    def encode_numbers(self, values: Collection[Any], path: Path, *, in_order: bool) -> Node | None:
        """Store many numbers of one type as a tensor, or return None.

        The tensor is longer than the list, by up to an eighth: so the shape for a growing list seldom changes, and the plan
        of the last save stays valid.
        """
        classes = set(map(type, values))
        dtype = _NUMBERS.get(classes.pop()) if len(classes) == 1 else None
        if dtype is None:
            return None
        try:
            array = np.fromiter(values, dtype, len(values))
        except OverflowError:  # integers of more than 64 bits
            return None
        if not in_order:
            array.sort()
        padded = np.zeros(_capacity(len(array)), dtype)
        padded[: len(array)] = array
        name = self._put(path, torch.from_numpy(padded))
        return {TAG: "numbers", "name": name, "count": len(array), "digest": digest128(array.tobytes())}

    def _array(self, value: np.ndarray[Any, Any], path: Path, encoder: Encoder) -> Node:
        if value.dtype.kind not in _RAW_KINDS or not value.dtype.itemsize:
            refuse(path, f"an array of {value.dtype}; save the fields or items as plain values or numbers")
        shared = share(value)
        if shared is not None:
            return {TAG: "numpy.ndarray", "name": self._put(path, shared)}
        raw = encoder.encode(value.tobytes(), path)
        return {TAG: "numpy.raw", "dtype": value.dtype.str, "shape": list(value.shape), "bytes": raw}


def _capacity(count: int) -> int:
    """Return the stored length for *count* numbers: the next multiple of a power of two of about an eighth of it."""
    step = max(1 << max(count.bit_length() - 4, 0), 256)
    return -(-count // step) * step


def write_tensor(tensor: torch.Tensor, name: str) -> Node:
    """Return the node of a tensor called *name* in the checkpoint, with its device type unless that is the CPU."""
    node = {TAG: "tensor", "name": name}
    return node if tensor.device.type == "cpu" else {**node, "device": tensor.device.type}


def share(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return a tensor of the same elements, in the same memory where torch can; None where it has no such dtype."""
    if array.dtype.kind not in _TENSOR_KINDS or not array.dtype.isnative:
        return None
    # `from_numpy` warns of read-only memory, and refuses steps backwards or between whole items (a field of records).
    if not array.flags.writeable or any(step < 0 or step % array.itemsize for step in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:  # longdouble and other widths that torch lacks
        return None


# Results of one walk. The plan (`aiockpt.adapters.native`) keeps the tensors of modules, optimizers and containers. Tensors
# that an object's ``state_dict()`` returns, or that lie in lists and the like, are new in each walk; a `Run` gathers them
# while it writes the nodes of the values.


Facts = tuple[str, tuple[int, ...]]
"""Dtype code and global shape of a tensor."""


SAME_NAME = "another leaf has the same name; rename a key"
_REQUIRES_GRAD = attrgetter("requires_grad")


class KeptTensors:
    """The tensors that a cold walk finds and that persist between walks, with the watch over them.

    Attributes:
        choice: the part of the state to save.
        leaves: the tensors, by name.
        left_out: the leaves that are not saved; see `ShardedState`.
    """

    def __init__(self, choice: LeafChoice) -> None:
        self.choice = choice
        self.watch = Watch()
        self.leaves: dict[str, Leaf] = {}
        self.left_out: dict[str, Facts | None] = {}

    def keep(
        self,
        path: Path,
        tensor: torch.Tensor,
        flat: FlatRange | None = None,
        *,
        may_differ: bool | None = None,
        is_buffer: bool = False,
    ) -> None:
        """Accept a tensor that persists between walks; arguments as for `describe`.

        Args:
            may_differ: None where the tensor itself determines it.
        """
        may_differ = not isinstance(tensor, torch.nn.Parameter) if may_differ is None else may_differ
        leaf = describe(tensor_name(path), tensor, path, flat, may_differ=may_differ, is_buffer=is_buffer)
        if leaf.name in self.leaves:
            refuse(path, SAME_NAME)
        self.leaves[leaf.name] = leaf
        self.watch.tensor(tensor)

    def keep_chosen(self, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None) -> bool:
        """Accept a tensor of a module, or skip it; return whether it is composite, and still to be saved by the caller."""
        if self.choice.by_rule:
            self.watch.attribute(_REQUIRES_GRAD, tensor)
        if not self.choice.keeps(path, tensor):
            self.leave_out(path, tensor, flat)
        elif tensor_kind(tensor).in_parts:
            return True
        else:
            self.keep(path, tensor, flat, is_buffer=not isinstance(tensor, torch.nn.Parameter))
        return False

    def leave_out(self, path: Path, value: object = None, flat: FlatRange | None = None) -> None:
        """Note that the leaf at *path* is not saved; for a tensor, also its dtype and shape."""
        is_tensor = isinstance(value, torch.Tensor)
        self.left_out[join_name(path)] = facts_of(value, flat) if is_tensor else None  # type: ignore[arg-type]
        if lies_at_address(value):
            self.watch.tensor(value)


class Stale(Exception):  # noqa: N818  not an error: the walk starts anew
    """The state does not consist of the objects that the plan was made for."""


class Run:
    """One pass over the values of a state.

    Attributes:
        leaves: the tensors gathered so far.
        per_rank: the nodes of this rank's own values, by name.
        left_out: the leaves that were not saved, by name; see `ShardedState`.
    """

    def __init__(self, codecs: CodecRegistry, rank: int) -> None:
        self._rank = rank
        self._encoder = Encoder(codecs, LeafWriter(self.put))
        self._own_encoder = Encoder(codecs, LeafWriter(self._put_own))
        self.leaves: list[Leaf] = []
        self.per_rank: dict[str, Node] = {}
        self.left_out: dict[str, Facts | None] = {}

    @property
    def written(self) -> int:
        """Size of the encoded values, in characters and nodes."""
        return self._encoder.written + self._own_encoder.written

    def encode(self, value: Any, path: Path) -> Node:
        """Return the node of a global value."""
        return self._encoder.encode(value, path)

    def encode_own(self, value: Any, path: Path) -> Node:
        """Return the node of a value of this rank alone."""
        return self._own_encoder.encode(value, path)

    def put(self, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None, *, is_buffer: bool = False) -> str:
        """Gather a tensor and return its name; *flat* and *is_buffer* as for `describe`."""
        return self._gather(tensor_name(path), path, tensor, flat, is_buffer)

    def same(self, found: object, expected: object) -> None:
        """Check that the state still holds the object of the cold walk.

        Raises:
            Stale: it holds another one.
        """
        if found is not expected:
            raise Stale

    def _put_own(self, path: Path, tensor: torch.Tensor) -> str:
        if tensor_kind(tensor).is_spread:
            refuse(
                path,
                f"{kind_in_words(tensor)} is spread over ranks, it cannot belong to one; save it outside per_rank()",
            )
        return self._gather(tensor_name(path, self._rank), path, tensor)

    def _gather(
        self, name: str, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None, is_buffer: bool = False
    ) -> str:
        self.leaves.append(describe(name, tensor, path, flat, is_buffer=is_buffer))
        return name


class LeafReader:
    """Nodes of one value → the value, once it has its tensors."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, Path], torch.Tensor] = {}
        self._arrays: dict[Hashable, np.ndarray[Any, Any]] = {}

    def put(self, name: str, path: Path, tensor: torch.Tensor) -> None:
        """Accept the tensor that holds, or will hold, *name* of the checkpoint, which is needed at *path*."""
        self._tensors[name, path] = tensor

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        """Return the value of a tagged object.

        Raises:
            KeyError: no such kind.
        """
        if kind not in ("tensor", "numpy.ndarray", "numbers", "stored"):
            return read_plain_leaf(kind, node, path, decoder)
        tensor = self._tensors[field(node, "name", str), path]
        if kind == "tensor":
            return tensor
        if kind == "numbers":
            return _read_numbers(tensor, field(node, "count", int))
        if kind == "stored":
            return tensor.numpy().tobytes()
        # Restores arrays with several references as one, by address: the tensors live as long as the reader.
        return self._arrays.setdefault(memory_key(tensor) or id(node), tensor.detach().numpy())


def _read_numbers(tensor: torch.Tensor, count: int) -> list[Any]:
    if tensor.dim() != 1 or not 0 <= count <= len(tensor) or tensor.dtype not in _NUMBER_DTYPES:
        raise ValueError("the stored numbers are no list")
    numbers: list[Any] = tensor[:count].tolist()
    return numbers


def read_plain_leaf(kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
    """Return the value of a tagged object that needs no tensor.

    Raises:
        KeyError: no such kind.
    """
    return _READERS[kind](node, path, decoder)


def _read_raw_array(node: Mapping[str, Any], path: Path, decoder: Decoder) -> np.ndarray[Any, Any]:
    shape = field(node, "shape", list)
    dtype = _read_numpy_dtype(node)
    data = decoder.decode(node["bytes"], path)
    if any(type(size) is not int or size < 0 for size in shape) or len(data) != prod(shape) * dtype.itemsize:
        raise ValueError("the bytes of the array do not fit its shape")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _read_numpy_scalar(node: Mapping[str, Any], path: Path, decoder: Decoder) -> np.generic:
    data = decode_base64(field(node, "value", str))
    (value,) = np.frombuffer(data, _read_numpy_dtype(node))
    return value  # type: ignore[no-any-return]


def _read_numpy_dtype(node: Mapping[str, Any]) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(field(node, "dtype", str))
    if dtype.kind not in _RAW_KINDS or not dtype.itemsize:
        raise ValueError(f"arrays of {dtype} are never saved")
    return dtype


def _read_device(node: Mapping[str, Any], path: Path, decoder: Decoder) -> torch.device:
    try:
        return torch.device(field(node, "name", str))
    except RuntimeError as error:
        raise ValueError(str(error)) from error


_READERS: dict[str, Callable[[Mapping[str, Any], Path, Decoder], Any]] = {
    COMPOSITE: read_composite,
    SPREAD: read_spread,
    "numpy.raw": _read_raw_array,
    "numpy.scalar": _read_numpy_scalar,
    "torch.dtype": lambda node, path, decoder: _DTYPES[field(node, "name", str)],
    "torch.device": _read_device,
    "torch.Size": lambda node, path, decoder: torch.Size(field(node, "sizes", list)),
}
