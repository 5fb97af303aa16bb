"""The folder of a receiver: the tensors of one version in files that every tool opens, changed in place.

Guarantees:

- One process at a time has the folder, by a lock that ends with the process.
- The folder has an index only while all of its tensors are those of one version, verified and flushed.
- A killed process leaves a folder of which each tensor is known by its digest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from aiockpt.convert.folder_layout import INDEX_NAME
from aiockpt.convert.publish import flush_names, write_durably
from aiockpt.errors import CorruptionError, UsageError, from_os_error
from aiockpt.format.document import described
from aiockpt.publish.form import VersionIndex, version_text
from aiockpt.publish.mapped import MappedTensors, make_file, map_file
from aiockpt.runtime.world import OsFiles

PRIVATE = ".aiockpt"
"""Below the folder: the lock, the record of the files, and what is downloaded."""
_RECORD, _LOCK = "copy.json", "lock"


class _Record(msgspec.Struct, frozen=True):
    """What the files of the folder are: *layout* is the digest of names, dtypes and shapes, "" while they are made;
    *version*, the last one."""

    layout: str
    files: tuple[str, ...]
    version: int


class LocalCopy:
    """The folder *path*; blocking, on worker threads.

    Attributes:
        layout: digest of names, dtypes and shapes; "" before there are files.
        version: that was complete last; -1 before the first.
        weights: its tensors, which are changed in place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layout = ""
        self.version = -1
        self.weights = MappedTensors()
        self._lock: int | None = None

    @property
    def private(self) -> Path:
        """The folder for what is no part of the model."""
        return self.path / PRIVATE

    def open(self) -> None:
        """Lock the folder and map the files that are there.

        Raises:
            UsageError: another process has it, or it holds other files.
        """
        try:
            if self.path.exists() and not self.private.exists():
                self._refuse_others()  # before anything is made there
            self.private.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.private / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            self._take_lock()
            record = self._read_record()
            if record is None:
                self._refuse_others()
            else:
                self._map(record)
        except UsageError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise from_os_error(error, "opening", str(self.path)) from error

    def _take_lock(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(self._lock, 64, 0).decode("ascii", "replace")
            raise UsageError(
                f"{self.path} is kept by another receiver (process {who or 'unknown'}): one process of a host receives, and "
                "the others read its folder; or give another folder"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _read_record(self) -> _Record | None:
        try:
            return msgspec.json.decode((self.private / _RECORD).read_bytes(), type=described(_Record))
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _refuse_others(self) -> None:
        if others := sorted(name for name in os.listdir(self.path) if name != PRIVATE):
            is_model = any(name.endswith(".safetensors") for name in others)
            more = "; if the model is here, name this folder as base= (--base)" if is_model else ""
            raise UsageError(
                f"{self.path} holds {others[0]}, which no receiver has made: give an empty or a new folder{more}"
            )

    def _map(self, record: _Record) -> None:
        """Map the files of *record*; make nothing of it where they are not what it says."""
        try:
            for name in record.files:
                self.weights.add(name, map_file(self.path / name))
        except (OSError, ValueError, CorruptionError):
            self.weights.close()
            return
        self.layout, self.version = record.layout, record.version

    def create(self, layout: str, files: Mapping[str, tuple[bytes, int]], beside: Mapping[str, bytes]) -> None:
        """Make the folder anew, with *files*: name → (header, size); their tensors are torn. *beside* are other files.

        Raises:
            StorageFullError: they do not fit.
            CorruptionError: a header is none.
        """
        self.weights.close()
        self.layout, self.version = "", -1
        try:
            self._write_record(_Record("", (), -1))  # what is here from now on is a receiver's, whole or not
            self.begin()  # the index goes first
            for name in os.listdir(self.path):
                if name != PRIVATE:
                    _remove(self.path / name)
            for name, (header, size) in files.items():
                self._make_file(name, header, size)
            for name, data in beside.items():
                write_durably(self.path / name, data)
            self._write_record(_Record(layout, tuple(files), -1))
        except OSError as error:
            raise from_os_error(error, "making the files of", str(self.path)) from error
        self.layout = layout

    def _make_file(self, name: str, header: bytes, size: int) -> None:
        mapped = make_file(self.path / name, size)
        mapped[: len(header)] = header
        self.weights.add(name, mapped)

    def _write_record(self, record: _Record) -> None:
        write_durably(self.private / _RECORD, msgspec.json.encode(record))

    def begin(self) -> None:
        """Begin to change tensors: from here on the folder is no whole."""
        with suppress(FileNotFoundError):
            (self.path / INDEX_NAME).unlink()
            flush_names(OsFiles(), str(self.path))

    def complete(self, target: VersionIndex) -> None:
        """Make the folder a whole again, that of the version *target*."""
        try:
            for mapped in self.weights.files.values():
                mapped.flush()
            self._write_record(_Record(self.layout, tuple(self.weights.files), target.number))
            metadata = {
                "total_size": target.notes.weight_bytes,
                "version": version_text(target.number),
                "step": target.notes.step,
            }
            weight_map = {name: tensor.file for name, tensor in sorted(self.weights.tensors.items())}
            data = msgspec.json.encode({"metadata": metadata, "weight_map": weight_map})
            write_durably(self.path / INDEX_NAME, data)
        except OSError as error:
            raise from_os_error(error, "writing to", str(self.path)) from error
        self.version = target.number

    def close(self) -> None:
        """Give the folder up."""
        self.weights.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
