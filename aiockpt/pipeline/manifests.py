"""One manifest, or its head: read, and read again while it comes damaged, until it is whole or certainly is not.

Guarantees:

- What is returned was proven: a head by its own digest, a manifest by all of `aiockpt.format.validate`, and both by being
  what their key says.
- `ManifestError` means that this object is bad: its bytes, its device, or what lies in its place. What comes damaged is
  read again until it is whole, or comes the same a second time: what a network damages, it damages otherwise each time.
- `NewerFormatError` means that it is whole and not for this version. Any other `StorageError` says nothing of the object.
"""

from __future__ import annotations

import logging

from aiockpt.errors import ManifestError, NewerFormatError, ObjectNotFoundError
from aiockpt.format.checksum import digest128
from aiockpt.format.manifest import HEAD_BYTES, Head, Manifest, decode_head, decode_manifest
from aiockpt.format.names import manifest_key
from aiockpt.format.parts import attach, part_paths
from aiockpt.format.validate import check_manifest
from aiockpt.pipeline.receipts import do_all
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import read_record, read_start

logger = logging.getLogger("aiockpt")

READS = 12
"""How often what comes damaged otherwise each time is read: as often as a call is made that fails on its way."""


async def read_head(backend: Backend, step_id: str, generation: int) -> Head:
    """Return the head of one manifest: from its first bytes, or from all of it where these do not prove it.

    Raises:
        ManifestError, NewerFormatError, ObjectNotFoundError, StorageError: see the module.
    """
    key = manifest_key(step_id, generation)
    start = await read_start(backend, key, HEAD_BYTES)
    head = decode_head(start)
    if head is None:
        whole = start if len(start) < HEAD_BYTES else None
        return Head.of(await read_manifest(backend, step_id, generation, come=whole))
    if (head.id, head.generation) != (step_id, generation):
        claim = f"generation {head.generation} of {head.id!r}"
        raise ManifestError(f"{key}: it says that it is {claim}; was it copied here?", key=key)
    return head


async def read_manifest(backend: Backend, step_id: str, generation: int, *, come: bytes | None = None) -> Manifest:
    """Return one manifest, decoded and checked in every way that needs no other object.

    Args:
        come: its bytes, where they have been read.

    Raises:
        ManifestError, NewerFormatError, ObjectNotFoundError, StorageError: see the module.
    """
    key = manifest_key(step_id, generation)
    seen: set[str] = set()
    while True:
        blobs: dict[str, bytes] = {}
        try:
            blobs[key] = await read_record(backend, key) if come is None else come
            manifest = decode_manifest(blobs[key], key)
            if manifest.parts:
                manifest = await _read_parts(backend, manifest, step_id, blobs)
            check_manifest(manifest, step_id, generation)
            return manifest
        except NewerFormatError:
            raise
        except ManifestError as error:
            came = digest128(b"".join(digest128(blobs[path]).encode() for path in sorted(blobs)))
            if came in seen or len(seen) == READS - 1:
                raise
            seen.add(came)
            come = None
            logger.info("%s; it is read once more", error)


async def _read_parts(backend: Backend, manifest: Manifest, step_id: str, blobs: dict[str, bytes]) -> Manifest:
    """Return the manifest with the pieces that lie in blobs beside it, which *blobs* gets."""

    async def read(path: str) -> None:
        try:
            blobs[path] = await read_record(backend, f"{step_id}/{path}")
        except ObjectNotFoundError as error:
            raise ManifestError(f"{step_id}/{path} is missing, a part of its manifest", key=path) from error

    await do_all(read, part_paths(manifest))
    return await run_blocking(Limiter("parts", 1), attach, manifest, blobs)
