"""How are steps and garbage removed, so that a crash at any point leaves nothing that looks committed and is not whole?

Guarantees (FORMAT §8, DECISIONS 2, 3, 8):

- A step goes manifest by manifest, from the lowest generation to the highest, then its data: nothing older reappears.
- Before a manifest goes, its attempt's decision is turned to *collect*: a step without a manifest whose votes are all
  there would else look like a commit to be finished, and come back.
- An attempt nobody committed is removed only after this collector created its decision record, and only when it is older
  than the grace by the storage's own clock.
- A step with a live lease of a reader is left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from aiockpt.errors import CheckpointError, ManifestError, ObjectNotFoundError
from aiockpt.format.manifest import Decision, Manifest
from aiockpt.format.names import attempt_folder, damaged_key, decision_key, manifest_key, verified_key
from aiockpt.pipeline.commit import claim
from aiockpt.pipeline.discover import StepEntry, newest_manifest, read_manifest, votes_to_finish
from aiockpt.retention import StepFacts
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import delete_below, storage_now_ns, walk

LEASE_S = 6 * 3600.0
_LEASE_PREFIX = "lease-"


class Garbage(msgspec.Struct, frozen=True):
    """An attempt, or an older generation, that no reader needs.

    Attributes:
        generation: of the manifest to remove, or None where there is none.
        attempt: whose folder is removed.
    """

    step_id: str
    attempt: str
    generation: int | None = None


async def step_facts(backend: Backend, entries: Collection[StepEntry], with_metrics: bool) -> list[StepFacts]:
    """Return what retention must know of each committed step; the metrics cost a whole manifest each."""
    facts = []
    for entry in entries:
        if entry.head is None:
            continue
        metrics: Mapping[str, float | None] = {}
        if with_metrics:
            try:
                metrics = (await newest_manifest(backend, entry)).metrics
            except CheckpointError:
                continue  # a step that cannot be read is not retention's to judge
        head = entry.head
        newest = entry.generations[0]
        facts.append(
            StepFacts(
                entry.id,
                entry.step,
                head.sequence,
                head.run,
                head.parent,
                newest in entry.verified,
                metrics,
                newest in entry.damaged,
            )
        )
    return facts


async def delete_step(backend: Backend, entry: StepEntry) -> None:
    """Remove a step: its manifests from the lowest generation up, then everything else."""
    for attempt in entry.attempts:
        await _overrule(backend, entry.id, attempt)
    for generation in sorted(entry.generations):
        await backend.delete([manifest_key(entry.id, generation)])
    for attempt in entry.attempts:
        await _delete_attempt(backend, entry.id, attempt)
    await delete_below(backend, entry.id)


async def _overrule(backend: Backend, step_id: str, attempt: str) -> None:
    """Decide that a committed attempt is collected; whoever finds its manifest gone finds this."""
    decision = Decision(decision="collect", attempt=attempt, write_id="")
    await backend.put(decision_key(step_id, attempt), msgspec.json.encode(decision))


async def find_garbage(
    backend: Backend, entry: StepEntry, *, grace_s: float, nonce: str, busy: Collection[str]
) -> list[Garbage]:
    """Return what of a step nobody needs: older generations, and attempts without a manifest older than the grace.

    Args:
        busy: attempts of this process that are under way.
    """
    if entry.head is not None and entry.generations == (1,) and entry.attempts == (entry.head.attempt,):
        return []  # the usual step: one manifest, one attempt
    newest: Manifest | None = None
    found: list[Garbage] = []
    named: set[str] = set()
    if entry.generations:
        try:
            newest = await read_manifest(backend, entry.id, entry.generations[0])
        except CheckpointError:
            return []  # the older generations are the fallback of a damaged newest one
        named.add(newest.attempt)
    for generation in entry.generations[1:]:
        try:
            older = await read_manifest(backend, entry.id, generation)
        except (ManifestError, ObjectNotFoundError):
            continue
        named.add(older.attempt)
        found.append(Garbage(entry.id, older.attempt, generation))
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


async def collect(backend: Backend, garbage: Garbage, write_id: str) -> bool:
    """Remove one piece of garbage; return False when somebody is committing it."""
    if garbage.generation is not None:
        await _overrule(backend, garbage.step_id, garbage.attempt)
        marks = [key(garbage.step_id, garbage.generation) for key in (manifest_key, verified_key, damaged_key)]
        await backend.delete(marks)
    elif await claim(backend, garbage.step_id, garbage.attempt, "collect", write_id) != "collect":
        return False
    await _delete_attempt(backend, garbage.step_id, garbage.attempt)
    return True


async def _delete_attempt(backend: Backend, step_id: str, attempt: str) -> None:
    """Remove an attempt; its decision record goes last, or a late committer could claim it while data still vanish."""
    decision = decision_key(step_id, attempt)
    keys = [stat.key async for stat in walk(backend, attempt_folder(step_id, attempt)) if stat.key != decision]
    if keys:
        await backend.delete(keys)
    await backend.delete([decision])


def lease_key(step_id: str, nonce: str) -> str:
    """Return the key of a reader's lease on a step."""
    return f"{step_id}/{_LEASE_PREFIX}{nonce}"


async def is_leased(backend: Backend, step_id: str, nonce: str) -> bool:
    """Say whether a reader's lease on the step is still alive, by the storage's clock."""
    leases = [
        stat for stat in (await backend.list(step_id)).objects if stat.key.rpartition("/")[2].startswith(_LEASE_PREFIX)
    ]
    if not leases:
        return False
    now_ns = await storage_now_ns(backend, nonce)
    return any(now_ns - stat.modified_ns < LEASE_S * 1e9 for stat in leases)
