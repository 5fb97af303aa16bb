"""A history of one place, really made on a simulated disk, and what is known of it without asking the engine.

Jobs follow each other: they load the newest step or one by its number, save, save again, verify, delete, prune, crash at a
call, and meet outages. What a model must know is noted as it happens: which saves were acknowledged, their values, and in
which order. What is there afterwards is told from the names on the disk.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import torch

from aiockpt import LoadResult
from aiockpt.errors import CheckpointError, StepNotFoundError
from aiockpt.options import Retention
from aiockpt.testing.faults import Fault, FaultyFiles
from tests import inline_process
from tests.file_surgery import ROOT, content, paths
from tests.inline_process import local
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import SimulatedClock

T = TypeVar("T")
STEPS = (1, 2, 3, 4)
NUMBERS = 700
"""Of the one tensor: as many as need a block and a bit."""
CALLS = 80
"""About as many as a save makes."""
OUTAGES = (errno.ESTALE, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.ETIMEDOUT)


CHANGES = ("verify", "delete", "replace", "prune")
"""What is done to a step that is there; *replace* deletes it and saves it again."""
LITTLE_CAN_BE_REMOVED = Fault(do="fail", verb="unlink", match="*/MANIFEST-*", times=None, error=errno.EBUSY)
"""What is overtaken stays for a while."""


def crash_at(call: int) -> Fault:
    """Return the end of a process: from that call on nothing reaches the disk."""
    return Fault(do="fail", at=call, times=None, error=errno.EIO)


def is_away(folder: str, verb: str, error: int, times: int) -> Fault:
    """Return an outage of *folder*: its files, or what is in it, cannot be looked at so many *times*."""
    return Fault(do="fail", verb=verb, match=f"{folder}*", times=times, error=error)


def folder_of(step: int) -> str:
    return f"{ROOT}/step-{step:08d}"


def state_of(value: float) -> dict[str, Any]:
    """Return the state that *value* stands for."""
    return {"x": torch.full((NUMBERS,), float(value)), "value": value}


async def load_value(
    process: inline_process.Process, step: int | None = None
) -> tuple[float | None, LoadResult | None]:
    """Load, compare every number, and return the value and the result."""
    state = state_of(-1)
    result = await process.load(state, step)
    if result is None:
        return None, None
    assert torch.equal(state["x"], state_of(state["value"])["x"]), "loaded numbers that were never saved"
    return state["value"], result


class QuickLoop(asyncio.SelectorEventLoop):
    """An event loop that does at once what is meant for a thread, or for later.

    That takes half the time of `run_inline`, which goes a longer way.
    """

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> Any:
        """Call in the next turn: what sleeps because a handle is stale is not waited for."""
        return super().call_later(0, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - an executor hands over everything
            future.set_exception(error)
        return future


def run_quickly(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` on one thread, as `run_inline` does."""
    with asyncio.Runner(loop_factory=QuickLoop) as runner:
        return runner.run(main())


class Save(msgspec.Struct, frozen=True):
    """A save whose manifest is on the disk, or whose votes are: *order* says how new it is among all."""

    step: int
    generation: int
    attempt: str
    value: float
    order: int

    @property
    def folder(self) -> str:
        return folder_of(self.step)

    @property
    def manifest(self) -> str:
        return f"{self.folder}/MANIFEST-{self.generation}.json"

    @property
    def attempt_folder(self) -> str:
        return f"{self.folder}/a-{self.attempt}"

    @property
    def decision(self) -> str:
        return f"{self.attempt_folder}/DECISION.json"


class Ticking(SimulatedClock):
    """Dates the files of a history in the order in which they were written, all of them before what its jobs call now."""

    def time_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class History:
    """A place with a past.

    Attributes:
        files: the disk.
        saves: those whose manifests are whole and there.
        voted: those that are not committed, and whose votes are there: the next load finishes them.
        overtaken: those whose votes are there, too, and whose number a manifest has: they may come back when that goes.
        given_up: those whose votes are all there, and whose record says *collect*: with that record goes the decision. The
            engine takes a vote away next, so a crash between the two leaves this, and no other.
        torn: (step, generation) of manifests that a crash left in part.
        before: all that each manifest's name has ever held, by path.
        told: what happened, for people.
    """

    def __init__(self, dice: random.Random, *, hard_links: bool) -> None:
        self.files = SimulatedFiles(hard_links=hard_links, clock=Ticking(SimulatedClock.now_ns - 10**12))
        self.saves: list[Save] = []
        self.voted: list[Save] = []
        self.overtaken: list[Save] = []
        self.given_up: list[Save] = []
        self.torn: set[tuple[int, int]] = set()
        self.before: dict[str, set[bytes]] = {}
        self.told: list[str] = []
        self._dice = dice
        self._order = 0
        self._value = 0.0
        self._values: dict[str, tuple[float, int]] = {}

    @property
    def has_root(self) -> bool:
        """Whether anything was ever written."""
        return ROOT.strip("/") in self.files.listdir("/")

    def job(self) -> None:
        """Run one process from its start to its end, or to its crash."""
        dice = self._dice
        crash = dice.random() < 0.35
        faults = [crash_at(dice.randrange(1, 4 * CALLS))] if crash else []
        if not crash and dice.random() < 0.2:
            faults = [LITTLE_CAN_BE_REMOVED]
        if not crash and dice.random() < 0.2 and self.saves:
            away = dice.choice(self.saves)
            verb = dice.choice(("preadv", "open", "listdir"))
            error = dice.choice(OUTAGES)
            faults.append(is_away(away.folder, verb, error, dice.choice((1, 3))))
        seed = dice.getrandbits(32)
        rules = Retention(last=dice.choice((1, 2, 3))) if dice.random() < 0.3 else None
        with Process(self, faults, rules, seed) as process:
            if dice.random() < 0.8:
                process.load(dice.choice([None, None, *(save.step for save in self.saves)]))
            for _ in range(dice.randint(1, 3)):
                there = self.steps
                what = dice.choices(("save", *CHANGES), (10, 1, 1, 3, 1))[0] if there else "save"
                step = dice.choice(STEPS) if what == "save" else dice.choice(there)
                process.do(what, step, dice.choice((1, 2)) if what == "prune" else 1)

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that have a whole manifest."""
        return sorted({save.step for save in self.saves})

    async def save(self, process: inline_process.Process, step: int) -> None:
        """Save the next value, and note which attempt has it."""
        self._value += 1
        self._order += 1
        value = self._value
        before = set(self._attempts(step))
        future = await process.save(step, state_of(value))
        for attempt in set(self._attempts(step)) - before:
            self._values[attempt] = (value, self._order)
        future.result()

    def _attempts(self, step: int) -> list[str]:
        try:
            names = self.files.listdir(folder_of(step))
        except FileNotFoundError:
            return []
        return [name[2:] for name in names if name.startswith("a-")]

    def look_around(self) -> None:
        """Take down what is there: a manifest of which there is all, votes without one, and what was torn."""
        self.saves, self.voted, self.overtaken, self.given_up = [], [], [], []
        self.torn.clear()
        if not self.has_root:
            return
        for path in paths(self.files):
            found = re.fullmatch(rf"{ROOT}/step-(\d+)/MANIFEST-(\d+)\.json", path)
            if found is None:
                continue
            data = bytes(content(self.files, path))
            self.before.setdefault(path, set()).add(data)
            facts = parse(data)
            if facts is None:
                self.torn.add((int(found[1]), int(found[2])))
                continue
            value, order = self._values[facts["attempt"]]
            self.saves.append(Save(int(found[1]), int(found[2]), facts["attempt"], value, order))
        named = {save.attempt for save in self.saves}
        for step in STEPS:
            taken = [s.generation for s in self.saves if s.step == step] + [g for n, g in self.torn if n == step]
            for attempt in self._attempts(step):
                facts = self._vote(step, attempt)
                if facts is None:
                    continue
                value, order = self._values[attempt]
                vote = Save(step, facts["generation"], attempt, value, order)
                if self._is_given_up(vote):
                    self.given_up.append(vote)
                elif attempt not in named:
                    (self.voted if vote.generation > max(taken, default=0) else self.overtaken).append(vote)

    def _vote(self, step: int, attempt: str) -> dict[str, Any] | None:
        path = f"{folder_of(step)}/a-{attempt}/r/r00000.json"
        there = set(paths(self.files, f"{folder_of(step)}/a-{attempt}"))
        if path not in there:
            return None
        return parse(bytes(content(self.files, path)))

    def _is_given_up(self, save: Save) -> bool:
        there = save.decision in set(paths(self.files, save.attempt_folder))
        return there and b'"commit"' not in content(self.files, save.decision)


class Process:
    """A process in a history: it loads and changes what is there. It ends with the block, or by an error of ours in it.

    Args:
        faults: what happens to its calls.
        rules: of the retention after each save.
    """

    def __init__(self, history: History, faults: Sequence[Fault], rules: Retention | None, seed: int) -> None:
        self._history = history
        self._backend, world = local(FaultyFiles(history.files, faults), seed)
        self._inside = inline_process.Process(self._backend, world, retention=rules)
        self._runner = asyncio.Runner(loop_factory=QuickLoop)
        crashes = any(fault.verb == "*" for fault in faults)
        history.told.append(f"job{' that crashes' if crashes else ''}{f', keeping {rules.last}' if rules else ''}")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self._history.told.append(f"ended by {error!r:.80}")
        with suppress(CheckpointError):
            self._runner.run(self._backend.close())
        self._runner.close()
        for fd in list(self._history.files._open):
            self._history.files.close(fd)  # the process is gone
        self._history.look_around()
        return isinstance(error, CheckpointError)

    def load(self, step: int | None) -> None:
        """Load the newest step, or one by its number."""
        self._history.told.append(f"load {step}")
        with suppress(StepNotFoundError):
            self._runner.run(load_value(self._inside, step))

    def do(self, what: str, step: int, last: int) -> None:
        """Save *step*, or do one of `CHANGES` to it; a prune keeps the *last* steps."""
        self._history.told.append(f"{what} {last if what == 'prune' else step}")
        self._runner.run(self._do(what, step, last))
        self._history.look_around()

    async def _do(self, what: str, step: int, last: int) -> None:
        if what == "verify":
            await self._inside.ckpt.verify(step)
        elif what == "prune":
            await self._inside.ckpt.prune(Retention(last=last, grace_s=0))
        if what in ("delete", "replace"):
            await self._inside.ckpt.delete(step)
        if what in ("save", "replace"):
            await self._history.save(self._inside, step)


def parse(data: bytes) -> dict[str, Any] | None:
    """Return a document, or None of a torn one: what is written in part is no JSON."""
    try:
        facts: dict[str, Any] = json.loads(data)
    except ValueError:
        return None
    return facts
