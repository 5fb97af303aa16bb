"""Copies of one host's files in another host's memory: pulled after each save, newest step first, and again after a restart.

Guarantees:

- No rank waits for a copy or calls a collective: the host that is to hold one pulls it, by ranges, each block
  compared with the manifest. What is not whole lies in a folder of its own, and is never taken for a copy.
- A step counts as *replicated* when every host holds what it is to hold, and the manifest. Retention spares the newest
  replicated step until a newer one is: the loss of one host costs at most what was saved since then.
- A partner that is slow or away delays that alone. It is told after `LAGGING_S`.

One process of each host pulls, that of its lowest rank.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import anyio

from aiockpt.backends.peer import PULLING, HostMemory, Hosts, PeerBackend
from aiockpt.engine.context import Place
from aiockpt.errors import (
    CheckpointError,
    CorruptionError,
    ObjectExistsError,
    ObjectNotFoundError,
    RankError,
    SaveSkippedError,
)
from aiockpt.events import Committed, Event, PromotionQueued, Replicated, SaveFailed
from aiockpt.format.manifest import FileEntry, Manifest
from aiockpt.format.names import attempt_folder, manifest_key, step_id
from aiockpt.options import MIB, Tier
from aiockpt.pipeline.discover import StepCopy, list_step, newest_manifest, scan
from aiockpt.pipeline.fetch import BlockCheck
from aiockpt.pipeline.receipts import read_manifest
from aiockpt.places.peers.hosts import FoundHosts
from aiockpt.planning.copy_placement import exposed, place_copies, sources_of
from aiockpt.runtime.background import run_background
from aiockpt.runtime.incarnation import Incarnation
from aiockpt.runtime.limits import Limiter, open_tasks
from aiockpt.runtime.notes import NoteBoard, StoreLostError, growing_pauses
from aiockpt.runtime.peer_link import find_address
from aiockpt.runtime.promise import SavePromise
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import RECORD_LIMIT_BYTES, delete_below, walk

logger = logging.getLogger("aiockpt")

LAGGING_S, RETRY_S = 10.0, 0.5
"""Seconds until a step that is not copied is told; and between two attempts to copy it, from the first on."""
SETTLE_S = 5.0
"""How long the end of a run waits for the copies of its last step."""
RESTORED = 2
"""Steps that are copied again after a restart, the newest."""
STREAMS, RANGE_BYTES = 4, 64 * MIB
"""Ranges that come at once, each with a thread and a connection; blocks are powers of two, as a range is."""
KEPT_NOTES = 4


class Keeper:
    """Keeps copies of other hosts' files here; an observer and a background task of one checkpointer. On the engine's loop.

    Args:
        place: whose backend is *backend*.
        copies: hosts that hold a copy of each file, beside its own.
    """

    def __init__(self, place: Place, backend: PeerBackend, found: FoundHosts, board: NoteBoard, copies: int) -> None:
        self._place, self._backend, self._found, self._board = place, backend, found, board
        self._copies = copies
        self._streams = Limiter("copies from other hosts", STREAMS)
        self._saves: dict[int, SavePromise] = {}
        self._newest: SavePromise | None = None
        self._settling: anyio.CancelScope | None = None
        self._committed: dict[int, Committed] = {}
        self._changed = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._spared: Committed | None = None
        self._posted: list[str] = []

    def follow(self, promise: SavePromise) -> None:
        """Settle *promise*'s `replicated` when its step is, or will not be."""
        promise.is_copied = True
        self._saves[promise.step] = self._newest = promise

    async def settle(self) -> None:
        """Wait a moment for the copies of the last save, which others pull from here; not where something has failed."""
        if self._newest is not None:
            with anyio.move_on_after(SETTLE_S) as self._settling:
                await self._newest.replicated.settled()

    def _end_settling(self) -> None:
        self._newest = None
        if self._settling is not None:
            self._settling.cancel()

    def fraction_here(self) -> float:
        """Return the part of a step that this host holds: its own, and what it has copies of; all until hosts are known."""
        hosts = 1 if self._found.hosts is None else len(self._found.hosts.all)
        return min((self._copies + 1) / hosts, 1.0)

    def on_event(self, event: Event) -> None:
        """Note a commit: its files are to be copied; and a failed save, as after the death of a rank."""
        if isinstance(event, Committed):
            self._committed[event.step] = event
            self._changed.set()
        elif isinstance(event, SaveFailed):
            self._end_settling()

    async def run(self) -> None:
        """Copy what is saved until the end."""
        with anyio.CancelScope() as self._scope:
            await self._work()

    async def _work(self) -> None:
        hosts = await self._find_hosts()
        domains = {host.id: host.domain for host in hosts.all}
        holders = place_copies(domains, self._copies)
        leads = next(host for host in hosts.all if host.id == self._found.host_id).ranks[0] == self._board.rank
        if self._board.rank == 0 and self._copies and (alone := exposed(holders, domains)):
            warn_of_exposed(self._backend.url, alone, hosts)
        sources = sources_of(self._found.host_id, holders)
        ranks = {rank for host in hosts.all if host.id in sources for rank in host.ranks}
        async with open_tasks() as tasks:
            if leads:
                with suppress(CheckpointError):
                    await delete_below(self._backend.own, PULLING)
                tasks.start_soon(self._restore, hosts, holders)
            while True:
                await self._changed.wait()
                self._changed = anyio.Event()
                while self._committed:
                    committed = self._committed.pop(max(self._committed))
                    engine = self._place.engine
                    engine.emit(PromotionQueued(at_ns=engine.now_ns(), step=committed.step, url=self._backend.url))
                    tasks.start_soon(self._follow_to_the_end, committed)
                    if not leads:
                        continue
                    pull = partial(self._pull_saved, committed, ranks, len(hosts.all))
                    if problem := await _try(pull):
                        self._end_settling()
                        url, step = self._backend.url, committed.step
                        logger.warning("%s: step %d is not copied to this host yet: %s", url, step, problem)
                        tasks.start_soon(_try_again, pull)

    async def _find_hosts(self) -> Hosts:
        """Join the other ranks as soon as they come: rank 0 alone may read anything here in the first call of all."""
        while True:
            try:
                return await self._found.find()
            except StoreLostError:
                raise
            except RankError as error:
                logger.info("%s: %s", self._backend.url, error)

    async def aclose(self) -> None:
        """End it; what is not copied is left."""
        if self._scope is not None:
            self._scope.cancel()
        await self._found.close()

    async def other_copies(self, manifest: Manifest) -> Sequence[StepCopy]:
        """Return where else the files of a step may be: each of the other hosts."""
        return [StepCopy(memory, manifest) for memory in self._backend.hosts]

    # ------------------------------------------------------------------ copies

    async def _pull_saved(self, committed: Committed, ranks: Collection[int], host_count: int) -> None:
        """Copy the files of *ranks* of a step that was committed."""
        try:
            manifest = await read_manifest(self._backend, step_id(committed.step), committed.generation)
        except ObjectNotFoundError:
            return  # it is gone already: newer ones are copied by themselves
        await self._pull(manifest, [index for index, file in enumerate(manifest.files) if file.rank in ranks])
        await self._arrive(manifest, host_count)

    async def _restore(self, hosts: Hosts, holders: Mapping[str, Sequence[str]]) -> None:
        """Copy again what hosts that are gone had held of the newest steps, until that is done or newer ones are copied."""
        copy = partial(self._restore_once, hosts, holders)
        if (problem := await _try(copy)) and not self._posted:
            logger.warning("%s: the copies of an earlier run are not complete yet: %s", self._backend.url, problem)
            await _try_again(copy)

    async def _restore_once(self, hosts: Hosts, holders: Mapping[str, Sequence[str]]) -> None:
        if self._posted:
            return
        entries = sorted(await scan(self._backend), key=lambda entry: entry.head.sequence if entry.head else -1)
        for entry in [entry for entry in entries if entry.head is not None][-RESTORED:]:
            manifest = await newest_manifest(self._backend, entry)
            held = await self._who_holds(manifest)
            wanted = []
            for index, file in enumerate(manifest.files):
                those = [host.id for host in hosts.all if file.p in held[host.id]]
                if those and len(those) <= self._copies and self._found.host_id in holders[those[0]]:
                    wanted.append(index)
            await self._pull(manifest, wanted)

    async def _who_holds(self, manifest: Manifest) -> dict[str, set[str]]:
        """Return the paths of the data files of a step that each host has."""
        folder = f"{attempt_folder(manifest.id, manifest.attempt)}/d"
        held: dict[str, set[str]] = {}

        async def list_memory(host: str, memory: Backend) -> None:
            held[host] = set()
            with suppress(CheckpointError):
                held[host] = {stat.key.removeprefix(f"{manifest.id}/") for stat in (await memory.list(folder)).objects}

        async with open_tasks() as tasks:
            tasks.start_soon(list_memory, self._found.host_id, self._backend.own)
            for memory in self._backend.hosts:
                tasks.start_soon(list_memory, memory.host.id, memory)
        return held

    async def _pull(self, manifest: Manifest, wanted: Sequence[int]) -> None:
        """Copy the *wanted* files of a step here, by their numbers, and what a reader needs beside them, the manifest last.

        What is here is not copied again.
        """
        indexes = []
        for index in wanted:
            try:
                await self._backend.own.stat(f"{manifest.id}/{manifest.files[index].p}")
            except ObjectNotFoundError:
                indexes.append(index)
        async with open_tasks() as tasks:
            for index in indexes:
                tasks.start_soon(self._pull_file, manifest.id, manifest.files[index])
            async for stat in walk(self._backend, f"{attempt_folder(manifest.id, manifest.attempt)}/p"):
                await self._copy_record(stat.key)
        await self._copy_record(manifest_key(manifest.id, manifest.generation))

    async def _pull_file(self, id: str, file: FileEntry) -> None:
        """Copy a data file here from the first host that has it whole."""
        key, trouble = f"{id}/{file.p}", None
        for memory, _ in await self._backend.holders(key):
            try:
                async with self._backend.new_copy(key, file.size) as fd, open_tasks() as tasks:
                    for offset in range(0, file.size, max(RANGE_BYTES, file.block)):
                        await self._streams.__aenter__()  # a file of any size has no more tasks than there are streams
                        tasks.start_soon(self._pull_range, memory, key, file, offset, fd)
            except ObjectExistsError:
                return
            except CheckpointError as error:
                trouble = trouble or error
            else:
                return
        assert trouble is not None
        raise trouble

    async def _pull_range(self, memory: HostMemory, key: str, file: FileEntry, offset: int, fd: int) -> None:
        try:
            size, check = min(max(RANGE_BYTES, file.block), file.size - offset), BlockCheck(file, offset)
            await memory.copy(key, offset, size, fd, check)
            if check.bad_blocks or check.seen_bytes != size:
                raise CorruptionError(f"{key} in {memory.url} is damaged", key=key)
        finally:
            await self._streams.__aexit__()

    async def _copy_record(self, key: str) -> None:
        with suppress(ObjectNotFoundError):
            await self._backend.own.stat(key)
            return
        await self._backend.own.put(key, await self._backend.get(key, RECORD_LIMIT_BYTES))

    # ------------------------------------------------------------------ what is replicated

    async def _arrive(self, manifest: Manifest, host_count: int) -> None:
        """Count this host among those that hold what they are to hold; the last one posts that all do."""
        key = _note(manifest.id, manifest.generation)
        if await self._board.arrive(f"{key}/count") == host_count:
            await self._board.post(key, True)
        self._posted.append(key)
        outdated, self._posted = self._posted[:-KEPT_NOTES], self._posted[-KEPT_NOTES:]
        if self._board.rank == 0 and outdated:
            await self._board.delete([note for old in outdated for note in (old, f"{old}/count")])

    async def _follow_to_the_end(self, committed: Committed) -> None:
        """Wait until a step is replicated; spare it from retention then, and settle its save."""
        engine, step, id = self._place.engine, committed.step, step_id(committed.step)
        promise = self._saves.pop(step, None) or SavePromise(step)
        told = False
        while True:
            try:
                await self._board.wait(_note(id, committed.generation), bool, LAGGING_S, "copies")
                break
            except StoreLostError as error:
                promise.replicated.fail(error)
                return
            except CheckpointError:
                if await self._is_over(id, committed.generation):
                    promise.replicated.fail(SaveSkippedError(f"step {step}: newer steps were copied before it was"))
                    return
                if self._board.rank == 0 and not told:
                    told = True
                    logger.warning("%s: step %d is not in other hosts' memory yet", self._backend.url, step)
        promise.replicated.resolve(None)
        seconds = engine.since_s(committed.at_ns)
        engine.emit(Replicated(at_ns=engine.now_ns(), step=step, url=self._backend.url, seconds=seconds))
        if self._board.rank == 0 and (self._spared is None or committed.at_ns > self._spared.at_ns):
            self._place.protect(id)
            if self._spared is not None:
                self._place.unprotect(step_id(self._spared.step))
            self._spared = committed

    async def _is_over(self, id: str, generation: int) -> bool:
        """Return whether a step is not there any more, so that it will not be copied."""
        with suppress(CheckpointError):
            return generation not in (await list_step(self._backend, id)).generations
        return False


async def _try(copy: Callable[[], Awaitable[object]]) -> str:
    """Make copies; return why they could not be made, or nothing, also where the job ends."""
    try:
        await copy()
    except StoreLostError:
        return ""
    except CheckpointError as error:
        return str(error)
    return ""


async def _try_again(copy: Callable[[], Awaitable[object]]) -> None:
    for pause_s in growing_pauses(RETRY_S, LAGGING_S):
        await anyio.sleep(pause_s)
        if not await _try(copy):
            return


def warn_of_exposed(url: str, alone: Sequence[str], hosts: Hosts) -> None:
    """Log that hosts have no copy that would survive them."""
    if len(hosts.all) == 1:
        logger.warning(
            "%s: all ranks are on one host, so no other one holds a copy; what is saved survives processes", url
        )
        return
    named = ", ".join(f"that of rank {host.ranks[0]}" for host in hosts.all if host.id in alone)
    logger.warning(
        "%s: what %d of %d hosts hold (%s) has its copies in the same failure domain, by apart=, and is lost with it",
        *(url, len(alone), len(hosts.all), named),
    )


def keep_copies(place: Place, tier: Tier, incarnation: Incarnation) -> Callable[[], object]:
    """Connect this rank's host with those of the others for *place*, and keep copies; return a function that ends it."""
    engine, backend = place.engine, _of_hosts(place.backend)
    board = NoteBoard(incarnation, f"peers-{place.number}")
    board.begin()  # here, since all ranks make their checkpointers in the same order
    found = FoundHosts(
        backend,
        board,
        engine.options.deadlines.ranks_s,
        apart=tier.apart,
        address=find_address(tier.network, incarnation.store),
        token=engine.world.token,
    )
    keeper = Keeper(place, backend, found, board, tier.copies)
    backend.connect(found.find, keeper.settle)
    place.ready = found.find
    engine.lineage.leaves_room = True
    place.follow = keeper.follow
    place.fraction_here = keeper.fraction_here
    place.other_copies = keeper.other_copies
    engine.add_observer(keeper)
    return run_background(engine.loop, keeper, engine.emit, engine.drop)


def _of_hosts(backend: Backend) -> PeerBackend:
    """Return the memory of hosts that *backend* is, or wraps."""
    while not isinstance(backend, PeerBackend):
        backend = cast("Any", backend).inner
    return backend


def _note(id: str, generation: int) -> str:
    return f"replicated/{id}/{generation}"
