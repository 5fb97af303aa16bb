"""Save of one step by many ranks: it is whole or absent, and every rank knows which.

Rank 0 *leads*: it begins the attempt, waits for all votes and commits. The others *follow*. Guarantees:

- Receipts in storage are the votes; notes in the store only wake. No process group is used.
- A rank that fails, is cancelled or skips notifies all others at once; they stop, remove what they wrote, and raise
  `RankFailedError` with its reason. The same happens when a rank has left, or its process has ended, before its vote. A
  silent rank is named in a warning after ten seconds, and in the error when a deadline has passed.
- A follower that has voted and receives nothing from rank 0 reads the storage itself, and commits when every vote is
  there: a dead rank 0 costs no checkpoint.
- In a writer process the store may be lost with the trainer that hosts or relays it. Saves go on without it: the objects
  in storage replace the notes (`aiockpt.ranks.storage_fallback`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial

import anyio
import msgspec

from aiockpt.engine.context import Place
from aiockpt.engine.job import SaveJob
from aiockpt.engine.save import (
    CLEAN_UP_DEADLINE_S,
    begin,
    check_space,
    commit_votes,
    committed,
    emit_start,
    existing_save,
    skip_existing,
    vote,
    write_files,
)
from aiockpt.errors import (
    CheckpointError,
    CommitConflictError,
    CommitTimeoutError,
    RankFailedError,
    RankTimeoutError,
)
from aiockpt.format.manifest import FileEntry
from aiockpt.format.names import data_path, failure_key, receipt_key, step_id
from aiockpt.futures import SaveResult
from aiockpt.pipeline.commit import Attempt, claim, wait_votes
from aiockpt.pipeline.discover import list_step, votes_to_finish
from aiockpt.pipeline.receipts import ranks_that_voted
from aiockpt.ranks.gathering import count_vote, takes_over, wait_likely
from aiockpt.ranks.rounds import RoundNotes
from aiockpt.ranks.storage_fallback import (
    FailureRecord,
    StorageFallback,
    pauses_without_store,
    receive_or_find,
    watching_failures,
)
from aiockpt.runtime.notes import StoreLostError, name_ranks

logger = logging.getLogger("aiockpt")

RELIST_S = 2.0
"""How long rank 0 relies on the count of votes in the store before it lists the receipts anyway."""


class BegunAttempt(msgspec.Struct, frozen=True):
    """Rank 0's note: the attempt of all ranks, or the existing save, which the policy keeps."""

    attempt: Attempt | None = None
    existing: SaveResult | None = None


async def save_with_ranks(place: Place, notes: RoundNotes, job: SaveJob) -> SaveResult:
    """Save this rank's share of one step; when this returns the step is committed on all ranks.

    Raises:
        RankError: other ranks failed, are silent, or began another save.
        CommitConflictError, CommitTimeoutError, StepExistsError, StorageError: as `aiockpt.engine.save.save_alone`.
    """
    emit_start(place.engine, job)
    nonce = ""
    try:
        await notes.announce()
        nonce = job.nonce or await notes.attempt_nonce()
        place.engine.busy_attempts.add(nonce)
        return await (_follow if notes.board.rank else _lead)(place, job, notes, nonce)
    except BaseException as error:
        await _abandon(place, job, notes, nonce, job.why(error))
        raise
    finally:
        place.engine.busy_attempts.discard(nonce)
        await notes.release()


async def _lead(place: Place, job: SaveJob, notes: RoundNotes, nonce: str) -> SaveResult:
    board, votes_key, commit_s = notes.board, notes.key("votes"), place.engine.options.deadlines.commit_s
    with job.stages.time("begin"):
        begun = await begin(place, job, nonce)
    note = BegunAttempt(existing=begun) if isinstance(begun, SaveResult) else BegunAttempt(attempt=begun)
    with notes.rounds.surviving_store():
        await board.post(notes.key("begun"), note)
    if isinstance(begun, SaveResult):
        return begun
    async with watching_failures(notes, StorageFallback(place, job.step, nonce)):
        files = await write_files(place, job, nonce)
        own = await vote(place, job, begun, files)
        await count_vote(board, votes_key, place.backend, own)
        pauses, waiting = pauses_without_store(place.engine, RELIST_S), notes.waiting(commit_s)

        async def until_likely() -> None:
            try:
                await wait_likely(board, votes_key, RELIST_S)
            except StoreLostError:
                await anyio.sleep(next(pauses))
            gone = await waiting.check_votes(partial(_missing_votes, place, begun))
            if gone is not None:
                raise gone

        with job.stages.time("wait", "votes"):
            votes = await wait_votes(place.backend, begun, own, commit_s, until_likely)
    with job.stages.time("commit"):
        manifest = await commit_votes(place, begun, votes)
    await notes.post_committed(manifest.generation)
    return committed(place.engine, job, manifest.generation)


async def _missing_votes(place: Place, attempt: Attempt) -> set[int]:
    """Return the ranks that have no vote in storage."""
    return set(range(attempt.world_size)) - await ranks_that_voted(place.backend, attempt.id, attempt.attempt)


async def _follow(place: Place, job: SaveJob, notes: RoundNotes, nonce: str) -> SaveResult:
    begun: BegunAttempt | None = None
    fallback = StorageFallback(place, job.step, nonce)
    async with watching_failures(notes, fallback):
        if place.engine.options.on_exists != "new_generation":  # else rank 0 hardly ever refuses: write meanwhile
            begun = await _read_begun(place, notes, fallback)
        files: tuple[FileEntry, ...] = ()
        if begun is None or begun.attempt is not None:
            await check_space(place, job)
            files = await write_files(place, job, nonce)
            with job.stages.time("wait", "begin"):
                begun = begun or await _read_begun(place, notes, fallback)
        if begun.attempt is None:
            assert begun.existing is not None
            return skip_existing(place.engine, job, begun.existing)
        attempt = msgspec.structs.replace(begun.attempt, rank=notes.board.rank)
        own = await vote(place, job, attempt, files)
        await count_vote(notes.board, notes.key("votes"), place.backend, own)
        with job.stages.time("wait", "commit"):
            generation = await _await_commit(place, notes, attempt, fallback)
    return committed(place.engine, job, generation)


async def _read_begun(place: Place, notes: RoundNotes, fallback: StorageFallback) -> BegunAttempt:
    """Wait for rank 0's note that it begins this very save, or for its vote, which has the same content."""
    step = notes.name.step

    async def receive(seconds: float) -> BegunAttempt:
        return await notes.board.wait(notes.key("begun"), BegunAttempt, seconds, "the save")

    async def find(lost: bool) -> BegunAttempt | None:
        attempt = await fallback.begun()
        if attempt is not None:
            return BegunAttempt(attempt)
        entry = await list_step(place.backend, step_id(step)) if lost else None
        existing = await existing_save(place, entry) if entry and entry.committed else None
        return None if existing is None else BegunAttempt(existing=existing)

    what, waiting = f"the save of step {step}", notes.waiting(place.engine.options.deadlines.ranks_s)
    return await receive_or_find(place.engine, notes.rounds, what, receive, find, waiting=waiting)


async def _await_commit(place: Place, notes: RoundNotes, attempt: Attempt, fallback: StorageFallback) -> int:
    """Return the generation that was committed; after a while without news, or without rank 0, try to commit here.

    Raises:
        RankFailedError: a rank has recorded its failure, or will not vote any more.
        CommitTimeoutError: no commit in time: votes are missing, or rank 0 did not commit; the outcome is unknown.
    """
    deadlines = place.engine.options.deadlines
    begun_ns, pauses = place.engine.now_ns(), pauses_without_store(place.engine, min(RELIST_S, deadlines.takeover_s))

    async def missing() -> Iterable[int]:
        return await _missing_votes(place, attempt) or [0]

    waiting = notes.waiting(deadlines.commit_s, missing)  # for rank 0, and with it for each rank that has not voted
    while True:
        alone = False
        try:
            return await notes.read_end(deadlines.takeover_s, waiting)
        except RankTimeoutError:
            pass
        except StoreLostError:  # rank 0 may have ended with it, after the commit
            await anyio.sleep(next(pauses))
        except RankFailedError as error:
            if not error.seen_here:
                raise
            alone = True
        generation = await _take_over(place, attempt)
        if generation is not None:
            await notes.post_committed(generation)
            return generation
        failure = await fallback.failure()  # of a rank that could not post it
        if failure is not None:
            raise failure
        if alone:  # wait a little for the votes that are missing, unless one of them will not come any more
            gone = waiting.lost(await _missing_votes(place, attempt), voting=True)
            if gone is not None:
                raise gone
            await anyio.sleep(next(pauses))
        if place.engine.since_s(begun_ns) > deadlines.commit_s:
            absent = sorted(await _missing_votes(place, attempt))
            late = f"no receipt from {name_ranks(absent)}" if absent else "all have voted, and rank 0 did not commit"
            raise CommitTimeoutError(
                f"{attempt.id}: {late} within {deadlines.commit_s:g} s; the outcome is unknown. Run `aiockpt commit` "
                "once all have voted, or save again.",
                absent or [0],
            )


async def _take_over(place: Place, attempt: Attempt) -> int | None:
    """Commit in rank 0's place if every vote is there; return the generation, also that of a commit by another rank."""
    entry = await list_step(place.backend, attempt.id)
    if entry.head is not None and entry.head.attempt == attempt.attempt:
        return entry.head.generation
    if not takes_over(place.engine.rank, place.engine.world_size):
        return None
    votes = await votes_to_finish(place.backend, entry, attempt.attempt)
    return None if votes is None else (await commit_votes(place, attempt, votes)).generation


async def _abandon(place: Place, job: SaveJob, notes: RoundNotes, nonce: str, error: BaseException) -> None:
    """Notify the others that there will be no checkpoint, as soon as that is certain, and remove this rank's part of it.

    No rank can commit without this rank's vote, nor once another attempt has the generation. Once the vote may be there, the
    decision record decides, and an earlier commit stands: then no failure is reported.
    """
    notes.rounds.joint.invalidate()
    certain = not job.voting or isinstance(error, CommitConflictError)
    if certain:
        await notes.post_failure(error)
    if nonce and not isinstance(error, CommitTimeoutError):
        await abort_attempt([place], job, nonce, error, unreported=None if certain else notes)


async def abort_attempt(
    places: Sequence[Place], job: SaveJob, nonce: str, error: BaseException, unreported: RoundNotes | None
) -> None:
    """Ensure that no rank commits the attempt *nonce* any more, and remove this rank's part of it.

    Nothing is reported or removed if the commit is already decided, or if the decision cannot be read.

    Args:
        places: where the attempt may be.
        unreported: the round by which to notify the other ranks once it is certain; None when that was done.
    """
    folder = step_id(job.step)
    with anyio.move_on_after(CLEAN_UP_DEADLINE_S, shield=True):
        try:
            # In all places first: a commit in any of them stands, and nothing is removed then.
            for place in places:
                if await claim(place.backend, folder, nonce, "collect", place.engine.token(16)) == "commit":
                    return
            if unreported is not None:
                await unreported.post_failure(error)
            for place in places:
                await _drop_own_part(place, job, nonce, error)
        except CheckpointError as trouble:
            logger.warning("attempt %s of %s is left as garbage: %s", nonce, folder, trouble)


async def _drop_own_part(place: Place, job: SaveJob, nonce: str, error: BaseException) -> None:
    """Record the reason, and remove this rank's part of an attempt that is never committed; others remove the rest."""
    folder = step_id(job.step)
    rank = place.engine.rank
    keys = [f"{folder}/{data_path(nonce, rank, index)}" for index in range(len(job.plan.files))]
    reason = msgspec.json.encode(FailureRecord(rank, f"{type(error).__name__}: {error}"))
    await place.backend.delete([receipt_key(folder, nonce, rank)])  # or the loss of one record would revive the attempt
    try:
        await place.backend.put(failure_key(folder, nonce, rank), reason)
    finally:  # the disk may be full, with no room for the reason
        await place.backend.delete(keys)
