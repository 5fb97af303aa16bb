"""Processes that measure: a module that is run with a task, and prints what it has found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import msgspec


def measure_in_processes(
    module: str, tasks: Iterable[msgspec.Struct], timeout_s: float, **environment: str
) -> list[Any]:
    """Run ``python -m benchmarks.measure.MODULE TASK`` for each of *tasks* at once; return what they print, as JSON.

    Raises:
        CalledProcessError: one has failed.
        TimeoutExpired: one has not ended in time; then all are killed.
    """
    command = [sys.executable, "-m", f"benchmarks.measure.{module}"]
    running = [
        subprocess.Popen(
            [*command, msgspec.json.encode(task).decode()],
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        for task in tasks
    ]
    try:
        printed = [process.communicate(timeout=timeout_s)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return [msgspec.json.decode(one) for one in printed]
