"""Which uploads did dead writers leave in an object store, and which of them may be aborted?

An object store keeps the parts of an upload that nobody finished, and asks money for them, until somebody aborts it.

Guarantees:

- Only uploads of data files below our own ``a-<nonce>/`` folders are looked at: what another program left is its own.
- Aborted is what is older than the grace by the storage's clock, of a rank without a receipt in that attempt: a rank that
  voted has finished its uploads. Attempts that are under way here are left alone whatever their age.
- Nothing here fails a save or a clean-up: a store that does not let us list or abort is told, and asked no more.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from aiockpt.errors import StorageError
from aiockpt.format.names import parse_data
from aiockpt.pipeline.receipts import ranks_that_voted
from aiockpt.storage.backend import Backend, UnfinishedUpload, keeps_uploads
from aiockpt.storage.transfer import storage_now_ns


class DeadUploads(msgspec.Struct, frozen=True):
    """The uploads that dead writers left.

    Attributes:
        uploads: those that were aborted, or may be.
        problem: why there may be more, or why they are still there; None when all is known and done.
    """

    uploads: tuple[UnfinishedUpload, ...] = ()
    problem: str | None = None


async def find_leftovers(backend: Backend, *, grace_s: float, nonce: str, busy: Collection[str]) -> DeadUploads:
    """Return the uploads below the root that nobody will finish.

    Args:
        busy: attempts of this process that are under way.
    """
    if (store := keeps_uploads(backend)) is None:
        return DeadUploads()
    try:
        ours = {upload: found for upload in await store.leftover_uploads() if (found := parse_data(upload.key))}
        if not ours:
            return DeadUploads()
        before_ns = await storage_now_ns(backend, nonce) - grace_s * 1e9
        old = {upload: found for upload, found in ours.items() if upload.started_ns <= before_ns}
        attempts = {(step_id, attempt) for step_id, attempt, _ in old.values() if attempt not in busy}
        voted = {one: await ranks_that_voted(backend, *one) for one in sorted(attempts)}
    except StorageError as error:
        return DeadUploads(problem=f"unfinished uploads cannot be listed: {error}")
    return DeadUploads(
        tuple(
            upload
            for upload, (step_id, attempt, rank) in old.items()
            if (step_id, attempt) in voted and rank not in voted[step_id, attempt]
        )
    )


async def abort_leftovers(backend: Backend, found: DeadUploads) -> DeadUploads:
    """Abort what was found; return what is aborted."""
    store = keeps_uploads(backend)
    if store is None or not found.uploads:
        return found
    done: list[UnfinishedUpload] = []
    for upload in found.uploads:
        try:
            await store.abort_uploads([upload])
        except StorageError as error:
            left = len(found.uploads) - len(done)
            return DeadUploads(tuple(done), f"{left} unfinished uploads cannot be aborted: {error}")
        done.append(upload)
    return DeadUploads(tuple(done), found.problem)
