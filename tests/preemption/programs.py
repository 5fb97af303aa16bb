"""Programs that train and are told to end, in processes of their own: `start` runs one, `Program` talks to it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

WAIT_S = 250

TRAIN = """
import hashlib, logging, os, signal, sys, threading, time
import torch, aiockpt

logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
root = sys.argv[1]
state = {"weight": torch.zeros(200, 100), "value": -1}
small = aiockpt.Limits(io=aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384))


def say(*words):
    print(*words, flush=True)


def train(step):
    state["weight"].fill_(step)
    state["value"] = step


def long_call():
    say("inside")
    hashlib.pbkdf2_hmac("sha256", b"long", b"call", 30_000_000)  # without the interpreter's lock, deaf to signals
    say("outside")

"""


class Program:
    """One that runs."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._log.read_text()

    def wait_said(self, words: str) -> None:
        """Wait until it prints a line of these *words*."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == words:
                return
        raise AssertionError(f"it never said {words!r}:\n{self.log}")

    def wait_logged(self, words: str, within_s: float = WAIT_S) -> float:
        """Wait until *words* are in its log; return the seconds."""
        began_s = time.monotonic()
        while words not in self.log:
            assert time.monotonic() - began_s < within_s, f"{words!r} is not in:\n{self.log}"
            assert self.process.poll() is None or words in self.log, f"ended with {self.process.poll()}:\n{self.log}"
            time.sleep(0.01)
        return time.monotonic() - began_s

    def send(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def send_group(self, number: int = signal.SIGTERM) -> None:
        """Send its whole process group a signal, as schedulers do."""
        os.killpg(self.process.pid, number)

    def stop(self, said: str = "go") -> int:
        """Send SIGTERM once the program has said that; return its status."""
        self.wait_said(said)
        self.send()
        return self.end()

    def end(self) -> int:
        """Wait for its end; return its status."""
        try:
            self.process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise AssertionError(f"it did not end:\n{self.log}") from None
        return self.process.returncode


def start_ranks(folder: Path, script: str, world_size: int) -> list[Program]:
    """Run *script* on all ranks of a job, whose process group is of gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    meet = "rank = int(os.environ['RANK'])\ntorch.distributed.init_process_group('gloo')\n"
    return [
        start(folder, meet + script, {**meeting, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}, f"log-{rank}")
        for rank in range(world_size)
    ]


def start(folder: Path, script: str, environment: Mapping[str, str] | None = None, log_name: str = "log") -> Program:
    """Run `TRAIN` and *script*, whose steps go to ``folder/run``."""
    log = folder / log_name
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", TRAIN + script, str(folder / "run")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
            env={**os.environ, **(environment or {})},
        )
    return Program(process, log)


def run_and_end(folder: Path, script: str, number: int = signal.SIGTERM, status: int = 75) -> Program:
    """Run *script* in *folder* and send it a signal where it says "go"; return it when it has ended with *status*."""
    program = start(folder, script)
    program.wait_said("go")
    program.send(number)
    assert program.end() == status, program.log
    return program
