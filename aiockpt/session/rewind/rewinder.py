"""The way back from a bad step: one rank finds it, all go back in the same call of ``advance``, and leave out its batches.

A rank with a bad step takes part in no save until the run is set back, so that no bad step can be committed: a save
needs all ranks. All act in the same call (`aiockpt.session.agreed_call`). There rank 0 chooses the newest good step before
the first bad one, from what all places hold; all load it together and leave out batches. Then it is saved once more, as it
is now: a new branch, which a resume takes, with the batches that are left out. Guarantees:

- A call while nothing is bad contacts no other rank, and waits for no device (`aiockpt.session.rewind.alarm`).
- Whenever a process dies, a resume takes a good step. Later steps than the first bad one that are committed all the same
  (saved by hand, or found bad late) are deleted before the good one is loaded.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import anyio
import msgspec
from torch.utils.data import DataLoader, Dataset, Sampler

from aiockpt.adapters.kinds import find_objects
from aiockpt.data.loader import Loader
from aiockpt.engine import maintenance
from aiockpt.engine.alone import Destination, StartSave
from aiockpt.engine.context import Engine
from aiockpt.engine.find import find_good
from aiockpt.engine.job import SaveRequest
from aiockpt.engine.submit import Submitter
from aiockpt.errors import (
    BadStepError,
    CheckpointError,
    CorruptionError,
    RankError,
    RewindExhaustedError,
    UsageError,
)
from aiockpt.events import Event, NotFiniteFound, Rewound
from aiockpt.format.names import join_name
from aiockpt.futures import Future, LoadFuture, Stage, promise_of
from aiockpt.redaction import redact
from aiockpt.runtime.limits import open_tasks
from aiockpt.runtime.loop import Mutex
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.session.agreed_call import CallNotes
from aiockpt.session.rewind.alarm import Alarm, MetricWatch
from aiockpt.session.rewind.rules import Rewind

logger = logging.getLogger("aiockpt")

T = TypeVar("T")
LoadStep = Callable[[int], LoadFuture[Any]]
Wait = Callable[[Stage[Any]], Awaitable[Any]]
REMEMBERED_STEPS = 4096
"""Steps of which the batches are known; with an earlier bad one, all batches since the loaded step are left out."""


class CallDecision(msgspec.Struct, frozen=True):
    """The call in which all ranks go back; or why they could not agree."""

    call: int
    failure: str = ""


class GoodStep(msgspec.Struct, frozen=True):
    """Rank 0's note: the bad step, and the one to load, with the metrics it was saved with; or why it is not known."""

    alarm: Alarm
    step: int = -1
    metrics: dict[str, float | None] = {}
    failure: str = ""


class Rewinder:
    """Sets the run of one checkpointer back.

    Attributes:
        alarm: of this rank; None while nothing is bad.
    """

    def __init__(self, policy: Rewind) -> None:
        self.policy = policy
        self.alarm: Alarm | None = None
        self._lock = Mutex()
        self._calls, self._round = 0, 0
        self._waits = False
        self._asked: Alarm | None = None
        self._next: int | None = None
        self._step = -1
        self._is_checked = self._is_named = False
        self._known: tuple[Mapping[str, Any], list[Loader[Any]]] | None = None
        self._positions: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=REMEMBERED_STEPS)
        self._bad_steps: list[int] = []
        self._woken, self._done = anyio.Event(), anyio.Event()
        self._decision: Promise[CallDecision] = Promise("the agreement of the ranks where to go back")

    def begin(self, engine: Engine, destination: Destination, submitter: Submitter, notes: CallNotes | None) -> None:
        """Listen, until `stop`, for bad steps of the ranks by *notes*; None: of this process alone."""
        self._engine, self._destination, self._submitter = engine, destination, submitter
        self._watch = MetricWatch(self.policy, lambda: engine.accelerator, engine.rank)
        self._notes = notes
        self._running = None if notes is None else engine.loop.submit(self._run)

    def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()

    # ------------------------------------------------------------------ signs of a bad step

    def on_event(self, event: Event) -> None:
        """Note numbers that ``screen="finite"`` has found; on the loop."""
        if isinstance(event, NotFiniteFound):
            found = ", ".join(list(event.tensors)[:3])
            self._raise(Alarm(event.step, f"{found} has numbers that are NaN or infinite", self._engine.rank, False))

    def ask(self, reason: str, step: int | None) -> None:
        """Go back in the next call of all ranks. Any thread."""
        self._asked = Alarm(-1 if step is None else step, redact(reason), self._engine.rank)

    def _raise(self, alarm: Alarm) -> None:
        """Note the first bad step of this rank, and notify the others. Any thread."""
        with self._lock:
            if self.alarm is not None and self.alarm.step <= alarm.step:
                return
            self.alarm = alarm
            self._waits = True
        logger.warning("step %d is bad on rank %d: %s", alarm.step, alarm.rank, alarm.reason)
        if self._notes is None:
            self._decision.resolve(CallDecision(0))
        else:
            self._engine.loop.call_soon(self._woken.set)

    def refusal(self, step: int) -> BadStepError | None:
        """Return why this rank must not take part in a save now; None where nothing is bad. On the training thread."""
        if self.alarm is None and (alarm := self._watch.judge(step, {}, now=True)) is not None:
            self._raise(alarm)
        alarm = self.alarm
        if alarm is None:
            return None
        return BadStepError(f"step {step} is not saved: step {alarm.step} is bad on rank {alarm.rank}, {alarm.reason}")

    def check_end(self) -> None:
        """Raise `RewindExhaustedError` where the run ends with a bad step."""
        alarm, self.alarm = self.alarm, None
        if alarm is not None:
            raise RewindExhaustedError(
                f"the run ends with step {alarm.step}, which is bad: {alarm.reason}. It is not saved: start the program "
                "again, and it goes on from the last good step",
                *(alarm.step, alarm.reason),
            )

    # ------------------------------------------------------------------ the training thread

    @property
    def has_begun(self) -> bool:
        """Whether ``advance`` was called."""
        return self._step >= 0

    def passes(self, request: SaveRequest, *, due: bool) -> bool:
        """Enter a call of ``advance``, of a step that is *due* to be saved or not; return whether nothing is bad, anywhere.

        Raises:
            UsageError: after a rewind, the program has not gone on with the step that was returned.
        """
        step, state = request.step, request.state
        if self._next is not None and step != self._next:
            raise UsageError(
                f"advance({step}): the run was set back, and goes on with step {self._next}: write "
                "`step = ckpt.advance(step, …)` in a `while` loop, and train that step next"
            )
        self._next, self._step = None, step
        self.note_position(step, state)
        if self._notes is not None:
            self._notes.begin()
        self._judge(request, due=due)
        with self._lock:
            if not self._waits:
                self._calls += 1
                return True
        return False

    def note_position(self, step: int, state: Mapping[str, Any]) -> None:
        """Note where the loaders of *state* are at *step*."""
        if loaders := self._loaders_in(state):
            self._positions.append((step, tuple([loader.position for loader in loaders])))

    def _judge(self, request: SaveRequest, *, due: bool) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            step = asked.step if 0 <= asked.step < request.step else request.step
            self._raise(msgspec.structs.replace(asked, step=step))
        metrics = request.metrics if isinstance(request.metrics, dict) else {}  # else it is refused when it is saved
        if not self._is_named and metrics:
            self._is_named = True
            self._check_names(metrics)
        alarm = self._watch.judge(request.step, metrics, now=due)
        if alarm is not None:
            self._raise(alarm)

    def _check_names(self, metrics: Mapping[str, Any]) -> None:
        """Warn, in the first call with metrics, where none of them is looked at."""
        if not any(name in metrics for name in self._watch.names):
            logger.warning(
                "Rewind looks at the metrics %s, and advance() has %s: name the loss, as in Rewind(loss='train_loss')",
                *(", ".join(map(repr, self._watch.names)), ", ".join(map(repr, metrics))),
            )

    def _loaders_in(self, state: Mapping[str, Any]) -> list[Loader[Any]]:
        if self._known is None or self._known[0] is not state:
            self._known = state, [loader for _, loader in find_objects(state, Loader)]
        if not self._is_checked:
            self._is_checked = True
            self._check_sources(state, self._known[1])
        return self._known[1]

    def _check_sources(self, state: Mapping[str, Any], loaders: list[Loader[Any]]) -> None:
        """Refuse, in the first call, loaders with which a rewind would go wrong; warn where no batch can be skipped."""
        for kind in (DataLoader, Dataset, Sampler):
            for path, value in find_objects(state, kind):
                raise UsageError(
                    f"{join_name(path)}: a rewind does not set back the loop over a {type(value).__name__}: wrap it in "
                    "aiockpt.Loader(…), and iterate over that"
                )
        if self.policy.skip is None:
            return
        if any(loader.counts_trained for loader in loaders):
            raise UsageError(
                "Rewind(skip=…) cannot tell which batches a step had of a Loader(count='trained'): give Rewind(skip=None)"
            )
        if not loaders and self._engine.rank == 0:
            logger.warning(
                "Rewind(skip='%s'): the state has no aiockpt.Loader, so that a rewind sets back the state and no loop over "
                "data: the program goes on with its next batch. Put an aiockpt.Loader into the state, and iterate over it",
                self.policy.skip,
            )

    async def set_back(self, request: SaveRequest, load: LoadStep, save: StartSave, wait: Wait) -> int | None:
        """Set the run back, if it is this call; return the step to go on with, or None where the call passes.

        It raises as `aiockpt.Checkpointer.advance`. *wait* waits for what it is given, and returns its value.
        """
        decision = await wait(Future(self._decision))
        self._calls += 1
        if decision.failure:
            raise RankError(f"a step is bad, and the ranks could not agree where to go back: {decision.failure}")
        if self._calls < decision.call:
            return None
        begun_ns, loaders = self._engine.now_ns(), self._loaders_in(request.state)
        marks = [loader.mark() for loader in loaders]
        good = await self._load(load, wait)
        skips = self._find_skips(good.alarm, len(loaders))
        skipped = [loader.go_on(mark, skip) for loader, mark, skip in zip(loaders, marks, skips, strict=True)]
        self._reset(good.step)
        self.note_position(good.step, request.state)
        rewound = self._report(good, max(skipped, default=0), begun_ns)
        self._check_count(rewound)
        if self.policy.on_rewind is not None:
            self.policy.on_rewind(rewound)
        if self._engine.options.on_exists == "new_generation":
            metrics = self.with_skipped(good.metrics, request.state)
            again = save(msgspec.structs.replace(request, step=good.step, metrics=metrics))
            await wait(self._operation("save of the step gone back to", self._settle, [promise_of(again)]))
        self._next = good.step + 1
        return self._next

    async def _load(self, load: LoadStep, wait: Wait) -> GoodStep:
        """Load the newest good step that can be read."""
        below: int | None = None
        for trial in itertools.count():
            good = await wait(self._operation("choice of a good step", self._choose, trial, below))
            if good.failure:
                raise RewindExhaustedError(good.failure, good.alarm.step, good.alarm.reason)
            try:
                await wait(load(good.step))
                break
            except CorruptionError as error:
                logger.warning("step %d cannot be gone back to: %s", good.step, error)
                below = good.step
        return good  # type: ignore[no-any-return]

    def _find_skips(self, alarm: Alarm, count: int) -> list[tuple[int | None, int] | None]:
        """Return the positions to skip in each loader: from, or None for the loaded position, and to."""
        if self.policy.skip is None:
            return [None] * count
        before = [positions for step, positions in self._positions if step < alarm.step and len(positions) == count]
        bad = next((positions for step, positions in self._positions if step == alarm.step), None)
        if bad is None or len(bad) != count:
            bad = self._positions[-1][1] if self._positions else ()
        is_exact = self.policy.skip == "bad" and alarm.exact and before
        return [(before[-1][at] if is_exact else None, bad[at]) for at in range(count)]

    def _reset(self, step: int) -> None:
        """Forget what was known of later steps than the good one, and of what was bad."""
        self._watch.go_back(step)
        while self._positions and self._positions[-1][0] >= step:
            self._positions.pop()
        self._decision = Promise(self._decision.what)
        with self._lock:
            self.alarm, self._waits = None, False
            self._round += 1
        self._engine.loop.call_soon(self._done.set)

    def _report(self, good: GoodStep, skipped: int, begun_ns: int) -> Rewound:
        engine, alarm = self._engine, good.alarm
        rewound = Rewound(
            at_ns=engine.now_ns(),
            step=good.step,
            bad_step=alarm.step,
            reason=alarm.reason,
            bad_rank=alarm.rank,
            skipped=skipped,
            seconds=engine.since_s(begun_ns),
        )
        engine.loop.call_soon(engine.emit, rewound)
        if engine.rank == 0:
            logger.warning(
                "the run is set back from step %d to step %d, for step %d is bad on rank %d: %s (batches skipped: %d)",
                *(self._step, good.step, alarm.step, alarm.rank, alarm.reason, skipped),
            )
        return rewound

    def _check_count(self, rewound: Rewound) -> None:
        policy, bad = self.policy, rewound.bad_step
        self._bad_steps = [step for step in self._bad_steps if step > bad - policy.within] + [bad]
        if len(self._bad_steps) > policy.most:
            raise RewindExhaustedError(
                f"{len(self._bad_steps)} rewinds within {policy.within} steps, and Rewind(most={policy.most}): step {bad} "
                f"is bad, {rewound.reason}. The state is that of step {rewound.step}, which a resume takes: look at the "
                "data and the rate before you go on",
                *(bad, rewound.reason),
            )

    def with_skipped(self, metrics: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics of a save with the number of batches that the run has skipped, where it has."""
        skipped = max((loader.skipped_count for loader in self._loaders_in(state)), default=0)
        return {"skipped_batches": skipped, **metrics} if skipped and isinstance(metrics, Mapping) else metrics

    def _operation(self, what: str, work: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        promise: Promise[T] = Promise(what)
        promise.run(self._engine.loop, work, *args)
        return Future(promise)

    # ------------------------------------------------------------------ the loop thread

    async def _run(self) -> None:
        """Agree with the other ranks, each time that one of them has a bad step."""
        assert self._notes is not None
        deadline_s = self._engine.options.deadlines.ranks_s
        try:
            while True:
                key = f"{self._round}/"
                await self._wait_for_notice(key)
                await self._notes.notify(True, key)
                with self._lock:
                    self._waits, calls = True, self._calls
                what = "in which call to go back"
                self._decision.resolve(
                    await self._notes.agree(calls, CallDecision, CallDecision, deadline_s, what, key)
                )
                await self._done.wait()
                self._done = anyio.Event()
        except CheckpointError as error:
            self._decision.resolve(CallDecision(0, str(error)))

    async def _wait_for_notice(self, key: str) -> None:
        assert self._notes is not None
        notes = self._notes

        async def receive() -> None:
            await notes.receive(bool, key)
            tasks.cancel_scope.cancel()

        async with open_tasks() as tasks:
            tasks.start_soon(receive)
            while self.alarm is None:  # it may be woken late, by an alarm of the last time
                await self._woken.wait()
                self._woken = anyio.Event()
            tasks.cancel_scope.cancel()

    async def _choose(self, trial: int, below: int | None) -> GoodStep:
        """Return what all go back to, the same on all ranks; *below* a step that could not be read."""
        close_s = self._engine.options.deadlines.close_s
        if not trial:
            # What is under way is committed, or turns out bad on this rank or another, before all look at the outcome.
            await self._settle(self._submitter.in_flight)
        if self._notes is None:
            assert self.alarm is not None
            return await self._find_good(self.alarm, below)
        board, key = self._notes.board, f"{self._round}/{trial}"
        await board.post(f"{key}/alarm/{board.rank}", [] if self.alarm is None else [self.alarm])
        if not self._notes.leads:
            return await board.wait(f"{key}/good", GoodStep, 3 * close_s, "the choice of a good step")
        keys = {rank: f"{key}/alarm/{rank}" for rank in range(board.world_size)}
        alarms = await board.gather(keys, list[Alarm], 2 * close_s, "the bad steps of all ranks")
        first = min((one for some in alarms.values() for one in some), key=lambda alarm: (alarm.step, alarm.rank))
        good = await self._find_good(first, below)
        await board.post(f"{key}/good", good)
        return good

    async def _find_good(self, alarm: Alarm, below: int | None) -> GoodStep:
        """Find the newest good step, and delete later ones of this line; on rank 0."""
        try:
            found, later = await find_good(self._destination, alarm.step if below is None else below)
        except CheckpointError as error:
            return GoodStep(alarm, failure=f"step {alarm.step} is bad, {alarm.reason}; steps cannot be listed: {error}")
        for step in sorted({step for step in later if step >= alarm.step}):
            try:
                await maintenance.delete(self._destination, step)
            except CheckpointError as error:
                logger.warning("step %d is later than a bad one, and cannot be deleted: %s", step, error)
        if found is None:
            failure = (
                f"step {alarm.step} is bad on rank {alarm.rank}, {alarm.reason}, and no good step before it is saved: "
                "save more often (every=), or before the first step"
            )
            return GoodStep(alarm, failure=failure)
        return GoodStep(alarm, found.step, dict(found.metrics))

    async def _settle(self, saves: Sequence[SavePromise]) -> None:
        """Wait until saves have ended, for as long as the end of a run would."""
        with anyio.move_on_after(self._engine.options.deadlines.close_s):
            for save in saves:
                save.expedite()
                await save.settled()
