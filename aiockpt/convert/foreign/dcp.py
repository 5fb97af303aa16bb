"""The reader of folders of ``torch.distributed.checkpoint``; metadata are trusted only where the files agree with them.

``.metadata`` is a pickle; only the names that DCP itself writes are allowed in it. Each tensor is divided into chunks, and
each chunk is a small archive of ``torch.save`` within a file; its bytes are mapped, not read.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from aiockpt.adapters.sharded_tensors import Shards
from aiockpt.convert.foreign.torch_files import read_tensor, unpickle
from aiockpt.errors import CheckpointError, CorruptionError, UsageError

METADATA = ".metadata"

_ALLOWED = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
            *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
_PATHS = {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")}


def is_one(path: Path) -> bool:
    """Return whether *path* is such a folder."""
    return (path / METADATA).is_file()


def read(path: Path, trust_pickle: bool) -> Mapping[str, Any]:
    """Return the state in a folder: nested as DCP recorded it, else at the dots of its names.

    Raises:
        UsageError: an item is an object, and *trust_pickle* does not allow it.
        CorruptionError: a file is missing or cut short, or the metadata contradict the files or themselves.
    """
    try:
        return _read_state(path, trust_pickle)
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise CorruptionError(f"{path / METADATA} is damaged: {error!r}") from error


def _read_state(path: Path, trust_pickle: bool) -> Mapping[str, Any]:
    metadata = _read_metadata(path / METADATA)
    folder = _Folder(path, metadata.storage_data)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    state: dict[Any, Any] = {}
    for name, held in metadata.state_dict_metadata.items():
        if type(held).__name__ == "BytesStorageMetadata":
            value = folder.value(name, trust_pickle)
        else:
            value = folder.tensor(name, held)
        _put(state, tuple(paths.get(name) or name.split(".")), value)
    whole: Mapping[str, Any] = _as_saved({key: _with_lists(value) for key, value in state.items()})
    return whole


class _Unpickler(pickle.Unpickler):
    """Reads ``.metadata``: allows the names that DCP writes, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return PurePosixPath
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not on the list of names allowed in DCP's metadata")


def _read_metadata(path: Path) -> Any:
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except pickle.UnpicklingError as error:
        raise UsageError(f"{path}: {error}; another planner than DCP's own wrote it") from error
    if type(metadata).__name__ != "Metadata" or not isinstance(metadata.storage_data, dict):
        raise CorruptionError(f"{path} has no locations of tensors")
    return metadata


class _Folder:
    """The files as the metadata describe them, mapped; writes into their tensors stay in this process.

    Args:
        where: (name, offsets) → file and place in it.
    """

    def __init__(self, path: Path, where: Mapping[Any, Any]) -> None:
        self._path = path
        self._map = cache(self._map_file)
        self._where = {(index.fqn, index.offset and tuple(index.offset)): place for index, place in where.items()}

    def value(self, name: str, trust_pickle: bool) -> Any:
        """Return an item that is no tensor."""
        return unpickle(io.BytesIO(self._bytes_of(name, None)), f"{self._path}: {name}", trust_pickle)

    def tensor(self, name: str, held: Any) -> torch.Tensor:
        """Return a tensor item, joined from its chunks where it has several; nothing is copied."""
        shape, dtype, what = tuple(held.size), held.properties.dtype, f"{self._path}: {name}"
        parts = []
        for chunk in held.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            parts.append((offsets, read_tensor(self._bytes_of(name, offsets), what, dtype, sizes)))
        # `Shards` refuses parts that overlap or lie outside: with the right number of elements, they are complete.
        if sum(part.numel() for _, part in parts) != torch.Size(shape).numel():
            raise CorruptionError(f"{what}: its chunks do not add up to its shape")
        if len(parts) == 1 and tuple(parts[0][1].shape) == shape:
            return parts[0][1]
        try:
            return Shards(shape, parts, dtype=dtype)
        except UsageError as error:
            raise CorruptionError(f"{what}: {error}") from error

    def _bytes_of(self, name: str, offsets: tuple[int, ...] | None) -> memoryview:
        place = self._where.get((name, offsets))
        if place is None and offsets is not None and not any(offsets):
            place = self._where.get((name, None))
        if place is None:
            raise CorruptionError(f"{self._path}: {METADATA} has no location of {name} at {offsets}")
        if getattr(place, "transform_descriptors", None):
            raise UsageError(
                f"{self._path}: {name} went through {place.transform_descriptors}; load it with DCP itself"
            )
        file = PurePosixPath(str(place.relative_path))
        if file.is_absolute() or ".." in file.parts:
            raise CorruptionError(f"{self._path}: {METADATA} names a file outside of the folder: {file}")
        data, start, end = self._map(str(file)), place.offset, place.offset + place.length
        if not 0 <= start <= end <= len(data):
            raise CorruptionError(f"{self._path / file} is cut short: {name} would lie behind its end")
        return data[start:end]

    def _map_file(self, file: str) -> memoryview:
        try:
            with (self._path / file).open("rb") as opened:
                return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:
            raise CorruptionError(f"{self._path / file}: {error}") from error


def _put(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        state = state.setdefault(part, {})
        if type(state) is not dict:
            raise CorruptionError(f"{METADATA}: there is an item at a part of {path}")
    state[path[-1]] = value


def _with_lists(node: Any) -> Any:
    """Restore lists: dicts whose keys are 0, 1, …"""
    if type(node) is not dict:
        return node
    inside = {key: _with_lists(child) for key, child in node.items()}
    if inside and all(type(key) is int for key in inside) and sorted(inside) == list(range(len(inside))):
        return [inside[place] for place in range(len(inside))]
    return inside


def _as_saved(node: Any) -> Any:
    """Return *node* with the ``state_dict()`` of each optimizer and ``MultiStepLR`` in its original form.

    DCP records keys that are numbers as text, and drops empty dicts.
    """
    if type(node) is list:
        return [_as_saved(child) for child in node]
    if type(node) is not dict:
        return node
    inside = {key: _as_saved(child) for key, child in node.items()}
    if "last_epoch" in inside and type(milestones := inside.get("milestones")) is dict:
        inside["milestones"] = {int(key) if key.isdecimal() else key: count for key, count in milestones.items()}
    groups, state = inside.get("param_groups"), inside.get("state", {})
    if type(groups) is list and inside.keys() <= {"state", "param_groups"} and type(state) is dict:
        members = [group.get("params") if type(group) is dict else None for group in groups]
        if groups and all(type(some) is list for some in members):
            numbers = {str(member): member for some in members if some for member in some if type(member) is int}
            inside["state"] = {numbers.get(key, key): value for key, value in state.items()}
    return inside
