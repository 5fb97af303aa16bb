"""Which steps are there, and which is the newest?

Guarantees:

- "Newest" is decided by the logical clock in the manifests (`sequence`, then step), never by a clock of a machine: after
  going back to an earlier step and saving on, the new branch is the newest.
- Only what was proven counts (`aiockpt.pipeline.manifests`). A generation that is bad is passed over, with the reason, and
  the one before it stands at *its own* place in the order: a bad manifest makes no step newer than it is.
- An outage is not damage: a step that does not say now how new it is may be the newest, and is marked as that.
- ``LATEST`` is never read. What does not look like a step of ours is nobody's business.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from contextlib import suppress

import anyio
import msgspec

from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ManifestError,
    NewerFormatError,
    ObjectNotFoundError,
    StorageError,
)
from aiockpt.format.manifest import Head, Manifest, Receipt
from aiockpt.format.names import (
    check_step_id,
    manifest_key,
    parse_attempt,
    parse_damaged,
    parse_manifest,
    parse_step,
    parse_verified,
)
from aiockpt.pipeline.manifests import read_head, read_manifest
from aiockpt.pipeline.receipts import READS_AT_ONCE, any_receipt
from aiockpt.pipeline.receipts import read_receipts as read_receipts
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.backend import Backend, Listing, Stat
from aiockpt.storage.transfer import RECORD_LIMIT_BYTES

LOOKS = 3
"""How often a step with something bad in it is listed, at most: what is being deleted meanwhile is not damaged."""


class PassedOver(msgspec.Struct, frozen=True):
    """A generation of a step that no reader may believe, and why. Generation 0 is the step as a whole.

    Attributes:
        unread: whether nothing of it came, for its device or what lies in its place: another time it may.
    """

    generation: int
    reason: str
    unread: bool = False


class StepEntry(msgspec.Struct, frozen=True):
    """What a listing, and the heads of its manifests, tell of one step.

    Attributes:
        id, step: the folder and its number (−1 where the id is not one of ours).
        generations: the numbers of its manifests, falling.
        verified, damaged: the generations that a verification found whole, or not.
        attempts: the attempts whose folders are there.
        head: of the highest generation that was not passed over; None where there is none, or *trouble*.
        passed: the generations above that one, which are bad.
        trouble: why the highest generation that was not passed over does not say now how new it is.
        dated_ns: when the storage says that the manifest of *head* was written; 0 where it was not listed, or has no date.
    """

    id: str
    step: int
    generations: tuple[int, ...]
    verified: frozenset[int] = frozenset()
    attempts: tuple[str, ...] = ()
    head: Head | None = None
    damaged: frozenset[int] = frozenset()
    passed: tuple[PassedOver, ...] = ()
    trouble: CheckpointError | None = None
    dated_ns: int = 0

    @property
    def committed(self) -> bool:
        """Whether it has a manifest, valid or not; also of a step that does not say, and of one with nothing sound in it."""
        return bool(self.generations or self.passed or self.trouble)

    @property
    def unheard(self) -> str | None:
        """Why it, or a generation of it, does not say now how new it is, and may later; None when all of it has spoken."""
        if self.trouble is not None:
            return str(self.trouble)
        return next((passed.reason for passed in self.passed if passed.unread), None)

    @property
    def age_order(self) -> tuple[int, int]:
        """Sorts steps from the oldest to the newest; of one that does not say, the newest, and of a bad one the oldest."""
        if self.head is not None:
            return (self.head.sequence, self.step)
        return (sys.maxsize if self.trouble is not None else -1, self.step)

    @property
    def is_verified(self) -> bool:
        """Whether a verification found the generation whole that counts."""
        return self.head is not None and self.head.generation in self.verified

    @property
    def is_found_damaged(self) -> bool:
        """Whether a verification found the generation damaged that counts."""
        return self.head is not None and self.head.generation in self.damaged


class StepCopy(msgspec.Struct, frozen=True):
    """One copy of a step: the place, and the step's manifest there. All copies of one save have its attempt."""

    backend: Backend
    manifest: Manifest


class Heads:
    """What the manifests of one place say of themselves, for who looks at them after every save.

    A manifest is never written twice: one of the same size and date, whose attempt is still there, need not be read again.

    Attributes:
        doubted: attempts that were passed over by a load: retention does not count them.
    """

    def __init__(self) -> None:
        self.doubted: set[str] = set()
        self._known: dict[str, tuple[Stat, Head | PassedOver]] = {}
        self._told: set[str] = set()

    def recall(self, entry: StepEntry, found: Stat | None) -> Head | PassedOver | None:
        """Return the head, or what is bad about it, of the manifest that is *found* now, if it is the one that was read."""
        stat, said = (None, None) if found is None else self._known.get(found.key, (None, None))
        known = stat is not None and stat == found
        return None if not known or (isinstance(said, Head) and said.attempt not in entry.attempts) else said

    def learn(self, found: Stat | None, said: Head | PassedOver) -> None:
        """Remember the head, or what is bad about it, of the manifest that was *found*."""
        if found is not None:
            self._known[found.key] = (found, said)

    def forget_all_but(self, step_ids: Container[str]) -> None:
        """Forget the steps that are gone."""
        for gone in [key for key in self._known if key.partition("/")[0] not in step_ids]:
            del self._known[gone]

    def is_news(self, text: str) -> bool:
        """Say whether *text*, something that does not change from save to save, has not been told yet; it is now."""
        is_news = text not in self._told
        self._told.add(text)
        return is_news


async def scan(backend: Backend, heads: Heads | None = None) -> list[StepEntry]:
    """Return every step below the root, the newest first; a step that cannot be looked at hides no other.

    Args:
        heads: what need not be read again; all is read for None.
    """
    heads = Heads() if heads is None else heads
    listing = await backend.list("")
    found: dict[str, StepEntry] = {}
    slots = anyio.Semaphore(READS_AT_ONCE)

    async def look(folder: str) -> None:
        async with slots:
            found[folder] = await _look_if_possible(backend, folder, heads)

    async with open_tasks() as tasks:
        for folder in listing.folders:
            if _is_step_id(folder):
                tasks.start_soon(look, folder)
    for name in (*listing.others, *(stat.key for stat in listing.objects)):
        step = parse_step(name)
        if step is not None and name not in found:
            found[name] = StepEntry(name, step, (), passed=(await _describe(backend, name),))
    heads.forget_all_but(found)
    return sorted(found.values(), key=lambda entry: entry.age_order, reverse=True)


def _is_step_id(folder: str) -> bool:
    try:
        return bool(check_step_id(folder))
    except CheckpointError:
        return False


async def _look_if_possible(backend: Backend, step_id: str, heads: Heads) -> StepEntry:
    try:
        return await look_at(backend, step_id, heads)
    except StorageError as error:
        entry = StepEntry(step_id, _number(step_id), ())
        if error.damaged:
            return msgspec.structs.replace(entry, passed=(PassedOver(0, str(error), unread=True),))
        return msgspec.structs.replace(entry, trouble=error)


async def _describe(backend: Backend, name: str) -> PassedOver:
    """Say what it is that has the name of a step and is no folder."""
    try:
        await backend.stat(name)
    except StorageError as error:
        return PassedOver(0, str(error), unread=True)
    return PassedOver(0, f"{name!r} is a file, where a step's folder should be: move it away")


async def look_at(backend: Backend, step_id: str, heads: Heads | None = None) -> StepEntry:
    """Return what the listing and the heads say of one step; *heads* as for `scan`.

    Raises:
        StorageError: it cannot be listed. What is wrong with a manifest is in the entry.
    """
    heads = Heads() if heads is None else heads
    entry = await _look_once(backend, step_id, heads)
    for _ in range(LOOKS - 1):
        if not entry.passed:
            break
        before, entry = entry, await _look_once(backend, step_id, heads)
        if entry.passed == before.passed:
            break
    return entry


async def _look_once(backend: Backend, step_id: str, heads: Heads) -> StepEntry:
    listing = await backend.list(step_id)
    return await _judge(backend, _entry(step_id, listing), {stat.key: stat for stat in listing.objects}, heads)


async def fall_back(backend: Backend, entry: StepEntry) -> StepEntry:
    """Return *entry* as it is without the generation that counts in it, and all above."""
    assert entry.head is not None
    lower = tuple(generation for generation in entry.generations if generation < entry.head.generation)
    left = msgspec.structs.replace(entry, generations=lower, head=None, passed=())
    return await _judge(backend, left, {}, Heads())


async def _judge(backend: Backend, entry: StepEntry, stats: Mapping[str, Stat], heads: Heads) -> StepEntry:
    """Find the highest generation that may be believed, and what is bad above it."""
    gone: set[int] = set()
    passed: list[PassedOver] = []
    head: Head | None = None
    trouble: CheckpointError | None = None
    dated_ns = 0
    for generation in entry.generations:
        found = stats.get(manifest_key(entry.id, generation))
        try:
            said = heads.recall(entry, found) or await _read_head(backend, entry, generation, found)
        except ObjectNotFoundError:  # deleted since it was listed
            gone.add(generation)
            continue
        except (NewerFormatError, StorageError) as error:
            trouble = error
            break
        except ManifestError as error:
            said = PassedOver(generation, str(error), unread=isinstance(error.__cause__, StorageError))
        heads.learn(found, said)
        if isinstance(said, Head):
            head, dated_ns = said, 0 if found is None else found.modified_ns
            break
        passed.append(said)
    generations = tuple(generation for generation in entry.generations if generation not in gone)
    return msgspec.structs.replace(
        entry, generations=generations, head=head, passed=tuple(passed), trouble=trouble, dated_ns=dated_ns
    )


async def _read_head(backend: Backend, entry: StepEntry, generation: int, found: Stat | None) -> Head:
    key = manifest_key(entry.id, generation)
    if found is not None and found.size > RECORD_LIMIT_BYTES:
        raise ManifestError(f"{key} has {found.size:,} bytes: it is no document of aiockpt, and not read", key=key)
    head = await read_head(backend, entry.id, generation)
    if head.attempt not in entry.attempts:  # its data are gone, or it was put back from before
        raise ManifestError(f"{key} names the attempt {head.attempt}, whose folder is not there", key=key)
    return head


def _entry(step_id: str, listing: Listing) -> StepEntry:
    names = [stat.key.rpartition("/")[2] for stat in listing.objects]
    attempts = [parse_attempt(folder.rpartition("/")[2]) for folder in listing.folders]
    everything = {*names, *(key.rpartition("/")[2] for key in (*listing.folders, *listing.others))}
    generations = {n for name in everything if (n := parse_manifest(name)) is not None}
    return StepEntry(
        id=step_id,
        step=_number(step_id),
        generations=tuple(sorted(generations, reverse=True)),
        verified=frozenset(n for name in names if (n := parse_verified(name)) is not None),
        damaged=frozenset(n for name in names if (n := parse_damaged(name)) is not None),
        attempts=tuple(attempt for attempt in attempts if attempt is not None),
    )


def _number(step_id: str) -> int:
    step = parse_step(step_id)
    return -1 if step is None else step


async def newest_manifest(backend: Backend, entry: StepEntry) -> Manifest:
    """Return the manifest of the highest valid generation of a step.

    Raises:
        ManifestError: none of its generations is valid; the reason is that of the highest.
        NewerFormatError, StorageError: of the highest that is not bad.
    """
    first: CorruptionError | None = None
    for passed in entry.passed[:1]:
        first = ManifestError(passed.reason, key=entry.id)
    if entry.trouble is not None:
        raise entry.trouble
    left = entry
    while left.head is not None:
        try:
            return await read_generation(backend, left.id, left.head.generation)
        except NewerFormatError:
            raise
        except CorruptionError as error:
            first = first or error
        left = await fall_back(backend, left)
        if left.trouble is not None:
            raise left.trouble
    raise first or ManifestError(f"{entry.id} has no manifest: it was never committed", key=entry.id)


async def read_generation(backend: Backend, step_id: str, generation: int) -> Manifest:
    """Return one manifest that was listed; raises as `read_manifest`, and `ManifestError` when it is gone since."""
    try:
        return await read_manifest(backend, step_id, generation)
    except ObjectNotFoundError as error:
        raise ManifestError(f"{step_id}: generation {generation} was deleted meanwhile", key=error.key) from error


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


async def newest_vote(backend: Backend, entry: StepEntry) -> int:
    """Return the highest logical clock of attempts at a step that are not committed, and may be by whoever finds them.

    One vote of each is read; what cannot be read counts as none.
    """
    clock = 0
    for attempt in entry.attempts:
        if entry.head is None or attempt != entry.head.attempt:
            with suppress(CheckpointError):
                vote = await any_receipt(backend, entry.id, attempt)
                clock = max(clock, 0 if vote is None else vote.sequence)
    return clock
