"""Discovery of steps: `scan` lists them and judges the heads of their manifests, `newest_first` reads them in order.

Guarantees:

- "Newest" is decided by the logical clock in the manifests (`sequence`, then step), never by a clock of a machine: after
  a load of an earlier step and further saves, the new branch is the newest.
- Only proven manifests count (`aiockpt.pipeline.receipts`). A bad generation is passed over, with the reason, and the one
  before it has *its own* place in the order: a bad manifest makes no step newer than it is.
- An outage is not damage: a step whose age cannot be read now may be the newest, and is marked as such.
- ``LATEST`` is not read here (`aiockpt.pipeline.latest` asks it). A name that is no step id of ours is ignored. No torch is
  imported.
"""

from __future__ import annotations

import logging
import sys
from bisect import insort
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Mapping, Sequence
from contextlib import aclosing, suppress

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
    attempt_folder,
    check_step_id,
    manifest_key,
    parse_attempt,
    parse_damaged,
    parse_manifest,
    parse_step,
    parse_verified,
)
from aiockpt.pipeline.receipts import any_receipt, do_all, read_head, read_manifest
from aiockpt.pipeline.receipts import read_receipts as read_receipts
from aiockpt.planning.weights import has_weights_only
from aiockpt.storage.backend import Backend, Listing, Stat, works_when_full
from aiockpt.storage.transfer import RECORD_LIMIT_BYTES, walk

logger = logging.getLogger("aiockpt")

LIST_TRIES = 3
"""The most listings of a step with a bad part: an object that is being deleted meanwhile is not damaged."""


class PassedOver(msgspec.Struct, frozen=True):
    """A generation of a step that readers must not use, and the reason. Generation 0 is the step as a whole.

    Attributes:
        unread: whether it could not be read at all, because of its device or another object in its place: it may be later.
    """

    generation: int
    reason: str
    unread: bool = False


class StepEntry(msgspec.Struct, frozen=True):
    """The facts of one step from a listing and the heads of its manifests.

    Attributes:
        id, step: the folder and its number (−1 where the id is not one of ours).
        generations: the numbers of its manifests, descending.
        verified, damaged: the generations that a verification found whole, or damaged.
        attempts: the attempts whose folders exist.
        head: of the highest generation that was not passed over; None where there is none, or *trouble*.
        passed: the generations above that one, which are bad.
        trouble: why the head of the highest generation that was not passed over cannot be read now.
        dated_ns: the storage's date of the manifest of *head*; 0 where it was not listed, or has no date.
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
        """Whether it has a manifest, valid or not; True also where none can be read now, and where none is sound."""
        return bool(self.generations or self.passed or self.trouble)

    @property
    def has_other_attempts(self) -> bool:
        """Whether it has attempts beside that of its current generation; the usual step has none."""
        return bool(self.attempts) and (self.head is None or self.attempts != (self.head.attempt,))

    @property
    def is_refused(self) -> bool:
        """Whether it cannot be read until access is granted, or until it is restored from an archive."""
        return isinstance(self.trouble, StorageError) and self.trouble.lasting

    @property
    def unread_reason(self) -> str | None:
        """Why its head, or that of a higher generation, cannot be read now, and may be later; None when all were read."""
        if self.trouble is not None:
            return str(self.trouble)
        return next((passed.reason for passed in self.passed if passed.unread), None)

    @property
    def age_order(self) -> tuple[int, int]:
        """The sort key, oldest first; a step that cannot be read now sorts as the newest, a bad one as the oldest."""
        if self.head is not None:
            return (self.head.sequence, self.step)
        return (sys.maxsize if self.trouble is not None else -1, self.step)

    @property
    def is_verified(self) -> bool:
        """Whether a verification found the current generation whole."""
        return self.head is not None and self.head.generation in self.verified

    @property
    def is_found_damaged(self) -> bool:
        """Whether a verification found the current generation damaged."""
        return self.head is not None and self.head.generation in self.damaged


class StepAt(msgspec.Struct, frozen=True):
    """A step in one place.

    Attributes:
        backend: where it lies.
        entry: what a listing shows of it there.
        number: of the place among those of a checkpointer; 0 is the nearest.
    """

    backend: Backend
    entry: StepEntry
    number: int = 0


class StepCopy(msgspec.Struct, frozen=True):
    """One copy of a step: the place, and the step's manifest there. All copies of one save have its attempt."""

    backend: Backend
    manifest: Manifest


class Heads:
    """The heads of the manifests of one place, for readers that list them after every save, and for every load.

    A manifest is never written twice: one of the same size and date, whose attempt is still there, need not be read again.
    A fault is not remembered: what a device did not give, or a copy has replaced within the same second, may be whole now.

    Attributes:
        doubted: attempts that a load has passed over: retention does not count them.
    """

    def __init__(self) -> None:
        self.doubted: set[str] = set()
        self._known: dict[str, tuple[Stat, Head]] = {}

    def recall(self, entry: StepEntry, found: Stat | None) -> Head | None:
        """Return the head of the manifest that is *found* now; None unless it is the one that was read."""
        known = None if found is None else self._known.get(found.key)
        if known is None or known[0] != found or known[1].attempt not in entry.attempts:
            return None
        return known[1]

    def learn(self, found: Stat | None, head: Head) -> None:
        """Store the head of the manifest that was *found*."""
        if found is not None:
            self._known[found.key] = (found, head)

    def retain(self, step_ids: Container[str]) -> None:
        """Drop all steps but these."""
        self._known = {key: known for key, known in self._known.items() if key.partition("/")[0] in step_ids}


logged: set[tuple[str, str]] = set()
"""(place, text) of each line that this process has logged once."""


def is_news(backend: Backend, text: str) -> bool:
    """Return whether *text*, of the place *backend*, was not logged by this process before; record it as logged."""
    news = (backend.url, text)
    is_new = news not in logged
    logged.add(news)
    return is_new


async def scan(backend: Backend, heads: Heads | None = None) -> list[StepEntry]:
    """Return every step below the root, the newest first; a step that cannot be read hides no other.

    Args:
        heads: those that need not be read again; None reads all.
    """
    heads = Heads() if heads is None else heads
    listing = await backend.list("")
    found: dict[str, StepEntry] = {}

    async def list_entry(folder: str) -> None:
        try:
            found[folder] = await list_step(backend, folder, heads)
        except StorageError as error:
            unlisted = _entry(folder, Listing((), ()))
            bad = {"passed": (PassedOver(0, str(error), unread=True),)} if error.damaged else {"trouble": error}
            found[folder] = msgspec.structs.replace(unlisted, **bad)

    await do_all(list_entry, [folder for folder in listing.folders if _is_step_id(folder)])
    for name in (*listing.others, *(stat.key for stat in listing.objects)):
        step = parse_step(name)
        if step is not None and name not in found:
            found[name] = StepEntry(name, step, (), passed=(await _what_is_no_folder(backend, name),))
    heads.retain(found)
    return sorted(found.values(), key=lambda entry: entry.age_order, reverse=True)


def _is_step_id(folder: str) -> bool:
    try:
        return bool(check_step_id(folder))
    except CheckpointError:
        return False


async def _what_is_no_folder(backend: Backend, name: str) -> PassedOver:
    """Return what has the name of a step and is not its folder."""
    try:
        await backend.stat(name)
    except StorageError as error:
        return PassedOver(0, str(error), unread=True)
    return PassedOver(0, f"{name!r} is a file; a step's folder was expected: move it away")


async def list_step(backend: Backend, step_id: str, heads: Heads | None = None) -> StepEntry:
    """Return the entry of one step, from its listing and heads; *heads* as for `scan`.

    Raises:
        StorageError: it cannot be listed. The fault of a manifest is in the entry.
    """
    heads = Heads() if heads is None else heads
    entry = StepEntry(step_id, -1, ())
    for _ in range(LIST_TRIES):
        before, listing = entry.passed, await backend.list(step_id)
        entry = _entry(step_id, listing)
        if entry.generations:
            entry = await _judge(backend, entry, {stat.key: stat for stat in listing.objects}, heads)
        # The same faults in two listings are no deletion under way.
        if entry.passed in ((), before):
            break
    return entry


def _entry(step_id: str, listing: Listing) -> StepEntry:
    """Return the entry of a step from its *listing* alone, before a manifest is read."""
    names = [stat.key.rpartition("/")[2] for stat in listing.objects]
    others = [key.rpartition("/")[2] for key in (*listing.folders, *listing.others)]
    step, attempts = parse_step(step_id), [parse_attempt(key.rpartition("/")[2]) for key in listing.folders]
    generations = {n for name in (*names, *others) if (n := parse_manifest(name)) is not None}
    return StepEntry(
        id=step_id,
        step=-1 if step is None else step,
        generations=tuple(sorted(generations, reverse=True)),
        verified=frozenset(n for name in names if (n := parse_verified(name)) is not None),
        damaged=frozenset(n for name in names if (n := parse_damaged(name)) is not None),
        attempts=tuple(attempt for attempt in attempts if attempt is not None),
    )


async def fall_back(backend: Backend, entry: StepEntry) -> StepEntry:
    """Return *entry* without its current generation and all above."""
    assert entry.head is not None
    lower = tuple(generation for generation in entry.generations if generation < entry.head.generation)
    return await _judge(backend, msgspec.structs.replace(entry, generations=lower), {}, Heads())


async def _judge(backend: Backend, entry: StepEntry, stats: Mapping[str, Stat], heads: Heads) -> StepEntry:
    """Find the highest valid generation, and the bad ones above it."""
    there, passed = list(entry.generations), list[PassedOver]()
    head: Head | None = None
    trouble: CheckpointError | None = None
    dated_ns = 0
    for generation in entry.generations:
        found = stats.get(manifest_key(entry.id, generation))
        try:
            head = heads.recall(entry, found) or await _read_head(backend, entry, generation, found)
        except ObjectNotFoundError:  # deleted since it was listed
            there.remove(generation)
            continue
        except (NewerFormatError, StorageError) as error:
            # No lower generation is tried: an outage would make an older save the newest.
            trouble = error
            break
        except ManifestError as error:
            passed.append(PassedOver(generation, str(error), unread=isinstance(error.__cause__, StorageError)))
            continue
        heads.learn(found, head)
        dated_ns = 0 if found is None else found.modified_ns
        break
    return msgspec.structs.replace(
        entry, generations=tuple(there), head=head, passed=tuple(passed), trouble=trouble, dated_ns=dated_ns
    )


async def _read_head(backend: Backend, entry: StepEntry, generation: int, found: Stat | None) -> Head:
    key = manifest_key(entry.id, generation)
    if found is not None and found.size > RECORD_LIMIT_BYTES:
        raise ManifestError(f"{key} has {found.size:,} bytes, too many for a document of aiockpt: not read", key=key)
    head = await read_head(backend, entry.id, generation)
    if head.attempt not in entry.attempts and not await _is_there(backend, attempt_folder(entry.id, head.attempt)):
        # Its data are gone, or it was put back from before.
        raise ManifestError(f"{key} names the attempt {head.attempt}, whose folder is not there", key=key)
    return head


async def _is_there(backend: Backend, folder: str) -> bool:
    """Return whether a folder that the listing above it lacks exists: a listing may be short."""
    try:
        return await backend.list(folder) != Listing((), ())
    except StorageError as error:
        if not error.damaged:
            raise
        return False


# The order in which steps are read, and which are passed over: one rule for loads and listings.
#
# - The newest comes first, by the logical clock. A bad generation falls back to the one before it, which has its own
#   place in the order.
# - Each bad one is reported. For one that may be readable in a minute, and may be the newest, the error is raised.
# - One that is refused for good is passed over, and reported, where the next one in the order proves to be newer.


DAY_NS = 86_400 * 10**9
"""The difference of two dates that proves which step is older: far more than clocks differ, or a save takes."""


def newness(listed: StepAt) -> tuple[int, int]:
    """Return the sort key from the newest to the oldest."""
    sequence, step = listed.entry.age_order
    return (-sequence, -step)


async def newest_first(
    listed: Sequence[StepAt],
    pass_over: Callable[[StepAt, CorruptionError], object],
    doubt: Callable[[StepAt], object] = lambda _: None,
) -> AsyncGenerator[tuple[StepAt, Manifest], None]:
    """Yield the valid manifests of *listed* and, while the caller wants more, of their older generations: the newest first.

    Args:
        listed: sorted by `newness`.
        pass_over: called with each one that is bad.
        doubt: called with each one whose manifest, or data, turned out bad when it was read.

    Raises:
        NewerFormatError, StorageError: the next one cannot be read by this version, or now: it may be the newest.
    """
    queue: list[StepAt] = []

    def enter(one: StepAt) -> None:
        for passed in one.entry.passed:
            pass_over(one, ManifestError(passed.reason, key=one.entry.id))
        if one.entry.head is not None or one.entry.trouble is not None:
            insort(queue, one, key=newness)

    for one in listed:
        enter(one)
    reported: set[str] = set()
    while queue:
        one = queue.pop(0)
        if one.entry.is_refused and await _defer_unreadable(one, queue):
            if one.entry.id not in reported:
                pass_over(one, ManifestError(str(one.entry.trouble), key=one.entry.id))
            reported.add(one.entry.id)
            continue
        try:
            manifest = await _read(one)
        except NewerFormatError:
            raise
        except CorruptionError as error:
            pass_over(one, error)
        else:
            yield one, manifest
            if has_weights_only(manifest):
                continue
        # A caller that wants more has found the data damaged.
        older = msgspec.structs.replace(one, entry=await fall_back(one.backend, one.entry))
        doubt(one)
        enter(older)


async def first_in_full(found: AsyncIterator[tuple[StepAt, Manifest]]) -> tuple[StepAt, Manifest] | None:
    """Return the first manifest of a full step; where all are weights alone, the first of these."""
    weights: tuple[StepAt, Manifest] | None = None
    async for one, manifest in found:
        if not has_weights_only(manifest):
            return one, manifest
        weights = weights or (one, manifest)
    return weights


async def newest_manifest(backend: Backend, entry: StepEntry) -> Manifest:
    """Return the manifest of the highest valid generation of a step.

    Raises:
        ManifestError: none of its generations is valid; the reason is that of the highest.
        NewerFormatError, StorageError: of the highest that is not bad.
    """
    bad: list[CorruptionError] = []
    async with aclosing(newest_first([StepAt(backend, entry)], lambda _, error: bad.append(error))) as valid:
        async for _, manifest in valid:
            return manifest
    raise bad[0] if bad else ManifestError(f"{entry.id} has no manifest: it was never committed", key=entry.id)


async def _read(listed: StepAt) -> Manifest:
    """Return the manifest of a step that is listed."""
    entry = listed.entry
    if entry.head is None:
        assert entry.trouble is not None
        raise entry.trouble
    return await read_generation(listed.backend, entry.id, entry.head.generation)


async def read_generation(backend: Backend, step_id: str, generation: int) -> Manifest:
    """Return one manifest that was listed; raises as `read_manifest`, and `ManifestError` when it is gone since."""
    try:
        return await read_manifest(backend, step_id, generation)
    except ObjectNotFoundError as error:
        raise ManifestError(f"{step_id}: generation {generation} was deleted meanwhile", key=error.key) from error


async def _defer_unreadable(step: StepAt, queue: list[StepAt]) -> bool:
    """Move a step that is refused for good behind the next readable one, if that proves to be newer; return whether.

    It is then next in line: if that newer one proves damaged, this one may be the newest.
    """
    for at, other in enumerate(queue):
        if other.entry.head is not None:
            proven = await _is_older(step, other)
            queue[at + 1 : at + 1] = [step] * proven
            return proven
    return False


async def _is_older(refused: StepAt, newer: StepAt) -> bool:
    """Return whether *newer* proves the *refused* step to be older: its manifest names that, or their dates show it.

    A name alone is no proof: a step may be deleted, and saved anew as the same generation. So the manifest must be
    dated before all objects of the newer save and, as these may be a late copy, before its creation. Where the refused
    step may not be listed, any name in its folder may be that of the manifest: the date of the last one counts.
    """
    generation = max(refused.entry.generations, default=0)
    try:
        manifest = await _read(newer)
        at_ns = await dated_ns(refused.backend, refused.entry.id, generation)
        folder = attempt_folder(manifest.id, manifest.attempt)
        first_ns = min([manifest.created_ns, *[stat.modified_ns async for stat in walk(newer.backend, folder)]])
    except CheckpointError:  # nothing is proven: its own read raises the error
        return False
    is_named = dict(manifest.older or ()).get(refused.entry.id, -1) >= generation
    return 0 < at_ns < first_ns - (0 if is_named else DAY_NS)


async def dated_ns(backend: Backend, step_id: str, generation: int) -> int:
    """Return the date of the manifest of *generation*; for 0, a step that cannot be listed, that of its last new name.

    Raises:
        StorageError: the storage has no date for it.
    """
    if generation:
        return (await backend.stat(manifest_key(step_id, generation))).modified_ns
    if (dates := works_when_full(backend)) is None:
        raise StorageError(f"{step_id}: its folder has no date here", key=step_id)
    return await dates.folder_ns(step_id)


async def find_copy(target: Backend, step_id: str, attempt: str) -> Manifest | None:
    """Return the manifest of the generation at *target* that holds *attempt*; None when there is none."""
    return await find_copy_in(target, await list_step(target, step_id), attempt)


async def find_copy_in(target: Backend, entry: StepEntry, attempt: str) -> Manifest | None:
    """Return the same as `find_copy`, for a step that was listed."""
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


async def find_same_files(target: Backend, manifest: Manifest) -> StepCopy | None:
    """Return the copy of a save at *target* with the same files; a thinned copy has others under the same attempt."""
    found = await find_copy(target, manifest.id, manifest.attempt)
    if found is None or [file.digest for file in found.files] != [file.digest for file in manifest.files]:
        return None
    return StepCopy(target, found)


async def votes_to_finish(backend: Backend, entry: StepEntry, attempt: str) -> list[Receipt] | None:
    """Return the votes of an attempt by rank when all ranks have voted and it was not overtaken, else None."""
    votes = await read_receipts(backend, entry.id, attempt)
    first = next(iter(votes.values()), None)
    if first is None or len(votes) != first.world_size or first.generation <= max(entry.generations, default=0):
        return None
    return [votes[rank] for rank in sorted(votes)]


async def newest_vote(backend: Backend, entry: StepEntry) -> int:
    """Return the highest logical clock of attempts at a step that are not committed yet, but may be.

    One vote of each is read; a vote that cannot be read does not count.
    """
    clock = 0
    for attempt in entry.attempts:
        if entry.head is None or attempt != entry.head.attempt:
            with suppress(CheckpointError):
                vote = await any_receipt(backend, entry.id, attempt)
                clock = max(clock, 0 if vote is None else vote.sequence)
    return clock
