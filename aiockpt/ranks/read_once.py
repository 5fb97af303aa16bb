"""A load in which a group of ranks reads each block once: they exchange what they want, then read, send and receive.

What ranks want travels as notes (`aiockpt.ranks.agreement`), the bytes over a process group that the user gave for it
(`aiockpt.ranks.peers`). Guarantees:

- A rank that fails before the exchange reports it; the others do not wait for it.
- If the group is broken, or breaks, each rank reads by itself what it still lacks: a load needs no group to succeed.
- The agreement on each step (`aiockpt.ranks.load`) applies as without a group: no rank is done before all are.

A group is used only when one is given. Making one here would be a collective call that the user did not ask for, and one
that hangs where gloo is configured with the wrong network interface. On one host it does not win: 4 replicas of 192 MiB on
2 cores needed 0.47 s from the disk and 0.25 s from the page cache, each alone, and 0.46 s and 0.44 s with a group. From a
storage that delivers 0.4 GB/s to all of them it was 2.1 s alone and 0.67 s with a group (``benchmarks run replicas``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import anyio
import msgspec

from aiockpt.engine.context import Engine, Place
from aiockpt.engine.load import LoadMemory, Tally, Traffic, open_fetcher
from aiockpt.format.manifest import Manifest
from aiockpt.pipeline.fetch import Fetcher
from aiockpt.planning.exchange import Exchange, FileSpan, plan_exchange, wanted_spans
from aiockpt.ranks.agreement import TELL_DEADLINE_S, Notes
from aiockpt.ranks.block_exchange import Exchanger, UnservedError, parcel_bytes
from aiockpt.ranks.peers import Peers
from aiockpt.runtime.limits import run_blocking
from aiockpt.runtime.notes import StoreLostError
from aiockpt.state.shards import TensorShard

logger = logging.getLogger("aiockpt")


class Wants(msgspec.Struct, frozen=True):
    """A rank's note: the blocks it wants, or why it takes no part.

    Attributes:
        broken: its group cannot be used any more.
        failure: this rank's load has failed; there is nothing to wait for.
    """

    spans: tuple[FileSpan, ...] = ()
    broken: str | None = None
    failure: str | None = None


class Terms(msgspec.Struct, frozen=True):
    """The note of the group's first rank.

    Attributes:
        lists: all different lists of wanted blocks; *list_of*: which of them each rank wants, in the group's order.
        broken: why no exchange is possible: each rank reads alone.
        failed_rank: the rank whose load has failed, so that all will fail; -1 if no load has.
    """

    lists: tuple[tuple[FileSpan, ...], ...] = ()
    list_of: tuple[int, ...] = ()
    broken: str | None = None
    failed_rank: int = -1

    @classmethod
    def of(cls, wants: Sequence[tuple[int, Wants]]) -> Terms:
        """Return the terms for the wants of all ranks."""
        for rank, want in wants:
            if want.failure is not None:
                return cls(failed_rank=rank)
        for rank, want in wants:
            if want.broken is not None:
                return cls(broken=f"rank {rank}: {want.broken}")
        numbers: dict[tuple[FileSpan, ...], int] = {}
        list_of = tuple(numbers.setdefault(want.spans, len(numbers)) for _, want in wants)
        return cls(tuple(numbers), list_of)


class ReadOnce:
    """Fills the tensors of one rank in one trial of a load; an implementation of `aiockpt.engine.load.FillTensors`.

    Args:
        notes: of the load; those under *key* are of this trial.
    """

    def __init__(self, peers: Peers, notes: Notes, key: str) -> None:
        self._peers = peers
        self._notes = notes
        self._key = key
        self._leads = peers.rank == peers.ranks[0]
        self._sent = self._settled = self._promised = False

    async def __call__(self, place: Place, manifest: Manifest, wanted: Sequence[TensorShard]) -> Traffic:
        """Fill the tensors of *wanted*, every block verified.

        Raises:
            RankTimeoutError: names the ranks of the group that do not load.
            UnservedError: another rank could not read what this one was to receive.
        """
        engine = place.engine
        memory = await run_blocking(engine.state_work, LoadMemory, manifest, wanted)
        spans = await run_blocking(engine.state_work, _spans, manifest, memory)
        terms = await self._agree(Wants(tuple(spans), broken=self._peers.broken), engine.options.deadlines.ranks_s)
        if terms.failed_rank >= 0:
            raise UnservedError(f"{manifest.id}: rank {terms.failed_rank} failed before it could read its part")
        tally = Tally()
        fetcher = open_fetcher(place, manifest, memory, tally)
        try:
            if terms.broken is None:
                with engine.stages("load", manifest.step).time("exchange") as exchange:
                    received_bytes = exchange.bytes = await self._exchange(engine, manifest, memory, fetcher, terms)
            else:
                logger.warning("load_group: not used; each rank reads alone: %s", terms.broken)
                received_bytes = 0
                for landings in memory.plan.passes:
                    await fetcher.fetch(landings)
        finally:
            await fetcher.close()
        await run_blocking(engine.state_work, memory.finish)
        return Traffic(tally.bytes, received_bytes)

    async def abandon(self, error: BaseException) -> None:
        """Release the other ranks from waiting for this one, whose load has failed. Call it in any state; never raises."""
        failure = f"{type(error).__name__}: {error}"
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True), suppress(StoreLostError):
            if not self._sent:
                await self._post_wants(Wants(failure=failure))
            if self._leads and not self._settled:
                await self._set_terms(Terms(failed_rank=self._peers.rank))
            elif self._promised:
                await self._peers.hang_up(failure)

    async def _agree(self, wants: Wants, deadline_s: float) -> Terms:
        """Post what this rank wants; return the terms, the same on every rank of the group."""
        await self._post_wants(wants)
        # The others may begin as soon as they have the terms: from here on only a broken group releases them.
        self._promised = True
        ranks, what = self._peers.ranks, "the load (every rank of its load_group must be given it)"
        if self._leads:
            keys = {rank: self._wants_key(rank) for rank in ranks}
            found = await self._notes.gather(keys, Wants, deadline_s, what)
            terms = Terms.of([(rank, found[rank]) for rank in ranks])
            await self._set_terms(terms)
        else:  # the first rank knows best which ranks are late, and reports them
            terms = await self._notes.wait(self._terms_key(), Terms, deadline_s + TELL_DEADLINE_S, what, ranks[:1])
        self._promised = terms.failed_rank < 0 and terms.broken is None
        return terms

    async def _post_wants(self, wants: Wants) -> None:
        self._sent = True
        await self._notes.post(self._wants_key(self._peers.rank), wants)

    async def _set_terms(self, terms: Terms) -> None:
        self._settled = True
        await self._notes.post(self._terms_key(), terms)

    def _wants_key(self, rank: int) -> str:
        return f"{self._key}/wants/{rank}"

    def _terms_key(self) -> str:
        return f"{self._key}/terms/{self._peers.ranks[0]}"

    async def _exchange(
        self, engine: Engine, manifest: Manifest, memory: LoadMemory, fetcher: Fetcher, terms: Terms
    ) -> int:
        """Read, send and receive; return the bytes received."""
        exchange = await run_blocking(engine.state_work, _plan, manifest, terms)
        exchanger = Exchanger(
            self._peers,
            manifest,
            fetcher,
            memory.views,
            memory.plan.passes,
            exchange,
            verify=engine.options.io.verify != "none",
            deadline_s=engine.options.deadlines.ranks_s,
        )
        self._promised = False  # the exchanger keeps what was promised, or breaks the group
        delivered = await exchanger.run()
        if delivered.lost is not None:
            logger.warning("%s; this rank read the rest alone", delivered.lost)
        return delivered.received_bytes


def _spans(manifest: Manifest, memory: LoadMemory) -> list[FileSpan]:
    return wanted_spans(memory.plan.passes, [(file.size, file.block) for file in manifest.files])


def _plan(manifest: Manifest, terms: Terms) -> Exchange:
    wanted = [terms.lists[number] for number in terms.list_of]
    return plan_exchange(wanted, [file.block for file in manifest.files], parcel_bytes=parcel_bytes(len(wanted)))
