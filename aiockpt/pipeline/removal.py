"""How is a step, or a whole run, removed because somebody asked for it? Only what is ours, whatever state it is in.

Guarantees:

- Nothing is touched but step folders with a manifest or an attempt of ours in them, the hint, the marks of this program at
  the root, and unfinished uploads below our attempts. What else lies there is named and stays.
- Steps go one by one, the oldest first, each as retention removes it: whoever is interrupted keeps the newest ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from aiockpt.errors import StepNotFoundError, StorageError
from aiockpt.format.names import LATEST_KEY, list_names, parse_data
from aiockpt.pipeline.collect import delete_step
from aiockpt.pipeline.discover import StepEntry, scan
from aiockpt.storage.backend import PROOF_KEY, Backend, UnfinishedUpload, keeps_uploads
from aiockpt.storage.transfer import walk

_MARKS = re.compile(r"\.clock-[0-9a-f]+|\.aiockpt-probe-[0-9a-f]+|\.exclusive-[0-9a-f]+|\.seen-[0-9a-f]+")
"""What this program writes at the root for a moment; a crash may leave it."""


class Removal(msgspec.Struct, frozen=True):
    """What is to be removed of one root.

    Attributes:
        url: of the root.
        steps: the folders of steps, committed or not, the oldest first.
        bytes: of all objects in them.
        marks: the keys of ours that belong to no step.
        uploads: unfinished uploads of ours.
        others: names at the root that are not ours, and stay.
        newest: whether the newest committed step is among them.
    """

    url: str
    steps: tuple[str, ...]
    bytes: int
    newest: bool
    marks: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


async def plan_removal(backend: Backend, step: int | None) -> Removal:
    """Return what goes when *step* is removed; everything of the run for None.

    Raises:
        StepNotFoundError: there is nothing of that step.
    """
    entries = [entry for entry in await scan(backend) if entry.committed or entry.attempts]
    committed = [entry.id for entry in entries if entry.committed]
    chosen = [entry for entry in reversed(entries) if step is None or entry.step == step]
    if step is not None and not chosen:
        there = [str(entry.step) for entry in entries]
        has = f"it has {list_names(there)}" if there else "it holds no checkpoint"
        raise StepNotFoundError(f"{backend.url} has no step {step}; {has}")
    sizes = [stat.size for entry in chosen async for stat in walk(backend, entry.id)]
    removal = Removal(
        backend.url,
        tuple(entry.id for entry in chosen),
        sum(sizes),
        newest=bool(committed) and committed[0] in {entry.id for entry in chosen},
        uploads=tuple(upload.key for upload in await _uploads_of(backend, None if step is None else chosen)),
    )
    if step is not None:
        return removal
    root = await backend.list("")
    names = [stat.key for stat in root.objects]
    marks = [name for name in names if name in (LATEST_KEY, PROOF_KEY) or _MARKS.fullmatch(name)]
    steps = {entry.id for entry in entries}
    others = [*(name for name in names if name not in marks), *(name for name in root.folders if name not in steps)]
    return msgspec.structs.replace(removal, marks=tuple(marks), others=tuple(others))


async def remove(backend: Backend, removal: Removal, on_step: Callable[[str], object] = lambda _: None) -> None:
    """Remove what was planned, as far as it is still there.

    Args:
        on_step: told the id of each step that is gone.
    """
    entries = {entry.id: entry for entry in await scan(backend)}
    for step_id in removal.steps:
        if step_id in entries:
            await delete_step(backend, entries[step_id])
        on_step(step_id)
    store = keeps_uploads(backend)
    if store is not None and removal.uploads:
        await store.abort_uploads([one for one in await store.leftover_uploads() if one.key in removal.uploads])
    if removal.marks:
        await backend.delete(removal.marks)


async def _uploads_of(backend: Backend, entries: list[StepEntry] | None) -> list[UnfinishedUpload]:
    """Return the uploads of ours below some steps, or all; none where the store does not tell."""
    store = keeps_uploads(backend)
    if store is None:
        return []
    try:
        found = [(upload, parse_data(upload.key)) for upload in await store.leftover_uploads()]
    except StorageError:
        return []
    ids = None if entries is None else {entry.id for entry in entries}
    return [upload for upload, ours in found if ours is not None and (ids is None or ours[0] in ids)]
