"""The reader of files of ``torch.save``: torch itself, with its list of allowed names; mapped where possible."""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aiockpt.errors import CorruptionError, UsageError

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
"""Pattern of the names in torch's error that are not on its list."""
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""Start of a file before torch 1.6: the pickle of a magic number."""


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
    """Return the state in a file; a state that is no dict gets the key ``"value"``.

    Raises:
        UsageError: it holds objects, and *trust_pickle* does not allow them.
        CorruptionError: it cannot be read.
    """
    found = unpickle(path, str(path), trust_pickle, mmap=zipfile.is_zipfile(path))
    return found if isinstance(found, dict) else {"value": found}


def unpickle(source: Any, what: str, trust_pickle: bool, *, mmap: bool | None = None) -> Any:
    """Return the object that torch reads from *source*; messages name it *what*.

    Raises:
        UsageError: it holds objects, and *trust_pickle* does not allow them.
        CorruptionError: it cannot be read.
    """
    try:
        return torch.load(source, map_location="cpu", mmap=mmap, weights_only=not trust_pickle)
    except MemoryError:
        raise
    except Exception as error:  # damaged data may raise any error
        if not isinstance(error, pickle.UnpicklingError) or trust_pickle:
            raise CorruptionError(f"{what} cannot be read: {error}") from error
        named = _GLOBAL.search(str(error))
        objects = f"objects ({named[1]})" if named else "objects"
        raise UsageError(
            f"{what} holds {objects}, and unpickling them may run code: give "
            "trust_pickle=True (--trust-pickle) if you trust its author"
        ) from error


# The tensor in a small archive of ``torch.save``, found without reading its bytes. Such an archive is a zip file of stored
# members: ``data.pkl`` describes how the tensor lies in ``data/0``. All but one dense tensor is handled by torch.


_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a member's header: the lengths of its name and of its extra field; the bytes follow these two."""


def read_tensor(data: memoryview, what: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of *dtype* and *shape* in an archive, in the archive's memory where it can be.

    Args:
        what: its name in messages.

    Raises:
        CorruptionError: it is damaged, or holds something else.
    """
    try:
        found = _map_tensor(data)
    except Exception:  # noqa: BLE001  whatever is unusual in it; torch reports what is wrong, if something is
        found = unpickle(io.BytesIO(data), what, trust_pickle=False)
    if not isinstance(found, torch.Tensor):
        raise CorruptionError(f"{what} is no tensor in its file")
    if found.dtype != dtype or tuple(found.shape) != shape:
        raise CorruptionError(f"{what} is a {found.dtype} of {tuple(found.shape)} in its file")
    return found


def _map_tensor(data: memoryview) -> Any:
    with zipfile.ZipFile(_File(data)) as archive:
        members = {name.partition("/")[2]: member for name, member in archive.NameToInfo.items()}
        pickled, stored = archive.read(members["data.pkl"]), members["data/0"]
        if archive.read(members["byteorder"]) != b"little" or stored.compress_type != zipfile.ZIP_STORED:
            raise ValueError("an unusual archive")
    # From the local header: torch pads there, to align the elements to 64 bytes; the zip directory lacks the padding.
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(data, stored.header_offset)
    begin = stored.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    return _TensorUnpickler(io.BytesIO(pickled), data[begin : begin + stored.file_size]).load()


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
"""Storage classes in pickles, by dtype; storages of newer dtypes are untyped, and handled by torch."""


class _File(io.RawIOBase):
    """Memory as a file, without the copy that `io.BytesIO` makes."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._data) if size is None or size < 0 else self._at + size
        found = bytes(self._data[self._at : end])
        self._at += len(found)
        return found


class _TensorUnpickler(pickle.Unpickler):
    """Reads the ``data.pkl`` of one dense tensor whose only storage is *stored*."""

    def __init__(self, file: io.BytesIO, stored: memoryview) -> None:
        super().__init__(file)
        self._stored = stored

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> torch.Tensor:
        kind, dtype, key, _, count = pid
        if kind != "storage" or key != "0":
            raise pickle.UnpicklingError(f"{pid}")
        # `torch.frombuffer` refuses to make a tensor without elements.
        return torch.frombuffer(self._stored, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)


def _rebuild(
    storage: torch.Tensor, offset: int, size: Any, stride: Any, _grad: bool, _hooks: Any, metadata: Any = None
) -> torch.Tensor:
    if metadata:  # of a conjugated or negated tensor, whose storage does not hold its values
        raise pickle.UnpicklingError(f"{metadata}")
    return storage.as_strided(size, stride, offset)
