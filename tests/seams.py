"""Where tests reach into the engine: to plant a fault, to hold up a copy, to ask what only the engine knows.

Everything that the crash tests, the campaigns and the properties know of the inside of aiockpt is here. Whoever moves it
changes this file; the tests stay as they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

import aiockpt
from aiockpt.adapters.native import StateWalker
from aiockpt.engine.alone import Alone
from aiockpt.engine.context import Engine, Place
from aiockpt.engine.job import SaveJob, SaveRequest
from aiockpt.format.names import step_id
from aiockpt.lazy.mutability import SplitState
from aiockpt.lazy.snapshotter import LazySnapshotter, StateGuard
from aiockpt.lazy.version_check import VersionCheck
from aiockpt.options import Options
from aiockpt.pipeline import snapshot as copying
from aiockpt.pipeline.discover import StepEntry, list_step
from aiockpt.ranks.save import abort_attempt
from aiockpt.runtime.promise import SavePromise
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Backend
from tests.simulated.inline_loop import InlineLoop

NOTES_SKIPPED = "aiockpt.engine.find.note_skipped"
"""What takes down that a load passes over a damaged step."""
FALLS_BACK = "aiockpt.pipeline.discover.fall_back"
"""What looks for an older generation of a step whose newest is damaged."""
DAMAGING_ERRNOS = "aiockpt.errors._DAMAGED"
"""The error numbers that mean damage; all others are outages."""


async def no_older_generation(_: Backend, entry: StepEntry) -> StepEntry:
    """Stand in for `FALLS_BACK`, and find nothing."""
    return msgspec.structs.replace(entry, generations=(), head=None, passed=())


def hold_up_copies(
    monkeypatch: pytest.MonkeyPatch, before_window: Callable[[], object], before_compare: Callable[[], object]
) -> None:
    """Have each window of each copy wait for *before_window*, and the comparison after the last for *before_compare*."""
    move, compare = copying._copy_beside, StateGuard.compare

    def copy_later(base: int, moves: Any, number: int) -> None:
        before_window()
        move(base, moves, number)

    def compare_later(guard: StateGuard) -> None:
        before_compare()
        compare(guard)

    monkeypatch.setattr(copying, "_copy_beside", copy_later)
    monkeypatch.setattr(StateGuard, "compare", compare_later)


def compare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no copy compare the version counters, samples and places of its tensors."""
    monkeypatch.setattr(VersionCheck, "check", lambda self: None)
    monkeypatch.setattr(VersionCheck, "recheck", lambda self: None)


def is_compared(save: aiockpt.SaveFuture) -> bool:
    """Say whether the copy of a save is over, and was compared once with the state as it was at the call."""
    guard = _job_of(save).guard
    assert isinstance(guard, StateGuard)
    return guard.compared


def is_stopped(save: aiockpt.SaveFuture) -> bool:
    """Say whether what is copied from now on may be torn, because the save has ended."""
    return _job_of(save).stopped


def promise_of(save: aiockpt.SaveFuture) -> SavePromise:
    """Return what the engine settles of a save: asked, it neither hurries nor compares, and nobody is told."""
    return save._save


def lazy_of(ckpt: aiockpt.Checkpointer) -> LazySnapshotter:
    """Return what captures the lazy saves of a checkpointer."""
    beside: Any = ckpt._submitter._snapshotter
    assert isinstance(beside, LazySnapshotter)
    return beside


def split_of(ckpt: aiockpt.Checkpointer) -> SplitState:
    """Return what the last lazy save of a checkpointer knows of its state: what it copied in the call, and the rest."""
    mutability = lazy_of(ckpt)._mutability
    split = mutability._known.find(SplitState, (False, mutability._torn))
    assert split is not None
    return split


def program_of(ckpt: aiockpt.Checkpointer) -> object:
    """Return the copies that the next save of the last state will be made by, if it stays where it is."""
    (plan,) = ckpt._submitter._walker._plans.values()
    return plan.known._facts[copying.CopyProgram][1]


def _job_of(save: aiockpt.SaveFuture) -> SaveJob:
    job = getattr(promise_of(save).cancel_work, "__self__", None)
    assert isinstance(job, SaveJob)
    return job


async def give_up_voted(backend: Backend, world: World, step: int, state: Mapping[str, Any]) -> None:
    """Give up, as a rank does that hears of another one's failure, the one attempt at *step* that is there."""
    engine = Engine(InlineLoop("rank", lambda: None), Options(), (), world)
    job = SaveJob(engine, Alone().begin(step), SaveRequest(step=step), StateWalker().walk(state))
    job.prepare()
    (attempt,) = (await list_step(backend, step_id(step))).attempts
    await abort_attempt([Place(engine, backend)], job, attempt, RuntimeError("a rank has failed"), unreported=None)
    job.cancel()
