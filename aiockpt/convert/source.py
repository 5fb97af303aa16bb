"""The contents of a Hugging Face folder; headers are trusted only where they agree with the files and the index.

Guarantees:

- The sizes in a header allocate no memory before they are checked against the size of its file.
- Each tensor is in exactly one file, the one that the index names.
- Symbolic links are followed in folders of this machine only; the cache of `huggingface_hub` has them.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from aiockpt.backends.local import LocalBackend
from aiockpt.convert.folder_layout import INDEX_NAME, SINGLE_NAME, decode_index
from aiockpt.errors import CorruptionError, ObjectNotFoundError, UsageError
from aiockpt.format.safetensors import MAX_HEADER_BYTES, Header, decode_header
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Backend, Reader, local_path
from aiockpt.storage.transfer import read_record

SUFFIX = ".safetensors"
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors\Z")
_LENGTH_BYTES = 8


class SourceTensor(msgspec.Struct, frozen=True):
    """One tensor of a folder: bytes from *start* of file number *file*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int


class Source(msgspec.Struct, frozen=True):
    """A folder whose headers were read.

    Attributes:
        files: names, by number; *readers*: the open files.
        tensors: in the order of the files.
        ties: other names of a tensor's memory → its name.
    """

    files: tuple[str, ...]
    readers: tuple[Reader, ...]
    tensors: tuple[SourceTensor, ...]
    ties: dict[str, str]


_Files = Mapping[str, tuple[Backend, str]]
"""File name → its place and its key there."""


@asynccontextmanager
async def open_source(folder: Backend, only: str | None = None) -> AsyncIterator[Source]:
    """Open the weights of a folder for the length of the block.

    Args:
        only: the one file to open; None finds the weights of the folder.

    Raises:
        UsageError: there are no weights, or several sets of them.
        CorruptionError: a file is missing or damaged, or the header or index contradicts the files.
    """
    there = await list_files(folder)
    index = None
    if only is None and SINGLE_NAME not in there and INDEX_NAME in there:
        what = f"{folder.url}/{INDEX_NAME}"
        index = decode_index(await read_record(*there[INDEX_NAME]), what)
        names = tuple(sorted(set(index.values())))
    else:
        names = (only or _find_single(folder.url, there),)
    async with AsyncExitStack() as opened:
        readers, headers = [], []
        for name in names:
            reader = await _open_file(folder.url, there, name)
            opened.push_async_callback(reader.close)
            readers.append(reader)
            headers.append(await read_header(reader, f"{folder.url}/{name}"))
        tensors = _merge(folder.url, names, headers, index)
        yield Source(names, tuple(readers), tensors, _find_ties(headers, tensors))


async def has_weights(folder: Backend) -> bool:
    """Return whether a folder holds safetensors files directly."""
    return any(name.endswith(SUFFIX) for name in await list_files(folder))


async def list_files(folder: Backend) -> _Files:
    """Return where each file of a folder lies; links are followed on this machine."""
    if (path := local_path(folder.url)) is not None:
        return await run_blocking(Limiter("looking", 1), _list_local, str(path))
    return {stat.key: (folder, stat.key) for stat in (await folder.list("")).objects}


def _list_local(root: str) -> _Files:
    """List a folder of this machine, following links: the user named it, and its files are only read as safetensors."""
    found: dict[str, tuple[Backend, str]] = {}
    try:
        names = os.listdir(root)
    except OSError as error:
        raise UsageError(f"{root}: {error.strerror}; name a folder with .safetensors files") from error
    for name in names:
        path = os.path.realpath(os.path.join(root, name))
        if os.path.isfile(path):
            found[name] = (LocalBackend(os.path.dirname(path)), os.path.basename(path))
    return found


def _find_single(url: str, there: _Files) -> str:
    if SINGLE_NAME in there:
        return SINGLE_NAME
    names = sorted(name for name in there if name.endswith(SUFFIX))
    if len(names) == 1:
        if (part := _SHARD.search(names[0])) is not None and int(part[1]) > 1:
            raise UsageError(
                f"{url} has {names[0]}, one of {int(part[1])} shards, and no {INDEX_NAME}: fetch the whole folder"
            )
        return names[0]
    if names:
        raise UsageError(f"{url} has {len(names)} safetensors files and no {INDEX_NAME}: name the one you mean")
    raise UsageError(f"{url} has neither {SINGLE_NAME} nor {INDEX_NAME}: name a folder with weights")


async def _open_file(url: str, there: _Files, name: str) -> Reader:
    try:
        if name not in there:
            raise ObjectNotFoundError(f"{name!r} is not there", key=name)
        backend, key = there[name]
        return await backend.open(key)
    except ObjectNotFoundError as error:
        raise CorruptionError(f"{url}/{name} is missing: fetch the folder again", key=name) from error


async def read_header(reader: Reader, what: str) -> Header:
    """Return the header of an open file, which messages call *what*.

    Raises:
        CorruptionError: it is damaged, cut short, or no safetensors file.
    """
    length = bytearray(_LENGTH_BYTES)
    if reader.size < _LENGTH_BYTES:
        raise CorruptionError(f"{what} has {reader.size} bytes, too few for a header: fetch it again", key=what)
    await reader.read(0, [memoryview(length)])
    header_bytes = _LENGTH_BYTES + int.from_bytes(length, "little")
    if header_bytes > min(reader.size, MAX_HEADER_BYTES):
        raise CorruptionError(
            f"{what} declares a header of {header_bytes:,} bytes, which a file of {reader.size:,} cannot have: it is "
            "cut short, or no safetensors file",
            key=what,
        )
    prefix = bytearray(header_bytes)
    await reader.read(0, [memoryview(prefix)])
    try:
        return decode_header(bytes(prefix), reader.size)
    except CorruptionError as error:
        raise CorruptionError(f"{what}: {error}: it is damaged or cut short, fetch it again", key=what) from error


def _merge(
    url: str, names: tuple[str, ...], headers: list[Header], index: Mapping[str, str] | None
) -> tuple[SourceTensor, ...]:
    """Return the tensors of all files; refuse a tensor in two files, or in another one than the index names."""
    found: dict[str, SourceTensor] = {}
    for number, (name, header) in enumerate(zip(names, headers, strict=True)):
        for entry in header.entries:
            if entry.name in found:
                raise CorruptionError(
                    f"{url}: {entry.name[:80]!r} is in {names[found[entry.name].file]} and in {name}", key=name
                )
            start = header.data_start + entry.start
            found[entry.name] = SourceTensor(entry.name, entry.dtype, entry.shape, number, start)
    if index is not None:
        _check_index(url, names, found, index)
    if not found:
        raise UsageError(f"{url} holds no tensor: name a folder with weights")
    return tuple(found.values())


def _check_index(url: str, names: tuple[str, ...], found: Mapping[str, SourceTensor], index: Mapping[str, str]) -> None:
    for tensor, file in index.items():
        held = found.get(tensor)
        if held is None or names[held.file] != file:
            where = "in no file" if held is None else f"in {names[held.file]}"
            raise CorruptionError(
                f"{url}: its index says that {tensor[:80]!r} is in {file}, and it is {where}", key=file
            )
    if extra := found.keys() - index.keys():
        some = min(extra)
        raise CorruptionError(f"{url}: {names[found[some].file]} holds {some[:80]!r}, which its index does not name")


def _find_ties(headers: list[Header], tensors: tuple[SourceTensor, ...]) -> dict[str, str]:
    """Return the ties that ``safetensors.torch.save_model`` records in a file's metadata: other name → name."""
    names = {tensor.name for tensor in tensors}
    return {
        other: kept
        for header in headers
        for other, kept in header.metadata.items()
        if kept in names and other not in names
    }
