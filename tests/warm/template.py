"""The process that programs of tests are forked from: it has imported what they import, and runs nothing itself.

A request is its length, the standard files and those to pass on, and JSON (`tests.warm.popen`); the answer is the process
id. Each program is forked twice: the process between ends at once, and the program becomes a child of the process that
asked, which is a subreaper for that moment. It runs from then on.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

IMPORTED = (
    "torch.distributed",
    "torch.optim",
    "torch._dynamo",  # the first optimizer would; it is empty, see tests/light_torch
    "anyio._backends._asyncio",
    "aiockpt.session.checkpointer",
    "aiockpt.session.wiring",
    "aiockpt.backends.local",
    "aiockpt.data.stream",
    "aiockpt.ranks.coordinator",
    "numpy.ma",
    "typer.main",
    "typer.rich_utils",
    "rich.progress",
    "aiockpt.tools.examples.child",
)
LAUNCHERS = ("tests.ranks.forked", "torch.distributed.run", "benchmarks", "tests.campaigns")
"""Modules that start programs: each has a template of its own, which ends with it. So has ``aiockpt prove``."""
ROOM, ROOM_BYTES = "AIOCKPT_TESTS_ROOM", 16384
"""A variable that makes room for the environments of programs where ``/proc`` shows the template's."""
HEADER = struct.Struct("!I")
MOST_FILES = 64
_PROVE = ("aiockpt.tools.cli.main", "prove")
_ENVIRONMENT = slice(47, 49)  # env_start and env_end, behind the name


def main(number: int) -> None:
    """Serve the socket *number*; in a fork, run the program that was asked for."""
    os.environ.pop(ROOM, None)
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads is not to be forked"
    asked = serve(socket.socket(fileno=number))
    if asked is not None:
        run_program(asked)


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Answer requests until the other end is closed, then return None; in a program return what it shall run."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            header, files, _, _ = socket.recv_fds(requests, HEADER.size, MOST_FILES)
            if len(header) < HEADER.size:
                return None
            (size,) = HEADER.unpack(header)
            asked = json.loads(requests.recv(size, socket.MSG_WAITALL))
            if _fork(requests, asked):
                requests.close()
                return _prepare(asked, files)
            for file in files:
                os.close(file)


def _fork(requests: socket.socket, asked: dict[str, Any]) -> bool:
    """Fork a program, a child of the process that asks, and answer with its id; return True in the program."""
    told, tell = os.pipe()
    go, let_go = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.close(let_go)
        if asked["new_session"]:
            os.setsid()
        if asked["group"] is not None:
            os.setpgid(0, asked["group"])
        os.write(tell, HEADER.pack(os.getpid()))
        os.read(go, 1)  # nothing, when all others have closed it
    else:
        os.waitpid(between, 0)
        requests.sendall(os.read(told, HEADER.size))
        os.close(let_go)
    for file in (told, tell, go):
        os.close(file)
    return between == 0


def _prepare(asked: dict[str, Any], files: list[int]) -> dict[str, Any] | None:
    """Give a fork what a new process has: its files, its folder, its environment, its arguments."""
    kept = None
    if asked["kind"] == "-m" and (
        asked["program"] in LAUNCHERS or (asked["program"], *asked["arguments"][:1]) == _PROVE
    ):
        kept, its = socket.socketpair()
        if os.fork() == 0:
            kept.close()
            return _serve_program(its, files)
        its.close()
    _place(dict(zip([0, 1, 2, *asked["pass_fds"]], files, strict=True)))
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    _show_environment(asked["env"])
    _open_standard_streams(asked["unbuffered"])
    sys.argv = [asked["program"] if asked["kind"] == "file" else asked["kind"], *asked["arguments"]]
    sys.orig_argv = asked["command"]
    asked["template"] = kept
    return asked


def _serve_program(requests: socket.socket, files: list[int]) -> dict[str, Any] | None:
    """Be the template of a launcher."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    for file in (nowhere, *files):
        os.close(file)
    asked = serve(requests)
    if asked is None:
        os._exit(0)
    return asked


def _place(files: dict[int, int]) -> None:
    """Give open files the numbers that the program knows them by."""
    above = max(files) + 1
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)


def _show_environment(environment: dict[str, str]) -> None:
    """Have ``/proc`` show *environment*, as of a new process: a proof finds by it what belongs to a start."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = map(int, fields[_ENVIRONMENT])
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    ctypes.memset(first, 0, end - first)
    ctypes.memmove(first, shown, min(len(shown), end - first))


def _open_standard_streams(unbuffered: bool) -> None:
    """Make Python's standard streams anew, as it makes them at its start."""
    for number, name, errors in ((0, "stdin", None), (1, "stdout", None), (2, "stderr", "backslashreplace")):
        old = getattr(sys, name)
        mode = "r" if number == 0 else "w"
        newline = None if number == 0 else "\n"
        stream: Any = open(number, mode, -1, old.encoding, errors or old.errors, newline, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2 or os.isatty(number), write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run_program(asked: dict[str, Any]) -> NoReturn:
    """Run *asked* as Python runs its main program, and end as it does; modules are not taken apart, which takes 0.2 s."""
    status = _status_of(lambda: _run(asked))
    inner: Any = threading, atexit
    for last in (inner[0]._shutdown, inner[1]._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(BrokenPipeError, ValueError):  # the other end is closed, or ours
            last()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _run(asked: dict[str, Any]) -> None:
    if asked["template"] is not None:
        import_module("tests.warm.popen").install(asked["template"])
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    names = main_module.__dict__
    names["__builtins__"] = __builtins__
    kind, program = asked["kind"], asked["program"]
    if kind == "file":
        sys.path.insert(0, str(Path(program).resolve().parent))
        names["__file__"] = program
        exec(compile(Path(program).read_bytes(), program, "exec"), names)
    elif kind == "-c":
        sys.path[:0] = [""] if not asked["safe_path"] else []
        exec(compile(program, "<string>", "exec"), names)
    else:
        sys.path[:0] = [os.getcwd()] if not asked["safe_path"] else []
        sys.modules.pop(program, None)
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]  # what ``python -m`` does


def _status_of(program: Callable[[], None]) -> int:
    """Run *program*; return the exit status that Python would have, after it has said what was not caught."""
    try:
        program()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException as error:  # noqa: BLE001
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
