"""The histories of `tests.campaigns.peer_memory` on a virtual clock: ranks are tasks, network and deaths are simulated.

A seed draws what goes wrong in a run, and when: a process, all processes of a host or all of the job are killed, between
two calls of the file system or in the middle of a transfer; links are slow, or cut for a while or for good. What a dead
process still tries reaches neither memory nor network. A killed job's other ranks end within `GRACE_S`, as a launcher ends
them. Virtual time cannot hang: a run whose tasks all wait is a finding, and so is one that takes longer than `RUN_S`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import torch.distributed

import aiockpt
from aiockpt.backends.peer import PeerBackend
from aiockpt.errors import CheckpointError
from aiockpt.runtime.peer_link import Answering, RangeReply
from aiockpt.runtime.world import World
from aiockpt.storage.retry import Retrying
from aiockpt.testing.forwarding_files import FilesCall, ForwardingFiles
from tests.campaigns.campaign import Campaign, in_folders
from tests.campaigns.peer_memory import KEEP, Case, be_rank, look
from tests.ranks.crew import SMALL
from tests.simulated.inline_loop import InlineLoop
from tests.simulated.simulation import SimulatedClock, simulated_world
from tests.simulated.virtual_time import run_virtually

RUN_S = 2000.0
GRACE_S = 15.0
SILENCE_S = 5.0
"""Of a link that is cut, instead of the real 20: each virtual second has a hundred polls of the store."""
DEADLINES = aiockpt.Deadlines(ranks_s=40, commit_s=40, takeover_s=10)


class Process:
    """A rank's process; dead, it changes nothing any more."""

    def __init__(self, job: Job, rank: int, host: str) -> None:
        self.job, self.rank, self.host = job, rank, host
        self.is_dead = False
        self.calls_left: int | None = None
        self.loops: list[InlineLoop] = []
        self.task: asyncio.Task[None] | None = None
        self.thread: threading.Thread | None = None
        self.thread_goes, self.loop_goes = threading.Semaphore(0), threading.Semaphore(0)
        base = simulated_world(job.dice.getrandbits(32))
        self.world = dataclasses.replace(
            World(_Files(World().files, self), job.clock, base.token), make_loop=self._make_loop
        )

    def _make_loop(self, name: str, on_exit: Callable[[], object]) -> InlineLoop:
        self.loops.append(_Loop(name, on_exit, self))
        return self.loops[-1]

    async def call(self, work: Callable[[], Any]) -> Any:
        """Return what *work* returns, made on a thread that may wait for the loop, which else waits for it."""
        outcome = self.job.loop.create_future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  the caller gets it
                if not outcome.done():
                    outcome.set_exception(RuntimeError("dead") if self.is_dead else error)
            else:
                if not outcome.done():
                    outcome.set_result(result)
            self.loop_goes.release()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        self.loop_goes.acquire()
        return await outcome

    def resume_thread(self, _: object) -> None:
        """Let the thread go on that waits for the loop, and wait for it. On the loop."""
        self.thread_goes.release()
        self.loop_goes.acquire()

    def kill(self) -> None:
        self.is_dead = True
        for loop in self.loops:
            loop.discard()
        if self.task is not None:
            self.task.cancel()

    def count_call(self) -> None:
        """Die at a call of the file system, where that was drawn."""
        if self.calls_left is not None and not self.is_dead:
            self.calls_left -= 1
            if self.calls_left <= 0:
                self.is_dead = True  # at once; its tasks end in the next turn
                self.job.loop.call_soon_threadsafe(self.job.kill, [self])
        if self.is_dead:
            raise OSError(5, f"rank {self.rank} is dead")


class _Future(concurrent.futures.Future[Any]):
    """A future of the loop's; while the process's own thread waits for it the loop goes on, and else never beside it."""

    process: Process

    def result(self, timeout: float | None = None) -> Any:
        process = self.process
        if threading.current_thread() is process.thread and not self.done():
            self.add_done_callback(process.resume_thread)
            process.loop_goes.release()
            process.thread_goes.acquire()
        return super().result(timeout)


class _Loop(InlineLoop):
    def __init__(self, name: str, on_exit: Callable[[], object], process: Process) -> None:
        super().__init__(name, on_exit)
        self._process = process

    def submit(  # type: ignore[override]
        self, work: Callable[..., Any], *args: Any
    ) -> concurrent.futures.Future[Any]:
        future = _Future()
        future.process = self._process
        task = self._process.job.loop.create_task(self._run(future, work, *args))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    def call_soon(self, work: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self._process.job.loop.call_soon(work, *args)


class _Files(ForwardingFiles):
    def __init__(self, inner: Any, process: Process) -> None:
        super().__init__(inner)
        self._process = process

    def forward(self, call: FilesCall) -> Any:
        if call.verb != "close":
            self._process.count_call()
        return call()


class _Store:
    """The store of the ranks' notes, which ends with rank 0."""

    def __init__(self, job: Job, process: Process) -> None:
        self._job, self._process = job, process

    def __getattr__(self, verb: str) -> Any:
        if self._process.is_dead or self._job.processes[0].is_dead:
            raise RuntimeError("the store is gone")
        return getattr(self._job.store, verb)


class _Network:
    """What a process sees of the job's network; see `aiockpt.runtime.peer_link.Network`."""

    def __init__(self, process: Process) -> None:
        self._process, self._job = process, process.job

    def announce(self, answering: Callable[[], Answering]) -> str:
        address = f"{self._process.rank}"
        self._job.serving[address] = _Server(self._process, answering)
        return address

    async def ask(self, address: str, question: bytes, parts: Iterable[memoryview] = ()) -> bytes:
        server = self._job.serving.get(address)
        if server is None:
            raise ConnectionRefusedError("nobody listens")
        await self._job.travel(self._process, server.process, 0)
        reply = await server.answer(question)
        try:
            if reply.fd >= 0:
                await self._receive(server, reply, parts)
        finally:
            if reply.fd >= 0:
                os.close(reply.fd)
        await self._job.travel(self._process, server.process, len(reply.data))
        return reply.data

    async def _receive(self, server: _Server, reply: RangeReply, parts: Iterable[memoryview]) -> None:
        offset = reply.offset
        for part in parts:
            await self._job.travel(self._process, server.process, part.nbytes)
            offset += os.preadv(reply.fd, [part], offset)

    async def watch(self, address: str, question: bytes) -> None:
        await anyio.sleep_forever()

    async def close(self) -> None:
        """Does nothing: it ends with the job."""


class _Server:
    """The thread that answers for a process; the only other thread waits meanwhile."""

    def __init__(self, process: Process, answering: Callable[[], Answering]) -> None:
        self.process = process
        self._thread = ThreadPoolExecutor(1)
        self._context = answering()
        self._answer = self._thread.submit(self._context.__enter__).result()

    async def answer(self, question: bytes) -> RangeReply:
        """Return the answer, unless the process is dead by then."""
        reply = self._thread.submit(self._answer, question).result()
        if self.process.is_dead:
            if reply.fd >= 0:
                os.close(reply.fd)
            raise ConnectionResetError("it died")
        return reply

    def close(self) -> None:
        self._thread.submit(self._context.__exit__, None, None, None).result()
        self._thread.shutdown()


class Job:
    """One run."""

    def __init__(self, case: Case, hosts: str, count: int, waits: bool, trouble: str) -> None:
        self.case, self.hosts, self.count, self.waits, self.trouble = case, hosts, count, waits, trouble
        self.dice = random.Random(case.dice.getrandbits(32))
        self.clock = SimulatedClock()
        self.store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.serving: dict[str, _Server] = {}
        self.cut_off: set[str] = set()
        self.processes = [Process(self, rank, host) for rank, host in enumerate(hosts)]
        self.latency_s = self.dice.choice((1e-4, 1e-3, 0.1))
        self.bytes_per_s = {host: self.dice.choice((1e5, 1e7, 1e9)) for host in sorted(set(hosts))}
        self.error: BaseException | None = None

    async def travel(self, here: Process, there: Process, size: int) -> None:
        """Wait as long as bytes take; fail where an end is dead, and after a while where the link is cut."""
        rate = min(self.bytes_per_s[here.host], self.bytes_per_s[there.host])
        await anyio.sleep(self.latency_s * self.dice.random() + size / rate)
        if here.host != there.host and {here.host, there.host} & self.cut_off:
            await anyio.sleep(SILENCE_S)
            raise TimeoutError("the link is cut")
        if here.is_dead or there.is_dead:
            raise ConnectionResetError("an end of the connection died")

    def kill(self, processes: Iterable[Process]) -> None:
        for process in processes:
            process.kill()

    async def run(self) -> bool:
        """Run it; return whether it has ended by itself."""
        self.loop = asyncio.get_running_loop()
        with anyio.move_on_after(RUN_S) as limit:
            for process in self.processes:
                process.task = asyncio.create_task(self._be(process))
            tasks = [process.task for process in self.processes if process.task is not None]
            troubles = asyncio.create_task(self._make_trouble())
            pending = set(tasks)
            while pending and self.error is None and not any(process.is_dead for process in self.processes):
                _, pending = await asyncio.wait(pending, timeout=1)
            if pending:
                await asyncio.wait(pending, timeout=GRACE_S)
            troubles.cancel()
        killed = any(process.is_dead for process in self.processes)
        self.kill(self.processes)
        for _ in range(50):
            await asyncio.sleep(0.1)  # what is left of the dead ends
        for server in self.serving.values():
            server.close()
        assert not limit.cancelled_caught, "the run hangs"
        if self.error is not None and not killed and not self.trouble.startswith("cut"):
            raise self.error
        return not killed and self.error is None

    async def _be(self, process: Process) -> None:
        try:
            await self._train(process)
        except (CheckpointError, asyncio.CancelledError) as error:
            if not process.is_dead:
                self.error = self.error or error
                raise

    async def _train(self, process: Process) -> None:
        mount = str(self.case.cluster.mount(process.host))
        backend = PeerBackend("run", mount=mount, world=process.world, make_network=lambda *_: _Network(process))
        ckpt = aiockpt.Checkpointer(
            [
                aiockpt.Tier(
                    Retrying(backend, world=process.world), keep=KEEP, apart=lambda: process.host, network="127.0.0.1"
                )
            ],
            ranks=aiockpt.Ranks(process.rank, len(self.hosts), _Store(self, process)),
            world=process.world,
            limits=aiockpt.Limits(io=SMALL, deadlines=DEADLINES),
            on_error="raise",
        )
        await be_rank(self.case, ckpt, self.hosts, self.count, self.waits, process.call)

    async def _make_trouble(self) -> None:
        """Do what was drawn, at a time that was drawn."""
        some = self.dice.sample(self.processes, self.dice.randint(1, len(self.processes)))
        if self.trouble == "at a call":
            some[0].calls_left = self.dice.randint(1, 600)
            return
        await anyio.sleep(self.dice.choice((0.05, 0.5, 5.0)) * self.dice.random())
        host = some[0].host
        if self.trouble == "kill":
            self.kill(some)
        elif self.trouble == "kill all":
            self.kill(self.processes)
        elif self.trouble == "kill host":
            self.kill([process for process in self.processes if process.host == host])
        elif self.trouble.startswith("cut"):
            self.cut_off.add(host)
            if self.trouble == "cut for a while":
                await anyio.sleep(15 * self.dice.random())
                self.cut_off.clear()
            else:
                await anyio.sleep(20)
                self.kill(self.processes)


TROUBLES = ("none", "at a call", "at a call", "kill", "kill all", "kill host", "cut", "cut for a while")


def run_virtual_job(case: Case, hosts: str, count: int, waits: bool) -> bool:
    """Run a job on a virtual clock; return whether it has ended by itself."""
    trouble = case.dice.choice(TROUBLES)
    case.story.append(f"  trouble: {trouble}")
    job = Job(case, hosts, count, waits, trouble)
    return run_virtually(job.run, job.clock)


CAMPAIGN = Campaign(
    name="peer-schedules",
    counts="runs",
    prepare=lambda: in_folders(partial(look, run_job=run_virtual_job)),
    smoke_count=5,
    apart=True,
)
