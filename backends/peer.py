"""The backend for the memory of all hosts of a job: each rank writes to its own host's, and all read the union.

Guarantees, besides those of the contract:

- A data file lies in the memory of the host that wrote it, and wherever `aiockpt.places.peers` has copied it; it is read
  from here where it is here, else from the next host that has it, also in the middle of a read.
- Records (manifests, receipts, decisions, hints) have one *home*, the host of rank 0: so exactly one of any number of
  callers creates a key, whatever host it is on. They are found in copies on other hosts, too, when the home was another.
- What an earlier run left on these hosts is seen by the next one, whatever its ranks. `delete` removes it on all of them.
- Nothing survives all copies' hosts: ``durable`` is False. On one host it lies where ``shm://peer/NAME`` does, and
  survives every process.
- A process without other ranks sees its own host alone.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Literal, TypeVar, cast

import msgspec

from aiockpt import errors
from aiockpt.backends.local_tree import write_all
from aiockpt.backends.ranges import Buffers, RangeReader
from aiockpt.backends.shm import ShmBackend
from aiockpt.errors import CheckpointError, ObjectExistsError, ObjectNotFoundError, StorageError, StorageTimeoutError
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.peer_link import MakeNetwork, Network, RangeReply, TcpNetwork, on_this_thread
from aiockpt.runtime.world import World
from aiockpt.storage.backend import (
    Backend,
    Listing,
    Reader,
    Seen,
    Space,
    Stat,
    Traits,
    Upload,
    check_key,
    check_keys,
    check_prefix,
)

T = TypeVar("T")
PULLING = ".pulling"
"""A folder for copies that are not whole."""
PIECE_BYTES = 1 << 20
"""Received at once: the checksum finds it in the processor's cache."""
SPARED_S = 20.0
"""A process that was silent is not asked again before: else each block of a load would wait for it."""


class HostAt(msgspec.Struct, frozen=True, array_like=True):
    """A host of the job: its id, its failure domain, its ranks, and where each of them serves its memory."""

    id: str
    domain: str
    ranks: tuple[int, ...]
    addresses: tuple[str, ...]


class Hosts(msgspec.Struct, frozen=True, array_like=True):
    """All hosts of the job, that of rank 0, the home of the records, first."""

    all: tuple[HostAt, ...]


class PeerBackend:
    """Objects in the memory of the hosts of a job, kept for this user under *name*.

    Args:
        name: of the run; relative, parts joined by ``/``.
        world: the seam to the operating system.
        mount: where the host's shared memory is mounted.
        make_network: how its hosts reach each other.

    Attributes:
        own: the memory of this host.
        hosts: the memories of the other hosts; empty before the job's hosts are known.
        received_bytes: of data files that came from other hosts.
        world: the seam to the operating system.
    """

    def __init__(
        self,
        name: str,
        *,
        world: World | None = None,
        mount: str = "/dev/shm",
        make_network: MakeNetwork = TcpNetwork,
    ) -> None:
        self._name = check_key(name.strip("/")) if name.strip("/") else "default"
        self._memory = partial(ShmBackend, f"peer/{self._name}", world=world, mount=mount)
        self.own = self._memory()
        self.received_bytes = 0
        self.world, self.make_network = world or World(), make_network
        self._files = Limiter("files of copies", 1)
        self.hosts: list[HostMemory] = []
        self._memories: Sequence[Backend] = (self.own,)
        self._find_hosts: Callable[[], Awaitable[object]] | None = None
        self._settle: Callable[[], Awaitable[object]] | None = None
        self._network: Network | None = None

    def connect(self, find_hosts: Callable[[], Awaitable[object]], settle: Callable[[], Awaitable[object]]) -> None:
        """Be one of several hosts.

        Args:
            find_hosts: calls `join`; it comes before all that is read or written.
            settle: comes before this host serves no more.
        """
        self._find_hosts, self._settle = find_hosts, settle

    @contextmanager
    def answering(self) -> Iterator[Callable[[bytes], RangeReply]]:
        """Yield the function that answers the calls of another process, on this thread, with this host's memory."""
        with on_this_thread() as run:
            yield _Served(self._memory(writes=True), run).answer

    def join(self, hosts: Hosts, own_id: str, rank: int, network: Network) -> None:
        """Take *hosts* for those of the job, which *network* connects; this is *rank*, on *own_id*."""
        self._network = network
        memories = [None if host.id == own_id else HostMemory(self, network, host, rank) for host in hosts.all]
        self.hosts = [memory for memory in memories if memory is not None]
        # The same order on all hosts: of two runs that each saved a step on hosts of their own, all take the same one's.
        self._memories = [memory or self.own for memory in memories]
        self._find_hosts = None

    @property
    def url(self) -> str:
        return f"peer://{self._name}"

    @property
    def traits(self) -> Traits:
        return msgspec.structs.replace(self.own.traits, scope="hosts")

    @property
    def _home(self) -> Backend:
        return self._memories[0]

    async def ready(self) -> None:
        """Wait until the hosts of the job are known.

        Raises:
            RankTimeoutError: ranks have not said where they are.
        """
        if self._find_hosts is not None:
            await self._find_hosts()

    # ------------------------------------------------------------------ the contract

    async def put(self, key: str, data: bytes) -> None:
        check_key(key)
        await self.ready()
        await self._home.put(key, data)

    async def put_new(self, key: str, data: bytes) -> None:
        check_key(key)
        await self.ready()
        await self._check_free(key, self._memories[1:])
        await self._home.put_new(key, data)

    async def get(self, key: str, max_bytes: int) -> bytes:
        check_key(key)
        await self.ready()
        return await self._first(key, lambda memory: memory.get(key, max_bytes))

    async def open(self, key: str) -> Reader:
        check_key(key)
        await self.ready()
        with suppress(ObjectNotFoundError):
            return await self.own.open(key)
        holders = await self.holders(key)
        size = holders[0][1]
        return _RemoteObject(key, size, deque(memory for memory, its_size in holders if its_size == size)).reader()

    async def holders(self, key: str) -> list[tuple[HostMemory, int]]:
        """Return which other hosts have an object, and its size there.

        Raises:
            ObjectNotFoundError: no host has it.
            StorageError: no host has it, and one did not answer.
        """
        answers = await _on_all([partial(memory.stat, key) for memory in self.hosts])
        found = zip(self.hosts, answers, strict=True)
        if holders := [(memory, stat.size) for memory, stat in found if isinstance(stat, Stat)]:
            return holders
        failures = (answer for answer in answers if not isinstance(answer, ObjectNotFoundError))
        raise next((error for error in failures if isinstance(error, StorageError)), self._not_found(key))

    async def create(self, key: str, size: int) -> Upload:
        check_key(key)
        await self.ready()
        if self._home is not self.own:
            await self._check_free(key, [self._home])
        return await self.own.create(key, size)

    async def stat(self, key: str) -> Stat:
        check_key(key)
        await self.ready()
        return await self._first(key, lambda memory: memory.stat(key))

    async def list(self, prefix: str) -> Listing:
        check_prefix(prefix)
        await self.ready()
        listings: list[Listing] = []
        for answer in await _on_all([partial(memory.list, prefix) for memory in self._memories]):
            if isinstance(answer, StorageError):  # a load that saw less would go on from an older step, or from none
                raise answer
            listings.append(answer)
        objects = {stat.key: stat for listing in reversed(listings) for stat in listing.objects}
        folders = {folder for listing in listings for folder in listing.folders}
        others = {other for listing in listings for other in listing.others}
        return Listing(tuple(objects[key] for key in sorted(objects)), tuple(sorted(folders)), tuple(sorted(others)))

    async def delete(self, keys: Sequence[str]) -> None:
        keys = check_keys(keys)
        await self.ready()
        home, *_ = await _on_all([partial(memory.delete, keys) for memory in self._memories])
        if isinstance(home, StorageError):
            raise home

    @asynccontextmanager
    async def new_copy(self, key: str, size: int) -> AsyncIterator[int]:
        """Yield a descriptor to fill; the file becomes the object *key* of this host at the end, whole at once.

        Raises:
            ObjectExistsError: it has one.
            StorageFullError: *size* bytes do not fit.
        """
        came = f"{PULLING}/{self.world.token(8).hex()}"
        here, there = self.own.path(came), self.own.path(key)
        upload = await self.own.create(came, size)
        try:
            try:
                files = self.world.files
                fd = await run_blocking(self._files, files.open, here, os.O_WRONLY)
                try:
                    yield fd
                finally:
                    files.close(fd)
                await run_blocking(self._files, os.makedirs, os.path.dirname(there), 0o700, True)
                await run_blocking(self._files, files.link, here, there)
            except StorageError:
                raise
            except OSError as error:
                raise errors.from_os_error(error, "copying", key) from error
        finally:
            await upload.abort()  # removes the name there; what was linked stays

    async def space(self) -> Space:
        """Return the free space of this host's memory."""
        return await self.own.space()

    async def close(self) -> None:
        """Serve no more; the objects stay."""
        network, self._network = self._network, None
        if network is not None:
            if self._settle is not None:
                await self._settle()
            await network.close()
        await self.own.close()

    # ------------------------------------------------------------------ the union

    async def _first(self, key: str, ask: Callable[[Backend], Awaitable[T]]) -> T:
        """Return the answer of the first memory that has the object; the home is asked alone.

        Raises:
            ObjectNotFoundError: no memory has it.
            StorageError: one did not answer, and none before it has the object. What follows may have that of another run.
        """
        for memories in (self._memories[:1], self._memories[1:]):
            for answer in await _on_all([partial(ask, memory) for memory in memories]):
                if not isinstance(answer, StorageError):
                    return answer
                if not isinstance(answer, ObjectNotFoundError):
                    raise answer
        raise self._not_found(key)

    def _not_found(self, key: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(f"looking for {key!r}: no object of that key in {self.url}", key=key)

    async def _check_free(self, key: str, memories: Sequence[Backend]) -> None:
        """Raise ObjectExistsError if one of *memories* has the object."""
        if any(isinstance(stat, Stat) for stat in await _on_all([partial(memory.stat, key) for memory in memories])):
            raise ObjectExistsError(f"creating {key!r}: an object of that key exists already", key=key)

    def __repr__(self) -> str:
        return f"<PeerBackend {self.url!r}, {len(self.hosts)} other hosts>"


class MemoryCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of a verb of the contract in another process, with the arguments that it takes; "read" is of a `Reader`."""

    verb: Literal["put", "put_new", "get", "stat", "list", "delete", "space", "read"]
    key: str = ""
    data: bytes = b""
    keys: tuple[str, ...] = ()
    offset: int = 0
    size: int = 0


class MemoryAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a call.

    Attributes:
        error, message: the name of the class of `aiockpt.errors`, and what it says; empty where the call has succeeded.
    """

    data: bytes = b""
    stat: Stat | None = None
    listing: Listing | None = None
    space: Space | None = None
    error: str = ""
    message: str = ""


# Made here: a type that two threads describe to msgspec at once ends the process (`aiockpt.format.document.described`).
_CALLS, _ANSWERS = msgspec.msgpack.Decoder(MemoryCall), msgspec.msgpack.Decoder(MemoryAnswer)


class _Served:
    """The memory of this host, as another process asks for it; on one thread."""

    def __init__(self, own: ShmBackend, run: Callable[[Awaitable[MemoryAnswer]], MemoryAnswer]) -> None:
        self._own, self._run = own, run

    def answer(self, question: bytes) -> RangeReply:
        try:
            call = _CALLS.decode(question)
            if call.verb == "read":
                return self._range(call)
            answer = self._run(self._make(call))
        except (CheckpointError, OSError, msgspec.DecodeError) as error:
            kind = "ObjectNotFoundError" if isinstance(error, FileNotFoundError) else type(error).__name__
            answer = MemoryAnswer(error=kind, message=str(error))
        return RangeReply(msgspec.msgpack.encode(answer))

    async def _make(self, call: MemoryCall) -> MemoryAnswer:
        own = self._own
        match call.verb:
            case "put":
                await own.put(call.key, call.data)
            case "put_new":
                await own.put_new(call.key, call.data)
            case "get":
                return MemoryAnswer(data=await own.get(call.key, call.size))
            case "stat":
                return MemoryAnswer(stat=await own.stat(call.key))
            case "list":
                return MemoryAnswer(listing=await own.list(call.key))
            case "delete":
                await own.delete(call.keys)
            case "space":
                return MemoryAnswer(space=await own.space())
        return MemoryAnswer()

    def _range(self, call: MemoryCall) -> RangeReply:
        fd = os.open(self._own.path(check_key(call.key)), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if min(call.offset, call.size) < 0 or call.offset + call.size > os.fstat(fd).st_size:
            os.close(fd)
            raise StorageError(f"{call.key!r} ends before byte {call.offset + call.size}")
        return RangeReply(msgspec.msgpack.encode(MemoryAnswer()), fd, call.offset, call.size)


class _RemoteObject:
    """An object that other hosts have: read from one of them until it is lost, then from the next."""

    def __init__(self, key: str, size: int, holders: deque[HostMemory]) -> None:
        self._key, self._size, self._holders = key, size, holders

    def reader(self) -> RangeReader:
        return RangeReader(self._key, self._size, self._fill)

    async def _fill(self, offset: int, into: Buffers, seen: Seen | None) -> None:
        end, last = offset + into.left_bytes, self._holders[-1]
        while True:
            holder = self._holders[0]
            try:
                return await holder.read(self._key, end, into, seen)
            except StorageError:
                if holder is last:
                    raise
            if holder is self._holders[0]:
                self._holders.rotate(-1)  # for the reads after this one, too


class HostMemory:
    """The memory of another host of the job, by calls of its processes; another of them where one is lost.

    Data files are read only: what a host has of another's is what it has pulled.
    """

    def __init__(self, peers: PeerBackend, network: Network, host: HostAt, rank: int) -> None:
        self._peers, self._network = peers, network
        self.host = host
        first = rank % len(host.addresses)  # so that the ranks of a host share what all others ask
        self._addresses = (*host.addresses[first:], *host.addresses[:first])
        self._silent_until_ns = dict.fromkeys(host.addresses, 0)

    @property
    def url(self) -> str:
        return f"{self._peers.url} (host of rank {self.host.ranks[0]})"

    @property
    def traits(self) -> Traits:
        return self._peers.traits

    async def put(self, key: str, data: bytes) -> None:
        await self._call(MemoryCall("put", key, data))

    async def put_new(self, key: str, data: bytes) -> None:
        await self._call(MemoryCall("put_new", key, data))

    async def get(self, key: str, max_bytes: int) -> bytes:
        return (await self._call(MemoryCall("get", key, size=max_bytes))).data

    async def stat(self, key: str) -> Stat:
        return _there((await self._call(MemoryCall("stat", key))).stat)

    async def list(self, prefix: str) -> Listing:
        return _there((await self._call(MemoryCall("list", prefix))).listing)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._call(MemoryCall("delete", keys=tuple(keys)))

    async def space(self) -> Space:
        return _there((await self._call(MemoryCall("space"))).space)

    async def open(self, key: str) -> Reader:
        return _RemoteObject(key, (await self.stat(key)).size, deque([self])).reader()

    async def read(self, key: str, end: int, into: Buffers, seen: Seen | None) -> None:
        """Fill the rest of *into* with the bytes of an object before *end*."""
        await self._call(
            lambda: MemoryCall("read", key, offset=end - into.left_bytes, size=into.left_bytes), into, seen
        )

    async def copy(self, key: str, offset: int, size: int, fd: int, seen: Seen) -> None:
        """Write a range of an object into a file, at the same place, and show what was written to *seen*.

        A piece is compared and written while the processor's cache has it: no more memory is used.
        """
        end, piece = offset + size, memoryview(bytearray(min(PIECE_BYTES, size)))
        into = Buffers([piece[: min(PIECE_BYTES, end - start)] for start in range(offset, end, PIECE_BYTES)])

        def write(part: memoryview) -> None:
            write_all(self._peers.world.files, fd, part, end - into.left_bytes - part.nbytes)
            seen(part)

        await self.read(key, end, into, write)

    async def create(self, key: str, size: int) -> Upload:
        raise StorageError(f"{key!r}: data files are written to the own host's memory, not to {self.url}", key=key)

    async def close(self) -> None:
        """Does nothing: the connections are those of the job."""

    async def _call(
        self, call: MemoryCall | Callable[[], MemoryCall], into: Buffers | None = None, seen: Seen | None = None
    ) -> MemoryAnswer:
        """Make *call* at the first process of the host that answers; what was filled before one was lost stays."""
        lost: StorageError | None = None
        clock = self._peers.world.clock
        for address in self._addresses:
            question = call() if callable(call) else call
            if clock.monotonic_ns() < self._silent_until_ns[address]:
                lost = StorageTimeoutError(f"the memory of {self.url} was silent a moment ago", key=question.key)
                continue
            parts = () if into is None else self._parts(into, seen)
            try:
                data = await self._network.ask(address, msgspec.msgpack.encode(question), parts)
                answer = _ANSWERS.decode(data)
            except TimeoutError:
                lost = StorageTimeoutError(f"the memory of {self.url} is silent: {question.verb} {question.key!r}")
                self._silent_until_ns[address] = clock.monotonic_ns() + int(SPARED_S * 1e9)
            except (OSError, msgspec.DecodeError) as error:
                lost = StorageError(f"the memory of {self.url} is lost: {error}", key=question.key, retryable=True)
            else:
                if answer.error:
                    raise _error(answer, question.key)
                return answer
        assert lost is not None
        raise lost

    def _parts(self, into: Buffers, seen: Seen | None) -> Iterator[memoryview]:
        """Yield the unfilled parts of *into*; each is filled when the next one is taken, or the iteration ends."""
        while (room := into.room) is not None:
            part = room[:PIECE_BYTES]
            yield part
            into.advance(part.nbytes)
            self._peers.received_bytes += part.nbytes
            if seen is not None:
                seen(part)


def _error(answer: MemoryAnswer, key: str) -> StorageError:
    kind: Any = getattr(errors, answer.error, None)
    if not (isinstance(kind, type) and issubclass(kind, StorageError)):
        kind = StorageError
    return cast("StorageError", kind(answer.message, key=key))


async def _on_all(asks: Sequence[Callable[[], Awaitable[T]]]) -> list[T | StorageError]:
    """Return the outcome of each of *asks*, made at once."""
    outcomes: list[T | StorageError | None] = [None] * len(asks)

    async def make(number: int) -> None:
        try:
            outcomes[number] = await asks[number]()
        except StorageError as error:
            outcomes[number] = error

    if len(asks) == 1:
        await make(0)
    else:
        async with open_tasks() as tasks:
            for number in range(len(asks)):
                tasks.start_soon(make, number)
    return cast("list[T | StorageError]", outcomes)


def _there(found: T | None) -> T:
    if found is None:
        raise StorageError("a peer's answer has not what was asked for")
    return found
