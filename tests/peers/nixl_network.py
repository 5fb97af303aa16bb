"""NIXL behind the link: ranges of files are read by its transfers (RDMA where there is any); questions go over TCP.

A giver maps the file of a range and registers that memory; the asker reads it, part by part, and says when it is done. The
metadata of the giver's agent travel with the answer, since they name what is registered.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from aiockpt.runtime.limits import Limiter, run_blocking
from aiockpt.runtime.peer_link import Answering, RangeReply, TcpNetwork

TRANSFER_S = 60.0
_DONE = b"done "


class _Offer(msgspec.Struct):
    """The answer, and where the memory of its range is: the agent's metadata, the address, its number."""

    data: bytes
    metadata: bytes = b""
    address: int = 0
    number: int = 0


class NixlNetwork:
    """See `aiockpt.runtime.peer_link.Network`.

    Args:
        nixl: the module `nixl._api`.
    """

    def __init__(self, nixl: Any, host: str, token: Callable[[int], bytes]) -> None:
        self._tcp = TcpNetwork(host, token)
        self._agent = nixl.nixl_agent(token(8).hex(), nixl.nixl_agent_config(backends=["UCX"]))
        self._lock = threading.Lock()  # of the agent
        self._offered: dict[int, tuple[Any, ...]] = {}
        self._transfers = Limiter("nixl", 4)
        self.read_bytes = 0

    def announce(self, answering: Callable[[], Answering]) -> str:
        @contextmanager
        def offering() -> Iterator[Callable[[bytes], RangeReply]]:
            with answering() as answer:
                yield lambda question: self._offer(answer, question)

        return self._tcp.announce(offering)

    async def ask(self, address: str, question: bytes, parts: Iterable[memoryview] = ()) -> bytes:
        offer = msgspec.msgpack.decode(await self._tcp.ask(address, question), type=_Offer)
        if offer.metadata:
            await run_blocking(self._transfers, self._read, offer, parts)
            await self._tcp.ask(address, _DONE + str(offer.number).encode())
        return offer.data

    async def watch(self, address: str, question: bytes) -> None:
        await self._tcp.watch(address, question)

    async def close(self) -> None:
        await self._tcp.close()

    def _offer(self, answer: Callable[[bytes], RangeReply], question: bytes) -> RangeReply:
        if question.startswith(_DONE):
            with self._lock:
                registered, *_ = self._offered.pop(int(question.removeprefix(_DONE)))
                self._agent.deregister_memory(registered)
            return RangeReply(msgspec.msgpack.encode(_Offer(b"")))
        reply = answer(question)
        offer = _Offer(reply.data)
        if reply.fd >= 0 and reply.size:
            start = reply.offset % mmap.ALLOCATIONGRANULARITY
            with os.fdopen(reply.fd, "rb") as file:
                memory = mmap.mmap(
                    file.fileno(), start + reply.size, mmap.MAP_SHARED, mmap.PROT_READ, offset=reply.offset - start
                )
            bytes_of = np.frombuffer(memory, np.uint8)
            offer.address = bytes_of.ctypes.data + start
            with self._lock:
                registered = self._agent.register_memory([(offer.address, reply.size, 0, "")], "DRAM")
                offer.number = max(self._offered, default=0) + 1
                self._offered[offer.number] = (registered, bytes_of)
                offer.metadata = self._agent.get_agent_metadata()
        return RangeReply(msgspec.msgpack.encode(offer))

    def _read(self, offer: _Offer, parts: Iterable[memoryview]) -> None:
        """Fill *parts*, one after the other, by a transfer each."""
        agent, address = self._agent, offer.address
        with self._lock:
            name = agent.add_remote_agent(offer.metadata)
        for part in parts:
            own = np.frombuffer(part, np.uint8)
            with self._lock:
                registered = agent.register_memory([(own.ctypes.data, own.nbytes, 0, "")], "DRAM")
                here = agent.get_xfer_descs([(own.ctypes.data, own.nbytes, 0)], "DRAM")
                there = agent.get_xfer_descs([(address, own.nbytes, 0)], "DRAM")
                transfer = agent.initialize_xfer("READ", here, there, name, b"")
                state = agent.transfer(transfer)
            ends_s = time.monotonic() + TRANSFER_S
            while state == "PROC":
                if time.monotonic() > ends_s:
                    raise TimeoutError("a transfer of NIXL does not end")
                time.sleep(0.0005)
                with self._lock:
                    state = agent.check_xfer_state(transfer)
            if state != "DONE":
                raise ConnectionResetError(f"a transfer of NIXL failed: {state}")
            with self._lock:
                agent.release_xfer_handle(transfer)
                agent.deregister_memory(registered)
            address += own.nbytes
            self.read_bytes += own.nbytes
