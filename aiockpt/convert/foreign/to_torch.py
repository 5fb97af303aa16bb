"""Export of a step as one file that ``torch.load(file, weights_only=True)`` opens, complete or not there."""

from __future__ import annotations

import io
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aiockpt.convert.foreign.to_dcp import as_state_dicts, open_step, paths_of_ranks, with_tensors
from aiockpt.convert.publish import flush_names
from aiockpt.engine.load import stored_state
from aiockpt.errors import StorageError, UsageError
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import join_name
from aiockpt.runtime.world import OsFiles
from aiockpt.session.checkpointer import Checkpointer
from aiockpt.state.tree import Path as TreePath
from aiockpt.storage.address import parse_address

_ALIGNED_BYTES = 64
_PLAIN = (str, int, float, bool, bytes, type(None), torch.Tensor)


def write_torch(
    checkpointer: Checkpointer,
    file: str | os.PathLike[str],
    *,
    step: int | None = None,
    replace: bool = False,
    on_written: Callable[[int], object] = lambda _: None,
) -> tuple[str, ...]:
    """Write a step (the newest valid one for None) as a file of ``torch.save``; return the names of what it lacks.

    It holds a dict with the keys of the state: the ``state_dict()`` of modules, optimizers and schedulers, tensors and
    plain values. It lacks what belongs to single ranks (random generators, loaders) and values that
    ``torch.load(weights_only=True)`` refuses. Tensors that share memory do so in the file. Memory holds one tensor at a
    time; the others wait in a nameless file beside the target. Blocks.

    Args:
        file: a path on this machine; its folder is made.
        replace: whether an existing file is replaced; it stays until the new one is durable.
        on_written: called with the bytes of each tensor that was read.

    Raises:
        UsageError: the file exists already, or is a folder.
        StepNotFoundError, CorruptionError, StorageError: of the step.
    """
    address = parse_address(file)
    if address.scheme != "file":
        raise UsageError(f"{address.text!r}: a file of torch.save is written to this machine; give a path")
    target = Path(address.text)
    if target.is_dir():
        raise UsageError(f"{target} is a folder: a step becomes one file of torch.save; name it, as {target}/step.pt")
    if target.exists() and not replace:
        raise UsageError(f"{target} exists already: give another name, or use replace=True (--force)")
    manifest, read = open_step(checkpointer, step)
    stored = stored_state(manifest, 0)
    state = as_state_dicts(stored, read, numbered=True)
    left_out = [join_name(path) for path in paths_of_ranks(stored)]
    staged = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent) as scratch:
            kept = _MappedTensors(manifest, scratch, read, on_written)
            plain = _loadable(with_tensors(state, kept), (), left_out)
            with staged.open("wb") as opened:
                torch.save(plain, opened)
                opened.flush()
                os.fsync(opened.fileno())
        staged.replace(target)
        flush_names(OsFiles(), str(target.parent))
    except OSError as error:
        raise StorageError(f"{target}: {error}") from error
    finally:
        staged.unlink(missing_ok=True)
    return tuple(left_out)


class _MappedTensors:
    """Reads each tensor once into a mapped file, so that the memory of all of them need not be there at once."""

    def __init__(
        self, manifest: Manifest, file: Any, read: Callable[[str], torch.Tensor], on_read: Callable[[int], object]
    ) -> None:
        self._alias, self._read, self._on_read = manifest.alias, read, on_read
        pieces = [sum(piece.end - piece.start for piece in entry.pieces) for entry in manifest.tensors.values()]
        total = sum(size + _ALIGNED_BYTES for size in pieces) + 1
        file.truncate(total)
        if hasattr(os, "posix_fallocate"):  # on a full disk an error here, and no signal at a write to the memory
            os.posix_fallocate(file.fileno(), 0, total)
        self._memory, self._end = mmap.mmap(file.fileno(), 0), 0
        self._tensors: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        name = self._alias.get(name, name)
        if name not in self._tensors:
            tensor = self._read(name)
            self._on_read(tensor.nbytes)
            self._tensors[name] = self._keep(tensor) if tensor.numel() else tensor
        return self._tensors[name]

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=tensor.nbytes, offset=self._end)
        self._end += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _loadable(value: Any, path: TreePath, left_out: list[str]) -> Any:
    """Return *value* without the parts that a restricted load refuses, which are added to *left_out* by name."""
    if isinstance(value, Mapping):
        kept = {key: _loadable(item, (*path, key), left_out) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not _REFUSED}
    if type(value) in (list, tuple):
        kept_items = [_loadable(item, (*path, number), left_out) for number, item in enumerate(value)]
        return type(value)(item for item in kept_items if item is not _REFUSED)
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN or _opens(value):
        return value
    left_out.append(join_name(path))
    return _REFUSED


_REFUSED = object()


def _opens(value: Any) -> bool:
    written = io.BytesIO()
    try:
        torch.save(value, written)
        torch.load(io.BytesIO(written.getvalue()), weights_only=True)
    except Exception:  # noqa: BLE001  whatever torch says of it: this file is to open without trust
        return False
    return True
