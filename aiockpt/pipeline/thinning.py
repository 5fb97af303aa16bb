"""How does a step give up all but its weights, so that a crash at any point leaves it whole or thin, and never less?

A thinned step is a generation of its own: a new manifest that names the same weight files, of the same attempt. It says
that it is weights alone, so nothing is resumed from it, and it loads into bare modules.

Guarantees:

- The new manifest is durable before anything is removed. Then the other files go, and the old manifest last: while that is
  there, whoever cleans up knows that there is something left to remove, and what.
- Readers take the higher generation, whose files stay: no read of the weights is disturbed.
- Only a step whose files are of one kind each is thinned; one that was written otherwise is left, with the reason.
"""

from __future__ import annotations

import msgspec

from aiockpt.errors import UsageError
from aiockpt.format.manifest import Manifest
from aiockpt.format.names import damaged_key, manifest_key, verified_key
from aiockpt.pipeline.commit import publish
from aiockpt.planning.weights import thin_manifest
from aiockpt.storage.backend import Backend


class Thinned(msgspec.Struct, frozen=True):
    """A step that keeps its weights alone: its number, and the bytes of the files that go."""

    id: str
    step: int
    bytes: int


def plan_thinning(whole: Manifest, generation: int, write_id: str) -> tuple[Manifest, Thinned]:
    """Return the manifest of the weights of *whole* as that *generation*, and what is gained.

    Raises:
        UsageError: its files hold weights and other things together, or no weights.
    """
    thin = thin_manifest(whole, generation, write_id)
    kept = {file.p for file in thin.files}
    return thin, Thinned(whole.id, whole.step, sum(file.size for file in whole.files if file.p not in kept))


async def thin(backend: Backend, whole: Manifest, highest: int, write_id: str) -> Thinned:
    """Have the step of *whole* keep its weights alone.

    Args:
        highest: the highest generation of the step there.

    Raises:
        UsageError: as `plan_thinning`.
        CommitConflictError: the step is being saved again; it is left as it is.
    """
    new, gained = plan_thinning(whole, highest + 1, write_id)
    made = await publish(backend, new)
    await remove_overtaken(backend, whole, made)
    return gained


async def remove_overtaken(backend: Backend, older: Manifest, newer: Manifest) -> None:
    """Remove the files that only an *older* generation of the same attempt names, and then its manifest."""
    if older.attempt != newer.attempt or older.generation >= newer.generation:
        raise UsageError(f"{older.id}: generation {newer.generation} does not overtake generation {older.generation}")
    named = {file.p for file in newer.files}
    gone = [f"{older.id}/{file.p}" for file in older.files if file.p not in named]
    if gone:
        await backend.delete(gone)
    for key in (verified_key, damaged_key, manifest_key):
        await backend.delete([key(older.id, older.generation)])
