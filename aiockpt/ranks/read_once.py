"""A load in which a group of ranks reads each block once: they exchange what they want, then read, offer and take.

What ranks want travels as notes (`aiockpt.ranks.agreement`), the bytes between their processes (`aiockpt.ranks.peers`).
Guarantees:

- A rank that fails before the exchange reports it; the others do not wait for it.
- What a lost rank was to read, each of the others reads by itself: a load needs no peer to succeed.
- The agreement on each step (`aiockpt.ranks.load`) applies as without a group: no rank is done before all are.

It is done only when a group is given, since on one host it does not win: 4 replicas of 192 MiB on 2 cores needed 0.24 s
from the page cache, each alone, and 0.5 s with a group. From a storage that delivers 0.4 GB/s to all of them it was 2.1 s
alone and 0.66 s with a group (so it was over gloo, too; ``benchmarks run replicas``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import anyio
import msgspec

from aiockpt.engine.context import Place
from aiockpt.engine.load import LoadMemory, Tally, Traffic, open_fetcher
from aiockpt.format.manifest import Manifest
from aiockpt.planning.exchange import Exchange, FileSpan, plan_exchange, wanted_spans
from aiockpt.ranks.agreement import TELL_DEADLINE_S, Notes
from aiockpt.ranks.block_exchange import PARCEL_BYTES, Exchanger, UnservedError
from aiockpt.ranks.peers import Shelf
from aiockpt.runtime.limits import run_blocking
from aiockpt.runtime.notes import StoreLostError
from aiockpt.state.shards import TensorShard


class Wants(msgspec.Struct, frozen=True):
    """A rank's note: the blocks it wants, and the address where it offers what it reads.

    Attributes:
        failure: this rank's load has failed; there is nothing to wait for.
    """

    spans: tuple[FileSpan, ...] = ()
    address: str = ""
    failure: str | None = None


class Terms(msgspec.Struct, frozen=True):
    """The note of the group's first rank.

    Attributes:
        lists: all different lists of wanted blocks; *list_of*: which of them each rank wants, in the group's order.
        addresses: of all ranks, in this order.
        failed_rank: the rank whose load has failed, so that all will fail; -1 if no load has.
    """

    lists: tuple[tuple[FileSpan, ...], ...] = ()
    list_of: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    failed_rank: int = -1

    @classmethod
    def of(cls, wants: Sequence[tuple[int, Wants]]) -> Terms:
        """Return the terms for the wants of all ranks."""
        for rank, want in wants:
            if want.failure is not None:
                return cls(failed_rank=rank)
        numbers: dict[tuple[FileSpan, ...], int] = {}
        list_of = tuple(numbers.setdefault(want.spans, len(numbers)) for _, want in wants)
        return cls(tuple(numbers), list_of, tuple(want.address for _, want in wants))


class ReadOnce:
    """Fills the tensors of one rank in one trial of a load; an implementation of `aiockpt.engine.load.FillTensors`.

    Args:
        notes: of the load; those under *key* are of this trial.
    """

    def __init__(self, shelf: Shelf, notes: Notes, key: str) -> None:
        self._shelf = shelf
        self._notes = notes
        self._key = key
        self._leads = shelf.rank == shelf.ranks[0]
        self._sent = self._settled = False

    async def __call__(self, place: Place, manifest: Manifest, wanted: Sequence[TensorShard]) -> Traffic:
        """Fill the tensors of *wanted*, every block verified.

        Raises:
            RankTimeoutError: names the ranks of the group that do not load.
            UnservedError: another rank could not read what this one was to receive.
        """
        engine = place.engine
        memory = await run_blocking(engine.state_work, LoadMemory, manifest, wanted)
        spans = await run_blocking(engine.state_work, _spans, manifest, memory)
        terms = await self._agree(Wants(tuple(spans), self._shelf.address), engine.options.deadlines.ranks_s)
        if terms.failed_rank >= 0:
            raise UnservedError(f"{manifest.id}: rank {terms.failed_rank} failed before it could read its part")
        exchange = await run_blocking(engine.state_work, _plan, manifest, terms)
        self._shelf.addresses = terms.addresses
        tally = Tally()
        fetcher = open_fetcher(place, manifest, tally)
        try:
            with engine.stages("load", manifest.step).time("exchange") as stage:
                exchanger = Exchanger(self._shelf, manifest, fetcher, memory, exchange, engine.options)
                received_bytes = stage.bytes = await exchanger.run()
        finally:
            await fetcher.close()
        await run_blocking(engine.state_work, memory.finish)
        return Traffic(tally.bytes, received_bytes)

    async def abandon(self, error: BaseException) -> None:
        """Release the other ranks from waiting for this one, whose load has failed. Call it in any state; never raises."""
        self._shelf.fail()
        with anyio.move_on_after(TELL_DEADLINE_S, shield=True), suppress(StoreLostError):
            if not self._sent:
                await self._post_wants(Wants(failure=f"{type(error).__name__}: {error}"))
            if self._leads and not self._settled:
                await self._set_terms(Terms(failed_rank=self._shelf.rank))

    async def _agree(self, wants: Wants, deadline_s: float) -> Terms:
        """Post what this rank wants; return the terms, the same on every rank of the group."""
        await self._post_wants(wants)
        ranks, what = self._shelf.ranks, "the load (every rank of its load_group must be given it)"
        if self._leads:
            keys = {rank: self._wants_key(rank) for rank in ranks}
            found = await self._notes.gather(keys, Wants, deadline_s, what)
            terms = Terms.of([(rank, found[rank]) for rank in ranks])
            await self._set_terms(terms)
            return terms
        # The first rank knows best which ranks are late, and reports them.
        return await self._notes.wait(self._terms_key(), Terms, deadline_s + TELL_DEADLINE_S, what, ranks[:1])

    async def _post_wants(self, wants: Wants) -> None:
        self._sent = True
        await self._notes.post(self._wants_key(self._shelf.rank), wants)

    async def _set_terms(self, terms: Terms) -> None:
        self._settled = True
        await self._notes.post(self._terms_key(), terms)

    def _wants_key(self, rank: int) -> str:
        return f"{self._key}/wants/{rank}"

    def _terms_key(self) -> str:
        return f"{self._key}/terms/{self._shelf.ranks[0]}"


def _spans(manifest: Manifest, memory: LoadMemory) -> list[FileSpan]:
    return wanted_spans(memory.plan.passes, [(file.size, file.block) for file in manifest.files])


def _plan(manifest: Manifest, terms: Terms) -> Exchange:
    wanted = [terms.lists[number] for number in terms.list_of]
    return plan_exchange(wanted, [file.block for file in manifest.files], parcel_bytes=PARCEL_BYTES)
