"""How are steps and garbage removed, so that a crash at any point leaves nothing that looks committed and is not whole?

Guarantees (docs/format.md#deletion):

- A step goes manifest by manifest, from the lowest generation to the highest, then its data: nothing older reappears.
- Before a manifest goes, its attempt's decision is turned to *collect*: a step without a manifest whose votes are all
  there would else look like a commit to be finished, and come back.
- An attempt nobody committed is removed only after this collector created its decision record, and only when it is older
  than the grace by the storage's own clock.
- A step with a live lease of a reader is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from aiockpt.errors import CheckpointError, ManifestError, ObjectNotFoundError, StorageError, StorageFullError
from aiockpt.format.manifest import Decision, Manifest
from aiockpt.format.names import (
    attempt_folder,
    damaged_key,
    decision_key,
    manifest_key,
    receipt_key,
    verified_key,
)
from aiockpt.pipeline.commit import check_sizes, claim, take_name_of_record
from aiockpt.pipeline.discover import StepEntry, look_at, newest_manifest, votes_to_finish
from aiockpt.pipeline.manifests import read_manifest
from aiockpt.pipeline.thinning import remove_overtaken
from aiockpt.retention import StepFacts, lineage
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import delete_below, storage_now_ns, walk

LEASE_S = 6 * 3600.0
LEASE_BYTES = 4096
"""At most, of what a lease says of who has it."""
_LEASE_PREFIX = "lease-"


class Garbage(msgspec.Struct, frozen=True):
    """An attempt, or an older generation, that no reader needs.

    Attributes:
        generation: of the manifest to remove, or None where there is none.
        attempt: whose folder is removed.
        shares: whether the newest generation has the same attempt: what it names stays (`aiockpt.pipeline.thinning`).
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
    """Return what retention must know of each committed step; the metrics cost a whole manifest each.

    Args:
        doubted: attempts that a load here has found damaged.
        now_ns: the time by the storage's clock; None where no age is wanted.
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
                continue  # a step that cannot be read is not retention's to judge
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


async def _age_s(backend: Backend, entry: StepEntry, now_ns: int) -> float | None:
    """Return the seconds since a step was saved, both times by the storage's clock; None where it has no date.

    A copy without the dates is as young as the copying, and a date to come is now: what is in doubt counts as young.
    """
    dated_ns = entry.dated_ns
    if entry.head is not None and entry.head.generation > 1:  # a manifest that thinning wrote is younger than the save
        with suppress(CheckpointError):  # a copy has no votes
            dated_ns = (await backend.stat(_a_vote(entry.id, entry.head.attempt))).modified_ns
    return max(0, now_ns - dated_ns) / 1e9 if dated_ns > 0 else None


async def mark_unsound(backend: Backend, facts: Sequence[StepFacts], trusted: Collection[str]) -> list[StepFacts]:
    """Return *facts*, the newest step being marked as damaged, and the next, while it is not what its head says that it is.

    One that cannot be loaded must not be what is kept in place of one that can. Looked at is what costs two requests: its
    manifest, and whether its data files are there with the sizes that this names.

    Args:
        trusted: runs of this process, whose steps need no look.
    """
    facts = list(facts)
    while sound := [fact for fact in lineage(facts) if not fact.damaged]:
        newest = sound[0]
        if newest.run in trusted:
            break
        try:  # of the generation that counts, and not one below it, which stands elsewhere in the order
            await check_sizes(backend, await read_manifest(backend, newest.id, newest.generation))
            break
        except CheckpointError:
            facts[facts.index(newest)] = msgspec.structs.replace(newest, damaged=True)
    return facts


def why_unread(entry: StepEntry) -> str:
    """Say why a step is not retention's to judge."""
    reasons = [str(entry.trouble)] if entry.trouble is not None else [passed.reason for passed in entry.passed[:1]]
    return ": ".join(["its manifest cannot be read", *reasons])


async def delete_step(backend: Backend, entry: StepEntry) -> None:
    """Remove a step: its manifests from the lowest generation up, then everything else."""
    for attempt in entry.attempts:
        await _overrule(backend, entry.id, attempt)
    votes = [_a_vote(entry.id, attempt) for attempt in entry.attempts]
    for generation in sorted(entry.generations):
        await backend.delete([*votes, manifest_key(entry.id, generation)])
        votes = []
    for attempt in entry.attempts:
        await _delete_attempt(backend, entry.id, attempt)
    await delete_below(backend, entry.id)


def _a_vote(step_id: str, attempt: str) -> str:
    """Return the key of one of the votes, without which the others commit nothing: there is a rank 0 in every world."""
    return receipt_key(step_id, attempt, 0)


async def _overrule(backend: Backend, step_id: str, attempt: str) -> None:
    """Decide that a committed attempt is collected; whoever finds its manifest gone finds this."""
    key = decision_key(step_id, attempt)
    data = msgspec.json.encode(Decision(decision="collect", attempt=attempt, write_id=""))
    try:
        await backend.put(key, data)
    except StorageFullError:  # where nothing can be renamed its vote goes all the same, before its manifest
        await take_name_of_record(backend, step_id, attempt, new=False)
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
) -> list[Garbage]:
    """Return what of a step nobody needs: older generations, and attempts without a manifest older than the grace.

    Args:
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
    strays = [  # votes that are all there are a commit to be rolled forward, not garbage
        attempt
        for attempt in entry.attempts
        if attempt not in named and attempt not in busy and await votes_to_finish(backend, entry, attempt) is None
    ]
    if strays:
        now_ns = await storage_now_ns(backend, nonce)
        for attempt in strays:
            changed_ns = [stat.modified_ns async for stat in walk(backend, attempt_folder(entry.id, attempt))]
            if changed_ns and now_ns - max(changed_ns) > grace_s * 1e9:  # an empty one may be about to begin
                found.append(Garbage(entry.id, attempt))
    return found


async def _read_sound(backend: Backend, entry: StepEntry, doubted: Collection[str]) -> Manifest | None:
    """Return the newest manifest of a step, if nothing that can be seen without reading data speaks against it."""
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
    """Remove one piece of garbage; return False when somebody is committing it."""
    if garbage.generation is not None and garbage.shares:
        entry = await look_at(backend, garbage.step_id)
        newest = await read_manifest(backend, garbage.step_id, entry.generations[0])
        await remove_overtaken(backend, await read_manifest(backend, garbage.step_id, garbage.generation), newest)
        return True
    if garbage.generation is not None:
        await _overrule(backend, garbage.step_id, garbage.attempt)
        marks = [key(garbage.step_id, garbage.generation) for key in (manifest_key, verified_key, damaged_key)]
        await backend.delete([_a_vote(garbage.step_id, garbage.attempt), *marks])
    elif await claim(backend, garbage.step_id, garbage.attempt, "collect", write_id) != "collect":
        return False
    await _delete_attempt(backend, garbage.step_id, garbage.attempt)
    return True


async def _delete_attempt(backend: Backend, step_id: str, attempt: str) -> None:
    """Remove an attempt; its decision record goes last, or a late committer could claim it while data still vanish."""
    decision, vote = decision_key(step_id, attempt), _a_vote(step_id, attempt)
    keys = [stat.key async for stat in walk(backend, attempt_folder(step_id, attempt)) if stat.key != decision]
    keys.sort(key=lambda key: key != vote)  # the vote first, the others as they were found
    if keys:
        await backend.delete(keys)
    await backend.delete([decision])


def lease_key(step_id: str, nonce: str) -> str:
    """Return the key of a reader's lease on a step."""
    return f"{step_id}/{_LEASE_PREFIX}{nonce}"


async def find_reader(backend: Backend, step_id: str, nonce: str) -> str | None:
    """Return who has a live lease on the step, by the storage's clock, in words; None where nobody has."""
    leases = [
        stat for stat in (await backend.list(step_id)).objects if stat.key.rpartition("/")[2].startswith(_LEASE_PREFIX)
    ]
    if not leases:
        return None
    now_ns = await storage_now_ns(backend, nonce)
    alive = [stat for stat in leases if now_ns - stat.modified_ns < LEASE_S * 1e9]
    for stat in alive:
        with suppress(StorageError):  # let go at this moment
            if stat.size and (who := await backend.get(stat.key, LEASE_BYTES)):
                return f"it is held by {who.decode(errors='replace')}"
    return "another process is reading it" if alive else None
