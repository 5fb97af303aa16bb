"""Opening of foreign checkpoints: the kind at a path, and the state that it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from aiockpt.convert.foreign import dcp, torch_files, universal
from aiockpt.errors import UsageError

SCHEME = "dcp://"


class Foreign(msgspec.Struct, frozen=True):
    """An opened checkpoint of another library.

    Attributes:
        kind: in words, "a DCP checkpoint".
        path: where it lies.
        state: nested dicts and lists of tensors and plain values. Tensors are mapped from the files: the files must not
            change while in use, and writes into a tensor stay in this process.
    """

    kind: str
    path: Path
    state: Mapping[str, Any]


_Read = Callable[[Path, bool], Mapping[str, Any]]
_KINDS: tuple[tuple[str, Callable[[Path], bool], _Read], ...] = (
    ("a DCP checkpoint", dcp.is_one, dcp.read),
    ("a universal checkpoint of DeepSpeed", universal.is_one, universal.read),
    ("a file of torch.save", torch_files.is_one, torch_files.read),
)


def open_checkpoint(path: str | os.PathLike[str], *, trust_pickle: bool = False) -> Foreign:
    """Return the checkpoint at *path*, whose kind is detected from its files.

    Args:
        path: of this machine: a folder of ``torch.distributed.checkpoint``, also as ``dcp:///path``; a universal checkpoint
            of DeepSpeed; a file of ``torch.save``, which a ``.ckpt`` of Lightning is, too.
        trust_pickle: whether objects that are neither tensors nor plain values may be unpickled, which runs code of their
            author.

    Raises:
        UsageError: its kind is not known; or it holds pickled objects that are not on the list of allowed names.
        CorruptionError: files are missing or truncated, or contradict each other.
    """
    found = _without_scheme(os.fspath(path))
    for kind, is_one, read in _KINDS:
        if is_one(found):
            return Foreign(kind, found, read(found, trust_pickle))
    if not found.exists():
        raise UsageError(f"{path}: there is nothing")
    kinds = ", nor ".join(kind for kind, _, _ in _KINDS)
    raise UsageError(f"{path} is neither {kinds}: nothing to convert")


def is_foreign(path: str) -> bool:
    """Return whether *path* is a checkpoint that `open_checkpoint` knows."""
    found = _without_scheme(path)
    return any(is_one(found) for _, is_one, _ in _KINDS)


def _without_scheme(path: str) -> Path:
    return Path(path.removeprefix(SCHEME))
