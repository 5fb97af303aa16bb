"""Submission of saves from the caller's thread to the loop: walked, captured, planned, registered, copied; few at a time.

Guarantees:

- A save whose state is copied beside the program is registered, and its state guarded, before the call returns; then a
  worker copies it.
- A save that must wait for another one to end, or for other ranks, never holds up an event loop: it waits on a worker, and
  each change of the state waits for it.
- Any thread may save: calls are accepted one at a time, except for their waits and the copy itself.
- States are copied one after the other, in the order of the calls, so that two never wait for each other's slabs.
- After the first snapshot of a state the staging pool is filled until it holds all of it, so that later ones are one copy;
  except where copies end in time with a few slabs.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch

from aiockpt.adapters.native import StateWalker
from aiockpt.adapters.selection import ALL, Selection
from aiockpt.engine.alone import Destination
from aiockpt.engine.coordinator import Coordinator
from aiockpt.engine.job import Capture, Round, SaveGuard, SaveJob, SaveRequest, Snapshotter
from aiockpt.errors import CheckpointError, ManifestError, SaveSkippedError, UsageError, kind_in_words
from aiockpt.events import SaveSkipped
from aiockpt.format.document import check_tree
from aiockpt.futures import SaveFuture, SaveResult
from aiockpt.options import Snapshot, check_choice
from aiockpt.runtime.host_memory import available_bytes
from aiockpt.runtime.limits import Limiter, open_tasks, run_blocking
from aiockpt.runtime.loop import Mutex, holds_up_event_loop, made_for_the_loop, thread_id
from aiockpt.runtime.pending_copies import PendingCopies
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.state.shards import ShardedState
from aiockpt.units import count, size

logger = logging.getLogger("aiockpt")


class Submitter:
    """Starts the saves of one checkpointer and knows which are in flight.

    Args:
        destination: where saves go.
        coordinator: of this process and those that save with it.
        copies: which copies are made beside the program, and which changes of the state are made by hand.
        snapshotter: captures the states that are not copied in the call alone.
    """

    def __init__(
        self, destination: Destination, coordinator: Coordinator, copies: PendingCopies, snapshotter: Snapshotter
    ) -> None:
        self._destination, self._coordinator = destination, coordinator
        self._engine = engine = destination.engine
        self._copies = copies
        self._snapshotter = snapshotter
        self._walker = StateWalker(rank=engine.rank, alone=engine.world_size == 1)
        self._calls = Mutex()  # around what a call finds out of the state and of other saves; never around a wait
        self._saving: set[int] = set()  # the threads that are inside `submit`
        self._saves: list[SavePromise] = []
        self._metrics: set[str] = set()  # that saves have had, or were missed in
        self._copying = Limiter("snapshot", 1)
        self._last_copy: Promise[None] | None = None

    @property
    def in_flight(self) -> Sequence[SavePromise]:
        """The saves that have not ended."""
        return [promise for promise in self._saves if not promise.is_settled]

    def submit(self, request: SaveRequest) -> SaveFuture:
        """Start a save, or skip it where the policy says so. Raises as `aiockpt.Checkpointer.save`.

        If the call is interrupted anywhere, the save ends. Failures of other ranks, the storage or a writer process are
        raised only with ``on_error="raise"``.
        """
        begun_ns = self._engine.now_ns()
        self.refuse_inside_save("save()")
        thread = thread_id()
        job: SaveJob | None = None
        before: Sequence[Promise[Any]] | None = None
        try:
            self._saving.add(thread)
            with self._calls:
                entered = self._enter(request, begun_ns)
                if isinstance(entered, SaveFuture):
                    return entered
                job, before = entered
                if before is not None:  # not before: an interrupt up to here leaves nothing that others wait for
                    self._note_save(job)
            if before is not None:
                # One that is stuck for longer is not waited for: this save then runs beside it.
                for point in before:
                    point.wait_anyway(self._engine.options.deadlines.close_s)
                self._start(job)
            return job.future
        except BaseException as error:
            if job is None or before is None or not self._refuse_in_call(job, error):
                raise
            return job.future
        finally:
            self._saving.discard(thread)

    def refuse_inside_save(self, what: str) -> None:
        """Raise where this thread is inside `submit` already: *what* would read half a state, or wait for itself.

        Raises:
            UsageError: a signal handler calls, or a method of the state that is being saved.
        """
        if thread_id() in self._saving:
            raise UsageError(
                f"{what} inside save(), from a signal handler or a method of the state: set a flag there, and call it "
                "in the loop"
            )

    def _enter(self, request: SaveRequest, begun_ns: int) -> SaveFuture | tuple[SaveJob, Sequence[Promise[Any]] | None]:
        """Capture the state, or skip the save. Return what its copy must wait for, where the caller is to make it."""
        engine, step = self._engine, request.step
        # Before all that may skip or refuse the save: ranks number the saves of a step by their calls.
        save_round = self._coordinator.begin(step)
        try:
            snapshot = engine.options.snapshot if request.snapshot is None else request.snapshot
            check_choice("snapshot", snapshot, Snapshot)
            self._copies.check_unchanging()
            # Before the capture: what is found torn in an earlier copy is copied in the call by this save.
            self._copies.recheck()
            if not self._destination.takes(step):
                return self._skip(save_round, "no tier takes it (Tier(every=…))")
            when_full = engine.options.when_full
            if when_full != "wait" and (reason := self._why_full(snapshot)):
                if when_full == "skip":
                    return self._skip(save_round, f"{reason} and when_full is 'skip'")
                snapshot = "eager"
            metrics = _plain_metrics(request.metrics)
            self._check_best(step, metrics)
            user = None if request.user is None else plain_json("user", request.user)
            copying = self._must_be_copied_first()
            before = [point for point in (self._must_end_first(), copying) if point]
            walked_from_ns = engine.now_ns()
            walked = self._walker.walk(request.state, request.selection or ALL)
            walked_ns = engine.now_ns()
            waits = bool(before) or engine.world_size > 1
            captured, capture = self._capture(walked, request.state, snapshot, busy=copying is not None, waits=waits)
            request = msgspec.structs.replace(request, state={}, metrics=metrics, user=user, begun_ns=begun_ns)
            job = SaveJob(engine, save_round, request, captured, capture)
            job.stages.note("walk", walked_from_ns, walked_ns)
            self._destination.prepare(job.promise)
        except BaseException as error:
            save_round.abort(error)
            raise
        if not capture.beside:
            return job, before
        self._register(job, before)
        return job, None

    def _check_best(self, step: int, metrics: Collection[str]) -> None:
        """Warn once where retention chooses by a metric that no save has passed yet: its name may be misspelt."""
        rules = [place.retention for place in self._destination.places]
        wanted = {rule.best.metric for rule in rules if rule is not None and rule.best is not None} - self._metrics
        self._metrics |= {*metrics, *wanted}
        if self._engine.rank == 0:
            for metric in wanted.difference(metrics):
                _warn_of_missing(step, metric, metrics)

    def _note_save(self, job: SaveJob) -> None:
        """Make later saves wait for this one."""
        self._saves.append(job.promise)
        self._last_copy = job.copied

    def _capture(
        self, walked: ShardedState, state: Mapping[str, Any], snapshot: Snapshot, *, busy: bool, waits: bool
    ) -> tuple[ShardedState, Capture]:
        """Capture the state for its copy: in place for a copy in the call, else for a copy beside the program."""
        engine = self._engine
        engine.pin(walked)
        if snapshot != "eager" or holds_up_event_loop():
            return self._snapshotter.capture(walked, state, snapshot, busy=busy, waits=waits)
        guard = self._snapshotter.guard_in_call(walked) if engine.options.lazy.debug == "digest" else SaveGuard()
        return walked, Capture(after=engine.compute_events(walked), guard=guard)

    def _register(self, job: SaveJob, before: Sequence[Promise[Any]]) -> None:
        """Begin a copy beside the program, and make later saves, and each change of the state, wait for it."""
        try:
            self._note_save(job)
            job.hand_to_guard()
            if before:
                self._engine.loop.submit(self._copy_later, before, job)
            else:
                self._engine.loop.in_worker(self._copy_elsewhere, job)
        except BaseException as error:  # an interrupt: nothing else would end it
            self._refuse(job, error)
            raise

    async def _copy_later(self, before: Sequence[Promise[Any]], job: SaveJob) -> None:
        """Wait for what must come first: on the loop, because workers that wait would be missing for writes."""
        for point in before:
            await point.settled_within(self._engine.options.deadlines.close_s)
        await run_blocking(self._copying, self._copy_elsewhere, job)

    def _copy_elsewhere(self, job: SaveJob) -> None:
        try:
            self._start(job)
        except Exception as error:  # noqa: BLE001  the future carries it to the caller
            self._refuse(job, error)

    def _refuse(self, job: SaveJob, error: BaseException) -> None:
        """End a save that may not have begun; if so, it cannot notify the other ranks."""
        if not job.begun:
            job.round.abort(error)
        job.refuse(error)

    def _refuse_in_call(self, job: SaveJob, error: BaseException) -> bool:
        """End a save that its caller was to copy; return whether *error* is left to its future, by ``on_error``."""
        is_of_others = isinstance(error, CheckpointError) and not isinstance(error, UsageError)
        left_to_future = self._engine.options.on_error != "raise" and is_of_others
        if left_to_future or job.begun:
            self._refuse(job, error)
        else:  # known to the caller only
            job.round.abort(error)
            job.promise.fail(error)
        return left_to_future

    def _start(self, job: SaveJob) -> None:
        """Plan this save, have it run (from there on it notifies the other ranks itself of failures), and copy its state."""
        # The job's handovers have events and locks that are waited for on the loop alone, and the caller may run trio.
        with made_for_the_loop():
            job.prepare()
        # Before it runs and is copied: with a writer process both use what this sets up.
        self._destination.announce(job)
        self._engine.pool.fit(job.plan.window_count, available_bytes)
        # Before `submit`: an interrupt right after that must end a save that runs, and not its round alone.
        job.begun = True
        self._engine.loop.submit(self._run, job)
        job.copy()

    async def _run(self, job: SaveJob) -> None:
        async with open_tasks() as tasks:
            if not self._engine.pool.has(job.plan.window_count):
                tasks.start_soon(self._fill_pool, job)
            with self._engine.calls.failing(job.fail):
                async with job.running():
                    self._engine.calls.refuse_while_late()
                    job.promise.resolve(await self._destination.save(job))
                # No await comes between the outcome and the lock of `clean_up`: `Shutdown` waits for one after the other.
                if job.promise.error is None and self._engine.rank == 0:
                    result = job.promise.value
                    if logger.isEnabledFor(logging.INFO):
                        _log_saved(result, self._engine.world_size)
                    if not result.existed:
                        await self._destination.clean_up(result)
        # Last, when nothing waits for this save: it takes milliseconds for each new slab.
        if not self._engine.pool.is_huge:
            await run_blocking(self._engine.state_work, self._engine.pool.make_huge)

    async def _fill_pool(self, job: SaveJob) -> None:
        """Make the slabs that the next snapshot of this state will need.

        A first copy into untouched memory is so slow that writers return slabs before new ones are allocated: it ends with
        a handful, and without this every later save would allocate some more (measured: 5 × a plain copy, not 1.2 ×).
        """
        await job.copied.settled()
        if job.guard.needs_all_slabs:
            try:
                await run_blocking(self._engine.state_work, self._engine.pool.warm_up, job.plan.window_count)
            except Exception as error:  # noqa: BLE001  the save itself needs none of it
                logger.warning("staging pool: too few slabs; the next snapshot waits for free ones: %s", error)

    def _why_full(self, snapshot: Snapshot) -> str | None:
        """Return why a save that begins now would wait; None when it would not."""
        if self._is_full():
            many = len(self._saves)
            return f"{count(many, 'save')} {'is' if many == 1 else 'are'} in flight"
        if snapshot == "lazy" and self._engine.pool.is_full:
            return "the staging pool has no slab free"
        return None

    def _is_full(self) -> bool:
        self._saves = list(self.in_flight)
        return len(self._saves) >= self._engine.options.max_in_flight

    def _must_end_first(self) -> SavePromise | None:
        """Return the save that must end before a new one may begin, so that at most ``max_in_flight`` run."""
        # Counted from the newest: saves that wait are in the list, too, and each of them waits for another one.
        return self._saves[-self._engine.options.max_in_flight] if self._is_full() else None

    def _must_be_copied_first(self) -> Promise[None] | None:
        """Return the snapshot that is being copied."""
        last = self._last_copy
        return None if last is None or last.is_settled else last

    def _skip(self, save_round: Round, reason: str) -> SaveFuture:
        step = save_round.name.step
        promise = SavePromise(step)
        skipped = SaveSkippedError(f"step {step} was not saved: {reason}")
        save_round.abort(skipped)
        promise.fail(skipped)
        event = SaveSkipped(at_ns=self._engine.now_ns(), step=step, reason=reason)
        self._engine.loop.call_soon(self._engine.emit, event)
        return SaveFuture(promise)

    def refuse(self, step: int, error: CheckpointError) -> SaveFuture:
        """Take no part in a save of *step*, so that no rank commits it, because of *error*; return a future of that."""
        self._coordinator.begin(step).abort(error)
        promise = SavePromise(step)
        promise.fail(error)
        return SaveFuture(promise)

    def walk(self, state: Mapping[str, Any], selection: Selection = ALL) -> ShardedState:
        """Return the part of *state* that *selection* chooses; on the caller's thread."""
        with self._calls:
            return self._walker.walk(state, selection)

    def warm_up(self, walked: ShardedState, warm_up_round: Round) -> None:
        """Plan the save and its copy, and allocate the pool. Runs on a worker: other ranks may come later."""
        try:
            share = warm_up_round.share(walked)
        except BaseException as error:
            warm_up_round.abort(error)
            raise
        warm_up_round.release()
        plan, pool = self._engine.plan(share), self._engine.pool
        self._engine.pin(share)
        pool.fit(plan.window_count, available_bytes)
        pool.warm_up(plan.window_count)
        pool.make_huge()
        self._engine.copy_program(plan, share)

    def release(self) -> None:
        """Release the last states, and all that is cached of them."""
        self._walker.release()


def check_step(step: object) -> int:
    """Return *step* as an int: one, or what counts as one (an integer of numpy, an integer tensor without axes).

    Raises:
        UsageError: it is no number of a step; a state in its place is not printed.
    """
    if type(step) is int and 0 <= step < 2**63:
        return step
    return _as_step(step)


def _as_step(step: object) -> int:
    if not isinstance(step, bool | np.bool_) and getattr(step, "dtype", None) is not torch.bool:
        with suppress(TypeError, ValueError, RuntimeError):
            if 0 <= (number := operator.index(step)) < 2**63:  # type: ignore[arg-type]
                return int(number)
    # CPython refuses to print an int of more than 4,300 digits.
    if isinstance(step, int) and step.bit_length() > 64:
        given = f"an integer of {step.bit_length()} bits"
    else:
        given = repr(step) if isinstance(step, int | float | str | np.generic) else f"a {type(step).__name__}"
    raise UsageError(f"step={given}: give an int of 0 or more, below 2**63")


def _log_saved(saved: SaveResult, world_size: int) -> None:
    """Log a save that is committed, at level INFO, on rank 0 alone: the step, its size, the seconds, and where."""
    if saved.existed:
        logger.info("step %d is committed already, and left as it is, in %s", saved.step, saved.url)
        return
    whose = f" of rank 0 of {world_size}" if world_size > 1 else ""
    logger.info(
        "saved step %d%s: %s%s in %.2f s, to %s",
        saved.step,
        f" (generation {saved.generation})" if saved.generation > 1 else "",
        size(saved.bytes),
        whose,
        saved.seconds,
        saved.url,
    )


def _warn_of_missing(step: int, metric: str, metrics: Collection[str]) -> None:
    has = f"it has {', '.join(map(repr, metrics))}" if metrics else f"pass metrics={{{metric!r}: …}}"
    logger.warning(
        "step %d is saved without the metric of Retention(best=Best(%r)): %s. While no step has it, none is deleted",
        *(step, metric, has),
    )


def detach(metrics: Mapping[str, float | torch.Tensor] | None) -> Mapping[str, float | torch.Tensor]:
    """Return *metrics* without the graphs that computed them: a request may be kept until the next step."""
    if not isinstance(metrics, Mapping):
        return metrics or {}  # refused when it is saved
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


def _plain_metrics(metrics: Mapping[str, float | torch.Tensor]) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise UsageError(f"metrics: give a dict of names to numbers, and not {kind_in_words(metrics)}")
    return dict(_plain_metric(name, value) for name, value in metrics.items())


def _plain_metric(name: object, value: float | torch.Tensor) -> tuple[str, float]:
    try:
        # What UTF-8 cannot write is no name; and of a loss that was not detached torch would warn.
        return str(name).encode().decode(), float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"metrics[{name!r}]: give a number, or a tensor of one element, and not {kind_in_words(value)} ({error})"
        ) from error


def plain_json(option: str, value: object) -> object:
    """Return a value as JSON has it.

    Raises:
        UsageError: JSON cannot hold it; the message names the part that it cannot hold.
    """
    try:
        encoded = msgspec.json.encode(value)
        check_tree(encoded, "it")
        return msgspec.json.decode(encoded)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError, ManifestError) as error:
        name, part = _find_refused(option, value)
        raise UsageError(
            f"{name}: give what JSON can hold (texts, numbers, None, lists and dicts of them), and not "
            f"{kind_in_words(part)} ({error})"
        ) from error


def _find_refused(name: str, value: object) -> tuple[str, object]:
    """Return the innermost part of *value* that JSON cannot hold, and its name."""
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        try:
            msgspec.json.encode(part)
        except RecursionError:  # it contains itself, or might as well
            return name, value
        except (TypeError, ValueError, msgspec.MsgspecError):
            return _find_refused(f"{name}[{key!r}]", part)
    return name, value
