"""Reads of every backend, answered by a saboteur: right bytes or an error, and nothing that was shown is written again.

A case reads ranges of a data file through a backend's own reader, on a client that answers each range with any sequence of
pieces, short and long answers, errors, slow starts (time is simulated and leaps), wrong and repeated bytes; bare or
retried; alone, with checksums, or with other copies of the step to go on with.

- Without checksums nothing lies: what is shown is the file's bytes from the first on, each once; all of them, or an error.
- With checksums everything may: what a read ends with, when it is no error, is what was saved.
- What was shown is inverted before the next answer and the next bytes shown: were it written again, or not there yet, it
  would not be inverted in the end.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
import torch

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import CheckpointError
from aiockpt.format.manifest import Manifest, decode_manifest
from aiockpt.pipeline.discover import StepCopy
from aiockpt.pipeline.fetch import Fetcher, StepFiles
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend, Reader, Seen
from aiockpt.storage.forwarding import Forwarding, ForwardingReader
from aiockpt.storage.retry import Retrying, RetryPolicy
from aiockpt.storage.transfer import cut_views, walk
from tests.campaigns.campaign import Campaign, Case, Outcomes
from tests.campaigns.sabotaged_clients import HONEST, LYING, READERS, Saboteur, small_pieces
from tests.inline_process import Process
from tests.simulated.simulation import SimulatedClock, simulated_world
from tests.simulated.virtual_time import run_virtually

READS = 12
"""In a case, one after the other."""
Read = Callable[[int, memoryview], Awaitable[object]]


class Saved(msgspec.Struct, frozen=True):
    """A step in memory: where it lies, its manifest, and the bytes of its one data file."""

    backend: MemoryBackend
    manifest: Manifest
    key: str
    data: bytes


def save() -> Saved:
    """Save a step of some 50 KB in blocks of 4 KiB."""
    backend, world = MemoryBackend(), simulated_world()

    async def main() -> Saved:
        await Process(backend, world).save(1, {"weight": torch.arange(12_000, dtype=torch.float32)})
        found = {stat.key: await backend.get(stat.key, 1 << 20) async for stat in walk(backend, "")}
        (manifest,) = (decode_manifest(data) for key, data in found.items() if "/MANIFEST-" in key)
        key = f"{manifest.id}/{manifest.files[0].p}"
        return Saved(backend, manifest, key, found[key])

    return run_virtually(main, world.clock)


class Sabotaged(Forwarding):
    """*saved* on a backend of *kind*, whose data file is read as *saboteur* says."""

    def __init__(self, saved: Saved, kind: str, saboteur: Saboteur) -> None:
        super().__init__(saved.backend)
        self._saved, self._make, self._saboteur = saved, READERS[kind], saboteur

    async def open(self, key: str) -> Reader:
        found = self._make(key, self._saved.data, self._saboteur)
        reader: Reader = await found if isinstance(found, Awaitable) else found
        return ForwardingReader(reader, key, self)


class Witnessed:
    """One read: remembers what was shown, and inverts it where it landed."""

    def __init__(self, into: Sequence[memoryview], seen: Seen | None) -> None:
        self._into, self._seen = into, seen
        self.shown = bytearray()
        self._inverted = 0

    def __call__(self, view: memoryview) -> None:
        self.invert()
        self.shown += view
        if self._seen is not None:
            self._seen(view)

    def invert(self) -> None:
        """Invert what was shown since the last time."""
        self._flip(self._inverted, len(self.shown))
        self._inverted = len(self.shown)

    def end(self) -> None:
        """Check that what was shown is there, inverted, and put it back as it was."""
        self.invert()
        self._flip(0, self._inverted)
        landed = b"".join(cut_views(self._into, 0, self._inverted))
        assert landed == self.shown[: len(landed)], "bytes that were shown were written again, or are not there"

    def _flip(self, start: int, end: int) -> None:
        for view in cut_views(self._into, start, end):
            np.bitwise_xor(np.frombuffer(view, np.uint8), 0xFF, out=np.frombuffer(view, np.uint8))


class Witness(Forwarding):
    """*inner*, whose reads are `Witnessed`.

    Attributes:
        honest: the file's bytes, where no answer lies.
    """

    honest: bytes | None = None

    def __init__(self, inner: Backend, under_way: list[Witnessed]) -> None:
        super().__init__(inner)
        self._under_way = under_way

    async def open(self, key: str) -> Reader:
        reader, witness = await self.inner.open(key), self

        class WitnessedReader(ForwardingReader):
            async def read(self, offset: int, into: Sequence[memoryview], seen: Seen | None = None) -> None:
                await witness.read(reader, offset, into, seen)

        return WitnessedReader(reader, key, self)

    async def read(self, reader: Reader, offset: int, into: Sequence[memoryview], seen: Seen | None) -> None:
        """Read, and check what was shown."""
        size, read = sum(map(len, into)), Witnessed(into, seen)
        self._under_way.append(read)
        try:
            await reader.read(offset, into, read)
            assert self.honest is None or len(read.shown) == size, "it is over, and not all was shown"
        finally:
            self._under_way.remove(read)
            read.end()
            expected = None if self.honest is None else self.honest[offset : offset + size]
            assert expected is None or expected.startswith(bytes(read.shown)), "other bytes were shown"


class Sabotage:
    """What a seed says: the places, and how they are read."""

    def __init__(self, saved: Saved, seed: int) -> None:
        self.saved = saved
        self.dice = random.Random(seed)
        self.clock = SimulatedClock()
        self.world = World(clock=self.clock, token=self.dice.randbytes)
        self.fraction = self.dice.choice((0.0, 0.1, 0.4, 0.9))
        self.checked = self.dice.random() < 0.7
        self.under_way: list[Witnessed] = []
        self.outcomes: Outcomes = Counter()

    def place(self) -> StepCopy:
        """Draw a place that has the step."""
        kind = self.dice.choice(sorted(READERS))
        kinds = LYING if self.checked else HONEST
        saboteur = Saboteur(self.dice, self.clock, self.fraction, kinds, self.invert)
        backend: Backend = Sabotaged(self.saved, kind, saboteur)
        # A reader that minds nothing needs what minds it: the wrapper, or the checksums.
        if self.dice.random() < 0.7 or (kind == "foreign" and not self.checked):
            backend = Retrying(backend, RetryPolicy(attempts=self.dice.choice((2, 5, 30))), world=self.world)
        self.counted.append((kind, saboteur.kinds))
        witness = Witness(backend, self.under_way)
        witness.honest = None if self.checked else self.saved.data
        return StepCopy(witness, self.saved.manifest)

    def invert(self) -> None:
        for read in self.under_way:
            read.invert()

    async def main(self) -> None:
        self.counted: list[tuple[str, Counter[str]]] = []
        places = [self.place() for _ in range(self.dice.randint(1, 3) if self.checked else 1)]
        with small_pieces(self.dice.choice((1000, 4096, 1 << 20))):
            read, close = await self.reading(places)
            for _ in range(READS):
                await self.try_range(read)
            await close()
        for kind, counts in self.counted:
            self.outcomes.update({f"{kind}: {told}": count for told, count in counts.items()})

    async def reading(self, places: list[StepCopy]) -> tuple[Read, Callable[[], Awaitable[None]]]:
        """Return what reads a range, and what ends it."""
        if not self.checked:
            reader = await places[0].backend.open(self.saved.key)

            async def read_cut(offset: int, into: memoryview) -> None:
                cuts = sorted(self.dice.choices(range(len(into) + 1), k=3))
                ends = zip([0, *cuts], [*cuts, len(into)], strict=True)
                await reader.read(offset, [into[start:end] for start, end in ends], lambda _: None)

            return read_cut, reader.close
        if self.dice.random() < 0.3:
            blocks = StepFiles.of_copies(places)
            return lambda offset, into: blocks.read(0, offset, [into]), blocks.close

        async def others() -> Sequence[StepCopy]:
            return places[1:]

        fetcher = Fetcher(places[0].backend, places[0].manifest, read_bytes=8192, elsewhere=others)
        return lambda offset, into: fetcher.fetch_span(0, offset, into, header=True), fetcher.close

    async def try_range(self, read: Read) -> None:
        """Read a range; what comes without an error is right."""
        size, unit = len(self.saved.data), self.saved.manifest.files[0].block if self.checked else 1
        start, end = sorted(self.dice.sample(range(-(-size // unit) + 1), 2))
        start, end = start * unit, min(end * unit, size)
        into = memoryview(bytearray(end - start))
        try:
            await read(start, into)
        except CheckpointError:
            assert self.fraction, "every answer was right"
        else:
            assert into == self.saved.data[start:end], "wrong bytes, and no error"


def prepare() -> Case:
    saved = save()

    def case(seed: int) -> Outcomes:
        sabotage = Sabotage(saved, seed)
        run_virtually(sabotage.main, sabotage.clock)
        return sabotage.outcomes

    return case


CAMPAIGN = Campaign(name="reads", counts="answers", prepare=prepare, smoke_count=1000)
