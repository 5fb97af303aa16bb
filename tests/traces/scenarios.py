"""Thirty scenarios of what users do with a checkpointer, and what goes wrong meanwhile, through the public API."""

import errno
import os
import random
import re
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.world import Files, OsFiles, World
from aiockpt.storage.backend import Backend
from aiockpt.testing.faults import Fault, FaultyBackend, FaultyFiles
from tests.file_surgery import content, paths
from tests.inline_process import Process
from tests.ranks.crew import Crew
from tests.seams import promise_of
from tests.simulated.objects_client import ObjectsBackend
from tests.simulated.simulated_files import SimulatedFiles
from tests.simulated.simulated_objects import ObjectStore
from tests.simulated.simulation import SimulatedClock
from tests.simulated.twin_accelerator import TwinAccelerator
from tests.simulated.virtual_time import run_virtually
from tests.traces.trace import Trace

State = dict[str, Any]
DEADLINE_S = 250
ROOT = "/run"


class Stage:
    """What a scenario plays on: a clock, disks by name, object stores by name, and its trace."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.clock = SimulatedClock()
        self.disks: dict[str, SimulatedFiles] = {}
        self.stores: dict[str, ObjectStore] = {}
        self._seeds = iter(range(1, 1000))

    def disk(self, name: str = "") -> SimulatedFiles:
        return self.disks.setdefault(name, SimulatedFiles(clock=self.clock))

    def world(self, files: Files | None = None, **more: Any) -> World:
        dice = random.Random(next(self._seeds))
        return World(files or SimulatedFiles(clock=self.clock), self.clock, dice.randbytes, **more)

    def local(self, name: str = "", faults: list[Fault] | None = None) -> Backend:
        """Return the disk *name* as a place."""
        files = self.trace.files(FaultyFiles(self.disk(name), faults or []), name)
        return self.trace.backend(LocalBackend(f"{ROOT}{name}", world=self.world(files)), name)

    def bucket(self, name: str, faults: list[Fault] | None = None) -> Backend:
        """Return the object store *name* as a place."""
        store = self.stores.setdefault(name, ObjectStore(self.clock))
        return self.trace.backend(FaultyBackend(ObjectsBackend(store), faults or []), name)

    def process(self, *places: Any, world: World | None = None, **options: Any) -> Process:
        """Start a process that saves to *places*, or to the one disk."""
        where: Any = list(places) if len(places) > 1 else places[0] if places else self.local()
        return Process(where, world or self.world(), **options)

    async def save(self, process: Process, step: int, state: State, **options: Any) -> aiockpt.SaveFuture:
        """Save, with each stage in the trace, and wait until it is committed."""
        future = process.ckpt.save(step, state, **options)
        self.trace.mark(f"save {step} returned")
        promise = promise_of(future)
        points = {"snapshotted": promise.snapshotted, "written": promise.written, "in_memory": promise.in_memory}
        for stage, point in points.items():
            point.when_settled(partial(self._note_end, f"{stage} {step}", point))
        future.add_done_callback(lambda done: self.trace.mark(f"settled {step}{_wrong(done.exception())}"))
        try:
            result = await future
        except aiockpt.CheckpointError:
            return future
        self.trace.mark(f"saved {result.step} generation {result.generation} existed {result.existed} {result.url}")
        return future

    async def save_each(self, process: Process, *steps: int) -> None:
        """Save some tensors as each of *steps*, and wait until all is cleaned up."""
        for step in steps:
            await self.save(process, step, tensors(step))
        await process.idle()

    def _note_end(self, what: str, point: Promise[None]) -> None:
        self.trace.mark(f"{what}{_wrong(point.error)}")

    async def load(self, process: Process, state: State, step: int | None = None, **options: Any) -> None:
        """Load, and have what came of it in the trace."""
        try:
            found = await process.ckpt.load(state, step, **options)
        except aiockpt.CheckpointError as error:
            self.trace.mark(f"load {step}{_wrong(error)}")
            return
        if found is None:
            self.trace.mark(f"load {step}: nothing")
            return
        skipped = [name for name, _ in found.skipped]
        self.trace.mark(
            f"loaded {found.step} generation {found.generation} bytes {found.bytes} read {found.read_bytes} "
            f"skipped {skipped} left out {sorted(found.left_out)} from {found.url}: {values_of(state)}"
        )

    async def call(self, what: str, future: Any) -> Any:
        """Await an operation, and have what came of it in the trace."""
        try:
            result = await future
        except aiockpt.CheckpointError as error:
            self.trace.mark(f"{what}{_wrong(error)}")
            return None
        self.trace.mark(f"{what}: {_told(result)}")
        return result

    def look(self) -> None:
        """Have the names of all that is left in the trace."""
        for name, disk in sorted(self.disks.items()):
            for path in sorted(paths(disk, "/")):
                self.trace.lines.append(f"left {name} {path} {len(content(disk, path))}".replace("  ", " "))
        for name, store in sorted(self.stores.items()):
            for key in sorted(store.objects):
                self.trace.lines.append(f"left {name} {key} {len(store.objects[key].body)}")


def _wrong(error: BaseException | None) -> str:
    return "" if error is None else f" ! {type(error).__name__}"


def _told(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return str(result.tolist())
    if isinstance(result, tuple):
        return "; ".join(map(_told, result)) or "none"
    if isinstance(result, aiockpt.Checkpointer):
        raise TypeError("no result")
    kind = type(result).__name__
    if kind == "StepInfo":
        return f"step {result.step} generation {result.generation} problem {result.problem is not None}"
    if kind == "Description":
        return f"{_told(result.info)} tensors {[(t.name, t.dtype, t.shape, t.bytes) for t in result.tensors]}"
    if kind == "Pruned":
        gone = [doomed.step for doomed in result.steps]
        thinned = [one.step for one in result.thinned]
        return f"steps {gone} garbage {len(result.garbage)} thinned {thinned} left {result.left}"
    if kind == "Verified":
        return f"step {result.step} generation {result.generation} bytes {result.bytes}"
    if kind == "Copied":
        return f"step {result.step} as generation {result.generation} bytes {result.bytes} existed {result.existed}"
    return repr(result)


def tensors(value: float) -> State:
    """Return tensors that need several windows, blocks and dtypes, and plain values."""
    return {
        "weight": torch.full((60, 70), float(value)),
        "half": torch.full((300,), float(value)).to(torch.bfloat16),
        "count": torch.tensor(int(value)),
        "note": f"at {value:g}",
        "nested": {"rows": torch.arange(900, dtype=torch.int64) + int(value), "list": [1, 2.5, None]},
    }


def trained(seed: int = 0) -> State:
    """Return a model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": seed}


def values_of(state: State) -> str:
    """Return a digest in words of what a state of `tensors` holds; of another only its keys."""
    if "weight" not in state:
        return ",".join(sorted(state))
    weight, rows = state["weight"], state["nested"]["rows"]
    whole = bool((weight == weight[0, 0]).all())
    return f"weight {weight[0, 0].item():g} whole {whole} rows from {rows[0].item()} note {state['note']!r}"


Play = Callable[[Stage], Coroutine[Any, Any, None]]
INLINE: dict[str, Play] = {}
THREADS: dict[str, Callable[[Trace, Path], None]] = {}


def inline(play: Play) -> Play:
    """Register a scenario that runs on one thread: its trace has an order."""
    INLINE[play.__name__] = play
    return play


def threads(play: Callable[[Trace, Path], None]) -> Callable[[Trace, Path], None]:
    """Register a scenario that needs threads or processes: its trace is what has changed."""
    THREADS[play.__name__] = play
    return play


# ------------------------------------------------------------------ one process, one place


@inline
async def first_save(stage: Stage) -> None:
    process = stage.process()
    await stage.save(process, 1, tensors(1))
    await process.idle()


@inline
async def second_save_warm(stage: Stage) -> None:
    process = stage.process()
    for step in (1, 2):
        await stage.save(process, step, tensors(step), metrics={"loss": 0.5}, user={"by": "me"})
        await process.idle()


@inline
async def save_to_an_object_store(stage: Stage) -> None:
    process = stage.process(stage.bucket("bucket"))
    for step in (1, 2):
        await stage.save(process, step, tensors(step))
        await process.idle()
    await stage.load(stage.process(stage.bucket("bucket")), tensors(0))


@inline
async def load_newest(stage: Stage) -> None:
    process = stage.process()
    await stage.load(process, tensors(0))
    await stage.save_each(process, 1, 2)
    await stage.load(stage.process(), tensors(0))


@inline
async def load_an_older_step(stage: Stage) -> None:
    process = stage.process()
    await stage.save_each(process, 1, 2, 3)
    again = stage.process()
    await stage.load(again, tensors(0), 1)
    await stage.load(again, tensors(0), 7)


@inline
async def resume_and_go_on(stage: Stage) -> None:
    first = stage.process()
    await stage.save_each(first, 1, 2)
    second = stage.process()
    await stage.load(second, tensors(0))
    await stage.save(second, 3, tensors(3))
    await second.idle()
    third = stage.process()
    await stage.load(third, tensors(0), 1)  # back to an older step: what comes next is newer than 3
    await stage.save(third, 2, tensors(9))
    await third.idle()
    await stage.load(stage.process(), tensors(0))


async def save_again(stage: Stage, **options: Any) -> None:
    process = stage.process(**options)
    for value in (1, 5):
        await stage.save(process, 1, tensors(value))
        await process.idle()
    await stage.load(stage.process(), tensors(0))


@inline
async def a_step_saved_again_is_a_new_generation(stage: Stage) -> None:
    await save_again(stage)


@inline
async def a_step_saved_again_is_skipped(stage: Stage) -> None:
    await save_again(stage, on_exists="skip")


@inline
async def a_step_saved_again_is_refused(stage: Stage) -> None:
    await save_again(stage, on_exists="raise")


@inline
async def retention_keeps_some(stage: Stage) -> None:
    rules = aiockpt.Retention(last=2, every=4, best=aiockpt.Best("loss"))
    process = stage.process(retention=rules)
    for step in range(1, 8):
        await stage.save(process, step, tensors(step), metrics={"loss": abs(step - 3)})
        await process.idle()
    await stage.call("steps", process.ckpt.steps())


@inline
async def prune_delete_and_finish(stage: Stage) -> None:
    process = stage.process()
    await stage.save_each(process, *range(1, 6))
    await stage.call("delete 2", process.ckpt.delete(2))
    await stage.call("prune, dry", process.ckpt.prune(aiockpt.Retention(last=2), dry_run=True))
    await stage.call("prune", process.ckpt.prune(aiockpt.Retention(last=2, grace_s=0)))
    await stage.call("finish", process.ckpt.finish_commits())
    await stage.call("steps", process.ckpt.steps())


@inline
async def thinned_to_weights(stage: Stage) -> None:
    process = stage.process(retention=aiockpt.Retention(last=3, optimizer=1))
    for step in (1, 2, 3):
        await stage.save(process, step, trained(step))
        await process.idle()
    again = stage.process()
    await stage.load(again, trained(9))
    await stage.load(again, {"model": trained(9)["model"]}, 1)
    await stage.load(again, trained(9), 1)


@inline
async def files_by_kind_of_model_and_optimizer(stage: Stage) -> None:
    process = stage.process(
        io=aiockpt.IO(pool_bytes=1 << 16, slab_bytes=4096, block_bytes=4096, read_bytes=4096, file_bytes=8192)
    )
    await stage.save(process, 1, trained(1))
    await process.idle()
    await stage.load(stage.process(), trained(0))
    await stage.load(stage.process(), trained(0), only=["model"])


@inline
async def only_and_exclude(stage: Stage) -> None:
    process = stage.process(exclude=["half"])
    await stage.save(process, 1, tensors(1))
    await stage.save(process, 2, tensors(2), only=["weight", "note"])
    await process.idle()
    again = stage.process()
    await stage.load(again, tensors(0), 1)
    await stage.load(again, tensors(0), 2)
    await stage.load(again, tensors(0), 2, only=["weight"])
    await stage.load(again, {**tensors(0), "more": torch.zeros(3)}, 2, strict=False)


@inline
async def verify_describe_read_and_copy(stage: Stage) -> None:
    process = stage.process()
    await stage.save_each(process, 1, 2)
    await stage.call("verify", process.ckpt.verify(1))
    await stage.call("describe", process.ckpt.describe())
    await stage.call("read", process.ckpt.read(2, "nested.rows", rows=slice(3, 7)))
    await stage.call("read", process.ckpt.read(2, "nothing"))
    await stage.call("latest", process.ckpt.latest())
    await stage.call("copy", process.ckpt.copy(2, stage.local("copied")))
    await stage.call("copy", process.ckpt.copy(2, stage.local("copied")))


# ------------------------------------------------------------------ snapshots


@inline
async def lazy_snapshot(stage: Stage) -> None:
    process = stage.process(snapshot="lazy")
    for step in (1, 2):
        await stage.save(process, step, trained(step))
        await process.idle()
    await stage.load(stage.process(), trained(0))


@inline
async def digests_compared(stage: Stage) -> None:
    process = stage.process(snapshot="lazy", lazy=aiockpt.Lazy(debug="digest"))
    await stage.save(process, 1, tensors(1))
    await process.idle()


# ------------------------------------------------------------------ what goes wrong


@inline
async def newest_cannot_be_read(stage: Stage) -> None:
    process = stage.process()
    await stage.save_each(process, 1, 2)
    broken = Fault(do="fail", verb="preadv", match="*/step-00000002/*", times=None, error=errno.EIO)
    await stage.load(stage.process(stage.local(faults=[broken])), tensors(0))


@inline
async def damage_is_passed_over_and_overwritten(stage: Stage) -> None:
    process = stage.process()
    await stage.save_each(process, 1, 2)
    (data,) = [path for path in paths(stage.disk()) if "step-00000002" in path and path.endswith(".safetensors")]
    (node,) = [content(stage.disk(), data)]
    fd = stage.disk().open(data, os.O_RDWR)
    stage.disk().pwrite(fd, memoryview(bytes([node[9000] ^ 1])), 9000)
    stage.disk().close(fd)
    again = stage.process()
    await stage.load(again, tensors(0))
    await stage.load(again, tensors(0), 2)
    await stage.save(again, 2, tensors(7))
    await again.idle()
    await stage.load(stage.process(), tensors(0))


@inline
async def a_full_disk_and_then_room(stage: Stage) -> None:
    full = Fault(do="fail", verb="pwrite", match="*/step-00000002/*", times=1, error=errno.ENOSPC)
    process = stage.process(stage.local(faults=[full]))
    for step in (1, 2, 3):
        await stage.save(process, step, tensors(step))
        await process.idle()
    await stage.load(stage.process(), tensors(0))


@inline
async def a_flush_fails_and_the_next_save_is_made(stage: Stage) -> None:
    failing = Fault(do="fail", verb="fdatasync", match="*/d/*", at=1, error=errno.EIO)
    process = stage.process(stage.local(faults=[failing]))
    for step in (1, 2):
        await stage.save(process, step, tensors(step))
        await process.idle()


@inline
async def cancelled_before_it_runs(stage: Stage) -> None:
    process = stage.process()
    doomed = process.ckpt.save(1, tensors(1))
    doomed.cancel()
    await process.idle()
    stage.trace.mark(f"cancelled {doomed.cancelled()}")
    await stage.save(process, 2, tensors(2))
    await process.idle()


@inline
async def what_a_dead_process_had_voted_for_is_committed(stage: Stage) -> None:
    """The manifest cannot be put, as if the process had died there; the next one finds the votes."""
    dies = Fault(do="fail", verb="link", match="*/MANIFEST-*", times=None, error=errno.EIO)
    await stage.save(stage.process(stage.local(faults=[dies])), 1, tensors(1))
    again = stage.process()
    await stage.load(again, tensors(0))
    await stage.save(again, 2, tensors(2))
    await again.idle()


@inline
async def what_a_dead_process_left_without_a_vote_is_collected(stage: Stage) -> None:
    dies = Fault(do="fail", verb="*", at=33, times=None, error=errno.EIO)
    await stage.save(stage.process(stage.local(faults=[dies])), 1, tensors(1))
    stage.clock.advance(3 * 24 * 3600)
    again = stage.process(retention=aiockpt.Retention(last=2))
    await stage.load(again, tensors(0))
    await stage.save(again, 2, tensors(2))
    await again.idle()


# ------------------------------------------------------------------ tiers


def two(stage: Stage, faults: list[Fault] | None = None, **far: Any) -> tuple[Any, Any]:
    """Return a disk, and a bucket behind it."""
    return aiockpt.Tier(stage.local("near")), aiockpt.Tier(stage.bucket("far", faults), bandwidth=None, **far)


async def reached(stage: Stage, future: aiockpt.SaveFuture, place: Any) -> None:
    await stage.call(f"{future.step} in {place.url}", _result(future, place))


async def _result(future: aiockpt.SaveFuture, place: Any) -> str:
    result = await future.committed(place)
    return f"generation {result.generation} durable {result.durable}"


@inline
async def promoted_to_the_second_tier(stage: Stage) -> None:
    near, far = two(stage, every=2, keep=1)
    process = stage.process(near, far)
    for step in (1, 2, 3, 4):
        future = await stage.save(process, step, tensors(step))
        await reached(stage, future, far.url)


@inline
async def loaded_from_the_second_tier(stage: Stage) -> None:
    near, far = two(stage)
    process = stage.process(near, far)
    await reached(stage, await stage.save(process, 1, tensors(1)), far.url)
    stage.disks["near"] = SimulatedFiles(clock=stage.clock)  # the near one is lost
    again = stage.process(*two(stage))
    await stage.load(again, tensors(0))
    near, far = two(stage)
    more = stage.process(near, far)
    await stage.load(more, tensors(0))
    await reached(stage, await stage.save(more, 2, tensors(2)), far.url)


@inline
async def a_bad_block_is_read_from_the_second_tier(stage: Stage) -> None:
    near, far = two(stage)
    process = stage.process(near, far)
    await reached(stage, await stage.save(process, 1, tensors(1)), far.url)
    broken = Fault(do="fail", verb="preadv", match="*/d/*", times=None, error=errno.EIO)
    near = aiockpt.Tier(stage.local("near", [broken]))
    await stage.load(stage.process(near, two(stage)[1]), tensors(0))


@inline
async def weights_alone_in_the_second_tier(stage: Stage) -> None:
    near, far = two(stage, content="weights")
    process = stage.process(near, far)
    await reached(stage, await stage.save(process, 1, trained(1)), far.url)
    await stage.load(stage.process(stage.bucket("far")), {"model": trained(0)["model"]})


# ------------------------------------------------------------------ threads and processes


def _on_disk(trace: Trace, root: Path) -> Callable[[int], Backend]:
    def place(rank: int) -> Backend:
        return trace.backend(LocalBackend(str(root), world=World(trace.files(OsFiles()))))

    return place


def _replicated(value: float) -> State:
    """Return what all ranks have alike, and may each write a part of."""
    return {
        name: torch.nn.Parameter(torch.full((300, 33), value + n), requires_grad=False) for n, name in enumerate("abc")
    }


def _ranks(trace: Trace, root: Path, world_size: int) -> None:
    def work(rank: int, ckpt: aiockpt.Checkpointer) -> list[str]:
        told = []
        for step in (1, 2):
            result = ckpt.save(step, {**_replicated(step), f"own{rank}": torch.arange(50) + rank}).result(DEADLINE_S)
            told.append(f"saved {result.step} generation {result.generation} bytes {result.bytes}")
        state = {**_replicated(0), f"own{rank}": torch.zeros(50, dtype=torch.int64)}
        loaded = ckpt.load(state).result(DEADLINE_S)
        assert loaded is not None
        told.append(f"loaded {loaded.step}: {state['a'][0, 0].item():g} {state[f'own{rank}'][1].item()}")
        return told

    with Crew(world_size, _on_disk(trace, root)) as crew:
        for rank, told in enumerate(crew.on_all(work)):
            for line in told:
                trace.mark(f"rank {rank} {line}")


@threads
def two_ranks(trace: Trace, root: Path) -> None:
    _ranks(trace, root, 2)


@threads
def three_ranks(trace: Trace, root: Path) -> None:
    _ranks(trace, root, 3)


@threads
def saved_by_ranks_and_loaded_by_another_number(trace: Trace, root: Path) -> None:
    with Crew(3, _on_disk(trace, root)) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, _replicated(1)).result(DEADLINE_S))
    with Crew(2, _on_disk(trace, root)) as crew:
        for rank, state in enumerate(crew.on_all(_loaded)):
            trace.mark(f"rank {rank} {[value[0, 0].item() for value in state.values()]}")


def _loaded(rank: int, ckpt: aiockpt.Checkpointer) -> State:
    state = _replicated(0)
    assert ckpt.load(state).result(DEADLINE_S) is not None
    return state


@threads
def snapshot_on_a_device(trace: Trace, root: Path) -> None:
    """A twin of a device holds the copy; the host gets it later."""
    twin = TwinAccelerator("early")
    with ExitStack() as stack:
        ckpt = stack.enter_context(
            aiockpt.Checkpointer(_on_disk(trace, root)(0), snapshot="device", world=World(accelerator=twin))
        )
        state = tensors(1)
        for value in (state["weight"], state["nested"]["rows"]):
            twin.place(value)
        for step in (1, 2):
            result = ckpt.save(step, state).result(DEADLINE_S)
            trace.mark(f"saved {result.step} generation {result.generation}")
        again = tensors(0)
        assert ckpt.load(again).result(DEADLINE_S) is not None
        trace.mark(values_of(again))


@threads
def writer_process(trace: Trace, root: Path) -> None:
    """What a process of its own writes is seen by what it leaves."""
    with aiockpt.Checkpointer(root, worker="process", retention=aiockpt.Retention(last=2)) as ckpt:
        for step in (1, 2, 3):
            result = ckpt.save(step, tensors(step)).result(DEADLINE_S)
            trace.mark(f"saved {result.step} generation {result.generation} bytes {result.bytes}")
        ckpt.wait()
        state = tensors(0)
        assert ckpt.load(state).result(DEADLINE_S) is not None
        trace.mark(values_of(state))


def play(name: str, root: Path) -> list[str]:
    """Play the scenario *name* and return its trace; one with threads may use the empty folder *root*."""
    torch.manual_seed(0)
    if name in THREADS:
        trace = Trace()
        THREADS[name](trace, root)
        for path in root.rglob("*"):
            if path.is_file():
                trace.lines.append(f"left {path}")
        outside = re.compile(rf"fsync (?!{re.escape(str(root))})")  # the folders above differ from machine to machine
        trace.lines = [line for line in trace.lines if not outside.match(line)]
        return [line.replace(str(root), "ROOT") for line in trace.changes()]
    stage = Stage()

    async def main() -> None:
        await INLINE[name](stage)
        await anyio.sleep(1)  # virtual: whatever still runs in the background is done before the clock moves
        stage.look()

    run_virtually(main)
    return stage.trace.in_order()


NAMES = [*INLINE, *THREADS]
