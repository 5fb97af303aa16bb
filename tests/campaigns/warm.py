"""A process that has imported what takes long; each run of pytest is a fork of it.

Reads requests from standard input, a JSON object a line: the *arguments* of pytest, the file that its *output* goes to, and
the *limit_s* after which it and all that it started is killed. Answers each with a line: the exit status, negative when it
was killed. Nothing of the tree under test may be imported here: each fork reads that anew.

With a file for its output and the arguments of pytest on the command line it collects their tests once, and answers with
their number. A request has *tests*, ids among these, *limit_s*, and *changed*: the file and the function whose source is
another by now. A fork gives the functions that were imported the new code, and ends with `NOT_TAKEN` where that cannot be
done. So a run takes the seconds of its tests, and no import or collection.
"""

import gc
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

import pytest

SLOW = ("numpy", "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "msgspec", "asyncio")
"""None of them starts a thread, which a fork would not have."""
NOT_TAKEN = 99


def run(arguments: list[str], output: str, limit_s: float) -> int:
    """Run pytest in a fork; return its exit status."""
    pid = os.fork()
    if not pid:
        os.setsid()
        _have_files(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        try:
            status = int(pytest.main(arguments))
        except BaseException:  # noqa: BLE001  a fork must not go on as its parent
            status = int(pytest.ExitCode.INTERNAL_ERROR)
        sys.stdout.flush()
        os._exit(status)
    return _wait(pid, limit_s)


def _have_files(output: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)


def _wait(pid: int, limit_s: float) -> int:
    until_s = time.monotonic() + limit_s
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until_s:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its tests left behind, or itself
    return os.waitstatus_to_exitcode(ended[1] if ended[0] else os.waitpid(pid, 0)[1])


class Collected:
    """The plugin that runs some of the collected tests in a fork for each request; pytest goes on in the fork alone."""

    def __init__(self, output: str) -> None:
        self._requests, self._answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        self._output = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        _have_files(self._output)  # before pytest keeps them
        self.is_fork = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Answer requests until there are no more; return None in a fork."""
        items = {item.nodeid: item for item in session.items}
        imported = _imported_functions(Path.cwd().resolve())
        gc.freeze()  # a fork that looked through these would copy them
        self._answer(len(items))
        for line in self._requests:
            asked = json.loads(line)
            os.ftruncate(self._output, 0)
            pid = os.fork()
            if not pid:
                os.setsid()
                self.is_fork = True
                session.items[:] = [items[test] for test in asked["tests"] if test in items]
                session.testscollected = len(session.items)
                if not session.items or (asked["changed"] and not _take(asked["changed"], imported)):
                    os._exit(NOT_TAKEN)
                if (programs := sys.modules.get("tests.warm.popen")) is not None:
                    programs.install()  # programs of tests are forks of a process that has read the source anew
                return None
            self._answer(_wait(pid, asked["limit_s"]))
        return True

    def _answer(self, number: int) -> None:
        self._answers.write(f"{number}\n")
        self._answers.flush()


Place = tuple[str, str]
"""A file and the qualified name of a function in it."""


def _imported_functions(root: Path) -> dict[Place, dict[int, list[FunctionType]]]:
    """Return the functions of modules below *root*, by their place and first line."""
    found: dict[Place, dict[int, list[FunctionType]]] = defaultdict(lambda: defaultdict(list))
    real: dict[str, str] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType:
            code = one.__code__
            file = real.get(code.co_filename) or real.setdefault(code.co_filename, os.path.realpath(code.co_filename))
            if file.startswith(f"{root}/"):
                found[file, code.co_qualname][code.co_firstlineno].append(one)
    return found


def _take(changed: Place, imported: dict[Place, dict[int, list[FunctionType]]]) -> bool:
    """Give what was imported of a function the code that its file has now; return whether that could be done."""
    file, function = changed
    path = Path(file).resolve()
    if not any(known == str(path) for known, _ in imported):
        return True  # it is read when it is imported
    there = sorted(imported.get((str(path), function), {}).items())
    new = [code for code in _codes(compile(path.read_text(), str(path), "exec")) if code.co_qualname == function]
    if not there or len(there) != len(new):
        return False
    for (_, functions), code in zip(there, new, strict=True):
        for one in functions:
            if one.__code__.co_freevars != code.co_freevars:
                return False
            one.__code__ = code
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of each function that is in no other."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & 2:  # CO_NEWLOCALS: no body of a class
                yield inner
            else:
                yield from _codes(inner)


def main(arguments: list[str]) -> None:
    """Answer requests; see the head of this file."""
    for name in SLOW if Path("tests/conftest.py").exists() else ():  # a tree that a test has made needs none of them
        with suppress(ImportError):
            import_module(name)
    if arguments:
        output, *of_pytest = arguments
        plugin = Collected(output)
        status = pytest.main(of_pytest, plugins=[plugin])
        sys.stdout.flush()
        if plugin.is_fork:
            os._exit(int(status))
        return
    for line in sys.stdin:
        print(run(**json.loads(line)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
