"""A real process, killed with SIGKILL at one of its file-system calls: the old step or the whole new one is there.

A case saves in a forked child that dies at a call, once or a few times in a row on the same folder; a fresh process then
loads, and another saves on. The killer's calls are swept: any run of consecutive seeds spreads over all of them.
Run it in a process without threads (the command line is one): a fork takes only its own thread along.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.world import OsFiles, World
from aiockpt.testing.faults import Fault, FaultyFiles
from tests.campaigns.campaign import Campaign, Case, Outcomes, in_folders, noted
from tests.inline_process import TINY, states_equal, tiny_state

RAISED, NEVER_SAVED = 255, 254
"""What a child returns that raised; and one that loaded what nobody ever saved."""
DEADLINE_S = 250
SPREAD = 37
"""Consecutive seeds kill that many calls apart."""
FIRST, SECOND, LAST = 1, 2, 3
"""The steps, and what they hold."""


def fork(work: Callable[[], int]) -> int:
    """Return the process id of a child that ends with what *work* returns, or with `RAISED`."""
    pid = os.fork()
    if not pid:
        status = RAISED
        with suppress(BaseException):
            status = work()
        os._exit(status)
    return pid


@contextmanager
def store_apart() -> Iterator[int]:
    """Yield the port of a `TCPStore` in a process of its own: its threads may hold locks of C, which no fork would get."""
    parent, (here, there) = os.getpid(), os.pipe()

    def serve() -> int:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(there, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(1.0)
        return 0

    server = fork(serve)
    try:
        os.close(there)
        with open(here, "rb", buffering=0) as pipe:
            port = int(pipe.read(16))
        yield port
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def end_of(pid: int) -> tuple[bool, int]:
    """Wait for a child; return whether it was killed, and what it returned."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code >= 0 or code == -signal.SIGKILL, f"ended by signal {-code}"
    return code < 0, max(0, code)


def in_child(work: Callable[[], int]) -> tuple[bool, int]:
    """Run *work* in a forked child; return whether it was killed, and what it returned."""
    return end_of(fork(work))


def save(root: Path, step: int, kill_at: int | None) -> int:
    """Save a step, dying at a call; return 0."""
    faults = [] if kill_at is None else [Fault(do="kill", at=kill_at)]
    backend = LocalBackend(root, world=World(files=FaultyFiles(OsFiles(), faults)))
    with aiockpt.Checkpointer(backend, limits=aiockpt.Limits(io=TINY)) as ckpt:
        ckpt.save(step, tiny_state(step)).result(DEADLINE_S)
    return 0


def load(root: Path) -> int:
    """Load the newest step and return its value; 0 when there is none."""
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=TINY)) as ckpt:
        state = tiny_state(-1)
        if ckpt.load(state).result(DEADLINE_S) is None:
            return 0
        return int(state["value"]) if states_equal(state, tiny_state(state["value"])) else NEVER_SAVED


def count_calls(folder: Path) -> int:
    """Return how many calls a save makes, of a second step."""
    save(folder, FIRST, None)
    files = FaultyFiles(OsFiles())
    with aiockpt.Checkpointer(LocalBackend(folder, world=World(files=files)), limits=aiockpt.Limits(io=TINY)) as ckpt:
        ckpt.save(SECOND, tiny_state(SECOND)).result(DEADLINE_S)
    return files.call_count


def kill_and_look(root: Path, kills: list[int]) -> str:
    """Save a second step in *root*, killed at each of *kills* in turn, and look; return what came of it."""
    killed = False
    for at in kills:
        killed, status = in_child(lambda: save(root, SECOND, at))  # noqa: B023  it runs at once
        assert status == 0, f"the save returned {status}"
    _, found = in_child(lambda: load(root))
    assert found in ((FIRST, SECOND) if killed else (SECOND,)), f"killed {killed}, then loaded {found}"
    _, status = in_child(lambda: save(root, LAST, None))
    assert status == 0, f"saving on returned {status}"
    _, newest = in_child(lambda: load(root))
    assert newest == LAST, f"saved on, then loaded {newest}"
    return f"killed, {found} is there" if killed else "outlived its killer"


def prepare() -> Case:
    """Save a first step in a temporary folder and count the calls of a second: that is where the cases start from."""
    folder = tempfile.TemporaryDirectory(prefix="aiockpt-sigkill-")
    _, calls = in_child(lambda: count_calls(Path(folder.name) / "counted"))
    assert 0 < calls < RAISED, f"{calls} calls"
    assert in_child(lambda: save(Path(folder.name) / "base", FIRST, None)) == (False, 0)

    def look(seed: int, place: Path) -> Outcomes:
        dice = random.Random(seed)
        kills = [dice.randint(1, calls) for _ in range(dice.choice((0, 0, 0, 1, 2)))]
        kills.append(1 + seed * SPREAD % calls)
        shutil.copytree(Path(folder.name) / "base", place / "run")
        with noted(lambda: f"killed at calls {kills} of {calls}"):
            return Counter({kill_and_look(place / "run", kills): len(kills)})

    return in_folders(look)


CAMPAIGN = Campaign(name="sigkill", counts="kills", prepare=prepare, smoke_count=16, apart=True)
