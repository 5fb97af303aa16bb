"""Hosts as the kernel knows them: each a mount namespace with a memory of its own, and ranks that are processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

ALLOWED = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
)
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not ALLOWED, reason="namespaces of mounts are for root"),
]
RANK = """
import json, os, signal, sys, torch, torch.distributed
import aiockpt
rank, size, port, saves = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
store = torch.distributed.TCPStore("127.0.0.1", port, size, is_master=False)
def made(value):
    weight = torch.nn.Parameter(torch.full((700, 33), float(value)), requires_grad=False)
    return {"weight": weight, "own": aiockpt.per_rank(rank)}
with aiockpt.Checkpointer([aiockpt.Tier("peer://hosts-apart")], ranks=aiockpt.Ranks(rank, size, store)) as ckpt:
    state = {**made(0), "own": None}
    step = ckpt.resume({"weight": state["weight"]})
    print(json.dumps([step, float(state["weight"].sum())]), flush=True)
    for number in range(step, step + saves):
        save = ckpt.save(number, {"weight": made(number)["weight"]})
        save.result(100)
        save.replicated().result(100)
    if saves:
        store.add("saved", 1)
        while store.add("saved", 0) < size:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
"""


class Hosts:
    """Hosts with a memory each, and a store that outlives their processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "rank.py").write_text(RANK)

    def add(self, name: str) -> None:
        """Boot a host, or boot it again: its memory is empty."""
        memory = self._folder / name
        memory.mkdir(exist_ok=True)
        subprocess.run(["umount", str(memory)], capture_output=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(memory)], check=True)

    def close(self) -> None:
        for memory in self._folder.iterdir():
            subprocess.run(["umount", str(memory)], capture_output=True)

    def run(self, hosts: str, saves: int) -> list[Any]:
        """Start a rank for each letter on its host; return what each has loaded. Those that save kill themselves then."""
        store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        ranks = []
        for rank, host in enumerate(hosts):
            python = [sys.executable, str(self._folder / "rank.py")]
            command = f'mount --bind {self._folder / host} /dev/shm && exec "$@"'
            numbers = [str(rank), str(len(hosts)), str(store.port), str(saves)]
            ranks.append(
                subprocess.Popen(
                    ["unshare", "-m", "sh", "-c", command, "sh", *python, *numbers],
                    stdout=subprocess.PIPE,
                    env=environment,
                    cwd=self._folder,
                )
            )
        said = [json.loads(one.communicate(timeout=300)[0]) for one in ranks]
        assert {one.returncode for one in ranks} == {-9 if saves else 0}
        return said


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    for name in "abc":
        hosts.add(name)
    yield hosts
    hosts.close()


def test_a_run_killed_with_its_processes_and_hosts_goes_on(hosts: Hosts) -> None:
    whole = 700 * 33
    assert hosts.run("aabb", saves=3) == [[0, 0.0]] * 4
    assert hosts.run("aabb", saves=1) == [[3, 2.0 * whole]] * 4  # all processes were killed
    hosts.add("b")
    assert hosts.run("aabb", saves=1) == [[4, 3.0 * whole]] * 4  # a host was replaced
    hosts.add("a")
    assert hosts.run("bcc", saves=0) == [[5, 4.0 * whole]] * 3  # the other one was, that of rank 0, and c came
