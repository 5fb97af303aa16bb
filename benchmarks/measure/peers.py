"""Saves into the memory of two hosts and of each other: two processes, each with a folder of /dev/shm for its host's memory.

Timed are the call, the time until each rank's part is in its host's memory, and until it is in the other's, too. The floor
moves the same bytes both ways at once over loopback, from a file in memory into memory, and nothing else.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed

import aiockpt
from aiockpt.backends.peer import PeerBackend
from benchmarks.measure.processes import measure_in_processes
from benchmarks.visit import Outcome, Turn

MEMORY = Path("/dev/shm")
TENSORS = 16
DEADLINE_S = 300.0
FIRST = 4
"""Saves that are not counted: from the next one on, each is written into the memory of a step that was removed."""


class Part(msgspec.Struct, frozen=True):
    """The task of one rank."""

    rank: int
    port: int
    mount: str
    size_bytes: int
    repetitions: int


def peers(turn: Turn, outcome: Outcome) -> None:
    """Measure the floor and the saves of two ranks, each with half of the state."""
    folder = MEMORY / f"aiockpt-bench-{os.getpid()}"
    folder.mkdir(mode=0o700)
    half = turn.size_bytes // 2
    try:
        if "floor: loopback" in turn.contenders:
            seconds = [_cross(folder, half) for _ in range(turn.repetitions + 1)][1:]
            outcome.add(turn, "floor: loopback", {"replicated_s": seconds})
        if "aiockpt" in turn.contenders:
            outcome.add(turn, "aiockpt", _save(folder, half, turn.repetitions))
    finally:
        shutil.rmtree(folder)


def _cross(folder: Path, size: int) -> float:
    """Return the seconds for *size* bytes each way at once."""
    paths = [folder / name for name in "ab"]
    for path in paths:
        path.write_bytes(os.urandom(1 << 20) * (size >> 20))
    memories = [bytearray(size) for _ in paths]
    threads = []
    begun_s = time.perf_counter()
    for path, memory in zip(paths, memories, strict=True):
        with socket.create_server(("127.0.0.1", 0)) as server:
            giver = socket.create_connection(server.getsockname())
            taker, _ = server.accept()
        threads += [
            threading.Thread(target=_give, args=(giver, path)),
            threading.Thread(target=_take, args=(taker, memory)),
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun_s


def _give(connection: socket.socket, path: Path) -> None:
    with connection, path.open("rb") as file:
        connection.sendfile(file)


def _take(connection: socket.socket, memory: bytearray) -> None:
    view, filled = memoryview(memory), 0
    with connection:
        while filled < len(view):
            filled += connection.recv_into(view[filled:])


def _save(folder: Path, half: int, repetitions: int) -> dict[str, list[float]]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    parts = []
    for rank in range(2):
        mount = folder / f"host-{rank}"
        mount.mkdir(mode=0o700)
        parts.append(Part(rank, store.port, str(mount), half, repetitions))
    answers = measure_in_processes("peers", parts, DEADLINE_S, OMP_NUM_THREADS="1")
    return {
        name: [max(both) for both in zip(*(answer[name] for answer in answers), strict=True)] for name in answers[0]
    }


def be_rank(part: Part) -> dict[str, list[float]]:
    """Save `FIRST` times more than is counted; return the seconds of each that is."""
    store: Any = torch.distributed.TCPStore("127.0.0.1", part.port, 2, False)  # type: ignore[attr-defined]
    state = {"own": aiockpt.per_rank({f"t{i}": torch.randn(part.size_bytes // 4 // TENSORS) for i in range(TENSORS)})}
    tier = aiockpt.Tier(PeerBackend("bench", mount=part.mount), keep=1, network="127.0.0.1")
    times: dict[str, list[float]] = {"held_s": [], "in_memory_s": [], "replicated_s": []}
    with aiockpt.Checkpointer([tier], ranks=aiockpt.Ranks(part.rank, 2, store)) as ckpt:
        ckpt.warm_up(state).result()
        for step in range(part.repetitions + FIRST):
            begun_s = time.perf_counter()
            save = ckpt.save(step, state)
            held_s = time.perf_counter() - begun_s
            save.in_memory().result()
            in_memory_s = time.perf_counter() - begun_s
            save.replicated().result()
            if step >= FIRST:
                times["held_s"].append(held_s)
                times["in_memory_s"].append(in_memory_s)
                times["replicated_s"].append(time.perf_counter() - begun_s)
            time.sleep(0.2)
    return times


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(be_rank(msgspec.json.decode(sys.argv[1], type=Part))))
