"""Discovery of steps: `scan` lists them and judges the heads of their manifests, `newest_first` reads them in order.

After that: votes that are not committed yet, the facts of a step for people, unfinished newer steps, and places that were
named by mistake. Guarantees:

- "Newest" is decided by the logical clock in the manifests (`sequence`, then step), never by a clock of a machine: after
  a load of an earlier step and further saves, the new branch is the newest.
- Only proven manifests count (`aiockpt.pipeline.receipts`). A bad generation is passed over, with the reason, and the one
  before it has *its own* place in the order: a bad manifest makes no step newer than it is.
- An outage is not damage: a step whose age cannot be read now may be the newest, and is marked as such.
- ``LATEST`` is never read. A name that is no step id of ours is ignored. No torch is imported.
"""

from __future__ import annotations

import logging
import os
import sys
from bisect import insort
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Container, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
import msgspec

from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ManifestError,
    NewerFormatError,
    ObjectNotFoundError,
    StorageError,
    UsageError,
)
from aiockpt.format.manifest import ForkedFrom, Head, Manifest, Receipt, decode_receipt
from aiockpt.format.names import (
    LATEST_KEY,
    attempt_folder,
    check_step_id,
    manifest_key,
    parse_attempt,
    parse_damaged,
    parse_failure,
    parse_manifest,
    parse_receipt,
    parse_step,
    parse_verified,
)
from aiockpt.pipeline.receipts import any_receipt, do_all, read_head, read_manifest
from aiockpt.pipeline.receipts import read_receipts as read_receipts
from aiockpt.planning.weights import has_weights_only
from aiockpt.runtime.world import Clock
from aiockpt.storage.backend import Backend, Listing, Stat, local_path, works_when_full
from aiockpt.storage.transfer import RECORD_LIMIT_BYTES, read_record, walk

if TYPE_CHECKING:
    from aiockpt.runtime.world import Files

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


class StepCopy(msgspec.Struct, frozen=True):
    """One copy of a step: the place, and the step's manifest there. All copies of one save have its attempt."""

    backend: Backend
    manifest: Manifest


class Heads:
    """The heads of the manifests of one place, for readers that list them after every save.

    A manifest is never written twice: one of the same size and date, whose attempt is still there, need not be read again.

    Attributes:
        doubted: attempts that a load has passed over: retention does not count them.
    """

    def __init__(self) -> None:
        self.doubted: set[str] = set()
        self._known: dict[str, tuple[Stat, Head | PassedOver]] = {}

    def recall(self, entry: StepEntry, found: Stat | None) -> Head | PassedOver | None:
        """Return the head, or the fault, of the manifest that is *found* now; None unless it is the one that was read."""
        stat, said = (None, None) if found is None else self._known.get(found.key, (None, None))
        known = stat is not None and stat == found
        return None if not known or (isinstance(said, Head) and said.attempt not in entry.attempts) else said

    def learn(self, found: Stat | None, said: Head | PassedOver) -> None:
        """Store the head, or the fault, of the manifest that was *found*."""
        if found is not None:
            self._known[found.key] = (found, said)

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
            said = heads.recall(entry, found) or await _read_head(backend, entry, generation, found)
        except ObjectNotFoundError:  # deleted since it was listed
            there.remove(generation)
            continue
        except (NewerFormatError, StorageError) as error:
            # No lower generation is tried: an outage would make an older save the newest.
            trouble = error
            break
        except ManifestError as error:
            said = PassedOver(generation, str(error), unread=isinstance(error.__cause__, StorageError))
        heads.learn(found, said)
        if isinstance(said, Head):
            head, dated_ns = said, 0 if found is None else found.modified_ns
            break
        passed.append(said)
    return msgspec.structs.replace(
        entry, generations=tuple(there), head=head, passed=tuple(passed), trouble=trouble, dated_ns=dated_ns
    )


async def _read_head(backend: Backend, entry: StepEntry, generation: int, found: Stat | None) -> Head:
    key = manifest_key(entry.id, generation)
    if found is not None and found.size > RECORD_LIMIT_BYTES:
        raise ManifestError(f"{key} has {found.size:,} bytes, too many for a document of aiockpt: not read", key=key)
    head = await read_head(backend, entry.id, generation)
    if head.attempt not in entry.attempts:  # its data are gone, or it was put back from before
        raise ManifestError(f"{key} names the attempt {head.attempt}, whose folder is not there", key=key)
    return head


# The order in which steps are read, and which are passed over: one rule for loads and listings.
#
# - The newest comes first, by the logical clock. A bad generation falls back to the one before it, which has its own
#   place in the order.
# - Each bad one is reported. For one that may be readable in a minute, and may be the newest, the error is raised.
# - One that is refused for good is passed over, and reported, where the next one in the order proves to be newer.


DAY_NS = 86_400 * 10**9
"""The difference of two dates that proves which step is older: far more than clocks differ, or a save takes."""


class Listed(msgspec.Struct, frozen=True):
    """A step of a listing, and its place."""

    backend: Backend
    entry: StepEntry

    def without(self, entry: StepEntry) -> Self:
        """Return the same step with *entry* in place of the one that proved bad."""
        return msgspec.structs.replace(self, entry=entry)


L = TypeVar("L", bound=Listed)


def newness(listed: Listed) -> tuple[int, int]:
    """Return the sort key from the newest to the oldest."""
    sequence, step = listed.entry.age_order
    return (-sequence, -step)


async def newest_first(
    listed: Sequence[L], pass_over: Callable[[L, CorruptionError], object]
) -> AsyncGenerator[tuple[L, Manifest], None]:
    """Yield the valid manifests of *listed* and, while the caller wants more, of their older generations: the newest first.

    Args:
        listed: sorted by `newness`.
        pass_over: called with each one that is bad.

    Raises:
        NewerFormatError, StorageError: the next one cannot be read by this version, or now: it may be the newest.
    """
    left: list[L] = []

    def enter(one: L) -> None:
        for passed in one.entry.passed:
            pass_over(one, ManifestError(passed.reason, key=one.entry.id))
        if one.entry.head is not None or one.entry.trouble is not None:
            insort(left, one, key=newness)

    for one in listed:
        enter(one)
    reported: set[str] = set()
    while left:
        one = left.pop(0)
        if await _put_behind_newer(one, left):
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
        enter(one.without(await fall_back(one.backend, one.entry)))


async def first_in_full(found: AsyncIterator[tuple[L, Manifest]]) -> tuple[L, Manifest] | None:
    """Return the first manifest of a full step; where all are weights alone, the first of these."""
    weights: tuple[L, Manifest] | None = None
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
    async with aclosing(newest_first([Listed(backend, entry)], lambda _, error: bad.append(error))) as valid:
        async for _, manifest in valid:
            return manifest
    raise bad[0] if bad else ManifestError(f"{entry.id} has no manifest: it was never committed", key=entry.id)


async def _read(listed: Listed) -> Manifest:
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


async def _put_behind_newer(one: L, left: list[L]) -> bool:
    """Move a step that is refused for good behind the next readable one, if that proves to be newer; return whether.

    It is then next in line: if that newer one proves damaged, this one may be the newest.
    """
    if not one.entry.is_refused:
        return False
    for at, other in enumerate(left):
        if other.entry.head is not None:
            proven = await _is_older(one, other)
            left[at + 1 : at + 1] = [one] * proven
            return proven
    return False


async def _is_older(refused: Listed, newer: Listed) -> bool:
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


# Newer steps that were begun and not committed, which a load logs.
#
# A writer process outlives its trainer, and the next trainer may load before the writer is done. From the storage alone
# that cannot be distinguished from a save whose job died, so the known facts are logged: the votes, and the date of the
# last write. Nothing is decided here, no writer is waited for, and no load fails because of it. An incomplete upload to
# an object store is not visible.


LISTING_S = 3.0
"""The longest delay of a load by that."""
LIVELY_S = 60.0
"""A writer whose last write is more recent may still run: that is logged as a warning."""


class Unfinished(msgspec.Struct, frozen=True):
    """A step that was begun and not committed, and its place; *busy* are the attempts under way in this process."""

    backend: Backend
    entry: StepEntry
    busy: Collection[str]


async def log_newer(unfinished: Sequence[Unfinished], newest: int | None, clock: Clock) -> None:
    """Log the attempts at the newest step above *newest* that was begun and not committed.

    Args:
        newest: the number of the newest committed step; None where there is none, and a program begins from scratch.
    """
    newer = [one for one in unfinished if newest is None or one.entry.step > newest]
    if not newer:
        return
    top = max(newer, key=lambda one: one.entry.step)
    step_id, url = top.entry.id, top.backend.url
    with anyio.move_on_after(LISTING_S):
        for attempt in top.entry.attempts:
            if attempt in top.busy:
                continue
            try:
                level, said = await _describe_attempt(top.backend, step_id, attempt, clock, alone=newest is None)
            except CheckpointError as error:
                level, said = logging.INFO, f"was begun and not committed: {error}"
            if said:
                logger.log(level, "%s in %s %s", step_id, url, said)


async def _describe_attempt(
    backend: Backend, step_id: str, attempt: str, clock: Clock, *, alone: bool
) -> tuple[int, str]:
    """Return the level and the text to log of an attempt; "" logs nothing.

    It is a warning where the writer may be alive, or where the attempt is the only trace of a run (*alone*).
    """
    folder = attempt_folder(step_id, attempt)
    left = [stat async for stat in walk(backend, folder)]
    if any(parse_failure(stat.key.rpartition("/")[2]) is not None for stat in left):
        return logging.INFO, ""  # aborted: it can no longer be committed
    if not left:  # any other object under the name of a record is damage
        listing = await backend.list(folder)
        names = [key.rpartition("/")[2] for key in (*listing.folders, *listing.others)]
        remains = ", ".join(name for name in names if name not in ("d", "r"))
        said = f"was begun and cannot be loaded: of attempt {attempt} there is no file, but {remains}"
        return logging.WARNING, said if remains else ""
    said = "it was not written completely"
    votes = [
        stat.key
        for stat in left
        if parse_receipt(stat.key.rpartition("/")[2]) is not None and stat.size <= RECORD_LIMIT_BYTES
    ]
    if votes:  # each of them states the world size
        vote = decode_receipt(await read_record(backend, votes[0]), votes[0])
        if vote.world_size > 1:
            said = f"{len(votes)} of {vote.world_size} ranks have voted"
    ago_s = max(0.0, (clock.time_ns() - max(stat.modified_ns for stat in left)) / 1e9)
    return (
        logging.WARNING if alone or ago_s < LIVELY_S else logging.INFO,
        f"was begun and is not committed, so it is not loaded: {said}, last written {ago_s:.0f} s ago (attempt {attempt}). "
        "Its job has died, or a writer of it is still at work (a process with `-m aiockpt.worker`): then wait for it, and "
        "load again",
    )


# The facts of a committed step: those of its newest valid manifest, or why it cannot be used.


FOUND_DAMAGED = "a verification found it damaged; `aiockpt verify` says where, and takes this back once it is whole"


class StepInfo(msgspec.Struct, frozen=True):
    """One committed step, as a listing shows it.

    Attributes:
        step, id, generation: which one, and its newest valid generation (of a damaged step: the newest).
        created_ns: when its manifest was written, by the writer's clock; for people.
        parent: the id of the step that its run had loaded, or None.
        bytes, tensor_count: the size of its data files, and the tensors in them.
        verified: whether that generation was verified in full after it was written.
        problem: why it must not be used, or cannot be read now; None for a valid one.
        run: which checkpointer saved it.
        weights_only: whether it holds weights alone: thinned, or copied so.
        finite: whether no number in its tensors is NaN or infinite; None where it was not checked (``screen="finite"``).
        forked_from: place, step id and run of the step of another place that it descends from (``load(…, fork=…)``); of a
            foreign checkpoint its address alone.
        newest_generation: above *generation* where newer ones are damaged, and readers fall back.
    """

    step: int
    id: str
    generation: int
    created_ns: int = 0
    parent: str | None = None
    bytes: int = 0
    tensor_count: int = 0
    world_size: int = 1
    verified: bool = False
    metrics: Mapping[str, float | None] = {}
    problem: str | None = None
    run: str = ""
    newest_generation: int = 0
    weights_only: bool = False
    finite: bool | None = None
    forked_from: tuple[str, str, str] | None = None

    def describe_origin(self) -> str:
        """Return in words the origin of the run, where that was a step of another place; else ""."""
        return "" if self.forked_from is None else f"forked from {origin_in_words(self.forked_from)}"


def origin_in_words(fork: ForkedFrom) -> str:
    """Return the origin of a line of saves as one line for a terminal, whatever characters the address has."""
    said = " ".join(fork[:2]).rstrip()
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in said)


async def read_info(backend: Backend, entry: StepEntry) -> StepInfo:
    """Return the facts of a committed step; one that is damaged, or cannot be read now, has a *problem*."""
    try:
        return info_of(await newest_manifest(backend, entry), entry)
    except (CorruptionError, StorageError) as error:
        newest = max(entry.generations, default=0)
        return StepInfo(
            step=entry.step,
            id=entry.id,
            generation=newest,
            parent=entry.head.parent if entry.head else None,
            problem=str(error),
            run=entry.head.run if entry.head else "",
            newest_generation=newest,
        )


def info_of(manifest: Manifest, entry: StepEntry) -> StepInfo:
    """Return the facts of a step from its *manifest* and its listing, *entry*."""
    return StepInfo(
        step=manifest.step,
        id=manifest.id,
        generation=manifest.generation,
        created_ns=manifest.created_ns,
        parent=manifest.parent,
        bytes=sum(file.size for file in manifest.files),
        tensor_count=len(manifest.tensors),
        world_size=manifest.world_size,
        verified=manifest.generation in entry.verified,
        metrics=dict(manifest.metrics),
        problem=FOUND_DAMAGED if manifest.generation in entry.damaged else None,
        run=manifest.run,
        newest_generation=max((manifest.generation, *entry.generations)),
        weights_only=has_weights_only(manifest),
        finite=None if manifest.finite is msgspec.UNSET else manifest.finite,
        forked_from=None if manifest.forked_from is msgspec.UNSET else manifest.forked_from,
    )


# Places that are named by mistake: the folder of one step, a folder above runs, weights of another program.
#
# Training would begin from scratch there. The folder of a step is refused, by its name alone where that is unambiguous.


FOLDERS_LISTED, RUNS_SHOWN = 20, 5
WEIGHTS = ".safetensors"


class _StepFolder(msgspec.Struct, frozen=True):
    """The last folder of a step in a URL, the part of the URL below it, and why that is refused."""

    path: str
    inside: list[str]
    refusal: str


@lru_cache
def _find_step_folder(url: str, given: str = "") -> _StepFolder | None:
    url = str(local_path(url) or url)
    parts = url.split("/")
    for at in range(len(parts) - 1, -1, -1):
        if (step := parse_step(parts[at])) is not None:
            inside, above = parts[at + 1 :], "/".join(parts[:at]) or "/"
            what = "is in the folder of one step" if inside else "is one step"
            refusal = f"{given}{url} {what}; give the folder above it, and the step: {above} {step}"
            return _StepFolder("/".join(parts[: at + 1]), inside, refusal)
    return None


def refuse_step_folder(url: str, files: Files | None) -> None:
    """Raise UsageError where *url* is the folder of a step, lies in it, leads there by links, or is a checkpoint of DCP.

    That is decided by its name and, for ``file://``, by the file system.

    Args:
        files: the file system of ``file://``; None decides by the name alone.
    """
    found = _find_step_folder(url)
    if (path := local_path(url)) is None:
        files = None
    elif files is not None:
        _refuse_dcp(str(path), files)
        if found is None and (real := os.path.realpath(path)) != str(path):
            found = _find_step_folder(real, f"{path} leads to ")
    if found is None:
        return
    names = found.inside[:1] + _names_in(found.path, files)
    if any(parse_attempt(name) is not None or parse_manifest(name) is not None for name in names):
        raise UsageError(found.refusal)


def _names_in(path: str, files: Files | None) -> list[str]:
    with suppress(OSError):
        return [] if files is None else files.listdir(path)
    return []


def _refuse_dcp(path: str, files: Files) -> None:
    with suppress(OSError):
        files.lstat(f"{path.rstrip('/')}/.metadata")  # long before a long listing
        if any(parse_step(name) is not None for name in files.listdir(path)):
            return
        raise UsageError(
            f"{path} is a checkpoint of torch.distributed.checkpoint, and no place for steps: give another folder. A run "
            f"begins from it by resume(state, fork='dcp://{path}'); aiockpt convert dcp://{path} RUN makes a step of it"
        )


async def refuse_step(backend: Backend) -> None:
    """Raise UsageError where the place of *backend* is the folder of a step. No request is made unless its name is one's.

    Raises:
        StorageError: it cannot be listed.
    """
    found = _find_step_folder(backend.url)
    if found is None or found.inside:
        return
    listing = await backend.list("")
    if any(parse_manifest(stat.key) is not None for stat in listing.objects):
        raise UsageError(found.refusal)


class Hints(msgspec.Struct, frozen=True):
    """The contents of a place without a step.

    Attributes:
        runs: some folders in it that hold steps.
        weights: a file of weights; empty where there is none.
        hint: the newest step by its ``LATEST`` hint, which is missing now; empty where there is none.
    """

    runs: tuple[str, ...] = ()
    weights: str = ""
    hint: str = ""

    def hints(self, place: str) -> list[str]:
        """Return what may have been meant instead of *place*, a path or a URL."""
        place = place.rstrip("/")
        hints = [f"{place}/{run} holds steps" for run in self.runs]
        if self.hint:
            hints.append(f"{place} has held steps, the last of them {self.hint}: they were moved away or deleted")
        if self.weights:
            hints.append(f"{place} holds weights, {self.weights}: `aiockpt convert {place} PLACE` makes a step of them")
        return hints


async def find_hints(backend: Backend) -> Hints:
    """Return what *backend* holds beside steps, as far as reads within `LISTING_S` show; a failed read is no error."""
    runs: list[str] = []
    weights = hint = ""
    with anyio.move_on_after(LISTING_S), suppress(CheckpointError):
        listing = await backend.list("")
        names = [stat.key for stat in listing.objects]
        weights = next((name for name in names if name.endswith(WEIGHTS)), "")
        if LATEST_KEY in names and not any(parse_step(folder) is not None for folder in listing.folders):
            with suppress(CheckpointError, UnicodeDecodeError):  # it is garbage then, and no hint
                hint = check_step_id((await backend.get(LATEST_KEY, 200)).decode().strip())
        for folder in listing.folders[:FOLDERS_LISTED]:
            with suppress(CheckpointError):  # one that may not be read was not meant
                inside = await backend.list(folder)
                if any(parse_step(name.rpartition("/")[2]) is not None for name in inside.folders):
                    runs.append(folder)
            if len(runs) == RUNS_SHOWN:
                break
    return Hints(tuple(runs), weights, hint)
