"""The advice of saves and of the checkpointer's options, carried out where it is given."""

import errno
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.format.dtypes import from_torch_name
from aiockpt.places.tiers import promotion
from aiockpt.runtime.world import World
from aiockpt.storage.retry_calls import RetryPolicy
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.advice.carry_out import Entry, carry_out, names_of
from tests.lazy.copy_gate import CopyGate
from tests.lazy.test_moved_tensors import move
from tests.lazy.test_mutability import Unhooked
from tests.small_run import SMALL, small_checkpointer
from tests.worker.test_worker_killed import process_of

__all__ = ["RetryPolicy", "World", "from_torch_name", "move", "promotion", "sys", "time"]  # for lines


def hanging(folder: str, verb: str, match: str = "*") -> FaultyBackend:
    """Return a place whose calls of *verb* never end."""
    return FaultyBackend(LocalBackend(folder), [Fault(do="hang", verb=verb, match=match, times=None)])


def snapshot(pool_bytes: int) -> None:
    """Wait for the snapshot of more than a slab, while the storage hangs."""
    io = aiockpt.IO(pool_bytes=pool_bytes, slab_bytes=4096, block_bytes=4096, read_bytes=4096)
    limits = aiockpt.Limits(io=io, deadlines=aiockpt.Deadlines(slab_s=0.05, close_s=0.1))
    ckpt = aiockpt.Checkpointer(hanging("slow", "upload.write"), limits=limits, on_error="warn")
    save = ckpt.save(1, {"tensor": torch.ones(4096)})
    try:
        save.snapshotted().result()
    finally:
        save.cancel()
        ckpt.close()


def commit_late(folder: str) -> None:
    """Save where the storage does not answer the commit."""
    limits = aiockpt.Limits(io=SMALL, deadlines=aiockpt.Deadlines(commit_s=0.1))
    with aiockpt.Checkpointer(hanging(folder, "put_new", "*MANIFEST*"), limits=limits, on_error="warn") as ckpt:
        ckpt.save(1, {"tensor": torch.ones(4)}).result()


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        return torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)


def frozen(owned: Callable[[torch.nn.Module], Any]) -> dict[str, Any]:
    """Return a state of a model with a frozen bias, and an optimizer of what *owned* returns."""
    model = torch.nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    return {"model": model, "optimizer": torch.optim.SGD(owned(model), lr=0.1)}


def change(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def change_unseen(weight: torch.Tensor) -> None:
    """Change *weight* without a count of torch's."""
    weight.data.add_(1)


def save_lazily(
    fixture: Callable[[str], Any], changed: Callable[[torch.Tensor], object], how: str = "", **options: Any
) -> None:
    """Change a weight while a lazy save copies it, or inside `mutating`; raise what becomes of that save, and save again."""
    gate: CopyGate = fixture("gate")
    gate.open.clear()
    model = torch.nn.Linear(4, 4)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    options = {"snapshot": "lazy", "on_error": "warn"} | options
    with aiockpt.Checkpointer("lazy", **options) as ckpt:
        save = ckpt.save(1, state)
        if how == "mutating":
            gate.open.set()
            with ckpt.mutating():
                changed(model.weight)
        else:
            changed(model.weight)
        gate.open.set()
        try:
            save.result()
        finally:
            ckpt.save(2, state).result()


def save_unhooked(fixture: Callable[[str], Any], **options: Any) -> None:
    """Save an optimizer that steps without torch's hooks."""
    fixture("gate").open.set()
    model = torch.nn.Linear(4, 4)
    with aiockpt.Checkpointer("lazy", snapshot="lazy", **options) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": Unhooked(model.parameters())}).result()


def save_to_two(far: Any, steps: int = 1, **options: Any) -> None:
    """Save to a near and a far place; raise what the far one reports."""
    told: list[BaseException] = []
    tiers: list[Any] = ["near", aiockpt.Tier(far, on_error=told.append, **options)]
    with small_checkpointer(tiers) as ckpt:
        for step in range(steps):
            ckpt.save(step, {"tensor": torch.ones(4)}).result()
        if steps > 1:
            ckpt.wait()
    if steps > 1:
        for error in told:
            raise error


def lose_writer() -> None:
    """End the writer process while a save needs it."""
    with small_checkpointer("run", worker="process", on_error="warn") as ckpt:
        ckpt.save(3, {"tensor": torch.ones(4)}).result()
        writer = process_of(ckpt)
        os.kill(writer.pid, signal.SIGSTOP)
        save = ckpt.save(4, {"tensor": torch.ones(4)})
        os.kill(writer.pid, signal.SIGKILL)
        save.result()


def refuse(*_: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


PROCESS = "with aiockpt.Checkpointer(%s, worker='process') as other: other.save(3, state).result()"
THREAD = "with aiockpt.Checkpointer(%s, {}'thread') as other: other.save(3, state).result()"
WITH = "with aiockpt.Checkpointer('other', %s) as other: other.save(3, state).result()"
HOLD = "hold = ckpt.hold(1)\nwith hold:\n with "
TABLE = [
    Entry("ckpt.step(3, state)", r"or call (save)\(\) yourself", "ckpt.{}(3, state).result()"),
    Entry("ckpt.step(3, state)", r"give Checkpointer\(…, (every=)N\)", WITH % "{}1"),
    Entry("ckpt.save(3, {'a': aiockpt.per_rank({'m': state['model']})}).result()",
          r"stands on the object itself: \{name: (aiockpt\.per_rank\()value\)\}",
          "ckpt.save(3, {'a': {'m': {}state['model'])}}).result()"),
    Entry("ckpt.prune(1)", r"(aiockpt\.Retention\(.*?\))", "ckpt.prune({}).result()"),
    Entry("aiockpt.Retention(best='loss')", r"(aiockpt\.Best\([^)]*\)), or None", "aiockpt.Retention(best={})"),
    Entry("ckpt.best(3)", r"the name of a metric, or an (aiockpt\.Best\()…\)",
          "ckpt.best({}'acc', mode='max')).result()"),
    Entry(WITH % "retention=aiockpt.Retention(last=1, best=aiockpt.Best('acc'))",
          r"the metric of Retention\(best=Best\(\S+\)\): .*While no step has it, (none) is deleted",
          "ckpt.save(3, state, metrics=dict(acc=0.5)).result()  # {}"),
    Entry("aiockpt.Checkpointer([aiockpt.Tier('far', content='weights')])", r"and there is none; (put one before it)",
          "aiockpt.Checkpointer(['near', aiockpt.Tier('far', content='weights')]).close()  # {}"),
    Entry("ckpt.save(3, frozen(lambda model: model.parameters()), only=aiockpt.trainable()).result()",
          r"others only (\(p for p in model\.parameters\(\) if p\.requires_grad\)), or name",
          "ckpt.save(3, frozen(lambda model: {}), only=aiockpt.trainable()).result()"),
    Entry("aiockpt.Best(3)", r"of a metric, as save\(…, (metrics=)\{name: value\}\) has it",
          "ckpt.save(3, state, {}dict(loss=1.0)).result()"),
    Entry("aiockpt.Checkpointer(folder, retentions=None)", r"Did you mean (\w+)", WITH % "{}=None"),
    Entry("aiockpt.Checkpointer(folder, observers=[3])", r"(on_event)\(event\)",
          WITH % "observers=[type('O', (), dict({}=lambda self, _: None))()]"),
    Entry("aiockpt.Checkpointer(folder, lazy=True)", r"(aiockpt\.Lazy\()…\)", WITH % "lazy={})"),
    Entry("aiockpt.Checkpointer(folder, limits=3)", r"(aiockpt\.Limits\()…\)", WITH % "limits={})"),
    Entry("aiockpt.Checkpointer([])", r"or at least one (Tier\()…\)",
          "with aiockpt.Checkpointer([aiockpt.{}'b')]): pass"),
    Entry("aiockpt.Checkpointer(folder, on_preempt='stop')", r"an (aiockpt\.Preemption\(grace_s=)…\)",
          WITH % "on_preempt={}60.0)"),
    Entry(WITH % "on_preempt=aiockpt.Preemption(ends_at=1.0)", r"s ago: give a (time) to come",
          WITH % "on_preempt=aiockpt.Preemption(ends_at={}.time() + 600)"),
    Entry("aiockpt.IO(block_bytes=5000)", r"give a power of two of at least (\d+)", "aiockpt.IO(block_bytes={})"),
    Entry("aiockpt.IO(slab_bytes=5000)", r"\(\S+=\d+\): give a multiple of block_bytes \((\d+)\)",
          "aiockpt.IO(slab_bytes={})"),
    Entry("aiockpt.IO(pool_bytes=5000)", r"IO\(pool_bytes=\d+\): give at least one slab \((\d+)\)",
          "aiockpt.IO(pool_bytes={})"),
    Entry("aiockpt.Checkpointer(folder, limits=aiockpt.Limits(io=aiockpt.IO(nice=5)))",
          r"give (worker='process') as well", WITH % "limits=aiockpt.Limits(io=aiockpt.IO(nice=5)), {}"),
    Entry("RetryPolicy(attempts=0)", r"RetryPolicy\(\S+=\d+\): give (more) than 0", "RetryPolicy(attempts=1)  # {}"),
    Entry("ckpt.watch('a b')", r"such as ('\w+')", "next(iter(ckpt.watch({}, follow=False)))"),
    Entry("ckpt.save(3, state, only=[])", r"(only=)\[\] saves nothing: give names",
          "ckpt.save(3, state, {}['model']).result()"),
    Entry("ckpt.save(3, state, only=3)", r"or (aiockpt\.trainable\(\))", "ckpt.save(3, state, only={}).result()"),
    Entry("with aiockpt.Checkpointer('run', on_exists='raise') as again: again.save(1, state).result()",
          r'use (on_exists="new_generation")',
          "with aiockpt.Checkpointer('run', {}) as again: assert again.save(1, state).result().generation == 2"),
    Entry("ckpt.save(-1, state)", r"give an int of (\d+) or more, below 2\*\*63", "ckpt.save({}, state).result()"),
    Entry("from_torch_name('torch.quint4x2', 1)", r"representation \(`(int_repr\(\))`\) and its scales",
          "ckpt.save(3, {'q': quantized().{}, 'scale': 0.5}).result()"),
    Entry("aiockpt.Checkpointer('b', lazy=aiockpt.Lazy(mutable=['']))",
          r"names as `(ckpt.describe\(\).result\(\).tensors)` has them",
          WITH % "lazy=aiockpt.Lazy(mutable=[one.name for one in {}])"),
    Entry(HOLD + "hold: pass", r"ask for another one, (ckpt\.hold\()…\)", HOLD + "{}1): pass"),
    Entry("in_coroutine(aiockpt.receive('pub', 'got').__iter__().__next__)", r"a plain `for`.*write `(async for)`",
          "async def main():\n  {} one in aiockpt.receive('nowhere', 'got', follow=False): pass\nawait main()"),
    Entry("in_coroutine(ckpt.hold(1).__enter__)", r"a plain `with` block.*write `(async with)`", "{} ckpt.hold(1): pass"),
    Entry("in_coroutine(ckpt.barrier)", r"barrier\(\).* write `(await ckpt\.wait_mutable\(\))`", "{}"),
    Entry("in_coroutine(ckpt.mutating().__enter__)",
          r"`with ckpt.mutating\(\)`.* write `(async with ckpt\.mutating\(\))`", "{}: pass"),
    Entry("in_coroutine(ckpt.close)", r"close\(\).* write `(await ckpt\.aclose\(\))`", "{}"),
    Entry("snapshot(4096)", r"give a larger IO\((pool_bytes=)…\)", "snapshot({}1 << 20)"),
    Entry("commit_late('late')", r"did not answer.*Run `(aiockpt commit)`, or look",
          "command('{} late')\nassert '1' in command('aiockpt ls late')"),
    Entry("save_lazily(fixture, change)",
          r"before the next optimizer step.* or name .*(Lazy\(mutable=\[)…\]\)\); the next",
          "save_lazily(fixture, change, lazy=aiockpt.{}'model']))"),
    Entry("save_lazily(fixture, change_unseen, lazy=aiockpt.Lazy(debug='digest'))",
          r"changed while the snapshot was copied.* inside `with ckpt.(mutating)\(\):`",
          "save_lazily(fixture, change_unseen, '{}', lazy=aiockpt.Lazy(debug='digest'))"),
    Entry("save_lazily(fixture, move)", r"moved, or changed in size.* or save with (snapshot='eager')",
          "save_lazily(fixture, lambda weight: None, {})"),
    Entry("save_lazily(fixture, change)", r"Declare them from the start: Checkpointer\(lazy=(Lazy\(mutable=.*?\))\)",
          "save_lazily(fixture, change, lazy=aiockpt.{})"),
    Entry("save_unhooked(fixture)", r"name its parameters in Checkpointer\(lazy=(Lazy\(immutable=\[)…\]",
          "save_unhooked(fixture, lazy=aiockpt.{}'model']))"),
    Entry("monkeypatch.setattr(promotion, 'STALLED_S', 0.3)\nsave_to_two(hanging('far', 'create'))",
          r"copies the newest of them there, or `(aiockpt cp)` does", "command('{} near far')"),
    Entry("save_to_two(hanging('far', 'create'), 30)",
          r"newer steps wait for it; .*, or fewer steps \((Tier\(every=)…\)\)", "save_to_two('far', 30, every=10)  # {}"),
    Entry(PROCESS % "'memory://x'", r"is memory of this process; (shm://) is this host's", PROCESS % "'{}advice-test'"),
    Entry(PROCESS % "LocalBackend('b')", r"(worker=)'process': \S+ is an object of this process; give",
          THREAD % "LocalBackend('b')"),
    Entry(WITH % "worker='process', world=World()", r"(worker=)'process': a process cannot be given this world=",
          WITH % "{}'thread', world=World()"),
    Entry("monkeypatch.delattr(os, 'memfd_create')\n" + PROCESS % "'b'",
          r"(worker=)'process' needs memory that two processes share \(Linux", THREAD % "'b'"),
    Entry("monkeypatch.setattr(os, 'memfd_create', refuse)\n" + PROCESS % "'b'",
          r"or the kernel\): use (worker=)'thread', or allow", THREAD % "'b'"),
    Entry("monkeypatch.setattr(sys, 'executable', '')\n" + PROCESS % "'b'",
          r"the interpreter to start; use (worker=)'thread'", THREAD % "'b'"),
    Entry("lose_writer()", r"`(aiockpt ls)` shows whether its saves are committed", "assert '3' in command('{} run')"),
]  # fmt: skip


@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)
