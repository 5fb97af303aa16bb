"""The reader of files of ``torch.save``: torch itself, with its list of what is allowed; mapped where possible."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aiockpt.errors import CorruptionError, UsageError

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
"""How torch names what is not on its list."""
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How a file began before torch 1.6: the pickle of a magic number."""


def is_one(path: Path) -> bool:
    """Return whether *path* is such a file."""
    if not path.is_file():
        return False
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    with path.open("rb") as file:
        return file.read(len(_LEGACY)) == _LEGACY


def read(path: Path, trust_pickle: bool) -> Mapping[str, Any]:
    """Return the state in a file; what is no dict is called ``"value"``.

    Raises:
        UsageError: it holds objects, and *trust_pickle* does not allow them.
        CorruptionError: it cannot be read.
    """
    with refusing(str(path), trust_pickle):
        found = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=not trust_pickle)
    return found if isinstance(found, dict) else {"value": found}


class refusing:  # noqa: N801  reads as what it does
    """A block in which torch reads *what*; its errors become ours."""

    def __init__(self, what: str, trust_pickle: bool) -> None:
        self._what = what
        self._trusts = trust_pickle

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, pickle.UnpicklingError) and not self._trusts:
            named = _GLOBAL.search(str(error))
            objects = f"objects ({named[1]})" if named else "objects"
            raise UsageError(
                f"{self._what} holds {objects}, and unpickling them may run code: give "
                "trust_pickle=True (--trust-pickle) if you trust whoever wrote it"
            ) from error
        if isinstance(error, Exception) and not isinstance(error, MemoryError):  # of what is damaged, any may come
            raise CorruptionError(f"{self._what} cannot be read: {error}") from error
