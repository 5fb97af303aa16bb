"""The root that the operator named: one that is there, or a message that says what is there instead.

Guarantee: resolving a root never creates a missing folder.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from urllib.parse import quote, unquote

from aiockpt.errors import UsageError
from aiockpt.pipeline.discover import refuse_step_folder
from aiockpt.runtime.world import OsFiles
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend


def open_place(root: str | os.PathLike[str]) -> Backend:
    """Return the backend of *root*: a folder that exists, or a URL.

    Raises:
        UsageError: it cannot hold a checkpoint that this process can read.
    """
    backend = open_backend(root)
    if backend.url.startswith("memory://"):
        raise UsageError(f"{root}: memory is seen by its own process only, and this is another one; give a folder")
    if (folder := _folder_of(backend)) is not None:
        check_folder(folder, "checkpoints are kept in a folder")
    return backend


def place_below(root: str, below: str) -> str | Path:
    """Return the place of a folder *below* the root ("": the root itself): of files a Path, in which no slip is seen."""
    folder = _folder_of(open_backend(root))
    return f"{root.rstrip('/')}/{below}".rstrip("/") if folder is None else folder / below


def is_to_come(root: str) -> bool:
    """Return whether *root* is a folder that does not exist yet."""
    folder = _folder_of(open_backend(root))
    return folder is not None and not folder.exists()


def local_folder(root: str) -> Path:
    """Return the folder that *root* names.

    Raises:
        UsageError: it names none, or none that exists.
    """
    folder = _folder_of(open_backend(root))
    if folder is None:
        raise UsageError(f"{root}: only a folder can be examined; give the path of one")
    check_folder(folder, "give a folder on the file system to be examined", may_be_made=True)
    return folder


def _folder_of(backend: Backend) -> Path | None:
    """Return the folder that *backend* keeps its objects in; None where that is none of a file system."""
    scheme, _, rest = backend.url.partition("://")
    return Path(unquote(rest)) if scheme == "file" else None


def check_folder(folder: Path, advice: str, *, may_be_made: bool = False) -> None:
    """Raise UsageError unless *folder* is one and is not a step of a checkpoint.

    Args:
        may_be_made: an empty folder would do, and the message says how to make it.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file; {advice}")
    if not folder.is_dir():
        making = f"make it (mkdir -p {shlex.quote(str(folder))}), or " if may_be_made else ""
        raise UsageError(f"{folder}: no such folder; {making}{advice}")
    refuse_step_folder(f"file://{quote(str(folder))}", OsFiles())
