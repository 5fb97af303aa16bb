"""Writing of the files of a version: streamed from committed steps, in windows, on several threads.

Guarantees:

- Memory is bounded by the windows, whatever the size of a tensor; frames, whose sizes are not known before, wait in
  unnamed files of the system's folder for temporary files until their file is written.
- A delta is complete only if the base's bytes have the digests that are expected of them.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import anyio
import msgspec
import numpy as np
import xxhash

from aiockpt.convert.folder_layout import FolderFile, WeightSpan, split_by_bytes
from aiockpt.convert.publish import write_file
from aiockpt.errors import CheckpointError, StorageError
from aiockpt.format.safetensors import Entry, encode_header
from aiockpt.options import MIB
from aiockpt.pipeline.copy import Windows
from aiockpt.publish.form import FileNote, VersionIndex
from aiockpt.publish.frames import TensorSums, load_zstd
from aiockpt.publish.step_weights import StepWeights
from aiockpt.publish.versions import Draft
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.slabs import Slab

WINDOW_BYTES = 16 * MIB
"""Of one window, with what is cast in it: each passes the loop a few times, which smaller ones do more often."""
MOST_LANES = 4
"""Tensors that are read and compressed at once, two windows each."""


class BaseDiffersError(CheckpointError):
    """The step that was to be the base of a delta has not the bytes of the version."""


class DeltaTooLargeError(CheckpointError):
    """So much has changed that a full version is the better one."""


class Base(NamedTuple):
    """The weights of the step that a version is of, and that version."""

    weights: StepWeights
    version: VersionIndex


class WrittenFiles(msgspec.Struct, frozen=True):
    """The files of a version: tensor → file, file → note, tensor → digests before and after."""

    weight_map: dict[str, str]
    files: dict[str, FileNote]
    tensors: dict[str, tuple[str, str]]

    def add(self, others: WrittenFiles) -> None:
        """Add other files of the version."""
        self.weight_map.update(others.weight_map)
        self.files.update(others.files)
        self.tensors.update(others.tensors)


class _Spool:
    """Frames of one lane in an unnamed file, until they are written; on one worker thread at a time."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0, prefix="aiockpt-")  # noqa: SIM115  closed by `close`
        self._end = 0
        self.extents: dict[str, tuple[int, int]] = {}

    def append(self, name: str, parts: Sequence[bytes]) -> None:
        """Add to the frame of *name*; a frame is complete before the next one begins."""
        data = memoryview(b"".join(parts))
        start, _ = self.extents.get(name, (self._end, 0))
        while data:
            written = os.pwrite(self._file.fileno(), data, self._end)
            self._end += written
            data = data[written:]
        self.extents[name] = start, self._end - start

    def read(self, offset: int, into: memoryview) -> None:
        filled = 0
        while filled < len(into):
            filled += os.preadv(self._file.fileno(), [into[filled:]], offset + filled)

    def reset(self) -> None:
        self._file.truncate(0)
        self._end = 0
        self.extents = {}

    def close(self) -> None:
        self._file.close()


class VersionWriter:
    """Writes the files of one version.

    Args:
        draft: where they lie.
        new: the weights to publish.
        base: the version before, for a delta.
    """

    def __init__(self, draft: Draft, new: StepWeights, base: Base | None) -> None:
        self._draft = draft
        self._new = new
        self._base = None if base is None else base.weights
        self._expected = {} if base is None else base.version.digests
        self._zstd: Any = None if base is None else load_zstd()
        self._lanes = min(MOST_LANES, (os.cpu_count() or 1) + 1)
        self._spools: list[_Spool] = []
        self._window_bytes = new.window_bytes(WINDOW_BYTES)
        self._windows = Windows(2 * self._lanes, self._window_bytes)
        self._work = Limiter("publication", self._lanes)
        self._frame_bytes = 0
        self._sums: dict[str, TensorSums] = {}
        self._done = WrittenFiles({}, {}, {})

    async def write(self, numbers: Iterable[int]) -> WrittenFiles:
        """Write the files of these numbers in the layout.

        Raises:
            BaseDiffersError, DeltaTooLargeError: a full version must take its place.
        """
        try:
            self._spools += [_Spool() for _ in range(self._lanes if self._base is not None else 0)]
            files = self._new.layout.files
            for number in numbers:
                file, name = files[number], self._draft.name(number, len(files))
                await (self._write_full if self._base is None else self._write_delta)(number, file, name)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"free space for temporary files, or name another folder as TMPDIR: {error}") from error
        finally:
            self._windows.close()
            for spool in self._spools:
                spool.close()
        return self._done

    # ------------------------------------------------------------------ a full file

    async def _write_full(self, number: int, file: FolderFile, name: str) -> None:
        turns = {offset: anyio.Event() for offset in range(0, file.size + self._window_bytes, self._window_bytes)}
        turns[0].set()

        async def fill(offset: int, view: memoryview) -> None:
            await self._new.fill(number, offset, view)
            await turns[offset].wait()  # windows are read at once, and hashed in order
            await run_blocking(self._work, self._take, file, 0, offset, view, None)
            turns[offset + self._window_bytes].set()

        await write_file(self._draft.backend, self._draft.key(name), file.size, self._windows, fill)
        self._done.files[name] = FileNote(file.size)
        for span in file.spans:
            self._done.weight_map[span.weight.name] = name
            self._done.tensors[span.weight.name] = "", self._pop(span.weight.name).digests[1]

    def _pop(self, tensor: str) -> TensorSums:
        return self._sums.pop(tensor, None) or TensorSums(0)  # a tensor without elements is in no window

    # ------------------------------------------------------------------ a file of frames

    async def _write_delta(self, number: int, file: FolderFile, name: str) -> None:
        spans = [span for span in file.spans if span.end > span.start]
        units = split_by_bytes(spans, lambda span: span.end - span.start, self._window_bytes)
        async with open_tasks() as tasks:
            for lane in range(self._lanes):
                tasks.start_soon(self._run_lane, units, number, file, lane)
        gathered = self._gather(file, name)
        if 2 * self._frame_bytes > self._new.weight_bytes:
            raise DeltaTooLargeError(f"{self._frame_bytes:,} bytes and more of {self._new.weight_bytes:,} have changed")
        if gathered is not None:
            digest = await run_blocking(self._work, gathered.digest)

            async def fill(offset: int, view: memoryview) -> None:
                await run_blocking(self._work, gathered.read, offset, view)

            await write_file(self._draft.backend, self._draft.key(name), gathered.size, self._windows, fill)
            self._done.files[name] = FileNote(gathered.size, digest)
        for spool in self._spools:
            await run_blocking(self._work, spool.reset)

    def _gather(self, file: FolderFile, name: str) -> _FrameFile | None:
        """Return the file of the frames of those tensors that have changed; None if all are as before."""
        frames = {tensor: (spool, *extent) for spool in self._spools for tensor, extent in spool.extents.items()}
        entries: list[Entry] = []
        runs: list[tuple[_Spool, int, int]] = []
        checksums: dict[str, str] = {}
        end = 0
        for span in file.spans:
            tensor = span.weight.name
            sums = self._pop(tensor)
            old, new = self._done.tensors[tensor] = sums.digests
            if old != self._expected.get(tensor):
                raise BaseDiffersError(f"{tensor} of the base is not what was published: a full version is needed")
            if old != new:
                runs.append(frames[tensor])
                begin, end = end, end + runs[-1][2]
                entries.append(Entry(tensor, "U8", (end - begin,), begin, end))
                checksums[tensor] = sums.checksum
                self._done.weight_map[tensor] = name
        self._frame_bytes += end
        return _FrameFile(encode_header(entries, checksums), runs) if entries else None

    # ------------------------------------------------------------------ the lanes

    async def _run_lane(self, units: Iterator[Sequence[WeightSpan]], number: int, file: FolderFile, lane: int) -> None:
        assert self._base is not None
        held: list[Slab] = []
        try:
            # For all of the lane's tensors: a hand-over of each window would cost the loop more than its compression saves.
            held.append(await self._windows.acquire())
            held.append(await self._windows.acquire())
            for spans in units:
                cuts = self._new.cuts(spans[0], self._window_bytes) if len(spans) == 1 else ()
                for start, end in pairwise([spans[0].start, *cuts, spans[-1].end]):
                    new, old = (window.memory[: end - start] for window in held)
                    async with open_tasks() as tasks:
                        tasks.start_soon(self._new.fill, number, start, new)
                        tasks.start_soon(self._base.fill, number, start, old)
                    await run_blocking(self._work, self._take, file, lane, start, new, old)
        finally:
            with anyio.CancelScope(shield=True):
                for window in held:
                    await self._windows.release(window)

    def _take(self, file: FolderFile, lane: int, offset: int, new: memoryview, old: memoryview | None) -> None:
        """Add the bytes of a window to the sums and frames of its tensors. On a worker thread."""
        after = np.frombuffer(new, np.uint8)
        before = None if old is None else np.frombuffer(old, np.uint8)
        end = offset + len(after)
        spans = file.spans
        for span in spans[bisect_right(spans, offset, key=lambda span: span.end) :]:
            if span.start >= end:
                break
            name, cut = span.weight.name, slice(max(span.start - offset, 0), min(span.end, end) - offset)
            sums = self._sums.get(name) or self._sums.setdefault(name, TensorSums(span.weight.nbytes, self._zstd))
            parts = sums.add(after[cut], None if before is None else before[cut])
            if before is not None:
                if span.end <= end:
                    parts.append(sums.end())
                self._spools[lane].append(name, parts)


class _FrameFile:
    """A file of which the payload lies in runs of spools. On worker threads."""

    def __init__(self, header: bytes, runs: Sequence[tuple[_Spool, int, int]]) -> None:
        self._header = header
        self._runs = runs
        self._starts = [len(header)]
        for _, _, size in runs:
            self._starts.append(self._starts[-1] + size)
        self.size = self._starts[-1]

    def read(self, offset: int, view: memoryview) -> None:
        """Fill *view* from *offset* on."""
        end = offset + len(view)
        header = self._header[offset:end]
        view[: len(header)] = header
        for number in range(max(0, bisect_right(self._starts, offset) - 1), len(self._runs)):
            low, high = max(self._starts[number], offset), min(self._starts[number + 1], end)
            if self._starts[number] >= end:
                break
            spool, at, _ = self._runs[number]
            spool.read(at + low - self._starts[number], view[low - offset : high - offset])

    def digest(self) -> str:
        """Return the digest of the file."""
        hasher = xxhash.xxh3_128()
        buffer = bytearray(min(MIB, self.size))
        for offset in range(0, self.size, MIB):
            view = memoryview(buffer)[: min(MIB, self.size - offset)]
            self.read(offset, view)
            hasher.update(view)
        return hasher.hexdigest()
