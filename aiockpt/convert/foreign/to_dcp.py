"""Export of a step as a folder that plain DCP loads: tensor after tensor, each verified, and the metadata last."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any

import torch

from aiockpt.adapters.optimizer_forms import tensor_names
from aiockpt.adapters.stored import Stored, members_of
from aiockpt.adapters.target import TensorRef, read_tree
from aiockpt.convert.foreign.dcp import METADATA
from aiockpt.convert.publish import flush_names
from aiockpt.engine.find import find_manifest
from aiockpt.engine.load import read_tensor, stored_state
from aiockpt.errors import StorageError, UsageError
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import join_name, split_name
from aiockpt.runtime.world import OsFiles
from aiockpt.session.checkpointer import Checkpointer
from aiockpt.state.tree import TAG, Node
from aiockpt.state.tree import Path as TreePath
from aiockpt.storage.address import parse_address

# The state dicts of a step, with the names that ``get_state_dict`` of torch returns.


DCP_NOTE = "__dcp__"
"""The key under which `aiockpt.integrations.dcp` records DCP's names in a state; useless elsewhere."""


def as_state_dicts(stored: Stored, read: Callable[[str], torch.Tensor], *, numbered: bool = False) -> dict[str, Any]:
    """Return the state of a checkpoint as state dicts, with a `TensorRef` for each tensor.

    Values of single ranks are left out: random generators, loaders.

    Args:
        read: returns a tensor of the checkpoint; called for those that are a list of numbers, or bytes.
        numbered: the state dicts of optimizers number their parameters, as their own do; else they have names.
    """
    tree = read_tree(stored, read)
    names = [(name, split_name(name)) for name in (*stored.tensors, *stored.alias)]
    modules: list[TreePath] = []
    # Optimizers last: the names of their parameters are made relative to the modules.
    for path, node in sorted(_objects(stored.values, ()), key=lambda found: found[1][TAG] == "optimizer"):
        inside = {name: parts[len(path) :] for name, parts in names if parts[: len(path)] == path}
        if node[TAG] == "module":
            modules.append(path)
            # Those of values, such as extra state, are in the tree already.
            in_values = set(tensor_names(node))
            own = {
                ".".join(map(str, parts)): TensorRef(name) for name, parts in inside.items() if name not in in_values
            }
            _at(tree, path).update(own)
        elif node[TAG] == "optimizer":
            _put(tree, path, _optimizer(_at(tree, path), inside, None if numbered else modules))
        else:
            _put(tree, path, None)
    return {key: value for key, value in tree.items() if key != DCP_NOTE and value is not None}


def _objects(node: Node, path: TreePath) -> Iterator[tuple[TreePath, Node]]:
    """Yield the path and node of each object."""
    kind = node.get(TAG) if type(node) is dict else None
    if kind in ("module", "optimizer", "loader", "per_rank"):
        yield path, node
        return
    for key, child in members_of(node).items():
        yield from _objects(child, (*path, key))


def paths_of_ranks(stored: Stored) -> list[TreePath]:
    """Return the paths of what `as_state_dicts` leaves out."""
    return [path for path, node in _objects(stored.values, ()) if node[TAG] not in ("module", "optimizer")]


def _optimizer(
    plain: Mapping[str, Any], inside: Mapping[str, TreePath], modules: list[TreePath] | None
) -> dict[str, Any]:
    """Return an optimizer's state dict; *inside* has its tensors by path: ``state``, the parameter's parts, the slot."""
    slots = {name: parts for name, parts in inside.items() if parts[:1] == ("state",) and len(parts) > 2}
    owners = {name: join_name(parts[1:-1]) for name, parts in slots.items()}
    members = [member for group in plain["groups"] for member in group["params"]]
    owned = dict.fromkeys([*members, *plain["state"], *owners.values()])
    known = {name: n for n, name in enumerate(owned)} if modules is None else _relative_names(owned, modules)
    state: dict[str | int, dict[str, Any]] = {known[owner]: dict(values) for owner, values in plain["state"].items()}
    for name, parts in slots.items():
        state.setdefault(known[owners[name]], {})[str(parts[-1])] = TensorRef(name)
    groups = [{**group, "params": [known[member] for member in group["params"]]} for group in plain["groups"]]
    return {"state": state, "param_groups": groups}


def _relative_names(names: Collection[str], modules: list[TreePath]) -> Mapping[str, str | int]:
    """Return the names of parameters in their modules; where two modules have the same ones, in the state."""
    short = {name: _below_module(split_name(name), modules) for name in names}
    unique = len(set(short.values())) == len(short)
    return {name: ".".join(map(str, below if unique else split_name(name))) for name, below in short.items()}


def _below_module(parts: TreePath, modules: list[TreePath]) -> TreePath:
    return next((parts[len(module) :] for module in modules if parts[: len(module)] == module), parts)


def _at(tree: Any, path: TreePath) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _put(tree: Any, path: TreePath, value: Any) -> None:
    _at(tree, path[:-1])[path[-1]] = value


def write_dcp(
    checkpointer: Checkpointer,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    replace: bool = False,
    on_written: Callable[[int], object] = lambda _: None,
) -> int:
    """Write a step (the newest valid one for None) as a checkpoint of ``torch.distributed.checkpoint``; return its bytes.

    State dicts in it have the names that ``get_state_dict`` of torch returns. Memory holds one tensor at a time. Blocks; a
    folder without ``.metadata`` is incomplete.

    Args:
        folder: a folder of this machine; made with its parents.
        replace: whether an existing checkpoint is replaced; it stays until the new one is durable.
        on_written: called with the bytes of each item.

    Raises:
        UsageError: the folder holds a checkpoint already, or two names of the state are one in DCP.
        StepNotFoundError, CorruptionError, StorageError: of the step.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    address = parse_address(folder)
    if address.scheme != "file":
        raise UsageError(f"{address.text!r}: a checkpoint of DCP is written to a folder of this machine; give a path")
    target = Path(address.text)
    if (target / METADATA).exists() and not replace:
        raise UsageError(
            f"{target} holds a checkpoint of DCP already: give another folder, or use replace=True (--force)"
        )
    manifest, read = open_step(checkpointer, step)
    try:
        flat, paths = flatten_state_dict(as_state_dicts(stored_state(manifest, 0), read))
    except ValueError as error:
        raise UsageError(
            f"{manifest.id}: two names of the state are one in DCP, which joins keys by dots ({error}): rename one of them, "
            "save again, and convert that step"
        ) from error

    try:
        target.mkdir(parents=True, exist_ok=True)
        # A new name: an existing checkpoint is whole until the metadata are renamed.
        data = next(path for number in count() if not (path := target / f"__0_{number}.distcp").exists())
        staged = target / f"{METADATA}.tmp"
        try:
            with data.open("xb") as file:
                items = _Items(file, data.name, on_written)
                for name, value in flat.items():
                    if isinstance(value, TensorRef):
                        items.tensor(name, read(value.name))
                    else:  # DCP pickles lists and tuples, with the tensors in them
                        items.value(name, with_tensors(value, read))
                file.flush()
                os.fsync(file.fileno())
            with staged.open("wb") as file:
                file.write(pickle.dumps(items.metadata(paths), protocol=4))
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            for path in (data, staged):
                path.unlink(missing_ok=True)
            raise
        staged.replace(target / METADATA)
        flush_names(OsFiles(), str(target))
        for path in set(target.glob("__*_*.distcp")) - {data} if replace else ():
            path.unlink()
    except OSError as error:
        raise StorageError(f"{target}: {error}") from error
    return items.written


def open_step(checkpointer: Checkpointer, step: int | None) -> tuple[Manifest, Callable[[str], torch.Tensor]]:
    """Return the manifest of a step, and what reads a tensor of this save of it, also when the step is saved anew."""
    found = checkpointer.run_on_destination("conversion", lambda steps: find_manifest(steps, step)).result()

    def read(name: str) -> torch.Tensor:
        return checkpointer.run_on_destination("conversion", lambda _: read_tensor(found, name)).result()

    return found.manifest, read


def with_tensors(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Return a value of containers with each tensor in place of its reference."""
    if isinstance(value, TensorRef):
        return read(value.name)
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, read) for item in value)
    if isinstance(value, dict):
        made = copy(value)
        made.update((key, with_tensors(item, read)) for key, item in value.items())
        return made
    return value


class _Items:
    """Writes items one after the other, and keeps their metadata for DCP."""

    def __init__(self, file: io.BufferedWriter, name: str, on_written: Callable[[int], object]) -> None:
        self._file = file
        self._name = name
        self._on_written = on_written
        self._held: dict[str, Any] = {}
        self._where: dict[Any, Any] = {}
        self.written = 0

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        plain = tensor.detach().contiguous()
        origin = torch.Size([0] * plain.dim())
        chunk = ChunkStorageMetadata(offsets=origin, sizes=plain.size())
        properties = TensorProperties(dtype=plain.dtype)
        self._held[name] = TensorStorageMetadata(properties=properties, size=plain.size(), chunks=[chunk])
        self._where[MetadataIndex(name, origin, 0)] = self._append(plain)

    def value(self, name: str, value: Any) -> None:
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        self._held[name] = BytesStorageMetadata()
        self._where[MetadataIndex(name)] = self._append(value)

    def metadata(self, paths: Any) -> Any:
        """Return the contents of ``.metadata``."""
        from torch.distributed.checkpoint.metadata import Metadata

        found = Metadata(self._held, planner_data=paths, storage_data=self._where)
        if hasattr(found, "version"):  # from torch 2.7 on
            found.version = "1.0.0"
        return found

    def _append(self, value: Any) -> Any:
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        begin = self._file.tell()
        torch.save(value, self._file)
        size = self._file.tell() - begin
        self.written += size
        self._on_written(size)
        return _StorageInfo(self._name, begin, size)
