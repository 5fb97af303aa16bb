"""The public API: what a training program calls, from any thread. Saves, loads and queries return futures.

``Checkpointer`` walks the state and takes the snapshot on the caller's thread; the rest runs on its own loop thread
(`aiockpt.engine`) and on workers.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, TypeVarTuple, get_args

import msgspec
import torch

from aiockpt.adapters.optimizer_forms import warn_of_state_dicts
from aiockpt.adapters.rename import Renames, Rules
from aiockpt.adapters.selection import Selection, Trainable, make_selection
from aiockpt.adapters.target import OptimizerState
from aiockpt.engine import maintenance
from aiockpt.engine.alone import Destination, OnePlace
from aiockpt.engine.context import Place as EnginePlace
from aiockpt.engine.coordinator import LoadRound
from aiockpt.engine.find import find_best, find_manifest
from aiockpt.engine.job import WARM_UP, SaveRequest
from aiockpt.engine.load import Filled, LoadRequest, log_loaded, log_resumed, read, reporting_failures
from aiockpt.engine.maintenance import Copied, Description, Pruned, StepInfo, Verified
from aiockpt.engine.submit import check_step, detach, plain_json
from aiockpt.errors import BadStepError, StepNotFoundError, UsageError
from aiockpt.events import Observer, Statistics, StatisticsReader
from aiockpt.futures import (
    Future,
    LoadFuture,
    LoadResult,
    SaveFuture,
    Stage,
    run_blocking_here,
    wait_here,
    wait_in_loop,
)
from aiockpt.options import (
    Best,
    Lazy,
    Limits,
    OnError,
    OnExists,
    Options,
    Replicas,
    Retention,
    Screen,
    Snapshot,
    Tier,
    Worker,
    check_tiers,
    keywords_checked,
    refuse_value,
)
from aiockpt.pipeline.wrong_places import refuse_step_folder
from aiockpt.places.readers.hold import Hold
from aiockpt.places.readers.step_watch import StepWatch
from aiockpt.places.repair import Repaired
from aiockpt.policies.cadence import Cadence
from aiockpt.runtime.limits import run_blocking
from aiockpt.runtime.loop import refuse_in_event_loop, refuse_on_loop_thread, run_in_thread
from aiockpt.runtime.pending_copies import Mutating
from aiockpt.runtime.progress import find_progress
from aiockpt.runtime.promise import LoadPromise, Promise, SavePromise
from aiockpt.runtime.world import Ranks, World, check_found, find_ranks
from aiockpt.session.loop_watch import LoopWatch
from aiockpt.session.preemption import Preemption
from aiockpt.session.preemption.policy import OnPreempt
from aiockpt.session.rewind.rules import Rewind
from aiockpt.session.wiring import Assembly
from aiockpt.sizing.estimate import Estimate, estimate
from aiockpt.sizing.to_come import find_state_to_come
from aiockpt.storage.backend import Backend
from aiockpt.storage.open import open_backend

if TYPE_CHECKING:
    from aiockpt.convert.foreign.fork import ForeignFork
    from aiockpt.publish.publication import Publish, Published
    from aiockpt.publish.publications import Publications

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
State = Mapping[str, Any]
Place = str | os.PathLike[str] | Backend
Metrics = Mapping[str, float | torch.Tensor]

_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


def _ignore(size_bytes: int) -> None:
    """The default progress callback."""


class Checkpointer:
    """Saves and loads the state of one training run below one root.

    Use it as ``with`` or ``async with``: leaving the block waits until all is committed, and raises what went wrong. A
    program that ends without either still finishes its saves. Any thread may call it; a forked child may not.

    Args:
        url: where to: ``/path`` (made with its parents by the first save), ``file://``, ``memory://name``,
            ``s3://bucket/prefix``, …, or a `aiockpt.storage.backend.Backend`; or several `Tier`, the nearest first:
            ``[Tier("shm://run"), Tier("/local"), Tier("s3://bucket/run", every=10)]``.
        retention: what to keep, applied after each commit; None keeps all.
        snapshot: when ``save`` copies the state: ``"eager"``, before it returns, or ``"lazy"``, beside the next forward and
            backward; the next step of any optimizer waits for what is left. ``"device"`` takes a copy on the device first,
            where there is room, and no optimizer waits; else it is lazy. A call may override it.
        lazy: what a lazy save copies in the call all the same, and whether it compares digests; see `Lazy`.
        screen: ``"finite"`` checks for numbers that are NaN or infinite while hashing. A step with some is committed,
            and reported (`aiockpt.events.NotFiniteFound`); retention keeps the newest one without.
        replicas: ``"check"`` fails a save in which ranks have different values of one tensor, and names it; ``"first"``
            saves one rank's unchecked. Of buffers of modules those of the lowest rank are saved. See
            docs/guide/ranks.md.
        every: ``step()`` saves when the step is a multiple of it, when so much time has passed (``"30min"``), or when a
            `Cadence` says so: on all ranks in the same step. None leaves the decision to you.
        only: what of the state is saved, unless a call says otherwise; see `save`. For LoRA: ``only=aiockpt.trainable()``.
        exclude: the same for what is not saved.
        limits: sizes of pool and blocks, deadlines, and how many saves run at once; see `Limits`.
        on_exists: what to do when a step is committed already: add a ``"new_generation"`` of it, which readers use from
            then on, ``"skip"``, or ``"raise"``.
        on_error: a failed background save is raised by the next call (``"raise"``), warned of, or given to a callable.
        save_last: when the block is left without an error, save the last step that ``step()`` was given, unless it is saved
            already, or the state has changed since.
        worker: what writes: a ``"thread"`` of this process, or a ``"process"`` of its own, which finishes every save that is
            ``snapshotted`` although this one is killed in the next instant; of several ranks each has one, and a save that
            is ``snapshotted`` on all of them is finished although all are killed. For Linux, and places that are given by
            URL. Loading, listing and verifying stay here.
        on_preempt: ``"save"``, or a `Preemption`: when the run must end (SIGTERM, SIGUSR1, the end of its allocation),
            the next ``step`` or ``save`` saves once more, or flushes what was saved a moment ago, and raises `Preempted`.
        rewind: when a step is bad (a loss that is NaN, or far above the last ones), ``advance`` sets all ranks back to the
            last good step, and leaves out the batches of the bad one; see `Rewind`.
        observers: notified of events (`aiockpt.events`), on the loop thread; a ``BackgroundTask`` has a task there too.
        ranks: this process among those that save one state together, and the group that reads once; None uses
            ``torch.distributed``. With several, every rank makes the same calls: saves are matched by their step, loads and
            ``warm_up`` by their number.
        publish: where the weights of committed steps are published as versions for other programs: a folder, a URL, or
            a `Publish`. A version is a whole Hugging Face folder, or what has changed since the one before.
        config: the configuration of the program, a dict of what JSON can hold, kept with each step. A load logs what has
            changed since (``LoadResult.config_changes``), and ``aiockpt diff`` shows it. Values under names of secrets are
            stored, and not shown.
        world: the outside (files, clock, random bytes, threads); tests pass a simulated one.

    Raises:
        UsageError: an option or the URL cannot be used; the message says which and what can.
    """

    @keywords_checked
    def __init__(
        self,
        url: Place | Sequence[Tier | Place],
        *,
        snapshot: Snapshot = "eager",
        lazy: Lazy = Lazy(),
        screen: Screen | None = None,
        replicas: Replicas = "check",
        retention: Retention | None = None,
        every: int | str | Cadence | None = None,
        only: str | Sequence[str] | Trainable | None = None,
        exclude: str | Sequence[str] | None = None,
        limits: Limits = Limits(),
        on_exists: OnExists = "new_generation",
        on_error: OnError = "raise",
        save_last: bool = True,
        worker: Worker = "thread",
        on_preempt: OnPreempt | Preemption | None = None,
        rewind: Rewind | None = None,
        observers: Sequence[Observer] = (),
        ranks: Ranks | None = None,
        publish: Place | Publish | None = None,
        config: Mapping[str, Any] | None = None,
        world: World | None = None,
    ) -> None:
        _check_kinds(lazy=(lazy, Lazy), limits=(limits, Limits))
        self._selection = make_selection(only, exclude)
        self._state_dicts_checked: set[str] = set()
        self._cadence = (
            Cadence.by_time(every) if isinstance(every, str) else every if isinstance(every, Cadence) else None
        )
        self._options = options = Options(
            snapshot=snapshot,
            lazy=lazy,
            screen=screen,
            replicas=replicas,
            retention=retention,
            every=None if isinstance(every, str | Cadence) else every,
            on_exists=on_exists,
            on_error=on_error,
            save_last=save_last,
            worker=worker,
            **msgspec.structs.asdict(limits),
            config=_as_config(config),
        )
        _check_kinds(ranks=(ranks, Ranks | None), world=(world, World | None), rewind=(rewind, Rewind | None))
        load_group = None if ranks is None else ranks.load_group
        # Ranks(load_group=…) takes all else from torch.distributed.
        asks = ranks is None or (load_group is not None and ranks.world_size == 1)
        self._found_ranks = find_ranks() if asks else None
        if self._found_ranks is not None:
            ranks = msgspec.structs.replace(self._found_ranks, load_group=load_group)
        # A cadence that is given as every= and among the observers, too, is notified once.
        others = [observer for observer in _as_observers(observers) if observer is not self._cadence]
        self._parts = parts = Assembly(
            self,
            self._close_at_exit,
            options=options,
            tiers=_as_tiers(url, retention),
            observers=others,
            cadence=self._cadence,
            on_preempt=on_preempt,
            rewind=rewind,
            ranks=ranks or Ranks(),
            world=world,
        )
        self._loop, self._engine, self._destination = parts.loop, parts.engine, parts.destination
        self._coordinator, self._copies, self._submitter = parts.coordinator, parts.copies, parts.submitter
        self._probe, self._interruption, self._rewinder = parts.probe, parts.interruption, parts.rewinder
        self._resumed_with: dict[str, Any] = {}
        self._loops, self._progress = LoopWatch(), find_progress()
        self._last_step, self._end = parts.last_step, parts.end
        for observer in others:
            if isinstance(observer, StatisticsReader):
                observer.read_statistics(self.statistics)
        self._publishes = publish is not None
        if publish is not None:
            self._publications.follow(publish)
        _open.add(self)

    # ------------------------------------------------------------------ save

    def save(
        self,
        step: int,
        state: State,
        *,
        snapshot: Snapshot | None = None,
        metrics: Metrics | None = None,
        user: object = None,
        only: str | Sequence[str] | Trainable | None = None,
        exclude: str | Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> SaveFuture:
        """Snapshot *state* and save it as *step* in the background.

        When this returns the state may change: its tensors were copied. Inside a running event loop a large state is
        copied on a worker instead; ``await save.snapshotted()`` before you change it (optimizers wait by themselves).

        A lazy save returns at once. What optimizers own is then copied beside forward and backward, and no optimizer of
        this process steps before that is done; everything else was copied in the call. To change such tensors in another
        way, wait: `mutating`, `barrier`, ``await save.snapshotted()``.

        Args:
            step: its number, 0 or more; integers of numpy and integer tensors without axes count.
            state: nested dict of modules, optimizers, anything with ``state_dict()/load_state_dict()``, tensors and plain
                values; see docs/guide/states.md.
            snapshot: ``"eager"``, ``"lazy"`` or ``"device"``; None uses what the checkpointer was made with.
            metrics: numbers (tensors of one element too) for ``Retention(best=…)``, ``load(best=…)`` and for people. Of
                several ranks those of the first are kept: average them over the ranks before.
            user: anything JSON can hold; kept in the manifest as JSON has it: a tuple as a list, NaN and infinity as None.
            only: names of the state, or their prefixes, to save; ``*`` stands for any part of a name, ``**`` for any
                number of them. Or a rule: ``aiockpt.trainable()`` leaves out frozen parameters. What is left out is noted
                with shape and dtype, and is no difference when the step is loaded: it stays as it is then. None uses what
                the checkpointer was made with; ``"**"`` is all.
            exclude: the same for what not to save.
            config: of this step, where it differs from the checkpointer's.

        Raises:
            UsageError: ``only`` or ``exclude`` names nothing of the state, or a part of what is saved as a whole.
            UnsupportedStateError: a leaf cannot be saved; it is named, and nothing was written.
            BackgroundSaveError: an *earlier* save failed (``on_error="raise"``); this one was started and is in ``.future``.
            Preempted: the run must end (``on_preempt``), and this save was the last one.
        """
        self._loop.check()
        request = SaveRequest(
            step=check_step(step),
            state=state,
            selection=self._select(only, exclude),
            snapshot=snapshot,
            metrics=detach(metrics),
            user=user,
            config=self._options.config if config is None else _as_config(config),
        )
        self._interruption.reach(request, self._start_save, asked=True)
        future = self._start_save(request)
        self._engine.failures.report(future)
        return future

    def _select(self, only: Any, exclude: Any) -> Selection:
        """Return what the arguments of a save select; without any, what the constructor's do."""
        return self._selection if only is None and exclude is None else make_selection(only, exclude, self._selection)

    def _start_save(self, request: SaveRequest) -> SaveFuture:
        """Start a save without reporting earlier failures."""
        self._check_call_of_ranks()
        refuse_on_loop_thread("save()")
        if self._rewinder is not None:
            refusal = self._rewinder.refusal(request.step)
            if refusal is not None:
                return self._submitter.refuse(request.step, refusal)
            metrics = self._rewinder.with_skipped(request.metrics, request.state)
            request = msgspec.structs.replace(request, metrics=metrics)
        self._progress.mark("save", request.step)
        self._probe.reached(request.step, request.state, request.metrics, saved=True)
        self._warn_of_state_dicts(request.state, "save")
        self._last_step.drop()
        future = self._submitter.submit(request)
        self._loops.saved(request.step, request.state)
        self._interruption.watch(future)
        self._probe.saved(request.step)
        self._progress.mark("train")
        return future

    def _warn_of_state_dicts(self, state: State, verb: Literal["save", "load"]) -> None:
        """Warn once of each, on one rank."""
        if self._engine.rank == 0 and verb not in self._state_dicts_checked:
            self._state_dicts_checked.add(verb)
            warn_of_state_dicts(state, verb)

    def warm_up(self, state: State) -> Future[None]:
        """Make the first save as cheap as the later ones: plan it, and fault the staging pool in, in the background."""
        self._check_call_of_ranks()
        self._submitter.refuse_inside_save("warm_up()")
        # Before the walk, which may raise: ranks number their calls.
        warm_up_round = self._coordinator.begin(WARM_UP)
        try:
            walked = self._submitter.walk(state, self._selection)
        except BaseException as error:
            warm_up_round.abort(error)
            raise
        work = self._engine.state_work
        return self._operation("warm_up", run_blocking, work, self._submitter.warm_up, walked, warm_up_round)

    def estimate(self, state: State) -> Future[Estimate]:
        """Estimate what memory, disk and network a save of *state* needs, and whether it is there; saves nothing.

        What optimizers will add in their first step is counted, too. Other ranks are not contacted: one alone may call.

        Raises: Those of `save` for a state that cannot be saved.
        """
        walked = self._submitter.walk(state, self._selection)
        to_come = find_state_to_come(state, walked.tensors, self._selection)
        work = partial(estimate, walked=walked, state=state, to_come=to_come, tiers=self._parts.tiers)
        return self._operation("estimate", work, self._destination, self._coordinator)

    def barrier(self) -> None:
        """Block until no snapshot is being copied, before you change the state by hand. Optimizers do it by themselves."""
        refuse_in_event_loop("barrier()", "write `await ckpt.wait_mutable()`")
        self._copies.wait()

    async def wait_mutable(self) -> None:
        """Wait until no snapshot is being copied, before you change the state by hand: `barrier` for an event loop."""
        await self._copies.wait_async()

    def mutating(self) -> Mutating:
        """Return the block to change the state in by hand: ``with ckpt.mutating():``, or ``async with`` in an event loop.

        It begins when no snapshot is being copied; a save inside it is a `UsageError`.
        """
        return Mutating(self._copies)

    # ------------------------------------------------------------------ load

    def load(
        self,
        state: State,
        step: int | None = None,
        *,
        only: Sequence[str] | None = None,
        strict: bool | Mapping[str, bool] = True,
        map: Mapping[str, str] | Callable[[str], str] | None = None,
        rename: Renames = (),
        optimizer_state: OptimizerState = "by_optimizer",
        fork: Place | None = None,
        best: str | Best | None = None,
    ) -> LoadFuture[LoadResult | None]:
        """Fill *state* in place from a step; from the newest valid one for None.

        Worker threads fill the tensors; schedulers, optimizer state and plain values are filled on the thread that waits
        for the future first. Without a wait the load is not complete.

        Args:
            state: as for ``save``; tensors are overwritten in place, lazily created optimizer state is created.
            only: top-level keys, or dotted prefixes of names, to load; None loads all.
            strict: raise unless what the state names fits exactly; top-level keys that only the checkpoint has are fine.
                False loads what fits and reports the rest (``LoadResult.differences``). ``{"model": False}`` does that for
                the named parts of the state; the rest is strict.
            map: from names in *state* to names in the checkpoint: ``map={"net": "model"}`` fills ``state["net"]`` from what
                was saved as ``"model"``, ``net.fc.weight`` from ``model.fc.weight``. An entry renames a leaf or all that
                is below it, the longest one wins. A function of a name does the same.
            rename: from names in the checkpoint to names in *state*, by regular expressions, one after the other (or by a
                function of a name): ``rename=[(r"^model\\.encoder\\.", "model.backbone.")]`` loads what was saved before a
                module was renamed, and the state of its optimizer with it. A rule that renames nothing does no harm, so
                that a script keeps its rules. ``LoadResult.renamed`` lists what was renamed.
            optimizer_state: ``"by_parameter"`` where optimizers are built differently now (a part of the parameters has
                another optimizer, a group was split): the optimizer state of a parameter follows it by name, from whichever
                optimizer had it, where it fits; else it begins anew. ``LoadResult.differences`` lists what began anew.
            fork: another run's place, from whose *step* this run begins while it has no step of its own; later starts load
                the newest of their own. What is saved records where it came from (``StepInfo.forked_from``). Or what other
                programs wrote: ``dcp:///path`` (all that `aiockpt.convert.foreign` opens) fills the state by its names,
                ``hf://`` before a path or a URL of a folder of safetensors fills the module alone; neither has steps.
            best: a metric, in place of *step*: load the best step by it, as `best` chooses it; with *fork*, of that run.

        Returns:
            A future of what was loaded; of None only when no checkpoint exists at all.

        Raises: Raised by the future
            StateMismatchError: all differences by name, a plain value of another type among them; nothing was overwritten.
            UsageError: an entry of ``map``, ``only`` or ``strict`` fits no name; names near it are listed. Rules give two
                names of the checkpoint the same new one.
            NoValidCheckpointError: steps exist and none is valid.
            CorruptionError, StepNotFoundError: the step asked for is damaged, or not there; no step has the metric *best*;
                or *fork* holds no step at all.
        """
        which: int | Best | None = _number(step)
        if best is not None:
            if step is not None:
                raise UsageError(f"load(step={step}, best={best!r}): give one of them")
            which = self._as_best("load", "best", best)
        self._loop.check()
        self._submitter.refuse_inside_save("load()")
        self._progress.mark("load")
        # Before the check, which would raise for them: this load replaces those that were refused or cancelled.
        refused = self._end.loads.take_refused()
        self._check_call_of_ranks()
        self._copies.wait()
        self._engine.failures.report()
        if map is not None and rename:
            raise UsageError("load() takes map= or rename=, and not both: write all of it as rules of rename=")
        if optimizer_state not in get_args(OptimizerState):
            refuse_value("load", "optimizer_state", optimizer_state, '"by_optimizer" or "by_parameter"')
        names = (only,) if isinstance(only, str) else only
        if names is not None and not (isinstance(names, Sequence) and all(isinstance(name, str) for name in names)):
            refuse_value("load", "only", only, "names of the state, such as ['model'], or None for all")
        asked = LoadRequest(state, which, names, strict, Rules(rename) if rename else map, optimizer_state)
        request = self._probe.asked(asked)
        foreign = self._open_foreign(fork, request)
        what = f"step {which}" if isinstance(which, int) else "the newest step" if which is None else "the best step"
        promise: LoadPromise[LoadResult | None] = LoadPromise(f"load of {what}")
        self._end.loads.add(promise)
        # Both in the call, whether the second is needed or not: ranks match loads by their number.
        own = self._coordinator.begin_load()
        forking = own if fork is None else self._coordinator.begin_load()

        async def run() -> LoadResult | None:
            # Not before they have stopped: two loads would fill the same tensors at once.
            for earlier in refused:
                await earlier.settled()
            load, forked = own, False
            with reporting_failures(self._engine, which):
                first = request if fork is None else msgspec.structs.replace(request, step=None)
                filled = await own.load(self._destination, first)
                if fork is not None and filled is None:
                    load, forked = forking, True
                    filled = await (foreign.load() if foreign else self._load_fork(fork, request, forking))
            if self._engine.rank == 0:
                url = self._destination.places[0].backend.url
                log_loaded(None if filled is None else filled.result, url, forked=forked)
            if filled is not None:
                self._warn_of_state_dicts(state, "load")
            promise.on_finish = self._probe.wrap_apply(asked, filled)
            if filled is not None and filled.agree:
                promise.agree = partial(self._agree_applied, load)
            return None if filled is None else filled.result

        promise.run(self._loop, self._failing(promise, run))
        return LoadFuture(promise)

    def _open_foreign(self, fork: Place | None, request: LoadRequest) -> ForeignFork | None:
        """Return the loader of a checkpoint of another program; None where *fork* is a place of steps."""
        if not isinstance(fork, str) or not fork.startswith(("dcp://", "hf://")):
            return None
        from aiockpt.convert.foreign.fork import ForeignFork

        return ForeignFork(self._engine, self._coordinator, fork, request)

    async def _load_fork(self, where: Place, request: LoadRequest, load: LoadRound) -> Filled:
        """Fill a state from another run's place, which is written to by no save from here."""
        async with self._opened(where) as source:
            place = EnginePlace(self._engine, source)
            # `Place` has added it: the steps of another run must not count for the order of saves here.
            self._engine.lineage.places.remove(source)
            filled = await load.load(OnePlace(place, Tier(source)), request)
            if filled is None:
                raise StepNotFoundError(
                    f"fork={source.url!r} holds no checkpoint to begin from: name another run, or "
                    "leave fork=… out to begin anew"
                )
            return filled

    @asynccontextmanager
    async def _opened(self, where: Place) -> AsyncIterator[Backend]:
        """Open another place for the block; a backend of the caller stays open."""
        backend = open_backend(where, world=self._engine.world)
        try:
            yield backend
        finally:
            if backend is not where:
                await backend.close()

    def _agree_applied(self, load: LoadRound, error: Exception | None) -> Promise[None]:
        """Agree, on all ranks, on whether the objects of each accepted what was loaded."""
        promise: Promise[None] = Promise("end of the load")
        promise.run(self._loop, load.agree_applied, error)
        return promise

    def read(self, step: int | None, name: str, *, rows: slice | None = None) -> Future[torch.Tensor]:
        """Read one tensor, or the *rows* of its first axis, verified; from the newest valid step for None.

        It is returned on the host, in its stored dtype and row-major, whatever its layout when it was saved. A plain value
        is not read but loaded: ``values = {"epoch": None}``, then ``load(values, step).result()``.

        Args:
            name: as ``describe(step).tensors`` has it: ``"model.embed.weight"``.
            rows: ``slice(start, stop)``, understood as Python does: clipped to the rows there are, negative from the end.

        Raises: Raised by the future
            StateMismatchError: the step has no tensor of that name; the message names what it is, or close names.
            UsageError: *rows* is no slice, has a step, or the tensor is a scalar. In the call: *name* is no text.
        """
        given: object = name
        if not isinstance(given, str):
            refuse_value("read", "name", given, "the name of a tensor, as describe(step).tensors has it")
        return self._operation(f"read of {name}", read, self._destination, _number(step), name, rows)

    def describe(self, step: int | None = None) -> Future[Description]:
        """List what a step holds (the newest valid one for None), without reading data."""
        return self._operation("describe", maintenance.describe, self._destination, _number(step))

    def steps(self) -> Future[tuple[StepInfo, ...]]:
        """List the committed steps, the newest first; damaged ones carry their problem.

        Retention deletes after a commit, in the background: for a moment there may be more than it keeps.
        """
        return self._operation("steps", maintenance.steps, self._destination)

    def latest(self) -> Future[int | None]:
        """Return the newest valid step; None when there is none."""
        return self._operation("latest", maintenance.latest, self._destination)

    def best(self, metric: str | Best) -> Future[int | None]:
        """Return the best step by a metric that ``save(…, metrics={…})`` recorded; None when there is no step at all.

        It is the step that ``Retention(best=…)`` keeps first: of the lineage that the newest step continues, sound, with a
        finite value; of equal ones the oldest.

        Args:
            metric: its name, or ``Best(name, mode="max")``. For a name alone the direction is that of the retention rule
                for it; else it follows from the name, as for `Best`.

        Raises:
            UsageError: the direction is not known. And raised by the future
            StepNotFoundError: no step has the metric; the metrics that there are are listed.
        """
        return self._operation("best", find_best, self._destination, self._as_best("best", "metric", metric), [])

    def _as_best(self, call: str, option: str, metric: object) -> Best:
        if isinstance(metric, Best):
            return metric
        if not isinstance(metric, str):
            refuse_value(call, option, metric, "the name of a metric, or an aiockpt.Best(…)")
        rules = [tier.keep.best for tier in self._parts.tiers if isinstance(tier.keep, Retention)]
        return next((rule for rule in rules if rule is not None and rule.metric == metric), None) or Best(metric)

    def verify(self, step: int | None = None, *, on_read: Callable[[int], object] = _ignore) -> Future[Verified]:
        """Read and compare every block of a step, and mark it as verified.

        Args:
            on_read: called with the bytes of each read, on the loop thread; for progress.
        """
        return self._operation("verify", maintenance.verify, self._destination, _number(step), on_read)

    def repair(
        self, step: int | None = None, source: Place | None = None, *, on_read: Callable[[int], object] = _ignore
    ) -> Future[list[Repaired]]:
        """Read all of a step in each place that has it, and rewrite damaged files there from intact copies.

        Nothing is overwritten in place, and the step never loses data (`aiockpt.places.repair`).

        Args:
            step: None for the newest valid one.
            source: another place that may have the same step: a path, a URL, or a backend.
            on_read: called with the bytes of each read, on the loop thread; for progress.

        Returns: what was done in each place; *left* names what is still damaged.

        Raises: Raised by the future
            StepNotFoundError: there is no such step.
            StorageError: a place cannot be read or written to now.
        """
        return self._operation("repair", self._repair, _number(step), source, on_read)

    async def _repair(self, step: int | None, source: Place | None, on_read: Callable[[int], object]) -> list[Repaired]:
        from aiockpt.places.repair import repair

        if step is None:
            step = (await find_manifest(self._destination, None)).manifest.step
        if source is None:
            return await repair(self._destination, step, None, on_read)
        async with self._opened(source) as other:
            return await repair(self._destination, step, other, on_read)

    def copy(self, step: int | None, to: Place, *, on_copied: Callable[[int], object] = _ignore) -> Future[Copied]:
        """Copy a step (the newest valid one for None) to another place, every block compared on the way.

        An interrupted copy resumes where it stopped. A step that is there already is left as it is.

        Args:
            to: a path, a URL, or a backend, which stays open.
            on_copied: called with the bytes of each window, on the loop thread; for progress.
        """
        return self._operation("copy", self._copy, _number(step), to, on_copied)

    async def _copy(self, step: int | None, to: Place, on_copied: Callable[[int], object]) -> Copied:
        async with self._opened(to) as target:
            refuse_step_folder(target.url, self._engine.world.files)
            return await maintenance.copy(self._destination, step, target, on_copied)

    def prune(self, rules: Retention | None = None, *, dry_run: bool = False) -> Future[Pruned]:
        """Delete what the rules (its own ``retention`` for None) do not keep, and the garbage of dead saves."""
        given: object = rules
        if not isinstance(given, Retention | None):
            refuse_value(
                "prune",
                "rules",
                given,
                f"an aiockpt.Retention({f'last={given}' if type(given) is int else '…'}), or None",
            )
        chosen, place = rules or self._options.retention or Retention(), self._destination.places[0]

        async def prune() -> Pruned:
            async with place.cleaning:
                return await maintenance.prune(place, chosen, dry_run=dry_run)

        return self._operation("prune", prune)

    def finish_commits(self) -> Future[tuple[StepInfo, ...]]:
        """Commit what dead jobs could not: every attempt with all its votes and no manifest. ``load`` does it by itself."""
        return self._operation("finish_commits", maintenance.finish, self._destination.places[0])

    def delete(self, step: int) -> Future[None]:
        """Delete one step, manifests first."""
        step = check_step(step)
        return self._operation(f"delete of step {step}", maintenance.delete, self._destination, step)

    # ------------------------------------------------------------------ readers

    def hold(self, step: int | None = None) -> Hold:
        """Keep a step (the newest valid one for None) while it is read by other means: ``with ckpt.hold(7) as held: …``.

        No retention deletes it before the block ends, in this process or another: a lease lies beside it, which the holder
        renews. After a kill the lease lasts six hours more, at most. ``async with`` in an event loop.
        """
        return self._parts.holds.make(_number(step))

    def watch(self, name: str, *, every_s: float = 10.0, newest: bool = False, follow: bool = True) -> StepWatch:
        """Yield each committed step once, the oldest first, and wait for more: ``for step in ckpt.watch("eval"): …``.

        A step is done when the loop comes back for the next one, which is recorded in ``readers/NAME.json``: after an
        error, or a kill, the same step comes again. ``async for`` in an event loop.

        Args:
            name: of the reader; each reader gets every step. One process at a time has a name.
            every_s: seconds between two polls while there is nothing new.
            newest: only the newest step is wanted each time; older ones are skipped.
            follow: wait for steps to come, also through an outage; False ends where there is nothing new.

        Raises: `UsageError` for an invalid name or time; and while it is iterated
            StorageError: steps cannot be listed, or the record cannot be written: at first, or without *follow*.
        """
        return StepWatch(
            self.run_on_destination, self._parts.holds, name, every_s=every_s, newest=newest, follow=follow
        )

    def publish(self, step: int, dest: Place | Publish, *, full: bool = False) -> Future[Published]:
        """Publish the weights of a committed step as the next version at *dest*, for `aiockpt.receive` and for engines.

        The version is what has changed since the one before, where that one's step is still here; else it is a whole folder.
        A step that is the newest version already is published again with *full* only. Concurrent calls follow each other.

        Args:
            dest: a folder, a URL, a backend, or a `Publish` with further options.
            full: a whole folder in any case.

        Raises: Raised by the future, except the first
            UsageError: zstd is not installed (``pip install 'aiockpt[publish]'``); the options do not fit the step.
            StepNotFoundError, CorruptionError: there is no such step, or it is damaged.
            StorageError: of either place.
        """
        self._check_call()
        return self._publications.publish(step, dest, full=full)

    @cached_property
    def _publications(self) -> Publications:
        from aiockpt.publish.publications import Publications

        made = Publications(self._loop, self._destination, self._coordinator)
        self._parts.shutdown.after_saves.append(made.finish)
        return made

    # ------------------------------------------------------------------ the policy form

    def resume(
        self,
        state: State,
        *,
        only: Sequence[str] | None = None,
        strict: bool | Mapping[str, bool] = True,
        map: Mapping[str, str] | Callable[[str], str] | None = None,
        rename: Renames = (),
        optimizer_state: OptimizerState = "by_optimizer",
        fork: Place | None = None,
        step: int | None = None,
        required: bool = False,
    ) -> int:
        """Load the newest valid step into *state* and return the next step to train; 0 when there is nothing. Blocks.

        Where the program has not configured logging, rank 0 writes a line to stderr that says which step it is.

        Args:
            required: raise where there is nothing to resume from: the place may be misspelt.
            only, strict, map, rename, optimizer_state: as for `load`.
            fork, step: begin from this step of another run (the newest for None) while this one has no step, as for `load`.

        Raises: Those of `load`, and
            StepNotFoundError: *required*, and there is none.
            BlockingCallError: in a coroutine, whose event loop it would block: ``await ckpt.aresume(state)`` there.
        """
        refuse_in_event_loop("resume()", "write `await ckpt.aresume(state)`")
        for save in self._saves_of_others():
            save.wait_anyway(self._options.deadlines.close_s)
        load = self._load_of_resume(only, strict=strict, map=map, rename=rename, optimizer_state=optimizer_state)
        return self._resumed(load(state, _step_of_fork(step, fork), fork=fork).result(), required, state)

    async def aresume(
        self,
        state: State,
        *,
        only: Sequence[str] | None = None,
        strict: bool | Mapping[str, bool] = True,
        map: Mapping[str, str] | Callable[[str], str] | None = None,
        rename: Renames = (),
        optimizer_state: OptimizerState = "by_optimizer",
        fork: Place | None = None,
        step: int | None = None,
        required: bool = False,
    ) -> int:
        """`resume`, in an event loop: ``start = await ckpt.aresume(state)``."""
        for save in self._saves_of_others():
            await save.settled_within(self._options.deadlines.close_s)
        load = self._load_of_resume(only, strict=strict, map=map, rename=rename, optimizer_state=optimizer_state)
        return self._resumed(await load(state, _step_of_fork(step, fork), fork=fork), required, state)

    def _load_of_resume(self, only: Sequence[str] | None, **how: Any) -> Callable[..., LoadFuture[Any]]:
        """Return the load of a resume; a rewind loads in the same way, all of the state."""
        self._resumed_with = how
        return partial(self.load, only=only, **how)

    def _resumed(self, loaded: LoadResult | None, required: bool, state: State) -> int:
        """Return the next step to train, and say which step was loaded."""
        url = self._destination.places[0].backend.url
        if loaded is None and required:
            raise StepNotFoundError(
                f"{url} holds no checkpoint, and resume(required=True) must not begin anew: "
                "correct the place, or leave required=True out"
            )
        log_resumed(self._engine, loaded, url)
        if self._rewinder is not None:
            self._rewinder.note_position(-1 if loaded is None else loaded.step, state)
        self._progress.resume(-1 if loaded is None else loaded.step)
        if self._publishes and loaded is not None and loaded.step >= 0:
            self._publications.resume(loaded.step)
        return 0 if loaded is None else loaded.step + 1

    def _saves_of_others(self) -> list[SavePromise]:
        """Return what other checkpointers of this process still save into this place.

        The cell of a notebook that is interrupted, and run again, makes a new one: it resumes from the last step.
        """
        url = self._destination.places[0].backend.url
        return [save for one in list(_open) if one is not self for save in one._saves_into(url)]  # noqa: SLF001  of this class

    def _saves_into(self, url: str) -> list[SavePromise]:
        here = self._loop.usable and self._destination.places[0].backend.url == url
        return list(self._submitter.in_flight) if here else []

    def step(
        self,
        step: int,
        state: State,
        *,
        metrics: Metrics | None = None,
        only: str | Sequence[str] | Trainable | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> SaveFuture | None:
        """Save when *step* is due by ``every``; return the future, or None when this step is not saved.

        The arguments are those of `save`. At the end of the block the last step is saved, too (``save_last``).

        Raises: Those of `save`, and
            UsageError: the checkpointer has ``rewind=``: `advance` returns the step to go on with.
        """
        if self._rewinder is not None:
            raise UsageError(
                "step() does not set a run back: with rewind= write `step = ckpt.advance(step, state, …)`, which returns "
                "the step to train next"
            )
        return self._reach(self._request(step, state, metrics, only, exclude))

    def advance(
        self,
        step: int,
        state: State,
        *,
        metrics: Metrics | None = None,
        only: str | Sequence[str] | Trainable | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> int:
        """Save when *step* is due by ``every``, as `step` does, and return the step to train next.

        That is ``step + 1``; or with ``rewind=``, when a step was bad on any rank, an earlier one, on all ranks in the
        same call: *state* is that of the last good step then, and its loaders go on there, also in a loop over them that is
        in progress, without the batches that the policy leaves out. Write ``step = ckpt.advance(step, state, …)`` in a
        ``while`` loop.

        Args:
            metrics: those of this rank, which decide whether the step is bad; see `Rewind`. The rest as for `save`.

        Raises: Those of `save`, and
            RewindExhaustedError: a step is bad, and there is no good one to go back to, or it was too often.
            RankError: a step is bad, and other ranks do not answer.
            UsageError: the run was set back, and *step* is not the one that was returned.
            BlockingCallError: with ``rewind=`` in a coroutine: ``step = await ckpt.aadvance(step, state, …)`` there.
        """
        request = self._request(step, state, metrics, only, exclude)
        if self._rewinder is not None:
            if not self._rewinder.has_begun:  # once: it takes some microseconds
                refuse_in_event_loop("advance() with rewind=", "write `step = await ckpt.aadvance(step, state, …)`")
            if not self._rewinder.passes(request, due=self._is_due(request.step)):
                back = run_blocking_here(self._set_back(request, wait_here))
                if back is not None:
                    return back
        self._reach(request)
        return request.step + 1

    async def aadvance(
        self,
        step: int,
        state: State,
        *,
        metrics: Metrics | None = None,
        only: str | Sequence[str] | Trainable | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> int:
        """`advance`, in an event loop: ``step = await ckpt.aadvance(step, state, metrics={"loss": loss})``."""
        request = self._request(step, state, metrics, only, exclude)
        if self._rewinder is not None and not self._rewinder.passes(request, due=self._is_due(request.step)):
            back = await self._set_back(request, wait_in_loop)
            if back is not None:
                return back
        self._reach(request)
        return request.step + 1

    def rewind(self, reason: str, step: int | None = None) -> None:
        """Set all ranks back in the next call of `advance`, as if this rank had found a bad step. Any thread.

        One rank is enough.

        Args:
            reason: for people.
            step: the first bad one; the one that `advance` is called with next for None.

        Raises:
            UsageError: the checkpointer has no ``rewind=``.
        """
        if self._rewinder is None:
            raise UsageError(
                "rewind(): give Checkpointer(…, rewind=aiockpt.Rewind()), and call advance() after each step"
            )
        self._check_call()
        self._rewinder.ask(reason, _number(step))

    async def _set_back(self, request: SaveRequest, wait: Callable[[Stage[Any]], Awaitable[Any]]) -> int | None:
        assert self._rewinder is not None
        load = partial(self.load, request.state, **self._resumed_with)
        back = await self._rewinder.set_back(request, load, self._start_save, wait)
        if back is not None:
            self._last_step.drop()
            self._progress.rewind(back - 1)
        return back

    def _request(self, step: int, state: State, metrics: Metrics | None, only: Any, exclude: Any) -> SaveRequest:
        return SaveRequest(
            step=check_step(step),
            state=state,
            selection=self._select(only, exclude),
            metrics=detach(metrics),
            config=self._options.config,
        )

    def _reach(self, request: SaveRequest) -> SaveFuture | None:
        """Enter a call at a step that was trained: save it when it is due."""
        self._progress.mark("train", request.step)
        self._interruption.reach(request, self._start_save, asked=False)
        if not self._is_due(request.step):
            self._probe.reached(request.step, request.state, request.metrics, saved=False)
            self._last_step.note(request)
            return None
        try:
            future = self._start_save(request)
        except BadStepError:  # of another rank: the run is set back in a later call
            return None
        self._engine.failures.report(future)
        return future

    def _is_due(self, step: int) -> bool:
        if self._cadence is not None:
            return self._cadence.due(step)
        if self._options.every is None:
            if self._interruption.listens or self._rewinder is not None:
                return False
            raise UsageError("step() needs a policy: give Checkpointer(…, every=N), or call save() yourself")
        return step % self._options.every == 0

    # ------------------------------------------------------------------ the end

    def wait(self) -> None:
        """Block until every save in flight has ended; raise what went wrong."""
        self._check_call()
        self._submitter.refuse_inside_save("wait()")
        refuse_in_event_loop("wait()", "await the futures that save() returned")
        self._parts.shutdown.wait()
        self._engine.failures.report()

    def close(self) -> None:
        """Wait until all is committed, release everything, and raise what went wrong. Idempotent.

        If it is interrupted (Ctrl-C), it abandons what is not committed, and ends in seconds.
        """
        self._close(in_order=sys.exception() is None)

    def _close(self, *, in_order: bool) -> None:
        if self._loop.usable:
            self._progress.mark("closed")
            self._submitter.refuse_inside_save("close()")
            refuse_in_event_loop("close()", "write `await ckpt.aclose()`")
            try:
                self._end.begin(self._start_save, in_order=in_order)
            finally:
                self._parts.shutdown.close()
        self._report_end(in_order=in_order)

    async def aclose(self) -> None:
        """Wait until all is committed, release everything, and raise what went wrong, in an event loop. Idempotent."""
        await self._aclose(in_order=sys.exception() is None)

    async def _aclose(self, *, in_order: bool) -> None:
        if self._loop.usable:
            self._progress.mark("closed")
            try:
                self._end.begin(self._start_save, in_order=in_order)
            finally:
                try:
                    await run_in_thread("end of a checkpointer", self._parts.shutdown.close)
                finally:
                    self._interruption.release()  # signals are given back on the main thread alone
        self._report_end(in_order=in_order)

    def _report_end(self, *, in_order: bool) -> None:
        self._end.report()
        if in_order and self._rewinder is not None:
            self._rewinder.check_end()

    def _close_at_exit(self) -> None:
        self._close(in_order=False)  # whether the program has failed is not known

    def __enter__(self) -> Self:
        refuse_in_event_loop("a plain `with` block", "write `async with`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._end.leaving(error):
            self._close(in_order=error is None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._end.leaving(error):
            await self._aclose(in_order=error is None)

    # ------------------------------------------------------------------ inside

    def _check_call(self) -> None:
        """Raise when this process may not use it, or when an earlier load was never waited for."""
        self._loop.check()
        self._end.loads.check()

    def _check_call_of_ranks(self) -> None:
        """Do so, and raise when there is a process group now that did not exist when the ranks were found."""
        self._check_call()
        if self._found_ranks is not None:
            check_found(self._found_ranks)

    def run_on_destination(self, what: str, work: Callable[[Destination], Awaitable[T]]) -> Future[T]:
        """Run *work* on the checkpointer's loop, with its destination; messages call it *what*.

        For packages built on the engine, such as `aiockpt.convert`. The argument of *work* may change in each release.

        Raises:
            ClosedError: the checkpointer is closed.
        """
        return self._operation(what, work, self._destination)

    def _operation(self, what: str, work: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> Future[T]:
        self._check_call()
        promise: Promise[T] = Promise(what)
        promise.run(self._loop, self._failing(promise, work), *args)
        return Future(promise)

    def _failing(self, promise: Promise[T], work: Callable[[*Ts], Awaitable[T]]) -> Callable[[*Ts], Awaitable[T]]:
        """Return *work* so that *promise* fails when a call of a file system hangs."""

        def fail(error: BaseException) -> None:
            promise.cancel()
            promise.fail(error)

        async def run(*args: *Ts) -> T:
            with self._engine.calls.failing(fail):
                return await work(*args)

        return run

    def statistics(self) -> Statistics:
        """Return the saves in flight and the use of pool and limiters at this instant. Any thread."""
        running = len(self._submitter.in_flight)
        return Statistics(running, self._engine.pool.statistics(), self._destination.places[0].uploader.statistics())

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Checkpointer has threads and files of this process and can be neither pickled nor copied: "
            "pass on its URL, and make one in the process that needs it"
        )

    def __repr__(self) -> str:
        running = len(self._submitter.in_flight)
        status = "running" if self._loop.usable else "closed"
        return f"<Checkpointer {self._destination.places[0].backend.url}, {running} saves in flight, {status}>"


def _as_tiers(url: Place | Sequence[Tier | Place], retention: Retention | None) -> list[Tier]:
    """Return the places as tiers; rules given to the checkpointer are those of tiers that have none."""
    places = url if isinstance(url, list | tuple) else [url]
    if not places:
        raise UsageError("an empty list names no place; give a path, a URL, or at least one Tier(…)")
    tiers = [place if isinstance(place, Tier) else Tier(place) for place in places]
    check_tiers(tiers)
    return [tier if tier.keep is not None else msgspec.structs.replace(tier, keep=retention) for tier in tiers]


def _as_observers(observers: Sequence[Observer]) -> list[Observer]:
    if not isinstance(observers, Sequence):
        refuse_value("", "observers", observers, "a list of observers, with a method on_event(event) each")
    for observer in observers:
        if not callable(getattr(observer, "on_event", None)):
            raise UsageError(f"observers: {observer!r} has no method on_event(event)")
    return list(observers)


_WANTED = {
    "lazy": "an aiockpt.Lazy(…)",
    "limits": "an aiockpt.Limits(…)",
    "rewind": "an aiockpt.Rewind(…), or None to go on after every step",
    "ranks": "aiockpt.Ranks(rank, world_size, store), or None for torch.distributed",
    "world": "an aiockpt.runtime.world.World, or None for this machine's files and clocks",
}


def _check_kinds(**given: tuple[object, Any]) -> None:
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            refuse_value("", name, value, _WANTED[name])


def _as_config(config: Mapping[str, Any] | None) -> object:
    if not isinstance(config, Mapping | None):
        refuse_value("", "config", config, "a dict of plain values, such as {'lr': 3e-4}")
    return None if config is None else plain_json("config", dict(config))


def _step_of_fork(step: int | None, fork: Place | None) -> int | None:
    """Return *step*, of another run."""
    if step is not None and fork is None:
        raise UsageError("resume(step=…) names a step of fork=…; to go back in this run: load(state, step)")
    return step


def _number(step: object) -> int | None:
    """Return *step* as an int, or None; raise UsageError for what numbers no step."""
    if isinstance(step, str) and not step.isdecimal():
        raise UsageError(
            f"step={step!r}: give an int of 0 or more, or None for the newest valid step. The best by a metric is "
            "load(state, best='loss')"
        )
    return None if step is None else check_step(step)
