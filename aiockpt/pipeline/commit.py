"""The commit of written data: ranks vote with receipts for an attempt, and one exclusive create decides.

Guarantees (docs/format.md#the-commit; power-cut in tests/crash):

- Nothing is visible before the manifest is; the manifest is created exclusively, after every vote is durable.
- A generation is fixed when the attempt begins, so a stale attempt can never overtake a newer one.
- Finishing is idempotent and open to any process that finds all votes (roll forward); garbage collection contends for
  the same decision record, so that an attempt is either committed or collected, never both.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio
import msgspec

from aiockpt.errors import (
    CommitConflictError,
    CommitError,
    CommitTimeoutError,
    ManifestError,
    ObjectExistsError,
    ObjectNotFoundError,
    ReplicasDifferError,
    StorageFullError,
)
from aiockpt.format.document import described
from aiockpt.format.manifest import (
    RECEIPT_START,
    Ancestors,
    Decision,
    ForkedFrom,
    Manifest,
    Older,
    Receipt,
    Verdict,
    encode_manifest,
    encode_receipt,
)
from aiockpt.format.merge import merge_receipts
from aiockpt.format.names import LATEST_KEY, attempt_folder, decision_key, manifest_key, receipt_key
from aiockpt.format.parts import REQUIRED, detach
from aiockpt.pipeline.discover import StepEntry, votes_to_finish
from aiockpt.pipeline.receipts import ReceiptReader, read_manifest
from aiockpt.runtime.notes import name_ranks
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, works_when_full
from aiockpt.storage.transfer import put_once, put_unflushed, read_start, walk

logger = logging.getLogger("aiockpt")

WRITER = "aiockpt 0.1.0"
DECISION_LIMIT_BYTES = 4096
"""No decision record is longer."""
RECORD_PAUSES_S = (0.05, 0.2, 1.0)
"""Before a decision record that cannot be read is read again, until it counts as damaged."""
LAST_POLL_S = 30.0
"""The time limit of the last poll of all receipts, after the deadline for them has passed."""
UNCHECKED_NS = 60 * 10**9
"""So long after its vote a process that wrote all files of an attempt takes them to be there. If it was stopped for longer
they may have been collected, and the decision with them (not before `aiockpt.engine.maintenance.IDLE_S`)."""
POLL_PAUSE_S = 0.2
"""The pause after a poll that found no new vote."""


class Attempt(msgspec.Struct, frozen=True):
    """One incarnation of a job trying to save one step.

    Attributes:
        id, step: the step folder and its number.
        attempt: 12 random hex digits, its nonce; names the attempt's folder, so that no two attempts share a byte.
        generation: the number its manifest will have.
        sequence: one more than the highest logical clock seen when it began.
        run: which checkpointer it belongs to; *parent*: the id of the step that one had loaded, or None; *ancestors*:
            which save of it, and what that came from. Together they are the lineage (docs/decisions.md#lineage).
        older: steps that existed when the run began to save, and those that its process has committed since.
    """

    id: str
    step: int
    attempt: str
    generation: int
    sequence: int
    run: str
    parent: str | None
    rank: int
    world_size: int
    ancestors: Ancestors | msgspec.UnsetType = msgspec.UNSET
    forked_from: ForkedFrom | msgspec.UnsetType = msgspec.UNSET
    older: Older | msgspec.UnsetType = msgspec.UNSET


async def cast_vote(backend: Backend, receipt: Receipt) -> None:
    """Create a rank's receipt; when this returns the rank has done its part.

    Raises:
        CommitConflictError: another process voted in this rank's name.
    """
    key = receipt_key(receipt.id, receipt.attempt, receipt.rank)
    if not await put_once(backend, key, encode_receipt(receipt)):
        raise CommitConflictError(f"{key}: another process voted as rank {receipt.rank} of this attempt")


async def wait_votes(
    backend: Backend, attempt: Attempt, own: Receipt, deadline_s: float, until_likely: Callable[[], Awaitable[object]]
) -> list[Receipt]:
    """Return the receipts of all ranks, waiting up to *deadline_s* seconds for the others.

    Args:
        until_likely: waits until a (further) poll is worthwhile: only the storage decides, and it is slow to read.

    Raises:
        CommitTimeoutError: names the ranks without a receipt; the outcome is unknown.
    """
    reader = ReceiptReader(backend, attempt.id, attempt.attempt, attempt.world_size)
    reader.votes[own.rank] = own
    with anyio.move_on_after(deadline_s):
        while reader.missing:
            await until_likely()
            known = len(reader.votes)
            await reader.poll()
            if len(reader.votes) == known:  # the hint may persist although the storage has no new vote
                await anyio.sleep(POLL_PAUSE_S)
    with anyio.move_on_after(LAST_POLL_S):
        if reader.missing:
            await reader.poll_all()
    missing = sorted(reader.missing)
    if missing:
        raise CommitTimeoutError(
            f"{attempt.id}: no receipt from {name_ranks(missing)} within {deadline_s:g} s; whether they vote later is "
            "unknown. Run `aiockpt commit` to finish the step once they did, or save it again.",
            missing,
        )
    return [reader.votes[rank] for rank in range(attempt.world_size)]


async def commit(backend: Backend, votes: Sequence[Receipt], world: World, *, own: bool = False) -> Manifest:
    """Make the attempt of *votes* visible, durably; return its manifest.

    Args:
        own: whether this process has written, and finished, all files of the attempt.

    Raises:
        CommitConflictError: its generation was committed by another attempt, or it was collected as garbage.
        CommitError: the votes do not make a whole checkpoint.
    """
    write_id, clock = world.token(16).hex(), world.clock
    manifest = merge_receipts(votes, writer=WRITER, write_id=write_id, created_ns=clock.time_ns())

    def are_there() -> bool:
        return own and all(0 <= clock.time_ns() - vote.created_ns < UNCHECKED_NS for vote in votes)

    return await publish(backend, manifest, are_there)


async def publish(backend: Backend, manifest: Manifest, are_there: Callable[[], bool] = lambda: False) -> Manifest:
    """Create *manifest*, whose files are durable; return it, or the equal one of a faster process.

    Args:
        are_there: returns whether the files are known to be there, with their sizes.

    Raises:
        CommitConflictError, CommitError: as `commit`.
    """
    if await claim(backend, manifest.id, manifest.attempt, "commit", manifest.write_id) != "commit":
        raise CommitConflictError(
            f"{manifest.id}: attempt {manifest.attempt} was collected as garbage before it was committed; save again"
        )
    if not are_there():  # after the decision: a collector of the attempt removed the data first
        await check_sizes(backend, manifest)
    written = await _put_parts(backend, manifest) if REQUIRED in manifest.requires else manifest
    data = encode_manifest(written)
    key = manifest_key(manifest.id, manifest.generation)
    try:
        await backend.put_new(key, data)
    except ObjectExistsError:
        return await _resolve_conflict(backend, manifest)
    return manifest


async def _put_parts(backend: Backend, manifest: Manifest) -> Manifest:
    """Write the tables of *manifest* into blobs beside it; return the manifest in its written form."""
    written, parts = detach(manifest)
    for path, blob in parts.items():  # no blob is read before the manifest names it; two committers write the same
        if not await put_once(backend, f"{manifest.id}/{path}", blob):
            raise CommitError(f"{manifest.id}/{path} exists with other content: save the step again")
    return written


async def check_sizes(backend: Backend, manifest: Manifest) -> None:
    """Refuse data files that are missing or have another size. One listing shows all; a mismatch is checked by `stat`."""
    listed: dict[str, int] = {}
    for folder in sorted({file.p.rpartition("/")[0] for file in manifest.files}):
        listed |= {stat.key: stat.size for stat in (await backend.list(f"{manifest.id}/{folder}")).objects}
    for file in manifest.files:
        key = f"{manifest.id}/{file.p}"
        if listed.get(key) == file.size:
            continue
        try:
            found = (await backend.stat(key)).size
        except ObjectNotFoundError as error:
            raise CommitError(f"{key} is gone: the attempt was collected; save again") from error
        if found != file.size:
            raise CommitError(f"{key}: {found} bytes in storage, the receipt says {file.size}")


async def claim(backend: Backend, step_id: str, attempt: str, wish: Verdict, write_id: str) -> Verdict:
    """Create the attempt's one decision record; return the decision, made by us or by an earlier process.

    Raises:
        StorageFullError: the record does not fit, and for *collect* no object of the attempt can be renamed to it either.
    """
    key = decision_key(step_id, attempt)
    data = msgspec.json.encode(Decision(decision=wish, attempt=attempt, write_id=write_id))
    try:
        # A commit is decided among processes that live. After a power cut there is the manifest, or nothing is decided
        # yet. What is to be removed stays decided: the removal may survive the cut.
        if wish == "commit":
            await put_unflushed(backend, key, data, new=True)
        else:
            try:
                await backend.put_new(key, data)
            except StorageFullError:
                if not await claim_name_of_record(backend, step_id, attempt, new=True):
                    raise
        return wish
    except ObjectExistsError:
        return await _decided(backend, key)


async def claim_name_of_record(backend: Backend, step_id: str, attempt: str, *, new: bool) -> bool:
    """Rename a receipt of an attempt, or a data file of it, to the key of its decision record, which decides *collect*.

    The rename takes no space. Return False where no object of the attempt can be renamed.

    Args:
        new: only while the attempt is undecided. Else it may be committed, and its data files stay where they are.

    Raises:
        ObjectExistsError: *new*, and the attempt was decided.
    """
    if (place := works_when_full(backend)) is None:
        return False
    vote = receipt_key(step_id, attempt, 0)
    others = [stat.key async for stat in walk(backend, attempt_folder(step_id, attempt)) if new and stat.key != vote]
    for key in (vote, *others):
        with suppress(ObjectNotFoundError):
            # Its content is read as the record from then on: only such a start is understood as *collect*.
            if _is_of_attempt(await backend.get(key, len(RECEIPT_START))):
                if new:  # some file systems count a second name as a file: the hint for people is removed to make room
                    await backend.delete([LATEST_KEY])
                await place.move(key, decision_key(step_id, attempt), new=new)
                return True
    return False


def _is_of_attempt(start: bytes) -> bool:
    """Return whether a receipt or a data file begins with *start*; no decision record does."""
    # A data file is safetensors: 8 bytes with the length of the header, then the header as JSON.
    return start.startswith(RECEIPT_START) or start[8:10] == b'{"'


async def _decided(backend: Backend, key: str) -> Verdict:
    """Return the decision that is in the record; where hard links are missing, its creator may still be writing it."""
    for pause_s in RECORD_PAUSES_S:
        with suppress(CommitError):
            return await read_decision(backend, key)
        await anyio.sleep(pause_s)
    return await read_decision(backend, key)


async def read_decision(backend: Backend, key: str) -> Verdict:
    """Return the decision in a record; one that is gone was *collect*."""
    try:
        data = await read_start(backend, key, DECISION_LIMIT_BYTES + 1)
        if _is_of_attempt(data):
            return "collect"
        return msgspec.json.decode(data, type=described(Decision)).decision
    except ObjectNotFoundError:
        return "collect"  # the record was deleted while we read: the attempt is being removed
    except (msgspec.DecodeError, UnicodeDecodeError, ManifestError) as error:  # msgspec lets the second one through
        raise CommitError(f"{key} is damaged ({error}); save the step again") from error


async def _resolve_conflict(backend: Backend, ours: Manifest) -> Manifest:
    """Resolve that our manifest's key is taken: by the same attempt is success (theirs, or our own lost answer)."""
    try:
        theirs = await read_manifest(backend, ours.id, ours.generation)
    except ManifestError as error:
        raise CommitConflictError(
            f"{ours.id}: the name of generation {ours.generation} is taken by something that is no manifest ({error}). "
            f"Save again to add generation {ours.generation + 1}."
        ) from error
    if theirs.attempt == ours.attempt:
        return theirs
    raise CommitConflictError(
        f"{ours.id}: generation {ours.generation} was committed by another job, run {theirs.run}, while this save (attempt "
        f"{ours.attempt}, run {ours.run}) was running, and stands. Two jobs in {backend.url} replace each other's steps: "
        "end one of them (it may be an earlier start of this one that still runs), or give it a place of its own"
    )


async def roll_forward(backend: Backend, entry: StepEntry, world: World) -> list[Manifest]:
    """Commit for dead writers every attempt of the step whose votes are complete and whose generation is free.

    Of several attempts for one generation the newest wins.
    """
    found = [await votes_to_finish(backend, entry, attempt) for attempt in entry.attempts]
    complete = [votes for votes in found if votes is not None]
    done = []
    for votes in sorted(complete, key=lambda votes: votes[0].sequence, reverse=True):
        try:
            done.append(await commit(backend, votes, world))
        except ReplicasDifferError as error:
            logger.warning("attempt %s of a dead writer: could not be committed: %s", votes[0].attempt, error)
        except CommitError:
            continue  # another attempt has the generation, or this one was collected: nothing to finish
    return done
