"""Many ranks as real processes, started soon: one process imports torch and all else, and the ranks are its forks.

    python -m tests.ranks.forked MODULE WORLD_SIZE FOLDER

calls ``run_rank(rank, world_size, folder)`` of MODULE in as many processes, and prints how each ended, as JSON. What rank
n says is in FOLDER/n.log.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_forked(module: str, world_size: int, folder: Path, timeout_s: float) -> list[int | None]:
    """Run *module* on *world_size* ranks until all have ended; return their exit codes, or None of who had not in time."""
    command = [sys.executable, "-m", "tests.ranks.forked", module, str(world_size), str(folder)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            codes: list[int | None] = json.loads(_last_line(parent.communicate(timeout=timeout_s)[0]) or "null")
        except subprocess.TimeoutExpired:
            codes = [None] * world_size
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
    return codes


def _last_line(printed: bytes) -> bytes:
    """Return the last line: what is imported may have printed others."""
    return printed.rpartition(b"\n")[2]


def outcomes_of(module: str, world_size: int, folder: Path, timeout_s: float) -> list[dict[str, str]]:
    """Run *module* on *world_size* ranks; return what each has left in FOLDER/RANK.json, nothing where it left none."""
    folder.mkdir(exist_ok=True)
    run_forked(module, world_size, folder, timeout_s)
    found = [folder / f"{rank}.json" for rank in range(world_size)]
    return [json.loads(one.read_text()) if one.exists() else {} for one in found]


def _main(module: str, world_size: int, folder: Path) -> None:
    run_rank: Callable[[int, int, Path], None] = import_module(module).run_rank
    import_module("torch._dynamo")  # the first optimizer that is made would
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads is not to be forked"
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_logged, args=(run_rank, rank, world_size, folder)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.stdout.write("\n" + json.dumps([process.exitcode for process in ranks]))


def _logged(run_rank: Callable[[int, int, Path], None], rank: int, world_size: int, folder: Path) -> None:
    with (folder / f"{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    run_rank(rank, world_size, folder)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
