"""Messages between processes, received as they were meant: errors, events, plans; and frames, whatever ends when."""

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, cast, get_args

import anyio
import anyio.lowlevel
import msgspec
import pytest
import torch

from aiockpt import errors, events
from aiockpt.adapters.native import StateWalker
from aiockpt.engine.job import RoundName
from aiockpt.errors import CheckpointError, StorageError
from aiockpt.futures import SaveResult
from aiockpt.pipeline.lineage import Position
from aiockpt.planning.write_plan import plan_save
from aiockpt.runtime.channel import Poster, Receiver, Sender
from aiockpt.runtime.promise import Promise, SavePromise
from aiockpt.runtime.relay import RelayedStore
from aiockpt.runtime.slabs import SlabPool
from aiockpt.worker.connection import Connection, PendingSave, ToWriter
from aiockpt.worker.messages import (
    AnyEvent,
    Failure,
    Plan,
    Save,
    Settled,
    decode_order,
    encode,
    pack,
    strip_plan,
    unpack,
)
from aiockpt.worker.server import Service


def sent(error: BaseException) -> Exception:
    """Return an error as it arrives."""
    return unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(pack(error)), type=Failure))


MADE: dict[str, BaseException] = {
    "UnsupportedStateError": errors.UnsupportedStateError("model.x", "a lambda"),
    "StateMismatchError": errors.StateMismatchError("step 1", ["a is missing"], "do this"),
    "CorruptionError": errors.CorruptionError("bad", key="k", offset=7, tensors=["a", "b"]),
    "NoValidCheckpointError": errors.NoValidCheckpointError("/here", [("step-1", "cut")]),
    "CommitTimeoutError": errors.CommitTimeoutError("late", [1, 2]),
    "RankFailedError": errors.RankFailedError("gone", [3]),
    "TornSnapshotError": errors.TornSnapshotError("torn", ["w"]),
    "StorageError": StorageError("no", key="k", retryable=True),
    "StorageFullError": errors.StorageFullError("full", key="k"),
}
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, CheckpointError) and kind is not errors.BackgroundSaveError
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_arrives_as_its_class_with_all_that_it_says(kind: type[CheckpointError]) -> None:
    error = MADE.get(kind.__name__) or kind("what happened")
    arrived = sent(error)
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert {name: value for name, value in vars(arrived).items() if name != "__notes__"} == vars(error)


def test_an_error_of_the_system_keeps_its_number_and_one_that_nobody_knows_its_name() -> None:
    arrived = sent(OSError(errno.EIO, "input/output error"))
    assert type(arrived) is OSError
    assert arrived.errno == errno.EIO

    class OddError(Exception):
        """Of a library that the trainer may not have."""

    strange = sent(OddError("odd"))
    assert type(strange) is CheckpointError
    assert str(strange) == "OddError: odd"
    assert type(sent(UnicodeDecodeError("utf-8", b"x", 0, 1, "why"))) is CheckpointError  # cannot be made of a message


def test_notes_and_the_traceback_come_along() -> None:
    try:
        raise StorageError("no")
    except StorageError as error:
        error.add_note("try again")
        arrived = sent(error)
    assert arrived.__notes__[0] == "try again"
    assert "test_worker_messages.py" in arrived.__notes__[1]


def test_every_event_of_a_writer_can_be_sent() -> None:
    of_the_trainer = {
        events.Opened, events.SaveStarted, events.SnapshotTaken, events.BarrierWaited, events.SaveFailed, events.Loaded,
        events.LoadFailed, events.Closed, events.StragglerFound, events.StepRepaired, events.StepDamaged,
        events.Alive, events.Replicated, events.Rewound, events.VersionPublished, events.PublicationFailed,
    }  # fmt: skip
    ours = {kind for kind in events.Event.__subclasses__() if kind.__module__ == events.__name__}
    assert ours - of_the_trainer == set(get_args(AnyEvent))


def test_a_plan_arrives_with_the_same_windows_and_entries() -> None:
    state = StateWalker(rank=0).walk({"a": torch.arange(9000.0), "b": torch.ones(3, 4).t(), "c": 5})
    plan = plan_save(state, slab_bytes=8192, file_bytes=20_000)
    arrived = decode_order(encode(Plan(strip_plan(plan))))
    assert isinstance(arrived, Plan)
    got = arrived.plan
    assert (got.tensors, got.tensor_bytes, got.file_bytes, got.digest) == (
        plan.tensors, plan.tensor_bytes, plan.file_bytes, plan.digest,
    )  # fmt: skip
    assert [file.size for file in got.files] == [file.size for file in plan.files]
    cut = [(w.file, w.offset, w.size) for file in got.files for w in file.windows]
    assert cut == [(w.file, w.offset, w.size) for file in plan.files for w in file.windows]
    assert len(cut) > 3


def test_a_save_that_its_writer_never_had_may_be_given_to_the_next_one() -> None:
    result = SaveResult(step=1, id="step-00000001", generation=1, bytes=0, seconds=0.0)
    for committed in (False, True):
        far: Promise[SaveResult] = Promise("far")
        pending = PendingSave(
            cast(Connection, SimpleNamespace(detached=committed, death=RuntimeError)),
            save_order(1),
            SavePromise(1),
            [far],
        )
        if committed:
            pending.resolve(Settled(1, result))
        pending.fail(errors.WriterLostError("gone"))
        assert far.is_settled == committed
        assert pending.is_committed == committed
        assert (pending.death() is not None) != committed  # a writer that was left alone may still be at it
        assert pending.tidied.is_settled


# ------------------------------------------------------------------ frames


def pair(timeout_s: float = 10) -> tuple[Sender, Receiver]:
    one, other = socket.socketpair()
    return Sender(one, timeout_s), Receiver(other)


async def drain(receiver: Receiver) -> list[bytes]:
    got = []
    with anyio.fail_after(250):
        while (frame := await receiver.receive()) is not None:
            got.append(frame)
    receiver.close()
    return got


async def test_frames_of_many_threads_arrive_whole_and_in_order() -> None:
    sender, receiver = pair()

    def send(name: int) -> None:
        for number in range(100):
            frames = [b"%d %d" % (name, number), b"", bytes([name]) * 3000 * (number % 7)]
            sender.send(partial(iter, frames))

    threads = [threading.Thread(target=send, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()

    def end() -> None:
        for thread in threads:
            thread.join()
        sender.close()

    ending = threading.Thread(target=end)
    ending.start()
    got = await drain(receiver)
    ending.join()
    assert len(got) == 900
    for name in range(3):
        mine = [i for i, frame in enumerate(got) if frame.startswith(b"%d " % name)]
        assert [got[i] for i in mine] == [b"%d %d" % (name, number) for number in range(100)]
        assert all(got[i + 2] == bytes([name]) * 3000 * (n % 7) for n, i in enumerate(mine))


async def test_half_a_frame_is_none() -> None:
    one, other = socket.socketpair()
    one.sendall(b"\x03\x00\x00\x00abc\x05\x00\x00\x00de")
    one.close()
    assert await drain(Receiver(other)) == [b"abc"]


def test_whoever_takes_nothing_is_not_waited_for_and_nothing_follows_half_a_frame() -> None:
    sender, receiver = pair(timeout_s=0.05)
    with pytest.raises(TimeoutError):
        sender.send(lambda: [bytes(10 << 20)])
    with pytest.raises(BrokenPipeError):
        sender.send(lambda: [b"more"])
    sender.close()
    receiver.close()


async def test_an_answer_that_nobody_takes_harms_no_order_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The trainer died: its orders are there still, and the way back is broken."""
    sender, receiver = pair()
    back, gone = socket.socketpair()
    poster = Poster(back)
    await poster.open()
    sender.send(lambda: [b"%d" % number for number in range(1000)])
    sender.close()
    gone.close()
    for _ in range(20):
        poster.post(b"answer")
        await anyio.lowlevel.checkpoint()
    assert len(await drain(receiver)) == 1000
    assert not caplog.records
    await poster.close()


def test_a_forked_child_holds_no_end_open() -> None:
    sender, receiver = pair()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # until the parent has looked
        os._exit(0)
    try:
        sender.close()
        assert anyio.run(drain, receiver) == []
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_hanging_up_ends_a_send_that_waits_and_a_receiver() -> None:
    sender, receiver = pair(timeout_s=30)
    raised: list[BaseException] = []

    def send() -> None:
        try:
            sender.send(lambda: [bytes(10 << 20)])
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    sender.hang_up()
    thread.join(250)
    assert len(raised) == 1
    sender.close()

    async def hear() -> Any:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain, receiver)
            await anyio.lowlevel.checkpoint()
            receiver.hang_up()

    anyio.run(hear)


def test_an_error_that_is_more_than_a_message_arrives_as_its_words() -> None:
    arrived = sent(ExceptionGroup("several", [ValueError("one")]))
    assert "several" in str(arrived)


# ------------------------------------------------------------------ what goes wrong on the way


class Wire:
    """Stands for a writer process: keeps the frames, or refuses them."""

    pid = 0

    def __init__(self) -> None:
        self.orders = self
        self.frames: list[Any] = []
        self.refuses = False

    def send(self, compose: Callable[[], Iterable[bytes]]) -> None:
        frames = list(compose())
        if self.refuses:
            raise MemoryError
        self.frames += map(decode_order, frames)


def save_order(number: int) -> Save:
    return Save(
        number=number, save_round=RoundName(number), position=Position("0" * 12, None, 0), nonce="0" * 12, begun_ns=0,
        alias={}, values=b"1",
        per_rank=b"1", metrics={}, user=b"null", config=b"null",
    )  # fmt: skip


def test_a_plan_that_did_not_get_through_is_sent_with_the_next_save() -> None:
    wire = Wire()
    connection = Connection(wire)  # type: ignore[arg-type]
    state = StateWalker(rank=0).walk({"a": torch.ones(3)})
    plan = plan_save(state, slab_bytes=8192, file_bytes=20_000)
    wire.refuses = True
    with pytest.raises(MemoryError):
        connection.begin(save_order(1), plan)
    wire.refuses = False
    for number in (2, 3):
        connection.begin(save_order(number), plan)
    assert [type(frame) for frame in wire.frames] == [Plan, Save, Save]


def test_a_window_of_a_save_that_was_stopped_does_not_reach_the_writer() -> None:
    wire, pool = Wire(), SlabPool(8192, 16384)
    job = SimpleNamespace(plan=SimpleNamespace(files=[]), number=1, stopped=True)
    target = ToWriter(job, Connection(wire), pool)  # type: ignore[arg-type]
    target.hand_over(None, pool.acquire(1))  # type: ignore[arg-type]
    assert wire.frames == []
    assert pool.statistics().used_slabs == 0


# ------------------------------------------------------------------ a writer that understands nothing any more


async def test_a_writer_that_cannot_go_on_has_nobody_wait_for_the_store() -> None:
    service = object.__new__(Service)
    service._store = RelayedStore(lambda number, question: None)

    def wait() -> None:
        with suppress(ConnectionError):
            service._store.get("key")

    waiting = threading.Thread(target=wait)
    waiting.start()
    orders: Any = SimpleNamespace(receive=fails)
    with pytest.raises(OSError, match="no descriptors"):
        await service._accept_all(orders, cast(Any, None))
    waiting.join(5)
    assert not waiting.is_alive()


async def fails() -> bytes:
    raise OSError("no descriptors")
