"""Restarts of two ranks under ``aiockpt run``: one is killed again and again, or hangs, while every step is saved to memory.

Timed from the launcher's own history: a start to its first step; the kill to the first new step, and what of that is beyond
such a start; the last progress to the notice of a hang, beyond ten median steps. Lost steps and ETTR are counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import aiockpt
from aiockpt.launch.detector import STEPS
from aiockpt.launch.history import NodeRun, read_launches
from benchmarks.visit import Outcome, Turn

APART = 40
"""Steps from one fault to the next."""
STEP_S = 0.05
HANG_S = "12"
DEADLINE_S = 900.0


def recovery(turn: Turn, outcome: Outcome) -> None:
    """Measure each kind of fault in one run with as many faults as repetitions."""
    for kind in turn.contenders:
        folder = Path(turn.folder) / kind
        folder.mkdir()
        launch = _run(folder, kind, 1 if turn.smoke else turn.repetitions)
        starts = [attempt.first_step_s for attempt in launch.attempts]
        ended = launch.attempts[:-1]
        after = [
            attempt.decide_s + attempt.restart_s + first_s for attempt, first_s in zip(ended, starts[1:], strict=True)
        ]
        samples = {
            "start_s": starts,
            "restarted_s": after,
            "beyond_s": [each - starts[0] for each in after],
            "lost_count": [float(attempt.lost_steps) for attempt in ended],
            "ettr_fraction": [launch.ettr],
        }
        if kind == "hang":
            samples["beyond_steps_s"] = [stall.quiet_s - STEPS * stall.median_s for stall in launch.stalls]
        outcome.add(turn, kind, samples)


def _run(folder: Path, kind: str, faults: int) -> NodeRun:
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", "run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "99", "--hang-s", HANG_S, "--log-dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with TemporaryDirectory(dir="/dev/shm", prefix="aiockpt-bench-") as memory:
        command += ["-m", "benchmarks.measure.recovery", str(folder), memory, kind, str(faults)]
        subprocess.run(command, env=environment, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)
    (launch,) = (each for sub in folder.iterdir() if sub.is_dir() for each in read_launches(sub))
    return launch


def train(folder: Path, place: str, kind: str, faults: int) -> None:
    """Be one rank: each fault comes once, `APART` steps after the one before."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    with aiockpt.Checkpointer([aiockpt.Tier(place, keep=2)], every=1) as ckpt:
        for step in range(ckpt.resume({"model": model}), APART * faults + 10):
            time.sleep(STEP_S)
            dist.all_reduce(torch.ones(1024))
            mark = folder / f"fault-{step}"
            if dist.get_rank() == 1 and 0 < step <= APART * faults and step % APART == 0 and not mark.exists():
                mark.touch()
                if kind == "kill":
                    os.kill(os.getpid(), 9)
                time.sleep(DEADLINE_S)
            ckpt.step(step, {"model": model})
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
