"""Frames of zstd: what changed in a tensor since another version, as the XOR of its bytes.

Guarantees:

- One tensor is one frame, with its size in the header, so that every decompressor takes it.
- A tensor passes in runs: neither it nor its XOR is ever in memory as a whole.

zstd is in Python's library from 3.14 on, and in ``backports.zstd`` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from aiockpt.errors import CorruptionError, UsageError

try:
    from isal.isal_zlib import adler32  # 14 GB/s on one core; that of zlib, 4, took a quarter of a publication
except ImportError:
    from zlib import adler32

Bytes = npt.NDArray[np.uint8]
RUN_BYTES = 512 << 10
"""Bytes that are hashed, compared and compressed one after the other while they are in the processor's cache."""
LEVEL = 1
"""Higher levels save less than 15 % of the bytes of what changed, and take several times as long."""
WINDOW_LOG = 17
"""The level's own, 19, finds no more: changes are far apart and repeat nothing. Of 128 KiB the processor's cache has all."""


def load_zstd() -> Any:
    """Return the module of zstd.

    Raises:
        UsageError: it is not installed.
    """
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name)
        except ImportError:
            continue
    raise UsageError("versions are compressed with zstd, which is not installed: pip install 'aiockpt[publish]'")


class TensorSums:
    """Digest and checksum of a tensor whose bytes arrive in order, and the frame of its difference from another one.

    Args:
        nbytes: of the tensor.
        zstd: the module; None for a tensor without a base.
    """

    def __init__(self, nbytes: int, zstd: Any | None = None) -> None:
        self._new, self._old = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._adler = 1
        self._compressor = None
        if zstd is not None:
            key = zstd.CompressionParameter
            self._compressor = zstd.ZstdCompressor(options={key.compression_level: LEVEL, key.window_log: WINDOW_LOG})
            self._compressor.set_pledged_input_size(nbytes)

    def add(self, new: Bytes, old: Bytes | None) -> list[bytes]:
        """Add bytes of the tensor, and those of the base at the same place; return what was compressed. On a worker.

        The bytes of the base are overwritten by the XOR: memory that is new for each run is faulted in for each.
        """
        compressed: list[bytes] = []
        for at in range(0, len(new), RUN_BYTES):
            run = new[at : at + RUN_BYTES]
            self._new.update(run.data)
            if old is not None and self._compressor is not None:
                before = old[at : at + RUN_BYTES]
                self._old.update(before.data)
                self._adler = adler32(run.data, self._adler)
                compressed.append(self._compressor.compress(np.bitwise_xor(run, before, out=before)))
        return [part for part in compressed if part]

    def end(self) -> bytes:
        """Return the rest of the frame."""
        return b"" if self._compressor is None else self._compressor.flush()

    @property
    def digests(self) -> tuple[str, str]:
        """The digests of the base's bytes and of the tensor's."""
        return self._old.hexdigest(), self._new.hexdigest()

    @property
    def checksum(self) -> str:
        """The checksum that other readers compare."""
        return f"{self._adler:08x}"


class FrameReader:
    """Reads one frame run by run.

    Args:
        frame: all of its bytes.
        what: it is of, for errors.
    """

    def __init__(self, zstd: Any, frame: memoryview, what: str) -> None:
        self._decompressor = zstd.ZstdDecompressor()
        self._left: memoryview | bytes = frame
        self._error = zstd.ZstdError
        self._what = what

    def read(self, size: int) -> Bytes:
        """Return the next *size* bytes.

        Raises:
            CorruptionError: the frame is damaged, or shorter.
        """
        parts: list[bytes] = []
        missing = size
        while missing:
            try:
                part = self._decompressor.decompress(self._left, missing)
            except (self._error, EOFError) as error:
                raise CorruptionError(f"{self._what}: the frame is damaged ({error}); receive it again") from error
            self._left = b""
            if not part and (self._decompressor.eof or self._decompressor.needs_input):
                raise CorruptionError(f"{self._what}: the frame is shorter than the tensor; receive it again")
            parts.append(part)
            missing -= len(part)
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)


def apply_frames(tensor: Bytes, frames: Sequence[FrameReader]) -> str:
    """Change *tensor* in place by *frames*, in any order; return the digest of what it is then. On a worker."""
    digest = xxhash.xxh3_128()
    for at in range(0, len(tensor), RUN_BYTES):
        run = tensor[at : at + RUN_BYTES]
        for frame in frames:
            np.bitwise_xor(run, frame.read(len(run)), out=run)
        digest.update(run.data)
    return digest.hexdigest()


def digest_of(tensor: Bytes) -> str:
    """Return the digest of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(tensor.data)
