"""Simulated world for whole programs: power cuts, a manual clock, one thread.

Guarantees:

- `crash_states` and `power_cuts` do not change their arguments, and yield the same states for the same seed.
- Where there are few states they yield all of them (with torn writes in halves); else nothing kept, all kept, each
  change lost alone and kept alone, then random ones. A missing flush shows among the first states.

The recipe for a crash test: run the program on ``RecordingFiles(SimulatedFiles())``, then check every state that
`power_cuts` makes of the recorded calls; once more for each flush, with that call in *skip*, to see the test fail.
"""

import asyncio
import itertools
import math
import os
import random
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from aiockpt.runtime.world import World
from aiockpt.testing.recording import Call
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulated_nodes import Folder, NameChange, Node, SimulatedFile, Write, walk

P = ParamSpec("P")
T = TypeVar("T")

Change = Write | NameChange
Kept = dict[int, tuple[Change, ...]]
"""Id of each unflushed change → the part that the power cut leaves."""


def crash_states(files: SimulatedFiles, *, seed: int = 0, limit: int = 64) -> Iterator[SimulatedFiles]:
    """Yield possible states after a power cut at this instant, *limit* states at most."""
    changes: list[Change] = [change for node in walk(files.root, every_future=True) for change in _unflushed(node)]
    for kept in itertools.islice(_choices(changes, seed, limit), limit):
        memo: dict[int, Node] = {}
        yield files.with_root(_folder_after(files.root, kept, memo))


def snapshot(files: SimulatedFiles) -> SimulatedFiles:
    """Return a copy with the same durable and volatile parts; descriptors are not copied."""
    copies: dict[int, Node] = {}
    return files.with_root(_copy_folder(files.root, copies))


def replay(
    calls: Sequence[Call], *, start: SimulatedFiles | None = None, skip: Collection[int] = ()
) -> Iterator[tuple[int, SimulatedFiles]]:
    """Replay recorded calls on a file system; yield it before the first and after each.

    Args:
        calls: from `RecordingFiles.calls`; failed calls are skipped.
        start: the initial file system (it is copied); an empty one by default.
        skip: indices of calls to leave out: flushes, to test that each is needed.

    Yields:
        The number of calls made, and the file system, which changes with later ones: use `snapshot` to keep it.
    """
    files = SimulatedFiles() if start is None else snapshot(start)
    fds: dict[int, int] = {}
    yield 0, files
    for index, call in enumerate(calls):
        if not call.error and index not in skip:
            _do(files, call, fds)
        yield index + 1, files


def power_cuts(
    calls: Sequence[Call],
    *,
    start: SimulatedFiles | None = None,
    skip: Collection[int] = (),
    seed: int = 0,
    limit: int = 64,
) -> Iterator[tuple[int, SimulatedFiles]]:
    """Yield (number of *calls* made, a possible state after a power cut then) for every prefix of *calls*.

    Accepts the arguments of `replay` and, for each prefix, of `crash_states`. Of prefixes that differ by calls without
    effect (closing, opening to read) it uses the longest: calls acknowledged since must be durable there already.
    """
    for done, files in replay(calls, start=start, skip=skip):
        if done == len(calls) or calls[done].changes:
            for state in crash_states(files, seed=seed + done, limit=limit):
                yield done, state


def _unflushed(node: Node) -> Sequence[Change]:
    return node.unflushed


def _choices(changes: Sequence[Change], seed: int, limit: int) -> Iterator[Kept]:
    """Yield choices of what to keep of each change, the most revealing first."""
    outcomes: list[Sequence[tuple[Change, ...]]] = [change.outcomes() for change in changes]
    if math.prod(len(options) for options in outcomes) <= limit:
        for picks in itertools.product(*outcomes):
            yield {id(change): pick for change, pick in zip(changes, picks, strict=True)}
        return
    dice = random.Random(seed)
    none: Kept = {id(change): () for change in changes}
    whole: Kept = {id(change): (change,) for change in changes}
    yield none
    yield whole
    alone = [whole | {id(change): ()} for change in changes]
    alone += [none | {id(change): (change,)} for change in changes]
    dice.shuffle(alone)
    yield from alone
    while True:
        drawn: Kept = {}
        for change in changes:
            drawn[id(change)] = dice.choice([*change.outcomes(), change.torn(dice)])
        yield drawn


def _folder_after(folder: Folder, kept: Kept, memo: dict[int, Node]) -> Folder:
    names = dict(folder.durable)
    for change in folder.unflushed:
        for part in kept[id(change)]:
            assert isinstance(part, NameChange)
            part.apply(names)
    after = Folder(folder.number, folder.modified_ns)
    memo[id(folder)] = after
    for name, node in names.items():
        if id(node) not in memo:
            memo[id(node)] = (
                _file_after(node, kept) if isinstance(node, SimulatedFile) else _folder_after(node, kept, memo)
            )
        child = memo[id(node)]
        child.links += isinstance(child, SimulatedFile)
        after.names[name] = child
    after.durable = dict(after.names)
    return after


def _file_after(file: SimulatedFile, kept: Kept) -> SimulatedFile:
    content = bytearray(file.durable)
    for change in file.unflushed:
        for part in kept[id(change)]:
            assert isinstance(part, Write)
            part.apply(content)
    return SimulatedFile(file.number, file.modified_ns, durable=bytearray(content), content=content, kind=file.kind)


def _copy_folder(folder: Folder, copies: dict[int, Node]) -> Folder:
    copy = Folder(folder.number, folder.modified_ns)
    copies[id(folder)] = copy
    copy.names = {name: _copy_node(node, copies) for name, node in folder.names.items()}
    copy.durable = {name: _copy_node(node, copies) for name, node in folder.durable.items()}
    copy.unflushed = [
        NameChange(change.name, None if change.node is None else _copy_node(change.node, copies), change.old)
        for change in folder.unflushed
    ]
    return copy


def _copy_node(node: Node, copies: dict[int, Node]) -> Node:
    if id(node) in copies:
        return copies[id(node)]
    if isinstance(node, Folder):
        return _copy_folder(node, copies)
    copies[id(node)] = copy = SimulatedFile(
        node.number,
        node.modified_ns,
        node.links,
        bytearray(node.durable),
        bytearray(node.content),
        list(node.unflushed),
        node.kind,
    )
    return copy


def _do(files: SimulatedFiles, call: Call, fds: dict[int, int]) -> None:
    match call.verb:
        case "open":
            fds[call.fd] = files.open(call.path, call.flags & ~os.O_DIRECT)  # recorded memory is not aligned
        case "close":
            files.close(fds.pop(call.fd))
        case "pwrite":
            files.pwrite(fds[call.fd], memoryview(call.data), call.offset)
        case "fallocate":
            files.fallocate(fds[call.fd], call.offset, call.size)
        case "fdatasync" | "fsync":
            getattr(files, call.verb)(fds[call.fd])
        case "link" | "rename":
            getattr(files, call.verb)(call.path, call.target)
        case _:
            getattr(files, call.verb)(call.path)


@dataclass
class SimulatedClock:
    """A clock that moves only when it is set.

    Attributes:
        now_ns: the time of both clocks; set it to any value to make the wall clock wrong.
    """

    now_ns: int = 1_700_000_000 * 10**9

    def monotonic_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        """Move the clock forward by *seconds*."""
        self.now_ns += round(seconds * 1e9)


@dataclass(frozen=True)
class SimulatedWorld(World):
    """A world with simulated files and clock, whose random bytes come from a seed: `simulated_world` makes one."""

    files: SimulatedFiles = field(default_factory=SimulatedFiles)
    clock: SimulatedClock = field(default_factory=SimulatedClock)


def simulated_world(seed: int = 0, files: SimulatedFiles | None = None) -> SimulatedWorld:
    """Return a separate world: the same seed and the same calls give the same bytes.

    Args:
        seed: of `World.token`.
        files: the file system; by default an empty one, with dates from the world's clock.
    """
    clock = SimulatedClock()
    return SimulatedWorld(files or SimulatedFiles(clock=clock), clock, random.Random(seed).randbytes)


class InlineExecutor(ThreadPoolExecutor):
    """An executor that runs work at once, on the calling thread, and never starts a thread.

    (A ThreadPoolExecutor by type only: asyncio accepts no other kind as a loop's default executor.)
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - an executor hands over everything
            future.set_exception(error)
        return future


def run_inline(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` on a new event loop whose worker threads are the calling thread: no two calls ever race."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(InlineExecutor())
        return runner.run(main())
