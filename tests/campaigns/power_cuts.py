"""Power cuts at any call: what was acknowledged survives, also after an earlier cut.

A case is a job that is started, saves, saves again, deletes and prunes, on a disk that may have lived through a cut
already. The power is cut at calls drawn at random, and the disk keeps what it likes of what was not flushed, in torn
sectors (`tests.simulated.simulation.crash_states`). What is then found must be the steps that the acknowledged operations
make, each of those that still ran done or not done: every step's values, which is the newest, and nothing besides but the
steps that a reader held when the power went.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from aiockpt.errors import StepNotFoundError
from aiockpt.format.names import step_id
from aiockpt.options import Retention
from aiockpt.testing.recording import RecordingFiles
from tests.campaigns.campaign import Campaign, Outcomes
from tests.campaigns.drawn_state import DrawnShape, load_drawn
from tests.file_surgery import fingerprint, paths
from tests.inline_process import Process, local
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulation import crash_states, replay, run_inline, snapshot

STEPS = (1, 2, 3)
ROUNDS = 3
CUT_FRACTION = 0.35
"""Of the calls that change something, at how many the power is cut."""
FULL_FRACTION = 0.4
"""Of the deletions, how many happen on a disk that takes no byte more."""
CHOICES, LOOKED_AT = 48, 4
"""Crash states made at such a call, and those of them that are looked at."""

Steps = tuple[tuple[int, float], ...]
"""What a disk holds: (step, value) of each committed step, the oldest first."""


class Effect(msgspec.Struct, frozen=True):
    """An operation between two calls: it saves *value* as *step*, or deletes the step for None."""

    begun: int
    done: int
    step: int
    value: float | None

    def apply(self, steps: Steps) -> Steps:
        others = tuple((step, value) for step, value in steps if step != self.step)
        return others if self.value is None else (*others, (self.step, self.value))


class Job:
    """A process from its start to its end, its calls, and what each of its operations should have done by when."""

    def __init__(self, disk: SimulatedFiles, shape: DrawnShape, held: Steps, dice: random.Random) -> None:
        self._files = snapshot(disk)
        self.recording = RecordingFiles(self._files)
        self.effects: list[Effect] = []
        self._shape = shape
        self._dice = dice
        self._steps = held
        self._retention = Retention(last=dice.randint(1, 2)) if dice.random() < 0.3 else None
        backend, world = local(self.recording, seed=dice.getrandbits(32))

        async def main() -> None:
            process = Process(backend, world, retention=self._retention)
            await process.load(shape.state(-1))
            for _ in range(dice.randint(1, 3)):
                await self._do_something(process)
            await backend.close()

        run_inline(main)

    @property
    def _now(self) -> int:
        return len(self.recording.calls)

    async def _do_something(self, process: Process) -> None:
        held = [step for step, _ in self._steps]
        if held and self._dice.random() < 0.25:
            begun, step = self._now, self._dice.choice(held)
            full = self._dice.random() < FULL_FRACTION
            self._files.capacity_bytes = 0 if full else None
            await process.ckpt.delete(step)
            self._files.capacity_bytes = None
            self._note(Effect(begun, self._now, step, None))
        else:
            await self._save(process, self._dice.choice(STEPS))

    async def _save(self, process: Process, step: int) -> None:
        begun, acknowledged = self._now, []
        value = float(self._dice.randrange(1, 200))
        future = await process.save(
            step,
            self._shape.state(value),
            lambda future: future.add_done_callback(lambda _: acknowledged.append(self._now)),
        )
        future.result()
        self._note(Effect(begun, acknowledged[0], step, value))
        if self._retention is not None and self._retention.last is not None:
            for pruned, _ in self._steps[: -self._retention.last]:
                if not self._is_leased(pruned):
                    self._note(Effect(acknowledged[0], self._now, pruned, None))

    def _is_leased(self, step: int) -> bool:
        """Whether a reader whose power was cut has left its lease: for all that is known, it still reads."""
        return any(f"/{step_id(step)}/lease-" in path for path in paths(self._files))

    def _note(self, effect: Effect) -> None:
        self.effects.append(effect)
        self._steps = effect.apply(self._steps)

    def may_be_found(self, held: Steps, calls: int) -> set[Steps]:
        """Return what may be on the disk when the power is cut after so many calls."""
        running = [effect for effect in self.effects if effect.begun < calls < effect.done]
        found = set()
        for undone in itertools.product((False, True), repeat=len(running)):
            skipped = {id(effect) for effect, skip in zip(running, undone, strict=True) if skip}
            steps = held
            for effect in self.effects:
                if effect.begun < calls and id(effect) not in skipped:
                    steps = effect.apply(steps)
            found.add(steps)
        return found


def look(disk: SimulatedFiles, shape: DrawnShape) -> tuple[float | None, dict[int, float]]:
    """Return the newest value and every step's, as the next process finds them on a copy of the *disk*."""
    backend, world = local(snapshot(disk), seed=7)

    async def main() -> tuple[float | None, dict[int, float]]:
        process = Process(backend, world)
        newest, found = await load_drawn(process, shape), {}
        for step in STEPS:
            try:
                value = await load_drawn(process, shape, step)
            except StepNotFoundError:
                continue
            assert value is not None
            found[step] = value
        await backend.close()
        return newest, found

    return run_inline(main)


def cut(job: Job, disk: SimulatedFiles, dice: random.Random) -> Iterator[tuple[int, SimulatedFiles]]:
    """Yield (calls done, what is found) for power cuts during *job*, which began with *disk*."""
    calls = job.recording.calls
    for done, files in replay(calls, start=disk):
        last = done == len(calls)
        if last or (calls[done].changes and dice.random() < CUT_FRACTION):
            states = list(crash_states(files, seed=dice.getrandbits(32), limit=CHOICES))
            for state in dice.sample(states, min(LOOKED_AT, len(states))):
                yield done, state


def judge(seen: tuple[float | None, dict[int, float]], allowed: set[Steps]) -> Steps:
    """Return what the disk holds; fail when that is none of what is *allowed*."""
    newest, found = seen
    for steps in allowed:
        if dict(steps) == found and newest == (steps[-1][1] if steps else None):
            return steps
    raise AssertionError(f"found {found}, newest {newest}; that is none of {sorted(allowed)}")


def case(seed: int) -> Outcomes:
    """Let a few jobs follow each other on one disk; every power cut of each is looked at, the next goes on from one."""
    dice = random.Random(seed)
    shape = DrawnShape.draw(dice)
    disk, held = SimulatedFiles(), Steps()
    outcomes: Outcomes = Counter()
    for _ in range(ROUNDS):
        job = Job(disk, shape, held, dice)
        survivors: list[tuple[SimulatedFiles, Steps]] = []
        looked_at: dict[bytes, tuple[float | None, dict[int, float]]] = {}
        for done, found in cut(job, disk, dice):
            print_of = fingerprint(found)
            known = print_of in looked_at
            allowed = job.may_be_found(held, done)
            try:
                if not known:
                    looked_at[print_of] = look(found, shape)
                steps = judge(looked_at[print_of], allowed)
            except Exception as error:
                raise AssertionError(_tell(job, done, allowed, shape)) from error
            outcomes["like one before" if known else f"{len(steps)} steps, {_kind(allowed)}"] += 1
            survivors.append((found, steps))
        disk, held = dice.choice(survivors)
    return outcomes


def _kind(allowed: Sequence[Steps] | set[Steps]) -> str:
    return "nothing running" if len(allowed) == 1 else "cut in the middle"


def _tell(job: Job, done: int, allowed: set[Steps], shape: DrawnShape) -> str:
    last = job.recording.calls[done - 1] if done else "nothing"
    return f"after call {done} ({last}) of {job.effects}, {shape}: allowed {sorted(allowed)}"


CAMPAIGN = Campaign(name="power-cuts", counts="crash states", prepare=lambda: case, smoke_count=400)
