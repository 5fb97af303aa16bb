"""The check of one node: memory, disk, loopback and devices, against the figures of its last healthy check and its peers'.

A node is named when a probe fails or ends its process, or is more than `FACTOR` times slower. The report is a JSON file that
schedulers can read; it keeps the figures of the last healthy check.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import torch

from aiockpt.format.document import described
from aiockpt.launch.telling import name_status
from aiockpt.runtime.progress import write_whole
from aiockpt.units import speed

UNHEALTHY = 5
"""The exit status of a launcher, or of ``doctor --node``, whose node should not be used."""
PEER_FAILED = 6
"""That of a rank in the check of all together which others have left."""
FACTOR = 2.0
REPEATS = 3
CHECK_S = 600.0
"""For the check of a node, after which one of its devices hangs."""
MEMORY_BYTES, DISK_BYTES, LOOPBACK_BYTES = 128 << 20, 64 << 20, 64 << 20
MATMUL_SIZE = 4096


class NodeReport(msgspec.Struct, kw_only=True):
    """What a check has found.

    Attributes:
        figures: probe → bytes a second; of ``matmul`` operations a second.
        reference: those of the last healthy check.
        problems: why the node should not be used; empty when it is healthy.
    """

    host: str
    time_s: float
    figures: dict[str, float]
    reference: dict[str, float] = {}
    problems: list[str] = []
    healthy: bool = True


def check_node_apart(folder: Path) -> NodeReport:
    """Call `check_node`; where there are devices in another process, which frees them: they may be for one alone."""
    if not torch.cuda.is_available():
        return check_node(folder)
    program = "import sys; from aiockpt.launch import node_check; node_check.main(sys.argv[1])"
    checking = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
    try:
        output, _ = checking.communicate(timeout=CHECK_S)
        if not checking.returncode:
            return _decoder.decode(output.splitlines()[-1])
        problem = f"the check ended with {name_status(checking.returncode)}"
    except subprocess.TimeoutExpired:
        checking.kill()  # and not waited for: it may stand in the kernel
        problem = f"the check has not ended after {CHECK_S:.0f} s: a device hangs, perhaps"
    report = _begin_report(folder)
    report.problems.append(problem)
    _keep_report(folder, report)
    return report


def main(folder: str) -> None:
    """Check this node, and print the report."""
    sys.stdout.write(f"\n{msgspec.json.encode(check_node(Path(folder))).decode()}\n")


def check_node(folder: Path) -> NodeReport:
    """Probe this node, its disk in *folder*, compare it with its last healthy check, and write the report."""
    report = _begin_report(folder)
    for name, probe in _probes(folder).items():
        try:
            # The best: another program may have the machine for a moment, and a slow node is always slow.
            report.figures[name] = max(probe() for _ in range(REPEATS))
        except Exception as error:  # noqa: BLE001  whatever a probe raises, the node fails it
            report.problems.append(f"{name}: failed: {error}")
    report.problems += find_slower(report.figures, report.reference, "its last check")
    _keep_report(folder, report)
    return report


def _begin_report(folder: Path) -> NodeReport:
    """Return a report with the figures of the last healthy check."""
    report = NodeReport(host=socket.gethostname(), time_s=time.time(), figures={})
    with suppress(OSError, msgspec.DecodeError):
        before = _decoder.decode(report_path(folder, report.host).read_bytes())
        report.reference = before.figures if before.healthy else before.reference
    return report


def _keep_report(folder: Path, report: NodeReport) -> None:
    try:
        write_report(folder, report)
    except OSError as error:
        report.problems.append(f"the report cannot be written: free space in {folder}, or name another one: {error}")
        report.healthy = False


def report_path(folder: Path, host: str) -> Path:
    """Return where the report of *host* lies."""
    return folder / f"check-{host}.json"


def write_report(folder: Path, report: NodeReport) -> None:
    """Write the report, whole or not at all: the one before has the figures to compare with.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report.healthy = not report.problems
    write_whole(report_path(folder, report.host), msgspec.json.format(msgspec.json.encode(report)))


def read_report(folder: Path, host: str) -> NodeReport:
    """Return the report of *host*."""
    return _decoder.decode(report_path(folder, host).read_bytes())


def find_slower(figures: Mapping[str, float], others: Mapping[str, float], whose: str) -> list[str]:
    """Return a line for each figure that is more than `FACTOR` times slower than the same of *others*."""
    return [
        f"{name}: {in_words(name, figure)}, {others[name] / figure:.1f} times slower than {whose}"
        for name, figure in figures.items()
        if name in others and figure * FACTOR < others[name]
    ]


def in_words(name: str, figure: float) -> str:
    """Return a figure with its unit."""
    return f"{figure / 1e12:.2f} TFLOP/s" if "matmul" in name else speed(figure)


def _probes(folder: Path) -> dict[str, Callable[[], float]]:
    probes: dict[str, Callable[[], float]] = {
        "memory copy": _copy_memory,
        "disk write": lambda: _write(folder),
        "loopback": lambda: anyio.run(_send_to_self),
    }
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        probes[f"gpu {number} copy"] = lambda number=number: _copy_to_device(number)  # type: ignore[misc]
        probes[f"gpu {number} matmul"] = lambda number=number: _multiply(number)  # type: ignore[misc]
    return probes


def _copy_memory() -> float:
    source = torch.ones(MEMORY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    began_s = time.perf_counter()
    target.copy_(source)
    taken_s = time.perf_counter() - began_s
    if not bool((target[:: 1 << 12] == 1).all()):
        raise ValueError("the copy differs")
    return MEMORY_BYTES / taken_s


def _write(folder: Path) -> float:
    folder.mkdir(parents=True, exist_ok=True)
    block = memoryview(os.urandom(1 << 20))
    with tempfile.TemporaryFile(dir=folder) as file:
        began_s = time.perf_counter()
        for _ in range(DISK_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - began_s)


async def _send_to_self() -> float:
    """Send bytes over TCP to this process, and compare their number."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        received = 0

        async def receive(stream: anyio.abc.SocketStream) -> None:
            nonlocal received
            async with stream:
                async for data in stream:
                    received += len(data)
            tasks.cancel_scope.cancel()

        block = bytes(1 << 20)
        began_s = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, receive)
            async with await anyio.connect_tcp("127.0.0.1", port) as sending:
                for _ in range(LOOPBACK_BYTES >> 20):
                    await sending.send(block)
    if received != LOOPBACK_BYTES:
        raise ValueError(f"{received} of {LOOPBACK_BYTES} bytes came")
    return LOOPBACK_BYTES / (time.perf_counter() - began_s)


def _copy_to_device(number: int) -> float:
    source = torch.ones(MEMORY_BYTES, dtype=torch.uint8, pin_memory=True)
    taken_s = _time_on_device(number, lambda: source.to(f"cuda:{number}", non_blocking=True))
    return MEMORY_BYTES / taken_s


def _multiply(number: int) -> float:
    ones = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=f"cuda:{number}")
    if float((ones @ ones)[-1, -1]) != MATMUL_SIZE:
        raise ValueError("a product of matrices is wrong")
    return 2.0 * MATMUL_SIZE**3 / _time_on_device(number, lambda: ones @ ones)


def _time_on_device(number: int, work: Callable[[], object]) -> float:
    work()
    torch.cuda.synchronize(number)
    began_s = time.perf_counter()
    work()
    torch.cuda.synchronize(number)
    return time.perf_counter() - began_s


_decoder = msgspec.json.Decoder(described(NodeReport))
