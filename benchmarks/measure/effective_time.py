"""The effective time (ETTR) of one job that loses a process now and then, under three ways to save it.

Two ranks train the same steps, and one is killed at the same ones: under ``aiockpt run``, with a save of each step into
memory; and under ``torchrun`` with ``torch.save``, or DCP's ``async_save``, every `EVERY` steps. The effective time is that
of the steps, each counted once, ÷ all time from the launch to the end. Groups give up after `GROUP_S`: without that a
restart of torchrun, whose store has stale addresses, may hang for half an hour.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import aiockpt
from benchmarks.visit import Outcome, Turn

STEP_S = 0.25
APART = 75
"""Steps from one kill to the next."""
EVERY = 50
"""Steps between saves to disk: with a kill each minute or so, and a save that holds training for a second."""
GROUP_S = 60
DEADLINE_S = 1500.0


def effective_time(turn: Turn, outcome: Outcome) -> None:
    """Run the job once for each contender; as many kills as repetitions."""
    kills = 0 if turn.smoke else turn.repetitions
    for name in turn.contenders:
        folder = Path(turn.folder) / name.replace(" ", "-")
        folder.mkdir()
        begun_s = time.monotonic()
        _run(folder, name, kills, turn.size_bytes)
        wall_s = time.monotonic() - begun_s
        lost = sum(int(line) for line in (folder / "again").read_text().split())
        samples = {
            "wall_s": [wall_s],
            "lost_count": [float(lost)],
            "ettr_fraction": [_steps(kills) * STEP_S / wall_s],
        }
        outcome.add(turn, name, samples)


def _steps(kills: int) -> int:
    return APART * kills + 25


def _run(folder: Path, name: str, kills: int, size_bytes: int) -> None:
    ours = ["aiockpt.tools.cli.main", "run", "--log-dir", str(folder)]
    command = [sys.executable, "-m", *(ours if name == "aiockpt" else ["torch.distributed.run"])]
    command += ["--standalone", "--nproc-per-node", "2", "--max-restarts", "99"]
    with TemporaryDirectory(dir="/dev/shm", prefix="aiockpt-bench-") as memory:
        command += ["-m", "benchmarks.measure.effective_time", str(folder), memory, name, str(kills), str(size_bytes)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, env=environment, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)


class TorchSave:
    """``torch.save`` of each rank's part, renamed when whole."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.pt"

    def resume(self, state: dict[str, Any]) -> int:
        """Fill *state*; return the next step."""
        found = self._path.exists()
        next_step = torch.tensor(torch.load(self._path)["step"] + 1 if found else 0)
        dist.all_reduce(next_step, dist.ReduceOp.MIN)
        if found:
            state["weight"].copy_(torch.load(self._path)["weight"])
        return int(next_step)

    def step(self, step: int, state: dict[str, Any]) -> None:
        """Save when it is due."""
        if step % EVERY == 0:
            whole = self._path.with_suffix(".new")
            torch.save({"step": step, **state}, whole)
            whole.replace(self._path)

    def close(self) -> None:
        """Nothing is under way."""


class DCPAsync:
    """``async_save`` of DCP to a folder for each step; the newest whole one is loaded."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder / "dcp", rank
        self._save: Any = None

    def _mine(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"{name}-{self._rank}": value for name, value in state.items()}

    def resume(self, state: dict[str, Any]) -> int:
        """Fill *state*; return the next step."""
        whole = sorted(int(path.parent.name) for path in self._folder.glob("*/.metadata"))
        if not whole:
            return 0
        load(self._mine(state), checkpoint_id=self._folder / str(whole[-1]))
        return whole[-1] + 1

    def step(self, step: int, state: dict[str, Any]) -> None:
        """Save when it is due."""
        if step % EVERY == 0:
            self.close()
            self._save = async_save(self._mine(state), checkpoint_id=self._folder / str(step))

    def close(self) -> None:
        """Wait for the save that is under way."""
        if self._save is not None:
            self._save.result()


class Ours:
    """Each step into the memory of the host."""

    def __init__(self, place: str) -> None:
        self._ckpt = aiockpt.Checkpointer([aiockpt.Tier(place, keep=2)], every=1)

    def resume(self, state: dict[str, Any]) -> int:
        """Fill *state*; return the next step."""
        return self._ckpt.resume(state)

    def step(self, step: int, state: dict[str, Any]) -> None:
        """Save it."""
        self._ckpt.step(step, state)

    def close(self) -> None:
        """Wait for the saves that are under way."""
        self._ckpt.close()


def train(folder: Path, memory: str, name: str, kills: int, size_bytes: int) -> None:
    """Be one rank: each kill comes once, `APART` steps after the one before."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_S))
    rank = dist.get_rank()
    saver: Ours | TorchSave | DCPAsync
    if name == "aiockpt":
        saver = Ours(memory)
    else:
        saver = TorchSave(folder, rank) if name == "torch.save" else DCPAsync(folder, rank)
    state = {"weight": torch.zeros(size_bytes // 8)}
    step, reached = saver.resume(state), folder / "reached"
    if rank == 0:
        again = max(int(reached.read_text()) + 1 - step, 0) if reached.exists() else 0
        with (folder / "again").open("a") as file:
            file.write(f"{again}\n")
    while step < _steps(kills):
        time.sleep(STEP_S)
        dist.all_reduce(torch.ones(1024))
        state["weight"] += 1
        if rank == 0:
            reached.write_text(str(step))
        mark = folder / f"fault-{step}"
        if rank == 1 and 0 < step <= APART * kills and step % APART == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)
        saver.step(step, state)
        step += 1
    saver.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
