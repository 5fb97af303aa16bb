"""Removal of steps and garbage: a crash at any point leaves nothing that looks committed and is not whole.

Guarantees (docs/format.md#deletion):

- A step goes manifest by manifest, from the lowest generation to the highest, then its data: nothing older reappears.
- Before a manifest goes, its attempt's decision is turned to *collect*: a step without a manifest whose votes are all
  there would else look like a commit to be finished, and come back.
- An uncommitted attempt is removed only after this collector created its decision record, or replaced that of one whose
  generation was taken meanwhile; and only when it is older than the grace by the storage's own clock, or when the process
  that wrote it is known to have ended.
- A step with a live lease of a reader is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from aiockpt.errors import (
    CheckpointError,
    CommitConflictError,
    CorruptionError,
    ManifestError,
    ObjectNotFoundError,
    StepNotFoundError,
    StorageError,
    StorageFullError,
    UsageError,
)
from aiockpt.format.manifest import Decision, Manifest
from aiockpt.format.names import (
    LATEST_KEY,
    LEASE_PREFIX,
    attempt_folder,
    copied_folder,
    damaged_key,
    decision_key,
    list_names,
    manifest_key,
    parse_data,
    receipt_key,
    verified_key,
)
from aiockpt.options import Best
from aiockpt.pipeline.commit import check_sizes, claim, claim_name_of_record, publish, read_decision
from aiockpt.pipeline.discover import StepAt, StepEntry, list_step, newest_manifest, scan, votes_to_finish
from aiockpt.pipeline.receipts import any_receipt, ranks_that_voted, read_manifest
from aiockpt.planning.weights import thin_manifest
from aiockpt.policies.retention import StepFacts, choose_best, lineage
from aiockpt.storage.backend import PROOF_KEY, Backend, UnfinishedUpload, keeps_uploads
from aiockpt.storage.transfer import delete_below, storage_now_ns, walk

# Thinning: a step gives up all but its weights. A crash at any point leaves it whole or thin, never less.
#
# A thinned step is a generation of its own: a new manifest that names the same weight files, of the same attempt. It says
# that it is weights alone, so nothing is resumed from it, and it loads into bare modules.
#
# Guarantees:
#
# - The new manifest is durable before anything is removed. Then the other files are removed, and the old manifest last:
#   as long as it exists, any clean-up knows which files are left to remove.
# - Readers use the higher generation, whose files stay: no read of the weights is disturbed.
# - Only a step whose files are of one kind each is thinned; one that was written otherwise is skipped, with the reason.


class Thinned(msgspec.Struct, frozen=True):
    """A thinned step: its number, and the bytes of the files that are removed."""

    id: str
    step: int
    bytes: int


def plan_thinning(whole: Manifest, generation: int, write_id: str) -> tuple[Manifest, Thinned]:
    """Return the manifest of the weights of *whole*, as *generation*, and the space that thinning frees.

    Raises:
        UsageError: its files hold weights and other things together, or no weights.
    """
    thin = thin_manifest(whole, generation, write_id)
    kept = {file.p for file in thin.files}
    return thin, Thinned(whole.id, whole.step, sum(file.size for file in whole.files if file.p not in kept))


async def thin(backend: Backend, whole: Manifest, highest: int, write_id: str) -> Thinned:
    """Reduce the step of *whole* to its weights.

    Args:
        highest: the highest generation of the step in *backend*.

    Raises:
        UsageError: as `plan_thinning`.
        CommitConflictError: the step is being saved again; it is left as it is.
    """
    new, gained = plan_thinning(whole, highest + 1, write_id)
    made = await publish(backend, new)
    if await read_decision(backend, decision_key(whole.id, whole.attempt)) != "commit":
        # Another process deletes the step: it has decided that first, and may have listed the folder before.
        await backend.delete([manifest_key(made.id, made.generation)])
        raise CommitConflictError(f"{whole.id} was deleted while it was thinned")
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


LEASE_S = 6 * 3600.0
LEASE_BYTES = 4096
"""The most that is read of a lease, which names its holder."""


class Garbage(msgspec.Struct, frozen=True):
    """An attempt, or an older generation, that no reader needs.

    Attributes:
        generation: of the manifest to remove, or None where there is none.
        attempt: whose folder is removed.
        shares: whether the newest generation has the same attempt: the files that it names are kept.
    """

    step_id: str
    attempt: str
    generation: int | None = None
    shares: bool = False


async def step_facts(
    backend: Backend,
    entries: Collection[StepEntry],
    with_metrics: bool,
    doubted: Collection[str] = (),
    now_ns: int | None = None,
) -> list[StepFacts]:
    """Return the facts of each committed step for retention; with metrics, each whole manifest is read.

    Args:
        doubted: attempts that a load here has found damaged.
        now_ns: the time by the storage's clock; None when no ages are needed.
    """
    facts = []
    for entry in entries:
        head = entry.head
        if head is None:
            continue
        metrics: Mapping[str, float | None] = {}
        if with_metrics:
            try:
                metrics = (await newest_manifest(backend, entry)).metrics
            except CheckpointError:
                continue  # retention does not judge a step that cannot be read
        facts.append(
            StepFacts(
                entry.id,
                entry.step,
                head.sequence,
                head.run,
                head.parent,
                entry.is_verified,
                metrics,
                entry.is_found_damaged or head.attempt in doubted,
                head.generation,
                () if head.ancestors is msgspec.UNSET else head.ancestors,
                head.finite is not False,
                None if now_ns is None else await _age_s(backend, entry, now_ns),
            )
        )
    return facts


async def best_step(
    listed: Sequence[StepAt],
    rule: Best,
    pass_over: Callable[[StepAt, CorruptionError], object],
    doubted: Collection[str] = (),
) -> int | None:
    """Return the best of the committed steps *listed*, the newest first; None where there is no sound one.

    Args:
        pass_over: called with a step whose manifest is damaged.

    Raises:
        StepNotFoundError: no step has the metric; the message lists the metrics that there are.
        StorageError: a manifest, which may be that of the best step, cannot be read now.
    """
    facts: dict[str, StepFacts] = {}
    for one in listed:
        if one.entry.id not in facts:
            found = await step_facts(one.backend, [one.entry], True, doubted)
            facts.update((fact.id, fact) for fact in found)
    for one in listed:
        if one.entry.id not in facts:
            try:
                await newest_manifest(one.backend, one.entry)
            except CorruptionError as error:
                pass_over(one, error)
    best = choose_best(list(facts.values()), rule)
    if best is None and facts:
        known = ", ".join(sorted({name for fact in facts.values() for name in fact.metrics}))
        there = f"the metrics there are: {known}" if known else "no step has any: give save(…, metrics={…})"
        raise StepNotFoundError(
            f"{listed[0].backend.url} has no sound step with a finite value of the metric {rule.metric!r}; {there}"
        )
    return None if best is None else best.step


async def _age_s(backend: Backend, entry: StepEntry, now_ns: int) -> float | None:
    """Return the seconds since a step was saved, both times by the storage's clock; None where it has no date.

    A copy without the dates is as old as the copying; a date in the future counts as now. In doubt a step is young.
    """
    dated_ns = entry.dated_ns
    if entry.head is not None and entry.head.generation > 1:  # a manifest that thinning wrote is younger than the save
        with suppress(CheckpointError):  # a copy has no votes
            dated_ns = (await backend.stat(_a_vote(entry.id, entry.head.attempt))).modified_ns
    return max(0, now_ns - dated_ns) / 1e9 if dated_ns > 0 else None


async def mark_unsound(backend: Backend, facts: Sequence[StepFacts], trusted: Collection[str]) -> list[StepFacts]:
    """Return *facts* with every step marked as damaged, from the newest down, until one agrees with its head.

    A step that cannot be loaded must not be kept in place of one that can. The check costs two requests: it reads the
    manifest, and lists whether the data files exist with the sizes that this names.

    Args:
        trusted: runs of this process, whose steps need no check.
    """
    facts = list(facts)
    while sound := [fact for fact in lineage(facts) if not fact.damaged]:
        newest = sound[0]
        if newest.run in trusted:
            break
        try:  # the generation that counts; a lower one has another place in the order
            await check_sizes(backend, await read_manifest(backend, newest.id, newest.generation))
            break
        except CheckpointError:
            facts[facts.index(newest)] = msgspec.structs.replace(newest, damaged=True)
    return facts


def why_unread(entry: StepEntry) -> str:
    """Return why retention does not judge a step."""
    reasons = [str(entry.trouble)] if entry.trouble is not None else [passed.reason for passed in entry.passed[:1]]
    return ": ".join(["its manifest cannot be read", *reasons])


async def delete_step(backend: Backend, entry: StepEntry) -> None:
    """Remove a step: its manifests from the lowest generation up, then everything else."""
    for attempt in entry.attempts:
        await _overrule(backend, entry.id, attempt)
    votes = [_a_vote(entry.id, attempt) for attempt in entry.attempts]
    # Votes go before the first manifest (`delete` keeps the order): without that of rank 0 nothing is committed again.
    for generation in sorted(entry.generations):
        await backend.delete([*votes, manifest_key(entry.id, generation)])
        votes = []
    for attempt in entry.attempts:
        await _delete_attempt(backend, entry.id, attempt)
    await delete_below(backend, entry.id)


def _a_vote(step_id: str, attempt: str) -> str:
    """Return the key of rank 0's vote: every world has a rank 0, and without its vote the others commit nothing."""
    return receipt_key(step_id, attempt, 0)


async def _overrule(backend: Backend, step_id: str, attempt: str) -> None:
    """Decide *collect* for a committed attempt; a process that finds the manifest deleted finds this."""
    key = decision_key(step_id, attempt)
    data = msgspec.json.encode(Decision(decision="collect", attempt=attempt, write_id=""))
    try:
        await backend.put(key, data)
    except StorageFullError:  # where nothing can be renamed, the vote is removed all the same, before the manifest
        await claim_name_of_record(backend, step_id, attempt, new=False)
    except StorageError as error:
        if not error.damaged:
            raise
        await delete_below(backend, key)  # a folder has the name of the record
        await backend.delete([key])
        await backend.put(key, data)


async def find_garbage(
    backend: Backend,
    entry: StepEntry,
    *,
    grace_s: float,
    nonce: str,
    busy: Collection[str],
    doubted: Collection[str] = (),
    is_dead: Callable[[str], bool] = lambda _: False,
) -> list[Garbage]:
    """Return the garbage of a step: older generations, and attempts without a manifest that are older than the grace.

    Args:
        is_dead: whether the writer of an attempt is known to have ended: then its age does not matter, unless others could
            complete it.
        busy: attempts of this process that are under way.
        doubted: attempts that a load here has found damaged.
    """
    if entry.head is not None and entry.generations == (1,) and entry.attempts == (entry.head.attempt,):
        return []  # the usual step: one manifest, one attempt
    newest: Manifest | None = None
    found: list[Garbage] = []
    named: set[str] = set()
    if entry.generations:
        newest = await _read_sound(backend, entry, doubted)
        if newest is None:
            return []  # the older generations are the fallback of a damaged newest one
        named.add(newest.attempt)
    for generation in entry.generations[1:]:
        try:
            older = await read_manifest(backend, entry.id, generation)
        except (ManifestError, ObjectNotFoundError):
            continue
        named.add(older.attempt)
        assert newest is not None
        found.append(Garbage(entry.id, older.attempt, generation, shares=older.attempt == newest.attempt))
    strays = [  # a complete set of votes is a commit to be rolled forward, not garbage
        attempt
        for attempt in entry.attempts
        if attempt not in named and attempt not in busy and await votes_to_finish(backend, entry, attempt) is None
    ]
    if strays:
        now_ns = await storage_now_ns(backend, nonce)
        for attempt in strays:
            if is_dead(attempt) and await _is_its_writers(backend, entry.id, attempt):
                found.append(Garbage(entry.id, attempt))
                continue
            changed_ns = [stat.modified_ns async for stat in walk(backend, attempt_folder(entry.id, attempt))]
            if changed_ns and now_ns - max(changed_ns) > grace_s * 1e9:  # an empty one may be about to begin
                found.append(Garbage(entry.id, attempt))
    return found


async def _is_its_writers(backend: Backend, step_id: str, attempt: str) -> bool:
    """Return whether only the writer of an attempt could complete it: rank 0 has not voted, and no copy of it is made."""
    if (await backend.list(copied_folder(step_id, attempt))).objects:
        return False
    return 0 not in await ranks_that_voted(backend, step_id, attempt)


async def _read_sound(backend: Backend, entry: StepEntry, doubted: Collection[str]) -> Manifest | None:
    """Return the newest manifest of a step; None when a check that reads no data finds it or its files damaged."""
    head = entry.head
    if head is None or head.generation != entry.generations[0] or head.attempt in doubted or entry.is_found_damaged:
        return None
    try:
        newest = await read_manifest(backend, entry.id, head.generation)
        if len(entry.generations) > 1:
            await check_sizes(backend, newest)
    except CheckpointError:
        return None
    return newest


async def collect(backend: Backend, garbage: Garbage, write_id: str) -> bool:
    """Remove one piece of garbage; return False when it is being committed."""
    if garbage.generation is not None and garbage.shares:
        entry = await list_step(backend, garbage.step_id)
        newest = await read_manifest(backend, garbage.step_id, entry.generations[0])
        await remove_overtaken(backend, await read_manifest(backend, garbage.step_id, garbage.generation), newest)
        return True
    if garbage.generation is not None:
        await _overrule(backend, garbage.step_id, garbage.attempt)
        marks = [key(garbage.step_id, garbage.generation) for key in (manifest_key, verified_key, damaged_key)]
        await backend.delete([_a_vote(garbage.step_id, garbage.attempt), *marks])
    elif await claim(backend, garbage.step_id, garbage.attempt, "collect", write_id) != "collect":
        if not await _is_overtaken(backend, garbage):
            return False
        await _overrule(backend, garbage.step_id, garbage.attempt)
    await _delete_attempt(backend, garbage.step_id, garbage.attempt)
    return True


async def _is_overtaken(backend: Backend, garbage: Garbage) -> bool:
    """Return whether an attempt that was decided to be committed has lost its generation to another one."""
    vote = await any_receipt(backend, garbage.step_id, garbage.attempt)
    generations = (await list_step(backend, garbage.step_id)).generations
    # One without votes is a copy: its copier has died between the decision and the manifest.
    if vote is not None and vote.generation > max(generations, default=0):
        return False
    # Listed anew, and read: another process may have committed this very attempt since it was found to be garbage.
    with suppress(CheckpointError):
        named = [await read_manifest(backend, garbage.step_id, generation) for generation in generations]
        return all(manifest.attempt != garbage.attempt for manifest in named)
    return False


async def _delete_attempt(backend: Backend, step_id: str, attempt: str) -> None:
    """Remove an attempt, the decision record last: else a late committer could claim it while its data are removed."""
    decision, vote = decision_key(step_id, attempt), _a_vote(step_id, attempt)
    keys = [stat.key async for stat in walk(backend, attempt_folder(step_id, attempt)) if stat.key != decision]
    keys.sort(key=lambda key: key != vote)  # the vote first, the others as they were found
    if keys:
        await backend.delete(keys)
    await backend.delete([decision])


async def find_reader(backend: Backend, step_id: str, nonce: str) -> str | None:
    """Return the holder of a live lease on the step, by the storage's clock, in words; None where there is none."""
    leases = [
        stat for stat in (await backend.list(step_id)).objects if stat.key.rpartition("/")[2].startswith(LEASE_PREFIX)
    ]
    if not leases:
        return None
    now_ns = await storage_now_ns(backend, nonce)
    alive = [stat for stat in leases if now_ns - stat.modified_ns < LEASE_S * 1e9]
    for stat in alive:
        with suppress(StorageError):  # released at this moment
            if stat.size and (who := await backend.get(stat.key, LEASE_BYTES)):
                return f"it is held by {who.decode(errors='replace')}"
    return "another process is reading it" if alive else None


# Removal of a step, or of a whole run, on request: only what is ours, whatever state it is in.
#
# Guarantees:
#
# - Nothing is touched but step folders with a manifest or an attempt of ours in them, the hint, the marks of this program at
#   the root, and unfinished uploads below our attempts. What else lies there is named and stays.
# - Steps go one by one, the oldest first, each as retention removes it: an interrupted removal keeps the newest ones.


_MARKS = re.compile(r"\.clock-[0-9a-f]+|\.exclusive-[0-9a-f]+|\.seen-[0-9a-f]+")
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
    """Return what a removal of *step* removes; None stands for the whole run.

    Raises:
        StepNotFoundError: the step does not exist.
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
        on_step: called with the id of each step that is gone.
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
    """Return our unfinished uploads below *entries*, or all; none where the store does not list them."""
    store = keeps_uploads(backend)
    if store is None:
        return []
    try:
        found = [(upload, parse_data(upload.key)) for upload in await store.leftover_uploads()]
    except StorageError:
        return []
    ids = None if entries is None else {entry.id for entry in entries}
    return [upload for upload, ours in found if ours is not None and (ids is None or ours[0] in ids)]


# Uploads that dead writers left in an object store, and which of them may be aborted.
#
# An object store keeps the parts of an unfinished upload, and charges for them, until it is aborted.
#
# Guarantees:
#
# - Only uploads of data files below our own ``a-<nonce>/`` folders are considered: what another program left is its own.
# - An upload is aborted when it is older than the grace by the storage's clock and its rank has no receipt in the attempt:
#   a rank that voted has finished its uploads. Attempts that are under way here are skipped whatever their age.
# - Nothing here fails a save or a clean-up: a store that refuses to list or abort is reported, and not called again.


class DeadUploads(msgspec.Struct, frozen=True):
    """The uploads that dead writers left.

    Attributes:
        uploads: those that were aborted, or may be.
        problem: why uploads could not be listed, or not be aborted; None when nothing failed.
    """

    uploads: tuple[UnfinishedUpload, ...] = ()
    problem: str | None = None


async def find_leftovers(
    backend: Backend,
    *,
    grace_s: float,
    nonce: str,
    busy: Collection[str],
    is_dead: Callable[[str], bool] = lambda _: False,
) -> DeadUploads:
    """Return the uploads below the root that no writer will finish.

    Args:
        busy: attempts of this process that are under way.
        is_dead: whether the writer of an attempt is known to have ended.
    """
    if (store := keeps_uploads(backend)) is None:
        return DeadUploads()
    try:
        ours = {upload: found for upload in await store.leftover_uploads() if (found := parse_data(upload.key))}
        if not ours:
            return DeadUploads()
        before_ns = await storage_now_ns(backend, nonce) - grace_s * 1e9
        old = {upload: found for upload, found in ours.items() if upload.started_ns <= before_ns or is_dead(found[1])}
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
    """Abort the uploads of *found*; return those that were aborted."""
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
