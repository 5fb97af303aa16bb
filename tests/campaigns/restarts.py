"""Starts of a job over one store that outlives them: no note of another start is believed, no wrong step, none is lost.

A case draws a sequence of starts of some ranks each: they come late, end well, are killed, or hang until they are killed;
and a start may begin while processes of the one before still run, to be killed a moment later. A start that nobody kills
must end well, by what its own ranks have told each other.

The simulated one runs what ranks tell each other (incarnation, rounds, loads, membership) on a virtual clock, and the end
of each process as the kernel shows it. The real one forks processes that resume and save, over a TCPStore or a FileStore.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import anyio
import anyio.lowlevel
import torch
import torch.distributed

import aiockpt
from aiockpt.ranks.agreement import Agreement, LoadNotes
from aiockpt.ranks.rounds import Rounds
from aiockpt.runtime.incarnation import TOGETHER_S, Incarnation, Store
from aiockpt.runtime.notes import NoteBoard
from aiockpt.runtime.processes import Process
from aiockpt.state.geometry import Box
from aiockpt.state.shards import ShardedState, TensorShard
from tests.campaigns.campaign import Campaign, Outcomes, in_folders, noted
from tests.campaigns.sigkill import fork, store_apart
from tests.inline_process import TINY
from tests.simulated.virtual_time import run_virtually

DEADLINE_S = 120.0
Fate = Literal["clean", "killed", "hung", "absent"]


class Start:
    """What a seed says of one start.

    Attributes:
        fate: "hung": one rank stops at its call number *call*; "absent": one never comes. All are killed in the end.
        late_s: of each rank.
        lives_s: until it is killed, if it is not clean, and still lives.
        overlap_s: for how much of that the next start runs beside it.
    """

    def __init__(self, dice: random.Random, number: int, *, is_last: bool) -> None:
        self.number = number
        self.world_size = dice.randint(2, 4)
        self.fate: Fate = "clean" if is_last else dice.choice(("clean", "killed", "killed", "hung", "absent"))
        self.odd = dice.randrange(self.world_size)
        self.call = dice.randrange(3)
        self.late_s = [dice.choice((0.0, 0.1, 1.0)) * dice.random() for _ in range(self.world_size)]
        self.overlap_s = dice.choice((0.0, 0.0, 1.0)) * dice.random()
        self.lives_s = dice.uniform(TOGETHER_S + self.overlap_s if self.overlap_s else 0.0, 3.5)


def starts_of(seed: int) -> list[Start]:
    """Return the starts of a case; the last one is clean."""
    dice = random.Random(seed)
    count = dice.randint(2, 5)
    return [Start(dice, number, is_last=number == count - 1) for number in range(count)]


class _Process:
    """A simulated process: its store ends with it."""

    def __init__(self, case: _Simulated, start: Start, rank: int) -> None:
        self.case, self.start, self.rank = case, start, rank
        self.process = Process("host", 1000 + len(case.processes), "1")
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.outcome = "killed"
        self.token = f"{int(anyio.current_time() * 1000) + rank}-{start.number}-{rank}"
        case.processes.append(self)

    def __getattr__(self, verb: str) -> Any:
        if self.ended.is_set():
            raise RuntimeError("a process that has ended calls nothing")
        return getattr(self.case.store, verb)

    def kill(self) -> None:
        self.ended.set()
        self.scope.cancel()

    async def run(self) -> None:
        start, rank = self.start, self.rank
        with self.scope:
            await anyio.sleep(start.late_s[rank])
            if start.fate == "absent" and rank == start.odd:
                await anyio.sleep_forever()
            incarnation = Incarnation(cast(Store, self), "place", rank, start.world_size, self.token)
            rounds = Rounds(NoteBoard(incarnation), DEADLINE_S, f"secret of {start.number}")
            rounds.members._here = self.process
            rounds.members._ended = lambda process, _: self.case.processes[process.pid - 1000].ended.is_set()
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(rounds.register)
                    if rank == 0:
                        tasks.start_soon(rounds.admit)
                    await self._call_all(rounds)
                    tasks.cancel_scope.cancel()
                self.outcome = "done"
            except* aiockpt.CheckpointError as errors:
                self.outcome = f"start {start.number}, rank {rank}: {errors.exceptions[0]}"
        self.ended.set()

    async def _call_all(self, rounds: Rounds) -> None:
        start, rank = self.start, self.rank
        loads = LoadNotes(rounds)
        for call in range(3):
            if start.fate == "hung" and (rank, call) == (start.odd, start.call):
                await anyio.sleep_forever()
            if call == 1:
                save_round = rounds.begin(1)
                row = TensorShard("w", "F32", (start.world_size, 4), (Box((rank, 0), (1, 4)),), data=torch.zeros(4))
                await save_round.plan(ShardedState(tensors=(row,), alias={}, values={}, per_rank=None, structure=""))
                await save_round.release()
            else:
                await self._load(rounds, loads)
            await anyio.sleep(0.2)
        await rounds.depart("closed", failed=False)

    async def _load(self, rounds: Rounds, loads: LoadNotes) -> None:
        number, world_size = self.start.number, self.start.world_size
        async with loads.taking(rounds.begin_load()) as notes:
            await notes.post(f"call/{self.rank}", number)
            if self.rank == 0:
                keys = {rank: f"call/{rank}" for rank in range(world_size)}
                assert set((await notes.gather(keys, int, DEADLINE_S, "calls")).values()) == {number}
                await notes.post("choice", number)
            chosen = await notes.wait("choice", int, DEADLINE_S, "the choice")
            assert chosen == number, f"rank {self.rank} of start {number} believed start {chosen}"
            await Agreement(notes, "0", DEADLINE_S).on("fill", partial(anyio.sleep, 0.05))


class _Simulated:
    """All starts of a case, over one store."""

    def __init__(self, starts: list[Start]) -> None:
        self.starts = starts
        self.store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.processes: list[_Process] = []

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for start in self.starts:
                processes = [_Process(self, start, rank) for rank in range(start.world_size)]
                for process in processes:
                    tasks.start_soon(process.run)
                if start.fate == "clean":
                    for process in processes:
                        await process.ended.wait()
                        assert process.outcome == "done", process.outcome
                    continue
                await anyio.sleep(start.lives_s - start.overlap_s)
                tasks.start_soon(self._kill, processes, start.overlap_s)
                if not start.overlap_s:
                    await anyio.lowlevel.checkpoint()

    async def _kill(self, processes: list[_Process], after_s: float) -> None:
        if after_s:
            await anyio.sleep(after_s)
        for process in processes:
            process.kill()


def simulate(seed: int) -> Outcomes:
    """Run one case on a virtual clock."""
    starts = starts_of(seed)
    with noted(lambda: "\n".join(f"{vars(start)}" for start in starts)):
        run_virtually(_Simulated(starts).run)
    return Counter({"sequences, with two starts alive" if any(s.overlap_s for s in starts) else "sequences": 1})


# Real processes


def train(place: Path, start: Start, rank: int, store: Any) -> int:
    """Resume, compare what was loaded, and save a few steps; return 0."""
    time.sleep(start.late_s[rank])
    if start.fate == "absent" and rank == start.odd:
        time.sleep(DEADLINE_S)
    weight = torch.full((37, 31), -1.0)
    state: dict[str, Any] = {"weight": weight, "value": -1}
    with aiockpt.Checkpointer(
        place / "run", ranks=aiockpt.Ranks(rank, start.world_size, store()), limits=aiockpt.Limits(io=TINY)
    ) as ckpt:
        if start.fate == "hung" and rank == start.odd and not start.call:
            time.sleep(DEADLINE_S)
        first = ckpt.resume(state)
        assert state["value"] == first - 1
        assert torch.equal(weight, torch.full_like(weight, first - 1))
        with (place / f"resumed-{start.number}").open("a") as file:
            file.write(f"{first} ")
        for step in range(first, first + 3):
            if start.fate == "hung" and rank == start.odd and step - first >= start.call:
                time.sleep(DEADLINE_S)
            weight.fill_(step)
            state["value"] = step
            ckpt.save(step, state).result()
    return 0


def run_all(place: Path, starts: list[Start], kind: str) -> None:
    """Run the starts one after the other, over one store."""
    with store_apart() as port:

        def open_store() -> Any:
            if kind == "TCPStore":
                return torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
            return torch.distributed.FileStore(str(place / "store"), 100)  # type: ignore[attr-defined]

        _run_over(place, starts, open_store)


def _run_over(place: Path, starts: list[Start], open_store: Callable[[], Any]) -> None:
    alive: list[int] = []
    try:
        for start in starts:
            ranks = [fork(partial(train, place, start, rank, open_store)) for rank in range(start.world_size)]
            if alive:
                time.sleep(starts[start.number - 1].overlap_s)
                end_all(alive)
            alive = list(ranks)
            if start.fate != "clean":
                time.sleep(start.lives_s)
                if not start.overlap_s:
                    end_all(alive)
                continue
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
            alive.clear()
            assert codes == [0] * start.world_size, f"start {start.number}: {codes}"
            resumed = (place / f"resumed-{start.number}").read_text().split()
            assert len(resumed) == start.world_size
            assert len(set(resumed)) == 1, f"start {start.number} resumed from {resumed}"
    finally:
        end_all(alive)


def end_all(pids: list[int]) -> None:
    """Kill processes, and wait for them."""
    while pids:
        pid = pids.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def look(seed: int, place: Path) -> Outcomes:
    """Run one case of real processes."""
    starts, kind = starts_of(seed), ("TCPStore", "FileStore")[seed % 2]
    with noted(lambda: "\n".join(f"{vars(start)}" for start in starts)):
        run_all(place, starts, kind)
    return Counter({f"sequences over a {kind}": 1})


CAMPAIGN = Campaign(name="restarts", counts="sequences", prepare=lambda: simulate, smoke_count=30)
PROCESSES = Campaign(
    name="restarts-processes", counts="sequences", prepare=lambda: in_folders(look), smoke_count=2, apart=True
)
