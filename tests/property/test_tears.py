"""A change that torch can see is never published: any way to make it, at any moment of any copy, of any kind of tensor.

Each try begins a save, changes one tensor at a moment that gates hold on to, and lets go. The save must then have the state
of the call, bit for bit, or raise; where the table of `aiockpt.lazy.guards` names a guard that raises, it must raise.
The copy waits for the change, so it is under way when that is made, except where the moment is after the copy.
"""

import copy
import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from operator import add, sub
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.lazy.guards import CHANGES, Change, Guard
from aiockpt.runtime.world import World
from tests.example_counts import examples
from tests.gates import Gate
from tests.property.tensor_changes import MAKE, by_data, counters_of, like, local, set_counters
from tests.seams import compare_nothing, hold_up_copies, is_compared, is_stopped, lazy_of, promise_of
from tests.simulated.twin_accelerator import TwinAccelerator
from tests.watch import until

ELEMENTS = 16 * 1024
TENSORS = 4
SLAB = 64 * 1024
IO = aiockpt.IO(slab_bytes=SLAB, block_bytes=SLAB, read_bytes=SLAB)
DIGESTS: dict[str, Any] = {"limits": aiockpt.Limits(io=IO), "lazy": aiockpt.Lazy(debug="digest")}
WINDOWS = 2 * TENSORS
"""At least: a parameter fills one, and so does its momentum."""

Moment = Literal["before", "during", "at the end", "under way at the end", "after"]
"""Before the first window is copied; between two of them; after the last, before the first comparison; begun between two of
them and counted after that; after the copy, before anybody comes to us."""
MOMENTS: tuple[Moment, ...] = ("before", "during", "at the end", "under way at the end", "after")
Mode = Literal["lazy", "lazy on a device", "device", "process"]
COUNTED = frozenset[Guard](("counter", "outer counter"))
RAISES = COUNTED | frozenset[Guard](("sample", "place"))


ELSEWHERE = {"step", "announced", "replaced", "collective"}
"""Those that need more than a tensor; they have tests of their own below."""


def test_every_change_of_the_table_is_tried() -> None:
    assert MAKE.keys() | ELSEWHERE == {change.key for change in CHANGES}


class State:
    """Parameters and their momentum, which an optimizer of torch owns."""

    def __init__(self, mesh: DeviceMesh | None, twin: TwinAccelerator | None = None) -> None:
        torch.manual_seed(0)
        plain = [torch.randn(ELEMENTS) for _ in range(TENSORS)]
        self.mesh = mesh
        made = plain if mesh is None else [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in plain]
        self.model = nn.ParameterList(map(nn.Parameter, made))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model:
            parameter.grad = like(parameter, 0.5)
        self.optimizer.step()
        self.twin = twin
        if twin is not None:
            twin.place([local(tensor) for tensor in self.tensors])

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.model, *(self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.model)]

    @property
    def names(self) -> list[str]:
        momenta = [f"optimizer.state.model.{n}.momentum_buffer" for n in range(TENSORS)]
        return [*(f"model.{n}" for n in range(TENSORS)), *momenta]

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def copied(self) -> list[torch.Tensor]:
        return [local(tensor).clone() for tensor in self.tensors]


class Gates:
    """Holds a copy at one moment. One save at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = -1
        hold_up_copies(monkeypatch, self._before_window, lambda: self.wait(WINDOWS))

    def hold(self, at: int) -> None:
        """Hold the next copy when *at* windows are copied; WINDOWS means all of them, more than that never."""
        self.at, self.copied = at, 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def _before_window(self) -> None:
        self.wait(self.copied)
        self.copied += 1

    def wait(self, at: int) -> None:
        if at == self.at:
            self.reached.set()
            assert self.opened.wait(250)


class Try(msgspec.Struct, frozen=True):
    """What is done.

    Attributes:
        victim: which tensor is changed.
    """

    change: Change
    moment: Moment
    victim: int
    on_dtensor: bool

    def guard(self, mode: Mode) -> Guard:
        if mode == "device":
            return "copy"
        on_device = mode == "lazy on a device"
        if self.on_dtensor:
            return self.change.dtensor_device if on_device else self.change.dtensor_host
        return self.change.device if on_device else self.change.host


class Outcome(msgspec.Struct, frozen=True):
    """How it went: whether the change met a copy under way, whether it was told, whether the state of the call was saved."""

    met: bool
    told: bool
    as_it_was: bool


class Bench:
    """Carries out tries in one mode.

    Args:
        folder: where a writer process saves to; another mode needs none.
    """

    def __init__(self, mode: Mode, mesh: DeviceMesh, gates: Gates, folder: Path) -> None:
        self.mode: Mode = mode
        self.mesh, self.gates = mesh, gates
        self.steps = 0
        self.ckpt: aiockpt.Checkpointer | None = None
        if mode == "process":
            self.ckpt = aiockpt.Checkpointer(
                folder, worker="process", snapshot="lazy", on_error="warn", limits=aiockpt.Limits(io=IO)
            )

    def close(self) -> None:
        if self.ckpt is not None:
            self.ckpt.close()

    def carry_out(self, what: Try, seed: int) -> Outcome:
        """Save, change, and say how it went."""
        with ExitStack() as stack:
            twin = TwinAccelerator("early" if seed % 2 else "late") if "device" in self.mode else None
            state = State(self.mesh if what.on_dtensor else None, twin)
            place = Gate(MemoryBackend(f"tears-{uuid.uuid4()}"))
            ckpt = self.ckpt
            if ckpt is None:
                world = None if twin is None else World(accelerator=twin)
                kind: Any = "device" if self.mode == "device" else "lazy"
                opened = aiockpt.Checkpointer(
                    place, snapshot=kind, on_error="warn", limits=aiockpt.Limits(io=IO), world=world
                )
                ckpt = stack.enter_context(opened)
            else:
                mutability = lazy_of(ckpt)._mutability
                mutability._torn, mutability._newly_torn = frozenset(), []  # each try is the first one
                mutability._known.release()
                self._stop_writer(True)
                stack.callback(self._stop_writer, False)
            self.steps += 1
            expected = state.copied()
            self.gates.hold({"before": 0, "at the end": WINDOWS, "after": -1}.get(what.moment, 3))
            if twin is not None:
                twin.hold()
            save = ckpt.save(self.steps, state.tree)
            met = self._change(state, save, what)
            self.gates.opened.set()
            if twin is not None:
                twin.release()
            place.open_up()
            if self.ckpt is not None:
                self._stop_writer(False)
            error = save.exception()
            if twin is not None:
                twin.finish()
            assert error is None or isinstance(error, aiockpt.TornSnapshotError), error
            as_it_was = error is None and all(
                torch.equal(ckpt.read(self.steps, name).result(), tensor)
                for name, tensor in zip(state.names, expected, strict=True)
            )
            return Outcome(met, error is not None, as_it_was)

    def _change(self, state: State, save: aiockpt.SaveFuture, what: Try) -> bool:
        """Make the change at its moment; return whether the copy was under way."""
        gates, tensor = self.gates, state.tensors[what.victim]
        snapshotted = promise_of(save).snapshotted  # asked in the back of those who compare

        def copied() -> bool:
            return snapshotted.is_settled

        if what.moment == "after":
            if self.mode == "lazy on a device":  # the lanes have all of it, and have done nothing yet
                until(lambda: is_compared(save), "all copies enqueued")
            else:
                until(copied, "the copy")
            met = not copied()
        else:
            assert gates.reached.wait(250) or self.mode == "device"
            met = not copied() or self.mode == "device"
        change = MAKE[what.change.key]
        at_once = what.moment != "under way at the end" or what.change.key == "resized"
        if at_once and state.twin is None:
            change(tensor)
            return met
        made, counted = tried(change, tensor)
        write = partial(local(tensor).data.copy_, made)
        if state.twin is not None:  # a kernel is queued, and counted when it is
            state.twin.compute(write)
        elif what.guard(self.mode) == "sample":  # what is not counted is seen by its bytes alone
            write()
        else:
            local(tensor).data[: ELEMENTS // 4].copy_(made[: ELEMENTS // 4])
        if what.moment == "under way at the end":
            gates.opened.set()
            until(lambda: is_compared(save) or is_stopped(save) or copied(), "the first comparison")
        if state.twin is None:
            write()
        set_counters(tensor, tuple(map(add, counters_of(tensor), counted)))
        return met

    def _stop_writer(self, stop: bool) -> None:
        assert self.ckpt is not None
        tiers: Any = self.ckpt._destination
        os.kill(tiers._connection.process.pid, signal.SIGSTOP if stop else signal.SIGCONT)


def tried(change: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return what *change* makes of *tensor*, and how often torch counts it, without doing it."""
    other = nn.Parameter(tensor.detach().clone())
    before = counters_of(other)
    change(other)
    return local(other), tuple(map(sub, counters_of(other), before))


TRIES = st.builds(
    Try,
    st.sampled_from([change for change in CHANGES if change.key in MAKE]),
    st.sampled_from(MOMENTS),
    st.integers(0, 2 * TENSORS - 1),
    st.booleans(),
)


def sees(what: Try, mode: Mode) -> bool:
    """Say whether the table promises anything."""
    guard = what.guard(mode)
    if what.change.key == "resized" and (mode == "lazy on a device" or mode == "device"):
        return False  # the twin knows its tensors by their addresses
    return guard not in ("nothing", "–")


@pytest.mark.parametrize("mode", ["lazy", "lazy on a device", "device", "process"])
def test_a_change_that_can_be_seen_is_never_published(
    mode: Mode, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Counter[str]()
    bench = Bench(mode, mesh, Gates(monkeypatch), tmp_path)

    @given(TRIES.filter(lambda what: sees(what, mode)), st.integers(0, 1))
    @examples(30 if mode == "process" else 60)
    def property_holds(what: Try, seed: int) -> None:
        outcome = bench.carry_out(what, seed)
        assert outcome.told or outcome.as_it_was, what
        if what.guard(mode) in (RAISES if outcome.met else COUNTED):
            assert outcome.told, what
        tally.update(tries=1, met=outcome.met)

    try:
        property_holds()
    finally:
        bench.close()
    assert 2 * tally["met"] >= tally["tries"], tally


def test_without_the_comparisons_the_same_changes_are_published(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_nothing(monkeypatch)
    bench = Bench("lazy", mesh, Gates(monkeypatch), tmp_path)
    changes = {change.key: change for change in CHANGES}
    for on_dtensor in (False, True):
        outcome = bench.carry_out(Try(changes["in place"], "before", 0, on_dtensor), 0)
        assert not outcome.told
        assert not outcome.as_it_was


# --- what is never torn, and never told ------------------------------------------------------------------------------


def step(state: State, ckpt: aiockpt.Checkpointer) -> None:
    state.optimizer.step()


def change_in_a_block(state: State, ckpt: aiockpt.Checkpointer) -> None:
    with ckpt.mutating(), torch.no_grad():
        for tensor in state.tensors:
            tensor.add_(1)


def replace_data(state: State, ckpt: aiockpt.Checkpointer) -> None:
    for parameter in state.model:
        parameter.data = like(parameter, 5.0).detach()


def assign(state: State, ckpt: aiockpt.Checkpointer) -> None:
    state.model.load_state_dict({str(n): like(t.detach(), 5.0) for n, t in enumerate(state.model)}, assign=True)


def load_optimizer(state: State, ckpt: aiockpt.Checkpointer) -> None:
    state.optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))
    with torch.no_grad():
        for tensor in state.tensors[TENSORS:]:
            tensor.zero_()


GOES_ON: dict[str, Callable[[State, aiockpt.Checkpointer], None]] = {
    "step": step,
    "announced": change_in_a_block,
    "replaced: .data": replace_data,
    "replaced: load_state_dict(assign=True)": assign,
    "replaced: optimizer.load_state_dict": load_optimizer,
}


@pytest.mark.parametrize("on_dtensor", [False, True])
@pytest.mark.parametrize("moment", ["during", "at the end"])
@pytest.mark.parametrize("change", GOES_ON)
def test_what_waits_and_what_is_replaced_leaves_the_state_of_the_call(
    change: str, moment: Moment, on_dtensor: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates, state = Gates(monkeypatch), State(mesh if on_dtensor else None)
    expected = state.copied()
    place = MemoryBackend(f"tears-{uuid.uuid4()}")
    with aiockpt.Checkpointer(place, snapshot="lazy", limits=aiockpt.Limits(io=IO)) as ckpt:
        gates.hold(WINDOWS if moment == "at the end" else 3)
        save = ckpt.save(1, state.tree)
        assert gates.reached.wait(250)
        opens = threading.Timer(0.1, gates.opened.set)  # for those that wait; the others are done by then
        opens.start()
        GOES_ON[change](state, ckpt)
        opens.join()
        save.result()
        for name, tensor in zip(state.names, expected, strict=True):
            assert torch.equal(ckpt.read(1, name).result(), tensor), name


@pytest.mark.parametrize("mode", ["lazy", "lazy on a device"])
@pytest.mark.parametrize("change", ["data", "foreach", "fused"])
def test_digests_see_what_nothing_else_does(
    change: str, mode: Mode, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = TwinAccelerator("late") if mode == "lazy on a device" else None
    gates, state = Gates(monkeypatch), State(mesh, twin)
    world = None if twin is None else World(accelerator=twin)
    place = MemoryBackend(f"tears-{uuid.uuid4()}")
    options: Any = {"snapshot": "lazy", "on_error": "warn", "world": world, **DIGESTS}
    with aiockpt.Checkpointer(place, **options) as ckpt:
        gates.hold(3)
        save = ckpt.save(1, state.tree)
        assert gates.reached.wait(250)
        MAKE[change](state.tensors[1])
        gates.opened.set()
        error = save.exception()
        assert isinstance(error, aiockpt.TornSnapshotError)
        assert error.tensors == ("model.1",)


def test_digests_are_compared_when_the_device_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = TwinAccelerator("late")
    gates, state = Gates(monkeypatch), State(None, twin)
    options: Any = {"snapshot": "lazy", "on_error": "warn", **DIGESTS}
    place = MemoryBackend(f"tears-{uuid.uuid4()}")
    with aiockpt.Checkpointer(place, world=World(accelerator=twin), **options) as ckpt:
        gates.hold(-1)
        twin.hold()
        save = ckpt.save(1, state.tree)
        until(lambda: twin.host_wait_count or is_compared(save), "somebody to wait for the device")
        by_data(state.tensors[1])
        twin.release()
        assert isinstance(save.exception(), aiockpt.TornSnapshotError)
