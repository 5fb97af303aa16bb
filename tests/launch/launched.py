"""Runs of ``aiockpt run`` in real processes, and what they leave."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from aiockpt.launch.history import NodeRun, read_launches
from aiockpt.launch.torchrun import FOLDER
from tests.watch import until

TRAINER = Path(__file__).with_name("trainer.py")
COMMAND = (sys.executable, "-m", "aiockpt.tools.cli.main", "run")
TIMEOUT_S = 250


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


class Launched:
    """A launcher that has ended: its status and output, and the history in the folder that it ran in."""

    def __init__(self, folder: Path, status: int, output: str) -> None:
        self.folder, self.status, self.output = folder, status, output

    @property
    def launch(self) -> NodeRun:
        (launch,) = [each for folder in (self.folder / FOLDER).iterdir() for each in read_launches(folder)]
        return launch

    def evidence(self, name: str, attempt: int = 0) -> str:
        (path,) = (self.folder / FOLDER).glob(f"*/attempt-{attempt}/{name}.txt")
        return path.read_text()

    def starts(self, rank: int = 0) -> list[int]:
        """Return the steps from which the starts of *rank* trained."""
        lines = (self.folder / f"log-{rank}").read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("start")]


def start(folder: Path, arguments: Sequence[object], **more: str) -> subprocess.Popen[str]:
    """Start a launcher in *folder*."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_nodes(folder: Path, each: Sequence[dict[str, str]], *arguments: object) -> list[subprocess.Popen[str]]:
    """Start a launcher with its environment for *each* node, in its own folder; the first has the rendezvous's store."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    own = ["--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"]
    nodes = []
    for number, more in enumerate(each):
        (folder / str(number)).mkdir()
        nodes.append(start(folder / str(number), [*own, *arguments], HERE=str(folder), **more))
        until(lambda: _listens(port), "the store of the rendezvous")
    return nodes


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex(("localhost", port))


def finish(folder: Path, process: subprocess.Popen[str]) -> Launched:
    """Wait for the end of a launcher; one that does not end is told to, with its trainers, and so if the wait is stopped."""
    with process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            process.terminate()
            output, _ = process.communicate(timeout=60)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise AssertionError(f"the launcher did not end:\n{output[-4000:]}") from None
    return Launched(folder, process.returncode, output)


def run(folder: Path, ranks: int, faults: str, *options: str, steps: int = 12, **more: str) -> Launched:
    """Run the trainer on *ranks* of one node to the end."""
    own = ["--standalone", "--nproc-per-node", ranks, *options]
    return finish(folder, start(folder, [*own, TRAINER, folder / "place", steps, faults], **more))
