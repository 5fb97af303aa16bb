"""A process that has imported what takes long; each run of pytest is a fork of it.

Reads requests from standard input, a JSON object a line: the *arguments* of pytest, the file that its *output* goes to, and
the *limit_s* after which it and all that it started is killed. Answers each with a line: the exit status, negative when it
was killed. Nothing of the tree under test may be imported here: each fork reads that anew.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module

import pytest

SLOW = ("numpy", "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "msgspec", "asyncio")
"""None of them starts a thread, which a fork would not have."""


def run(arguments: list[str], output: str, limit_s: float) -> int:
    """Run pytest in a fork; return its exit status."""
    pid = os.fork()
    if not pid:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        try:
            status = int(pytest.main(arguments))
        except BaseException:  # noqa: BLE001  a fork must not go on as its parent
            status = int(pytest.ExitCode.INTERNAL_ERROR)
        sys.stdout.flush()
        os._exit(status)
    until_s = time.monotonic() + limit_s
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until_s:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its tests left behind, or itself
    return os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for name in SLOW:
        with suppress(ImportError):
            import_module(name)
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)  # noqa: T201
