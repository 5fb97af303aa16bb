"""Which steps are there, which is the newest, and is its manifest one that a reader may believe?

Guarantees:

- "Newest" is decided by the logical clock in the manifests (`sequence`, then step), never by a clock of a machine: after
  going back to an earlier step and saving on, the new branch is the newest (DECISIONS 6).
- ``LATEST`` is never read. A peek at a manifest orders the candidates and decides nothing else.
- A manifest is checked wholly (digest, version, limits, paths, coverage) before anything it names is opened.
"""

from __future__ import annotations

import sys
from collections.abc import Container

import anyio
import msgspec

from aiockpt.errors import CheckpointError, CorruptionError, ManifestError, ObjectNotFoundError
from aiockpt.format.manifest import Manifest, Peek, Receipt, decode_manifest, peek
from aiockpt.format.names import (
    check_step_id,
    manifest_key,
    parse_attempt,
    parse_damaged,
    parse_manifest,
    parse_step,
    parse_verified,
)
from aiockpt.format.parts import attach, part_paths
from aiockpt.format.validate import check_manifest
from aiockpt.pipeline.votes import READS_AT_ONCE, do_all
from aiockpt.pipeline.votes import read_receipts as read_receipts
from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, Listing, Stat
from aiockpt.storage.transfer import read_record

PEEK_BYTES = 4096


class StepEntry(msgspec.Struct, frozen=True):
    """What a listing tells of one step folder.

    Attributes:
        id, step: the folder and its number (−1 where the id is not one of ours).
        generations: the numbers of its manifests, falling.
        verified, damaged: the generations that a verification found whole, or not.
        attempts: the attempts whose folders are there.
        head: what the newest manifest says of itself, unverified; None when it could not be read.
    """

    id: str
    step: int
    generations: tuple[int, ...]
    verified: frozenset[int]
    attempts: tuple[str, ...]
    head: Peek | None = None
    damaged: frozenset[int] = frozenset()

    @property
    def committed(self) -> bool:
        """Whether it has a manifest (valid or not)."""
        return bool(self.generations)

    @property
    def age_order(self) -> tuple[int, int]:
        """Sorts steps from the oldest to the newest; a damaged one may be the newest, and is looked at first."""
        return (self.head.sequence if self.head else sys.maxsize, self.step)


class StepCopy(msgspec.Struct, frozen=True):
    """One copy of a step: the place, and the step's manifest there. All copies of one save have its attempt."""

    backend: Backend
    manifest: Manifest


class Heads:
    """What the newest manifests of one place say of themselves, for who looks at them after every save.

    A manifest is never written twice: one of the same size and date, whose attempt is still there, need not be read again.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Stat, Peek]] = {}

    def recall(self, entry: StepEntry, found: Stat) -> Peek | None:
        """Return the head of *entry* if its manifest, as *found* now, is the one that it was learnt from."""
        stat, head = self._known.get(entry.id, (None, None))
        return head if stat == found and head is not None and head.attempt in entry.attempts else None

    def learn(self, step_id: str, found: Stat, head: Peek | None) -> None:
        """Remember the *head* of the manifest that was *found*; None is not worth it."""
        if head is not None:
            self._known[step_id] = (found, head)

    def forget_all_but(self, step_ids: Container[str]) -> None:
        """Forget the steps that are gone."""
        for gone in [step_id for step_id in self._known if step_id not in step_ids]:
            del self._known[gone]


async def scan(backend: Backend, heads: Heads | None = None) -> list[StepEntry]:
    """Return every step folder below the root, the newest first.

    Args:
        heads: what need not be read again; all is read for None.
    """
    heads = Heads() if heads is None else heads
    folders = (await backend.list("")).folders
    found: dict[str, StepEntry] = {}
    slots = anyio.Semaphore(READS_AT_ONCE)

    async def look(folder: str) -> None:
        async with slots:
            found[folder] = await look_at(backend, folder, heads)

    async with open_tasks() as tasks:
        for folder in folders:
            if _is_step_id(folder):
                tasks.start_soon(look, folder)
    heads.forget_all_but(found)
    return sorted(found.values(), key=lambda entry: entry.age_order, reverse=True)


def _is_step_id(folder: str) -> bool:
    try:
        return bool(check_step_id(folder))
    except CheckpointError:
        return False


async def look_at(backend: Backend, step_id: str, heads: Heads | None = None) -> StepEntry:
    """Return what the listing and the newest manifest's first bytes say of one step; *heads* as for `scan`."""
    heads = Heads() if heads is None else heads
    listing = await backend.list(step_id)
    entry = _entry(step_id, listing)
    if not entry.generations:
        return entry
    key = manifest_key(step_id, entry.generations[0])
    found = next(stat for stat in listing.objects if stat.key == key)
    head = heads.recall(entry, found)
    if head is None:
        try:
            head = peek(await backend.get(key, PEEK_BYTES))
        except ObjectNotFoundError:  # deleted since it was listed; other failures would make an older step the newest
            return entry
        heads.learn(step_id, found, head)
    return msgspec.structs.replace(entry, head=head)


def _entry(step_id: str, listing: Listing) -> StepEntry:
    names = [stat.key.rpartition("/")[2] for stat in listing.objects]
    generations = sorted((n for name in names if (n := parse_manifest(name)) is not None), reverse=True)
    attempts = [parse_attempt(folder.rpartition("/")[2]) for folder in listing.folders]
    step = parse_step(step_id)
    return StepEntry(
        id=step_id,
        step=-1 if step is None else step,
        generations=tuple(generations),
        verified=frozenset(n for name in names if (n := parse_verified(name)) is not None),
        damaged=frozenset(n for name in names if (n := parse_damaged(name)) is not None),
        attempts=tuple(attempt for attempt in attempts if attempt is not None),
    )


async def read_manifest(backend: Backend, step_id: str, generation: int) -> Manifest:
    """Return one manifest, decoded and checked in every way that needs no other object.

    Raises:
        ManifestError: no reader may believe it.
        ObjectNotFoundError: it is not there.
    """
    key = manifest_key(step_id, generation)
    manifest = decode_manifest(await read_record(backend, key), key)
    if manifest.parts:
        manifest = await _read_parts(backend, manifest, step_id)
    check_manifest(manifest, step_id, generation)
    return manifest


async def _read_parts(backend: Backend, manifest: Manifest, step_id: str) -> Manifest:
    """Return the manifest with the pieces that lie in blobs beside it."""
    blobs: dict[str, bytes] = {}

    async def read(path: str) -> None:
        try:
            blobs[path] = await read_record(backend, f"{step_id}/{path}")
        except ObjectNotFoundError as error:
            raise ManifestError(f"{step_id}/{path} is missing, a part of its manifest", key=path) from error

    await do_all(read, part_paths(manifest))
    return await run_blocking(Limiter("parts", 1), attach, manifest, blobs)


async def newest_manifest(backend: Backend, entry: StepEntry) -> Manifest:
    """Return the manifest of the highest valid generation of a step.

    Raises:
        ManifestError: none of its generations is valid; the reason is that of the highest.
    """
    first: CorruptionError | None = None
    for generation in entry.generations:
        try:
            return await read_manifest(backend, entry.id, generation)
        except ObjectNotFoundError as error:
            first = first or ManifestError(f"{entry.id}: generation {generation} was deleted meanwhile", key=error.key)
        except CorruptionError as error:
            first = first or error
    raise first or ManifestError(f"{entry.id} has no manifest: it was never committed", key=entry.id)


async def find_copy(target: Backend, step_id: str, attempt: str) -> Manifest | None:
    """Return the manifest of the generation at *target* that holds *attempt*; None when there is none."""
    entry = await look_at(target, step_id)
    if attempt not in entry.attempts:
        return None
    for generation in entry.generations:
        try:
            manifest = await read_manifest(target, entry.id, generation)
        except (ManifestError, ObjectNotFoundError):
            continue
        if manifest.attempt == attempt:
            return manifest
    return None


async def votes_to_finish(backend: Backend, entry: StepEntry, attempt: str) -> list[Receipt] | None:
    """Return the votes of an attempt by rank when all are there and nobody has overtaken it, else None."""
    votes = await read_receipts(backend, entry.id, attempt)
    first = next(iter(votes.values()), None)
    if first is None or len(votes) != first.world_size or first.generation <= max(entry.generations, default=0):
        return None
    return [votes[rank] for rank in sorted(votes)]
