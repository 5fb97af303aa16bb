"""A program in Python, run to its end."""

import subprocess
import sys
from typing import Any


def run_python(*arguments: object, status: int | None = 0, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python of this environment, and return its output as text; it has 250 s, and must exit with *status*.

    Args:
        arguments: of the interpreter, as ``"-c", script`` or ``"-m", module``, and then of the program.
        status: minus the number of a signal that kills it; None where any will do.
        how: for `subprocess.run`.
    """
    command = [sys.executable, *map(str, arguments)]
    usual = {"capture_output": True, "text": True, "timeout": 250, "check": False}
    done = subprocess.run(command, **usual | how)
    assert status in (None, done.returncode), f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done
