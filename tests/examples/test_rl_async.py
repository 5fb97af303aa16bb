"""The asynchronous example: trainer and rollout workers are killed at random, and learn all the same."""

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from aiockpt.tools.examples.rl_async import MOST_STALE

MODULE = "aiockpt.tools.examples.rl_async"
DEADLINE_S = 250


def start(arguments: tuple[object, ...], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", MODULE, *map(str, arguments)], stderr=file)


def test_trainer_and_workers_are_killed_at_random_and_the_policy_is_learned(tmp_path: Path) -> None:
    run, log, dice = tmp_path / "run", tmp_path / "log", random.Random(3)
    run.mkdir()
    roles: dict[str, tuple[object, ...]] = {
        "train": ("train", run),
        "first": ("rollout", run, tmp_path / "first"),
        "second": ("rollout", run, tmp_path / "second"),
    }
    running = {name: start(how, log) for name, how in roles.items()}
    kills, until_s = 0, time.monotonic() + DEADLINE_S
    try:
        while running["train"].poll() is None:
            assert time.monotonic() < until_s, log.read_text()[-4000:]
            time.sleep(0.1)
            if kills < 6 and len(re.findall("step [0-9]+: reward", log.read_text())) > 4 * kills + 4:
                victim = dice.choice(list(roles))
                running[victim].send_signal(signal.SIGKILL)
                running[victim].wait()
                running[victim] = start(roles[victim], log)
                kills += 1
        assert running["train"].returncode == 0, log.read_text()[-4000:]
        for name in ("first", "second"):
            assert running[name].wait(120) == 0, log.read_text()[-4000:]
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    assert kills >= 4
    trained = re.findall(r"step (\d+): reward ([\d.]+), played with step (\d+)", log.read_text())
    assert all(0 < int(step) - int(played) <= MOST_STALE for step, _, played in trained)
    assert sum(float(reward) for _, reward, _ in trained[-3:]) / 3 > 0.6
